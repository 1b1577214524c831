# SPDX-License-Identifier: Apache-2.0
"""What top_k must answer, in NumPy alone, and the bitwise check against it.

It shares no code with the package. A score becomes an unsigned image in IEEE total
order, a score and its column become one integer that no other element of the row has,
and the k smallest of those integers are the answer.
"""

import ml_dtypes
import numpy as np

_CHUNK = 1 << 23  # elements that are looked at together, to bound the memory


def unsigned_bits(array):
    """The bit patterns of an array, as unsigned integers of the same width."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    return array.view(f"u{array.dtype.itemsize}")


def total_order(scores):
    """Unsigned integers that compare as the scores do in IEEE total order."""
    bits = unsigned_bits(scores)
    if scores.dtype.kind in "ub":
        return bits
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    if scores.dtype.kind == "i":
        return bits ^ sign
    return np.where(bits & sign, ~bits, bits | sign)


def pad_value(dtype):
    """What fills the slots beyond a short window."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return dtype.type(np.iinfo(dtype).min)
    if dtype.kind == "b":
        return dtype.type(False)
    infinity = dtype.type(-np.inf)
    return infinity if np.isneginf(float(infinity)) else ml_dtypes.finfo(dtype).min


def windows(shape, lengths=None, starts=None):
    """First column and one past the last column of each row's window, flat, int64."""
    batch, n = shape[:-1], shape[-1]

    def flat(given):
        return np.broadcast_to(np.asarray(given), batch).astype(np.int64).reshape(-1)

    first = flat(0 if starts is None else starts)
    last = flat(n) if lengths is None else first + np.maximum(flat(lengths), 0)
    first = np.clip(first, 0, n)
    return first, np.clip(last, first, n)


def _pick(scores, first, last, k, ordered):
    """Columns of the k largest of each row, -1 where the window has no more."""
    rows, n = scores.shape
    columns = np.arange(n, dtype=np.int64)
    outside = (columns < first[:, None]) | (columns >= last[:, None])
    rank = ~total_order(scores)  # ascending: the best first
    taken = min(k, n)
    if rank.dtype.itemsize == 8:
        order = np.lexsort((np.broadcast_to(columns, rank.shape), rank, outside))
        picked = order[:, :taken].astype(np.int64)
    else:
        element = (rank.astype(np.uint64) << np.uint64(32)) | columns.astype(np.uint64)
        element[outside] = np.iinfo(np.uint64).max
        if taken < n:
            element = np.partition(element, taken, axis=-1)[:, :taken]
        element.sort(axis=-1)
        picked = (element & np.uint64(0xFFFFFFFF)).astype(np.int64)
    missing = np.arange(taken) >= (last - first)[:, None]
    if not ordered:  # ascending columns, the missing ones last
        picked[missing] = n
        picked.sort(axis=-1)
    picked[missing] = -1
    indices = np.full((rows, k), -1, np.int32)
    indices[:, :taken] = picked
    return indices


def top_k(scores, k, lengths=None, starts=None, sorted=True):
    """The k largest scores of each row's window, and their columns.

    Args:
      scores: (..., n), any real dtype.
      k: how many; more than n gives padding.
      lengths: integers that broadcast to the leading axes, or None: up to n.
      starts: likewise, or None: 0.
      sorted: descending by score and then ascending by column, or by column alone.

    Returns:
      values (..., k) of the scores' dtype and indices (..., k) int32.
    """
    scores = np.asarray(scores)
    batch, n = scores.shape[:-1], scores.shape[-1]
    first, last = windows(scores.shape, lengths, starts)
    flat = scores.reshape(len(first), n)
    indices = np.full((len(flat), k), -1, np.int32)
    values = np.full((len(flat), k), pad_value(scores.dtype), scores.dtype)
    if n and k:
        step = max(1, _CHUNK // n)
        for i in range(0, len(flat), step):
            part = slice(i, i + step)
            picked = _pick(flat[part], first[part], last[part], k, sorted)
            indices[part] = picked
            gathered = np.take_along_axis(flat[part], np.maximum(picked, 0), -1)
            values[part] = np.where(picked < 0, values[part], gathered)
    return values.reshape(*batch, k), indices.reshape(*batch, k)


def paged_top_k(
    scores, k, table, page_size, page_stride, lengths=None, starts=None, sorted=False
):
    """The answer in slots: column c lies in table[c // size] * stride + c % size.

    Args:
      scores: (..., n), like k, lengths, starts and sorted as for top_k.
      k: how many.
      table: integers (..., pages); its leading axes are the first of the scores'.
      page_size: columns of a page.
      page_stride: what a page number counts.
      lengths: see top_k.
      starts: see top_k.
      sorted: see top_k.

    Returns:
      values (..., k) of the scores' dtype and slots (..., k) int32.
    """
    held = min(scores.shape[-1], table.shape[-1] * page_size)
    values, columns = top_k(scores[..., :held], k, lengths, starts, sorted)
    slots = np.full(columns.shape, -1, np.int32)
    for row in np.ndindex(columns.shape[:-1]):
        for slot, column in enumerate(columns[row].tolist()):
            if column >= 0:
                page = int(table[row[: table.ndim - 1]][column // page_size])
                number = page * page_stride + column % page_size
                slots[row][slot] = (number + 2**31) % 2**32 - 2**31  # as int32 wraps
    return values, slots


def check(
    result,
    scores,
    k,
    lengths=None,
    starts=None,
    sorted=True,
    labels=None,
    expected=None,
):
    """Raises AssertionError unless `result` is, bit for bit, the right answer.

    Args:
      result: the (values, indices) to judge.
      scores: what top_k was given, like the next four.
      k: how many.
      lengths: see top_k.
      starts: see top_k.
      sorted: see top_k.
      labels: names of the rows, for the message.
      expected: the oracle's answer where the caller already has it.
    """
    scores = np.asarray(scores)
    if expected is None:
        expected = top_k(scores, k, lengths, starts, sorted)
    values, indices = (np.asarray(x) for x in result)
    want_values, want_indices = expected
    for name, got, want in (
        ("values", values, want_values),
        ("indices", indices, want_indices),
    ):
        if got.dtype != want.dtype or got.shape != want.shape:
            raise AssertionError(
                f"{name}: expected {want.dtype}{list(want.shape)}, "
                f"got {got.dtype}{list(got.shape)}"
            )
    first, last = windows(scores.shape, lengths, starts)
    slots = (len(first), k)
    values, want_values, indices, want_indices = (
        x.reshape(slots) for x in (values, want_values, indices, want_indices)
    )
    got_bits, want_bits = unsigned_bits(values), unsigned_bits(want_values)
    wrong = (got_bits != want_bits) | (indices != want_indices)
    if not wrong.any():
        return
    rows = np.flatnonzero(wrong.any(axis=1))
    row = rows[0]
    slot = int(np.argmax(wrong[row]))
    label = f" ({labels[row]})" if labels is not None else ""

    def show(value, bits, index):
        return f"{value} (0x{bits[row, slot]:0{2 * bits.dtype.itemsize}x}) at {index}"

    missing = set(want_indices[row].tolist()) - set(indices[row].tolist())
    surplus = set(indices[row].tolist()) - set(want_indices[row].tolist())
    twice = len(indices[row]) - len(np.unique(indices[row]))
    raise AssertionError(
        f"{len(rows)} of {len(wrong)} rows differ; row {row}{label}, window "
        f"[{first[row]}, {last[row]}), k={k}, {scores.dtype}, sorted={sorted}: "
        f"{int(wrong[row].sum())} slots differ, the first is slot {slot}: expected "
        f"{show(want_values[row, slot], want_bits, want_indices[row, slot])}, got "
        f"{show(values[row, slot], got_bits, indices[row, slot])}; "
        f"{len(missing)} indices missing, {len(surplus)} not expected, "
        f"{twice} repeated in the row"
    )

# SPDX-License-Identifier: Apache-2.0
"""The reference: what ``top_k`` means, in XLA's own ops, for any dtype and platform.

It sorts whole rows by an integer image of the scores, and never touches them as floats,
so that the order is total and every bit of a NaN survives. ``jax.lax.top_k`` will not
do: with k <= 16 on GPUs it does not take equal scores by ascending index, on CPU it
rewrites the NaNs of small dtypes, and the partitioner gathers the rows it is given.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Stands for the column of an element outside the window: sorts after every column.
_OUTSIDE = np.iinfo(np.int32).max


def top_k_reference(
    scores: jax.Array,
    *others: jax.Array,
    k: int,
    window: tuple[str, ...],
    paging: tuple[int, int] | None,
    sorted: bool,
) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest of each row's window.

    Args:
        scores: ``(..., n)``, of any real dtype.
        *others: int32 ``(...)``, the operands that ``window`` names, and the page table
            if there is ``paging``, as the primitive has them.
        k: how many to select, possibly more than ``n``.
        window: which of "lengths" and "starts" are given.
        paging: page size and stride, or None.
        sorted: whether to order by value rather than by index.

    Returns:
        Values ``(..., k)`` of the scores' dtype, and indices ``(..., k)`` of int32.
    """
    rows = others[: len(window)]
    n = scores.shape[-1]
    rank = to_rank(scores)
    # Made from an operand, the columns carry its sharding, as lax.sort wants.
    column = lax.full_like(rank, 0, np.int32)
    column += lax.broadcasted_iota(np.int32, rank.shape, rank.ndim - 1)
    if window or paging:
        given = {name: row[..., None] for name, row in zip(window, rows, strict=True)}
        # With no overflow for any start: the distance of a column behind the start is
        # below 2**32, and is compared as an unsigned number.
        start = given.get("starts", jnp.zeros((), np.int32))
        inside = column >= start
        if "lengths" in given:
            behind = lax.bitcast_convert_type(column - start, np.uint32)
            length = jnp.maximum(given["lengths"], 0).astype(np.uint32)
            inside &= behind < length
        if paging:  # what no page holds is outside
            inside &= column // paging[0] < others[-1].shape[-1]
        # A valid element may have the largest rank too: the column tells them apart.
        rank = jnp.where(inside, rank, np.array(np.iinfo(rank.dtype).max, rank.dtype))
        column = jnp.where(inside, column, _OUTSIDE)

    rank, column = lax.sort((rank, column), dimension=-1, num_keys=2, is_stable=False)
    if not (isinstance(n, int) and k <= n):
        surplus = [(0, 0, 0)] * (rank.ndim - 1) + [(0, k, 0)]
        rank = lax.pad(rank, np.zeros((), rank.dtype), surplus)
        column = lax.pad(column, np.int32(_OUTSIDE), surplus)
    rank, column = rank[..., :k], column[..., :k]
    if not sorted:
        column, rank = lax.sort((column, rank), dimension=-1, num_keys=1)

    padding = column == _OUTSIDE
    pad_rank = to_rank(lax.full((), pad_value(scores.dtype), scores.dtype))
    values = from_rank(jnp.where(padding, pad_rank, rank), scores.dtype)
    indices = jnp.where(padding, -1, column)
    return values, slots_of(indices, others[-1], paging) if paging else indices


def slots_of(
    columns: jax.Array, table: jax.Array, paging: tuple[int, int]
) -> jax.Array:
    """The slots of ``columns`` ``(..., k)``; -1 stays -1."""
    if columns.size == 0 or table.shape[-1] == 0:
        return columns
    page_size, page_stride = map(np.int32, paging)
    place = jnp.maximum(columns, 0)
    page = jnp.take_along_axis(
        spread(table, columns), place // page_size, -1, mode="promise_in_bounds"
    )
    return jnp.where(columns < 0, -1, page * page_stride + place % page_size)


def spread(table: jax.Array, like: jax.Array) -> jax.Array:
    """A page table, with all leading axes of ``like``."""
    if table.ndim == like.ndim:
        return table
    batch = like.shape[:-1]
    lead = (*range(table.ndim - 1), len(batch))
    return lax.broadcast_in_dim(table, (*batch, table.shape[-1]), lead)


def empty_top_k(
    scores: jax.Array, *_: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """The answer if there are no rows, no columns, or k is 0: nothing but padding."""
    shape = (*scores.shape[:-1], k)
    values = jnp.full(shape, pad_value(scores.dtype), scores.dtype)
    return values, jnp.full(shape, -1, np.int32)


def pad_value(dtype: np.dtype) -> np.ndarray:
    """-inf, or the lowest value of a dtype that has none."""
    if dtype == np.bool_:
        return np.zeros((), dtype)
    if not jnp.issubdtype(dtype, np.floating):
        return np.array(jnp.iinfo(dtype).min).astype(dtype)
    infinity = np.array(-np.inf).astype(dtype)
    if np.isinf(infinity.astype(np.float64)):
        return infinity
    return np.array(jnp.finfo(dtype).min).astype(dtype)


# Ranks -------------------------------------------------------------------------------
#
# The rank of a score is an unsigned integer of as many bits, 0 for the first in order.
# Larger first: of unsigned numbers all bits are flipped; of signed integers all but the
# sign; of floats the same, unless the sign is set, where a larger magnitude belongs
# further behind. The sign stays, so a flip undoes itself.


def num_bits_of(dtype: np.dtype) -> int:
    if dtype == np.bool_:
        return 8
    floating = jnp.issubdtype(dtype, np.floating)
    return (jnp.finfo if floating else jnp.iinfo)(dtype).bits


def _has_sign(dtype: np.dtype) -> bool:
    unsigned = dtype == np.bool_ or jnp.issubdtype(dtype, np.unsignedinteger)
    return not unsigned and dtype != jnp.float8_e8m0fnu


def _flip(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    sign = 1 << (num_bits_of(dtype) - 1)
    if not _has_sign(dtype):
        return bits ^ np.array(2 * sign - 1, bits.dtype)
    flipped = bits ^ np.array(sign - 1, bits.dtype)
    if jnp.issubdtype(dtype, np.integer):
        return flipped
    return jnp.where(bits < np.array(sign, bits.dtype), flipped, bits)


def _turn_negatives(bits: jax.Array, step: int) -> jax.Array:
    # The only NaN of the fnuz dtypes has the bits of -0 and belongs behind the others.
    sign = np.uint8(0x80)
    turned = (bits + np.uint8(step % 256)) | sign
    return jnp.where(bits < sign, bits, turned)


def to_rank(scores: jax.Array) -> jax.Array:
    dtype, num_bits = scores.dtype, num_bits_of(scores.dtype)
    if dtype == np.bool_:
        bits = scores.astype(np.uint8)
    else:
        bits = lax.bitcast_convert_type(scores, jnp.dtype(f"uint{num_bits}"))
        if num_bits < 8:
            bits = bits.astype(np.uint8)
    rank = _flip(bits, dtype)
    return _turn_negatives(rank, -1) if dtype.name.endswith("fnuz") else rank


def from_rank(rank: jax.Array, dtype: np.dtype) -> jax.Array:
    if dtype.name.endswith("fnuz"):
        rank = _turn_negatives(rank, 1)
    bits = _flip(rank, dtype)
    if dtype == np.bool_:
        return bits.astype(np.bool_)
    return lax.bitcast_convert_type(
        bits.astype(jnp.dtype(f"uint{num_bits_of(dtype)}")), dtype
    )

# SPDX-License-Identifier: Apache-2.0
"""``paged_top_k``: a selection that answers where in paged memory the columns are.

Decided here: what a page table may be, and the words for what it may not. The slots are
made in the one custom call of ``top_k``, which has one operand more then.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_topk._arguments import INT32, checked_integers, checked_scores, name_of
from jax_topk._top_k import TopK, top_k_with_geometry

_INT32_MAX = int(INT32.max)


def paged_top_k(
    scores: ArrayLike,
    k: int,
    page_table: ArrayLike | None = None,
    *,
    page_size: int | None = None,
    offsets: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    sorted: bool = False,
    implementation: str | None = None,
) -> TopK:
    """``top_k`` whose indices are slots of a paged, or of a ragged, key cache.

    A cache for many sequences keeps the keys of each in pages of ``page_size`` slots,
    anywhere in one array of slots (Kwon et al., 2023, https://arxiv.org/abs/2309.06180).
    Column ``i`` of a row, the i-th key of its sequence, lies in the slot
    ``page_table[row, i // page_size] * page_size + i % page_size``. With ``offsets``
    instead, the keys of each sequence are one run of slots: ``offsets[row] + i``.

    What is selected, its order and its values are those of ``top_k``: ties go to the
    smaller column, and ``sorted=False`` is by ascending column, whatever the slots.

    Args:
        scores: ``(..., n)``, as for ``top_k``.
        k: how many to select, a static int. More than ``n`` only with ``lengths``.
        page_table: int32 ``(..., pages)``. Its leading axes are all, or the first few,
            of the leading axes of ``scores``: the rows along the others share a table,
            as with a table ``(batch, pages)`` for scores ``(batch, next_n, n)``. Page
            numbers are data: they are not checked, and slots wrap around like int32.
        page_size: the slots of a page, a static int, 1 or more.
        offsets: int32 ``(...)``, the first slot of each sequence, in place of a table;
            shared in the same way.
        lengths: as for ``top_k``. With it the table may hold fewer than ``n`` columns;
            a column that no page of the table holds is outside every window, so that
            nothing is ever read past the table.
        starts: as for ``top_k``.
        sorted: True: by descending value, equal ones by ascending column. False: by
            ascending column, which is faster.
        implementation: as for ``top_k``.

    Returns:
        Values ``(..., k)``, bit copies of the scores, and int32 slots ``(..., k)``. A
        row that offers fewer than ``k`` columns is padded at the end with the value
        -inf (the lowest value of a dtype that has no infinity) and the slot -1.

    Raises:
        TypeError: as for ``top_k``, or if ``page_table`` or ``offsets`` is not of an
            integer dtype, not exactly one of them is given, or ``page_size`` is no
            static int.
        ValueError: as for ``top_k``, or if the table's leading axes are not the first
            of the scores', ``page_size`` is not in 1 to 2**31 - 1, or the table holds
            fewer than ``n`` columns and ``lengths`` is not given.

    Example:
        Two sequences in pages of four slots; two query rows of each:

        >>> import jax.numpy as jnp
        >>> from jax_topk import paged_top_k
        >>> scores = jnp.array([[[1, 9, 2, 8, 7.0]] * 2, [[6, 1, 5, 2, 4.0]] * 2])
        >>> page_table = jnp.array([[7, 2], [4, -1]])  # sequence 1 needs one page only
        >>> lengths = jnp.array([[5, 4], [2, 3]])
        >>> options = {"page_size": 4, "lengths": lengths}
        >>> print(paged_top_k(scores, 3, page_table, **options).indices)
        [[[29 31  8]
          [29 30 31]]
        <BLANKLINE>
         [[16 17 -1]
          [16 17 18]]]

        The keys of both, one sequence after the other:

        >>> print(paged_top_k(scores[:, 0], 2, offsets=jnp.array([0, 5])).indices)
        [[1 3]
         [5 7]]
    """
    scores = checked_scores("paged_top_k", scores)
    pages = _checked_pages(scores, page_table, page_size, offsets, lengths is not None)
    return top_k_with_geometry(
        scores,
        k,
        lengths=lengths,
        starts=starts,
        sorted=sorted,
        implementation=implementation,
        pages=pages,
        function="paged_top_k",
    )


def _checked_pages(
    scores: jax.Array, page_table: Any, page_size: Any, offsets: Any, ragged: bool
) -> tuple[jax.Array, tuple[int, int]]:
    """The table and the ``paging`` that the primitive takes."""
    got = f"(scores.shape={scores.shape})"
    if (page_table is None) == (offsets is None):
        raise TypeError(
            "paged_top_k requires either a page_table or offsets; got "
            f"{'neither' if offsets is None else 'both'} {got}"
        )
    if (page_table is None) != (page_size is None):
        raise TypeError(
            "paged_top_k requires a page_size with a page_table, and none with "
            f"offsets; got page_size={page_size!r} {got}"
        )
    if offsets is not None:  # one page, that never ends, at any slot
        table = checked_integers("paged_top_k", "offsets", offsets, got)[..., None]
        _check_axes("offsets", table, scores, f"offsets.shape={table.shape[:-1]} {got}")
        return table, (_INT32_MAX, 1)

    try:
        # An array of one integer has an index too, but is no static number.
        array = isinstance(page_size, jax.Array | np.ndarray)
        size = None if array else operator.index(page_size)
    except TypeError:
        size = None
    if size is None:
        raise TypeError(
            "paged_top_k requires page_size to be a static int; got "
            f"{name_of(page_size)} {got}"
        )
    if not 1 <= size <= _INT32_MAX:
        raise ValueError(
            f"paged_top_k requires page_size to be from 1 to {_INT32_MAX}; got "
            f"page_size={size} {got}"
        )
    table = checked_integers("paged_top_k", "page_table", page_table, got)
    got = f"page_table.shape={table.shape} {got}"
    if not table.ndim:
        raise ValueError(
            f"paged_top_k requires a page_table with at least one axis; got {got}"
        )
    _check_axes("page_table", table, scores, got)
    held, n = table.shape[-1] * size, scores.shape[-1]
    if not ragged and isinstance(held, int) and isinstance(n, int) and held < n:
        raise ValueError(
            f"paged_top_k requires a page_table that holds all {n} columns, unless "
            f"lengths is given; got one for {held}, page_size={size}, {got}"
        )
    return table, (size, size)


def _check_axes(name: str, table: jax.Array, scores: jax.Array, got: str) -> None:
    batch, lead = scores.shape[:-1], table.shape[:-1]
    if lead != batch[: len(lead)]:
        raise ValueError(
            f"paged_top_k requires {name} to have the first of the leading axes of "
            f"scores, {batch}; got {got}"
        )

# SPDX-License-Identifier: Apache-2.0
"""The function ``top_k`` and its result.

Decided here: what it promises, and which of its arguments become data of the program.
All of them are checked before anything is traced.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import export
from jax.typing import ArrayLike

from jax_topk import _plan
from jax_topk._arguments import (
    checked_k,
    checked_scores,
    checked_sorted,
    checked_window,
    name_of,
)
from jax_topk._primitive import bind_top_k


class TopK(NamedTuple):
    """The result of ``top_k``: a tuple, and so a pytree.

    Attributes:
        values: ``(..., k)`` of the scores' dtype.
        indices: ``(..., k)`` of int32.
    """

    values: jax.Array
    indices: jax.Array


# So that an exported function may return one.
export.register_namedtuple_serialization(TopK, serialized_name="jax_topk.TopK")


def top_k(
    scores: ArrayLike,
    k: int,
    *,
    lengths: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    sorted: bool = True,
    implementation: str | None = None,
) -> TopK:
    """Selects the ``k`` largest scores of each row, exactly, and their columns.

    The selected axis is the last one; all others are batch. A row is the window
    ``[start, start + length)`` of its columns, cut with ``[0, n)``.

    The order is total, that of ``jax.lax.top_k`` on CPU: +NaN > +inf > ... > +0 > -0 >
    ... > -inf > -NaN, and of equal scores the one with the smaller index comes first.
    The answer is the same, bit for bit, on every platform and in every implementation.

    Args:
        scores: ``(..., n)``, of a real dtype. float32, bfloat16 and float16 are native
            on CPU and CUDA; other dtypes go through the XLA reference.
        k: how many to select, a static int. More than ``n`` only with ``lengths``.
        lengths: int32, broadcastable to ``scores.shape[:-1]``; if absent, each window
            ends at column ``n``. Any value is allowed: a row of negative length is
            empty. Other integer dtypes are clipped to int32.
        starts: likewise the first column of each window; column 0 if absent.
        sorted: the order of the answer, never its set. True: by descending value, equal
            ones by ascending index. False: by ascending index, which is faster.
        implementation: None, which lets the planner choose, or the name of the only
            implementation to use: "xla", "cpu", "row", "split" or "cluster".

    Returns:
        Values ``(..., k)``, bit copies of the scores, and int32 indices ``(..., k)``,
        which are columns of ``scores`` whatever the start. A row that offers fewer than
        ``k`` columns is padded at the end with the value -inf (the lowest value of a
        dtype that has no infinity) and the index -1.

    Raises:
        TypeError: if ``scores`` is no array of a real dtype, ``k`` no static int,
            ``lengths`` or ``starts`` not of an integer dtype, or ``sorted`` or
            ``implementation`` not static.
        ValueError: if ``scores`` has no axis or more than 2**31 - 1 columns, ``k`` is
            negative or without ``lengths`` more than ``n``, ``lengths`` or ``starts``
            do not broadcast, or ``implementation`` is unknown or cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_topk import top_k
        >>> scores = jnp.array([[3.0, 9.0, 4.0, 7.0], [5.0, 1.0, 8.0, 6.0]])
        >>> values, indices = top_k(scores, 2)
        >>> print(values)
        [[9. 7.]
         [8. 6.]]
        >>> print(indices)
        [[1 3]
         [2 3]]

        Ragged rows, in the order of their columns, as a gather wants them:

        >>> lengths = jnp.array([3, 1])
        >>> print(top_k(scores, 2, lengths=lengths, sorted=False).indices)
        [[ 1  2]
         [ 0 -1]]
    """
    return top_k_with_geometry(
        scores,
        k,
        lengths=lengths,
        starts=starts,
        sorted=sorted,
        implementation=implementation,
    )


def top_k_with_geometry(
    scores: ArrayLike,
    k: int,
    *,
    lengths: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    sorted: bool = True,
    implementation: str | None = None,
    geometry: tuple[int, ...] = (0, 0, 0, 0, 0),
    pages: tuple[jax.Array, tuple[int, int]] | None = None,
    function: str = "top_k",
) -> TopK:
    """``top_k`` with a plan given by hand, for tests; zeros leave it to the planner.

    The five numbers are CTAs a row, capacity, samples, grid and CTAs an SM, as in
    ``Geometry`` of ``ffi/plan.h``. They bend the CUDA kernels' paths, never an answer.
    ``pages`` is what the primitive takes for ``paged_top_k``: the table and ``paging``.
    ``function`` is whose errors they are.
    """
    scores = checked_scores(function, scores)
    k = checked_k(function, k, scores, ragged=lengths is not None)
    got = f"(scores.shape={scores.shape}, k={k})"
    sorted = checked_sorted(function, sorted, got)
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(
            f"{function} requires implementation to be None or a static name; got "
            f"{name_of(implementation)} {got}"
        )
    if implementation not in (None, *_plan.IMPLEMENTATIONS):
        raise ValueError(
            f"{function} requires implementation to be None or one of "
            f"{', '.join(map(repr, _plan.IMPLEMENTATIONS))}; got {implementation!r} "
            f"{got}"
        )
    given = checked_window(function, lengths, starts, scores, got)
    return TopK(
        *bind_top_k(
            scores,
            *given.values(),
            *(() if pages is None else pages[:1]),
            k=k,
            window=tuple(given),
            paging=None if pages is None else pages[1],
            sorted=sorted,
            implementation=implementation,
            geometry=tuple(map(int, geometry)) if any(geometry) else (),
        )
    )

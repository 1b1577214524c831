# SPDX-License-Identifier: Apache-2.0
"""The function ``top_k``: what its arguments may be, and the words for what may not.

Everything is checked here, before anything is traced.
"""

from __future__ import annotations

import operator
import reprlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import ShapedArray, Tracer
from jax.typing import ArrayLike

from jax_topk import _plan
from jax_topk._primitive import WINDOW, bind_top_k

_INT32 = np.iinfo(np.int32)


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
            implementation to use: "xla", "cpu", "row" or "split".

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
) -> TopK:
    """``top_k`` with a plan given by hand, for tests; zeros leave it to the planner.

    The five numbers are CTAs a row, capacity, samples, grid and CTAs an SM, as in
    ``Geometry`` of ``ffi/plan.h``. They bend the CUDA kernels' paths, never an answer.
    ``pages`` is what the primitive takes for ``paged_top_k``: the table and ``paging``.
    """
    scores = _checked_scores(scores)
    k = _checked_k(k, scores, ragged=lengths is not None)
    got = f"(scores.shape={scores.shape}, k={k})"
    if not isinstance(sorted, bool | np.bool_):
        raise TypeError(
            f"top_k requires sorted to be a static bool; got {_name(sorted)} {got}"
        )
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(
            "top_k requires implementation to be None or a static name; got "
            f"{_name(implementation)} {got}"
        )
    if implementation not in (None, *_plan.IMPLEMENTATIONS):
        raise ValueError(
            "top_k requires implementation to be None or one of "
            f"{', '.join(map(repr, _plan.IMPLEMENTATIONS))}; got {implementation!r} "
            f"{got}"
        )
    given = {
        name: _checked_rows(name, rows, scores, got)
        for name, rows in zip(WINDOW, (lengths, starts), strict=True)
        if rows is not None
    }
    return TopK(
        *bind_top_k(
            scores,
            *given.values(),
            *(() if pages is None else pages[:1]),
            k=k,
            window=tuple(given),
            paging=None if pages is None else pages[1],
            sorted=bool(sorted),
            implementation=implementation,
            geometry=tuple(map(int, geometry)) if any(geometry) else (),
        )
    )


def _name(x: Any) -> str:
    """Words for an argument in an error: its type and, of an array, its JAX type."""
    if isinstance(x, Tracer):
        return f"a traced value, {jax.typeof(x)}"
    if isinstance(x, jax.Array | np.ndarray):
        return f"an array, {x.dtype}{list(x.shape)}"
    return f"{type(x).__name__} {reprlib.repr(x)}"


def _array_type(x: Any) -> Any:
    """The shape and dtype of what jax.numpy takes for an array; otherwise None."""
    if isinstance(x, jax.ShapeDtypeStruct):  # has a JAX type, but no elements
        return None
    try:
        aval = jax.typeof(x)
    except (TypeError, ValueError):
        return None
    return aval if isinstance(aval, ShapedArray) else None


def _checked_scores(scores: Any) -> jax.Array:
    if hasattr(scores, "__jax_array__"):
        scores = jnp.asarray(scores)
    aval = _array_type(scores)
    if aval is None:
        raise TypeError(f"top_k requires scores to be an array; got {_name(scores)}")
    # jax.lax.top_k takes bool; float0 and PRNG keys are no numbers at all.
    if aval.dtype != np.bool_ and not (
        jnp.issubdtype(aval.dtype, np.number)
        and not jnp.issubdtype(aval.dtype, np.complexfloating)
    ):
        raise TypeError(
            f"top_k requires scores of a real dtype; got {aval.dtype} "
            f"(scores.shape={aval.shape})"
        )
    if not aval.shape:
        raise ValueError(
            "top_k requires scores with at least one axis; got a scalar "
            f"(scores.shape={aval.shape})"
        )
    n = aval.shape[-1]
    if isinstance(n, int) and n > _INT32.max:
        raise ValueError(
            f"top_k requires at most {_INT32.max} columns, as indices are int32; got "
            f"{n} (scores.shape={aval.shape})"
        )
    return scores if isinstance(scores, jax.Array) else jnp.asarray(scores)


def _checked_k(k: Any, scores: jax.Array, *, ragged: bool) -> int:
    shape = f"(scores.shape={scores.shape})"
    try:
        # An array of one integer has an index too, but is no static number.
        number = None if isinstance(k, jax.Array | np.ndarray) else operator.index(k)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"top_k requires k to be a static int; got {_name(k)} {shape}")
    if number < 0:
        raise ValueError(f"top_k requires k to be 0 or more; got k={number} {shape}")
    n = scores.shape[-1]
    if not ragged and number > n:
        raise ValueError(
            f"top_k requires k to be at most the number of columns, {n}, unless "
            f"lengths is given; got k={number} {shape}"
        )
    if number > _INT32.max:
        raise ValueError(
            f"top_k requires k to be at most {_INT32.max}; got k={number} {shape}"
        )
    return number


def _checked_rows(name: str, rows: Any, scores: jax.Array, got: str) -> jax.Array:
    """``rows`` as int32 of the scores' leading shape."""
    rows = _checked_integers(name, rows, got)
    batch = scores.shape[:-1]
    try:
        return rows if rows.shape == batch else jnp.broadcast_to(rows, batch)
    except ValueError as error:
        raise ValueError(
            f"top_k requires {name} to broadcast to the leading axes of scores, "
            f"{batch}; got {name}.shape={np.shape(rows)} {got}"
        ) from error


def _checked_integers(name: str, rows: Any, got: str) -> jax.Array:
    """``rows`` as int32."""
    if isinstance(rows, int) and not isinstance(rows, bool):
        rows = np.array(min(max(rows, _INT32.min), _INT32.max), np.int32)
    if hasattr(rows, "__jax_array__"):
        rows = jnp.asarray(rows)
    # Of a NumPy array its own dtype counts, which JAX might narrow without a word.
    if isinstance(rows, np.generic):
        rows = np.asarray(rows)
    xp: Any = np if isinstance(rows, np.ndarray) else jnp
    aval: Any = rows if xp is np else _array_type(rows)
    if aval is None or not jnp.issubdtype(aval.dtype, np.integer):
        what = _name(rows) if aval is None else f"{name} of {aval.dtype}"
        raise TypeError(
            f"top_k requires {name} to be an array of integers; got {what} {got}"
        )
    # Clipped, not wrapped: a length beyond int32 is long, not negative.
    info = jnp.iinfo(aval.dtype)
    low, high = max(int(info.min), _INT32.min), min(int(info.max), _INT32.max)
    if (low, high) != (info.min, info.max):
        with jax.enable_x64(True):  # rows may come from where it was on
            rows = xp.clip(rows, low, high).astype(np.int32)
    return jnp.asarray(rows, np.int32)

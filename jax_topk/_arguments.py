# SPDX-License-Identifier: Apache-2.0
"""What the arguments of a selection may be, and the words for what they may not.

Each check gets the name of the function whose caller should read the words.
"""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from jax_topk._primitive import WINDOW

INT32 = np.iinfo(np.int32)


def name_of(x: Any) -> str:
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


def checked_scores(function: str, scores: Any) -> jax.Array:
    if hasattr(scores, "__jax_array__"):
        scores = jnp.asarray(scores)
    aval = _array_type(scores)
    if aval is None:
        raise TypeError(
            f"{function} requires scores to be an array; got {name_of(scores)}"
        )
    # jax.lax.top_k takes bool; float0 and PRNG keys are no numbers at all.
    if aval.dtype != np.bool_ and not (
        jnp.issubdtype(aval.dtype, np.number)
        and not jnp.issubdtype(aval.dtype, np.complexfloating)
    ):
        raise TypeError(
            f"{function} requires scores of a real dtype; got {aval.dtype} "
            f"(scores.shape={aval.shape})"
        )
    if not aval.shape:
        raise ValueError(
            f"{function} requires scores with at least one axis; got a scalar "
            f"(scores.shape={aval.shape})"
        )
    n = aval.shape[-1]
    if isinstance(n, int) and n > INT32.max:
        raise ValueError(
            f"{function} requires at most {INT32.max} columns, as indices are int32; "
            f"got {n} (scores.shape={aval.shape})"
        )
    return scores if isinstance(scores, jax.Array) else jnp.asarray(scores)


def checked_k(function: str, k: Any, scores: jax.Array, *, ragged: bool) -> int:
    shape = f"(scores.shape={scores.shape})"
    try:
        # An array of one integer has an index too, but is no static number.
        number = None if isinstance(k, jax.Array | np.ndarray) else operator.index(k)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(
            f"{function} requires k to be a static int; got {name_of(k)} {shape}"
        )
    if number < 0:
        raise ValueError(
            f"{function} requires k to be 0 or more; got k={number} {shape}"
        )
    n = scores.shape[-1]
    if not ragged and number > n:
        raise ValueError(
            f"{function} requires k to be at most the number of columns, {n}, unless "
            f"lengths is given; got k={number} {shape}"
        )
    if number > INT32.max:
        raise ValueError(
            f"{function} requires k to be at most {INT32.max}; got k={number} {shape}"
        )
    return number


def checked_sorted(function: str, sorted: Any, got: str) -> bool:
    if not isinstance(sorted, bool | np.bool_):
        raise TypeError(
            f"{function} requires sorted to be a static bool; got {name_of(sorted)} "
            f"{got}"
        )
    return bool(sorted)


def checked_window(
    function: str, lengths: Any, starts: Any, scores: jax.Array, got: str
) -> dict[str, jax.Array]:
    """Those of lengths and starts that are given, as int32 of the leading shape."""
    return {
        name: _checked_rows(function, name, rows, scores, got)
        for name, rows in zip(WINDOW, (lengths, starts), strict=True)
        if rows is not None
    }


def _checked_rows(
    function: str, name: str, rows: Any, scores: jax.Array, got: str
) -> jax.Array:
    batch = scores.shape[:-1]
    rows = checked_integers(function, name, rows, got)
    try:
        return rows if rows.shape == batch else jnp.broadcast_to(rows, batch)
    except ValueError as error:
        raise ValueError(
            f"{function} requires {name} to broadcast to the leading axes of scores, "
            f"{batch}; got {name}.shape={np.shape(rows)} {got}"
        ) from error


def checked_integers(function: str, name: str, rows: Any, got: str) -> jax.Array:
    """``rows`` as int32."""
    if isinstance(rows, jax.Array) and rows.dtype == np.int32:
        return rows
    if isinstance(rows, int) and not isinstance(rows, bool):
        rows = np.array(min(max(rows, INT32.min), INT32.max), np.int32)
    if hasattr(rows, "__jax_array__"):
        rows = jnp.asarray(rows)
    # Of a NumPy array its own dtype counts, which JAX might narrow without a word.
    if isinstance(rows, np.generic):
        rows = np.asarray(rows)
    xp: Any = np if isinstance(rows, np.ndarray) else jnp
    aval: Any = rows if xp is np else _array_type(rows)
    if aval is None or not jnp.issubdtype(aval.dtype, np.integer):
        what = name_of(rows) if aval is None else f"{name} of {aval.dtype}"
        raise TypeError(
            f"{function} requires {name} to be an array of integers; got {what} {got}"
        )
    # Clipped, not wrapped: a length beyond int32 is long, not negative.
    info = jnp.iinfo(aval.dtype)
    low, high = max(int(info.min), INT32.min), min(int(info.max), INT32.max)
    if (low, high) != (info.min, info.max):
        with jax.enable_x64(True):  # rows may come from where it was on
            rows = xp.clip(rows, low, high).astype(np.int32)
    return jnp.asarray(rows, np.int32)

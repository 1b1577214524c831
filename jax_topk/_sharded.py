# SPDX-License-Identifier: Apache-2.0
"""The function ``sharded_top_k``: the selected axis split over devices.

Decided here: what a shard sends, how candidates merge exactly, and what their
derivatives move. No code knows of hosts or devices: mesh axes alone are named.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jax_topk._arguments import (
    INT32,
    checked_k,
    checked_scores,
    checked_sorted,
    checked_window,
)
from jax_topk._reference import empty_top_k, from_rank, num_bits_of, to_rank
from jax_topk._top_k import TopK, top_k


def sharded_top_k(
    scores: ArrayLike,
    k: int,
    axis_name: str | tuple[str, ...],
    *,
    lengths: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    sorted: bool = True,
) -> TopK:
    """``top_k`` of rows whose columns are split over mesh axes, inside ``shard_map``.

    Each device holds as many columns of a row, in the order of the mesh axis. It
    selects among its own, gathers ``k`` candidates of every shard, and selects among
    those. The answer is, bit for bit, that of ``top_k`` for the whole rows, the same on
    every device, and its type says so: ``out_specs`` need not name the axis.

    Over several mesh axes the candidates merge axis by axis, the last name first, so
    that no device gathers more than one axis' worth of them. Each axis costs one
    all-gather, of ``k`` values and ``k`` indices a shard.

    Derivatives are those of ``top_k``. Reverse mode moves nothing: each device adds to
    the columns that it holds. Forward mode sums ``k`` tangents a row over the devices.

    Args:
        scores: ``(..., width)``, this device's columns, of a real dtype. All shards
            have the same width; n is their sum. Dtypes as in ``top_k``.
        k: how many to select of the n columns, a static int, possibly more than
            ``width``. More than n only with ``lengths``.
        axis_name: the mesh axis that the columns are split over, or a tuple of several
            in the order of the ``PartitionSpec``, whose first varies slowest.
        lengths: int32, broadcastable to ``scores.shape[:-1]``, the same on all shards;
            counts columns of the whole row, as in ``top_k``.
        starts: likewise the first column of each window, in the whole row.
        sorted: the order of the answer, as in ``top_k``.

    Returns:
        Values ``(..., k)`` and int32 indices ``(..., k)``, which are columns of the
        whole row, padded as in ``top_k``.

    Raises:
        TypeError: as ``top_k``, or if ``axis_name`` is no str and no tuple of str.
        ValueError: as ``top_k`` for the whole row, or if ``axis_name`` does not name
            axes of a ``shard_map`` around the call, or one of them twice.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> from jax_topk import sharded_top_k
        >>> shape, names = (jax.device_count(),), ("context",)
        >>> mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,))
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=P(None, "context"), out_specs=P())
        ... def select(scores):
        ...     return sharded_top_k(scores, 3, "context")
        >>> print(select(jnp.arange(64.0).reshape(2, 32) % 30).indices)
        [[29 28 27]
         [27 26 25]]
    """
    names = _checked_names(axis_name)
    scores = checked_scores("sharded_top_k", scores)
    k = checked_k("sharded_top_k", k, scores, ragged=True)
    width, shards = scores.shape[-1], math.prod(map(lax.axis_size, names))
    got = (
        f"(scores.shape={scores.shape} on each of {shards} shards over {names!r}, "
        f"k={k})"
    )
    n = width * shards
    if isinstance(n, int) and n > INT32.max:
        raise ValueError(
            f"sharded_top_k requires at most {INT32.max} columns in all shards, as "
            f"indices are int32; got {n} {got}"
        )
    if lengths is None and k > n:
        raise ValueError(
            "sharded_top_k requires k to be at most the number of columns in all "
            f"shards, {n}, unless lengths is given; got k={k} {got}"
        )
    sorted = checked_sorted("sharded_top_k", sorted, got)
    given = checked_window("sharded_top_k", lengths, starts, scores, got)
    if 0 in (k, *scores.shape):  # nothing to gather
        return TopK(*empty_top_k(scores, k=k))
    values, indices = _select(k, names, sorted, lax.stop_gradient(scores), given)
    if jnp.issubdtype(scores.dtype, np.inexact):
        values: Any = _differentiable(names, scores, values, indices)
    return TopK(values, indices)


def _checked_names(axis_name: Any) -> tuple[str, ...]:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "sharded_top_k requires axis_name to be a str or a tuple of str; got "
            f"{axis_name!r}"
        )
    if len(set(names)) != len(names):
        raise ValueError(
            f"sharded_top_k requires each mesh axis once; got axis_name={axis_name!r}"
        )
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                "sharded_top_k requires axis_name to name axes of a shard_map around "
                f"it; got {name!r}, which is none (axis_name={axis_name!r})"
            ) from None
    return names


def _select(
    k: int,
    names: tuple[str, ...],
    sorted: bool,
    scores: jax.Array,
    given: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    width = scores.shape[-1]
    offset = lax.axis_index(names) * width  # of this device's columns, or its group's
    stop = None

    # The candidates of a group of shards: its best in order of their columns, which are
    # global here, and padding at the end. At first a group is one shard.
    local: dict[str, Any] = {}
    if given:
        first, stop = _window(scores.shape, **given)
        local["starts"] = _beyond(first, offset)
        local["lengths"] = _beyond(stop, offset) - local["starts"]
    values, indices = top_k(scores, min(k, width), **local, sorted=False)
    indices = jnp.where(indices < 0, -1, indices + offset)

    # Neighbours along the last axis first: their groups make up a wider group.
    for i, name in reversed(tuple(enumerate(names))):
        packed = _pack(values, indices)
        if stop is not None:
            # In a row's groups from left to right, only the first and the last that
            # the window meets may have padding. With the former's at its front, all
            # candidates of a row are neighbours and so a window again.
            padding = jnp.sum(indices < 0, axis=-1, dtype=np.int32)
            goes_on = _beyond(stop, offset) > width
            packed = _rotated(packed, jnp.where(goes_on, padding, 0))
        # Of an array that all devices have alike, its type says so too.
        packed = lax.all_gather(
            packed, name, axis=packed.ndim - 1, tiled=True, to="invarying"
        )
        values, columns = _unpack(packed, scores.dtype)
        width *= lax.axis_size(name)
        offset = lax.axis_index(names[:i]) * width if i else 0
        # Columns ascend, so the tie rule of top_k is that of the whole row.
        last = i == 0
        values, places = top_k(
            values,
            k if last else min(k, width),
            **_candidates(columns) if given else {},
            sorted=sorted and last,
        )
        taken = jnp.take_along_axis(
            columns, jnp.maximum(places, 0), axis=-1, mode="promise_in_bounds"
        )
        indices = jnp.where(places < 0, -1, taken)
    return values, indices


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable(
    names: tuple[str, ...], scores: jax.Array, values: jax.Array, indices: jax.Array
) -> Any:
    """The values, which depend on the scores at the indices."""
    del names, scores, indices
    return values


@_differentiable.defjvp
def _jvp(names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    scores, *answer = primals
    # As in top_k: what a checkpoint's policy may save.
    values, indices = checkpoint_name(answer, "top_k")
    dscores = tangents[0]
    # Every tangent is with one device. The sum's transpose leaves all where it is.
    width = dscores.shape[-1]
    places = indices - lax.axis_index(names) * width
    mine = (indices >= 0) & (places >= 0) & (places < width)
    places = jnp.clip(places, 0, width - 1)
    picked = jnp.take_along_axis(dscores, places, -1, mode="promise_in_bounds")
    # Called anew, so that the values have a second derivative too.
    values = _differentiable(names, scores, values, indices)
    return values, lax.psum(jnp.where(mine, picked, 0), names)


def _window(
    shape: tuple[int, ...],
    lengths: jax.Array | None = None,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """First column and the one past the last, not yet clamped; nothing overflows."""
    first = jnp.zeros(shape[:-1], np.int32) if starts is None else starts
    if lengths is None:
        return first, jnp.full_like(first, INT32.max)
    room = INT32.max - jnp.maximum(first, 0)
    return first, first + jnp.minimum(jnp.maximum(lengths, 0), room)


def _beyond(column: jax.Array, offset: jax.Array | int) -> jax.Array:
    """``column - offset`` where that is positive, else 0; nothing overflows."""
    return jnp.maximum(column, offset) - offset


def _candidates(columns: jax.Array) -> dict[str, Any]:
    """The window of those that are no padding, which are neighbours."""
    size = columns.shape[-1]
    valid = columns >= 0
    place = lax.broadcasted_iota(np.int32, columns.shape, columns.ndim - 1)
    place = jnp.where(valid, place, size)
    return {
        "lengths": jnp.sum(valid, axis=-1, dtype=np.int32),
        "starts": jnp.min(place, axis=-1),
    }


def _rotated(packed: jax.Array, shift: jax.Array) -> jax.Array:
    """The last ``shift`` of the last axis come to its front."""
    size = packed.shape[-1]
    shape = (*shift.shape, size)
    place = lax.broadcasted_iota(np.int32, shape, shift.ndim) - shift[..., None]
    place = jnp.where(place < 0, place + size, place)
    return jnp.take_along_axis(
        packed, place[..., None, :], axis=-1, mode="promise_in_bounds"
    )


# One array for both, so that one collective moves them: planes (..., planes, m) of
# unsigned words as wide as a score, or of 32 bits if a score is wider. As integers, so
# that no bit of a NaN can change on the way.


def _pack(values: jax.Array, indices: jax.Array) -> jax.Array:
    rank = to_rank(values)
    word = jnp.dtype(f"uint{min(num_bits_of(rank.dtype), 32)}")

    def planes(x: jax.Array) -> jax.Array:
        words = lax.bitcast_convert_type(x, word)
        return words[..., None, :] if words.ndim == x.ndim else words.mT

    return jnp.concatenate([planes(rank), planes(indices)], axis=-2)


def _unpack(packed: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    num_bits = max(num_bits_of(dtype), 8)

    def joined(planes: jax.Array, dtype: Any) -> jax.Array:
        words = planes.mT if planes.shape[-2] > 1 else planes[..., 0, :]
        return lax.bitcast_convert_type(words, jnp.dtype(dtype))

    split = max(num_bits // 32, 1)
    rank = joined(packed[..., :split, :], f"uint{num_bits}")
    return from_rank(rank, dtype), joined(packed[..., split:, :], np.int32)

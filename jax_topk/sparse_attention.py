# SPDX-License-Identifier: Apache-2.0
"""Sparse attention with a lightning indexer, in plain JAX around ``paged_top_k``.

One layer, for every phase of a model's life: ``extend`` appends tokens to a key cache
and attends from them, which is prefill (to an empty cache), chunked prefill, decoding
(one token), and multi-token prediction (a few). ``indexer_loss`` trains the indexer.
Parameters are a dict of arrays; what is static is in ``Config``.

After DeepSeek-V3.2 (DeepSeek-AI, 2025, https://arxiv.org/abs/2512.02556, section 2.1),
with grouped queries (Ainslie et al., 2023, https://arxiv.org/abs/2305.13245) in place
of its latent attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_topk._paged import paged_top_k
from jax_topk._top_k import top_k

Params = dict[str, jax.Array]


class Config(NamedTuple):
    """The static numbers of a layer.

    Attributes:
        width: features of a token.
        heads: query heads.
        groups: key and value heads; ``heads // groups`` queries share each.
        head_dim: features of a head, even.
        index_heads: heads of the indexer.
        index_dim: features of a head of the indexer, even.
        k: keys that a token attends to.
        window: positions that a token sees, itself included; None: all before it.
    """

    width: int
    heads: int
    groups: int
    head_dim: int
    index_heads: int
    index_dim: int
    k: int
    window: int | None = None


class Cache(NamedTuple):
    """What is kept of past tokens; ``new_cache`` and ``new_paged_cache`` make one.

    Slots hold keys and values. Those of a sequence are one run of slots, or pages of
    slots if there is a page table. The indexer reads the keys of a whole sequence at
    every step, so its own are kept in order.

    Attributes:
        keys: ``(slots, groups, head_dim)``.
        values: ``(slots, groups, head_dim)``.
        index_keys: ``(batch, n, index_dim)``.
        lengths: int32 ``(batch,)``, the tokens of each sequence so far.
        page_table: int32 ``(batch, pages)`` of pages of ``n // pages`` slots, or None.
        index_scales: float32 ``(batch, n)``, by which quantised index keys are to be
            multiplied; None if they are not quantised.
    """

    keys: jax.Array
    values: jax.Array
    index_keys: jax.Array
    lengths: jax.Array
    page_table: jax.Array | None = None
    index_scales: jax.Array | None = None


class Projected(NamedTuple):
    """What a layer makes of tokens ``(batch, t, width)``.

    Attributes:
        queries: ``(batch, t, heads, head_dim)``.
        keys: ``(batch, t, groups, head_dim)``.
        values: ``(batch, t, groups, head_dim)``.
        index_queries: ``(batch, t, index_heads, index_dim)``.
        index_keys: ``(batch, t, index_dim)``.
        index_weights: ``(batch, t, index_heads)``.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    index_queries: jax.Array
    index_keys: jax.Array
    index_weights: jax.Array


def init(key: jax.Array, config: Config, dtype: DTypeLike = float) -> Params:
    """Parameters of a layer, normal with a variance of one over the inputs."""
    c = config
    shapes = {
        "query": (c.width, c.heads, c.head_dim),
        "key": (c.width, c.groups, c.head_dim),
        "value": (c.width, c.groups, c.head_dim),
        "output": (c.heads, c.head_dim, c.width),
        "index_query": (c.width, c.index_heads, c.index_dim),
        "index_key": (c.width, c.index_dim),
        "index_weight": (c.width, c.index_heads),
    }
    keys = jax.random.split(key, len(shapes))
    params = {}
    for one, (name, shape) in zip(keys, shapes.items(), strict=True):
        inputs = c.heads * c.head_dim if name == "output" else c.width
        params[name] = jax.random.normal(one, shape, dtype) / np.sqrt(inputs)
    return {name: x.astype(dtype) for name, x in params.items()}


def new_cache(
    batch: int,
    n: int,
    config: Config,
    dtype: DTypeLike = float,
    index_dtype: DTypeLike | None = None,
) -> Cache:
    """An empty cache for ``batch`` sequences of up to ``n`` tokens.

    Args:
        batch: sequences.
        n: tokens there is room for, of each.
        config: of the layer.
        dtype: of the keys and values.
        index_dtype: of the index keys; None: as ``dtype``. In ``float8_e4m3fn`` they
            are quantised, with a scale for each key.
    """
    slots = (batch * n, config.groups, config.head_dim)
    return _empty(slots, (batch, n), None, config, dtype, index_dtype)


def new_paged_cache(
    page_table: jax.Array,
    page_size: int,
    num_pages: int,
    config: Config,
    dtype: DTypeLike = float,
    index_dtype: DTypeLike | None = None,
) -> Cache:
    """An empty cache in ``num_pages`` pages, of which each row of the table lists its.

    Args:
        page_table: int32 ``(batch, pages)``. Pages that no token has reached yet may be
            anything, and be set later.
        page_size: slots of a page.
        num_pages: pages there are, for all sequences.
        config: of the layer.
        dtype: of the keys and values.
        index_dtype: of the index keys, as for ``new_cache``.
    """
    batch, pages = page_table.shape
    slots = (num_pages * page_size, config.groups, config.head_dim)
    places = (batch, pages * page_size)
    return _empty(slots, places, page_table, config, dtype, index_dtype)


def _empty(
    slots: tuple[int, ...],
    places: tuple[int, int],
    page_table: jax.Array | None,
    config: Config,
    dtype: DTypeLike,
    index_dtype: DTypeLike | None,
) -> Cache:
    index_dtype = dtype if index_dtype is None else index_dtype
    index_keys = jnp.zeros((*places, config.index_dim), index_dtype)
    quantised = index_keys.dtype == jnp.float8_e4m3fn
    return Cache(
        jnp.zeros(slots, dtype),
        jnp.zeros(slots, dtype),
        index_keys,
        jnp.zeros(places[0], np.int32),
        page_table,
        jnp.zeros(places, np.float32) if quantised else None,
    )


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Vectors in FP8 with a scale each, as DeepSeek-V3.2 keeps the keys of its indexer.

    Args:
        x: ``(..., dim)``.

    Returns:
        float8_e4m3fn ``(..., dim)``, of which the largest in magnitude is 448, and
        float32 ``(...)``, what to multiply them by. That is ``x`` within a 16th of each
        feature, or 2^-18 of the largest.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_topk.sparse_attention import quantise
        >>> values, scales = quantise(jnp.array([[7.0, -3.5, 0.1], [0.0, 0.0, 0.0]]))
        >>> print(values)
        [[448 -224 6.5]
         [0 0 0]]
        >>> print(values.astype(jnp.float32) * scales[:, None])
        [[ 7.        -3.5        0.1015625]
         [ 0.         0.         0.       ]]
    """
    x = x.astype(np.float32)
    most = float(jnp.finfo(jnp.float8_e4m3fn).max)  # 448
    scales = jnp.maximum(jnp.abs(x).max(-1), 1e-30) / most
    return (x / scales[..., None]).astype(jnp.float8_e4m3fn), scales


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates pairs of features by angles that grow with the position.

    Su et al., 2021, https://arxiv.org/abs/2104.09864.

    Args:
        x: ``(batch, t, ..., dim)``.
        positions: ``(batch, t)``.
    """
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-np.arange(half, dtype=np.float32) / half)
    angles = positions[..., None].astype(np.float32) * rates
    angles = jnp.expand_dims(angles, tuple(range(2, x.ndim - 1)))
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def project(params: Params, x: jax.Array, positions: jax.Array) -> Projected:
    """Queries, keys and values of tokens ``x`` ``(batch, t, width)`` at positions."""
    q = jnp.einsum("btw,whd->bthd", x, params["query"])
    keys = jnp.einsum("btw,wgd->btgd", x, params["key"])
    index_q = jnp.einsum("btw,whd->bthd", x, params["index_query"])
    return Projected(
        rotary(q, positions),
        rotary(keys, positions),
        jnp.einsum("btw,wgd->btgd", x, params["value"]),
        rotary(index_q, positions),
        rotary(x @ params["index_key"], positions),
        x @ params["index_weight"],
    )


def index_scores(
    queries: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None = None,
) -> jax.Array:
    """The lightning indexer: what each key is worth to each query.

    The sum over heads of weight times ReLU of query times key, divided by the root of
    ``index_heads * index_dim``. All of it is in float32, except that products of
    bfloat16 queries with quantised keys are rounded to bfloat16: those of all heads
    are written and read back, and what the rounding costs, up to 2^-8 of each, is far
    below what quantising the keys does.

    Args:
        queries: ``(batch, t, index_heads, index_dim)``.
        keys: ``(batch, n, index_dim)``, shared by the heads.
        weights: ``(batch, t, index_heads)``, of either sign.
        scales: float32 ``(batch, n)``, of keys from ``quantise``. They are positive,
            and so leave the ReLU: one factor of the whole sum.

    Returns:
        Scores ``(batch, t, n)`` of float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_topk.sparse_attention import index_scores
        >>> queries = jnp.array([[[[1.0, 0.0], [0.0, 1.0]]]])  # one token, two heads
        >>> keys = jnp.array([[[3.0, 1.0], [-2.0, 5.0], [-1.0, -1.0]]])
        >>> print(index_scores(queries, keys, jnp.array([[[1.0, -2.0]]])))
        [[[ 0.5 -5.   0. ]]]
    """
    product: DTypeLike = np.float32
    if scales is not None:
        keys = keys.astype(queries.dtype)  # exact, and done within the product
        if queries.dtype == jnp.bfloat16:  # those of float16 could overflow
            product = jnp.bfloat16
    dots = jnp.einsum("bthd,bnd->bthn", queries, keys, preferred_element_type=product)
    dots = jax.nn.relu(dots.astype(np.float32))
    weights = weights.astype(np.float32) / np.sqrt(queries[0, 0].size)
    scores = (dots * weights[..., None]).sum(2)  # one pass, no product
    return scores if scales is None else scores * scales[:, None]


def windows(positions: jax.Array, config: Config) -> dict[str, Any]:
    """The ``starts`` and ``lengths`` of what tokens at positions ``(batch, t)`` see."""
    if config.window is None:
        return {"lengths": positions + 1}
    starts = jnp.maximum(positions + 1 - config.window, 0)
    return {"starts": starts, "lengths": positions + 1 - starts}


def select(
    scores: jax.Array, cache: Cache, positions: jax.Array, config: Config
) -> jax.Array:
    """The slots of the keys that each token attends to.

    Args:
        scores: ``(batch, t, n)`` of the indexer.
        cache: holds the tokens up to the last of the positions.
        positions: int32 ``(batch, t)``: a token sees those up to its own.
        config: of the layer.

    Returns:
        int32 ``(batch, t, k)``, in the order of the tokens; -1 where there are fewer.
    """
    window = windows(positions, config)
    batch, n = scores.shape[0], scores.shape[-1]
    scores = jax.lax.stop_gradient(scores)
    if cache.page_table is None:
        offsets = np.arange(batch, dtype=np.int32) * n
        return paged_top_k(scores, config.k, offsets=offsets, **window).indices
    size = n // cache.page_table.shape[1]
    return paged_top_k(
        scores, config.k, cache.page_table, page_size=size, **window
    ).indices


def attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, slots: jax.Array
) -> jax.Array:
    """Attention of each token to the keys in its slots.

    Args:
        queries: ``(batch, t, heads, head_dim)``.
        keys: ``(slots, groups, head_dim)``.
        values: ``(slots, groups, head_dim)``.
        slots: int32 ``(batch, t, k)``; -1 is no key.

    Returns:
        ``(batch, t, heads, head_dim)``.
    """
    *batch, heads, dim = queries.shape
    groups = keys.shape[1]
    queries = queries.reshape(*batch, groups, heads // groups, dim)
    place = jnp.maximum(slots, 0)
    keys, values = (x.at[place].get(mode="promise_in_bounds") for x in (keys, values))
    logits = jnp.einsum(
        "btghd,btkgd->btghk", queries, keys, preferred_element_type=np.float32
    )
    logits = jnp.where(slots[:, :, None, None] < 0, -jnp.inf, logits / np.sqrt(dim))
    weights = jax.nn.softmax(logits).astype(values.dtype)
    out = jnp.einsum("btghk,btkgd->btghd", weights, values)
    return out.reshape(*batch, heads, dim)


def append(cache: Cache, new: Projected, positions: jax.Array) -> Cache:
    """The cache with the tokens at ``positions`` ``(batch, t)``, its next ones."""
    batch, t = positions.shape
    n = cache.index_keys.shape[1]
    rows = np.arange(batch, dtype=np.int32)[:, None]
    if cache.page_table is None:
        slots = rows * n + positions
    else:
        size = n // cache.page_table.shape[1]
        slots = cache.page_table[rows, positions // size] * size + positions % size
    index_keys, index_scales = new.index_keys, cache.index_scales
    if index_scales is not None:
        index_keys, scales = quantise(index_keys)
        index_scales = index_scales.at[rows, positions].set(scales)
    return cache._replace(
        keys=cache.keys.at[slots].set(new.keys.astype(cache.keys.dtype)),
        values=cache.values.at[slots].set(new.values.astype(cache.values.dtype)),
        index_keys=cache.index_keys.at[rows, positions].set(
            index_keys.astype(cache.index_keys.dtype)
        ),
        lengths=cache.lengths + t,
        index_scales=index_scales,
    )


def extend(
    params: Params, config: Config, cache: Cache, x: jax.Array
) -> tuple[jax.Array, Cache]:
    """Appends tokens to the cache and attends from each, up to itself.

    Args:
        params: from ``init``.
        config: of the layer.
        cache: with room for ``t`` tokens more.
        x: ``(batch, t, width)``.

    Returns:
        ``(batch, t, width)``, and the cache.
    """
    positions = cache.lengths[:, None] + np.arange(x.shape[1], dtype=np.int32)
    new = project(params, x, positions)
    cache = append(cache, new, positions)
    scores = index_scores(
        new.index_queries, cache.index_keys, new.index_weights, cache.index_scales
    )
    slots = select(scores, cache, positions, config)
    out = attend(new.queries, cache.keys, cache.values, slots)
    return jnp.einsum("bthd,hdw->btw", out, params["output"]), cache


# Training ----------------------------------------------------------------------------


def visible(t: int, config: Config) -> np.ndarray:
    """Which of ``t`` tokens each of them sees: bool ``(t, t)``."""
    ahead = np.arange(t)[:, None] - np.arange(t)
    return (ahead >= 0) & (ahead < (config.window or t))


def dense(
    params: Params, config: Config, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same layer with all keys attended to, for training and for comparison.

    Args:
        params: from ``init``.
        config: of the layer.
        x: ``(batch, t, width)``, whole sequences.

    Returns:
        ``(batch, t, width)``; the attention of each token to each, the mean of the
        heads, ``(batch, t, t)``; and the indexer's scores ``(batch, t, t)``, whose
        gradient stops at ``x``.
    """
    batch, t, _ = x.shape
    positions = jnp.broadcast_to(np.arange(t, dtype=np.int32), (batch, t))
    new = project(params, x, positions)
    shape = (batch, t, config.groups, -1, config.head_dim)
    logits = jnp.einsum(
        "btghd,bngd->bghtn",
        new.queries.reshape(shape),
        new.keys,
        preferred_element_type=np.float32,
    )
    logits = jnp.where(visible(t, config), logits / np.sqrt(config.head_dim), -jnp.inf)
    weights = jax.nn.softmax(logits)
    out = jnp.einsum("bghtn,bngd->btghd", weights.astype(x.dtype), new.values)
    out = out.reshape(new.queries.shape)
    apart = project(params, jax.lax.stop_gradient(x), positions)
    scores = index_scores(apart.index_queries, apart.index_keys, apart.index_weights)
    y = jnp.einsum("bthd,hdw->btw", out, params["output"])
    return y, weights.mean((1, 2)), scores


def indexer_loss(scores: jax.Array, mass: jax.Array, config: Config) -> jax.Array:
    """How far the softmax of the scores is from the attention: the mean KL divergence.

    Args:
        scores: ``(batch, t, t)`` of the indexer.
        mass: ``(batch, t, t)``, the attention of ``dense``; a constant here.
        config: of the layer.
    """
    seen = visible(scores.shape[-1], config)
    mass = jax.lax.stop_gradient(mass)
    log_p = jnp.log(jnp.where(mass > 0, mass, 1))
    log_q = jax.nn.log_softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.where(seen, mass * (log_p - log_q), 0).sum(-1).mean()


def recall(scores: jax.Array, mass: jax.Array, config: Config) -> jax.Array:
    """The part of the attention that the selected keys hold, of each token.

    Args:
        scores: ``(batch, t, t)`` of the indexer, or the attention itself for the best
            that ``k`` keys can do.
        mass: ``(batch, t, t)``, the attention of ``dense``.
        config: of the layer.

    Returns:
        ``(batch, t)``.
    """
    t = scores.shape[-1]
    window = windows(jnp.arange(t, dtype=np.int32), config)
    columns = top_k(scores, config.k, **window, sorted=False).indices
    held = jnp.take_along_axis(mass, jnp.maximum(columns, 0), -1)
    return jnp.where(columns < 0, 0, held).sum(-1)

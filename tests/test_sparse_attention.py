# SPDX-License-Identifier: Apache-2.0
"""A layer of sparse attention: whom it selects exactly, what it answers nearly."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_topk import sparse_attention as sparse

CONFIG = sparse.Config(
    width=32, heads=4, groups=2, head_dim=8, index_heads=3, index_dim=8, k=12
)
FP8 = jnp.float8_e4m3fn
BATCH, T, N, PAGE_SIZE = 2, 40, 64, 8
NEAR = {"rtol": 0, "atol": 2e-5}
extend = jax.jit(sparse.extend, static_argnums=1)


@pytest.fixture(autouse=True)
def products_in_float32():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def params(platform):
    return sparse.init(jax.random.key(0), CONFIG)


@pytest.fixture
def tokens(platform):
    return jax.random.normal(jax.random.key(1), (BATCH, T, CONFIG.width))


def paged_cache(index_dtype=None):
    pages = np.random.default_rng(0).permutation(3 * BATCH * N // PAGE_SIZE)
    table = jnp.asarray(pages[: BATCH * N // PAGE_SIZE].reshape(BATCH, -1), np.int32)
    return sparse.new_paged_cache(
        table, PAGE_SIZE, len(pages), CONFIG, index_dtype=index_dtype
    )


@pytest.mark.parametrize("index_dtype", [None, FP8])
@pytest.mark.parametrize("window", [None, 1, 9, T])
def test_it_is_dense_attention_where_k_covers_what_a_token_sees(
    params, tokens, window, index_dtype
):
    config = CONFIG._replace(window=window, k=window or T)
    empty = sparse.new_cache(BATCH, N, config, index_dtype=index_dtype)
    y, cache = extend(params, config, empty, tokens)
    want, mass, _ = sparse.dense(params, config, tokens)
    np.testing.assert_allclose(y, want, **NEAR)
    assert cache.lengths.tolist() == [T, T]
    np.testing.assert_allclose(sparse.recall(mass, mass, config), 1, **NEAR)
    seen = (np.asarray(mass) > 0).sum(-1)
    assert (seen == np.minimum(np.arange(T) + 1, window or T)).all()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("paged", [False, True])
def test_it_selects_the_best_that_each_token_sees(platform, window, paged):
    config = CONFIG._replace(window=window)
    rng = np.random.default_rng(1)
    scores = rng.integers(-5, 5, (BATCH, T, N)).astype(np.float32)
    cache = paged_cache() if paged else sparse.new_cache(BATCH, N, config)
    positions = np.stack([np.arange(T), np.arange(T) + 20]).astype(np.int32)
    slots = sparse.select(jnp.asarray(scores), cache, jnp.asarray(positions), config)
    starts = np.maximum(positions + 1 - window, 0) if window else 0 * positions
    lengths = positions + 1 - starts
    table = np.asarray(cache.page_table) if paged else np.arange(BATCH)[:, None] * N
    size, stride = (PAGE_SIZE, PAGE_SIZE) if paged else (N, 1)
    _, want = oracle.paged_top_k(scores, 12, table, size, stride, lengths, starts)
    assert np.asarray(slots).tobytes() == want.tobytes()


@pytest.mark.parametrize("index_dtype", [None, FP8])
@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("paged", [False, True])
def test_tokens_that_come_in_parts_are_answered_as_at_once(
    params, tokens, chunk, paged, index_dtype
):
    empty = sparse.new_cache(BATCH, N, CONFIG, index_dtype=index_dtype)
    cache = paged_cache(index_dtype) if paged else empty
    want, _ = extend(params, CONFIG, empty, tokens)

    def step(cache, part):
        y, cache = sparse.extend(params, CONFIG, cache, part)
        return cache, y

    whole = T - T % chunk
    parts = tokens[:, :whole].reshape(BATCH, -1, chunk, CONFIG.width).swapaxes(0, 1)
    _, ys = jax.jit(lambda cache, parts: jax.lax.scan(step, cache, parts))(cache, parts)
    got = ys.swapaxes(0, 1).reshape(BATCH, whole, CONFIG.width)
    np.testing.assert_allclose(got, want[:, :whole], **NEAR)


def test_sequences_of_different_lengths_do_not_see_each_other(params, tokens):
    cache = paged_cache()
    y, cache = extend(params, CONFIG, cache, tokens[:, :10])
    # The second sequence has seen nothing yet, and its slots hold other keys.
    cache = cache._replace(lengths=jnp.array([10, 0], np.int32))
    y, cache = extend(params, CONFIG, cache, tokens[:, 10:20])
    alone, _ = extend(params, CONFIG, paged_cache(), tokens[:, :20])
    np.testing.assert_allclose(y[0], alone[0, 10:], **NEAR)
    alone, _ = extend(params, CONFIG, paged_cache(), tokens[:, 10:20])
    np.testing.assert_allclose(y[1], alone[1], **NEAR)
    assert cache.lengths.tolist() == [20, 10]


def test_the_indexer_learns_from_its_loss_alone(params, tokens):
    def loss(params, through):
        y, mass, scores = sparse.dense(params, CONFIG, tokens)
        if through == "loss":
            return sparse.indexer_loss(scores, mass, CONFIG)
        if through in ("sparse", "FP8"):
            index_dtype = FP8 if through == "FP8" else None
            cache = sparse.new_cache(BATCH, N, CONFIG, index_dtype=index_dtype)
            return (sparse.extend(params, CONFIG, cache, tokens)[0] ** 2).sum()
        return (y**2).sum()

    for through in ("loss", "dense", "sparse", "FP8"):
        gradient = jax.jit(jax.grad(loss), static_argnums=1)(params, through)
        moved = {name for name, x in gradient.items() if np.asarray(x).any()}
        own = {"index_query", "index_key", "index_weight"}
        assert moved == (own if through == "loss" else set(params) - own)


def test_the_loss_is_zero_for_scores_that_are_the_logarithm_of_the_attention(
    params, tokens
):
    _, mass, scores = sparse.dense(params, CONFIG, tokens)
    perfect = jnp.log(jnp.where(mass > 0, mass, 1)) + 3
    assert abs(sparse.indexer_loss(perfect, mass, CONFIG)) < 1e-6
    assert sparse.indexer_loss(scores, mass, CONFIG) > 0.01


def test_quantised_vectors_are_within_a_sixteenth_and_reach_448(platform):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((5, 40, 128)) * 10.0 ** rng.integers(-20, 20, (5, 40, 1))
    x = x.astype(np.float32)
    x[0, :3] = 0
    values, scales = jax.jit(sparse.quantise)(x)
    assert (values.dtype, scales.dtype) == (FP8, np.float32)
    values, scales = np.asarray(values, np.float64), np.asarray(scales, np.float64)
    most = np.abs(x).max(-1)
    assert (scales > 0).all()
    assert (np.abs(values).max(-1) == np.where(most > 0, 448, 0)).all()
    off = np.abs(values * scales[..., None] - x)
    assert (off <= np.maximum(np.abs(x) / 16, most[..., None] * 2.0**-18) * 1.001).all()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_scores_of_quantised_keys_are_those_of_the_keys_they_stand_for(platform, dtype):
    rng = np.random.default_rng(3)
    # Whole numbers, of which no product or sum is rounded, and powers of two.
    queries = jnp.asarray(rng.integers(-3, 4, (2, 3, 4, 16)), dtype)
    weights = jnp.asarray(rng.integers(-8, 9, (2, 3, 4)), dtype)
    keys = jnp.asarray(rng.integers(-3, 4, (2, 50, 16)), np.float32)
    keys = keys.at[..., 0].set(7)
    scales = jnp.asarray(2.0 ** rng.integers(-9, 9, (2, 50)), np.float32)
    got = sparse.index_scores(queries, keys.astype(FP8), weights, scales)
    whole = (keys * scales[..., None]).astype(dtype)
    want = sparse.index_scores(queries, whole, weights)
    assert got.dtype == np.float32
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_products_are_in_float32_but_with_quantised_keys_in_bfloat16(
    platform, dtype, run
):
    rng = np.random.default_rng(5)
    # Whole numbers: no sum in float32 is rounded, and in float16 products overflow.
    queries = rng.integers(-100, 101, (2, 3, 4, 64))
    keys = 32 * rng.integers(-14, 15, (2, 50, 64))
    weights = rng.integers(-8, 9, (2, 3, 4))
    scales = 2.0 ** rng.integers(-9, 9, (2, 50))
    dots = np.maximum(np.einsum("bthd,bnd->bthn", queries, keys), 0)
    assert dots.max() > np.finfo(np.float16).max
    rounded = dots.astype(jnp.bfloat16 if dtype == jnp.bfloat16 else np.float32)

    def summed(products, weights=weights):
        return np.einsum("bthn,bth->btn", products.astype(float), weights) / 16

    score = run(sparse.index_scores)
    given = jnp.asarray(queries, dtype), jnp.asarray(keys, dtype)
    got = score(*given, jnp.asarray(weights, dtype))
    assert (np.asarray(got) == summed(dots)).all()

    given = jnp.asarray(queries, dtype), jnp.asarray(keys, FP8)
    got = score(*given, jnp.asarray(weights, dtype), jnp.asarray(scales, np.float32))
    got = np.asarray(got) / scales[:, None]
    if run is not jax.jit:  # in one program the compiler may leave the rounding out
        assert (got == summed(rounded)).all()
    bound = summed(dots, np.abs(weights)) * (2.0**-8 if rounded.itemsize == 2 else 0)
    assert (np.abs(got - summed(dots)) <= bound).all()


@pytest.mark.parametrize("paged", [False, True])
def test_a_quantised_cache_keeps_the_index_keys_of_all_tokens(params, tokens, paged):
    rng = np.random.default_rng(4)
    tokens = tokens * 10.0 ** rng.integers(-3, 4, (BATCH, T, 1))
    caches = [sparse.new_cache(BATCH, N, CONFIG)]
    caches += [
        paged_cache(FP8) if paged else sparse.new_cache(BATCH, N, CONFIG, float, FP8)
    ]
    for i in range(0, T, 10):
        for j, cache in enumerate(caches):
            caches[j] = extend(params, CONFIG, cache, tokens[:, i : i + 10])[1]
    want, cache = caches[0].index_keys, caches[1]
    assert (cache.keys.dtype, cache.index_keys.dtype) == (want.dtype, FP8)
    assert cache.index_scales is not None
    got = cache.index_keys.astype(np.float32) * cache.index_scales[..., None]
    off = np.abs(np.asarray(got - want))
    most = np.abs(np.asarray(want)).max(-1, keepdims=True)
    assert (off <= most / 15).all()
    assert not np.asarray(cache.index_scales)[:, T:].any()
    assert (np.asarray(cache.index_scales)[:, :T] > 0).all()

# SPDX-License-Identifier: Apache-2.0
"""vmap, derivatives, control flow and sharding keep the answer and the one call."""

import re

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_topk import top_k

N, K = 300, 20
COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


@pytest.fixture
def scores():
    rng = inputs.generator("transforms")
    return rng.integers(-40, 40, (3, 4, N)).astype(np.float32)


@pytest.fixture
def lengths():
    return np.array([[N, 5, 0, 100], [N, N, -1, 20], [1, 2, 19, 21]], np.int32)


def check(result, scores, *args, **options):
    oracle.check(jax.device_get(result), scores, *args, **options)


def test_a_result_unpacks_and_is_a_pytree(platform, scores):
    result = top_k(scores, K)
    values, indices = result
    assert values is result.values and indices is result.indices
    doubled = jax.tree.map(lambda x: x + x, result)
    assert type(doubled) is type(result)
    check(result, scores, K)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_vmap_over_any_axis(platform, scores, axis):
    moved = np.moveaxis(scores, 0, axis)
    check(jax.vmap(lambda x: top_k(x, K), in_axes=axis)(moved), scores, K)


def test_vmap_nested_and_with_lengths_mapped_or_not(platform, scores, lengths):
    def select(row, length):
        return top_k(row, K, lengths=length, sorted=False)

    result = jax.vmap(jax.vmap(select))(scores, lengths)
    check(result, scores, K, lengths, sorted=False)
    result = jax.jit(jax.vmap(select, in_axes=(0, None)))(scores, lengths[0])
    check(result, scores, K, lengths[0], sorted=False)
    result = jax.vmap(select, in_axes=(None, 0))(scores[0], lengths)
    check(result, np.stack([scores[0]] * 3), K, lengths, sorted=False)


def test_vmap_over_starts_alone(platform, scores):
    starts = np.array([0, 7, 299], np.int32)
    result = jax.vmap(lambda s: top_k(scores[0, 0], K, starts=s))(starts)
    check(result, np.stack([scores[0, 0]] * 3), K, None, starts)


def pulled_back(scores, cotangent, lengths=None):
    """The gradient of the scores: the cotangent at the oracle's indices."""
    _, indices = oracle.top_k(scores, K, lengths)
    gradient = np.zeros(scores.shape, np.float32)
    for row in np.ndindex(scores.shape[:-1]):
        real = indices[row] >= 0  # padding pulls back to nothing
        gradient[row][indices[row][real]] = cotangent[row][real]
    return gradient


def test_gradients_scatter_to_the_selected_columns(platform, scores, lengths):
    cotangent = inputs.generator("cotangent").standard_normal((3, 4, K))
    cotangent = cotangent.astype(np.float32)
    for given in (None, lengths):

        def loss(x, given=given):
            values = top_k(x, K, lengths=given).values
            return jnp.sum(jnp.where(jnp.isneginf(values), 0, values * cotangent))

        want = pulled_back(scores, cotangent, given)
        for gradient in (
            jax.grad(loss),
            jax.jit(jax.grad(loss)),
            jax.grad(jax.jit(loss)),
        ):
            np.testing.assert_array_equal(gradient(scores), want)


def test_vjp_ignores_the_padding(platform, scores, lengths):
    def select(x):
        return top_k(x, K, lengths=lengths).values

    _, pull = jax.vjp(select, scores)
    cotangent = np.arange(12 * K, dtype=np.float32).reshape(3, 4, K) + 1
    (gradient,) = pull(jnp.asarray(cotangent))
    np.testing.assert_array_equal(gradient, pulled_back(scores, cotangent, lengths))


def test_forward_derivatives_gather_the_tangents(platform, scores, lengths):
    tangent = inputs.generator("tangent").standard_normal(scores.shape)
    tangent = tangent.astype(np.float32)

    def select(x):
        return top_k(x, K, lengths=lengths)

    result, (dvalues, dindices) = jax.jvp(select, (scores,), (tangent,))
    check(result, scores, K, lengths)
    _, indices = oracle.top_k(scores, K, lengths)
    want = np.take_along_axis(tangent, np.maximum(indices, 0), -1)
    np.testing.assert_array_equal(dvalues, np.where(indices < 0, 0, want))
    assert dindices.dtype == jax.dtypes.float0 and dindices.shape == indices.shape


def test_vmap_of_grad_equals_grad_of_vmap(platform, scores):
    cotangent = np.arange(K, dtype=np.float32) + 1

    def loss(row):
        return jnp.sum(top_k(row, K).values * cotangent)

    rows = scores.reshape(-1, N)
    inner = jax.vmap(jax.grad(loss))(rows)
    outer = jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x)))(rows)
    want = pulled_back(rows, np.broadcast_to(cotangent, (12, K)))
    np.testing.assert_array_equal(inner, want)
    np.testing.assert_array_equal(outer, want)


def test_second_derivatives(platform):
    row = np.array([3.0, 1.0, 2.0], np.float32)

    def loss(x):
        return jnp.sum(top_k(x, 2).values ** 3)

    for hessian in (jax.hessian(loss), jax.jacrev(jax.jacfwd(loss))):
        np.testing.assert_array_equal(hessian(row), np.diag([18.0, 0.0, 12.0]))


def test_scan_with_captured_scores(platform, scores, lengths):
    def step(carry, length):
        return carry + 1, tuple(top_k(scores, K, lengths=length))

    _, stacked = jax.jit(lambda n: jax.lax.scan(step, 0, n))(lengths)
    for i, length in enumerate(lengths):
        check([x[i] for x in stacked], scores, K, length)


def test_cond_while_and_map(platform, scores, lengths):
    def few(x):
        return tuple(top_k(x, K, lengths=lengths))

    def all_(x):
        return tuple(top_k(x, K))

    choose = jax.jit(lambda p, x: jax.lax.cond(p, few, all_, x))
    check(choose(True, scores), scores, K, lengths)
    check(choose(False, scores), scores, K)
    mapped = jax.vmap(lambda p, x: jax.lax.cond(p, all_, all_, x))
    check(mapped(np.array([True, False, True]), scores), scores, K)
    check(jax.lax.map(lambda x: tuple(top_k(x, K)), scores), scores, K)

    def body(state):
        i, x, _ = state
        return i + 1, -x, tuple(top_k(x, K, sorted=False))

    @jax.jit
    def program(x):
        first = tuple(top_k(x, K, sorted=False))
        return jax.lax.while_loop(lambda s: s[0] < 3, body, (0, -x, first))[2]

    check(program(scores), -scores, K, sorted=False)


def test_remat(platform, scores):
    def loss(x):
        return jnp.sum(top_k(-2 * x, K).values)

    want = jax.grad(loss)(scores)
    np.testing.assert_array_equal(jax.grad(jax.checkpoint(loss))(scores), want)


def test_eager_and_without_jit(platform, scores, lengths):
    with jax.disable_jit():
        check(top_k(scores, K, lengths=lengths), scores, K, lengths)


def test_static_arguments_of_a_jit(platform, scores):
    select = jax.jit(top_k, static_argnames=("k", "sorted", "implementation"))
    check(select(scores, k=K, sorted=False), scores, K, sorted=False)


# Sharding, over eight CPU devices.


def collectives(compiled):
    text = compiled.as_text()
    assert text and "ENTRY" in text
    return re.findall(COLLECTIVES, text)


def mesh_of(axis_type, shape=(8,), names=("x",)):
    return jax.make_mesh(
        shape, names, (axis_type,) * len(names), devices=jax.devices("cpu")
    )


@pytest.mark.parametrize(
    ("shape", "names", "spec"),
    [
        ((8,), ("x",), P("x", None, None)),
        ((4, 2), ("x", "y"), P("x", "y", None)),
        ((4, 2), ("x", "y"), P(None, "y", None)),
        ((4, 2), ("x", "y"), P(("x", "y"), None, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("name", ["cpu", "xla"])
def test_sharded_rows_stay_where_they_are(shape, names, spec, windowed, name):
    mesh = mesh_of(AxisType.Auto, shape, names)
    rng = inputs.generator("sharded")
    scores = rng.integers(-40, 40, (8, 4, N)).astype(np.float32)
    lengths = rng.integers(-1, N + 2, (8, 4)).astype(np.int32) if windowed else None
    placed = jax.device_put(scores, NamedSharding(mesh, spec))
    rows = None
    if windowed:
        rows = jax.device_put(lengths, NamedSharding(mesh, P(*spec[:-1])))
    select = jax.jit(lambda x, r: top_k(x, K, lengths=r, implementation=name))
    compiled = select.lower(placed, rows).compile()
    assert not collectives(compiled)
    result = compiled(placed, rows)
    for x in result:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    check(result, scores, K, lengths)


def test_rows_that_do_not_divide_evenly():
    mesh = mesh_of(AxisType.Auto)
    rng = inputs.generator("uneven")
    scores = rng.standard_normal((10, N)).astype(np.float32)
    lengths = rng.integers(-1, N + 2, 10).astype(np.int32)

    @jax.jit
    def select(x, r):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x", None)))
        return top_k(x, K, lengths=r)

    operands = jax.device_put((scores, lengths), NamedSharding(mesh, P()))
    check(select(*operands), scores, K, lengths)


def test_a_sharded_selected_axis_is_gathered():
    mesh = mesh_of(AxisType.Auto)
    scores = inputs.generator("columns").standard_normal((3, 8 * 40))
    scores = scores.astype(np.float32)
    placed = jax.device_put(scores, NamedSharding(mesh, P(None, "x")))
    compiled = jax.jit(lambda x: top_k(x, K)).lower(placed).compile()
    assert "all-gather" in collectives(compiled)
    check(compiled(placed), scores, K)


def test_explicit_axes_are_in_the_type_of_the_result():
    mesh = mesh_of(AxisType.Explicit)
    scores = inputs.generator("explicit").standard_normal((8, N)).astype(np.float32)
    lengths = np.arange(8, dtype=np.int32) * 40
    with jax.set_mesh(mesh):
        placed = jax.device_put(scores, P("x", None))
        result = jax.jit(lambda x: top_k(x, K, lengths=lengths))(placed)
        assert jax.typeof(result.values).sharding.spec == P("x", None)
        gradient = jax.jit(jax.grad(lambda x: top_k(x, K).values.sum()))(placed)
        assert jax.typeof(gradient).sharding.spec == P("x", None)
    check(result, scores, K, lengths)


def test_shard_map_with_checked_replication():
    mesh = mesh_of(AxisType.Auto)
    scores = inputs.generator("shard_map").standard_normal((16, N)).astype(np.float32)
    lengths = (np.arange(16, dtype=np.int32) * 20) % N

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    def select(x, r):
        return tuple(top_k(x, K, lengths=r))

    check(select(scores, lengths), scores, K, lengths)


def test_gradients_of_shared_scores_with_sharded_lengths_are_summed():
    mesh = mesh_of(AxisType.Auto)
    row = inputs.generator("shared").permutation(N).astype(np.float32)[None]
    lengths = np.arange(8, dtype=np.int32) * 30 + 25

    @jax.shard_map(mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    def select(x, r):
        return top_k(x, K, lengths=r).values

    gradient = jax.jit(jax.grad(lambda x: select(x, lengths).sum()))(row)
    indices = oracle.top_k(np.repeat(row, 8, axis=0), K, lengths)[1]
    want = np.bincount(indices.reshape(-1), minlength=N).astype(np.float32)
    np.testing.assert_array_equal(gradient[0], want)

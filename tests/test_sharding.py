# SPDX-License-Identifier: Apache-2.0
"""Rows over devices: each selects from its own, and nothing moves."""

import inputs
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_topk import top_k

N, K = 300, 20


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
    mesh = meshes.mesh(jax.devices("cpu"), shape, names)
    rng = inputs.generator("sharded")
    scores = rng.integers(-40, 40, (8, 4, N)).astype(np.float32)
    lengths = rng.integers(-1, N + 2, (8, 4)).astype(np.int32) if windowed else None
    placed = jax.device_put(scores, NamedSharding(mesh, spec))
    rows = None
    if windowed:
        rows = jax.device_put(lengths, NamedSharding(mesh, P(*spec[:-1])))
    select = jax.jit(lambda x, r: top_k(x, K, lengths=r, implementation=name))
    compiled = select.lower(placed, rows).compile()
    assert not meshes.collectives(compiled)
    result = compiled(placed, rows)
    for x in result:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    oracle.check(result, scores, K, lengths)


def test_rows_that_do_not_divide_evenly():
    mesh = meshes.mesh(jax.devices("cpu"))
    rng = inputs.generator("uneven")
    scores = rng.standard_normal((10, N)).astype(np.float32)
    lengths = rng.integers(-1, N + 2, 10).astype(np.int32)

    @jax.jit
    def select(x, r):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x", None)))
        return top_k(x, K, lengths=r)

    operands = jax.device_put((scores, lengths), NamedSharding(mesh, P()))
    oracle.check(select(*operands), scores, K, lengths)


def test_a_sharded_selected_axis_is_gathered():
    mesh = meshes.mesh(jax.devices("cpu"))
    scores = inputs.generator("columns").standard_normal((3, 8 * 40))
    scores = scores.astype(np.float32)
    placed = jax.device_put(scores, NamedSharding(mesh, P(None, "x")))
    compiled = jax.jit(lambda x: top_k(x, K)).lower(placed).compile()
    assert "all-gather" in meshes.collectives(compiled)
    oracle.check(compiled(placed), scores, K)


def test_explicit_axes_are_in_the_type_of_the_result_and_nothing_moves(devices):
    mesh = meshes.mesh(devices, axis_type=AxisType.Explicit)
    scores = inputs.generator("explicit").standard_normal((8, N)).astype(np.float32)
    lengths = np.arange(8, dtype=np.int32) * 40

    def select(x):
        return top_k(x, K, lengths=lengths)

    def gradient(x):
        return jax.grad(lambda x: top_k(x, K).values.sum())(x)

    with jax.set_mesh(mesh):
        placed = jax.device_put(scores, P("x", None))
        result, pulled = jax.jit(select)(placed), jax.jit(gradient)(placed)
        for x in (*result, pulled):
            assert jax.typeof(x).sharding.spec == P("x", None)
        for function in (select, gradient):
            compiled = jax.jit(function).lower(placed).compile()
            assert not meshes.collectives(compiled)
    oracle.check(jax.device_get(result), scores, K, lengths)
    np.testing.assert_array_equal(jax.device_get(pulled), gradient(scores))


def test_shard_map_with_checked_replication():
    mesh = meshes.mesh(jax.devices("cpu"))
    scores = inputs.generator("shard_map").standard_normal((16, N)).astype(np.float32)
    lengths = (np.arange(16, dtype=np.int32) * 20) % N

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    def select(x, r):
        return tuple(top_k(x, K, lengths=r))

    oracle.check(select(scores, lengths), scores, K, lengths)


def test_gradients_of_shared_scores_with_sharded_lengths_are_summed():
    mesh = meshes.mesh(jax.devices("cpu"))
    row = inputs.generator("shared").permutation(N).astype(np.float32)[None]
    lengths = np.arange(8, dtype=np.int32) * 30 + 25

    @jax.shard_map(mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    def select(x, r):
        return top_k(x, K, lengths=r).values

    gradient = jax.jit(jax.grad(lambda x: select(x, lengths).sum()))(row)
    indices = oracle.top_k(np.repeat(row, 8, axis=0), K, lengths)[1]
    want = np.bincount(indices.reshape(-1), minlength=N).astype(np.float32)
    np.testing.assert_array_equal(gradient[0], want)


@pytest.fixture
def batch():
    """Scores, lengths and starts of 16 rows of two."""
    rng = inputs.generator("batch")
    scores = rng.integers(-40, 40, (16, 2, N)).astype(np.float32)
    lengths = rng.integers(-1, N + 2, (16, 2)).astype(np.int32)
    return scores, lengths, rng.integers(-9, N // 2, (16, 2)).astype(np.int32)


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("axes", ["one", "two"])
def test_rows_over_all_devices(devices, batch, axes, sorted):
    shape, names = meshes.shapes(devices)[axes == "two"]
    mesh, spec = meshes.mesh(devices, shape, names), P(*names)
    operands = [meshes.placed(x, mesh, spec) for x in batch]

    @jax.jit
    def select(x, lengths, starts):
        return top_k(2 * x, K, lengths=lengths, starts=starts, sorted=sorted)

    compiled = select.lower(*operands).compile()
    assert not meshes.collectives(compiled)
    result = compiled(*operands)
    for x in result:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
        assert len(x.sharding.device_set) == len(devices)
    oracle.check(jax.device_get(result), 2 * batch[0], K, *batch[1:], sorted)


def test_replicated_lengths_of_sharded_rows(devices, batch):
    mesh = meshes.mesh(devices)
    for specs in ((P("x"), P(), P("x")), (P("x"), P("x"), P())):
        operands = [
            meshes.placed(x, mesh, spec) for x, spec in zip(batch, specs, strict=True)
        ]
        compiled = (
            jax.jit(lambda x, r, s: top_k(x, K, lengths=r, starts=s))
            .lower(*operands)
            .compile()
        )
        assert not meshes.collectives(compiled)
        oracle.check(jax.device_get(compiled(*operands)), batch[0], K, *batch[1:])


def test_sharded_lengths_of_replicated_scores(devices, batch):
    # With an operand without an axis of its own this would be a call of the full shape.
    mesh = meshes.mesh(devices)
    scores, lengths, _ = batch
    operands = meshes.placed(scores, mesh, P()), meshes.placed(lengths, mesh, P("x"))
    compiled = jax.jit(lambda x, r: top_k(x, K, lengths=r)).lower(*operands).compile()
    assert not meshes.collectives(compiled)
    result = compiled(*operands)
    assert result.values.sharding.is_equivalent_to(operands[1].sharding, 3)
    oracle.check(jax.device_get(result), scores, K, lengths)


def test_a_sharding_asked_of_the_answer_reaches_the_scores(devices, batch):
    mesh = meshes.mesh(devices)
    rows = NamedSharding(mesh, P("x"))
    operand = meshes.placed(batch[0], mesh, P())
    select = jax.jit(lambda x: top_k(x, K), out_shardings=rows)
    compiled = select.lower(operand).compile()
    assert not meshes.collectives(compiled)
    oracle.check(jax.device_get(compiled(operand)), batch[0], K)


def test_derivatives_stay_where_the_rows_are(devices, batch):
    mesh = meshes.mesh(devices)
    scores, lengths, _ = batch
    operands = meshes.placed(scores, mesh, P("x")), meshes.placed(lengths, mesh, P("x"))

    def pull(x, r):
        return jax.vjp(lambda x: top_k(x, K, lengths=r).values, x)[1](
            jnp.ones((16, 2, K), np.float32)
        )[0]

    def push(x, r):
        return jax.jvp(lambda x: top_k(x, K, lengths=r).values, (x,), (3 * x,))[1]

    for derivative in (pull, push):
        compiled = jax.jit(derivative).lower(*operands).compile()
        assert not meshes.collectives(compiled)
        got = compiled(*operands)
        assert got.sharding.is_equivalent_to(operands[0].sharding, 3)
        np.testing.assert_array_equal(got, derivative(scores, lengths))


def test_scan_and_vmap_over_sharded_rows(devices, batch):
    mesh = meshes.mesh(devices)
    operand = meshes.placed(batch[0], mesh, P("x"))

    @jax.jit
    def program(x):
        def step(carry, _):
            return carry + 1, jax.vmap(lambda row: top_k(row + carry, K))(x)

        return jax.lax.scan(step, jnp.float32(0), None, length=3)[1]

    compiled = program.lower(operand).compile()
    assert not meshes.collectives(compiled)
    want = np.stack([batch[0] + i for i in range(3)])
    oracle.check(jax.device_get(compiled(operand)), want, K)


def test_shard_map_in_every_mode(devices, batch):
    shape, names = meshes.shapes(devices)[1]
    mesh = meshes.mesh(devices, shape, names)
    scores, lengths, _ = batch
    spec = P("x", "y")
    operands = meshes.placed(scores, mesh, spec), meshes.placed(lengths, mesh, spec)
    for options in (
        {"check_vma": True, "in_specs": spec, "out_specs": spec},
        {"check_vma": False, "in_specs": spec, "out_specs": spec},
        {"axis_names": {"x"}, "in_specs": P("x"), "out_specs": P("x")},
    ):
        select = jax.shard_map(
            lambda x, r: top_k(x, K, lengths=r), mesh=mesh, **options
        )
        compiled = jax.jit(select).lower(*operands).compile()
        assert not meshes.collectives(compiled)
        result = compiled(*operands)
        oracle.check(jax.device_get(result), scores, K, lengths)

        def gradient(select):
            def loss(x, r):
                return jnp.sum(jnp.maximum(select(x, r).values, -99))

            return jax.jit(jax.grad(loss))

        np.testing.assert_array_equal(
            gradient(select)(*operands),
            gradient(lambda x, r: top_k(x, K, lengths=r))(scores, lengths),
        )


def test_an_explicit_selected_axis_raises_as_lax_top_k_does():
    mesh = meshes.mesh(jax.devices("cpu"), axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        scores = jax.device_put(np.zeros((3, 80), np.float32), P(None, "x"))
        with pytest.raises(Exception) as expected:
            jax.lax.top_k(scores, 5)
        for select in (top_k, jax.jit(top_k, static_argnums=1)):
            with pytest.raises(type(expected.value)) as raised:
                select(scores, 5)
            assert str(expected.value).split(".")[0] in str(raised.value)


def test_explicit_rows_bring_lengths_to_them():
    mesh = meshes.mesh(
        jax.devices("cpu"), (4, 2), ("x", "y"), (AxisType.Explicit, AxisType.Explicit)
    )
    scores = inputs.generator("both").standard_normal((8, 2, N)).astype(np.float32)
    lengths = np.arange(16, dtype=np.int32).reshape(8, 2) * 20
    with jax.set_mesh(mesh):
        placed = jax.device_put(scores, P("x", "y", None))
        elsewhere = jax.device_put(lengths, P("y", None))
        result = jax.jit(lambda x, r: top_k(x, K, lengths=r))(placed, elsewhere)
        assert jax.typeof(result.indices).sharding.spec == P("x", "y", None)
        tangent = jax.jvp(
            lambda x: top_k(x, K, lengths=lengths).values, (placed,), (placed,)
        )[1]
        assert jax.typeof(tangent).sharding.spec == P("x", "y", None)
    oracle.check(jax.device_get(result), scores, K, lengths)


def test_partial_sums_are_refused():
    mesh = meshes.mesh(jax.devices("cpu"), axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        a = jax.device_put(np.ones((4, 8), np.float32), P(None, "x"))
        b = jax.device_put(np.ones((8, 16), np.float32), P("x", None))

        @jax.jit
        def select(a, b):
            partial = jnp.einsum("ij,jk->ik", a, b, out_sharding=P(unreduced={"x"}))
            return top_k(partial, 3)

        with pytest.raises(ValueError, match=r"not partial sums.*'x'"):
            select(a, b)


def test_lengths_over_another_axis_than_the_rows_are_right_all_the_same():
    mesh = meshes.mesh(jax.devices("cpu"), (4, 2), ("x", "y"))
    scores = inputs.generator("conflict").standard_normal((8, N)).astype(np.float32)
    lengths = np.arange(8, dtype=np.int32) * 40
    operands = meshes.placed(scores, mesh, P("x")), meshes.placed(lengths, mesh, P("y"))
    result = jax.jit(lambda x, r: top_k(x, K, lengths=r))(*operands)
    oracle.check(jax.device_get(result), scores, K, lengths)


def test_pmap_and_smap(devices, batch):
    scores, lengths, _ = batch
    count = len(devices)
    shards = scores.reshape(count, -1, 2, N), lengths.reshape(count, -1, 2)

    def select(x, r):
        return top_k(x, K, lengths=r)

    result = jax.pmap(select, devices=devices)(*shards)
    oracle.check(jax.device_get(result), shards[0], K, shards[1])
    with jax.set_mesh(meshes.mesh(devices)):
        mapped = jax.jit(jax.smap(select, in_axes=0, out_axes=0, axis_name="x"))
        compiled = mapped.lower(scores, lengths).compile()
        assert not meshes.collectives(compiled)
        result = jax.device_get(mapped(scores, lengths))
    oracle.check(result, scores, K, lengths)

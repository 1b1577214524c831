# SPDX-License-Identifier: Apache-2.0
"""Columns become slots of paged memory, in the one call and for every problem."""

import re

import implementations
import inputs
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_topk
from jax_topk import _top_k, paged_top_k

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
ON_EITHER = implementations.ON_CPU + implementations.ON_GPU


@pytest.fixture(params=implementations.parameters(ON_EITHER))
def implementation(request):
    """Each implementation, which gets its tables from the test."""
    return request.param


def select(implementation, scores, k, table, page_size, lengths=None, starts=None, **o):
    """The answer of an implementation, as NumPy arrays."""
    operands = jax.device_put((scores, table, lengths, starts), implementation.device)

    def selected(scores, table, lengths, starts):
        window = {"lengths": lengths, "starts": starts, **o}
        name = implementation.name
        if not any(implementation.geometry):
            options = {"page_size": page_size, "implementation": name}
            return paged_top_k(scores, k, table, **options, **window)
        return _top_k.top_k_with_geometry(
            scores,
            k,
            **{"sorted": False, **window},
            implementation=name,
            geometry=implementation.geometry,
            pages=(table, (page_size, page_size)),
        )

    return jax.device_get(jax.jit(selected)(*operands))


def check(result, scores, k, table, page_size, lengths=None, starts=None, **options):
    """Asserts that the slots and the values are right, bit for bit."""
    stride = options.pop("page_stride", page_size)
    given = (scores, k, table, page_size, stride, lengths, starts)
    expected = oracle.paged_top_k(*given, **options)
    oracle.check(result, scores, k, lengths, starts, expected=expected)


def tables(rng, shape, page_size, slots=1 << 20):
    """Page tables of distinct pages, in disorder."""
    pages = rng.permutation(max(slots // page_size, int(np.prod(shape))))
    return pages[: int(np.prod(shape))].reshape(shape).astype(np.int32)


def pages_for(n, page_size):
    return -(-n // page_size)


@pytest.mark.parametrize("page_size", [1, 2, 3, 64, 1000, 5003, 9999])
@pytest.mark.parametrize("sorted", [True, False])
def test_every_distribution_is_exact_in_pages_of_any_size(
    implementation, page_size, sorted
):
    n, k = 5003, 300
    labels, scores = inputs.batch(n, k, np.float32)
    rng = inputs.generator("paged", page_size)
    starts = rng.integers(0, n // 3, len(labels)).astype(np.int32)
    lengths = rng.integers(0, n, len(labels)).astype(np.int32)
    lengths[::7] = rng.integers(k - 2, k + 3, len(lengths[::7]))
    table = tables(rng, (len(labels), pages_for(n, page_size)), page_size)
    given = (scores, k, table, page_size, lengths, starts)
    check(select(implementation, *given, sorted=sorted), *given, sorted=sorted)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_long_rows_that_several_share_the_work_of(implementation, dtype):
    n, k, page_size = 400_009, 2048, 64
    _, scores = inputs.batch(n, k, dtype, ["normal", "plateau", "random_bits"])
    rng = inputs.generator("long pages")
    table = tables(rng, (3, pages_for(n, page_size)), page_size)
    given = (scores, k, table, page_size)
    check(select(implementation, *given), *given)


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (3, 2, 4)], ids=str)
def test_a_table_is_shared_by_the_rows_of_the_axes_that_it_lacks(implementation, lead):
    n, k, page_size = 130, 20, 16
    rng = inputs.generator("shared table")
    scores = rng.standard_normal((3, 2, 4, n)).astype(np.float32)
    lengths = rng.integers(-1, n + 2, (3, 2, 4)).astype(np.int32)
    table = tables(rng, (*lead, pages_for(n, page_size)), page_size)
    given = (scores, k, table, page_size, lengths)
    check(select(implementation, *given), *given)


@pytest.mark.parametrize("pages", [0, 1, 4, 7])
def test_columns_that_no_page_holds_are_outside_every_window(implementation, pages):
    n, k, page_size = 100, 30, 16
    rng = inputs.generator("narrow table")
    ends = [INT_MIN, -5, 0, 1, 15, 16, 17, 63, 64, 65, n, n + 17, INT_MAX]
    ends = np.array(ends, np.int32)
    starts, lengths = (x.reshape(-1) for x in np.meshgrid(ends, ends))
    scores = rng.standard_normal((len(starts), n)).astype(np.float32)
    scores[:, pages * page_size :] += 100  # they would win
    table = tables(rng, (len(starts), pages), page_size)
    for sorted in (True, False):
        given = (scores, k, table, page_size, lengths, starts)
        check(select(implementation, *given, sorted=sorted), *given, sorted=sorted)
    # Neither a start alone nor a k above what is held lets anything else in.
    given = (scores, k, table, page_size, np.full(len(starts), n, np.int32), starts)
    check(select(implementation, *given), *given)


def test_page_numbers_are_data_and_slots_wrap_like_int32(implementation):
    n, k, page_size = 90, 40, 7
    rng = inputs.generator("wild pages")
    wild = [INT_MIN, INT_MIN + 1, -1, 0, 1, 2**30, 306_783_378, 306_783_379, INT_MAX]
    table = rng.choice(wild, (5, pages_for(n, page_size))).astype(np.int32)
    scores = rng.standard_normal((5, n)).astype(np.float32)
    given = (scores, k, table, page_size)
    check(select(implementation, *given), *given)


def test_the_page_size_may_be_as_large_as_an_index(implementation):
    scores = inputs.generator("vast").standard_normal((3, 500)).astype(np.float32)
    table = np.array([[0], [0], [1]], np.int32)
    given = (scores, 30, table, INT_MAX)
    check(select(implementation, *given), *given)


def test_offsets_are_the_first_slot_of_each_sequence(implementation):
    n, k = 300, 20
    rng = inputs.generator("offsets")
    scores = rng.standard_normal((3, 4, n)).astype(np.float32)
    lengths = rng.integers(-1, n + 2, (3, 4)).astype(np.int32)
    for shape in ((), (3,), (3, 4)):
        offsets = rng.integers(0, 1 << 30, shape).astype(np.int32)
        operands = jax.device_put((scores, offsets, lengths), implementation.device)
        result = jax.jit(
            lambda x, o, r: paged_top_k(
                x, k, offsets=o, lengths=r, implementation=implementation.name
            )
        )(*operands)
        table = offsets[..., None]
        check(result, scores, k, table, INT_MAX, lengths, page_stride=1)


@pytest.mark.parametrize(
    "geometry", [(4, 0, 0, 0, 0), (4, 0, 2048, 0, 0), (5, 1, 16, 0, 0)], ids=str
)
@pytest.mark.parametrize("name", implementations.kernels())
def test_pages_under_a_bent_geometry(name, geometry):
    bent = implementations.Implementation(name, "cuda", geometry)
    n, k, page_size = 40_009, 300, 48
    _, scores = inputs.batch(n, k, np.float32)
    rng = inputs.generator("bent pages")
    table = tables(rng, (len(scores), pages_for(n, page_size)), page_size)
    for sorted in (True, False):
        given = (scores, k, table, page_size)
        check(select(bent, *given, sorted=sorted), *given, sorted=sorted)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_other_dtypes_have_slots_too(other_implementation, dtype):
    rng = inputs.generator("paged dtypes")
    scores = rng.integers(0, 100, (4, 90)).astype(dtype)
    table = tables(rng, (4, 6), 16)
    given = (scores, 30, table, 16, np.array([90, 20, 0, 40], np.int32))
    with jax.default_device(other_implementation.device):
        result = paged_top_k(scores, 30, table, page_size=16, lengths=given[-1])
    check(jax.device_get(result), *given)


def test_values_are_those_of_top_k_and_slots_those_of_its_columns(other_implementation):
    rng = inputs.generator("as top_k")
    scores = rng.integers(-40, 40, (4, 3000)).astype(jnp.bfloat16)
    table = tables(rng, (4, pages_for(3000, 64)), 64)
    result = select(other_implementation, scores, 100, table, 64, sorted=True)
    plain = other_implementation(scores, 100)
    assert result.values.tobytes() == plain.values.tobytes()
    page = np.take_along_axis(table, plain.indices // 64, -1)
    assert (result.indices == page * 64 + plain.indices % 64).all()


@pytest.mark.parametrize("shape", [(0, 90), (3, 0), (3, 90)])
def test_empty_problems_are_answered(platform, shape):
    table = np.zeros((shape[0], 6), np.int32)
    result = paged_top_k(np.zeros(shape, np.float32), 0, table, page_size=16, lengths=9)
    assert result.values.shape == result.indices.shape == (shape[0], 0)
    if shape[-1] == 0:
        result = paged_top_k(np.zeros(shape), 5, table, page_size=16, lengths=9)
        assert (np.asarray(result.indices) == -1).all()


# What the compiler sees.


def lowered(platform, table_shape, shape=(3, 4, 300), **options):
    def selected(scores, table, lengths):
        window = {"lengths": lengths, **options}
        return paged_top_k(scores, 20, table, page_size=16, **window)

    traced = jax.jit(selected).trace(
        jax.ShapeDtypeStruct(shape, np.float32),
        jax.ShapeDtypeStruct(table_shape, np.int32),
        jax.ShapeDtypeStruct(shape[:-1], np.int32),
    )
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("lead", [(), (3,), (3, 4)], ids=str)
def test_it_is_one_call_that_gets_the_table_as_it_is(platform, lead):
    text = lowered(platform, (*lead, 19))
    (target,) = re.findall(r"custom_call @(\w+)", text)
    assert target in jax_topk.FFI_TARGETS and "_paged_" in target
    (line,) = [line for line in text.splitlines() if "custom_call @" in line]
    shape = "x".join(map(str, (*lead, 19)))
    assert f"tensor<{shape}xi32>" in line and "tensor<3x4x1xi32>" in line
    assert "page_size = 16 : i64" in line and "page_stride = 16 : i64" in line
    assert not re.search("gather|divide|while", text)


# Transforms.


@pytest.fixture
def table():
    return tables(inputs.generator("table"), (3, 19), 16)


def test_vmap_over_scores_tables_or_both(platform, scores, lengths, table):
    k, size = 20, 16

    def mapped(in_axes):
        return jax.jit(
            jax.vmap(
                lambda x, t, r: paged_top_k(x, k, t, page_size=size, lengths=r), in_axes
            )
        )

    result = mapped((0, 0, 0))(scores, table, lengths)
    check(result, scores, k, table, size, lengths)
    result = mapped((0, None, None))(scores, table[0], lengths[0])
    check(result, scores, k, table[0], size, lengths[0])
    result = mapped((1, None, 1))(scores, table, lengths)
    moved = np.moveaxis(scores, 1, 0), np.moveaxis(lengths, 1, 0)
    check(result, moved[0], k, np.stack([table] * 4), size, moved[1])
    result = mapped((None, 1, None))(scores[0], table.T, lengths[0])
    check(result, np.stack([scores[0]] * 3), k, table, size, lengths[:1])


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_derivatives_are_those_of_the_columns(platform, scores, lengths, lead):
    k, size = 20, 16
    rng = inputs.generator("paged derivatives")
    table = tables(rng, (*scores.shape[:lead], 15), size)  # for 240 of 300 columns
    tangent = rng.standard_normal(scores.shape).astype(np.float32)

    def selected(x):
        return paged_top_k(x, k, table, page_size=size, lengths=lengths)

    given = (scores, k, table, size, lengths)
    result, (dvalues, dslots) = jax.jit(lambda x, t: jax.jvp(selected, (x,), (t,)))(
        scores, tangent
    )
    check(result, *given)
    _, columns = oracle.top_k(scores[..., :240], k, lengths, sorted=False)
    want = np.take_along_axis(tangent, np.maximum(columns, 0), -1)
    np.testing.assert_array_equal(dvalues, np.where(columns < 0, 0, want))
    assert dslots.dtype == jax.dtypes.float0
    (values, slots), pull = jax.vjp(lambda x: tuple(selected(x)), scores)
    check((values, slots), *given)
    cotangent = rng.standard_normal(values.shape).astype(np.float32)
    gradient = np.zeros_like(scores)
    np.put_along_axis(gradient, np.maximum(columns, 0), 0, -1)
    for row in np.ndindex(columns.shape[:-1]):
        real = columns[row] >= 0
        gradient[row][columns[row][real]] = cotangent[row][real]
    zero = np.zeros(slots.shape, jax.dtypes.float0)
    np.testing.assert_array_equal(pull((cotangent, zero))[0], gradient)


def test_in_a_scan_the_table_may_grow(platform, scores, table):
    def step(length, _):
        row = scores[:, 0]
        slots = paged_top_k(row, 5, table, page_size=16, lengths=length).indices
        return length + 40, slots

    steps = jax.jit(lambda: jax.lax.scan(step, jnp.array([1, 5, 9]), None, length=4))
    for i, slots in enumerate(jax.device_get(steps()[1])):
        lengths = np.array([1, 5, 9]) + 40 * i
        _, want = oracle.paged_top_k(scores[:, 0], 5, table, 16, 16, lengths)
        assert slots.tobytes() == want.tobytes()


SHARDINGS = [
    ((8,), ("x",), P("x", None, None)),
    ((4, 2), ("x", "y"), P("x", "y", None)),
    ((4, 2), ("x", "y"), P(None, "y", None)),
]


@pytest.mark.parametrize(("shape", "names", "spec"), SHARDINGS, ids=str)
@pytest.mark.parametrize("lead", [0, 1, 2])
@pytest.mark.parametrize("name", ["cpu", "xla"])
def test_sharded_rows_stay_where_they_are(shape, names, spec, lead, name):
    mesh = meshes.mesh(jax.devices("cpu"), shape, names)
    rng = inputs.generator("sharded pages")
    scores = rng.integers(-40, 40, (8, 4, 300)).astype(np.float32)
    lengths = rng.integers(-1, 302, (8, 4)).astype(np.int32)
    table = tables(rng, (*(8, 4)[:lead], 19), 16)
    operands = (
        meshes.placed(scores, mesh, spec),
        meshes.placed(table, mesh, P(*spec[:lead], None)),
        meshes.placed(lengths, mesh, P(*spec[:-1])),
    )
    compiled = (
        jax.jit(
            lambda x, t, r: paged_top_k(
                x, 20, t, page_size=16, lengths=r, implementation=name
            )
        )
        .lower(*operands)
        .compile()
    )
    assert not meshes.collectives(compiled)
    result = compiled(*operands)
    assert all(x.sharding.spec == spec for x in result)
    check(result, scores, 20, table, 16, lengths)


def test_explicit_axes_are_in_the_type_of_the_result():
    mesh = meshes.mesh(
        jax.devices("cpu"), (4, 2), ("x", "y"), axis_type=AxisType.Explicit
    )
    rng = inputs.generator("explicit pages")
    scores = rng.standard_normal((8, 4, 300)).astype(np.float32)
    table = tables(rng, (8, 19), 16)
    with jax.set_mesh(mesh):
        placed = jax.device_put(scores, P("x", "y", None))
        elsewhere = jax.device_put(table, P("y", None))

        def selected(x):
            return paged_top_k(x, 20, elsewhere, page_size=16)

        result = jax.jit(selected)(placed)
        assert jax.typeof(result.indices).sharding.spec == P("x", "y", None)
        gradient = jax.jit(jax.grad(lambda x: selected(x).values.sum()))(placed)
        assert jax.typeof(gradient).sharding.spec == P("x", "y", None)
        jitted = jax.jit(lambda x: jax.jvp(selected, (x,), (x,)))(placed)[0]
    check(result, scores, 20, table, 16)
    check(jitted, scores, 20, table, 16)


def test_in_a_shard_map_the_table_is_shared_on_each_device():
    mesh = meshes.mesh(jax.devices("cpu"))
    rng = inputs.generator("mapped pages")
    scores = rng.standard_normal((16, 2, 300)).astype(np.float32)
    table = tables(rng, (16, 19), 16)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    def selected(x, t):
        return tuple(paged_top_k(x, 20, t, page_size=16))

    text = selected.lower(scores, table).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call @jax_topk" in line]
    assert "tensor<2x19xi32>" in line
    check(selected(scores, table), scores, 20, table, 16)


@pytest.mark.parametrize("symbolic", [False, True])
def test_an_export_selects_on_one_device_and_on_eight(symbolic):
    rng = inputs.generator("exported pages")
    scores = rng.standard_normal((8, 2, 300)).astype(np.float32)
    lengths = rng.integers(-1, 302, (8, 2)).astype(np.int32)
    table = tables(rng, (8, 19), 16)
    operands = [scores, table, lengths]
    if symbolic:
        rows, pages = export.symbolic_shape("rows, pages")
        shapes = [(rows, 2, 300), (rows, pages), (rows, 2)]
        operands = [
            jax.ShapeDtypeStruct(shape, x.dtype)
            for shape, x in zip(shapes, operands, strict=True)
        ]

    def selected(x, t, r):
        return paged_top_k(x, 20, t, page_size=16, lengths=r)

    ours = [
        export.DisabledSafetyCheck.custom_call(name) for name in jax_topk.FFI_TARGETS
    ]
    exported = export.export(
        jax.jit(selected), platforms=("cpu", "cuda"), disabled_checks=ours
    )(*operands)
    program = export.deserialize(bytearray(exported.serialize()))
    given = (scores, table, lengths)
    one = jax.device_put(given, jax.devices("cpu")[0])
    check(program.call(*one), scores, 20, table, 16, lengths)
    mesh = meshes.mesh(jax.devices("cpu"), (4, 2), ("x", "y"))
    specs = (P("x", "y"), P("x"), P("x", "y"))
    eight = [meshes.placed(x, mesh, s) for x, s in zip(given, specs, strict=True)]
    check(jax.jit(program.call)(*eight), scores, 20, table, 16, lengths)

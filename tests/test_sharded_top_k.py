# SPDX-License-Identifier: Apache-2.0
"""Columns split over devices: the answer of one device, for one gather."""

import re

import inputs
import jax
import jax.numpy as jnp
import meshes
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_topk import TopK, sharded_top_k, top_k

INT32 = np.iinfo(np.int32)


def selection(mesh, names, k, check_vma=True, rows=None, **options):
    """The jitted (scores, lengths, starts) -> TopK with columns split over `names`."""

    def select(scores, lengths, starts):
        return sharded_top_k(
            scores, k, names, lengths=lengths, starts=starts, **options
        )

    specs = (P(rows, names), P(rows), P(rows))
    return jax.jit(
        jax.shard_map(
            select, mesh=mesh, in_specs=specs, out_specs=P(rows), check_vma=check_vma
        )
    )


def windows(n, width, rows):
    """Lengths and starts: at, around and far from every boundary between shards."""
    near = [b + d for b in range(0, n + 1, width) for d in (-1, 0, 1)]
    pairs = [(a, b - a) for a in near[::2] for b in near[1::3]]
    extreme = [INT32.min, -5, 0, 7, n - 1, n, n + 3, INT32.max]
    pairs += [(a, b) for a in extreme for b in extreme]
    pairs = np.array(pairs, np.int64).clip(INT32.min, INT32.max).astype(np.int32)
    picked = pairs[inputs.generator("windows", n).permutation(len(pairs))]
    picked = np.resize(picked, (rows, 2))
    return picked[:, 1].copy(), picked[:, 0].copy()


def repeated(scores, rows):
    return np.ascontiguousarray(np.resize(scores, (rows, scores.shape[-1])))


MESHES = [
    pytest.param((8,), ("x",), id="x8"),
    pytest.param((2, 4), ("x", "y"), id="x2-y4"),
    pytest.param((2, 2, 2), ("x", "y", "z"), id="x2-y2-z2"),
]


def test_the_answer_is_that_of_one_device(devices):
    # k below, at and above a shard's width.
    mesh, shards = meshes.mesh(devices), len(devices)
    width = 37
    labels, scores = inputs.batch(width * shards, 20, np.float32)
    for k in (20, width, 60):
        for sorted in (True, False):
            result = selection(mesh, "x", k, sorted=sorted)(scores, None, None)
            assert type(result) is TopK
            oracle.check(
                jax.device_get(result), scores, k, sorted=sorted, labels=labels
            )


@pytest.mark.parametrize(("shape", "names"), MESHES)
@pytest.mark.parametrize("sorted", [True, False])
def test_windows_are_in_columns_of_the_whole_row(shape, names, sorted):
    mesh, width = meshes.mesh(jax.devices("cpu"), shape, names), 20
    n = 8 * width
    scores = inputs.batch(n, 10, np.float32)[1]
    scores = repeated(np.concatenate([scores, -scores]), 400)
    lengths, starts = windows(n, width, 400)
    for k in (9, 33, n + 5):  # less and more than a shard, more than the row
        result = selection(mesh, names, k, sorted=sorted)(scores, lengths, starts)
        oracle.check(jax.device_get(result), scores, k, lengths, starts, sorted)


def test_lengths_alone_starts_alone_and_plain_numbers():
    mesh = meshes.mesh(jax.devices("cpu"), (4, 2), ("x", "y"))
    names, n = ("x", "y"), 8 * 11
    scores = inputs.generator("alone").integers(-9, 9, (40, n)).astype(np.float32)
    lengths, starts = windows(n, 11, 40)
    starts[:3] = INT32.min, INT32.min + 1, INT32.max
    for k in (5, 30):
        select = selection(mesh, names, k)
        oracle.check(select(scores, lengths, None), scores, k, lengths)
        oracle.check(select(scores, None, starts), scores, k, None, starts)

    def select(x):
        return sharded_top_k(x, 7, names, lengths=40, starts=np.int8(-3))

    sharded = jax.shard_map(select, mesh=mesh, in_specs=P(None, names), out_specs=P())
    oracle.check(jax.jit(sharded)(scores), scores, 7, 40, -3)


@pytest.mark.parametrize("sorted", [True, False])
def test_what_ranks_below_padding_still_beats_it(sorted):
    # Only -inf and NaNs below it, so that padding would win if values alone counted.
    mesh = meshes.mesh(jax.devices("cpu"), (2, 4), ("x", "y"))
    bits = inputs.generator("below").integers(0xFF800000, 1 << 32, (60, 48))
    scores = bits.astype(np.uint32).view(np.float32)
    lengths, starts = windows(48, 6, 60)
    for k in (4, 10):
        select = selection(mesh, ("x", "y"), k, sorted=sorted)
        result = jax.device_get(select(scores, lengths, starts))
        oracle.check(result, scores, k, lengths, starts, sorted)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_every_bit_survives_the_way(dtype, devices):
    mesh = meshes.mesh(devices)
    n = 12 * len(devices)
    scores = inputs.from_bits(inputs.generator("bits"), (64, n), dtype)
    lengths, starts = windows(n, 12, 64)
    for given in ((None, None), (lengths, starts)):
        result = jax.device_get(selection(mesh, "x", 10)(scores, *given))
        oracle.check(result, scores, 10, *given)


OTHERS = ["uint8", "int16", "int32", "bool", "int4", "float8_e4m3fnuz"]


def test_scores_of_other_dtypes():
    mesh = meshes.mesh(jax.devices("cpu"))
    bits = inputs.from_bits(inputs.generator("others"), (6, 64), np.uint32)
    lengths = np.array([64, 0, 5, 33, 8, 9], np.int32)
    for name in OTHERS:
        scores = jnp.asarray(bits >> 7).astype(name)
        result = selection(mesh, "x", 12)(scores, lengths, None)
        want = jax.jit(lambda x: top_k(x, 12, lengths=lengths))(scores)
        for got, wanted in zip(result, want, strict=True):
            got, wanted = np.asarray(got), np.asarray(wanted)
            assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()


def test_scores_of_64_bits():
    mesh = meshes.mesh(jax.devices("cpu"))
    rng = inputs.generator("64 bits")
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64, np.uint64):
            scores = inputs.from_bits(rng, (6, 64), dtype)
            lengths, starts = windows(64, 8, 6)
            result = selection(mesh, "x", 12)(scores, lengths, starts)
            oracle.check(jax.device_get(result), scores, 12, lengths, starts)


def test_names_are_in_the_order_of_the_partition_spec():
    mesh = meshes.mesh(jax.devices("cpu"), (2, 4), ("x", "y"))
    scores = inputs.generator("order").permutation(80).astype(np.float32)[None]
    for names in (("x", "y"), ("y", "x"), "y", ("x",)):
        oracle.check(selection(mesh, names, 15)(scores, None, None), scores, 15)


@pytest.mark.parametrize(
    ("rows", "width", "k"), [(3, 10, 0), (0, 10, 4), (3, 0, 0), (3, 0, 4)]
)
def test_empty_problems(rows, width, k):
    mesh = meshes.mesh(jax.devices("cpu"), (2, 4), ("x", "y"))
    scores = np.zeros((rows, 8 * width), np.float32)
    lengths = np.full(rows, 5, np.int32)
    result = selection(mesh, ("x", "y"), k)(scores, lengths, None)
    oracle.check(jax.device_get(result), scores, k, lengths)


# What moves ---------------------------------------------------------------------------


@pytest.mark.parametrize("windowed", [False, True])
def test_one_gather_of_k_values_and_k_indices_a_shard(devices, windowed):
    mesh, shards = meshes.mesh(devices), len(devices)
    rows, k = 3, 16
    n = 1000 * shards
    columns = NamedSharding(mesh, P(None, "x"))
    scores = jax.ShapeDtypeStruct((rows, n), np.float32, sharding=columns)
    lengths = jax.ShapeDtypeStruct((rows,), np.int32) if windowed else None
    compiled = selection(mesh, "x", k).lower(scores, lengths, lengths).compile()
    ((name, shape),) = meshes.moved(compiled)
    assert name == "all-gather"
    assert meshes.elements(shape) == rows * 2 * k * shards
    # Nothing is as wide as a row: not on the wire, and not in memory either.
    widths = re.findall(r"\[(?:\d+,)*(\d+)\]", compiled.as_text())
    assert max(map(int, widths)) == max(1000, k * shards) < n


@pytest.mark.parametrize("windowed", [False, True])
def test_several_axes_merge_one_by_one(windowed):
    mesh = meshes.mesh(jax.devices("cpu"), (2, 4), ("x", "y"))
    rows, width, k = 3, 1000, 16
    scores = jax.ShapeDtypeStruct((rows, 8 * width), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((rows,), np.int32) if windowed else None
    compiled = selection(mesh, ("x", "y"), k).lower(scores, lengths, lengths).compile()
    found = meshes.moved(compiled)
    assert [name for name, _ in found] == ["all-gather"] * 2
    # Three words of 16 bits each: never the candidates of all eight shards.
    sizes = [meshes.elements(shape) for _, shape in found]
    assert sizes == [rows * 3 * k * 4, rows * 3 * k * 2]


def test_reverse_mode_moves_nothing_more():
    mesh = meshes.mesh(jax.devices("cpu"))
    select = selection(mesh, "x", 16)
    scores = meshes.placed(np.zeros((3, 800), np.float32), mesh, P(None, "x"))
    gradient = jax.jit(jax.grad(lambda x: select(x, None, None).values.sum()))
    compiled = gradient.lower(scores).compile()
    assert meshes.collectives(compiled) == ["all-gather"]
    assert compiled(scores).sharding.is_equivalent_to(scores.sharding, 2)


def test_rows_over_one_axis_and_columns_over_another():
    mesh = meshes.mesh(jax.devices("cpu"), (2, 4), ("data", "context"))
    scores = inputs.generator("both").integers(-50, 50, (6, 80)).astype(np.float32)
    lengths, starts = windows(80, 20, 6)
    select = selection(mesh, "context", 25, rows="data")
    operands = (
        meshes.placed(scores, mesh, P("data", "context")),
        meshes.placed(lengths, mesh, P("data")),
        meshes.placed(starts, mesh, P("data")),
    )
    compiled = select.lower(*operands).compile()
    ((name, shape),) = meshes.moved(compiled)
    assert name == "all-gather" and meshes.elements(shape) == 3 * 2 * 20 * 4
    result = compiled(*operands)
    assert result.values.sharding.spec == P("data")
    oracle.check(jax.device_get(result), scores, 25, lengths, starts)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_where_only_the_context_axis_is_manual(kind):
    mesh = meshes.mesh(
        jax.devices("cpu"), (2, 4), ("data", "context"), (kind, AxisType.Auto)
    )
    scores = inputs.generator("partial").integers(-9, 9, (6, 80)).astype(np.float32)
    lengths, starts = windows(80, 20, 6)

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=(P(None, "context"), P(), P()),
        out_specs=P(),
        axis_names={"context"},
    )
    def select(x, lengths, starts):
        return sharded_top_k(x, 25, "context", lengths=lengths, starts=starts)

    with jax.set_mesh(mesh):
        operands = (
            meshes.placed(scores, mesh, P("data", "context")),
            meshes.placed(lengths, mesh, P("data")),
            meshes.placed(starts, mesh, P("data")),
        )
        compiled = select.lower(*operands).compile()
        result = compiled(*operands)
    # XLA gathers the operand of a collective over the axes that it manages itself: the
    # candidates, and only those.
    sizes = {name: meshes.elements(shape) for name, shape in meshes.moved(compiled)}
    assert set(sizes) == {"all-gather"} and max(sizes.values()) <= 6 * 2 * 20 * 4
    oracle.check(jax.device_get(result), scores, 25, lengths, starts)


# Transforms ---------------------------------------------------------------------------


def test_vmap_folds_into_the_one_gather():
    mesh = meshes.mesh(jax.devices("cpu"))
    scores = inputs.generator("vmap").integers(-9, 9, (3, 80, 5)).astype(np.float32)
    lengths = np.array([80, 3, 50], np.int32)

    def select(x, length):  # (80,), ()
        return sharded_top_k(x, 12, "x", lengths=length)

    both = jax.vmap(jax.vmap(select, in_axes=(1, None)), in_axes=(0, 0))
    mapped = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=(P(None, "x"), P()), out_specs=P())
    )
    compiled = mapped.lower(scores, lengths).compile()
    assert meshes.collectives(compiled) == ["all-gather"]
    assert "while(" not in compiled.as_text()
    want = scores.transpose(0, 2, 1), 12, lengths[:, None]
    oracle.check(compiled(scores, lengths), *want)

    # And from outside.
    inner = jax.shard_map(select, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    outer = jax.vmap(jax.vmap(inner, in_axes=(1, None)), in_axes=(0, 0))
    compiled = jax.jit(outer).lower(scores, lengths).compile()
    assert meshes.collectives(compiled).count("all-gather") <= 2
    oracle.check(compiled(scores, lengths), *want)


@pytest.fixture
def problem():
    """Scores, lengths, starts, weights of an answer, a tangent; 8 times 6 columns."""
    rng = inputs.generator("derivatives")
    scores = rng.integers(-20, 20, (6, 48)).astype(np.float32)
    lengths = np.array([48, 3, 0, 20, 9, 30], np.int32)
    starts = np.array([0, 4, 9, 11, 45, -3], np.int32)
    weights = rng.integers(1, 9, (6, 10)).astype(np.float32)
    tangent = rng.integers(-9, 9, (6, 48)).astype(np.float32)
    return scores, lengths, starts, weights, tangent


@pytest.mark.parametrize(
    ("shape", "names", "rows", "check_vma", "windowed"),
    [
        ((2, 4), ("x", "y"), None, True, True),
        ((2, 4), ("x", "y"), None, False, True),
        ((2, 4), ("y",), "x", True, True),
        ((8,), ("x",), None, True, False),
    ],
)
def test_derivatives_are_those_of_one_device(
    problem, shape, names, rows, check_vma, windowed
):
    scores, lengths, starts, weights, tangent = problem
    lengths, starts = (lengths, starts) if windowed else (None, None)
    mesh = meshes.mesh(jax.devices("cpu"), shape, ("x", "y")[: len(shape)])
    select = selection(mesh, names, 10, check_vma, rows)

    def sharded(x):
        return select(x, lengths, starts).values

    def single(x):
        return top_k(x, 10, lengths=lengths, starts=starts).values

    for transform in (
        lambda f: jax.vjp(f, scores)[1](weights)[0],
        lambda f: jax.jvp(f, (scores,), (tangent,))[1],
    ):
        np.testing.assert_array_equal(transform(sharded), transform(single))

    def loss(f):
        def cube(x):
            values = f(x)
            return jnp.sum(jnp.where(jnp.isneginf(values), 0, values) ** 3 * weights)

        return cube

    def hvp(f):
        return jax.jvp(jax.grad(loss(f)), (scores,), (tangent,))[1]

    gradients = [jax.jit(jax.grad(loss(f)))(scores) for f in (sharded, single)]
    np.testing.assert_array_equal(*gradients)
    np.testing.assert_array_equal(hvp(sharded), hvp(single))


def test_gradients_inside_shard_map(problem):
    scores, lengths, starts, weights, _ = problem
    mesh = meshes.mesh(jax.devices("cpu"))

    def gradient(select):
        def loss(x, lengths, starts):
            values = select(x, lengths, starts)
            return jnp.sum(jnp.where(jnp.isneginf(values), 0, values * weights))

        return jax.grad(loss)

    def local(x, lengths, starts):
        return sharded_top_k(x, 10, "x", lengths=lengths, starts=starts).values

    def single(x, lengths, starts):
        return top_k(x, 10, lengths=lengths, starts=starts).values

    inside = jax.jit(
        jax.shard_map(
            gradient(local),
            mesh=mesh,
            in_specs=(P(None, "x"), P(), P()),
            out_specs=P(None, "x"),
        )
    )
    np.testing.assert_array_equal(
        inside(scores, lengths, starts), gradient(single)(scores, lengths, starts)
    )


def test_indices_have_no_derivative(problem):
    scores, *_, tangent = problem
    select = selection(meshes.mesh(jax.devices("cpu")), "x", 10)
    _, moved = jax.jvp(lambda x: select(x, None, None), (scores,), (tangent,))
    assert moved.indices.dtype == jax.dtypes.float0
    assert moved.indices.shape == (6, 10)


def test_scan_remat_and_no_jit(problem):
    scores, lengths, starts, _, _ = problem
    mesh = meshes.mesh(jax.devices("cpu"))

    @jax.shard_map(mesh=mesh, in_specs=(P(None, "x"), P()), out_specs=P())
    def select(x, starts):
        def step(carry, start):
            return carry, sharded_top_k(x, 10, "x", starts=start)

        return jax.lax.scan(step, 0, starts)[1]

    result = jax.jit(select)(scores, starts)
    want = np.broadcast_to(scores, (6, 6, 48)), 10, None, starts[:, None]
    oracle.check(jax.device_get(result), *want)

    plain = selection(mesh, "x", 10)
    oracle.check(
        plain.__wrapped__(scores, lengths, starts), scores, 10, lengths, starts
    )

    def loss(x):
        return plain(-2 * x, None, None).values.sum()

    np.testing.assert_array_equal(
        jax.grad(jax.checkpoint(loss))(scores), jax.grad(loss)(scores)
    )


def test_a_saved_answer_is_not_gathered_again(problem):
    scores, lengths, starts, _, _ = problem
    select = selection(meshes.mesh(jax.devices("cpu")), "x", 10)

    def loss(x):
        values = select(2 * x, lengths, starts).values
        return jnp.sum(jnp.where(jnp.isneginf(values), 0, values) ** 2)

    want = jax.grad(loss)(scores)
    save = jax.checkpoint_policies.save_only_these_names
    for policy, count in ((None, 2), (save("another"), 2), (save("top_k"), 1)):
        gradient = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))
        text = str(jax.make_jaxpr(gradient)(scores))
        assert len(re.findall(r"= all_gather\w*\[", text)) == count
        np.testing.assert_array_equal(gradient(scores), want)


# Errors -------------------------------------------------------------------------------


def misuse(shape=(3, 16), k=4, names="x", dtype=np.float32, **options):
    mesh = meshes.mesh(jax.devices("cpu"), (2, 4), ("x", "y"))
    select = jax.shard_map(
        lambda x: sharded_top_k(x, k, names, **options),
        mesh=mesh,
        in_specs=P(None, ("x", "y")) if shape else P(),
        out_specs=P(),
        check_vma=False,
    )
    jax.eval_shape(select, jax.ShapeDtypeStruct(shape, dtype))


MISUSES = {
    "no_such_axis": ({"names": "z"}, ValueError, "axis_name.*shard_map.*'z'"),
    "one_axis_of_two_unknown": ({"names": ("x", "z")}, ValueError, "'z'.*'x', 'z'"),
    "an_axis_twice": ({"names": ("x", "x")}, ValueError, "each mesh axis once"),
    "no_axis": ({"names": ()}, TypeError, r"a str or a tuple of str; got \(\)"),
    "a_list": ({"names": ["x"]}, TypeError, r"tuple of str; got \['x'\]"),
    "a_number": ({"names": 0}, TypeError, "tuple of str; got 0"),
    "k_above_all_columns": (
        {"names": ("x", "y"), "k": 17},
        ValueError,
        r"in all shards, 16, unless lengths is given; got k=17 .*\(3, 2\) on each of 8",
    ),
    "k_negative": ({"k": -1}, ValueError, "k to be 0 or more; got k=-1"),
    "k_not_static": ({"k": 2.0}, TypeError, "k to be a static int; got float"),
    "lengths_of_floats": ({"lengths": 2.0}, TypeError, "lengths to be an array of int"),
    "lengths_of_another_shape": (
        {"lengths": np.zeros(4, np.int32)},
        ValueError,
        r"lengths to broadcast to the leading axes of scores, \(3,\)",
    ),
    "starts_of_bools": (
        {"starts": np.zeros(3, bool)},
        TypeError,
        r"an array of integers; got starts of bool .*\(3, 2\) on each of 2 shards",
    ),
    "scores_complex": ({"dtype": np.complex64}, TypeError, "a real dtype; got complex"),
    "scores_scalar": ({"shape": ()}, ValueError, "at least one axis; got a scalar"),
    "sorted_not_static": ({"sorted": 1}, TypeError, "sorted to be a static bool; got"),
    "too_many_columns": (
        {"shape": (1, 1 << 31), "names": ("x", "y")},
        ValueError,
        "at most 2147483647 columns in all shards.*got 2147483648",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_in_words(name):
    options, error, words = MISUSES[name]
    with pytest.raises(error, match=words) as raised:
        misuse(**options)
    message = str(raised.value)
    assert message.startswith("sharded_top_k requires ") and "; got " in message


def test_outside_of_shard_map_is_an_error():
    with pytest.raises(ValueError, match="shard_map around it; got 'x'"):
        sharded_top_k(np.zeros((3, 8), np.float32), 2, "x")


def test_more_than_the_shard_has_is_fine():
    misuse(k=5, names=("x", "y"))
    misuse(k=17, lengths=3)
    misuse(shape=(1, (1 << 31) - 8), names=("x", "y"))

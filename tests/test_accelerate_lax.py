# SPDX-License-Identifier: Apache-2.0
"""Inside, jax.lax.top_k is our custom call, right in every bit; outside it is jax's."""

import threading
import warnings

import inputs
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_topk
from jax_topk import _ffi, accelerate_lax


def is_ours(program):
    """Whether a lowered program has a custom call of ours, and no other selection."""
    text = program.as_text()
    ours = any(f"custom_call @{name}" in text for name in jax_topk.FFI_TARGETS)
    assert ours != ("chlo.top_k" in text), text
    return ours


def lowered(platform, shape, k, dtype=np.float32, **options):
    select = jax.jit(lambda x: lax.top_k(x, k, **options))
    traced = select.trace(jax.ShapeDtypeStruct(shape, dtype))
    return traced.lower(lowering_platforms=(platform,))


# Whom it holds for, and how long.


def test_outside_programs_are_what_they_were_before_the_first_use(python_under):
    program = """
import jax, jax_topk
x = jax.numpy.arange(30.0).reshape(3, 10)
text = lambda: jax.jit(lambda x: jax.lax.top_k(x, 3)).lower(x).as_text()
before = text()
with jax_topk.accelerate_lax():
    inside = text()
print("custom_call @jax_topk" in inside, text() == before)
"""
    assert python_under("", "-c", program) == "True True\n"


def test_a_compiled_function_is_compiled_again_inside_and_kept_for_outside(platform):
    count = []

    @jax.jit
    def select(x):
        count.append(None)  # when traced
        return lax.top_k(x, 3)

    x = jnp.arange(30.0).reshape(3, 10)
    inside = []
    for _ in range(3):
        select(x)
        assert not is_ours(select.lower(x))
        with accelerate_lax():
            inside.append(select(x))
            assert is_ours(select.lower(x))
    assert len(count) == 2  # once for each, and never again
    oracle.check(jax.device_get(inside[0]), np.asarray(x), 3)


def test_functions_within_functions_and_loops_are_compiled_again_too(platform):
    inner = jax.jit(lambda x: lax.top_k(x, 3)[0])

    @jax.jit
    def scanned(x):
        return lax.scan(lambda c, row: (c, inner(row)), 0, x)[1]

    x = jnp.arange(30.0).reshape(3, 10)
    inner(x)
    scanned(x)
    with accelerate_lax():
        assert is_ours(scanned.lower(x)) and is_ours(inner.lower(x))
        inner(x)
        scanned(x)
    assert not is_ours(scanned.lower(x)) and not is_ours(inner.lower(x))


def test_where_a_program_is_lowered_counts_not_where_it_is_traced(platform):
    select, x = jax.jit(lambda x: lax.top_k(x, 3)), jnp.arange(30.0)
    outside = select.trace(x)
    assert not is_ours(outside.lower())
    with accelerate_lax():
        inside = select.trace(x)
        lower = inside.lower()
        assert is_ours(lower) and is_ours(outside.lower())
    assert not is_ours(inside.lower())
    values, indices = lower.compile()(x)  # accelerated wherever it is called
    assert (values.tolist(), indices.tolist()) == ([29, 28, 27], [29, 28, 27])


def test_calls_outside_of_jit_are_accelerated_too():
    # Seen in the tie rule where jax's own breaks it, and else in what gets lowered.
    rules = []
    x = jnp.arange(31.0)  # of no other test, whose program would be taken again
    lax.top_k(x, 3)

    def noted(*args, rule=jax_topk._primitive._plan.choose, **options):
        rules.append(args)
        return rule(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_topk._primitive._plan, "choose", noted)
        lax.top_k(x, 3)
        assert not rules
        with accelerate_lax():
            lax.top_k(x, 3)
        assert rules
        del rules[:]
        lax.top_k(x, 3)
        assert not rules


def test_as_a_function_it_holds_from_there_on_in_its_thread():
    select, x = jax.jit(lambda x: lax.top_k(x, 3)), jnp.arange(30.0)
    seen = []

    def thread():
        seen.append(is_ours(select.lower(x)))
        accelerate_lax()
        seen.append(is_ours(select.lower(x)))

    one = threading.Thread(target=thread)
    one.start()
    one.join()
    assert seen == [False, True]
    assert not is_ours(select.lower(x))


@pytest.mark.parametrize("all_threads", [False, True])
def test_another_thread_is_in_it_only_if_it_is_for_all(all_threads):
    select, x = jax.jit(lambda x: lax.top_k(x, 3)), jnp.arange(30.0)
    seen = []

    def look():
        one = threading.Thread(target=lambda: seen.append(is_ours(select.lower(x))))
        one.start()
        one.join()

    look()
    with accelerate_lax(all_threads=all_threads):
        assert is_ours(select.lower(x))
        look()
    look()
    assert seen == [False, all_threads, False]


def test_threads_in_and_out_of_it_at_once_each_get_their_own(platform):
    select = jax.jit(lambda x: lax.top_k(x, 3))
    x = jnp.asarray(inputs.generator("threads").standard_normal((4, 500)), np.float32)
    barrier, failures = threading.Barrier(4), []

    def work(inside):
        with jax.default_device(jax.devices(platform)[0]):
            barrier.wait()
            for _ in range(20):
                try:
                    if inside:
                        with accelerate_lax():
                            assert is_ours(select.lower(x))
                            result = select(x)
                    else:
                        assert not is_ours(select.lower(x))
                        result = select(x)
                    oracle.check(jax.device_get(result), np.asarray(x), 3)
                except BaseException as error:
                    failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures


def test_it_ends_with_an_error_and_nests():
    select, x = jax.jit(lambda x: lax.top_k(x, 3)), jnp.arange(30.0)
    with accelerate_lax():
        with pytest.raises(RuntimeError), accelerate_lax():
            raise RuntimeError
        assert is_ours(select.lower(x))
        with accelerate_lax(all_threads=True):
            pass
        assert is_ours(select.lower(x))
    assert not is_ours(select.lower(x))


# What is covered, and what is left to jax's own rule.


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_native_dtypes_are_covered_along_any_axis(platform, dtype):
    with accelerate_lax():
        for axis in (-1, 0, 1, 2):
            assert is_ours(lowered(platform, (30, 40, 50), 7, dtype, axis=axis))
    assert not is_ours(lowered(platform, (30, 40, 50), 7, dtype))


def test_whatever_else_lowers_as_ever():
    cases = [
        ("cpu", (4, 90), 7, np.int32),
        ("cuda", (4, 90), 7, np.uint8),
        ("cuda", (2, 9000), _ffi.MAX_K + 1, np.float32),
        ("cpu", (4, 90), 0, np.float32),
        ("cpu", (0, 90), 7, np.float32),
        ("tpu", (4, 90), 7, np.float32),
    ]
    for case in cases:
        before = lowered(*case).as_text()
        with accelerate_lax():
            assert lowered(*case).as_text() == before, case
    with accelerate_lax():
        assert is_ours(lowered("cuda", (2, 9000), _ffi.MAX_K))


def test_errors_are_those_of_jax():
    def errors():
        for k, dtype in ((8, np.float32), (-1, np.float32), (2, np.complex64)):
            with pytest.raises((TypeError, ValueError)) as raised:
                lax.top_k(np.zeros((3, 7), dtype), k)
            yield str(raised.value)

    before = list(errors())
    with accelerate_lax():
        assert list(errors()) == before


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int32])
@pytest.mark.parametrize("k", [1, 16, 300])
def test_every_distribution_is_selected_as_documented(platform, dtype, k):
    if dtype == np.int32:
        scores = inputs.generator(k).integers(-99, 99, (8, 5003)).astype(dtype)
    else:
        scores = inputs.batch(5003, k, dtype)[1]
    with accelerate_lax():
        result = jax.jit(lambda x: lax.top_k(x, k))(scores)
        if dtype == np.int32 and platform == "cuda" and k <= 16:
            return  # jax's own, which takes equal ones in any order there
    oracle.check(jax.device_get(result), scores, k)


@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_any_axis_is_selected_along(platform, scores, axis):
    with accelerate_lax():
        result = jax.jit(lambda x: lax.top_k(x, 3, axis=axis))(scores)
    moved = np.moveaxis(scores, axis, -1)
    oracle.check([np.moveaxis(x, axis, -1) for x in result], moved, 3)


def test_transforms_give_the_bits_that_they_give_outside(scores):
    def loss(x):
        values, indices = lax.top_k(x, 20)
        return (values**2 * jnp.sin(indices)).sum()

    tangent = inputs.generator("lax tangent").standard_normal(scores.shape)
    tangent = tangent.astype(np.float32)

    def everything(x):
        mapped = jax.vmap(lambda x: lax.top_k(x, 20), in_axes=1, out_axes=1)(x)
        pushed = jax.jvp(lambda x: lax.top_k(x, 20)[0], (x,), (tangent,))
        return mapped, pushed, jax.grad(loss)(x), jax.vmap(jax.grad(loss))(x)

    with jax.default_device(jax.devices("cpu")[0]):
        before = jax.jit(everything)(scores)
        with accelerate_lax():
            program = jax.jit(everything)
            assert is_ours(program.lower(scores))
            after = program(scores)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", None)], ids=str)
def test_sharded_rows_stay_and_sharded_columns_are_right(spec):
    mesh = meshes.mesh(jax.devices("cpu"))
    scores = inputs.generator("lax rows").integers(-40, 40, (16, 320))
    scores = scores.astype(np.float32)
    placed = meshes.placed(scores, mesh, spec)
    with accelerate_lax():
        compiled = jax.jit(lambda x: lax.top_k(x, 20)).lower(placed).compile()
    if spec[0] == "x":
        assert not meshes.collectives(compiled)
    oracle.check(jax.device_get(compiled(placed)), scores, 20)


def test_explicit_axes_and_shard_map_work_as_they_do_outside():
    scores = inputs.generator("lax mesh").standard_normal((16, 320)).astype(np.float32)
    explicit = meshes.mesh(jax.devices("cpu"), axis_type=AxisType.Explicit)
    with accelerate_lax(), jax.set_mesh(explicit):
        rows = jax.device_put(scores, P("x", None))
        result = jax.jit(lambda x: lax.top_k(x, 20))(rows)
        assert jax.typeof(result[1]).sharding.spec == P("x", None)
        columns = jax.device_put(scores, P(None, "x"))
        with pytest.raises(Exception, match="shard"):
            jax.jit(lambda x: lax.top_k(x, 20))(columns)
    oracle.check(jax.device_get(result), scores, 20)
    mesh = meshes.mesh(jax.devices("cpu"))
    with accelerate_lax():
        select = jax.jit(
            jax.shard_map(
                lambda x: lax.top_k(x, 20), mesh=mesh, in_specs=P("x"), out_specs=P("x")
            )
        )
        assert is_ours(select.lower(scores))
        oracle.check(jax.device_get(select(scores)), scores, 20)


def test_an_export_from_inside_needs_the_published_names():
    from jax import export

    scores = inputs.generator("lax export").standard_normal((4, 300))
    scores = scores.astype(np.float32)
    select = jax.jit(lambda x: lax.top_k(x, 20))
    ours = [
        export.DisabledSafetyCheck.custom_call(name) for name in jax_topk.FFI_TARGETS
    ]
    with accelerate_lax():
        with pytest.raises(ValueError, match="jax_topk_cpu"):
            export.export(select, platforms=("cpu",))(scores)
        on = {"platforms": ("cpu", "cuda"), "disabled_checks": ours}
        program = export.export(select, **on)(scores)
    assert "jax_topk_cpu" in program.mlir_module()
    operand = jax.device_put(scores, jax.devices("cpu")[0])
    oracle.check(jax.device_get(program.call(operand)), scores, 20)


# Code of others, as it comes from PyPI.


def _partition():
    def run(x):
        return jnp.partition(x, 100), jnp.argpartition(x, 100, axis=0)

    x = inputs.generator("partition").standard_normal((200, 300)).astype(np.float32)
    return run, (x,), True


def _optax_assignment():
    """The Hungarian algorithm, whose top_k is of integers: left to jax."""
    optax = pytest.importorskip("optax", reason="needs optax, a test extra")
    costs = inputs.generator("optax").standard_normal((20, 33)).astype(np.float32)
    return optax.assignment.hungarian_algorithm, (costs,), False


def _ott_regularizer():
    """The k-overlap norm of OTT, and its gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a package it imports
        module = "ott.geometry.regularizers"
        found = pytest.importorskip(module, reason="needs ott-jax, a test extra")
    norm = found.SqKOverlap(k=30)
    x = inputs.generator("ott").integers(-30, 30, 500).astype(np.float32)
    return jax.value_and_grad(norm), (x,), True


def _experts(router, up, tokens):
    """Each token goes to the best experts of its router."""
    gates, experts = lax.top_k(router(tokens), 4)
    outputs = jnp.einsum("td,tkde->tke", tokens, up[experts])
    return (jnp.einsum("tk,tke->te", jax.nn.softmax(gates), outputs) ** 2).mean()


UP = inputs.generator("up").standard_normal((64, 16, 16)).astype(np.float32)
TOKENS = inputs.generator("tokens").standard_normal((32, 16)).astype(np.float32)


def _equinox_experts():
    eqx = pytest.importorskip("equinox", reason="needs equinox, a test extra")
    router = eqx.nn.Linear(16, 64, key=jax.random.key(0))

    @eqx.filter_value_and_grad
    def loss(router, tokens):
        return _experts(jax.vmap(router), jnp.asarray(UP), tokens)

    return lambda tokens: loss(router, tokens), (TOKENS,), True


def _flax_experts():
    nnx = pytest.importorskip("flax.nnx", reason="needs flax")

    def run(tokens):
        router = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
        loss, gradient = nnx.value_and_grad(
            lambda router: _experts(router, jnp.asarray(UP), tokens)
        )(router)
        return loss, jax.tree.leaves(gradient)

    return run, (TOKENS,), True


@pytest.mark.parametrize(
    "program",
    [_partition, _optax_assignment, _ott_regularizer, _equinox_experts, _flax_experts],
)
def test_code_of_others_gives_the_bits_that_it_gave_before(program):
    run, operands, covered = program()
    with jax.default_device(jax.devices("cpu")[0]):
        before = jax.jit(run)(*operands)
        with accelerate_lax():
            text = jax.jit(run).lower(*operands).as_text()
            assert ("custom_call @jax_topk" in text) == covered
            assert "chlo.top_k" not in text or not covered
            after = jax.jit(run)(*operands)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

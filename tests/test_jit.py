# SPDX-License-Identifier: Apache-2.0
"""What a program looks like to jax: types, equations, modes, cost and cache."""

import os
import subprocess
import sys
import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import jax_topk
from jax_topk import top_k

N, K = 300, 20


def test_a_result_unpacks_and_is_a_pytree(platform, scores):
    result = top_k(scores, K)
    values, indices = result
    assert values is result.values and indices is result.indices
    doubled = jax.tree.map(lambda x: x + x, result)
    assert type(doubled) is type(result)
    oracle.check(result, scores, K)


def test_eager_and_without_jit(platform, scores, lengths):
    with jax.disable_jit():
        oracle.check(top_k(scores, K, lengths=lengths), scores, K, lengths)


def test_static_arguments_of_a_jit(platform, scores):
    select = jax.jit(top_k, static_argnames=("k", "sorted", "implementation"))
    oracle.check(select(scores, k=K, sorted=False), scores, K, sorted=False)


def test_eval_shape_and_structs_carry_the_types():
    shape = jax.ShapeDtypeStruct((3, N), jnp.bfloat16)
    result = jax.eval_shape(lambda x: top_k(x, K), shape)
    assert type(result) is jax_topk.TopK
    assert (result.values.shape, result.values.dtype) == ((3, K), jnp.bfloat16)
    assert (result.indices.shape, result.indices.dtype) == ((3, K), np.int32)
    assert not result.values.weak_type and not result.indices.weak_type


def test_a_selection_is_one_equation_named_top_k():
    jaxpr = jax.make_jaxpr(lambda x: top_k(x, K))(np.zeros((3, N), np.float32))
    (equation,) = jaxpr.eqns
    assert equation.primitive.name == "top_k" and not jaxpr.consts
    assert len(str(jaxpr).splitlines()) < 12
    rows = np.zeros(3, np.int32)
    jaxpr = jax.make_jaxpr(lambda x, r: top_k(x, K, lengths=r, starts=r))(
        np.zeros((3, N), np.float32), rows
    )
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["top_k"]


def test_weakly_typed_scores_give_strong_values():
    values = top_k(jnp.full(4, 2.0), 2).values
    assert values.dtype == np.float32 and not values.weak_type


def test_nans_are_reported_where_jax_is_asked_to(platform):
    row = jnp.array([1, np.nan, 2], np.float32)
    with jax.debug_nans(True):
        for select in (top_k, jax.jit(top_k, static_argnums=1)):
            with pytest.raises(FloatingPointError, match="encountered in top_k"):
                select(row, 2)
        # Padding is infinite, but it is no NaN, and neither is its derivative.
        gradient = jax.grad(lambda x: top_k(x, 4, lengths=2).values[:2].sum())
        np.testing.assert_array_equal(gradient(row[::2]), [1, 1])


def test_64_bit_mode_changes_no_type(platform, scores, lengths):
    with jax.enable_x64(True):
        result = jax.jit(lambda x, r: top_k(x, K, lengths=r))(
            scores, lengths.astype(np.int64) * (1 << 40)
        )
        assert result.values.dtype == np.float32 and result.indices.dtype == np.int32
    oracle.check(result, scores, K, np.sign(lengths) * N)


def test_strict_rank_and_dtype_promotion(platform, scores, lengths):
    def select(x):
        return top_k(x, K, lengths=lengths[:, :1], starts=3)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        oracle.check(select(scores), scores, K, lengths[:, :1], 3)
        jax.grad(lambda x: select(x).values[..., 0].sum())(scores)
        for options in ({"implementation": "xla"}, {"sorted": False}):
            top_k(scores, K, lengths=lengths, starts=lengths, **options)


def test_leak_checks_and_checkify_find_nothing(platform, scores, lengths):
    def select(x):
        return top_k(x, K, lengths=lengths)

    with jax.checking_leaks():
        oracle.check(jax.jit(select)(scores), scores, K, lengths)
    checked = checkify.checkify(jax.jit(select), errors=checkify.all_checks)
    error, result = checked(scores)
    error.throw()
    oracle.check(result, scores, K, lengths)


def test_strict_rank_and_dtype_promotion_and_nan_checks_over_shards(scores, lengths):
    mesh = meshes.mesh(jax.devices("cpu"), (2, 2), ("x", "y"))

    @jax.shard_map(mesh=mesh, in_specs=(P(None, None, ("x", "y")), P()), out_specs=P())
    def select(x, lengths):
        return jax_topk.sharded_top_k(x, K, ("x", "y"), lengths=lengths)

    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_nans(True),
    ):
        oracle.check(jax.jit(select)(scores, lengths), scores, K, lengths)
        jax.jit(jax.grad(lambda x: select(x, lengths).values[..., 0].sum()))(scores)


def test_constants_are_selected_from_while_tracing(platform, scores):
    @jax.jit
    def program(x):
        with jax.ensure_compile_time_eval():
            best = top_k(scores, K).indices
            assert isinstance(np.asarray(best), np.ndarray)
        return jnp.take_along_axis(x, best, -1)

    values, _ = oracle.top_k(scores, K)
    np.testing.assert_array_equal(program(scores), values)


def test_only_values_or_only_indices_are_used(platform, scores, lengths):
    values, indices = oracle.top_k(scores, K, lengths)

    def select(x):
        return top_k(x, K, lengths=lengths)

    np.testing.assert_array_equal(jax.jit(lambda x: select(x).values)(scores), values)
    got = jax.jit(lambda x: select(x).indices)(scores)
    np.testing.assert_array_equal(got, indices)


def test_donated_scores(platform, scores):
    select = jax.jit(lambda x: (x + 1, top_k(x, K)), donate_argnums=0)
    more, result = select(jnp.array(scores))
    oracle.check(result, scores, K)
    np.testing.assert_array_equal(more, scores + 1)


def test_equal_calls_are_made_once():
    def twice(x):
        return top_k(x, K).values, top_k(x, K).indices

    shape = jax.ShapeDtypeStruct((3, N), np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(twice).lower(shape).compile().as_text()
    assert text.count('custom_call_target="jax_topk') == 1


class Annotated(NamedTuple):
    """A user's container, whose annotations a type checker might look at."""

    best: jax_topk.TopK


def test_a_result_goes_through_containers(platform, scores):
    result = jax.jit(lambda x: Annotated(top_k(x, K)))(scores)
    assert type(result) is Annotated and type(result.best) is jax_topk.TopK
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))
    oracle.check(result.best, scores, K)


# Cost of a program --------------------------------------------------------------------


def layers(count):
    def program(x):
        for _ in range(count):
            x = x + top_k(x, K).values[..., :1]
        return x

    return jax.jit(program).lower(jax.ShapeDtypeStruct((3, N), np.float32))


def test_61_call_sites_lower_in_proportion():
    few, many = layers(1).as_text(), layers(61).as_text()
    calls = [text.count("custom_call @jax_topk") for text in (few, many)]
    assert 1 == calls[0] <= calls[1] <= 61
    assert len(many) < 61 * len(few)


def test_a_call_site_is_a_handful_of_operations():
    text = layers(1).as_text()
    assert len(text.splitlines()) < 30
    assert "while" not in text and "sort" not in text.replace("sorted", "")


def test_one_program_serves_equal_calls():
    traced = 0

    @jax.jit
    def select(x):
        nonlocal traced
        traced += 1
        return top_k(x, K)

    for i in range(3):
        select(np.full((2, N), i, np.float32))
    assert traced == 1


CACHED = """
    import sys
    import jax, numpy as np, jax_topk
    from jax_topk import _plan

    folder, target = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from jax import monitoring
    events = []
    monitoring.register_event_listener(lambda name, **_: events.append(name))
    if target != _plan.TARGETS["cpu"]:
        handler = _plan.REGISTRATIONS["cpu"][_plan.TARGETS["cpu"]]
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
        jax.ffi.register_ffi_target_as_batch_partitionable(target)
        _plan.TARGETS["cpu"] = target
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    one = np.arange(64, dtype=np.float32).reshape(4, 16)
    two = jax.device_put(one, rows)
    del events[:]
    compiled = [jax.jit(lambda x: jax_topk.top_k(x, 3, sorted=False)).lower(x).compile()
                for x in (one, two)]
    assert compiled[0](one).indices.tolist() == [[13, 14, 15]] * 4
    print(sum(name.endswith("/cache_hits") for name in events),
          sum(name.endswith("/cache_misses") for name in events))
"""


def test_the_persistent_cache_serves_another_process_but_no_other_kernel(tmp_path):
    def hits_and_misses(target):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CACHED), str(tmp_path), target],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return tuple(map(int, done.stdout.split()))

    ours = jax_topk.FFI_TARGETS[0]
    assert hits_and_misses(ours) == (0, 2)
    assert hits_and_misses(ours) == (2, 0)
    # What would change if the kernels took other operands: the name of their target.
    assert hits_and_misses(ours + "1") == (0, 2)


CHECKED = """
    import jax, jax.numpy as jnp, numpy as np
    from beartype import beartype
    from jaxtyping import Array, Float32, Int32, install_import_hook, jaxtyped
    from jax.sharding import AxisType, PartitionSpec as P

    with install_import_hook("jax_topk", "beartype.beartype"):
        from jax_topk import TopK, sharded_top_k, top_k

    Best = tuple[Float32[Array, "rows k"], Int32[Array, "rows k"]]

    @jaxtyped(typechecker=beartype)
    def select(x: Float32[Array, "rows n"], lengths: Int32[Array, "rows"]) -> Best:
        best: TopK = top_k(x, 5, lengths=lengths)
        return best.values, best.indices

    x, lengths = jnp.zeros((8, 80)), jnp.full(8, 3, np.int32)
    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        transform(select)(x, lengths)
    jax.vmap(select)(x[None], lengths[None])
    jax.eval_shape(select, x, lengths)
    jax.grad(lambda x: select(x, lengths)[0][:, :2].sum())(x)
    top_k(np.zeros((2, 9), np.float32), 9, lengths=np.int64(3), starts=2, sorted=False)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        lambda x: sharded_top_k(x, 3, "x", lengths=4),
        mesh=mesh, in_specs=P(None, "x"), out_specs=P(),
    )
    jax.jit(jax.grad(lambda x: sharded(x).values[:, :2].sum()))(x)
    try:
        top_k(x, "5")
    except Exception as error:
        print(type(error).__name__)
"""


def test_annotations_hold_under_a_run_time_type_checker():
    # A user's with shapes, by jaxtyping, and all of the package's own.
    pytest.importorskip("jaxtyping")
    pytest.importorskip("beartype")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHECKED)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "TypeCheckError\n"), done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Programs that leave the process: for other platforms, shapes and versions of jax."""

import pathlib
import re
import sys

import inputs
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_topk


def disabled_checks():
    return [
        export.DisabledSafetyCheck.custom_call(name) for name in jax_topk.FFI_TARGETS
    ]


@pytest.mark.parametrize("windowed", [False, True])
def test_an_export_for_cpu_and_cuda_reloads_and_selects_on_cpu(windowed):
    rng = inputs.generator("export")
    scores = rng.standard_normal((4, 3000)).astype(np.float32)
    lengths = np.array([3000, 5, 0, 1999], np.int32) if windowed else None

    def select(scores, lengths):
        return jax_topk.top_k(scores, 64, lengths=lengths)

    exported = export.export(
        jax.jit(select), platforms=("cpu", "cuda"), disabled_checks=disabled_checks()
    )(scores, lengths)
    text = exported.mlir_module()
    assert "jax_topk_cpu_v1" in text
    assert ("jax_topk_row_v1" in text) != ("jax_topk_split_v1" in text)
    reloaded = export.deserialize(bytearray(exported.serialize()))
    operands = jax.device_put((scores, lengths), jax.devices("cpu")[0])
    result = jax.device_get(reloaded.call(*operands))
    assert type(result) is jax_topk.TopK
    oracle.check(result, scores, 64, lengths)


@pytest.mark.parametrize("others", [(), ("cpu", "cuda")], ids=["alone", "with-others"])
def test_an_export_of_any_number_of_rows_reloads(platform, others):
    (rows,) = export.symbolic_shape("rows")
    exported = export.export(
        jax.jit(lambda x: tuple(jax_topk.top_k(x, 64))),
        platforms=others or (platform,),
        disabled_checks=disabled_checks(),
    )(jax.ShapeDtypeStruct((rows, 2000), np.float32))
    reloaded = export.deserialize(bytearray(exported.serialize()))
    for count in (1, 7):
        scores = inputs.generator(count).standard_normal((count, 2000))
        scores = scores.astype(np.float32)
        oracle.check(jax.device_get(reloaded.call(scores)), scores, 64)


def test_an_export_without_the_published_names_is_refused():
    with pytest.raises(ValueError, match="jax_topk_cpu_v1"):
        export.export(
            jax.jit(lambda x: tuple(jax_topk.top_k(x, 64))), platforms=("cpu",)
        )(jax.ShapeDtypeStruct((4, 300), np.float32))


# Made by `python tests/test_export.py FILE [paged]`. A target keeps its name only while
# it takes the same operands, so a program that finds its targets still selects. A jax
# reads what it or an older one has written.
STORED = sorted((pathlib.Path(__file__).parent / "data").glob("top_k_jax_*.bin"))
STORED = [
    path
    for path in STORED
    if path.stem.removeprefix("top_k_jax_").split(".")[:2] <= jax.__version__.split(".")
]


def exported_for_a_file():
    (rows,) = export.symbolic_shape("rows")

    def select(scores, lengths, starts):
        first = jax_topk.top_k(scores, 16, lengths=lengths, starts=starts)
        second = jax_topk.top_k(scores.astype(jnp.bfloat16), 16, sorted=False)
        return tuple(first), tuple(second)

    window = jax.ShapeDtypeStruct((rows,), np.int32)
    return export.export(
        jax.jit(select), platforms=("cpu", "cuda"), disabled_checks=disabled_checks()
    )(jax.ShapeDtypeStruct((rows, 500), np.float32), window, window)


def paged_for_a_file():
    (rows,) = export.symbolic_shape("rows")

    def select(scores, table, offsets):
        first = jax_topk.paged_top_k(scores, 16, table, page_size=64)
        second = jax_topk.paged_top_k(scores.astype(jnp.bfloat16), 16, offsets=offsets)
        return tuple(first), tuple(second)

    return export.export(
        jax.jit(select), platforms=("cpu", "cuda"), disabled_checks=disabled_checks()
    )(
        jax.ShapeDtypeStruct((rows, 2, 500), np.float32),
        jax.ShapeDtypeStruct((rows, 8), np.int32),
        jax.ShapeDtypeStruct((rows,), np.int32),
    )


def test_a_stored_program_with_pages_still_selects(platform):
    path = pathlib.Path(__file__).parent / "data" / "paged_top_k_jax_0.10.2.bin"
    program = export.deserialize(bytearray(path.read_bytes()))
    rng = inputs.generator("stored pages")
    scores = rng.standard_normal((3, 2, 500)).astype(np.float32)
    table = rng.permutation(24).reshape(3, 8).astype(np.int32)
    offsets = np.array([7, 0, 10**9], np.int32)
    first, second = program.call(scores, table, offsets)
    want = oracle.paged_top_k(scores, 16, table, 64, 64)
    oracle.check(first, scores, 16, expected=want)
    scores = scores.astype(jnp.bfloat16)
    want = oracle.paged_top_k(scores, 16, offsets[:, None], 500, 1)
    oracle.check(second, scores, 16, expected=want)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_program_still_selects(platform, path):
    program = export.deserialize(bytearray(path.read_bytes()))
    assert program.platforms == ("cpu", "cuda")
    rng = inputs.generator("stored")
    scores = rng.standard_normal((3, 500)).astype(np.float32)
    lengths, starts = np.array([[500, 9, 100], [0, 3, 450]], np.int32)
    first, second = program.call(scores, lengths, starts)
    oracle.check(first, scores, 16, lengths, starts)
    oracle.check(second, scores.astype(jnp.bfloat16), 16, sorted=False)


def calls(program):
    """Target, attributes and types of each custom call of ours."""
    pattern = (
        r"custom_call @(jax_topk_\w+)\(.*?backend_config = (\{.*?\}).* : (\(.*?) loc\("
    )
    return set(re.findall(pattern, program.mlir_module()))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_target_that_keeps_its_name_keeps_its_operands_and_attributes(path):
    # As handlers do not run for this, those of CUDA are seen on any machine.
    stored = calls(export.deserialize(bytearray(path.read_bytes())))
    now = calls(exported_for_a_file())
    assert len(stored) == len(now) == 4

    def kept(these, others):
        names = {target for target, *_ in others}
        return {call for call in these if call[0] in names}

    assert kept(stored, now) == kept(now, stored)


def test_a_program_for_one_platform_is_refused_by_another():
    exported = export.export(
        jax.jit(lambda x: tuple(jax_topk.top_k(x, 4))),
        platforms=("cuda",),
        disabled_checks=disabled_checks(),
    )(jax.ShapeDtypeStruct((4, 300), np.float32))
    assert "jax_topk_cpu" not in exported.mlir_module()
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(ValueError, match="cuda"),
    ):
        exported.call(jnp.zeros((4, 300)))


def test_an_export_has_derivatives(platform):
    scores = inputs.generator("vjp").permutation(900).reshape(3, 300)
    scores = scores.astype(np.float32)
    lengths = np.array([300, 5, 0], np.int32)
    exported = export.export(
        jax.jit(lambda x, r: tuple(jax_topk.top_k(x, 20, lengths=r))),
        platforms=("cpu", "cuda"),
        disabled_checks=disabled_checks(),
    )(scores, lengths)
    reloaded = export.deserialize(exported.serialize(vjp_order=1))

    def gradient(select):
        return jax.grad(lambda x: jnp.maximum(select(x, lengths)[0], -1).sum())(scores)

    np.testing.assert_array_equal(
        gradient(reloaded.call),
        gradient(lambda x, r: jax_topk.top_k(x, 20, lengths=r)),
    )


def test_an_export_with_symbolic_rows_and_columns():
    rows, n = export.symbolic_shape("rows, n", constraints=("n >= 16",))
    exported = export.export(
        jax.jit(lambda x, r: tuple(jax_topk.top_k(x, 16, lengths=r))),
        platforms=("cpu", "cuda"),
        disabled_checks=disabled_checks(),
    )(
        jax.ShapeDtypeStruct((rows, 2, n), np.float32),
        jax.ShapeDtypeStruct((rows, 2), np.int32),
    )
    reloaded = export.deserialize(exported.serialize())
    for shape in ((1, 2, 16), (5, 2, 333)):
        scores = inputs.generator(shape).standard_normal(shape).astype(np.float32)
        lengths = np.arange(2 * shape[0], dtype=np.int32).reshape(-1, 2) * 9
        operands = jax.device_put((scores, lengths), jax.devices("cpu")[0])
        result = jax.device_get(reloaded.call(*operands))
        oracle.check(result, scores, 16, lengths)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_an_export_for_eight_devices_moves_no_more_than_before(columns):
    mesh = meshes.mesh(jax.devices("cpu"))
    spec = P(None, "x") if columns else P("x")
    sharding = NamedSharding(mesh, spec)

    def select(x):
        return tuple(jax_topk.top_k(x, 20))

    if columns:
        select = jax.shard_map(
            lambda x: tuple(jax_topk.sharded_top_k(x, 20, "x")),
            mesh=mesh,
            in_specs=spec,
            out_specs=P(),
        )
    # A program for two platforms has its collective twice, in two branches.
    exported = export.export(
        jax.jit(select), platforms=("cpu",), disabled_checks=disabled_checks()
    )(jax.ShapeDtypeStruct((16, 320), np.float32, sharding=sharding))
    assert exported.nr_devices == 8
    reloaded = export.deserialize(exported.serialize())
    scores = inputs.generator("8").integers(-40, 40, (16, 320)).astype(np.float32)
    operand = jax.device_put(scores, sharding)
    compiled = jax.jit(reloaded.call).lower(operand).compile()
    assert meshes.collectives(compiled) == ["all-gather"] * columns
    oracle.check(jax.device_get(compiled(operand)), scores, 20)


@pytest.mark.parametrize("names", ["x", ("x", "y")], ids=str)
def test_sharded_top_k_lowers_for_any_rows_and_any_width(names):
    # For more than lowering, jax lacks something: it cannot load a shard_map of any
    # symbolic size again, whatever is in it.
    mesh = meshes.mesh(jax.devices("cpu"), (4, 2), ("x", "y"))
    rows, w = export.symbolic_shape("rows, w", constraints=("w >= 16",))

    def select(x, r):
        return tuple(jax_topk.sharded_top_k(x, 16, names, lengths=r))

    select = jax.shard_map(
        select, mesh=mesh, in_specs=(P(None, names), P()), out_specs=P()
    )
    exported = export.export(
        jax.jit(select), platforms=("cpu", "cuda"), disabled_checks=disabled_checks()
    )(
        jax.ShapeDtypeStruct((rows, 8 * w), np.float32),
        jax.ShapeDtypeStruct((rows,), np.int32),
    )
    assert [str(aval.shape) for aval in exported.out_avals] == ["(rows, 16)"] * 2
    assert "stablehlo.all_gather" in exported.mlir_module()
    assert exported.serialize()


if __name__ == "__main__":
    # No paths of this machine in the file.
    folders = r".*/(?=(tests|jax_topk|site-packages)/)"
    jax.config.update("jax_hlo_source_file_canonicalization_regex", folders)
    made = paged_for_a_file() if "paged" in sys.argv else exported_for_a_file()
    pathlib.Path(sys.argv[1]).write_bytes(made.serialize())

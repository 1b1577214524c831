# SPDX-License-Identifier: Apache-2.0
"""What the compiler gets to see: one custom call of ours. Needs no GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_topk
from jax_topk import _ffi, _plan

CUDA_TARGETS = {f"jax_topk_{name}_v1": name for name in ("row", "split", "cluster")}


def lowered(
    platform, shape, k, dtype=np.float32, lengths=False, starts=False, **options
):
    """The StableHLO of a selection, lowered for a platform on whatever host this is."""
    rows = jax.ShapeDtypeStruct(shape[:-1], np.int32)
    operands = [jax.ShapeDtypeStruct(shape, dtype)]
    operands += [rows if lengths else None, rows if starts else None]

    def select(scores, lengths, starts):
        return jax_topk.top_k(scores, k, lengths=lengths, starts=starts, **options)

    traced = jax.jit(select).trace(*operands)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def custom_calls(text):
    return re.findall(r"custom_call @(\w+)", text)


def has_sort(text):
    return re.search(r"stablehlo\.sort|top_?k[^_\w]", text.replace("jit_top_k", ""))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_a_selection_is_one_custom_call(platform, dtype):
    for sorted in (True, False):
        for windowed in (False, True):
            text = lowered(
                platform,
                (8, 131_072),
                2048,
                dtype,
                lengths=windowed,
                starts=windowed,
                sorted=sorted,
            )
            (target,) = custom_calls(text)
            assert target in jax_topk.FFI_TARGETS
            assert "stablehlo.sort" not in text and "chlo.top_k" not in text
            expected = {"jax_topk_cpu_v1"} if platform == "cpu" else set(CUDA_TARGETS)
            assert target in expected


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_an_unused_output_leaves_one_custom_call(platform):
    select = jax.jit(lambda x: jax_topk.top_k(x, 2048, sorted=False).indices)
    traced = select.trace(jax.ShapeDtypeStruct((8, 131_072), np.float32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    (target,) = custom_calls(text)
    assert target in jax_topk.FFI_TARGETS
    assert "sort" not in text.replace("sorted", "") and "chlo.top_k" not in text


@pytest.mark.parametrize("name", ["row", "split"])
def test_a_name_decides_the_target(name):
    text = lowered("cuda", (4, 5000), 100, implementation=name)
    (target,) = custom_calls(text)
    assert CUDA_TARGETS[target] == name


def test_clusters_are_refused_where_the_device_is_not_known():
    unknown = _plan.device_facts("cuda")
    choice = _plan.choose(
        (4,), 5000, 100, np.dtype("float32"), unknown, implementation="cluster"
    )
    assert choice.implementation == ""
    assert "clusters need compute capability 90" in choice.reason


def test_the_workspace_of_the_split_kernel_is_a_third_result():
    text = lowered("cuda", (2, 3, 9000), 100, implementation="split")
    (size,) = re.findall(r"tensor<2x3x(\d+)xui8>", text)[:1]
    assert int(size) >= 8 * 100
    assert "ui8" not in lowered("cuda", (2, 3, 9000), 100, implementation="row")
    assert "ui8" not in lowered("cpu", (2, 3, 9000), 100)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_leading_axes_stay_and_windows_are_columns(platform):
    text = lowered(platform, (2, 3, 9000), 100, lengths=True, starts=True)
    (line,) = [line for line in text.splitlines() if "custom_call @" in line]
    assert line.count("tensor<2x3x1xi32>") == 2
    assert "tensor<2x3x9000xf32>" in line and "tensor<2x3x100xi32>" in line
    assert "reshape" not in line


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("starts", [False, True])
def test_attributes_say_what_the_operands_are(lengths, starts):
    for platform in ("cpu", "cuda"):
        text = lowered(
            platform, (4, 900), 77, lengths=lengths, starts=starts, sorted=False
        )
        assert "k = 77 : i64" in text
        assert f"has_lengths = {str(lengths).lower()}" in text
        assert f"has_starts = {str(starts).lower()}" in text
        assert "sorted = false" in text
        planned = re.search(r"geometry = dense<0> : tensor<5xi64>", text)
        assert bool(planned) == (platform == "cuda")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int16])
def test_other_dtypes_lower_to_the_reference(platform, dtype):
    text = lowered(platform, (4, 900), 77, dtype)
    assert not set(custom_calls(text)) & set(jax_topk.FFI_TARGETS)


def test_a_k_beyond_the_kernels_lowers_to_the_reference():
    assert custom_calls(lowered("cuda", (2, 9000), _ffi.MAX_K))
    text = lowered("cuda", (2, 9000), _ffi.MAX_K + 1)
    assert not set(custom_calls(text)) & set(jax_topk.FFI_TARGETS)
    assert custom_calls(lowered("cpu", (2, 9000), 9000)) == ["jax_topk_cpu_v1"]


def test_other_platforms_lower_to_the_reference():
    text = lowered("tpu", (4, 900), 77)
    assert not set(custom_calls(text)) & set(jax_topk.FFI_TARGETS)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(0, 90), (3, 0)])
def test_empty_problems_launch_nothing(platform, shape):
    assert not custom_calls(lowered(platform, shape, 0))
    assert not custom_calls(lowered(platform, shape, 9, lengths=True))
    assert not custom_calls(lowered(platform, (3, 90), 0))


def test_vmap_folds_into_the_one_call():
    select = jax.vmap(jax.vmap(lambda x: jax_topk.top_k(x, 9), in_axes=1))
    for platform in ("cpu", "cuda"):
        traced = jax.jit(select).trace(jax.ShapeDtypeStruct((2, 900, 3), np.float32))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert len(custom_calls(text)) == 1
        assert "while" not in text


def test_targets_are_published():
    assert jax_topk.FFI_TARGETS == (
        "jax_topk_cpu_v1",
        "jax_topk_row_v1",
        "jax_topk_split_v1",
        "jax_topk_cluster_v1",
        "jax_topk_paged_cpu_v1",
        "jax_topk_paged_row_v1",
        "jax_topk_paged_split_v1",
        "jax_topk_paged_cluster_v1",
    )

# SPDX-License-Identifier: Apache-2.0
"""The planner: for every problem and device a plan that fits, with its reason."""

import hypothesis
import hypothesis.strategies as st
import pytest
from devices import DEVICES, plan

from jax_topk import _ffi

NATIVE = ("float32", "bfloat16", "float16")
PORTABLE_SHARED_MEMORY = 48 << 10  # what every CUDA device grants


hypothesis.settings.register_profile("plan", deadline=None, max_examples=300)
hypothesis.settings.load_profile("plan")


def scale(largest):
    """Integers of every magnitude up to the largest, the large ones as often."""

    def of_magnitude(exponent):
        high = min(1 << exponent, largest)
        return st.integers(high // 2 + 1, high)

    return st.integers(0, largest.bit_length()).flatmap(of_magnitude)


devices = st.sampled_from(sorted(DEVICES))
dtypes = st.sampled_from(NATIVE)
rows = scale(1 << 33)
widths = scale(2**31 - 1)
native_ks = scale(_ffi.MAX_K)
geometries = st.tuples(
    st.integers(0, 200), st.integers(0, 30_000), st.integers(0, 40_000), rows, rows
)


def assert_fits(made, device, rows, k, dtype):
    _, _, granted = DEVICES[device]
    assert made.implementation in ("row", "split"), made.reason
    assert 0 < made.shared_memory_bytes <= (granted or PORTABLE_SHARED_MEMORY)
    assert 32 <= made.num_threads <= 1024 and made.num_threads % 32 == 0
    assert made.capacity >= k
    assert made.capacity * 8 <= made.shared_memory_bytes
    assert made.num_samples > 0
    # A grid's x axis holds 2**31 - 1; no CTA is launched for nothing.
    assert 1 <= made.grid <= min(rows * made.ctas_per_row, 2**31 - 1)
    assert made.reason
    if made.implementation == "row":
        assert made.ctas_per_row == 1 and made.workspace_bytes_per_row == 0
    else:
        assert made.ctas_per_row >= 1
        assert made.grid % made.ctas_per_row == 0
        # What each CTA of the row may hand over, and a header.
        assert 0 < made.workspace_bytes_per_row <= 64 * 8 * (k + 2)
        assert made.workspace_bytes_per_row >= made.ctas_per_row * 8 * k


@hypothesis.given(devices, rows, widths, native_ks, dtypes)
def test_every_problem_gets_a_plan_that_fits(device, rows, n, k, dtype):
    assert_fits(plan(device, rows, n, k, dtype), device, rows, k, dtype)


@hypothesis.given(
    devices, rows, widths, native_ks, dtypes, st.sampled_from(["row", "split"])
)
def test_either_kernel_can_be_asked_for_anywhere(device, rows, n, k, dtype, name):
    made = plan(device, rows, n, k, dtype, implementation=name)
    assert made.implementation == name
    assert_fits(made, device, rows, k, dtype)


@hypothesis.given(devices, rows, widths, native_ks, dtypes, geometries)
def test_a_geometry_given_by_hand_still_fits(device, rows, n, k, dtype, geometry):
    for name in ("row", "split"):
        made = plan(
            device, rows, n, k, dtype, implementation=name, geometry=list(geometry)
        )
        assert_fits(made, device, rows, k, dtype)


@hypothesis.given(devices, rows, widths, native_ks, dtypes)
def test_the_workspace_of_all_rows_stays_sane(device, rows, n, k, dtype):
    made = plan(device, rows, n, k, dtype)
    # Against the scores that are read anyway, or a bound that suits any GPU.
    scores = rows * n * (4 if dtype == "float32" else 2)
    assert rows * made.workspace_bytes_per_row <= max(2 * scores, 64 << 20)


@hypothesis.given(devices, rows, widths, native_ks, st.integers(1, 64))
def test_a_shard_never_needs_another_implementation_than_the_whole(
    device, rows, n, k, shards
):
    whole = plan(device, rows * shards, n, k)
    local = plan(device, rows, n, k, implementation=whole.implementation)
    assert local.implementation == whole.implementation


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "n", [1, 1000, 8192, 32768, 131072, 400_000, 1 << 20, 2_000_000]
)
def test_every_width_up_to_two_million_on_every_device(device, n):
    for rows in (1, 2, 8, 64, 1000, 70_000):
        for k in (1, 512, 2048, 4096):
            assert_fits(plan(device, rows, n, k), device, rows, k, "float32")


def test_few_long_rows_are_shared_and_many_rows_are_not():
    assert plan("H200", 1, 1 << 20, 2048).implementation == "split"
    assert plan("H200", 1, 1 << 20, 2048).ctas_per_row > 1
    assert plan("H200", 8, 131_072, 2048).implementation == "split"
    assert plan("H200", 4096, 131_072, 2048).implementation == "row"
    assert plan("H200", 1, 4096, 512).implementation == "row"


@hypothesis.given(devices, rows, widths, scale(1 << 31), dtypes)
def test_a_k_beyond_the_kernels_goes_to_the_reference(device, rows, n, extra, dtype):
    k = _ffi.MAX_K + extra
    made = plan(device, rows, n, k, dtype)
    assert made.implementation == "xla"
    assert str(_ffi.MAX_K) in made.reason and str(k) in made.reason
    assert made.workspace_bytes_per_row == 0


def test_the_kernels_take_at_least_4096():
    assert _ffi.MAX_K >= 4096


@hypothesis.given(
    devices,
    rows,
    widths,
    native_ks,
    st.sampled_from(["float64", "int32", "uint8", "bool", "float8_e4m3fn", "nonsense"]),
    st.sampled_from(["cpu", "cuda"]),
)
def test_other_dtypes_go_to_the_reference(device, rows, n, k, dtype, platform):
    made = plan(device, rows, n, k, dtype, platform)
    assert made.implementation == "xla"
    assert "float32" in made.reason


@hypothesis.given(rows, widths, scale(1 << 31), dtypes)
def test_a_cpu_gets_the_native_handler_for_every_k(rows, n, k, dtype):
    made = plan("unknown", rows, n, k, dtype, "cpu")
    assert made.implementation == "cpu" and made.reason
    assert made.workspace_bytes_per_row == 0


@pytest.mark.parametrize("platform", ["rocm", "tpu", "METAL", ""])
def test_other_platforms_get_the_reference(platform):
    made = plan("unknown", 8, 131_072, 2048, platform=platform)
    assert made.implementation == "xla" and made.reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((75, 40, 65536), ["80", "75"]),
        ((70, 80, 98304), ["80", "70"]),
        ((90, 132, (48 << 10) - 1), ["49152", "49151"]),
    ],
)
def test_a_device_too_small_for_the_kernels_gets_the_reference(facts, words):
    made = plan(facts, 8, 131_072, 2048)
    assert made.implementation == "xla"
    assert all(word in made.reason for word in words), made.reason
    for name in ("row", "split"):
        made = plan(facts, 8, 131_072, 2048, implementation=name)
        assert made.implementation == ""
        assert all(word in made.reason for word in words), made.reason


@pytest.mark.parametrize("name", ["row", "split"])
def test_what_was_asked_for_and_cannot_run_is_refused_with_the_number(name):
    made = plan("H200", 8, 9000, 4097, implementation=name)
    assert made.implementation == ""
    assert "4096" in made.reason and "4097" in made.reason
    made = plan("H200", 8, 9000, 64, "int32", implementation=name)
    assert made.implementation == "" and "float32" in made.reason
    made = plan("unknown", 8, 9000, 64, platform="cpu", implementation=name)
    assert made.implementation == "" and "CPU" in made.reason
    made = plan("unknown", 8, 9000, 64, platform="tpu", implementation=name)
    assert made.implementation == "" and made.reason


def test_the_cpu_handler_is_refused_off_the_cpu():
    made = plan("H200", 8, 9000, 64, implementation="cpu")
    assert made.implementation == "" and "CPU" in made.reason


@hypothesis.given(devices, rows, widths, scale(1 << 31))
def test_the_reference_can_be_asked_for_anywhere(device, rows, n, k):
    for platform in ("cpu", "cuda", "tpu"):
        made = plan(device, rows, n, k, platform=platform, implementation="xla")
        assert made.implementation == "xla" and made.reason


def test_an_unknown_device_gets_the_portable_plan_and_the_reason_says_so():
    made = plan("unknown", 8, 131_072, 2048)
    assert made.implementation in ("row", "split")
    assert made.shared_memory_bytes <= PORTABLE_SHARED_MEMORY
    assert "not known" in made.reason


@hypothesis.given(devices, rows, widths, native_ks, dtypes)
def test_the_same_question_has_the_same_answer(device, rows, n, k, dtype):
    def facts():
        made = plan(device, rows, n, k, dtype)
        return [getattr(made, name) for name in dir(made) if not name.startswith("_")]

    assert facts() == facts()


def test_a_wrong_name_or_geometry_is_an_error():
    with pytest.raises(ValueError, match="fast"):
        plan("H200", 8, 9000, 64, implementation="fast")
    with pytest.raises(ValueError, match="5 numbers"):
        plan("H200", 8, 9000, 64, geometry=[1, 2])
    assert _ffi.IMPLEMENTATIONS == ("xla", "cpu", "row", "split")

# SPDX-License-Identifier: Apache-2.0
"""The planner: for every problem and device a plan that fits, with its reason."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
from devices import DEVICES, plan

from jax_topk import _ffi

NATIVE = ("float32", "bfloat16", "float16")
PORTABLE_SHARED_MEMORY = 48 << 10  # what every CUDA device grants
KERNELS = ("row", "split", "cluster")


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
rows = scale(2**31 - 1)
widths = scale(2**31 - 1)
native_ks = scale(_ffi.MAX_K)
geometries = st.tuples(
    st.integers(0, 200),
    st.integers(0, 30_000),
    st.integers(0, 1).flatmap(lambda given: st.integers(0, given * 40_000)),
    st.sampled_from([0, 0, 1, 2**31 - 1]),
    st.integers(0, 4),
)


STAGE_BYTES = 32 << 10  # of a tile on its way in shared memory
LIST_AT = 5120  # scratch and bins
RESERVED = 1024  # by the driver, for each CTA of an SM


def exchange_bytes(made):
    """What the CTAs of a cluster exchange: bins of all in turns, and scratch.

    16 bits a bin, and the fewer bins the more CTAs.
    """
    if made.implementation != "cluster":
        return 0
    return 2 * 1024 * min(made.ctas_per_row, 8) + 2048


def assert_reads(made, device, n, k, geometry=(0, 0, 0, 0, 0)):
    """Chunks are read through shared memory where it has room, and where it pays."""
    granted = DEVICES[device][2] or PORTABLE_SHARED_MEMORY
    behind = made.shared_memory_bytes - LIST_AT - 8 * made.capacity
    assert behind == max(made.stages * STAGE_BYTES, exchange_bytes(made))
    assert made.stages in (0, 2, 3)
    chunk = -(-n // made.ctas_per_row)
    if made.held or n <= 8192 or geometry[3] != 0:
        assert made.stages == 0
    if made.ctas_per_row > 1 and chunk <= 32768:
        assert made.stages == 0
    if made.stages == 0:
        return
    assert made.capacity % 8 == 0  # tiles lie behind the list, at 64 bytes
    least = max(1 << (max(k, 1) - 1).bit_length(), 64)
    assert made.capacity >= least  # for the sort
    if geometry[1] == 0:
        assert made.capacity >= 2 * k
    # All CTAs that are to share an SM do.
    each = made.shared_memory_bytes + RESERVED
    assert made.ctas_per_sm * each <= granted + RESERVED
    assert made.shared_memory_bytes <= 176 << 10  # the rest is for the L1 cache
    assert made.stages == 2 or made.ctas_per_sm == 1


def assert_fits(made, device, rows, n, k, dtype, geometry=(0, 0, 0, 0, 0)):
    capability, _, granted = DEVICES[device]
    assert made.implementation in KERNELS, made.reason
    assert 0 < made.shared_memory_bytes <= (granted or PORTABLE_SHARED_MEMORY)
    assert made.ctas_per_sm in ((1, 2) if made.implementation == "row" else (1,))
    assert_reads(made, device, n, k, geometry)
    assert 32 <= made.num_threads <= 1024 and made.num_threads % 32 == 0
    assert made.capacity >= k
    assert made.capacity * 8 <= made.shared_memory_bytes
    assert made.num_samples > 0
    assert made.grid == rows * made.ctas_per_row
    assert made.reason
    if made.implementation == "row":
        assert made.ctas_per_row == 1 and made.workspace_bytes_per_row == 0
    elif made.implementation == "cluster":
        assert capability >= 90 and made.workspace_bytes_per_row == 0
        assert made.ctas_per_row in (1, 2, 4, 8, 16)[: 5 if granted > 200_000 else 4]
        assert made.grid < 2**31  # what the x of a grid holds
        assert made.capacity >= 2 * k  # survivors below k, ties behind them
    else:
        assert made.ctas_per_row >= 1
        # What each CTA of the row may hand over, and a header.
        assert 0 < made.workspace_bytes_per_row <= 64 * 8 * (k + 2)
        assert made.workspace_bytes_per_row >= made.ctas_per_row * 8 * k


@hypothesis.given(devices, rows, widths, native_ks, dtypes)
def test_every_problem_gets_a_plan_that_fits(device, rows, n, k, dtype):
    assert_fits(plan(device, rows, n, k, dtype), device, rows, n, k, dtype)


@hypothesis.given(
    devices, rows, widths, native_ks, dtypes, st.sampled_from(["row", "split"])
)
def test_row_and_split_can_be_asked_for_anywhere(device, rows, n, k, dtype, name):
    made = plan(device, rows, n, k, dtype, implementation=name)
    assert made.implementation == name
    assert_fits(made, device, rows, n, k, dtype)


@hypothesis.given(devices, rows, widths, native_ks, dtypes, geometries)
def test_clusters_can_be_asked_for_where_the_device_has_them(
    device, rows, n, k, dtype, geometry
):
    for given in ((), geometry):
        made = plan(device, rows, n, k, dtype, implementation="cluster", geometry=given)
        capability = DEVICES[device][0] or 80  # unknown: the least
        if capability >= 90:
            assert made.implementation == "cluster" and made.reason
            assert_fits(made, device, rows, n, k, dtype, given or (0, 0, 0, 0, 0))
        else:
            assert made.implementation == ""
            words = "clusters need compute capability 90 and the device has"
            assert f"{words} {capability}" in made.reason


@hypothesis.given(rows, widths, native_ks, st.integers(1, 200))
def test_a_device_without_room_for_ties_gets_no_clusters(rows, n, k, sms):
    """48 KiB, which no such device grants."""
    device = (90, sms, PORTABLE_SHARED_MEMORY)
    made = plan(device, rows, n, k, implementation="cluster")
    assert made.implementation == ("cluster" if made.capacity >= 2 * k else "")
    if not made.implementation:
        assert f"needs {2 * k} slots of shared memory for k = {k}" in made.reason
        assert plan(device, rows, n, k).implementation in ("row", "split")


@hypothesis.given(rows, widths, native_ks, st.integers(1, 200))
def test_a_cluster_shares_a_row_only_if_its_ctas_would_idle(rows, n, k, sms):
    for shared, largest in ((232448, 16), (101376, 8)):
        for name in ("", "cluster"):
            made = plan((120, sms, shared), rows, n, k, implementation=name)
            ctas = made.ctas_per_row
            if made.implementation != "cluster" or ctas == 1:
                continue
            assert ctas <= largest and ctas & (ctas - 1) == 0
            # More than two find room side by side on half of the SMs only.
            assert rows * ctas <= (sms if ctas == 2 else sms // 2)
            assert n > 8192 and (ctas <= 4 or ctas * 2048 < n)  # something for each


@pytest.mark.parametrize(("geometry", "ctas"), [(1, 1), (3, 2), (15, 8), (200, 16)])
def test_a_cluster_is_the_power_of_two_below_what_was_given(geometry, ctas):
    for device, largest in (("H200", 16), ("B200", 16), ("GB10", 8)):
        bent = [geometry, 0, 0, 0, 0]
        made = plan(device, 9, 5003, 64, implementation="cluster", geometry=bent)
        assert made.ctas_per_row == min(ctas, largest) and made.min_chunk == 1


@hypothesis.given(
    st.sampled_from(["H200", "B200", "GB10"]),
    rows,
    scale(1 << 20),
    native_ks,
    geometries | st.tuples(st.integers(0, 20), *[st.just(0)] * 4),
)
def test_rows_are_held_where_a_cluster_has_the_registers(device, rows, n, k, geometry):
    for name in ("", "cluster", "row", "split"):
        made = plan(device, rows, n, k, implementation=name, geometry=geometry)
        assert made.held == (
            made.implementation == "cluster"
            and geometry[2] == 0  # no number of samples was given
            and made.ctas_per_row > 1
            and -(-n // made.ctas_per_row) <= 32 * made.num_threads
        )


@pytest.mark.parametrize(
    ("device", "rows", "n", "held"),
    [
        ("H200", 1, 131_072, True),
        ("H200", 1, 262_144, True),
        ("H200", 1, 262_145, False),
        ("H200", 33, 32_768, True),
        ("H200", 33, 32_769, False),
        ("GB10", 1, 131_072, True),
        ("GB10", 1, 131_073, False),
        ("A100", 1, 131_072, False),
    ],
)
def test_what_the_registers_of_the_largest_cluster_hold(device, rows, n, held):
    assert plan(device, rows, n, 2048).held == held


@hypothesis.given(devices, rows, widths, native_ks, dtypes, geometries)
def test_a_geometry_given_by_hand_still_fits(device, rows, n, k, dtype, geometry):
    for name in ("row", "split"):
        made = plan(
            device, rows, n, k, dtype, implementation=name, geometry=list(geometry)
        )
        assert_fits(made, device, rows, n, k, dtype, geometry)


@hypothesis.given(
    devices, scale(1000), scale(1 << 21), native_ks, dtypes, st.sampled_from(KERNELS)
)
def test_tiles_on_their_way_have_room_beside_a_list_that_is_long_enough(
    device, rows, n, k, dtype, name
):
    if name == "cluster" and DEVICES[device][0] < 90:
        return
    made = plan(device, rows, n, k, dtype, implementation=name)
    assert_fits(made, device, rows, n, k, dtype)
    bent = (0, 0, 0, 1, 0)
    through = plan(device, rows, n, k, dtype, implementation=name, geometry=bent)
    assert_fits(through, device, rows, n, k, dtype, bent)
    # The list is as long as it would be, or shorter because of the tiles.
    assert through.capacity + 8 > made.capacity
    if made.stages > 0:
        mean = k * made.num_samples / n
        rank = mean + 6 * math.sqrt(mean) + 8
        most = (rank + 4 * math.sqrt(rank)) * n / made.num_samples
        assert made.capacity >= min(through.capacity, math.floor(most))
    assert through.ctas_per_row == made.ctas_per_row


@pytest.mark.parametrize(
    ("device", "name", "rows", "n", "k", "stages"),
    [
        ("H200", "row", 50, 8192, 2048, 0),
        ("H200", "row", 50, 8193, 2048, 3),
        ("H200", "row", 50, 131_072, 2048, 3),
        ("H200", "row", 50, 131_072, 4096, 2),  # a longer list
        ("H200", "row", 133, 32_768, 2048, 2),  # two CTAs an SM
        ("H200", "row", 133, 32_768, 4096, 0),
        ("H200", "row", 133, 131_071, 4096, 0),
        ("H200", "row", 133, 131_072, 4096, 2),  # one again
        ("H200", "row", 50, 1 << 20, 2048, 2),
        # Not all survivors need to fit if they would not without the tiles either.
        ("H200", "row", 50, 1 << 21, 2048, 2),
        ("H200", "split", 64, 131_072, 2048, 3),
        ("H200", "split", 8, 524_288, 2048, 0),  # chunks of 32,768 columns
        ("H200", "cluster", 4, 524_288, 2048, 0),
        ("H200", "cluster", 4, 524_304, 2048, 2),
        ("H200", "cluster", 64, 131_072, 2048, 3),
        ("A100", "row", 50, 32_768, 2048, 3),
        ("A100", "row", 133, 32_768, 2048, 0),
        ("GB10", "row", 40, 32_768, 512, 2),
        ("GB10", "row", 40, 32_768, 2048, 0),
        # What a sample leaves would not fit in the list beside the tiles.
        ("GB10", "split", 1, 524_288, 1024, 0),
        ("GB10", "row", 50, 1 << 20, 512, 0),
        ("A100", "row", 133, 131_071, 512, 0),
        ("unknown", "row", 40, 32_768, 512, 0),
    ],
)
def test_tiles_on_their_way(device, name, rows, n, k, stages):
    assert plan(device, rows, n, k, implementation=name).stages == stages


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
            assert_fits(plan(device, rows, n, k), device, rows, n, k, "float32")


def test_few_long_rows_are_shared_and_many_rows_are_not():
    for device, rows, n, want in (
        ("H200", 1, 1 << 20, "split"),  # more CTAs than a cluster has
        ("H200", 1, 131_072, "cluster"),
        ("H200", 8, 131_072, "cluster"),
        ("A100", 8, 131_072, "split"),  # has no clusters
        ("unknown", 8, 131_072, "split"),  # may have none
        ("H200", 4096, 131_072, "row"),
        ("H200", 1, 4096, "row"),
        ("H200", 1, 8192, "row"),
        ("H200", 1, 8193, "cluster"),  # more than a CTA keeps
        ("H200", 33, 32_768, "cluster"),
        ("H200", 34, 32_768, "row"),  # pairs, and half of the SMs are busy anyway
        ("H200", 66, 40_960, "cluster"),
    ):
        made = plan(device, rows, n, 2048)
        assert made.implementation == want
        assert (made.ctas_per_row > 1) == (want != "row")


@hypothesis.given(devices, scale(1 << 33), widths, native_ks, dtypes)
def test_more_rows_than_a_grid_holds_go_to_the_reference(device, extra, n, k, dtype):
    count = 2**31 - 1 + extra
    made = plan(device, count, n, k, dtype)
    assert made.implementation == "xla"
    assert str(2**31 - 1) in made.reason and str(count) in made.reason
    for name in KERNELS:
        made = plan(device, count, n, k, dtype, implementation=name)
        assert made.implementation == "" and str(count) in made.reason


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
    for name in KERNELS:
        made = plan(facts, 8, 131_072, 2048, implementation=name)
        assert made.implementation == ""
        assert all(word in made.reason for word in words), made.reason


@pytest.mark.parametrize("name", KERNELS)
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
    assert _ffi.IMPLEMENTATIONS == ("xla", "cpu", *KERNELS)

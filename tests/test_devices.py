# SPDX-License-Identifier: Apache-2.0
"""Devices that are not here: planned for, compiled for, and imitated on this one.

`test_plan.py` has what every plan must satisfy. Here: what a plan for one device means
on another.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import types

import hypothesis
import hypothesis.strategies as st
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import raw_calls
from devices import DEVICES, plan
from implementations import Implementation, kernels, why_no_clusters
from test_plan import native_ks, rows, scale, widths

from jax_topk import _ffi, _plan

KNOWN = sorted(name for name in DEVICES if name != "unknown")
known_devices = st.sampled_from(KNOWN)
SMALL = ["GB10", "L4", "RTX 4090", "L20", "least that the kernels accept"]


def geometry_of(made):
    """A plan as a geometry given by hand."""
    ctas = 0 if made.implementation == "row" else made.ctas_per_row
    samples = 0 if made.held else made.num_samples
    registers = int(made.stages == 0)
    return (ctas, made.capacity, samples, registers, made.ctas_per_sm)


# Plans --------------------------------------------------------------------------------


@hypothesis.given(st.sampled_from(SMALL), rows, widths, native_ks)
def test_a_plan_for_a_small_device_fits_there(device, rows, n, k):
    _, _, granted = DEVICES[device]
    for name in ("", "row", "split", "cluster"):
        made = plan(device, rows, n, k, implementation=name)
        assert made.shared_memory_bytes <= granted, made.reason
        if made.implementation == "cluster":
            assert made.ctas_per_row <= 8


@hypothesis.given(known_devices, known_devices, rows, widths, native_ks)
def test_a_plan_of_one_device_given_by_hand_fits_on_any_other(a, b, rows, n, k):
    made = plan(a, rows, n, k)
    other = plan(
        b, rows, n, k, implementation=made.implementation, geometry=geometry_of(made)
    )
    capability, _, granted = DEVICES[b]
    if made.implementation == "cluster" and capability < 90:
        assert other.implementation == "" and "clusters" in other.reason
        return
    assert other.implementation == made.implementation
    assert other.shared_memory_bytes <= granted
    assert k <= other.capacity <= max(made.capacity, 2 * k)
    assert other.grid <= made.grid


@hypothesis.given(known_devices, rows, widths, native_ks)
def test_more_shared_memory_means_more_tiles_on_their_way_or_more_survivors(
    device, rows, n, k
):
    capability, sms, shared = DEVICES[device]
    fewer = plan((capability, sms, shared), rows, n, k)
    more = plan((capability, sms, shared + 8192), rows, n, k)
    assert (more.stages, more.capacity) >= (fewer.stages, fewer.capacity)
    assert more.implementation == fewer.implementation


@hypothesis.given(rows, widths, native_ks, st.integers(1, 200))
def test_a_row_is_shared_only_by_ctas_that_would_idle(rows, n, k, sms):
    made = plan((90, sms, 232448), rows, n, k)
    if made.implementation == "split":
        assert rows * made.ctas_per_row <= sms
        assert made.grid == rows * made.ctas_per_row
        assert (made.ctas_per_row - 1) * 8192 < n  # each has something to read


@hypothesis.given(known_devices, rows, widths, native_ks)
def test_a_workspace_is_for_no_more_ctas_than_have_something_to_read(
    device, rows, n, k
):
    made = plan(device, rows, n, k, implementation="split")
    ctas = min(-(-n // 8192), 64)
    assert made.workspace_bytes_per_row <= 8 * k * ctas + 4 * ctas + 32


@hypothesis.given(known_devices, st.integers(1, 10_000), widths, native_ks)
def test_one_workspace_serves_the_whole_and_up_to_eight_shards(device, rows, n, k):
    """The lowering sees global rows, the handler those of its shard."""
    whole = plan(device, 8 * rows, n, k)
    if whole.implementation == "split":
        local = plan(device, rows, n, k, implementation="split")
        wanted = min(local.ctas_per_row, 8 * whole.ctas_per_row)
        assert whole.workspace_bytes_per_row >= wanted * 8 * k


@hypothesis.given(scale(1 << 40), scale(1 << 40), scale(1 << 40))
def test_huge_problems_overflow_nothing(rows, n, k):
    for platform in ("cpu", "cuda"):
        made = plan("H200", rows, n, k, platform=platform)
        if n > 2**31 - 1:
            assert made.implementation == "xla" and str(n) in made.reason
        elif platform == "cuda":
            beyond = k > _ffi.MAX_K or rows > 2**31 - 1
            assert (made.implementation == "xla") == beyond
        assert made.grid >= 0 and made.workspace_bytes_per_row >= 0


# Facts --------------------------------------------------------------------------------


def device_of(capability, sms, shared):
    return types.SimpleNamespace(
        compute_capability=capability,
        core_count=sms,
        shared_memory_per_block_optin=shared,
    )


def test_the_least_of_several_devices_counts():
    h200 = device_of("9.0", 132, 232448)
    gb10 = device_of("12.1", 48, 101376)
    assert _plan.device_facts("cuda", [h200, h200]) == ("cuda", 90, 132, 232448)
    assert _plan.device_facts("cuda", [gb10]) == ("cuda", 121, 48, 101376)
    for both in ([h200, gb10], [gb10, h200]):
        assert _plan.device_facts("cuda", both) == ("cuda", 90, 48, 101376)


def test_devices_without_facts_are_unknown_ones():
    assert _plan.device_facts("cuda") == ("cuda", 0, 0, 0)
    assert _plan.device_facts("cpu", jax.devices("cpu")) == ("cpu", 0, 0, 0)
    odd = types.SimpleNamespace(compute_capability="gfx942")
    assert _plan.device_facts("cuda", [odd]) == ("cuda", 0, 0, 0)
    made = _plan.choose((8,), 131_072, 64, np.dtype("float32"), _plan.Device("cuda"))
    assert made.implementation in ("row", "split") and "not known" in made.reason


# Compiled for -------------------------------------------------------------------------

COMPILE_ONLY = pathlib.Path(sys.prefix) / "compile-only"


def test_programs_compile_for_gb10_a100_h200_and_b200():
    program = pathlib.Path(__file__).with_name("compile_for.py")
    command = [sys.executable, str(program)]
    if COMPILE_ONLY.is_dir():
        command.append(str(COMPILE_ONLY))
    elif importlib.util.find_spec("jax_cuda13_plugin") is None:
        reason = f"needs XLA's CUDA compiler: `make .venv/{COMPILE_ONLY.name}` gets it"
        if os.environ.get("JAX_TOPK_REQUIRE_COMPILE_ONLY") == "1":
            pytest.fail(f"JAX_TOPK_REQUIRE_COMPILE_ONLY=1, but it {reason}")
        pytest.skip(reason)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled for every GPU" in done.stdout


# Imitated -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 512, 2048, 4096])
@pytest.mark.parametrize("device", ["GB10", "least that the kernels accept"])
def test_plans_of_small_devices_are_exact_at_every_width(device, k):
    """99 KiB and 48 SMs, then 48 KiB and one SM, on the GPU that is here."""
    for n in (k, 4097, 8192, 33_001, 131_072, 400_009, 1_000_003, 2_000_000):
        if n < k:
            continue
        names = ["normal", "plateau", "random_bits"]
        labels, scores = inputs.batch(n, k, np.float32, names)
        want = oracle.top_k(scores, k, sorted=False)
        for count in (1, 3):
            made = plan(device, count, n, k)
            if made.implementation == "cluster" and why_no_clusters():
                continue
            bent = Implementation(made.implementation, "cuda", geometry_of(made))
            bent.check(
                scores[:count],
                k,
                sorted=False,
                labels=labels,
                expected=[x[:count] for x in want],
            )


@pytest.mark.parametrize("name", kernels())
def test_a_plan_for_a_bigger_device_is_cut_down_to_this_one(name):
    rng = inputs.generator("bigger")
    scores = rng.standard_normal((2, 100_003)).astype(np.float32)
    for dtype in (np.float32, jnp.bfloat16):
        bent = Implementation(name, "cuda", (64, 1 << 20, 1 << 20, 1 << 19, 9))
        bent.check(scores.astype(dtype), 3000, sorted=False)


@pytest.mark.gpu
def test_a_program_made_where_the_device_was_not_known_is_exact():
    """The portable plan: at lowering 48 KiB, in the handler what the device has."""
    n, k = 400_009, 2048
    rng = inputs.generator("portable")
    scores = rng.standard_normal((2, n)).astype(np.float32)
    portable = plan("unknown", 2, n, k)
    size = portable.workspace_bytes_per_row
    assert portable.implementation == "split"
    select = raw_calls.split(k, (0,) * 5, size)
    operand = jax.device_put(scores, jax.devices("cuda")[0])
    values, indices, _ = jax.device_get(select(operand, None))
    oracle.check((values, indices), scores, k)

# SPDX-License-Identifier: Apache-2.0
"""What every test gets: eight CPU devices, the implementations, a watchdog on GPUs."""

import faulthandler
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

# Before any backend exists. The tests leave room for the processes that they start.
jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import implementations  # noqa: E402
import inputs  # noqa: E402

# A kernel that hangs ends the run with "Timeout" and a traceback that names the test.
_GPU_TEST_SECONDS = 150
_stderr = 2


def pytest_configure(config):
    global _stderr
    _stderr = os.dup(2)  # the real one: output is not captured yet


def pytest_unconfigure():
    os.close(_stderr)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    reason = implementations.why_no_gpu()
    if reason and os.environ.get("JAX_TOPK_REQUIRE_GPU") == "1":
        pytest.fail(f"JAX_TOPK_REQUIRE_GPU=1, but {reason}", pytrace=False)
    if reason:
        pytest.skip(f"needs an NVIDIA GPU: {reason}")
    marks = item.iter_markers("gpu")
    if any(mark.kwargs.get("clusters") for mark in marks):
        reason = implementations.why_no_clusters()
        if reason:
            pytest.skip(f"needs clusters: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if item.get_closest_marker("gpu") is None or implementations.why_no_gpu():
        return (yield)
    faulthandler.dump_traceback_later(_GPU_TEST_SECONDS, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


_EVERY = (
    implementations.ON_CPU
    + implementations.PAGED_ON_CPU
    + implementations.ON_GPU
    + implementations.PAGED_ON_GPU
)


@pytest.fixture(params=implementations.parameters(_EVERY))
def implementation(request):
    """Each implementation, where it runs."""
    return request.param


@pytest.fixture(
    params=implementations.parameters(
        implementations.OTHERS_ON_CPU + implementations.OTHERS_ON_GPU
    )
)
def other_implementation(request):
    """The planner's choice, and the reference on a GPU."""
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def platform(request):
    """A platform whose first device is the default one during the test."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def devices(request):
    """All devices of a platform, an even number: eight of the CPU, or the GPUs."""
    found = jax.devices(request.param)
    if len(found) < 2:
        pytest.skip("needs two GPUs, and there is one")
    return found[: len(found) // 2 * 2]


# The problem that the tests of transforms share: few rows, with ties in each of them.


@pytest.fixture
def scores():
    rng = inputs.generator("transforms")
    return rng.integers(-40, 40, (3, 4, 300)).astype(np.float32)


@pytest.fixture
def lengths():
    return np.array([[300, 5, 0, 100], [300, 300, -1, 20], [1, 2, 19, 21]], np.int32)


@pytest.fixture
def python_under():
    """Runs Python with XLA flags of its own, in this folder; returns what it prints."""

    def run(flags, *arguments):
        given = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "XLA_FLAGS": given},
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=140,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run

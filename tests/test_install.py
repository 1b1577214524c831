# SPDX-License-Identifier: Apache-2.0
"""A fresh process: an import without side effects, a command, handlers that run."""

import os
import re
import subprocess
import sys

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_topk
from jax_topk import _ffi


def python(*arguments, **environment):
    """Runs Python in a process of its own, warnings being errors; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_initialises_no_backend():
    # The number of CPU devices can be set only while no backend exists.
    python(
        "-c",
        "import jax, jax_topk, jax_topk._ffi\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert len(jax.devices('cpu')) == 3\n",
    )


def test_a_process_without_a_gpu_imports_and_answers():
    out = python(
        "-c",
        "import jax, jax_topk, numpy as np\n"
        "x = np.array([[1, 5, 3, 5]], np.float32)\n"
        "print(jax.devices()[0].platform, jax_topk.top_k(x, 3).indices.tolist())\n",
        CUDA_VISIBLE_DEVICES="",
        JAX_PLATFORMS="cpu",
    )
    assert out.split("\n")[0] == "cpu [[1, 3, 2]]"


@pytest.mark.gpu
def test_importing_makes_no_cuda_context():
    python(
        "-c",
        "import ctypes, jax_topk, jax_topk._ffi\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "assert cuda.cuInit(0) == 0\n"
        "flags, active = ctypes.c_uint(7), ctypes.c_int(7)\n"
        "state = cuda.cuDevicePrimaryCtxGetState\n"
        "assert state(0, ctypes.byref(flags), ctypes.byref(active)) == 0\n"
        "assert active.value == 0\n",
    )


def test_the_command_prints_versions_targets_devices_and_a_plan():
    shape = ["--rows", "8", "--n", "131072", "--k", "2048", "--dtype", "bfloat16"]
    out = python("-m", "jax_topk", *shape)
    for word in (jax_topk.__version__, jax.__version__, *jax_topk.FFI_TARGETS):
        assert word in out, out
    assert re.search(r"\bcpu\b", out), out
    assert "131072" in out and "2048" in out and "bfloat16" in out, out
    assert python("-m", "jax_topk")


def test_the_command_explains_a_fallback():
    out = python(
        "-m", "jax_topk", "--rows", "8", "--n", "9000", "--k", "64", "--dtype", "int32"
    )
    assert "xla" in out and "float32" in out, out


def test_the_version_is_that_of_the_build():
    assert jax_topk.__version__ == _ffi.build_info()["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", jax_topk.__version__)


def test_the_build_holds_the_handlers_that_it_registers():
    found = _ffi.registrations()
    assert set(found["cpu"]) == {"jax_topk_cpu_v1", "jax_topk_paged_cpu_v1"}
    assert bool(_ffi.build_info()["cuda"]) == ("CUDA" in found)
    if "CUDA" in found:
        assert set(found["CUDA"]) == set(jax_topk.FFI_TARGETS) - set(found["cpu"])
        assert _ffi.build_info()["cuda_architectures"]


def test_the_public_surface():
    assert set(jax_topk.__all__) == {
        "top_k",
        "TopK",
        "accelerate_lax",
        "paged_top_k",
        "sharded_top_k",
        "FFI_TARGETS",
        "__version__",
    }
    assert jax_topk.TopK._fields == ("values", "indices")


# A handler built for newer headers registers without complaint and then does not exist.
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_each_handler_really_runs(implementation, dtype):
    rng = inputs.generator("smoke")
    scores = rng.standard_normal((3, 200)).astype(dtype)
    result = implementation(scores, 10)
    assert result.values.dtype == dtype
    oracle.check(result, scores, 10)

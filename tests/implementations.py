# SPDX-License-Identifier: Apache-2.0
"""The implementations under test, each a function of NumPy arrays on its own device."""

import dataclasses
import functools
import os
import re

import jax
import numpy as np
import oracle
import pytest

import jax_topk
from jax_topk import _ffi, _top_k

PLANNED = (0, 0, 0, 0, 0)  # every number of the geometry left to the planner
KERNELS = ("row", "split", "cluster")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation on one platform, its geometry bent where one is given.

    Attributes:
      name: what `implementation=` gets; None lets the planner decide.
      platform: "cpu" or "cuda".
      geometry: ctas_per_row, capacity, num_samples, registers, ctas_per_sm.
      paged: answers by way of a page table, in which each page is where it would be.
    """

    name: str | None
    platform: str
    geometry: tuple[int, ...] = PLANNED
    paged: bool = False

    @property
    def device(self):
        return jax.devices(self.platform)[0]

    @property
    def mark(self):
        """What a test of it needs, as a mark."""
        return pytest.mark.gpu(clusters=self.name == "cluster")

    def skip_without_room(self, gibibytes):
        """Skips the test unless so much memory is free where the scores will be."""
        if self.platform == "cuda":
            stats = self.device.memory_stats() or {}
            free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if free < gibibytes << 30:
            pytest.skip(f"needs {gibibytes} GiB of memory, {free >> 30} are free")

    def __str__(self):
        planned = "planned" if self.name is None else self.name
        native = {"xla": "cpu", "cpu": "cpu"} | dict.fromkeys(KERNELS, "cuda")
        suffix = "" if native.get(planned) == self.platform else f"-on-{self.platform}"
        bent = "" if self.geometry == PLANNED else f"-{self.geometry}".replace(" ", "")
        return planned + suffix + bent + ("-paged" if self.paged else "")

    def jitted(self, k, sorted=True):
        """The jitted (scores, lengths, starts) -> TopK; one object for equal arguments.

        Compiled once per shape, so tests that share a shape share the compilation.
        """
        return _jitted(self.name, self.geometry, self.paged, k, sorted)

    def __call__(self, scores, k, lengths=None, starts=None, sorted=True):
        """The answer as NumPy arrays."""
        operands = jax.device_put((scores, lengths, starts), self.device)
        return jax.device_get(self.jitted(k, sorted)(*operands))

    def check(self, scores, k, lengths=None, starts=None, sorted=True, **known):
        """Asserts that the answer is right, bit for bit."""
        given = (scores, k, lengths, starts, sorted)
        oracle.check(self(*given), *given, **known)


@functools.cache
def _jitted(name, geometry, paged, k, sorted):
    def selected(scores, lengths, starts):
        window = {"lengths": lengths, "starts": starts}
        options = {"sorted": sorted, "implementation": name}
        if geometry == PLANNED and not paged:
            return jax_topk.top_k(scores, k, **window, **options)
        size = 100
        table = np.arange(-(-scores.shape[-1] // size), dtype=np.int32)
        if geometry == PLANNED:
            options |= {"page_size": size}
            return jax_topk.paged_top_k(scores, k, table, **window, **options)
        pages = (table, (size, size)) if paged else None
        return _top_k.top_k_with_geometry(
            scores, k, **window, **options, geometry=geometry, pages=pages
        )

    return jax.jit(selected)


def parameters(found):
    """For a fixture: those on CUDA need a GPU."""
    return [
        pytest.param(one, id=str(one), marks=one.mark if one.platform == "cuda" else ())
        for one in found
    ]


def kernels(*names):
    """For a parameter: names of kernels, all of them unless some are given."""
    return [
        pytest.param(name, marks=Implementation(name, "cuda").mark)
        for name in names or KERNELS
    ]


ON_CPU = (Implementation("xla", "cpu"), Implementation("cpu", "cpu"))
ON_GPU = tuple(Implementation(name, "cuda") for name in KERNELS)

# The same by way of a page table.
PAGED_ON_CPU = (Implementation("cpu", "cpu", paged=True),)
PAGED_ON_GPU = tuple(dataclasses.replace(one, paged=True) for one in ON_GPU)

# What else a user can reach: the planner's choice, and the reference on a GPU.
OTHERS_ON_CPU = (Implementation(None, "cpu"),)
OTHERS_ON_GPU = (Implementation(None, "cuda"), Implementation("xla", "cuda"))


@functools.cache
def why_no_gpu():
    """Why CUDA kernels cannot run here, in words; "" where they can."""
    if "CUDA" not in _ffi.registrations():
        return "this build of jax_topk holds no CUDA kernels"
    try:
        jax.devices("cuda")
    except RuntimeError:
        return "JAX sees no NVIDIA GPU"
    return ""


@functools.cache
def why_no_clusters():
    """Why kernels on a GPU cannot be clusters here, in words; "" where they can."""
    built = re.findall(r"\d+", _ffi.build_info()["cuda_architectures"])
    if built and max(map(int, built)) < 90:
        return "the build holds none for compute capability 9.0"
    if float(jax.devices("cuda")[0].compute_capability) < 9:
        return "the GPU is below compute capability 9.0"
    return ""


def as_float32(bits):
    """The float32 of the given bit patterns."""
    return np.asarray(bits, np.uint32).view(np.float32)

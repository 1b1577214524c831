# SPDX-License-Identifier: Apache-2.0
"""Which implementation a problem gets: the face of the C++ planner.

Every decision is the planner's (``ffi/plan.h``). Decided here: how a device's facts are
read from JAX, and what stands for a number that is not known at lowering.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_ADVICE = (
    "run `pip install .` in the root of the source, and Python in another folder, "
    "since the source hides the installed package"
)
try:
    import jax_topk._ffi as _ffi
except ImportError as error:
    raise ImportError(
        f"jax_topk requires its compiled extension; got {error} ({_ADVICE})"
    ) from error

# The FFI targets, by the implementation that each belongs to. The suffix of a name
# counts the incompatible changes of a target's operands and attributes.
TARGETS = {
    "cpu": "jax_topk_cpu_v1",
    "row": "jax_topk_row_v1",
    "split": "jax_topk_split_v1",
    "cluster": "jax_topk_cluster_v1",
}
# Those that answer slots of paged memory: an operand and two attributes more.
PAGED_TARGETS = {
    name: target.replace("jax_topk_", "jax_topk_paged_")
    for name, target in TARGETS.items()
}


def _registrations() -> dict[str, dict[str, Any]]:
    """The extension's handlers, if they are the ones that these sources call."""
    needs = ("registrations", "build_info", "plan", "MAX_K", "IMPLEMENTATIONS")
    lacks = [name for name in needs if not hasattr(_ffi, name)]
    if not lacks:
        found = _ffi.registrations()
        names = {name for targets in found.values() for name in targets}
        here = TARGETS if "CUDA" in found else ("cpu",)
        wanted = {
            targets[name] for targets in (TARGETS, PAGED_TARGETS) for name in here
        }
        lacks = sorted(wanted - names)
        if not lacks:
            return found
    raise ImportError(
        "jax_topk requires a compiled extension as new as its Python files; got one "
        f"without {', '.join(lacks)} ({_ADVICE})"
    )


REGISTRATIONS = _registrations()
BUILD_INFO = _ffi.build_info()
VERSION: str = BUILD_INFO["version"]
IMPLEMENTATIONS: tuple[str, ...] = _ffi.IMPLEMENTATIONS

# A symbolic dimension (jax.export) is planned as if it were very large. Many rows
# choose a geometry without a workspace, whose size a row would otherwise be multiplied
# by a number that nobody knows yet. What fits the longest row fits every shorter one.
UNKNOWN_ROWS = 1 << 20
UNKNOWN_COLUMNS = (1 << 31) - 1


class Device(NamedTuple):
    """What the planner knows of a device; zero is unknown."""

    platform: str  # "cpu", "cuda", or any other name that JAX has for a platform
    compute_capability: int = 0  # 90 stands for 9.0
    num_sms: int = 0
    shared_memory_bytes: int = 0  # the most that one block may opt in to


class Choice(NamedTuple):
    """The planner's answer, after a look at what this build holds."""

    implementation: str  # one of IMPLEMENTATIONS; "": the one asked for cannot run
    reason: str  # in words
    plan: _ffi.Plan


def device_facts(platform: str, devices: Iterable[Any] = ()) -> Device:
    """Reads what the planner needs from JAX devices, live ones or of an AOT topology.

    One program may run on any of them, so the least of each fact counts.
    """
    least = (min(facts) for facts in zip(*map(_facts, devices), strict=True))
    return Device(platform, *least)


def _facts(device: Any) -> tuple[int, int, int]:
    # A platform without such facts has no such attributes.
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    known = major.isdecimal() and minor.isdecimal()
    return (
        int(major) * 10 + int(minor) if known else 0,
        int(getattr(device, "core_count", 0)),
        int(getattr(device, "shared_memory_per_block_optin", 0)),
    )


def choose(
    batch: Sequence[Any],
    n: Any,
    k: int,
    dtype: Any,
    device: Device,
    *,
    implementation: str | None = None,
    geometry: tuple[int, ...] = (),
) -> Choice:
    """Asks the planner.

    Args:
        batch: the leading dimensions, whose product is the number of rows. Each of
            them, and ``n``, may be symbolic.
        n: number of columns.
        k: number of columns to select.
        dtype: NumPy dtype of the scores.
        device: the facts of the device, from ``device_facts``.
        implementation: a name forces one, as in ``top_k``.
        geometry: a plan given by hand, for tests.
    """
    known = all(isinstance(size, int) for size in batch)
    plan = _ffi.plan(
        rows=math.prod(batch) if known else UNKNOWN_ROWS,
        n=n if isinstance(n, int) else UNKNOWN_COLUMNS,
        k=k,
        dtype=str(dtype),
        platform=device.platform,
        compute_capability=device.compute_capability,
        num_sms=device.num_sms,
        shared_memory_bytes=device.shared_memory_bytes,
        implementation=implementation or "",
        geometry=geometry,
    )
    needs_kernels = plan.implementation in ("row", "split", "cluster")
    if needs_kernels and device.num_sms and not BUILD_INFO["cuda"]:
        # The GPU is right here, but no kernel is.
        reason = "this build of jax_topk has no CUDA kernels"
        return Choice("" if implementation else "xla", reason, plan)
    return Choice(plan.implementation, plan.reason, plan)

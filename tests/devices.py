# SPDX-License-Identifier: Apache-2.0
"""Facts of devices, most of which are not here, and the planner's answer for them."""

from jax_topk import _ffi

# Compute capability, SMs, shared memory that a block may opt in to.
DEVICES = {
    "small MIG slice": (90, 16, 232448),
    "smallest MIG slice": (80, 14, 166912),
    "L4": (89, 58, 101376),
    "GB10": (121, 48, 101376),
    "RTX 4090": (89, 128, 101376),
    "L20": (89, 92, 101376),
    "A100": (80, 108, 166912),
    "H200": (90, 132, 232448),
    "B200": (100, 148, 232448),
    "least that the kernels accept": (80, 1, 48 << 10),
    "unknown": (0, 0, 0),
}


def plan(device, rows, n, k, dtype="float32", platform="cuda", **options):
    capability, sms, shared = DEVICES[device] if isinstance(device, str) else device
    return _ffi.plan(
        rows=rows,
        n=n,
        k=k,
        dtype=dtype,
        platform=platform,
        compute_capability=capability,
        num_sms=sms,
        shared_memory_bytes=shared,
        **options,
    )

# SPDX-License-Identifier: Apache-2.0
"""A kernel that holds the SMs, on a stream that XLA knows nothing of.

XLA runs everything on one stream of a device, so nothing that JAX can launch runs
beside a call of ours. The CUDA driver is called directly.
"""

import ctypes

_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %now, %begin, %gone, %wanted;
    .reg .pred %again;
    ld.param.u64 %wanted, [nanoseconds];
    mov.u64 %begin, %globaltimer;
LOOP:
    mov.u64 %now, %globaltimer;
    sub.u64 %gone, %now, %begin;
    setp.lt.u64 %again, %gone, %wanted;
    @%again bra LOOP;
    ret;
}
"""
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_...
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Spinner:
    """Launches kernels of `per_sm` blocks of 1024 threads an SM, which spin."""

    def __init__(self, per_sm):
        self.per_sm = per_sm
        self.launches = 0
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def _call(self, name, *arguments):
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed: CUDA error {code}")

    def __enter__(self):
        self._call("cuInit", 0)
        device, sms = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call(
            "cuDeviceGetAttribute", ctypes.byref(sms), _MULTIPROCESSOR_COUNT, device
        )
        self._blocks = self.per_sm * sms.value
        self._device = device
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), _PTX)
        self._call(
            "cuModuleGetFunction", ctypes.byref(self._kernel), self._module, b"spin"
        )
        self._stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        return self

    def launch(self, milliseconds):
        """Returns at once; the blocks spin for that long."""
        nanoseconds = ctypes.c_uint64(int(milliseconds * 1e6))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(nanoseconds))
        grid, block = (self._blocks, 1, 1), (1024, 1, 1)
        self._call(
            "cuLaunchKernel",
            self._kernel,
            *[ctypes.c_uint(x) for x in (*grid, *block, 0)],
            self._stream,
            arguments,
            None,
        )
        self.launches += 1

    def __exit__(self, *_):
        self._call("cuStreamSynchronize", self._stream)
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuModuleUnload", self._module)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

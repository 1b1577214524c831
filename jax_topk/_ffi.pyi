# The extension module (ffi/module.cc): the handlers' registrations and the planner.

from collections.abc import Sequence
from typing import TypedDict

MAX_K: int
"""The largest k of the CUDA kernels."""

IMPLEMENTATIONS: tuple[str, ...]
"""The names that `implementation` may take."""

class BuildInfo(TypedDict):
    version: str
    cuda: str  # of the compiler, "13.0"; empty in a CPU-only build
    cuda_architectures: str  # as CMake writes them, "80-real;120"; empty likewise
    ffi_api: str  # XLA's FFI interface that the handlers were compiled for, "0.3"

class Plan:
    """What runs a problem on a device, and with which geometry."""

    @property
    def implementation(self) -> str:
        """The implementation's name; empty when nothing fits."""

    @property
    def reason(self) -> str:
        """Why, in words and with the numbers."""

    @property
    def num_threads(self) -> int: ...
    @property
    def ctas_per_sm(self) -> int: ...
    @property
    def ctas_per_row(self) -> int: ...
    @property
    def min_chunk(self) -> int:
        """Columns below which a further CTA does not pay."""

    @property
    def grid(self) -> int: ...
    @property
    def capacity(self) -> int:
        """Slots for survivors in shared memory."""

    @property
    def held(self) -> bool:
        """Whether the registers of a cluster hold a row."""

    @property
    def stages(self) -> int:
        """Tiles of a chunk on their way in shared memory; 0: through registers."""

    @property
    def num_samples(self) -> int: ...
    @property
    def shared_memory_bytes(self) -> int: ...
    @property
    def workspace_bytes_per_row(self) -> int: ...

def registrations() -> dict[str, dict[str, object]]:
    """Returns the handlers: platform name to target name to capsule."""

def plan(
    *,
    rows: int,
    n: int,
    k: int,
    dtype: str,
    platform: str,
    compute_capability: int = 0,
    num_sms: int = 0,
    shared_memory_bytes: int = 0,
    implementation: str = "",
    geometry: Sequence[int] = (),
) -> Plan:
    """Plans a problem for a device; zero means that a device fact is unknown."""

def build_info() -> BuildInfo: ...

# SPDX-License-Identifier: Apache-2.0
"""Exact top-k selection for JAX, native on CPU and CUDA.

The public surface is decided here: ``top_k`` and its result ``TopK``, ``paged_top_k``
for key caches in pages, ``sharded_top_k`` for columns that are split over devices,
``accelerate_lax`` for programs that call ``jax.lax.top_k``, and the names of the FFI
targets for the safety check of ``jax.export``.
"""

from jax_topk._accelerate import accelerate_lax
from jax_topk._paged import paged_top_k
from jax_topk._plan import VERSION as __version__
from jax_topk._primitive import FFI_TARGETS
from jax_topk._sharded import sharded_top_k
from jax_topk._top_k import TopK, top_k

__all__ = [
    "FFI_TARGETS",
    "TopK",
    "__version__",
    "accelerate_lax",
    "paged_top_k",
    "sharded_top_k",
    "top_k",
]

# SPDX-License-Identifier: Apache-2.0
"""The handlers called as XLA calls them, past every check and choice in Python."""

import devices
import jax
import numpy as np


def workspace_bytes(rows, n, k, geometry):
    """The bytes a row that the lowering would reserve for the split kernel."""
    # Of a device whose facts hardly matter, as the geometry is given by hand.
    made = devices.plan("H200", rows, n, k, implementation="split", geometry=geometry)
    return made.workspace_bytes_per_row


def attributes(target, k, lengths=None, starts=None, sorted=True, geometry=(0,) * 5):
    """The attributes that the lowering would give the call."""
    given = {"k": np.int64(k), "sorted": sorted}
    given |= {"has_lengths": lengths is not None, "has_starts": starts is not None}
    if "_cpu_" not in target:
        given["geometry"] = np.asarray(geometry, np.int64)
    return given


def call(target, operands, results, given):
    """Calls a target with operands, (shape, dtype) of results, and attributes."""
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return jax.jit(lambda *xs: jax.ffi.ffi_call(target, types)(*xs, **given))(*operands)


def split(k, geometry, bytes_per_row, sorted=True):
    """A jitted (scores, lengths) -> (values, indices, workspace)."""

    def selected(scores, lengths):
        batch = scores.shape[:-1]
        types = [
            jax.ShapeDtypeStruct((*batch, k), scores.dtype),
            jax.ShapeDtypeStruct((*batch, k), np.int32),
            jax.ShapeDtypeStruct((*batch, bytes_per_row), np.uint8),
        ]
        given = attributes("jax_topk_split_v1", k, lengths, None, sorted, geometry)
        operands = [scores] if lengths is None else [scores, lengths[..., None]]
        return jax.ffi.ffi_call("jax_topk_split_v1", types)(*operands, **given)

    return jax.jit(selected)


def words(workspace):
    """The arrival word of each row."""
    return np.ascontiguousarray(workspace[..., :8]).view(np.uint64)[..., 0]

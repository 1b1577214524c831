# SPDX-License-Identifier: Apache-2.0
"""Meshes over the devices of a test, and what a compiled program moves between them."""

import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

# XLA's names of the ops that move data between devices, as a pattern.
COLLECTIVES = (
    "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    "|collective-broadcast|ragged-all-to-all|send|recv"
)
_COLLECTIVE = re.compile(rf"= (\S.*?) ({COLLECTIVES})(?:-start)?\(")


def mesh(devices, shape=None, names=("x",), axis_type=AxisType.Auto):
    """A mesh over the devices; without a shape over all of them, along one axis."""
    shape = (len(devices),) if shape is None else shape
    array = np.array(devices[: math.prod(shape)]).reshape(shape)
    types = axis_type if isinstance(axis_type, tuple) else (axis_type,) * len(names)
    return Mesh(array, names, axis_types=types)


def shapes(devices):
    """Two meshes over the devices: along one axis, and along two."""
    half = len(devices) // 2
    return [((2 * half,), ("x",)), ((half, 2), ("x", "y"))]


def placed(x, mesh, spec):
    """The array, distributed; None stays None."""
    return None if x is None else jax.device_put(x, NamedSharding(mesh, spec))


def collectives(compiled):
    """The names of the collectives in a compiled program, in order."""
    return [name for name, _ in moved(compiled)]


def moved(compiled):
    """Each collective of a compiled program, with the shape of what it makes."""
    text = compiled.as_text()
    assert "ENTRY" in text
    return [(found[2], found[1]) for found in _COLLECTIVE.finditer(text)]


def elements(shape):
    """How many elements XLA's words for a shape say; of several arrays, the last's."""
    dims = re.findall(r"\w+\[([\d,]*)\]", shape)[-1]
    return math.prod(int(size) for size in dims.split(",") if size)

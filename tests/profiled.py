# SPDX-License-Identifier: Apache-2.0
"""A program of its own: what the profiler sees on the stream, call by call.

Needs XLA flags that turn command buffers off, since the profiler shows a graph as one.
"""

import pathlib
import sys
import tempfile

import implementations
import jax
import numpy as np

CALLS = 7


def events(function, *operands):
    """Names of what ran on the GPU during CALLS calls."""
    jax.block_until_ready(function(*operands))
    jax.block_until_ready(function(*operands))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                jax.block_until_ready(function(*operands))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        found = []
        for plane in data.planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    found += [event.name for event in line.events]
    return found


def main():
    bad = False
    for bent, n in (
        (implementations.Implementation("split", "cuda", (4, 256, 0, 0, 0)), 1000),
        (implementations.Implementation("split", "cuda"), 400_009),
        (implementations.Implementation("row", "cuda"), 20_011),
        (implementations.Implementation("cluster", "cuda", (4, 256, 64, 0, 0)), 1000),
        (implementations.Implementation("cluster", "cuda", (4, 256, 0, 0, 0)), 1000),
        (implementations.Implementation("cluster", "cuda"), 131_072),
    ):
        if bent.name == "cluster" and implementations.why_no_clusters():
            continue
        for ragged in (False, True):
            scores = np.arange(3 * n, dtype=np.float32).reshape(3, n)
            lengths = np.array([n, 3, n - 1], np.int32) if ragged else None
            operands = jax.device_put((scores, lengths, None), bent.device)
            found = events(bent.jitted(48), *operands)
            ours = [name for name in found if "TopK" in name]
            print(f"{bent}, ragged={ragged}: {len(found)} events, {len(ours)} ours")
            if len(found) != CALLS or len(ours) != CALLS:
                bad = True
                print(f"  {sorted(set(found))}")
    if bad:
        sys.exit("a call is more, or less, than one kernel of ours")
    print("one kernel a call")


if __name__ == "__main__":
    main()

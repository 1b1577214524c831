# SPDX-License-Identifier: Apache-2.0
"""A program of its own, since it needs XLA flags: replays that cannot hide stale state.

With --xla_gpu_graph_min_graph_size=1 even a single call is recorded into a CUDA graph.
Here the graph is replayed with every address unchanged: the scores are updated in place
through donation, and the previous answer is deleted before the next call. Then nothing
re-records the graph, the workspace lies where the last call left it, and the memory of
the answer still holds the last one. A kernel that forgets to clean up its row state
leaves that stale answer in place; new contents at each call make it visible.
"""

import functools
import sys

import implementations
import jax
import numpy as np
import oracle

CALLS = 60


def scramble(scores, lengths, call, as_uint32, as_float32):
    """New contents at each call; the same arithmetic on the host and on the device."""
    bits = as_uint32(scores)
    bits = (bits * np.uint32(2654435761) + call) ^ (bits >> np.uint32(7))
    if lengths is not None:
        lengths = (lengths * 7 + 3) % 1040 - 20
    return as_float32(bits), lengths, call + np.uint32(1)


def replay(bent, rows, n, k, ragged, sorted):
    """Calls at unchanged addresses; how many of them kept those of the last call."""
    select = bent.jitted(k, sorted)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def advance(scores, lengths, call):
        cast = jax.lax.bitcast_convert_type
        as_uint32 = functools.partial(cast, new_dtype=np.uint32)
        as_float32 = functools.partial(cast, new_dtype=np.float32)
        return scramble(scores, lengths, call, as_uint32, as_float32)

    rng = np.random.default_rng(rows * n)
    scores = rng.standard_normal((rows, n)).astype(np.float32)
    lengths = rng.integers(20, n, rows).astype(np.int32) if ragged else None
    host = scores, lengths, np.uint32(0)
    device = jax.device_put(host, bent.device)
    addresses, kept = None, 0
    for _ in range(CALLS):
        result = select(*device[:2], None)
        jax.block_until_ready(result)
        before, addresses = addresses, [x.unsafe_buffer_pointer() for x in result]
        addresses.append(device[0].unsafe_buffer_pointer())
        kept += addresses == before
        got = [np.array(x) for x in result]
        for x in result:
            x.delete()
        oracle.check(got, host[0], k, host[1], sorted=sorted)
        device = advance(*device)
        views = [lambda x, to=to: x.view(to) for to in (np.uint32, np.float32)]
        host = scramble(*host, *views)
    return kept


def main():
    for bent in (
        implementations.Implementation("split", "cuda", (4, 256, 0, 0, 0)),
        implementations.Implementation("split", "cuda", (3, 1, 16, 0, 0)),
        implementations.Implementation("split", "cuda"),
        implementations.Implementation("row", "cuda"),
        implementations.Implementation("cluster", "cuda", (4, 1, 16, 0, 0)),
        implementations.Implementation("cluster", "cuda", (4, 1, 0, 0, 0)),
        implementations.Implementation("cluster", "cuda"),
    ):
        if bent.name == "cluster" and implementations.why_no_clusters():
            continue
        n = 1000 if any(bent.geometry) else 70_001
        for ragged in (False, True):
            kept = replay(bent, 5, n, 48, ragged, sorted=not ragged)
            print(f"{bent}, ragged={ragged}: {kept} of {CALLS - 1} kept the addresses")
            if kept < CALLS // 2:
                sys.exit("the addresses changed: these replays prove nothing")
    print("all calls right")


if __name__ == "__main__":
    main()

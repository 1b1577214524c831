# SPDX-License-Identifier: Apache-2.0
"""A program of its own: one of several processes that select together.

    python tests/distributed.py ADDRESS PROCESSES PROCESS DEVICES

Rows and columns are split over the devices of all processes. Each process compares what
it holds of the answers with the oracle. No code of the package knows of processes.
"""

import sys

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_topk import sharded_top_k, top_k

ROWS, N, K = 8, 256, 40


def distributed(x, mesh, spec):
    """Of an array that every process has whole, the parts that its devices hold."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])


def check(result, scores, *args, **options):
    """Compares the parts that are here with the oracle's answer."""
    wants = oracle.top_k(scores, *args, **options)
    for got, want in zip(result, wants, strict=True):
        for shard in got.addressable_shards:
            part = np.asarray(shard.data)
            if part.tobytes() != np.ascontiguousarray(want[shard.index]).tobytes():
                raise AssertionError(f"device {shard.device.id}: {part} is not {want}")


def problem(dtype):
    rng = np.random.default_rng(7)
    scores = rng.integers(-50, 50, (ROWS, N)).astype(dtype)
    scores[:, ::17] = -np.inf
    lengths = rng.integers(-1, N + 9, ROWS).astype(np.int32)
    starts = rng.integers(-9, N, ROWS).astype(np.int32)
    return scores, lengths, starts


def rows_over_all_devices(mesh):
    scores, lengths, starts = problem(np.float32)
    rows = P(mesh.axis_names)
    operands = [distributed(x, mesh, rows) for x in (scores, lengths, starts)]
    select = jax.jit(lambda x, r, s: top_k(x, K, lengths=r, starts=s))
    compiled = select.lower(*operands).compile()
    assert not meshes.collectives(compiled)
    result = compiled(*operands)
    assert len(result.values.sharding.device_set) == mesh.size
    check(result, scores, K, lengths, starts)

    gradient = jax.jit(jax.grad(lambda x: top_k(x, K).values.sum()))(operands[0])
    local = [shard.data for shard in gradient.addressable_shards]
    assert all(float(jnp.sum(x)) == K * len(x) for x in local)


def columns_over(mesh, names, rows=None, dtype=np.float32, sorted=True):
    scores, lengths, starts = problem(dtype)

    def select(x, r, s):
        return sharded_top_k(x, K, names, lengths=r, starts=s, sorted=sorted)

    specs = P(rows, names), P(rows), P(rows)
    mapped = jax.jit(
        jax.shard_map(select, mesh=mesh, in_specs=specs, out_specs=P(rows))
    )
    operands = [
        distributed(x, mesh, spec)
        for x, spec in zip((scores, lengths, starts), specs, strict=True)
    ]
    compiled = mapped.lower(*operands).compile()
    num_axes = 1 if isinstance(names, str) else len(names)
    assert meshes.collectives(compiled) == ["all-gather"] * num_axes
    check(compiled(*operands), scores, K, lengths, starts, sorted=sorted)

    def loss(*operands):
        values = mapped(*operands).values
        return jnp.sum(jnp.where(jnp.isneginf(values), 0, values))

    gradient = jax.jit(jax.grad(loss))(*operands)
    values, indices = oracle.top_k(scores, K, lengths, starts)
    want = np.zeros((ROWS, N), dtype)
    for row in range(ROWS):
        real = (indices[row] >= 0) & ~np.isneginf(values[row].astype(np.float32))
        want[row, indices[row][real]] = 1
    for shard in gradient.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


def main(address, processes, process, devices):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(address, processes, process, initialization_timeout=60)
    found = jax.devices()
    assert len(found) == processes * devices and jax.process_count() == processes
    one = meshes.mesh(found)
    # Columns within the two halves, rows over them, and once the other way round.
    two = meshes.mesh(found, (2, len(found) // 2), ("x", "y"))
    rows_over_all_devices(one)
    columns_over(one, "x")
    columns_over(two, ("x", "y"), sorted=False)
    columns_over(two, "x", rows="y", dtype=jnp.bfloat16)
    print(f"process {process} of {processes}: {len(found)} devices agree", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

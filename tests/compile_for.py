# SPDX-License-Identifier: Apache-2.0
"""A program of its own: compiles selections for GPUs that are not here.

    python tests/compile_for.py [FOLDER]

XLA's CUDA compiler is in the wheels jax-cuda13-plugin and jax-cuda13-pjrt, which need
neither a GPU nor a driver for this. FOLDER is where they are (`make test` keeps them in
.venv/compile-only, out of the way of everything else); without it they have to be
installed. A process of its own, since a plugin without a GPU changes what JAX sees.
"""

import os
import sys

if __name__ == "__main__":  # before jax is imported
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    sys.path += sys.argv[1:]

import re

import jax
import meshes
import numpy as np
from devices import DEVICES, plan
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_topk

# What XLA wants to know besides: shared memory of an SM, threads of an SM, GB.
GPUS = {
    "GB10": (102400, 1536, 128),
    "A100": (167936, 2048, 80),
    "H200": (233472, 2048, 141),
    "B200": (233472, 2048, 180),
}
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {per_sm}
  threads_per_core_limit: {threads}
  core_count: {sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 273000000000
  l2_cache_size: 25165824
  clock_rate_ghz: 1.7
  device_memory_size: {memory}000000000
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
"""
# Rows, columns, k: what is short, long, wide and of the largest k.
PROBLEMS = [(1, 1000, 5), (1, 131_072, 2048), (8, 400_009, 512), (512, 131_072, 2048)]
PROBLEMS += [(1, 2_000_000, 4096), (70_000, 300, 64)]


def topology(name, shape="1x1x1"):
    capability, sms, optin = DEVICES[name]
    per_sm, threads, memory = GPUS[name]
    config = TARGET.format(
        name=name,
        major=capability // 10,
        minor=capability % 10,
        sms=sms,
        optin=optin,
        per_sm=per_sm,
        memory=memory,
        threads=threads,
    )
    return topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=shape
    )


def compiled(devices, rows, n, k, dtype, **options):
    mesh = Mesh(np.array(devices), ("rows",))
    shape = jax.ShapeDtypeStruct(
        (rows, n), dtype, sharding=NamedSharding(mesh, P("rows", None))
    )
    lengths = jax.ShapeDtypeStruct(
        (rows,), np.int32, sharding=NamedSharding(mesh, P("rows"))
    )
    select = jax.jit(lambda x, r: jax_topk.top_k(x, k, lengths=r, **options))
    return select.lower(shape, lengths).compile()


def check(name):
    """Compiles each problem for a GPU; returns the implementations it got."""
    devices = topology(name).devices
    facts = devices[0].core_count, devices[0].shared_memory_per_block_optin
    if facts != DEVICES[name][1:]:
        raise AssertionError(f"{name}: JAX reports {facts}, not {DEVICES[name][1:]}")
    got = []
    for rows, n, k in PROBLEMS:
        for dtype in (np.float32, jax.numpy.bfloat16):
            made = plan(name, rows, n, k, np.dtype(dtype).name)
            program = compiled(devices, rows, n, k, dtype, sorted=False)
            text = program.as_text()
            targets = re.findall(r'custom_call_target="(\w+)"', text)
            if targets != [f"jax_topk_{made.implementation}_v1"]:
                raise AssertionError(f"{name}, {rows} x {n}, k={k}: got {targets}")
            scratch = program.memory_analysis().temp_size_in_bytes
            most = rows * made.workspace_bytes_per_row + 1024
            if scratch > most:
                raise AssertionError(f"{name}, {rows} x {n}, k={k}: {scratch} bytes")
            got.append(made.implementation)
    return got


def check_sharded(name):
    """Rows over four GPUs: one call each, and nothing between them."""
    text = compiled(topology(name, "1x1x4").devices, 32, 131_072, 2048, np.float32)
    text = text.as_text()
    found = re.findall(meshes.COLLECTIVES, text)
    if found or "f32[8,131072]" not in text:
        raise AssertionError(f"{name}, four of them: {found}")


def check_paged(name):
    """A table that rows share: as it is on one GPU, and for each row on four."""
    for shape, rows, table in (("1x1x1", 32, "32,2048"), ("1x1x4", 8, "8,4,2048")):
        mesh = Mesh(np.array(topology(name, shape).devices), ("rows",))
        sharded = {"sharding": NamedSharding(mesh, P("rows"))}
        scores = jax.ShapeDtypeStruct((32, 4, 131_072), np.float32, **sharded)
        pages = jax.ShapeDtypeStruct((32, 2048), np.int32, **sharded)
        select = jax.jit(lambda x, t: jax_topk.paged_top_k(x, 2048, t, page_size=64))
        text = select.lower(scores, pages).compile().as_text()
        found = re.findall(meshes.COLLECTIVES, text)
        calls = re.findall(r".*custom_call_target=\"jax_topk_paged_\w+_v1\".*", text)
        if found or len(calls) != 1 or f"f32[{rows},4,131072]" not in text:
            raise AssertionError(f"{name}, pages on {shape}: {found}, {calls}")
        if f"s32[{table}]" not in text:
            raise AssertionError(f"{name}, pages on {shape}: {calls}")


def check_sharded_columns(name):
    """Columns over four GPUs: k candidates of each are gathered, an axis at a time."""
    rows, n, k = 8, 524_288, 2048
    devices = topology(name, "1x1x4").devices
    for shape, names in (((4,), ("x",)), ((2, 2), ("x", "y"))):
        mesh = meshes.mesh(devices, shape, names)
        select = jax.shard_map(
            lambda x, r, names=names: jax_topk.sharded_top_k(x, k, names, lengths=r),
            mesh=mesh,
            in_specs=(P(None, names), P()),
            out_specs=P(),
        )
        operands = [
            jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
            for size, dtype, spec in (
                ((rows, n), np.float32, P(None, names)),
                ((rows,), np.int32, P()),
            )
        ]
        program = jax.jit(select).lower(*operands).compile()
        found = meshes.moved(program)
        want = [("all-gather", rows * 2 * k * size) for size in shape[::-1]]
        if [(name, meshes.elements(made)) for name, made in found] != want:
            raise AssertionError(f"{name}, {names} over four of them: {found}")
        targets = re.findall(r'custom_call_target="(jax_topk_\w+)"', program.as_text())
        if len(targets) != 1 + len(names):
            raise AssertionError(f"{name}, {names} over four of them: {targets}")


def main():
    for name in GPUS:
        got = check(name)
        check_sharded(name)
        check_paged(name)
        check_sharded_columns(name)
        counts = {one: got.count(one) for one in sorted(set(got))}
        print(f"{name}: {len(got)} programs, {counts}")
    print("compiled for every GPU")


if __name__ == "__main__":
    main()

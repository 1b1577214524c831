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
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_topk
from jax_topk import _ffi

# Compute capability, SMs, shared memory that a block may opt in to, of an SM; GB.
GPUS = {
    "NVIDIA GB10": (12, 1, 48, 101376, 102400, 128),
    "NVIDIA A100-SXM4-80GB": (8, 0, 108, 166912, 167936, 80),
    "NVIDIA H200": (9, 0, 132, 232448, 233472, 141),
    "NVIDIA B200": (10, 0, 148, 232448, 233472, 180),
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
device_description_str: "{name}"
"""
# Rows, columns, k: what is short, long, wide and of the largest k.
PROBLEMS = [(1, 1000, 5), (1, 131_072, 2048), (8, 400_009, 512), (512, 131_072, 2048)]
PROBLEMS += [(1, 2_000_000, 4096), (70_000, 300, 64)]


def topology(name, shape="1x1x1"):
    major, minor, sms, optin, per_sm, memory = GPUS[name]
    config = TARGET.format(
        name=name,
        major=major,
        minor=minor,
        sms=sms,
        optin=optin,
        per_sm=per_sm,
        memory=memory,
        threads=1536 if major == 12 else 2048,
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
    major, minor, sms, optin, *_ = GPUS[name]
    devices = topology(name).devices
    facts = devices[0].core_count, devices[0].shared_memory_per_block_optin
    if facts != (sms, optin):
        raise AssertionError(f"{name}: JAX reports {facts}, not {(sms, optin)}")
    got = []
    for rows, n, k in PROBLEMS:
        for dtype in (np.float32, jax.numpy.bfloat16):
            made = _ffi.plan(
                rows=rows,
                n=n,
                k=k,
                dtype=np.dtype(dtype).name,
                platform="cuda",
                compute_capability=10 * major + minor,
                num_sms=sms,
                shared_memory_bytes=optin,
            )
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


def main():
    for name in GPUS:
        got = check(name)
        check_sharded(name)
        check_paged(name)
        print(f"{name}: {len(got)} programs, {got.count('split')} with split")
    print("compiled for every GPU")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""``python -m jax_topk``: what is installed and here, and which plan a shape gets."""

from __future__ import annotations

import argparse
import pathlib
import platform as python_platform
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import jaxlib.version

import jax_topk
from jax_topk import FFI_TARGETS, _plan


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"python -m jax_topk: {message}\n")


def _size(least: int):
    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() else -1
        if not least <= number < 1 << 31:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} to 2147483647, got {text!r}"
            )
        return number

    return parse


def _dtype(text: str) -> str:
    try:
        return jnp.dtype(text).name
    except TypeError:
        raise argparse.ArgumentTypeError(
            f"expected the name of a dtype, such as float32 or bfloat16, got {text!r}"
        ) from None


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m jax_topk",
        description="Prints versions, devices, and which implementation of top_k a "
        "shape gets on each of them, and why.",
    )
    parser.add_argument("--rows", type=_size(0), default=8, help="default: %(default)s")
    parser.add_argument(
        "--n", type=_size(0), default=131072, help="default: %(default)s"
    )
    parser.add_argument("--k", type=_size(0), default=2048, help="default: %(default)s")
    parser.add_argument("--dtype", type=_dtype, default="float32")
    parser.add_argument(
        "--implementation",
        choices=_plan.IMPLEMENTATIONS,
        help="force one, as the argument of top_k does",
    )
    return parser.parse_args(argv)


def _heading(text: str) -> None:
    print(f"\n{text}")


def _field(name: str, value: object) -> None:
    print(f"  {name + ':':<17}{value}")


def _print_build() -> None:
    build = _plan.BUILD_INFO
    print("jax_topk: exact top-k selection for JAX")
    _field("jax_topk", jax_topk.__version__)
    _field("jax", jax.__version__)
    _field("jaxlib", jaxlib.version.__version__)
    _field("Python", python_platform.python_version())
    if build["cuda"]:
        architectures = build["cuda_architectures"].replace(";", ", ")
        _field("CUDA kernels", f"built with CUDA {build['cuda']} for {architectures}")
    else:
        _field("CUDA kernels", "none in this build")
    _field("FFI API", f"{build['ffi_api']}, {_ffi_api_of_jaxlib()} in this jaxlib")
    registered = {
        target: f"for {platform}"
        for platform, targets in _plan.REGISTRATIONS.items()
        for target in targets
    }
    for target in FFI_TARGETS:
        place = registered.get(target, "not in this build")
        _field("FFI target", f"{target}, {place}")


def _ffi_api_of_jaxlib() -> str:
    """What a handler may have been compiled for at most, or it will not be found."""
    try:
        header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    except OSError:
        return "unknown"
    found = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header)
    return ".".join(found) or "unknown"


def _devices() -> tuple[list[Any], str]:
    try:
        return jax.devices(), ""
    except RuntimeError as error:
        return [], f"JAX cannot start its backend: {error}"


def _words(device: _plan.Device) -> str:
    """The facts that the planner sees."""
    if device.platform != "cuda":
        return "no facts needed"
    if not (
        device.compute_capability and device.num_sms and device.shared_memory_bytes
    ):
        return "unknown to the planner"
    major, minor = divmod(device.compute_capability, 10)
    return (
        f"compute capability {major}.{minor}, {device.num_sms} SMs, "
        f"{device.shared_memory_bytes} bytes of shared memory a block"
    )


def _facts(device: Any) -> _plan.Device:
    # Of what JAX calls GPUs, CUDA's alone have a compute capability in numbers.
    facts = _plan.device_facts("cuda", [device])
    return facts if facts.compute_capability else _plan.Device(device.platform)


def _print_plan(kind: str, device: _plan.Device, args: argparse.Namespace) -> None:
    choice = _plan.choose(
        (args.rows,),
        args.n,
        args.k,
        args.dtype,
        device,
        implementation=args.implementation,
    )
    name = choice.implementation or f"{args.implementation} cannot run"
    print(f"  {kind}: {name}")
    print(f"    because {choice.reason}")
    plan = choice.plan
    if choice.implementation not in ("row", "split", "cluster"):
        return
    print(
        f"    {plan.grid} CTAs of {plan.num_threads} threads, at most "
        f"{plan.ctas_per_row} a row; {plan.shared_memory_bytes} bytes of shared memory "
        "each"
    )
    print(
        f"    room for {plan.capacity} survivors and {plan.num_samples} samples; "
        f"{plan.workspace_bytes_per_row} bytes of workspace a row"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    _print_build()

    devices, problem = _devices()
    _heading("Devices")
    for one in devices:
        print(f"  {one.id}: {one.device_kind} ({one.platform}), {_words(_facts(one))}")
    if problem:
        print(f"  {problem}")

    shape = f"{args.rows} x {args.n}"
    _heading(f"Plan for k={args.k} of {shape} {args.dtype} scores")
    if args.rows == 0 or args.n == 0 or args.k == 0:
        print("  nothing to select: the answer needs no kernel on any device")
        return 0
    if args.k > args.n:
        print("  (k exceeds n, which needs lengths: the rest of each row is padding)")
    kinds = {one.device_kind: _facts(one) for one in devices}
    kinds |= {
        "cpu": _plan.Device("cpu"),
        "a CUDA device that is not here (jax.export)": _plan.Device("cuda"),
        "another platform": _plan.Device("other"),
    }
    for kind, device in kinds.items():
        _print_plan(kind, device, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

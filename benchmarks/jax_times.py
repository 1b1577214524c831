# SPDX-License-Identifier: Apache-2.0
"""Times top_k as a user calls it, beside jax.lax.top_k and other ways to the answer.

    python benchmarks/jax_times.py [--quick] [--json PATH]

Microseconds of a call, the median over rounds in which all programs take turns:

    jit      one jitted call after another, none waited for until the last
    latency  one jitted call, waited for
    host     one jitted call, until it returns: the GPU has nothing else to do
    eager    as jit, without jit
    sites    one program of 20 calls; those that sort have 5, which compile soon enough
    scan     one program, a scan over 20 batches

Batches differ. What comes out of each program is checked first, bit for bit.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import inspect
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_topk
from jax_topk import _plan

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import oracle  # noqa: E402  # pyright: ignore[reportMissingImports]

BATCHES = 20
SITES_OF_SORTS = 5
MODES = ("jit", "latency", "host", "eager", "sites", "scan")
ROUNDS = 15
SECONDS = 3.0  # of a shape, after which its rounds end
CHECKED_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    rows: int
    n: int
    k: int
    dtype: str = "f32"


SHAPES = (
    Shape(8, 131072, 2048),
    Shape(1, 8192, 2048),
    Shape(1, 131072, 2048),
    Shape(64, 131072, 2048),
    Shape(8, 131072, 64),
    Shape(64, 131072, 64),
    Shape(8, 131072, 2048, "bf16"),
    Shape(1024, 8192, 2048),
)


@dataclasses.dataclass(frozen=True)
class Function:
    """One way to the answer, and what of the answer is promised."""

    name: str
    select: Callable[[jax.Array], Any]
    promise: str  # "by index", "by value", "values" (ties in any order), "about"
    sorts: bool = False
    modes: tuple[str, ...] = MODES


def functions(shape: Shape) -> list[Function]:
    k = shape.k

    def top_k(**options: Any) -> Callable[[jax.Array], Any]:
        return lambda x: jax_topk.top_k(x, k, **options)

    found = [
        Function("top_k(sorted=False)", top_k(sorted=False), "by index"),
        Function("top_k(sorted=True)", top_k(), "by value"),
        Function("jax.lax.top_k", lambda x: jax.lax.top_k(x, k), "by value", True),
    ]
    if "is_stable" in inspect.signature(jax.lax.top_k).parameters:
        options: Any = {"is_stable": False}  # of no jax before 0.11
        unstable: Any = functools.partial(jax.lax.top_k, **options)
        name = "jax.lax.top_k(is_stable=False)"
        found.append(Function(name, lambda x: unstable(x, k), "values", True))
    device = jax.devices()[0]
    platform = "cuda" if device.platform == "gpu" else device.platform
    facts = _plan.device_facts(platform, [device])
    dtype = {"f32": "float32", "bf16": "bfloat16"}[shape.dtype]

    def choose(name: str | None) -> str:
        where = (shape.rows,), shape.n, k, dtype, facts
        return _plan.choose(*where, implementation=name).implementation

    for name in _plan.IMPLEMENTATIONS:
        if name != choose(None) and choose(name) == name:
            select = top_k(sorted=False, implementation=name)
            title = f"top_k(implementation={name!r})"
            found.append(Function(title, select, "by index", name == "xla", ("sites",)))
    approximate = functools.partial(jax.lax.approx_max_k, k=k)
    found.append(
        Function("jax.lax.approx_max_k", approximate, "about", True, ("sites",))
    )
    return found


@functools.lru_cache
def inputs(rows: int, n: int, dtype: str) -> tuple[list[np.ndarray], list[jax.Array]]:
    """Batches, on the host and on the device: windows of one sequence of scores."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal(rows * n + BATCHES * 1009, np.float32)
    if dtype == "bf16":
        scores = scores.astype(jnp.bfloat16)
    host = [
        scores[1009 * i : 1009 * i + rows * n].reshape(rows, n) for i in range(BATCHES)
    ]
    return host, [jax.device_put(batch) for batch in host]


@functools.lru_cache
def stacked(rows: int, n: int, dtype: str) -> jax.Array:
    return jnp.stack(inputs(rows, n, dtype)[1])


class Program:
    """A function in a mode, on the batches of a shape."""

    def __init__(self, shape: Shape, function: Function, mode: str):
        self.shape, self.function, self.mode = shape, function, mode
        self.host, self.batches = inputs(shape.rows, shape.n, shape.dtype)
        select = function.select
        self.run: Callable[[Any], Any] = jax.jit(select)
        if mode == "eager":
            self.run = select
        elif mode == "sites":
            sites = SITES_OF_SORTS if function.sorts else BATCHES
            self.host, self.batches = self.host[:sites], self.batches[:sites]
            self.run = jax.jit(lambda batches: [select(x) for x in batches])
        elif mode == "scan":
            self.run = jax.jit(
                lambda stack: jax.lax.scan(lambda _, x: (0, select(x)), 0, stack)[1]
            )
            self.stack = stacked(shape.rows, shape.n, shape.dtype)

    def answers(self) -> list[Any]:
        """Runs it: the answers of the first batch and of the last."""
        if self.mode == "sites":
            every = self.run(self.batches)
            return [every[0], every[-1]]
        if self.mode == "scan":
            values, indices = self.run(self.stack)
            return [(values[0], indices[0]), (values[-1], indices[-1])]
        return [self.run(self.batches[0]), self.run(self.batches[-1])]

    def check(self) -> str:
        """What is wrong with the answers; empty if nothing is."""
        for answer, scores in zip(
            self.answers(), (self.host[0], self.host[-1]), strict=True
        ):
            values, indices = (np.asarray(x)[:CHECKED_ROWS] for x in answer)
            scores, k = scores[:CHECKED_ROWS], self.shape.k
            promise = self.function.promise
            try:
                if promise in ("by index", "by value"):
                    ordered = promise == "by value"
                    oracle.check((values, indices), scores, k, sorted=ordered)
                    continue
                expected, columns = oracle.top_k(scores, k)
                if not (np.take_along_axis(scores, indices, -1) == values).all():
                    return "values are not those at the indices"
                if promise == "values":
                    if not (values == expected).all():
                        return "values differ"
                elif any(
                    len(np.intersect1d(*pair)) < 0.9 * k
                    for pair in zip(indices, columns, strict=True)
                ):
                    return "less than 90 % of the columns are right"
            except AssertionError as error:
                return str(error)
        return ""

    def microseconds(self) -> float:
        """Of one call, once."""
        if self.mode in ("latency", "host"):
            times = []
            for batch in self.batches:
                start = time.perf_counter()
                answer = self.run(batch)
                if self.mode == "latency":
                    jax.block_until_ready(answer)
                times.append(time.perf_counter() - start)
                jax.block_until_ready(answer)
            return 1e6 * statistics.median(times)
        start = time.perf_counter()
        if self.mode == "sites":
            answers = self.run(self.batches)
        elif self.mode == "scan":
            answers = self.run(self.stack)
        else:
            answers = [self.run(batch) for batch in self.batches]
        jax.block_until_ready(answers)
        return 1e6 * (time.perf_counter() - start) / len(self.batches)


def machine() -> dict[str, Any]:
    """What this runs on, and what the build has made."""
    build = _plan.BUILD_INFO
    try:
        git = ["git", "rev-parse", "--short", "HEAD"]
        here = pathlib.Path(__file__).parent
        commit = subprocess.run(git, cwd=here, capture_output=True, text=True).stdout
    except FileNotFoundError:
        commit = ""
    return {
        "record": "jax-machine",
        "commit": commit.strip(),
        "jax": jax.__version__,
        "jax_topk": jax_topk.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "device": jax.devices()[0].device_kind,
        "extension_bytes": os.path.getsize(str(_plan._ffi.__file__)),
        "cuda": build["cuda"],
        "cuda_architectures": build["cuda_architectures"],
    }


def arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="one shape")
    for name in ("--rows", "--n", "--k"):
        parser.add_argument(name, type=numbers, help="shapes with these numbers only")
    parser.add_argument("--dtype", type=lambda text: text.split(","), help="f32, bf16")
    parser.add_argument("--json", help="append a line of JSON for each time")
    # `make bench` hands the same arguments to kernels.cu, which refuses unknown ones.
    return parser.parse_known_args()[0]


def main() -> int:
    args = arguments()
    shapes = [
        shape
        for shape in SHAPES[: 1 if args.quick else None]
        if all(
            getattr(shape, name) in (getattr(args, name) or [getattr(shape, name)])
            for name in ("rows", "n", "k", "dtype")
        )
    ]
    start = time.perf_counter()

    def progress(text: str) -> None:
        print(f"jax: {text}, {time.perf_counter() - start:.0f} s", file=sys.stderr)

    records = [machine()]
    print(", ".join(f"{key} {value}" for key, value in list(records[0].items())[1:]))
    programs = {
        shape: [
            Program(shape, function, mode)
            for function in functions(shape)
            for mode in function.modes
        ]
        for shape in shapes
    }
    every = [program for of_shape in programs.values() for program in of_shape]
    progress(f"{len(shapes)} shapes, compiling {len(every)} programs")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda program: jax.block_until_ready(program.answers()), every))

    all_right = True
    for shape, of_shape in programs.items():
        progress(f"timing {shape.rows} x {shape.n} {shape.dtype}, k = {shape.k}")
        wrong = {id(program): program.check() for program in of_shape}
        times: dict[int, list[float]] = {id(program): [] for program in of_shape}
        deadline = time.perf_counter() + SECONDS
        for turn in range(1 + ROUNDS):
            for program in of_shape:
                microseconds = program.microseconds()
                if turn > 0:  # warm
                    times[id(program)].append(microseconds)
            if turn >= 3 and time.perf_counter() > deadline:
                break
        print(f"\n{shape.rows} x {shape.n}, k = {shape.k}, {shape.dtype}: us a call")
        print(f"{'':32}" + "".join(f"{mode:>10}" for mode in MODES))
        for function in dict.fromkeys(program.function for program in of_shape):
            line = f"{function.name:32}"
            for mode in MODES:
                found = [
                    p for p in of_shape if (p.function, p.mode) == (function, mode)
                ]
                if not found:
                    line += " " * 10
                    continue
                (program,) = found
                problem = wrong[id(program)]
                if problem:
                    all_right = False
                    print(f"WRONG: {function.name}, {mode}: {problem}", file=sys.stderr)
                median = statistics.median(times[id(program)])
                line += f"{'WRONG' if problem else format(median, '.1f'):>10}"
                records.append(
                    {
                        "record": "jax",
                        **dataclasses.asdict(shape),
                        "function": function.name,
                        "mode": mode,
                        "calls": len(program.batches),
                        "right": not problem,
                        "us": round(median, 2),
                    }
                )
            print(line, flush=True)
    if args.json:
        with open(args.json, "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    progress("done")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The main job on real input: the 2048 best of each of 8 ragged rows of scores.

Selects on whatever device is there, compares every bit with a NumPy oracle, and times
the selection against jax.lax.top_k. Exits with 1 if a single bit is wrong.
"""

import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_topk
from jax_topk import _plan  # private; `python -m jax_topk` is its public face

# The oracle belongs to the tests, which are not part of the installed package: the demo
# looks for it in the folder where it lies in the repository.
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import oracle  # noqa: E402  # pyright: ignore[reportMissingImports]

K = 2048
REPEATS = 50


def select(scores: jax.Array, lengths: jax.Array, sorted: bool) -> jax_topk.TopK:
    return jax_topk.top_k(scores, K, lengths=lengths, sorted=sorted)


def right(result: jax_topk.TopK, row: int, *given: Any, sorted: bool) -> bool:
    """Whether a row of a result is, bit for bit, what the oracle says."""
    scores, lengths = given
    part = slice(row, row + 1)
    try:
        oracle.check(
            [np.asarray(x)[part] for x in result],
            scores[part],
            K,
            lengths[part],
            sorted=sorted,
            labels=[f"row {row} of the batch"],
        )
    except AssertionError as error:
        print(error, file=sys.stderr)
        return False
    return True


def check(scores: np.ndarray, lengths: np.ndarray) -> bool:
    """Selects, in both orders, and prints a line about each row."""
    run = jax.jit(select, static_argnames="sorted")
    results = {order: run(scores, lengths, sorted=order) for order in (True, False)}
    # Of the oracle's answer, so that nothing printed depends on what is being checked.
    thresholds = oracle.top_k(scores, K, lengths)[0][:, -1]

    print("  row   length   zeros   threshold   taken of ties   check")
    all_right = True
    for row, length in enumerate(lengths):
        window, threshold = scores[row, :length], thresholds[row]
        ties = int(np.sum(window == threshold))
        taken = ties - (int(np.sum(window >= threshold)) - K)
        good = [right(results[s], row, scores, lengths, sorted=s) for s in results]
        all_right = all_right and all(good)
        print(
            f"  {row:3}   {length:6}   {int(np.sum(window == 0)):5}   {threshold:9.4f}"
            f"   {f'{taken} of {ties}':>13}   {'ok' if all(good) else 'WRONG'}"
        )
    return all_right


def milliseconds(
    functions: dict[str, Callable[..., Any]], batches: list[Any]
) -> dict[str, float]:
    """The median time that each function takes for one batch.

    All batches go through one jitted program, so that where a selection takes
    microseconds it is not the launch of a program that is timed.
    """
    programs = {
        name: jax.jit(lambda batches, f=f: [f(*batch) for batch in batches])
        for name, f in functions.items()
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(3 + REPEATS):  # in turns: what disturbs one disturbs the others
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(batches))
            if turn >= 3:  # compiled, and warm
                times[name].append(time.perf_counter() - start)
    return {
        name: 1e3 * statistics.median(each) / len(batches)
        for name, each in times.items()
    }


def compare(scores: np.ndarray, lengths: np.ndarray) -> None:
    """Prints the times of top_k and of jax.lax.top_k on the same columns."""
    # jax.lax.top_k knows no lengths: it gets rows that are masked already, for free.
    outside = np.arange(scores.shape[-1]) >= lengths[:, None]
    masked = np.where(outside, -np.inf, scores).astype(scores.dtype)
    # Batches that differ, or XLA would compute one for all.
    num_batches = 1 if jax.default_backend() == "cpu" else 10
    batches = jax.device_put(
        [
            tuple(np.roll(x, i, axis=0) for x in (scores, lengths, masked))
            for i in range(num_batches)
        ]
    )
    baseline = "jax.lax.top_k"
    times = milliseconds(
        {
            baseline: lambda scores, lengths, masked: jax.lax.top_k(masked, K),
            "top_k(sorted=True)": lambda s, lengths, _: select(s, lengths, True),
            "top_k(sorted=False)": lambda s, lengths, _: select(s, lengths, False),
        },
        batches,
    )
    for name, each in times.items():
        ratio = "" if name == baseline else f"   {times[baseline] / each:5.1f} x"
        print(f"  {name:<20} {each:7.3f} ms{ratio}")


def explain(scores: np.ndarray, lengths: np.ndarray) -> None:
    """Prints what the compiler was given for a selection, and the planner's reason."""
    text = jax.jit(select, static_argnums=2).lower(scores, lengths, True).as_text()
    call = next((target for target in jax_topk.FFI_TARGETS if target in text), "")
    devices = jax.devices()
    platform = "cuda" if devices[0].platform == "gpu" else devices[0].platform
    choice = _plan.choose(
        scores.shape[:-1],
        scores.shape[-1],
        K,
        scores.dtype,
        _plan.device_facts(platform, devices),
    )
    print(
        f"  implementation: {choice.implementation} "
        f"({f'custom call {call}' if call else 'no custom call'})\n"
        f"  because {choice.reason}"
    )


def main() -> int:
    with np.load(ROOT / "examples" / "data" / "indexer_scores.npz") as data:
        scores, lengths = data["scores"], data["lengths"]
    rows, n = scores.shape
    device = jax.devices()[0]
    cores = f" of {os.cpu_count()} cores" if device.platform == "cpu" else ""
    print(
        f"jax_topk {jax_topk.__version__}, jax {jax.__version__}, "
        f"{device.device_kind}{cores}\n"
        f"Indexer scores, {rows} ragged rows of up to {n} columns: the {K} best of each"
    )
    all_right = True
    for dtype in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        cast = scores.astype(dtype)
        print(f"\n{dtype}")
        all_right &= check(cast, lengths)
        compare(cast, lengths)
        explain(cast, lengths)
    if not all_right:
        print("\nWRONG: standard error has the first difference of each wrong row.")
        return 1
    print("\nValues and indices are right in every bit, in both orders.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""A decode step of sparse attention, end to end, with four ways to select the keys.

    python benchmarks/decode_step.py                        the table of the README
    python benchmarks/decode_step.py --batches 1 --contexts 4096 --fp8-contexts 4096
        --selection-contexts --prefill-contexts                         a part

One layer of jax_topk.sparse_attention: project a token, append it to a paged key cache,
score all keys with the indexer, select k, attend, project. Decoding runs in a scan, as
a server runs it. The indexer's keys are bfloat16, or, as in DeepSeek-V3.2, FP8 with a
scale each; the keys and values of attention are bfloat16. What selects:

    lax.top_k        scores masked beyond the length, jax.lax.top_k, slots by a gather
    accelerate_lax   the very same function, within jax_topk.accelerate_lax()
    top_k            jax_topk.top_k with lengths, in order of columns; slots by a gather
    paged_top_k      jax_topk.paged_top_k: slots from the kernel
    none             the first k columns: what the rest of the step takes

The share of the selection is what a step takes beyond that of "none". In the rows
"selection" there is nothing else, with the scores at hand. All ways take turns, and the
median of the turns counts; what follows +- is half of what their middle half spans.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_topk
from jax_topk import sparse_attention as sparse

CONFIG = sparse.Config(
    width=2048, heads=32, groups=1, head_dim=128, index_heads=4, index_dim=128, k=2048
)
PAGE_SIZE = 64
DTYPE = jnp.bfloat16
FP8 = jnp.float8_e4m3fn


def slots_of(columns: jax.Array, cache: sparse.Cache) -> jax.Array:
    """What is to be done with columns where the kernel does not do it."""
    assert cache.page_table is not None
    table, place = cache.page_table[:, None], jnp.maximum(columns, 0)
    page = jnp.take_along_axis(table, place // PAGE_SIZE, -1, mode="promise_in_bounds")
    return jnp.where(columns < 0, -1, page * PAGE_SIZE + columns % PAGE_SIZE)


def by_lax(scores: jax.Array, cache: sparse.Cache, positions: jax.Array) -> jax.Array:
    seen = jnp.arange(scores.shape[-1]) <= positions[..., None]
    columns = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), CONFIG.k)[1]
    return slots_of(columns, cache)


def by_top_k(scores: jax.Array, cache: sparse.Cache, positions: jax.Array) -> jax.Array:
    columns = jax_topk.top_k(
        scores, CONFIG.k, lengths=positions + 1, sorted=False
    ).indices
    return slots_of(columns, cache)


def by_paged(scores: jax.Array, cache: sparse.Cache, positions: jax.Array) -> jax.Array:
    return sparse.select(scores, cache, positions, CONFIG)


def by_none(scores: jax.Array, cache: sparse.Cache, positions: jax.Array) -> jax.Array:
    # Never true, but the scores have to be there.
    moved = (scores.max(-1, keepdims=True) > 1e30).astype(np.int32)
    columns = jnp.arange(CONFIG.k, dtype=np.int32) + moved
    return slots_of(columns, cache)


SELECTIONS: dict[str, Any] = {
    "lax.top_k": by_lax,
    "accelerate_lax": by_lax,
    "top_k": by_top_k,
    "paged_top_k": by_paged,
    "none": by_none,
}


def extend(
    select: Any, params: sparse.Params, cache: sparse.Cache, x: jax.Array
) -> tuple[jax.Array, sparse.Cache]:
    """``sparse_attention.extend``, with a choice of what selects."""
    positions = cache.lengths[:, None] + np.arange(x.shape[1], dtype=np.int32)
    new = sparse.project(params, x, positions)
    cache = sparse.append(cache, new, positions)
    scores = sparse.index_scores(
        new.index_queries, cache.index_keys, new.index_weights, cache.index_scales
    )
    slots = select(scores, cache, positions)
    out = sparse.attend(new.queries, cache.keys, cache.values, slots)
    return jnp.einsum("bthd,hdw->btw", out, params["output"]), cache


def decode(
    select: Any,
    params: sparse.Params,
    cache: sparse.Cache,
    lengths: jax.Array,
    x: jax.Array,
    steps: int,
) -> tuple[sparse.Cache, jax.Array]:
    """Some tokens, one after the other; each is made of the one before."""

    def step(carry: Any, _: None) -> tuple[Any, None]:
        cache, x = carry
        y, cache = extend(select, params, cache, x)
        return (cache, (x + y).astype(DTYPE)), None

    first = (cache._replace(lengths=lengths), x)
    return jax.lax.scan(step, first, length=steps)[0]


def select_only(
    select: Any,
    scores: jax.Array,
    cache: sparse.Cache,
    lengths: jax.Array,
    x: jax.Array,
    steps: int,
) -> tuple[sparse.Cache, jax.Array]:
    """The selections of some steps, one after the other, from the same scores."""

    def step(slots: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        # Never true, but the slots of the step before have to be there, as in decoding:
        # all of them, and in memory.
        moved = (slots[:, 0, :1] < -1).astype(np.int32)
        slots = select(scores, cache, lengths[:, None] + i + moved)
        return jax.lax.optimization_barrier(slots), None

    del x
    slots = jnp.zeros((*scores.shape[:-1], CONFIG.k), np.int32)
    # Unrolled, or what it takes to start a turn of the loop would hide the kernels.
    return cache, jax.lax.scan(step, slots, jnp.arange(steps), unroll=8)[0]


def prefill(
    select: Any,
    params: sparse.Params,
    cache: sparse.Cache,
    lengths: jax.Array,
    x: jax.Array,
) -> tuple[sparse.Cache, jax.Array]:
    """The last chunk of a long prompt."""
    y, cache = extend(select, params, cache._replace(lengths=lengths), x)
    return cache, y


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def filled_cache(
    key: jax.Array, batch: int, context: int, index_dtype: Any = DTYPE
) -> sparse.Cache:
    """A cache full of normal keys, its pages in disorder."""
    table = jax.random.permutation(key, batch * context // PAGE_SIZE)
    table = table.astype(np.int32).reshape(batch, -1)

    def normal(key: jax.Array, width: int) -> jax.Array:
        # Row by row, since random bits take more room than what is made of them.
        draw = lambda key: jax.random.normal(key, (context, width), DTYPE)  # noqa: E731
        return jax.lax.map(draw, jax.random.split(key, batch))

    keys = jax.random.split(key, 3)
    slots = (batch * context, CONFIG.groups, CONFIG.head_dim)
    index_keys, scales = normal(keys[2], CONFIG.index_dim), None
    if index_dtype == FP8:
        index_keys, scales = sparse.quantise(index_keys)
    return sparse.Cache(
        normal(keys[0], CONFIG.groups * CONFIG.head_dim).reshape(slots),
        normal(keys[1], CONFIG.groups * CONFIG.head_dim).reshape(slots),
        index_keys,
        jnp.zeros(batch, np.int32),
        table,
        scales,
    )


def compiled(runs: dict[str, Any], *given: Any) -> dict[str, Any]:
    """The programs, lowered here, where accelerate_lax counts, and compiled at once."""
    lowered = {}
    for name, run in runs.items():
        accelerated = name == "accelerate_lax"
        with jax_topk.accelerate_lax() if accelerated else contextlib.nullcontext():
            lowered[name] = jax.jit(run, donate_argnums=1).lower(*given)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = pool.map(lambda one: one.compile(), lowered.values())
        return dict(zip(lowered, programs, strict=True))


def measure(
    programs: dict[str, Any], params: Any, cache: sparse.Cache, *given: Any, turns: int
) -> dict[str, tuple[list[float], float]]:
    """Of each program: seconds of its runs, and bytes. They take turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(1 + turns):
        for name, program in programs.items():
            start = time.perf_counter()
            cache, _ = jax.block_until_ready(program(params, cache, *given))
            if turn:
                times[name].append(time.perf_counter() - start)
    peaks = {}
    for name, program in programs.items():
        memory = program.memory_analysis()
        peaks[name] = 0.0
        if memory is not None:
            peaks[name] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            peaks[name] += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {name: (times[name], peaks[name]) for name in programs}


def case(
    given: argparse.Namespace,
    params: Any,
    phase: str,
    batch: int,
    context: int,
    index_dtype: Any,
) -> list[dict[str, Any]]:
    """All ways to select, for one size."""
    cache = filled_cache(jax.random.key(batch + context), batch, context, index_dtype)
    t = given.prefill_tokens if phase == "prefill" else 1
    steps = {
        "prefill": 1,
        "decode": given.steps,
        "selection": min(given.selection_steps, context - 1),
    }[phase]
    count = max(t, steps)
    lengths = jnp.full(batch, context - count, np.int32)
    x = jax.random.normal(jax.random.key(1), (batch, t, CONFIG.width), DTYPE)
    if phase == "selection":
        params = jax.random.normal(jax.random.key(2), (batch, 1, context), np.float32)
    names = [*given.selections, *(["none"] if phase != "selection" else [])]
    run = {"decode": decode, "selection": select_only, "prefill": prefill}[phase]
    options = {} if phase == "prefill" else {"steps": steps}
    runs = {name: functools.partial(run, SELECTIONS[name], **options) for name in names}
    programs = compiled(runs, params, cache, lengths, x)
    measured = measure(programs, params, cache, lengths, x, turns=given.repeats)
    rows = []
    for name, (times, peak) in measured.items():
        step = statistics.median(times) / steps
        low, high = np.percentile(times, (25, 75))
        rows.append(
            {
                "phase": f"prefill of {t}" if phase == "prefill" else phase,
                "index_keys": jnp.dtype(index_dtype).name,
                "batch": batch,
                "context": context,
                "selection": name,
                "us": 1e6 * step,
                "us_spread": 1e6 * (high - low) / 2 / steps,
                "tokens_per_s": batch * t / step,
                "gigabytes": peak / 1e9,
            }
        )
    rest = rows[-1]["us"] if phase != "selection" else 0.0
    slowest = rows[0]["us"]
    for row in rows:
        row["share"] = max(row["us"] - rest, 0) / row["us"]
        row["times_as_fast"] = slowest / row["us"]
        keys = "" if phase == "selection" else row["index_keys"]
        print(
            f"{row['phase']:>14}  {keys:<13} {batch:5} {context:8}  "
            f"{row['selection']:<15}{row['us']:8.1f} us +-{row['us_spread']:5.1f}"
            f"{100 * row['share']:5.0f} %{row['tokens_per_s']:10.0f}"
            f"{row['gigabytes']:7.1f} GB{row['times_as_fast']:7.2f} x",
            flush=True,
        )
    return rows


def plot(rows: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    def size_of(row: dict[str, Any]) -> tuple[str, str, int, int]:
        fp8 = row["index_keys"] == jnp.dtype(FP8).name
        return row["phase"], "FP8" if fp8 else "", row["batch"], row["context"]

    sizes = list(dict.fromkeys(size_of(row) for row in rows))
    names = list(dict.fromkeys(row["selection"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(13, 4.5), layout="constrained")
    for i, name in enumerate(names):
        mine = [row for row in rows if row["selection"] == name]
        each = [row["us"] / 1e3 for row in mine]
        at = [sizes.index(size_of(row)) for row in mine]
        places = np.array(at) + (i - len(names) / 2 + 0.5) * 0.16
        label = "without a selection" if name == "none" else name
        axes.bar(places, each, 0.15, label=label)
    labels = [
        f"{phase}\n{batch} x {n // 1024} K\n{keys}" for phase, keys, batch, n in sizes
    ]
    axes.set_xticks(np.arange(len(sizes)), labels, fontsize=8)
    axes.set(yscale="log", ylabel="ms", title=title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    numbers: dict[str, Any] = {"type": int, "nargs": "*"}
    parser.add_argument("--batches", default=[1, 8, 64], **numbers)
    parser.add_argument("--contexts", default=[32768, 131072, 524288], **numbers)
    parser.add_argument(
        "--fp8-contexts", default=[131072], help="with index keys in FP8", **numbers
    )
    parser.add_argument("--selection-contexts", default=[131072], **numbers)
    parser.add_argument("--prefill-contexts", default=[131072], **numbers)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--selections", nargs="+", default=list(SELECTIONS)[:-1])
    parser.add_argument("--steps", type=int, default=64, help="tokens in a scan")
    parser.add_argument("--selection-steps", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build"))
    given = parser.parse_args()

    device = jax.devices()[0]
    title = (
        f"{device.device_kind}, jax {jax.__version__}, jax_topk "
        f"{jax_topk.__version__}: k = {CONFIG.k}, {jnp.dtype(DTYPE).name}, keys of "
        f"{CONFIG.head_dim}, pages of {PAGE_SIZE}"
    )
    print(title)
    print(
        f"{'phase':>14}  {'index keys':<13} {'batch':>5} {'context':>8}  "
        f"{'selection':<15}{'step':>8}{'share':>16}{'tokens/s':>11}{'memory':>10}"
        f"{'speed':>9}"
    )
    params = sparse.init(jax.random.key(0), CONFIG, DTYPE)
    batches = given.batches
    sizes = [("decode", b, n, DTYPE) for n in given.contexts for b in batches]
    sizes += [("decode", b, n, FP8) for n in given.fp8_contexts for b in batches]
    sizes += [
        ("selection", b, n, DTYPE) for n in given.selection_contexts for b in batches
    ]
    sizes += [("prefill", 1, n, DTYPE) for n in given.prefill_contexts]
    start, rows = time.perf_counter(), []
    for size in sizes:
        rows += case(given, params, *size)
    print(f"{time.perf_counter() - start:.0f} s in all")

    given.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": title, "config": CONFIG._asdict(), "rows": rows}
    path = given.out / "decode_step.json"
    path.write_text(json.dumps(report, indent=1))
    print(f"written: {path}")
    with contextlib.suppress(ImportError):
        plot(rows, title, path.with_suffix(".png"))
        print(f"written: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()

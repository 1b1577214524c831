# SPDX-License-Identifier: Apache-2.0
"""Says what the lines of JSON mean that kernels.cu and jax_times.py have written.

    python benchmarks/report.py RESULTS                  print everything
    python benchmarks/report.py RESULTS --plots          draw RESULTS-*.svg beside it
    python benchmarks/report.py RESULTS --into README.md replace marked parts of a page

What is generated in a page stands between two comments. The first names sections, in
their order (see SECTIONS).

    <!-- benchmark: machine goals -->
    <!-- end of benchmark -->

published.json has the times of public kernels, and says how they were obtained. Of two
lines about the same cell the later one counts. Needs no GPU; to draw needs matplotlib.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Record = dict[str, Any]
PUBLISHED = pathlib.Path(__file__).with_name("published.json")
SHAPE = ("rows", "n", "k", "dtype")  # of jax_times.py

# What the project asks of itself, besides the goals of single cells in published.json.
GEOMETRIC_MEAN = 0.6
OVER_READ, LONG_READ_US = 1.2, 60
BF16_SHARE = 0.6
SORTED_US = 3
SHORT_IN_LONG = 1.2


class Cell(NamedTuple):
    """A problem of kernels.cu."""

    k: int
    rows: int
    n: int
    dtype: str = "f32"
    order: str = "index"
    scores: str = "normal"
    lengths: str = "full"

    def __str__(self) -> str:
        return f"{self.rows} x {self.n}, k = {self.k}"


@dataclasses.dataclass
class Results:
    """What was measured, and what it is compared with."""

    stem: pathlib.Path  # of the plots
    machine: Record
    software: Record
    kernels: dict[tuple[Cell, str], Record]  # by cell and implementation
    planned: dict[Cell, Record]
    jax: list[Record]
    published: Record

    def us(self, cell: Cell) -> float | None:
        return self.planned[cell]["us"] if cell in self.planned else None

    def pairs(self, *groups: str) -> Iterable[tuple[Record, Cell, Record]]:
        """Published cells that were measured, with our planned times."""
        for group in groups:
            for public in self.published[group]:
                cell = Cell(public["k"], public["rows"], public["n"])
                if cell in self.planned:
                    yield public, cell, self.planned[cell]


def load(path: pathlib.Path) -> Results:
    results = Results(
        path.with_suffix(""), {}, {}, {}, {}, [], json.loads(PUBLISHED.read_text())
    )
    jax: dict[tuple[Any, ...], Record] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        kind = record["record"]
        if kind == "machine":
            results.machine = record
        elif kind == "jax-machine":
            results.software = record
        elif kind == "jax":
            jax[tuple(record[x] for x in (*SHAPE, "function", "mode"))] = record
        elif record["right"]:
            cell = Cell(*(record[field] for field in Cell._fields))
            results.kernels[cell, record["implementation"]] = record
            if record["planned"]:
                results.planned[cell] = record
        else:
            print(f"WRONG: {record}", file=sys.stderr)
    results.jax = list(jax.values())
    return results


# Text --------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A table of Markdown that can be read as it is."""
    texts = [
        [
            "" if x is None else f"{x:.1f}" if isinstance(x, float) else str(x)
            for x in row
        ]
        for row in rows
    ]
    if not texts:
        return "Not measured.\n"
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    # Columns of words are flushed left, those of numbers right.
    left = [
        any(re.match(r"[A-Za-z]", row[i]) for row in texts) for i in range(len(header))
    ]

    def line(cells: Iterable[str]) -> str:
        padded = [
            cell.ljust(width) if flush else cell.rjust(width)
            for cell, width, flush in zip(cells, widths, left, strict=True)
        ]
        return "| " + " | ".join(padded) + " |\n"

    rule = [
        "-" * width if flush else "-" * (width - 1) + ":"
        for width, flush in zip(widths, left, strict=True)
    ]
    return line(header) + line(rule) + "".join(map(line, texts))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def ratio(x: float, y: float | None) -> str | None:
    return f"{x / y:.2f}" if y else None


# Sections ----------------------------------------------------------------------------


def machine(results: Results) -> str:
    facts, software = results.machine, results.software
    text = ""
    if facts:
        text += (
            f"{facts['gpu']}, {facts['sms']} SMs, at most {facts['max_mhz']:.0f} MHz, "
            f"driver {facts['driver']}, CUDA {facts['cuda']}; {facts['date']}, commit "
            f"{facts['commit'] or 'unknown'}.\nA kernel that only reads gets "
            f"{facts['read_gbps']:.0f} GB/s out of its memory"
        )
        if facts["pin_gbps"]:
            text += f"; clock and bus would allow {facts['pin_gbps']:.0f}"
        text += ".\n"
    if software:
        text += (
            f"Through JAX: commit {software.get('commit') or 'unknown'}, jax_topk "
            f"{software['jax_topk']}, jax {software['jax']}, Python "
            f"{software['python']}; the extension had "
            f"{software['extension_bytes'] / 1e6:.1f} MB, for "
            f"{software['cuda_architectures'].replace(';', ', ') or 'the CPU only'}.\n"
        )
    return text


def against(results: Results, group: str) -> str:
    rows = []
    for public, cell, ours in results.pairs(group):
        us, goal = ours["us"], public["goal_us"]
        rows.append(
            [
                *cell[:3],
                ours["implementation"],
                ours["ctas_per_row"],
                us,
                f"{ours['bytes'] / us / 1e3:.0f}",
                percent(ours["bytes"] / us / 1e3 / results.machine["read_gbps"]),
                ratio(us, ours["read_us"]),
                public["best"],
                public["best_us"],
                ratio(us, public["best_us"]),
                goal,
                "met" if us <= goal else ratio(us, goal),
                ratio(us, public["deterministic_us"]),
                ratio(us, public["lax_us"]),
            ]
        )
    header = ["k", "rows", "n", "kernel", "CTAs", "us", "GB/s", "share", "x read"]
    header += ["best public", "its us", "x best", "goal", "x goal", "x CUB", "x lax"]
    return table(header, rows)


def decode(results: Results) -> str:
    return against(results, "decode")


def prefill(results: Results) -> str:
    return against(results, "prefill")


def shapes(results: Results) -> str:
    """Decode and prefill, by rows and columns: time, and ratio to the best."""
    cells = {cell: (p, ours) for p, cell, ours in results.pairs("decode", "prefill")}
    widths = sorted({cell.n for cell in cells})
    rows = []
    for k, count in sorted({cell[:2] for cell in cells}, key=lambda x: (-x[0], x[1])):
        row: list[Any] = [k, count]
        for n in widths:
            public, ours = cells.get(Cell(k, count, n), (None, None))
            row.append(
                f"{ours['us']:.1f} ({ours['us'] / public['best_us']:.2f})"
                if public and ours
                else None
            )
        rows.append(row)
    return (
        "Microseconds a call, in parentheses over the best public kernel's.\n\n"
        + table(["k", "rows", *(f"n = {n}" for n in widths)], rows)
    )


def variants(results: Results) -> str:
    rows = []
    for cell, ours in results.planned.items():
        by_value = results.us(cell._replace(order="value"))
        bf16 = results.us(cell._replace(dtype="bf16"))
        if cell != Cell(*cell[:3]) or by_value is None or bf16 is None:
            continue
        us = ours["us"]
        rows.append(
            [*cell[:3], us, by_value, f"{by_value - us:+.1f}", bf16, ratio(bf16, us)]
        )
    header = ["k", "rows", "n", "us", "sorted", "more", "bf16", "x f32"]
    return table(header, rows)


def small_k(results: Results) -> str:
    rows = [
        [
            *cell[:3],
            ours["implementation"],
            ours["us"],
            ratio(ours["us"], ours["read_us"]),
            goal["us"],
            "met" if ours["us"] <= goal["us"] else ratio(ours["us"], goal["us"]),
        ]
        for cell, goal, ours in _small_k(results)
    ]
    header = ["k", "rows", "n", "kernel", "us", "x read", "goal", "x goal"]
    return table(header, rows)


def _small_k(results: Results) -> Iterable[tuple[Cell, Record, Record]]:
    for k in (8, 64, 128):
        for goal in results.published["small_k_goals"]:
            cell = Cell(k, goal["rows"], 131072)
            if cell in results.planned:
                yield cell, goal, results.planned[cell]


def ragged(results: Results) -> str:
    rows = []
    for cell, ours in results.planned.items():
        full = results.planned.get(
            cell._replace(n=4096, lengths="full")
            if cell.lengths == "4096"
            else cell._replace(lengths="full")
        )
        if cell.lengths == "full" or full is None:
            continue
        rows.append(
            [
                *cell[1:4],
                cell.lengths,
                "full, n = 4096" if cell.lengths == "4096" else "full",
                percent(ours["bytes"] / full["bytes"]),
                percent(ours["us"] / full["us"]),
                ours["us"],
                ratio(ours["us"], ours["read_us"]),
            ]
        )
    header = ["rows", "n", "dtype", "lengths", "against", "of its bytes"]
    return table([*header, "of its time", "us", "x read"], rows)


def hard(results: Results) -> str:
    columns = [(rows, dtype) for dtype in ("f32", "bf16") for rows in (1, 8, 64)]
    rows = []
    names = dict.fromkeys(cell.scores for cell in results.planned)
    for scores in names:
        row: list[Any] = [scores]
        for count, dtype in columns:
            normal = Cell(2048, count, 131072, dtype)
            us = results.us(normal._replace(scores=scores))
            base = results.us(normal)
            row.append(f"{us:.1f} ({us / base:.2f})" if us and base else None)
        if any(row[1:]):
            rows.append(row)
    if len(rows) < 2:
        rows = []
    return (
        "Microseconds a call for n = 131072 and k = 2048, in parentheses over normal "
        "scores.\n\n"
        + table(["scores", *(f"{rows} x {dtype}" for rows, dtype in columns)], rows)
    )


def planner(results: Results) -> str:
    """Where several implementations were measured: what the planner's choice costs."""
    rows = []
    for cell, planned in results.planned.items():
        others = {
            name: record["us"]
            for (other, name), record in results.kernels.items()
            if other == cell
        }
        if len(others) < 2:
            continue
        best = min(others, key=lambda name: others[name])
        rows.append(
            [
                *cell,
                planned["implementation"],
                planned["us"],
                ", ".join(f"{name} {us:.1f}" for name, us in others.items()),
                "" if best == planned["implementation"] else best,
                ratio(planned["us"], others[best]),
            ]
        )
    header = [*Cell._fields, "planned", "us", "all", "faster", "x fastest"]
    return table(header, rows)


def jax(results: Results) -> str:
    modes = list(dict.fromkeys(record["mode"] for record in results.jax))
    rows: dict[tuple[Any, ...], list[Any]] = {}
    for record in results.jax:
        key = (*(record[field] for field in SHAPE), record["function"])
        row = rows.setdefault(key, [*key, *(None for _ in modes)])
        row[len(key) + modes.index(record["mode"])] = (
            float(record["us"]) if record["right"] else "WRONG"
        )
    return table([*SHAPE, "function", *modes], list(rows.values()))


def goals(results: Results) -> str:
    """What the project asks of itself."""
    rows: list[list[Any]] = []

    def add(what: str, goal: str, measured: str, met: bool) -> None:
        rows.append([what, goal, measured, "yes" if met else "NO"])

    def worst(
        what: str, goal: str, most: float, found: list[tuple[float, Any]], unit: str
    ) -> None:
        """The largest of some numbers, with what it belongs to, is at most `most`."""
        if not found:
            return
        number, where = max(found, key=lambda x: x[0])
        missed = sum(x > most for x, _ in found)
        text = f"{number:.2f}{unit} at {where}"
        if missed:
            text += f"; {missed} of {len(found)} miss it"
        add(what, goal, text, not missed)

    def over_best(*groups: str) -> list[tuple[float, Any]]:
        found = results.pairs(*groups)
        return [(ours["us"] / public["best_us"], cell) for public, cell, ours in found]

    both = list(results.pairs("decode", "prefill"))
    for group in ("decode", "prefill"):
        what = f"{group}, each cell over the best public kernel"
        worst(what, "at most 1", 1, over_best(group), "")
    if found := over_best("decode"):
        mean = statistics.geometric_mean(x for x, _ in found)
        what = f"decode, geometric mean of {len(found)} cells over the best"
        add(what, f"at most {GEOMETRIC_MEAN}", f"{mean:.3f}", mean <= GEOMETRIC_MEAN)
    if found := over_best("prefill"):
        mean = statistics.geometric_mean(x for x, _ in found)
        add("prefill, geometric mean", "at most 1", f"{mean:.3f}", mean <= 1)
    worst(
        f"time over a read of more than {LONG_READ_US} us",
        f"at most {OVER_READ}",
        OVER_READ,
        [
            (ours["us"] / ours["read_us"], cell)
            for _, cell, ours in both
            if ours["read_us"] > LONG_READ_US
        ],
        "",
    )
    if both:
        met = sum(ours["us"] <= public["goal_us"] for public, _, ours in both)
        what = "decode and prefill, goals of the cells"
        add(what, "all", f"{met} of {len(both)}", met == len(both))
    worst(
        "small k, time over the goal of the cell",
        "at most 1",
        1,
        [(ours["us"] / goal["us"], cell) for cell, goal, ours in _small_k(results)],
        "",
    )
    bf16 = [
        (ours, other, cell)
        for cell, ours in results.planned.items()
        if cell == Cell(*cell[:3])
        and (other := results.us(cell._replace(dtype="bf16"))) is not None
    ]
    found = [(other / ours["us"], cell) for ours, other, cell in bf16]
    worst("bfloat16 over float32", "at most 1", 1, found, "")
    found = [
        (other / ours["us"], cell)
        for ours, other, cell in bf16
        if 2 * ours["read_us"] > ours["us"]
    ]
    what = "the same where half of the time is the read"
    worst(what, f"at most {BF16_SHARE}", BF16_SHARE, found, "")
    for group, many in (("up to 256 rows", False), ("prefill", True)):
        found = [
            (other - ours["us"], cell)
            for cell, ours in results.planned.items()
            if cell == Cell(*cell[:3])
            and (cell.rows > 256) == many
            and (other := results.us(cell._replace(order="value"))) is not None
        ]
        what = f"sorted=True, microseconds more, {group}"
        worst(what, f"at most {SORTED_US}", SORTED_US, found, " us")
    found = []
    for cell in results.planned:
        whole = results.us(cell._replace(n=4096, lengths="full"))
        if cell.lengths == "4096" and whole:
            where = f"{cell}, {cell.dtype}"
            found.append((results.planned[cell]["us"] / whole, where))
    what = "4096 of a million columns over 4096 of 4096"
    worst(what, f"at most {SHORT_IN_LONG}", SHORT_IN_LONG, found, "")
    limits = {one["scores"]: one["limit"] for one in results.published["hard"]}
    for scores, limit in limits.items():
        found = [
            (ours["us"] / normal, f"{cell}, {cell.dtype}")
            for cell, ours in results.planned.items()
            if cell.scores == scores
            and (normal := results.us(cell._replace(scores="normal")))
        ]
        worst(f"{scores} scores over normal ones", f"at most {limit}", limit, found, "")
    lax = {
        Cell(p["k"], p["rows"], p["n"]): p["lax_us"]
        for p in results.published["decode"]
        if p["lax_us"]
    }
    found = [
        (ours["us"] / lax[Cell(*cell[:3])], f"{cell}, {cell.scores}")
        for cell, ours in results.planned.items()
        if cell.scores != "normal" and cell.dtype == "f32" and Cell(*cell[:3]) in lax
    ]
    worst("hard scores over jax.lax.top_k's time", "at most 1", 1, found, "")
    host = {
        (*(record[field] for field in SHAPE), record["function"]): record["us"]
        for record in results.jax
        if record["mode"] == "host"
    }
    found = [
        (us / theirs, f"{key[0]} x {key[1]} {key[3]}, k = {key[2]}")
        for key, us in host.items()
        if key[-1] == "top_k(sorted=False)"
        and (theirs := host.get((*key[:-1], "jax.lax.top_k")))
    ]
    worst("host's time for a call over jax.lax.top_k's", "at most 1", 1, found, "")
    return table(["what", "goal", "measured", "met"], rows)


def plots(results: Results) -> str:
    """Links to what draw() has drawn; `into` makes them relative to the page."""
    return (
        f"![Time against n, for each number of rows]({results.stem}-times.svg)\n\n"
        f"![Share of the read bandwidth]({results.stem}-roofline.svg)\n"
    )


SECTIONS: dict[str, Callable[[Results], str]] = {
    "machine": machine,
    "goals": goals,
    "shapes": shapes,
    "decode": decode,
    "prefill": prefill,
    "variants": variants,
    "small-k": small_k,
    "ragged": ragged,
    "hard": hard,
    "planner": planner,
    "jax": jax,
    "plots": plots,
}


def into(page: pathlib.Path, results: Results) -> None:
    """Replaces the generated parts of a page."""
    here = dataclasses.replace(
        results, stem=pathlib.Path(os.path.relpath(results.stem, page.parent))
    )

    def part(match: re.Match[str]) -> str:
        sections = [SECTIONS[name](here) for name in match[2].split()]
        return match[1] + "\n" + "\n".join(sections) + "\n" + match[3]

    text, count = re.subn(
        r"(<!-- benchmark: ([a-z -]+) -->\n).*?(<!-- end of benchmark -->)",
        part,
        page.read_text(),
        flags=re.DOTALL,
    )
    if not count:
        sys.exit(f"report.py: {page} has no line <!-- benchmark: SECTIONS -->")
    page.write_text(text)
    print(f"{page}: {count} parts replaced", file=sys.stderr)


# Plots -------------------------------------------------------------------------------


def draw(results: Results) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("svg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jax_topk"})
    from matplotlib import pyplot, ticker  # pyright: ignore[reportMissingImports]

    title = f"{results.machine['gpu']}, float32, k = 2048"
    cells = {
        cell: (public, ours)
        for public, cell, ours in results.pairs("decode", "prefill")
        if cell.k == 2048
    }
    if not cells:
        print("nothing to draw: no cell of k = 2048 was measured", file=sys.stderr)
        return

    def save(figure: Any, name: str) -> None:
        path = results.stem.with_name(f"{results.stem.name}-{name}.svg")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", file=sys.stderr)

    counts = sorted({cell.rows for cell in cells})
    columns = min(len(counts), 4)
    height = -(-len(counts) // columns)
    figure, axes = pyplot.subplots(
        height,
        columns,
        figsize=(3 * columns, 2.9 * height + 0.8),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    series = {
        "jax.lax.top_k": ("0.6", "s--", lambda public, ours: public["lax_us"]),
        "CUB cluster, deterministic": (
            "tab:olive",
            "v:",
            lambda public, ours: public["deterministic_us"],
        ),
        "best public kernel": ("tab:red", "^-", lambda public, ours: public["best_us"]),
        "top_k(sorted=False)": ("tab:blue", "o-", lambda public, ours: ours["us"]),
        "a read of the scores": ("k", ":", lambda public, ours: ours["read_us"]),
    }
    for i, axis in enumerate(axes.flat):
        if i >= len(counts):
            axis.axis("off")
            continue
        of_rows = sorted(cell for cell in cells if cell.rows == counts[i])
        for name, (color, style, us) in series.items():
            points = [(cell.n, us(*cells[cell])) for cell in of_rows]
            points = [(n, y) for n, y in points if y]
            axis.loglog(
                *(zip(*points, strict=True) if points else ((), ())),
                style,
                color=color,
                label=name,
                markersize=4,
                linewidth=1.2,
            )
        axis.set_title(f"{counts[i]} row{'s' if counts[i] > 1 else ''}", fontsize=10)
        axis.set_xticks(
            [8192, 32768, 131072, 524288], ["8 K", "32 K", "128 K", "512 K"]
        )
        axis.minorticks_off()
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.grid(alpha=0.3)
        if i + columns >= len(counts):
            axis.set_xlabel("columns of a row")
    figure.supylabel("microseconds a call")
    figure.suptitle(title)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    save(figure, "times")

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    peak = results.machine["read_gbps"]
    reads = sorted({(ours["bytes"], ours["read_us"]) for _, ours in cells.values()})
    axis.semilogx(
        [size / 2**20 for size, _ in reads],
        [size / us / 10 / peak for size, us in reads],
        "k:",
        label="a read of the scores",
    )
    for name, color, marker, us in (
        ("best public kernel", "tab:red", "^", lambda p, ours: p["best_us"]),
        ("top_k(sorted=False)", "tab:blue", "o", lambda p, ours: ours["us"]),
    ):
        axis.semilogx(
            [ours["bytes"] / 2**20 for _, ours in cells.values()],
            [ours["bytes"] / us(p, ours) / 10 / peak for p, ours in cells.values()],
            marker,
            color=color,
            label=name,
            markersize=5,
            alpha=0.8,
        )
    axis.set_ylim(0, 105)
    axis.set_xlabel("MiB of scores")
    axis.set_ylabel(f"% of the read bandwidth, {peak:.0f} GB/s")
    axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.grid(alpha=0.3)
    axis.legend()
    axis.set_title(title, fontsize=11)
    save(figure, "roofline")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=pathlib.Path, help="lines of JSON")
    parser.add_argument("--plots", action="store_true", help="draw")
    parser.add_argument("--into", type=pathlib.Path, nargs="+", help="pages to update")
    args = parser.parse_args(argv)
    results = load(args.results)
    if args.plots:
        draw(results)
    for page in args.into or ():
        into(page, results)
    if not args.into:
        for name, section in SECTIONS.items():
            if name != "plots" and "Not measured" not in (text := section(results)):
                print(f"\n{name}\n\n{text}", end="")


if __name__ == "__main__":
    main()

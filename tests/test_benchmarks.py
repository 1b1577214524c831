# SPDX-License-Identifier: Apache-2.0
"""What the benchmark's report makes of stored results; nothing is timed here."""

import itertools
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import report  # noqa: E402

# Of an earlier version of the kernels, measured on an H200, but for the reads.
MACHINE = {
    "record": "machine",
    "date": "2026-11-30",
    "commit": "",
    "gpu": "NVIDIA H200",
    "sms": 132,
    "max_mhz": 1980,
    "driver": "580.00",
    "cuda": "13.0",
    "read_gbps": 4500.0,
    "pin_gbps": 4814.0,
}
TIMES = [  # k, rows, n, dtype, order, us, us of a read
    (2048, 1, 131072, "f32", "index", 13.7, 2.5),
    (2048, 1, 131072, "f32", "value", 17.7, 2.5),
    (2048, 1, 131072, "bf16", "index", 13.7, 2.2),
    (2048, 64, 131072, "f32", "index", 28.4, 10.0),
    (2048, 256, 1048576, "f32", "index", 358.5, 239.0),
    (2048, 1024, 8192, "f32", "index", 63.2, 10.0),
]


def kernel(k, rows, n, dtype, order, us, read_us, **others):
    return {
        "record": "kernel",
        "k": k,
        "rows": rows,
        "n": n,
        "dtype": dtype,
        "order": order,
        "scores": "normal",
        "lengths": "full",
        "implementation": "split",
        "planned": True,
        "ctas_per_row": 16,
        "bytes": rows * n * (4 if dtype == "f32" else 2),
        "right": True,
        "us": us,
        "read_us": read_us,
    } | others


def stored(folder, *more):
    records = [MACHINE, *(kernel(*times) for times in TIMES), *more]
    path = folder / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows_of(text):
    """The cells of each line of a table."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")
    ]


def named(text, first):
    (row,) = [row for row in rows_of(text) if row and row[0].startswith(first)]
    return row[1:]


def test_published_figures_are_complete():
    published = json.loads(report.PUBLISHED.read_text())
    counts = (1, 4, 8, 32, 64, 256)
    shapes = list(
        itertools.product([2048], counts, [8192, 32768, 131072, 524288, 1048576])
    ) + list(itertools.product([512], counts, [32768, 131072]))
    decode, prefill = published["decode"], published["prefill"]
    assert len(shapes) == 42
    assert [(one["k"], one["rows"], one["n"]) for one in decode] == shapes
    assert [(one["k"], one["rows"], one["n"]) for one in prefill] == list(
        itertools.product([2048], [1024, 4096], [8192, 32768, 131072])
    )
    for one in decode + prefill:
        others = (one[x] for x in ("deterministic_us", "persistent_us", "lax_us"))
        assert one["goal_us"] < one["best_us"] <= min(x for x in others if x)
        assert one["best"]


def test_a_cell_stands_beside_the_best_public_kernel_and_the_read(tmp_path):
    text = report.decode(report.load(stored(tmp_path)))
    header, _, *cells = [row for row in rows_of(text) if row]
    assert [cell[:3] for cell in cells] == [
        ["2048", "1", "131072"],
        ["2048", "64", "131072"],
        ["2048", "256", "1048576"],
    ]
    last = dict(zip(header, cells[-1], strict=True))
    assert last["us"] == "358.5"
    assert last["GB/s"] == "2995"  # 1 GiB in 358.5 us
    assert last["share"] == "67 %"  # of 4500
    assert last["x read"] == "1.50"  # 358.5 / 239
    assert last["best public"] == "FlashInfer cluster"
    assert last["x best"] == "0.54"  # 358.5 / 663.9
    assert last["x goal"] == "1.30"  # 358.5 / 276.7
    assert last["x CUB"] == "0.25"  # 358.5 / 1423.3
    first = dict(zip(header, cells[0], strict=True))
    assert first["x best"] == "1.04"  # 13.7 / 13.2
    assert first["x lax"] == "0.10"  # 13.7 / 130.9


def test_goals_are_judged_by_every_cell(tmp_path):
    text = report.goals(report.load(stored(tmp_path)))
    assert named(text, "decode, each cell")[1:] == [
        "1.04 at 1 x 131072, k = 2048; 1 of 3 miss it",
        "NO",
    ]
    # The third root of 13.7 / 13.2 * 28.4 / 49.1 * 358.5 / 663.9.
    assert named(text, "decode, geometric mean of 3 cells")[1:] == ["0.687", "NO"]
    assert named(text, "prefill, geometric mean")[1:] == ["1.633", "NO"]  # 63.2 / 38.7
    assert named(text, "time over a read")[1:] == [
        "1.50 at 256 x 1048576, k = 2048; 1 of 1 miss it",
        "NO",
    ]
    assert named(text, "bfloat16 over float32")[1:] == [
        "1.00 at 1 x 131072, k = 2048",
        "yes",
    ]
    assert named(text, "sorted=True")[1].startswith("4.00 us at 1 x 131072")


def test_a_later_line_about_a_cell_counts(tmp_path):
    again = kernel(2048, 64, 131072, "f32", "index", 24.55, 10.0)
    text = report.decode(report.load(stored(tmp_path, again)))
    assert "| 0.50 |" in " ".join(text.split())  # 24.55 / 49.1


def test_a_wrong_answer_has_no_time(tmp_path, capsys):
    wrong = kernel(2048, 8, 131072, "f32", "index", 0.0, 3.0, right=False)
    results = report.load(stored(tmp_path, wrong))
    assert report.Cell(2048, 8, 131072) not in results.planned
    assert "WRONG" in capsys.readouterr().err


def test_implementations_are_compared_with_the_planned_one(tmp_path):
    other = kernel(
        *TIMES[0][:5], 12.5, 2.5, implementation="row", planned=False, ctas_per_row=1
    )
    text = report.planner(report.load(stored(tmp_path, other)))
    (cell,) = rows_of(text)[2:-1]
    assert cell[-5:] == ["split", "13.7", "split 13.7, row 12.5", "row", "1.10"]


def test_generated_parts_of_a_page_are_replaced(tmp_path):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "before\n<!-- benchmark: machine plots -->\nold\n<!-- end of benchmark -->\n"
        "after\n"
    )
    results = stored(tmp_path)
    for _ in range(2):  # the second time changes nothing
        report.main([str(results), "--into", str(page)])
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n")
        assert "old" not in text
        assert text.count("NVIDIA H200, 132 SMs") == 1
        assert "(../results-times.svg)" in text


def test_a_page_without_a_part_to_replace_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="has no line"):
        report.main([str(stored(tmp_path)), "--into", str(page)])
    assert page.read_text() == "nothing\n"


def test_everything_is_printed(tmp_path, capsys):
    report.main([str(stored(tmp_path))])
    printed = capsys.readouterr().out
    for name in ("machine", "goals", "shapes", "decode", "prefill", "variants"):
        assert f"\n{name}\n" in printed
    assert "\nragged\n" not in printed  # not measured

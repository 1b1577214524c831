# SPDX-License-Identifier: Apache-2.0
"""Small problems that reach every path of the kernels, for compute-sanitizer.

    python tests/sanitize.py            answers a few small problems, as it is
    python tests/sanitize.py --tools    itself under each tool, a table at the end

Under a tool only our kernels are looked at. Expected of initcheck: a CTA swaps the
arrival word of a row for one with its tag, whatever it holds, and the last of the row
may read slots before it knows how many are filled. Both are of the workspace. A page
table is a constant of the program here, which the driver loads where initcheck does not
see it, so for initcheck there are no pages.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SECONDS = 150  # of each tool, all running at once
# Words of those reports of initcheck that are meant: 8-byte reads of the split kernel,
# of arrival words and slots. All else that it reads is smaller, or was copied there.
MEANT = ("size 8", "SplitTopK")


def answer(pages):
    """A few small problems; every answer is checked."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import inputs
    import jax
    import jax.numpy as jnp
    import numpy as np
    from implementations import Implementation, why_no_clusters

    n, k, rows = 700, 40, 6
    names = ["normal", "all_equal", "plateau", "two_plateaus", "winners_last"]
    names.append("random_bits")
    lengths = np.array([n, n, n, 300, k + 1, 7], np.int32)
    starts = np.array([0, 3, 0, 100, 5, 690], np.int32)
    done = 0
    for name, geometry, paged in (
        ("row", (0, 1, 16, 0, 2), False),
        ("row", (0, 0, 0, 0, 1), True),
        ("split", (4, 1, 16, 0, 0), False),
        ("split", (3, 256, 0, 0, 0), True),
        ("cluster", (4, 1, 16, 0, 0), False),
        ("cluster", (2, 256, 64, 0, 0), True),
        ("cluster", (4, 1, 0, 0, 0), False),  # held: no number of samples
        ("cluster", (2, 1, 0, 0, 0), True),
    ):
        if name == "cluster" and why_no_clusters():
            continue
        paged = paged and pages
        for dtype in (np.float32, jnp.bfloat16):
            for sorted in (True, False):
                bent = Implementation(name, "cuda", geometry, paged)
                labels, scores = inputs.batch(n, k, dtype, names)
                assert len(scores) == rows
                window = (lengths, starts) if sorted else (None, None)
                bent.check(scores, k, *window, sorted, labels=labels)
                done += 1
                print(f"{done}: {bent}, {np.dtype(dtype).name}, right", flush=True)
    # Rows of more tiles than are on their way at a time.
    for name, geometry, n in (
        ("row", (0, 0, 0, 0, 1), 40_003),
        ("row", (0, 1, 256, 0, 2), 40_003),
        ("split", (2, 0, 0, 0, 0), 70_003),
        ("cluster", (2, 0, 256, 0, 0), 70_003),
    ):
        if name == "cluster" and why_no_clusters():
            continue
        bent = Implementation(name, "cuda", geometry)
        for dtype in (np.float32, jnp.bfloat16):
            labels, scores = inputs.batch(n, k, dtype, ["normal", "random_bits"])
            starts = np.array([0, 5], np.int32)
            bent.check(scores, k, None, starts, labels=labels)
            done += 1
            print(f"{done}: {bent}, {np.dtype(dtype).name}, right", flush=True)
    # More rows than CTAs run at a time (of one an SM, on up to 160 SMs).
    bent = Implementation("row", "cuda", (0, 0, 0, 0, 1))
    scores = inputs.generator("rows").standard_normal((170, 8_300)).astype(np.float32)
    bent.check(scores, k, np.arange(8_300 - 170, 8_300, dtype=np.int32))
    done += 1
    print(f"{done}: {bent}, {len(scores)} rows, right", flush=True)
    jax.clear_caches()
    print("all right", flush=True)


def only_ours(sanitizer):
    """The option that leaves XLA's kernels alone; its name has changed over time."""
    done = subprocess.run([sanitizer, "--help"], capture_output=True, text=True)
    for name in ("--kernel-name", "--kernel-regex", "--filter"):
        if re.search(rf"{name}\b(?!-)", done.stdout + done.stderr):
            return [
                name,
                "kns=TopK" if name == "--kernel-regex" else "kernel_substring=TopK",
            ]
    return []


def under(tool, sanitizer):
    """(verdict, seconds, what was found) of this program under a tool."""
    verdict, seconds, found = attempt(tool, sanitizer, only_ours(sanitizer))
    if verdict == "BROKEN" and seconds < 20:  # another spelling, perhaps
        verdict, seconds, found = attempt(tool, sanitizer, [])
    return verdict, seconds, found


def attempt(tool, sanitizer, options):
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--print-limit",  # every report is judged
        "1000000",
        "--show-backtrace",
        "no",
    ]
    command += ["--target-processes", "application-only"]
    command += options
    if tool == "memcheck":
        command += ["--leak-check", "no"]
    command += [sys.executable, str(pathlib.Path(__file__).resolve())]
    if tool == "initcheck":
        command += ["--no-pages"]
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    # No graphs, so that each kernel is seen on its own.
    flags = environment.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    environment["XLA_FLAGS"] = flags.strip()
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        output = (
            output.decode(errors="replace") if isinstance(output, bytes) else output
        )
        code = None
    seconds = time.monotonic() - begin
    cases = len(re.findall(r"^\d+: .*, right$", output, re.M))
    summary = re.findall(r"=* *(?:ERROR|RACECHECK) SUMMARY: .*", output)
    found = re.sub(r"^=* *", "", summary[-1]) if summary else "no summary"
    reports = re.split(
        r"(?m)^========= (?=Uninitialized|Invalid|Error|Barrier)", output
    )
    if code is None:
        return "slow", seconds, f"no end after {SECONDS} s; {cases} cases; {found}"
    if "all right" not in output:
        return "BROKEN", seconds, output.strip()[-300:].replace("\n", " | ")
    errors = int((re.search(r"(\d+) (?:error|hazard)", found) or [0, "0"])[1])
    if tool == "initcheck" and errors:
        strange = [one for one in reports[1:] if not all(word in one for word in MEANT)]
        if reports[1:] and not strange:
            return "clean", seconds, f"{cases} cases; {found}, all of them meant"
    if errors == 0 and code == 0:
        return "clean", seconds, f"{cases} cases; {found}"
    detail = " | ".join(" ".join(one.split())[:300] for one in reports[1:3])
    return "FOUND", seconds, f"{cases} cases; {found}; {detail}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tools", nargs="*", choices=TOOLS, metavar="TOOL")
    parser.add_argument("--no-pages", action="store_true", help="for initcheck")
    given = parser.parse_args()
    if given.tools is None:
        return answer(not given.no_pages)
    places = os.environ.get("PATH", "").split(os.pathsep)
    places += ["/usr/local/cuda/bin", os.environ.get("CUDA_HOME", "") + "/bin"]
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if sanitizer is None:
        sys.exit("make sanitize needs compute-sanitizer, of the CUDA toolkit, on PATH")
    verdicts = set()
    tools = given.tools or TOOLS
    with concurrent.futures.ThreadPoolExecutor(len(tools)) as pool:  # all at once
        running = {pool.submit(under, tool, sanitizer): tool for tool in tools}
        for done in concurrent.futures.as_completed(running):
            verdict, seconds, found = done.result()
            verdicts.add(verdict)
            tool = running[done]
            print(f"{tool:10} {verdict:7} {seconds:4.0f} s  {found}", flush=True)
    sys.exit(0 if verdicts <= {"clean"} else 1)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of transforms with each minor version of jax that is supported.

    python tests/versions.py [--passed FOLDER] [--jax VERSION] [argument of pytest] ...

Each version gets an environment of its own in build/, and the first Python of the
machine that there are packages for: one on PATH, or one that pyenv keeps. A version
without a Python is named, and is no failure. `--passed` is an environment in which
all tests have passed before: its version of jax is left out. `--jax`, also more than
once, names what to take in place of all: `--jax 0.10.0`.
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Of each jax the Pythons it has packages for, so that each gets another if it can.
PYTHONS = {
    "0.10": ("3.11", "3.12", "3.13"),
    "0.11": ("3.12", "3.13"),
    "0.12": ("3.13", "3.12"),
}
SUBJECTS = ["jit", "vmap", "ad", "control_flow", "sharding", "sharded_top_k"]
SUBJECTS += ["distributed", "export", "lowering", "errors", "install"]
SUBJECTS += ["paged_top_k", "accelerate_lax", "sparse_attention"]
TESTS = [f"tests/test_{subject}.py" for subject in SUBJECTS]
TESTS += ["tests/test_devices.py::test_programs_compile_for_gb10_a100_h200_and_b200"]
TESTS += ["jax_topk", "docs", "README.md"]


def output(*command):
    """What a command prints; "" if there is none such, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def python(version):
    """The path of a Python that can make an environment; "" if there is none."""
    # Whatever is on PATH may be pyenv's stand-in for one that is not selected.
    kept = pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for candidate in (f"python{version}", *map(str, sorted(kept))):
        found = output(candidate, "-c", "import ensurepip, sys; print(sys.executable)")
        if found:
            return found
    return ""


def versions(environment):
    """The versions of jax and of Python in an environment."""
    words = "import jax, platform as p; print(jax.__version__, p.python_version())"
    return output(str(environment / "bin" / "python"), "-c", words).split()


def tested(jax, executable, arguments):
    """Runs the tests, shows their output, and returns whether all passed, in words."""
    environment = pathlib.Path("build") / f"jax-{jax}"
    command = ["make", "test", f"PYTHON={executable}", f"VENV={environment}"]
    command += [f"JAX=jax=={jax}.*", f"ARGS={' '.join([*TESTS, *arguments])}"]
    # A make around this one would pass on its own variables.
    clean = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    print(f"\n--- jax {jax}, {executable}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=clean, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = collections.deque([""], maxlen=1)
    for line in process.stdout:
        print(line, end="", flush=True)
        if re.search(r"\d+ (passed|failed|error|skipped|deselected)", line):
            last.append(line.strip(" =\n"))
    passed = process.wait() == 0
    seconds = time.monotonic() - start
    found = " on Python ".join(versions(ROOT / environment)) or f"{jax}, not installed"
    counts = last.pop() if passed else f"FAILED {last.pop()}"
    return passed, f"jax {found}: {counts.rstrip()}, {seconds:.0f} s with installing"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--passed", type=pathlib.Path)
    parser.add_argument("--jax", action="append")
    options, arguments = parser.parse_known_args()
    before = versions(ROOT / options.passed) if options.passed else []

    passed, lines = True, []
    for jax in options.jax or PYTHONS:
        pythons = PYTHONS[".".join(jax.split(".")[:2])]
        if before and before[0].startswith(f"{jax}."):
            line = f"jax {' on Python '.join(before)}: passed before, all tests"
        elif executable := next(filter(None, map(python, pythons)), ""):
            one, line = tested(jax, executable, arguments)
            passed &= one
        else:
            line = f"jax {jax}: NOT RUN, no Python {' or '.join(pythons)} here"
        lines.append(line)
    print("\nThe tests of transforms, by version of jax:", *lines, sep="\n  ")
    sys.exit(not passed)


if __name__ == "__main__":
    main()

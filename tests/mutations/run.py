# SPDX-License-Identifier: Apache-2.0
"""Applies each mutation to a copy of the sources and sees which tests turn red.

    python tests/mutations/run.py --gpu            those that need a GPU
    python tests/mutations/run.py --cpu            those that need none
    python tests/mutations/run.py --only NAME ...
    python tests/mutations/run.py --gpu --part 1/2   the first, third, ... of them
    python tests/mutations/run.py --list [FILE ...]
                                   the table of docs/testing.md, with what was seen

The package has to be installed with what it takes to compile it (nanobind, cmake, and a
CUDA compiler for --gpu): `make mutations` does. A build of the whole package is made
once; a mutation recompiles the files that include what it changes, of the kernels those
that its tests name. A mutation counts as red when a named test fails, crashes or hangs,
and not when something does not compile.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import table

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPIED = ("ffi", "jax_topk", "tests", "CMakeLists.txt", "pyproject.toml", "LICENSE")
NO_FINDER = """\
# The copies beside this file win over an installed package, editable or not. Whatever
# else is called sitecustomize has its say too.
import importlib.util
import pathlib
import sys
from importlib.machinery import PathFinder


sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not type(finder).__module__.startswith("_editable_")
]
here = pathlib.Path(__file__).parent
others = [path for path in sys.path if pathlib.Path(path) != here]
spec = PathFinder.find_spec("sitecustomize", others)
if spec is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def call(command, timeout, **options):
    """The exit code and the output of a command; None if it ran out of time."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return None, output


def copy_sources(to, root=ROOT):
    to.mkdir(parents=True)
    ignore = shutil.ignore_patterns("*.so", "__pycache__", ".hypothesis")
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=ignore)
        elif source.exists():
            shutil.copy2(source, to / name)


def apply(mutation, tree):
    """Edits the copy; raises ValueError if a snippet is not there exactly once."""
    for file, old, new in mutation.edits:
        path = tree / file
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{file} holds {text.count(old)} times, not once: {old!r}")
        path.write_text(text.replace(old, new))


KERNEL = {
    "row_top_k.cu": "row",
    "split_top_k.cu": "split",
    "cluster_top_k.cu": "cluster",
    "held_top_k.cu": "cluster",
}


def kernels_of(tests):
    """The kernels that tests are for, by their ids; None: any of them."""
    found = [re.search(r"\[(row|split|cluster)\b", test) for test in tests]
    return {match[1] for match in found} if all(found) else None


def includes(tree, source):
    """The files below ffi/ that a source file is made of."""
    found, new = set(), [source]
    while new:
        name = new.pop()
        if name not in found and (tree / "ffi" / name).exists():
            found.add(name)
            text = (tree / "ffi" / name).read_text()
            new += re.findall(r'#include "([^"/]+)"', text)
    return found


class Build:
    """The one build of the sources as they are, and what it takes to redo a part."""

    def __init__(self, folder, with_cuda, architecture, jobs):
        self.tree, self.build = folder / "base", folder / "build"
        copy_sources(self.tree)
        code, where = call([sys.executable, "-m", "nanobind", "--cmake_dir"], 60)
        if code != 0:
            sys.exit(f"the mutations need nanobind:\n{where}")
        environment = dict(os.environ)
        scripts = str(pathlib.Path(sys.executable).parent)
        environment["PATH"] = scripts + os.pathsep + environment.get("PATH", "")
        cmake = shutil.which("cmake", path=environment["PATH"])
        ninja = shutil.which("ninja", path=environment["PATH"])
        if cmake is None:
            sys.exit("the mutations need cmake")
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
            "Python_EXECUTABLE": sys.executable,
            "nanobind_DIR": where.strip(),
            "SKBUILD_PROJECT_VERSION_FULL": "0.1.0",
            "JAX_TOPK_CUDA": "ON" if with_cuda else "OFF",
        }
        if sys.version_info >= (3, 12):
            options["SKBUILD_SABI_COMPONENT"] = "Development.SABIModule"
        if with_cuda:
            options["CMAKE_CUDA_ARCHITECTURES"] = architecture
        command = [cmake, "-S", str(self.tree), "-B", str(self.build)]
        command += ["-G", "Ninja"] if ninja else []
        command += [f"-D{key}={value}" for key, value in options.items()]
        for step in (command, [cmake, "--build", str(self.build), f"-j{jobs}"]):
            code, output = call(step, 900, env=environment)
            if code != 0:
                sys.exit(f"the sources do not compile as they are:\n{output[-4000:]}")
        (self.library,) = self.build.glob("_ffi*.so")
        shutil.copy2(self.library, self.tree / "jax_topk" / self.library.name)
        commands = json.loads((self.build / "compile_commands.json").read_text())
        self.commands = [one for one in commands if "/ffi/" in one["file"]]
        cache = (self.build / "CMakeCache.txt").read_text()
        name = "CMAKE_CUDA_COMPILER" if with_cuda else "CMAKE_CXX_COMPILER"
        self.linker = re.search(rf"^{name}:\w+=(.*)$", cache, re.M)[1]
        self.with_cuda = with_cuda

    def redo(self, tree, kernels=None):
        """Compiles what has changed in `tree` and links; the output if that fails.

        What only kernels include is compiled for `kernels` alone, if they are given:
        the others stay as they are, and take a minute or so.
        """
        changed = {
            path.name
            for path in (self.tree / "ffi").iterdir()
            if path.read_bytes() != (tree / "ffi" / path.name).read_bytes()
        }
        if not changed:
            shutil.copy2(self.library, tree / "jax_topk" / self.library.name)
            return None
        device_code = all(name.endswith((".cu", ".cuh")) for name in changed)
        objects, running = [], []
        for one in self.commands:
            words = shlex.split(one["command"])
            output = words[words.index("-o") + 1]
            source = pathlib.Path(one["file"]).name
            kept = device_code and kernels and KERNEL.get(source) not in kernels
            if kept or not changed & includes(tree, source):
                objects.append(output)
                continue
            words[words.index("-o") + 1] = str(tree / f"{source}.o")
            words = [w.replace(str(self.tree), str(tree)) for w in words]
            objects.append(str(tree / f"{source}.o"))
            running.append(words)
        with concurrent.futures.ThreadPoolExecutor(max(len(running), 1)) as pool:
            done = list(pool.map(lambda w: call(w, 600, cwd=self.build), running))
        for code, output in done:
            if code != 0:
                return output
        hide = ["-Wl,--exclude-libs,ALL"]
        if self.with_cuda:
            hide = ["-cudart", "static", "-Xlinker", "--exclude-libs,ALL"]
            library = pathlib.Path(self.linker).resolve().parents[1] / "lib"
            hide += [f"-L{library}"] if library.is_dir() else []
        link = [self.linker, "-shared", *hide]
        link += ["-o", str(tree / "jax_topk" / self.library.name), *objects]
        link += [str(path) for path in self.build.glob("libnanobind*.a")]
        code, output = call(link, 300, cwd=self.build)
        return None if code == 0 else output


def run_tests(tree, site, tests, timeout, options, where):
    """(verdict, the test that failed first, its message)."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(tree)])
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environment["COLUMNS"] = "400"
    if where == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    else:
        environment["JAX_TOPK_REQUIRE_GPU"] = "1"
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", *options]
    command += ["-p", "no:cacheprovider", *[f"tests/{test}" for test in tests]]
    code, output = call(command, timeout, cwd=tree, env=environment)
    (tree / "output.txt").write_text(output)
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.*?)(?: - (.*))?$", output, re.M)
    passed = len(re.findall(r"^tests/\S+::.* PASSED", output, re.M))
    running = re.findall(r"^tests/(\S+::\S+)", output, re.M)
    if code == 0:
        return ("green" if passed else "skipped"), "", f"{passed} tests passed"
    if "JAX_TOPK_REQUIRE_GPU=1, but" in output:
        return "error", "", "no GPU"
    if failed and "::" in failed[1]:
        return "red", failed[1], (failed[2] or "")
    if running:  # the process is gone: the last test that began is the one
        last = [line for line in output.splitlines() if line.strip()][-1]
        how = "hung" if code is None or "Timeout" in output else f"crashed ({code})"
        return "red", running[-1], f"{how}: {last}"
    return "error", "", output.strip()[-300:].replace("\n", " | ")


class Table:
    def __init__(self, path):
        self.rows, self.path, self.lock = [], path, threading.Lock()
        self.start = time.monotonic()

    def say(self, text):
        with self.lock:
            print(f"[{time.monotonic() - self.start:5.0f} s] {text}", flush=True)

    def add(self, **row):
        with self.lock:
            self.rows.append(row)
            if self.path:
                self.path.write_text(json.dumps(self.rows, indent=1))
        good = "" if row["good"] else "   <-- not as expected"
        self.say(
            f"{row['verdict']:9}{row['name']}  {row['seconds']:.0f} s  {row['test']}"
            f"  {row['message'][:160]}{good}"
        )


def listing(files):
    """The mutations as rows of a table, with the results of earlier runs."""
    seen = {}
    for file in files:
        seen |= {row["name"]: row for row in json.loads(file.read_text())}
    lines = ["| mutation | needs | test | seen |", "| --- | --- | --- | --- |"]
    for one in table.MUTATIONS:
        row = seen.get(one.name, {})
        test = row.get("test") or one.tests[0]
        test = test.removeprefix("test_").replace(".py::test_", ": ").replace("_", " ")
        verdict = row.get("verdict", "not run yet")
        # What was not as expected does not pass for it.
        if row and not row["good"]:
            verdict += f", not {one.expect}"
        if row and (row["verdict"], one.expect) == ("green", "green"):
            files = sorted({test.split(".")[0] for test in one.tests})
            test = "those of " + ", ".join(file[5:].replace("_", " ") for file in files)
        why = f"; {one.why}" if one.why else ""
        lines.append(f"| `{one.name}` | {one.where} | {test} | {verdict}{why} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="those that need no GPU")
    parser.add_argument("--gpu", action="store_true", help="those that need one GPU")
    parser.add_argument("--two-gpus", action="store_true", help="those that need two")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--part", default="1/1", help="1/3 is every third of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="builds")
    parser.add_argument("--test-jobs", type=int, default=3, help="tests at a time")
    parser.add_argument("--timeout", type=int, default=90, help="of the tests of one")
    parser.add_argument("--architecture", default="", help="CUDA's, 90 for instance")
    parser.add_argument("--out", type=pathlib.Path, help="the table as JSON")
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder")
    parser.add_argument("--list", nargs="*", type=pathlib.Path, metavar="FILE")
    given = parser.parse_args()
    if given.list is not None:
        print(listing(given.list))
        return

    wanted = {"cpu"} if given.cpu else set()
    wanted |= {"gpu"} if given.gpu else set()
    wanted |= {"2 gpus"} if given.two_gpus else set()
    if not wanted and not given.only:
        parser.error("--cpu, --gpu, --two-gpus or --only NAME")
    names = {mutation.name for mutation in table.MUTATIONS}
    if set(given.only) - names:
        parser.error(f"no mutation is named {sorted(set(given.only) - names)}")
    chosen = [
        mutation
        for mutation in table.MUTATIONS
        if (mutation.where in wanted or not wanted)
        and (not given.only or mutation.name in given.only)
    ]
    part, parts = map(int, given.part.split("/"))
    chosen = chosen[part - 1 :: parts]
    with_cuda = any(mutation.where != "cpu" for mutation in chosen)
    if with_cuda and not given.architecture:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        _, answer = call(query, 60)
        given.architecture = answer.split()[0].replace(".", "")

    folder = pathlib.Path(tempfile.mkdtemp(prefix="mutations-"))
    out = Table(given.out)
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_FINDER)
    build = Build(folder, with_cuda, given.architecture, given.jobs)
    out.say(f"{len(chosen)} mutations; the sources as they are compile")

    environment = dict(os.environ, PYTHONPATH=f"{site}{os.pathsep}{build.tree}")
    program = "import jax_topk._ffi as ffi; print(ffi.__file__)"
    _, path = call([sys.executable, "-c", program], 120, env=environment, cwd=folder)
    if not path.strip().startswith(str(build.tree)):
        sys.exit(f"the copy is not what is imported, but {path}")

    testers = concurrent.futures.ThreadPoolExecutor(given.test_jobs)

    def judge(mutation, tree, built):
        start = time.monotonic()
        options = [] if mutation.expect == "green" else ["-x"]
        limit = min(mutation.timeout or given.timeout, given.timeout)
        verdict, test, message = run_tests(
            tree, site, mutation.tests, limit, options, mutation.where
        )
        good = verdict == mutation.expect or (
            mutation.expect == "either" and verdict in ("red", "green")
        )
        seconds = time.monotonic() - start
        record(mutation, verdict, test, message, seconds, built, good)

    def record(mutation, verdict, test, message, seconds, built, good):
        out.add(
            name=mutation.name,
            expect=mutation.expect,
            verdict=verdict,
            test=test,
            message=message,
            seconds=seconds,
            build_seconds=built,
            good=good,
        )

    def mutate(mutation):
        start = time.monotonic()
        tree = folder / mutation.name
        try:
            copy_sources(tree, build.tree)
            apply(mutation, tree)
            trouble = build.redo(tree, kernels_of(mutation.tests))
        except Exception as error:
            trouble = repr(error)
        built = time.monotonic() - start
        if trouble is not None:
            record(mutation, "no build", "", trouble[-300:], 0, built, False)
            return None
        return testers.submit(judge, mutation, tree, built)

    def baseline():
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        start = time.monotonic()
        where = "gpu" if with_cuda else "cpu"
        limit = max(given.timeout * 4, 400)
        verdict, test, message = run_tests(build.tree, site, tests, limit, [], where)
        nothing = table.Mutation("nothing", (), (), expect="green")
        seconds = time.monotonic() - start
        record(nothing, verdict, test, message, seconds, 0, verdict == "green")

    builders = max(given.jobs // 2, 1)
    with concurrent.futures.ThreadPoolExecutor(builders) as pool:
        first = None if given.no_baseline else testers.submit(baseline)
        judged = [one for one in pool.map(mutate, chosen) if one is not None]
    for one in judged + ([first] if first else []):
        one.result()
    testers.shutdown()

    rows = sorted(out.rows, key=lambda row: row["name"])
    width = max(len(row["name"]) for row in rows)
    print()
    for row in rows:
        good = " " if row["good"] else "!"
        line = (
            f"{good} {row['verdict']:8} {row['name']:{width}} {row['seconds']:4.0f} s"
        )
        print(f"{line}  {row['test']}  {row['message'][:110]}")
    bad = [row["name"] for row in rows if not row["good"]]
    print(f"\n{len(rows) - len(bad)} of {len(rows)} as expected")
    if given.keep:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(f"not as expected: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Random problems against the oracle: `python tests/fuzz.py --rows 100000`.

A seed decides everything about a case: shape, dtype, k, windows, order, distributions,
implementation, geometry. Shapes come from a small list, so that few programs are
compiled and many rows go through each. A case that fails prints the command that
repeats it.
"""

import argparse
import dataclasses
import sys
import time

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import inputs
import ml_dtypes
import numpy as np
from implementations import PLANNED, Implementation, why_no_clusters, why_no_gpu

DTYPES = [np.float32, np.float32, ml_dtypes.bfloat16, np.float16]
INT32 = np.iinfo(np.int32)
# Rows, columns, k. Of each, some are odd, some are prime, one k is above n.
SHAPES = {
    "cpu": [
        (24, 1, 1),
        (60, 37, 5),
        (40, 300, 64),
        (24, 2051, 705),
        (12, 20011, 512),
        (40, 90, 100),
    ],
    "cuda": [
        (4096, 37, 5),
        (2048, 300, 64),
        (1024, 1021, 100),
        (512, 2051, 705),
        (64, 20011, 512),
        (40, 20011, 4096),
        (300, 8191, 512),
        (12, 100003, 1000),
        (3, 400009, 2048),
        (512, 90, 100),
    ],
}
GEOMETRIES = {
    "row": [
        PLANNED,
        (0, 1, 1, 0, 2),
        (0, 600, 64, 0, 1),
        (0, 1, 4096, 0, 0),
        (0, 0, 0, 1, 0),  # through registers
    ],
    "split": [
        PLANNED,
        (2, 1, 0, 0, 0),
        (2, 0, 0, 0, 0),
        (5, 1, 16, 0, 0),
        (8, 1024, 256, 0, 0),
        (64, 1, 33, 0, 0),
    ],
    "cluster": [
        PLANNED,
        (2, 1, 16, 0, 0),
        (2, 0, 2048, 0, 0),
        (4, 0, 2048, 0, 0),
        (8, 1024, 256, 0, 0),
        (16, 1, 4, 0, 0),
        # Held: no number of samples.
        (2, 1, 0, 0, 0),
        (4, 0, 0, 0, 0),
        (8, 1, 0, 0, 0),
        (16, 1, 0, 0, 0),
    ],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and who is to solve it."""

    implementation: Implementation
    scores: np.ndarray
    k: int
    lengths: np.ndarray | None
    starts: np.ndarray | None
    sorted: bool
    labels: list[str]

    def __str__(self):
        windows = [n for n in ("lengths", "starts") if getattr(self, n) is not None]
        shape = "x".join(map(str, self.scores.shape))
        order = "sorted" if self.sorted else "unsorted"
        words = [str(self.implementation), self.scores.dtype.name, shape]
        return " ".join([*words, f"k={self.k}", order, *windows])

    def check(self):
        self.implementation.check(
            self.scores,
            self.k,
            self.lengths,
            self.starts,
            self.sorted,
            labels=self.labels,
        )


def _ends(rng, rows, n, k):
    """Lengths or starts: inside, at an edge, or far outside."""
    edges = [INT32.min, INT32.max, -1, 0, 1, k - 1, k, k + 1, n - 1, n, n + 1, n + 17]
    inside = rng.integers(0, n + 1, rows)
    ends = np.where(rng.random(rows) < 0.3, rng.choice(edges, rows), inside)
    return ends.astype(np.int32)


def case(seed, platform):
    """The case of a seed."""
    rng = np.random.default_rng(seed)
    shapes = SHAPES[platform]
    rows, n, k = shapes[rng.integers(len(shapes))]
    dtype = DTYPES[rng.integers(len(DTYPES))]
    names = ["cpu", "cpu", "xla"]
    if platform == "cuda":
        names = [one for one in GEOMETRIES if one != "cluster" or not why_no_clusters()]
    name = names[rng.integers(len(names))]
    geometry = PLANNED
    if platform == "cuda":
        geometry = GEOMETRIES[name][rng.integers(len(GEOMETRIES[name]))]
    ragged = k > n or rng.random() < 0.6
    lengths = _ends(rng, rows, n, k) if ragged else None
    starts = _ends(rng, rows, n, k) if ragged and rng.random() < 0.5 else None
    # Whole distributions side by side, and rows put together from two of them.
    chosen = rng.choice(list(inputs.DISTRIBUTIONS), 6)
    rolled = np.concatenate(
        [
            inputs.DISTRIBUTIONS[one](rng, -(-rows // len(chosen)), n, k, dtype)
            for one in chosen
        ]
    )[:rows]
    labels = np.repeat(chosen, -(-rows // len(chosen)))[:rows].tolist()
    if rng.random() < 0.5 and n > 1:
        cut = rng.integers(1, n)
        rolled[:, cut:] = np.roll(rolled, rows // 2, axis=0)[:, cut:]
    sorted = bool(rng.random() < 0.5)
    paged = bool(rng.random() < 0.3)
    return Case(
        Implementation(name, platform, geometry, paged),
        rolled,
        k,
        lengths,
        starts,
        sorted,
        labels,
    )


def run(platform, first, rows, seconds, say=None):
    """Cases from a seed on until so many rows or seconds: (cases, rows)."""
    begin, cases, done = time.monotonic(), 0, 0
    while done < rows and time.monotonic() - begin < seconds:
        seed = first + cases
        one = case(seed, platform)
        try:
            one.check()
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {one}: {error}\n"
                f"repeat with: python tests/fuzz.py --platform {platform} "
                f"--seed {seed} --rows 1"
            ) from error
        cases += 1
        done += len(one.scores)
        if say and cases % 20 == 0:
            say(f"{platform}: {cases} cases, {done} rows, last {one}")
    return cases, done


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--platform", choices=["cpu", "cuda"], help="both if there are")
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--rows", type=int, default=0, help="1e5 on CUDA, 1e4 on CPU")
    parser.add_argument("--seconds", type=float, default=600, help="at most, for each")
    given = parser.parse_args()
    platforms = [given.platform] if given.platform else ["cpu"]
    if not given.platform and not why_no_gpu():
        platforms = ["cuda", "cpu"]
    for platform in platforms:
        rows = given.rows or {"cpu": 10_000, "cuda": 100_000}[platform]
        begin = time.monotonic()
        try:
            cases, done = run(
                platform,
                given.seed,
                rows,
                given.seconds,
                lambda text: print(text, flush=True),
            )
        except AssertionError as error:
            sys.exit(f"WRONG: {error}")
        took = time.monotonic() - begin
        print(
            f"{platform}: {cases} cases and {done} rows, all right, from seed "
            f"{given.seed}, {took:.0f} s on {jax.devices(platform)[0].device_kind}",
            flush=True,
        )


if __name__ == "__main__":
    main()

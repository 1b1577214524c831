# SPDX-License-Identifier: Apache-2.0
"""A plan given by hand bends the CUDA kernels' paths, never an answer.

Small lists, few samples, few CTAs and many CTAs a row take small inputs through the
paths that else only rare inputs reach: overflow, exact passes over the scores, rows
shared by more CTAs than they have columns.
"""

import functools

import inputs
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from devices import plan
from implementations import Implementation, parameters

N, K = 5003, 300
# CTAs a row, capacity, samples, registers, CTAs an SM. (Rows as short as these are read
# through registers anyway: test_stream.py.)
GEOMETRIES = [
    ("row", (0, 1, 0, 0, 0)),
    ("row", (0, 1, 1, 0, 0)),
    ("row", (0, 512, 64, 0, 2)),
    ("row", (0, 700, 16384, 0, 1)),
    ("row", (0, 0, 0, 0, 1)),
    ("split", (2, 2048, 0, 0, 0)),
    ("split", (3, 1, 0, 0, 0)),
    ("split", (4, 1, 1, 0, 0)),
    ("split", (7, 1024, 64, 0, 0)),
    ("split", (16, 700, 16384, 0, 0)),
    ("split", (64, 1, 33, 0, 0)),
    ("cluster", (2, 0, 0, 0, 0)),  # all rows are the leader's
    ("cluster", (4, 1, 16, 0, 0)),
    ("cluster", (8, 256, 64, 0, 0)),
    ("cluster", (16, 1, 4, 0, 0)),
    ("cluster", (8, 700, 16384, 0, 0)),
    ("cluster", (1, 1, 1, 0, 0)),
    ("cluster", (4, 0, 2048, 0, 0)),
    # Held by the registers of a cluster, for which no number of samples asks.
    ("cluster", (2, 1, 0, 0, 0)),
    ("cluster", (4, 1, 0, 0, 0)),
    ("cluster", (16, 1, 0, 0, 0)),
    ("cluster", (8, 1, 0, 0, 0)),
]
BENT = [
    pytest.param(
        Implementation(name, "cuda", geometry),
        id=str(Implementation(name, "cuda", geometry)),
        marks=Implementation(name, "cuda").mark,
    )
    for name, geometry in GEOMETRIES
]


@pytest.mark.parametrize(("name", "geometry"), GEOMETRIES)
def test_the_planner_keeps_to_a_geometry_given_by_hand(name, geometry):
    made = plan("H200", 50, N, K, implementation=name, geometry=geometry)
    ctas, capacity, samples, _, _ = geometry
    assert made.ctas_per_row == max(ctas, 1)
    least = 2 * K if name == "cluster" else 512
    assert made.capacity == max(capacity, least) if capacity else made.capacity > N
    assert made.num_samples <= max(samples, 8) or not samples
    assert made.grid == 50 * made.ctas_per_row
    assert made.held == (name == "cluster" and ctas > 1 and samples == 0)


@functools.cache
def ragged_batches(dtype):
    """Batches of one shape: full rows, ragged ones, and long next to short."""
    labels, scores = inputs.batch(N, K, dtype)
    rng = inputs.generator("geometry")
    rows = len(labels)
    none = np.zeros(rows, np.int32)
    short = np.resize([0, 1, K - 1, K, K + 1, -1, 7], rows)
    alternating = np.where(np.arange(rows) % 2, short, N).astype(np.int32)
    # From rows that stay with one CTA to rows for which all are wanted.
    shared = np.resize([N, 17, 601, 650, 0, 1033, N - 1, 299, 3000, 700, 2], rows)
    ragged = rng.integers(0, N, rows).astype(np.int32)
    windows = [
        (np.full(rows, N, np.int32), none),
        (ragged, rng.integers(0, N // 2, rows).astype(np.int32)),
        (alternating, none),
        (np.roll(alternating, 1), none + 5),
        (shared.astype(np.int32), np.resize([0, 1, 6, 0, 3], rows).astype(np.int32)),
    ]
    expected = [
        [oracle.top_k(scores, K, *window, sorted=s) for window in windows]
        for s in (False, True)
    ]
    return labels, scores, windows, expected


def check_all(implementation, dtype, sorted):
    labels, scores, windows, expected = ragged_batches(dtype)
    for window, want in zip(windows, expected[sorted], strict=True):
        implementation.check(scores, K, *window, sorted, labels=labels, expected=want)


@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("bent", BENT)
def test_every_distribution_is_exact_under_a_bent_geometry(bent, sorted):
    check_all(bent, np.float32, sorted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize("bent", BENT[1::2])
def test_every_16_bit_distribution_is_exact_under_a_bent_geometry(bent, dtype):
    check_all(bent, dtype, False)


LARGEST = [
    Implementation("row", "cuda", (0, 1, 1, 0, 0)),
    Implementation("row", "cuda", (0, 0, 0, 0, 2)),
    Implementation("split", "cuda", (5, 1, 1, 0, 0)),
    Implementation("cluster", "cuda", (4, 1, 1, 0, 0)),
    Implementation("cluster", "cuda", (16, 0, 2048, 0, 0)),
    Implementation("cluster", "cuda", (16, 0, 0, 0, 0)),  # held
    Implementation("cluster", "cuda", (2, 1, 0, 0, 0)),
]


@pytest.mark.parametrize("bent", parameters(LARGEST))
@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
def test_the_largest_native_k_under_a_bent_geometry(bent, sorted):
    n, k = 20_011, 4096
    labels, scores = inputs.batch(n, k, np.float32)
    bent.check(scores, k, sorted=sorted, labels=labels)


@pytest.mark.parametrize("bent", BENT)
def test_tiny_rows_under_a_bent_geometry(bent):
    rng = inputs.generator("tiny")
    scores = rng.integers(-3, 3, (40, 19)).astype(np.float32)
    lengths = rng.integers(-1, 22, 40).astype(np.int32)
    bent.check(scores, 6, lengths)

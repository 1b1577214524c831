# SPDX-License-Identifier: Apache-2.0
"""Chunks of many tiles, through shared memory and through registers.

A tile is 32 KiB of a chunk in shared memory, 64 bytes of it a thread, or 8192 columns
in registers. Here each CTA reads more tiles than are on their way at a time, in every
kernel and either way; what `test_geometry.py` and `test_select.py` bend is short, and
read through registers.
"""

import functools
import itertools

import inputs
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from devices import plan
from implementations import Implementation, parameters
from test_windows import poison_outside

# In chunks of two CTAs four tiles of 16-bit scores begin, and seven of float32. A row
# begins at every place within a vector, and the last does not end with one.
N, K = 100_003, 300
TILE = 8192  # columns of a tile of float32; of 16-bit scores there are twice as many
# CTAs a row, capacity, samples, registers, CTAs an SM; and the tiles on their way.
ROW = [
    ((0, 0, 0, 0, 1), 3),
    ((0, 12000, 0, 0, 1), 2),
    ((0, 0, 0, 0, 2), 2),
    ((0, 0, 0, 1, 1), 0),
    ((0, 0, 0, 1, 2), 0),
]
SHARED = [  # by the CTAs of `split` and `cluster`
    ((2, 0, 0, 0, 0), 3),
    ((2, 12000, 0, 0, 0), 2),
    ((2, 0, 0, 1, 0), 0),
]
GEOMETRIES = [
    *(("row", *one) for one in ROW),
    *((name, *one) for name in ("split", "cluster") for one in SHARED),
]
# The shortest lists that there are.
SAMPLES = 1024
SHORT = [
    ("row", (0, 1, SAMPLES, 0, 1), 3),
    ("row", (0, 1, SAMPLES, 0, 2), 2),
    ("row", (0, 1, SAMPLES, 1, 1), 0),
    ("split", (2, 1, SAMPLES, 0, 0), 3),
    ("split", (2, 1, SAMPLES, 1, 0), 0),
    ("cluster", (2, 1, SAMPLES, 0, 0), 3),
    ("cluster", (2, 1, SAMPLES, 1, 0), 0),
]


def _bent(geometries):
    return pytest.mark.parametrize(
        "bent",
        parameters(Implementation(name, "cuda", one) for name, one, _ in geometries),
    )


EACH = _bent(GEOMETRIES)
EACH_SHORT = _bent(SHORT)
DTYPES = pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16, np.float16], ids=["f32", "bf16", "f16"]
)


def check(bent, scores, *window, labels=None, expected=None):
    """In both orders if float32, which the kernels of 16-bit scores share."""
    known = {"labels": labels}
    for sorted in (False, True) if scores.dtype == np.float32 else (False,):
        if expected is not None:
            known["expected"] = expected[sorted]
        bent.check(scores, K, *window, sorted=sorted, **known)


@pytest.mark.parametrize(("name", "geometry", "stages"), [*GEOMETRIES, *SHORT])
def test_the_rows_of_these_tests_are_read_as_they_should(name, geometry, stages):
    for dtype in ("float32", "bfloat16", "float16"):
        for n in (N, N - 3):
            made = plan("H200", 60, n, K, dtype, implementation=name, geometry=geometry)
            assert made.stages == stages and not made.held
            columns = (1 if dtype == "float32" else 2) * TILE
            assert -(-n // made.ctas_per_row) > 3 * columns
            if geometry[1] == 1:
                assert made.capacity == (600 if name == "cluster" else 512)
            if geometry[2]:
                assert made.num_samples == SAMPLES


@functools.lru_cache(maxsize=2)
def distributions(dtype):
    labels, scores = inputs.batch(N, K, dtype)
    return labels, scores, [oracle.top_k(scores, K, sorted=s) for s in (False, True)]


@DTYPES
@EACH
def test_every_distribution_is_exact_in_rows_of_many_tiles(bent, dtype):
    labels, scores, expected = distributions(dtype)
    check(bent, scores, labels=labels, expected=expected)


@functools.lru_cache(maxsize=2)
def rows_of_special_values(dtype):
    """Rows of few values, in shares of every size: each may be the threshold."""
    rng = inputs.generator("special values", np.dtype(dtype).name)
    facts = ml_dtypes.finfo(dtype)
    values = [0, np.inf, np.nan, facts.max, 1, facts.smallest_normal]
    values = np.array([*values, facts.smallest_subnormal], dtype)
    least = inputs.least_nans(1, dtype)
    values = np.concatenate([values, -values, least, -least])
    rows = []
    for row in range(48):
        few = rng.permutation(len(values))[: 2 + row % 5]
        shares = rng.dirichlet(np.full(len(few), 0.3))
        rows.append(values[rng.choice(few, N, p=shares)])
    # Fewer than k above the threshold, by as little as there is.
    with np.errstate(all="ignore"):
        low = np.array([np.inf, facts.max, facts.smallest_subnormal, 0.0], dtype)
        ladder = np.concatenate([least, -np.array([np.nan], dtype), -low])
        ladder = np.concatenate([ladder, low[::-1], np.array([np.nan], dtype), -least])
    for below, above in itertools.pairwise(ladder):
        scores = np.full(N, below)
        scores[rng.permutation(N)[: K // 2]] = above
        rows.append(scores)
    # Ordinary scores below infinities that are more than k, with a few NaNs above.
    for share in (0.005, 0.02, 0.3, 0.9, 0.999):
        for top in (np.inf, np.nan, -np.inf):
            scores = rng.standard_normal(N).astype(dtype)
            scores[rng.random(N) < share] = top
            scores[rng.permutation(N)[:9]] = [np.nan] * 3 + [-np.nan] * 3 + [np.inf] * 3
            rows.append(scores)
    return np.stack(rows)


@DTYPES
@EACH
def test_any_special_value_may_be_the_threshold(bent, dtype):
    check(bent, rows_of_special_values(dtype))


# What passes lies side by side, or at one place of each lane or tile.
WINNERS = {
    "first": np.arange(K),
    "last": N - 1 - np.arange(K),
    "last of all alone": np.array([N - 1]),
    "few at the end": N - 1 - np.arange(5),
    "first of every tile": np.arange(0, N, TILE),
    "last of every tile": np.arange(TILE - 1, N, TILE),
    "both sides of every tile's end": (
        np.arange(TILE, N, TILE)[:, None] + np.arange(-12, 12)
    ).ravel(),
    "one lane": 5 * TILE + 16 * 77 + np.arange(64),
    "lanes of every warp": (
        np.arange(0, 150, 5)[:, None] * 512 + np.arange(32)
    ).ravel(),
    "second CTA": N // 2 + 7000 + np.arange(0, 4 * K, 4),
}
for _place in range(0, 32, 3):
    WINNERS[f"place {_place} of lanes"] = 160 * np.arange(600) + _place


@DTYPES
@EACH
def test_what_passes_may_lie_at_any_place_of_a_tile(bent, dtype):
    rng = inputs.generator("places")
    labels = [*WINNERS, "last"]  # of the last row too, beyond which there is nothing
    scores = -1 - rng.random((len(labels), N))
    for row, label in enumerate(labels):
        columns = WINNERS[label]
        scores[row, columns] = rng.integers(1, 90, len(columns))
    assert len(labels) * N % 4 != 0
    scores = scores.astype(dtype)
    check(bent, scores, labels=labels)
    check(bent, -1 - np.abs(scores[::-1]), labels=labels[::-1])  # all are negative


@DTYPES
@EACH
def test_windows_begin_and_end_within_tiles(bent, dtype):
    rng = inputs.generator("windows of tiles")
    ends = np.array([0, 1, 7, 8, 9, 16, 33, TILE - 1, TILE, TILE + 5, 2 * TILE, 40_001])
    starts = np.resize(ends, 29).astype(np.int32)
    stops = N - np.resize(ends[::-1][:11], 29)
    lengths = (stops - starts).astype(np.int32)
    lengths[3::7] = 3 * TILE + rng.integers(-9, 9, len(lengths[3::7]))
    labels, scores = inputs.batch(N, K, dtype, list(inputs.DISTRIBUTIONS)[::2][:29])
    scores[:, 1::3] = rng.standard_normal((29, len(range(1, N, 3)))).astype(dtype)
    lengths, starts = lengths[: len(scores)], starts[: len(scores)]
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        scores[row, start] = 50
        scores[row, start + length - 1] = 40
    scores = poison_outside(scores, lengths, starts)
    check(bent, scores, lengths, starts, labels=labels)


@DTYPES
@EACH_SHORT
def test_a_list_is_full_in_the_first_tile_or_in_any_other(bent, dtype):
    """The sample sees equal scores only, which most others are above or below."""
    n = N - 3  # a sample of rows of whole vectors is known
    rng = inputs.generator("full lists")
    sampled = inputs.columns_that_cuda_samples(n, SAMPLES).astype(np.int64)
    cases = [(first, n) for first in (0, 30_000, n // 2 + 20_000, n - 800)]
    for capacity in (512, 600):
        for count in (capacity - 1, capacity, capacity + 1):
            cases += [(first, first + count) for first in (37, 33_000, n - 2 * count)]
    scores = np.full((len(cases), n), -200.0)
    for row, (first, stop) in enumerate(cases):
        scores[row, sampled] = -100
        passing = np.arange(first, stop)
        if stop == n:
            passing = np.setdiff1d(passing, sampled)
        scores[row, passing] = rng.standard_normal(len(passing))
    labels = [f"[{first}, {stop})" for first, stop in cases]
    check(bent, scores.astype(dtype), labels=labels)


@DTYPES
@EACH_SHORT
def test_a_sample_of_ties_that_are_nowhere_else(bent, dtype):
    """Fewer than k or a few more: what equals the threshold is no survivor."""
    n = N - 3
    rng = inputs.generator("ties of the sample")
    sampled = inputs.columns_that_cuda_samples(n, SAMPLES).astype(np.int64)
    sampled = np.unique(sampled)
    scores = -1 - rng.random((27, n))
    for row in range(27):
        # The threshold, the zeros of which have neighbours that equal them as floats.
        tie, below = ((7.5, 7.25), (0.0, -0.0), (-0.0, -0.5))[row % 3]
        scores[row, rng.permutation(n)[:2000]] = below
        few = (40, 150, 160, 200, 299, 300, 301, 305, 500)[row // 3]
        scores[row, sampled] = -2.5
        scores[row, rng.permutation(sampled)[:few]] = tie
    check(bent, scores.astype(dtype))


ROWS_OF_ONE_CTA = _bent([("row", *one) for one in ROW])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@ROWS_OF_ONE_CTA
def test_more_rows_than_run_at_a_time_are_exact(bent, dtype):
    """The CTA of a row fetches the sample of one far behind it, if there is one."""
    rows, n = 700, 2 * TILE + 11
    rng = inputs.generator("rows behind others", np.dtype(dtype).name)
    scores = rng.standard_normal((rows, n)).astype(dtype)
    starts = rng.integers(-5, n, rows).astype(np.int32)
    lengths = rng.integers(-5, n, rows).astype(np.int32)
    lengths[::3] = n
    starts[::2] = 0
    check(bent, scores)
    check(bent, scores, lengths, starts)

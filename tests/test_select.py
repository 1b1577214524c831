# SPDX-License-Identifier: Apache-2.0
"""Rows aimed at the steps of the CUDA select, one after the other.

What the named distributions meet only by luck: NaNs that no sample shows, every number
of equal scores, places without a column that equal a score, and ties from several CTAs.
"""

import inputs
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import Implementation, parameters

N, K = 5003, 300
# CTAs a row, capacity, samples, registers, CTAs an SM. In order: rows in registers, a
# list that most samples are right for, one that overflows; the same for shared rows.
# The last hold them.
GEOMETRIES = [
    ("row", (0, 0, 0, 0, 1)),
    ("row", (0, 700, 16384, 0, 1)),
    ("row", (0, 1, 1, 0, 0)),
    ("split", (2, 2048, 0, 0, 0)),
    ("split", (3, 1, 0, 0, 0)),
    ("cluster", (4, 2048, 2048, 0, 0)),
    ("cluster", (2, 2048, 2048, 0, 0)),
    ("cluster", (2, 1, 1, 0, 0)),
    ("cluster", (4, 1, 64, 0, 0)),
    ("cluster", (4, 1, 0, 0, 0)),
    ("cluster", (16, 1, 0, 0, 0)),
]
EACH = pytest.mark.parametrize(
    "bent",
    parameters(Implementation(name, "cuda", geometry) for name, geometry in GEOMETRIES),
)
DTYPES = pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"]
)


def check_both_orders(bent, scores, *window, k=K):
    for sorted in (False, True):
        bent.check(scores, k, *window, sorted=sorted)


@DTYPES
@EACH
def test_a_few_nans_and_infinities_that_a_sample_hardly_shows(bent, dtype):
    rng = inputs.generator("few nans")
    scores = rng.standard_normal((40, N)).astype(dtype)
    for row in range(40):
        columns = rng.permutation(N)[:4]
        scores[row, columns[: 1 + row % 3]] = [np.nan, -np.nan, np.inf][row % 3]
        scores[row, columns[3]] = [-np.inf, np.nan][row % 2]
    check_both_orders(bent, scores)


@EACH
def test_any_number_of_different_scores(bent):
    rng = inputs.generator("levels")
    levels = np.array([*range(1, 40), *range(40, 400, 8)])[:, None]
    scores = rng.integers(0, levels, (len(levels), N)).astype(np.float32) - 9
    check_both_orders(bent, scores)
    lengths = rng.integers(0, N, len(levels)).astype(np.int32)
    starts = rng.integers(0, 900, len(levels)).astype(np.int32)
    lengths[::3] = N
    lengths[1::5] = rng.integers(0, 2 * K, len(lengths[1::5]))
    check_both_orders(bent, scores, lengths, starts)


@EACH
def test_a_last_selected_of_zero_among_few_of_about_its_size(bent):
    """A place without an entry holds a zero as well."""
    rng = inputs.generator("zero last")
    scores = rng.standard_normal((40, N)).astype(np.float32)
    scores -= np.sort(scores, axis=1)[:, N - K, None]  # keeps their order
    scores[1::2] -= np.float32(1e-5)  # just below zero
    check_both_orders(bent, scores)


@EACH
def test_about_as_many_in_the_bin_as_are_compared(bent):
    rng = inputs.generator("many in a bin")
    rows = []
    for inside in (1, 31, 32, 33, 34, 63, 100, 255, 256, 257, 300):
        for rank in sorted({1, inside // 2 + 1, inside}):
            for equal in (False, True):
                below = -3 + 3.5 * rng.random(N)
                above = 1.5 + 2 * rng.random(K - rank)
                steps = rng.permutation(inside) * (not equal)
                crowd = 1 + steps * np.finfo(np.float32).eps
                scores = below.astype(np.float32)
                columns = rng.permutation(N)
                scores[columns[:inside]] = crowd
                scores[columns[N - len(above) :]] = above
                rows.append(scores)
    check_both_orders(bent, np.stack(rows))


@DTYPES
@EACH
def test_the_least_score_of_all_is_a_score(bent, dtype):
    """Its bits are those of a place that has no column."""
    rng = inputs.generator("least")
    bits = np.uint32 if dtype == np.float32 else np.uint16
    least = np.array(np.iinfo(bits).max, bits).view(dtype)
    starts = 2 * np.arange(64, dtype=np.int32)  # every alignment, since N is odd
    for scores in (
        rng.standard_normal((64, N)).astype(dtype),
        np.zeros((64, N), dtype),
    ):
        scores[:] = np.where(rng.random((64, N)) < 0.98, least, scores)
        check_both_orders(bent, scores, None, starts)
    # Few of them, and so long a k that some are among the selected: also where a warp
    # has hardly a place without a column.
    scores = rng.standard_normal((64, N)).astype(dtype)
    for length in (509, 1021, 2045):
        k, few = length - 2, length - 5 + np.arange(4)
        for row in range(64):
            start = starts[row]
            scores[row] = rng.standard_normal(N).astype(dtype)
            scores[row, start + rng.permutation(length)[: 3 + row % 5]] = least
            scores[row, start + few[row % 4]] = 50
        lengths = np.full(64, length, np.int32)
        lengths[1::2] -= np.arange(32) % 5
        check_both_orders(bent, scores, lengths, starts, k=k)


@EACH
def test_ties_that_several_ctas_contribute(bent):
    """A dense plateau that begins late, thin before, below 0 to 300 other winners."""
    rng = inputs.generator("ties of several")
    counts = np.arange(0, K + 8, 7)
    thin = np.select(
        [np.arange(N) < N // 2, np.arange(N) < 3 * N // 4], [0.05, 0.6], 1.0
    )
    plateau = rng.random((len(counts), N)) < thin
    scores = np.where(plateau, 0.0, -5.0 - rng.random(plateau.shape))
    for row, count in enumerate(counts):
        scores[row, rng.permutation(N)[:count]] = 1 + rng.random(count)
    check_both_orders(bent, scores.astype(np.float32))


@EACH
def test_all_winners_in_one_chunk(bent):
    """Nothing of the other chunks is wanted, although it passes the filter."""
    rng = inputs.generator("one chunk")
    scores = rng.standard_normal((20, N))
    for row in range(20):
        first = row * (N - 2 * K) // 19
        scores[row, first : first + K + row - 10] += 20
    check_both_orders(bent, scores.astype(np.float32))


# A tile is what fits in the registers of a CTA: whole vectors, so that a row that is
# not aligned may need one more than it fills. The list has to be as long.
TILE = 8192
TILES = pytest.mark.parametrize(
    "bent",
    parameters(
        Implementation(name, "cuda", (ctas, 9000, samples, 0, 0))
        for name, ctas, samples in (
            ("row", 0, 0),
            ("split", 4, 0),
            ("cluster", 4, 0),  # held
            ("cluster", 4, 2048),
        )
    ),
)


def with_winners_at_both_ends(rng, rows, n, dtype, starts, stops):
    scores = rng.standard_normal((rows, n)).astype(dtype)
    for row in range(rows):
        scores[row, starts[row] : starts[row] + 9] = 50
        scores[row, stops[row] - 9 : stops[row]] = 40
    return scores


@DTYPES
@TILES
@pytest.mark.parametrize("over", [-8, -7, -3, -1, 0, 1, 8])
def test_rows_about_as_long_as_a_tile(bent, over, dtype):
    rng = inputs.generator("tile", over)
    n = TILE + over
    scores = with_winners_at_both_ends(rng, 9, n, dtype, [0] * 9, [n] * 9)
    check_both_orders(bent, scores)


@DTYPES
@TILES
def test_windows_about_as_long_as_a_tile(bent, dtype):
    rng = inputs.generator("tile of a window")
    rows, n = 128, TILE + 301
    starts = 2 * np.arange(rows, dtype=np.int32)  # every alignment, since n is odd
    lengths = (TILE - 9 + np.arange(rows) // 8).astype(np.int32)
    stops = starts + lengths
    scores = with_winners_at_both_ends(rng, rows, n, dtype, starts, stops)
    for row in range(rows):  # better scores on either side
        scores[row, max(starts[row] - 3, 0) : starts[row]] = 60
        scores[row, stops[row] : stops[row] + 3] = 60
    check_both_orders(bent, scores, lengths, starts)

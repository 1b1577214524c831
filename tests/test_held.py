# SPDX-License-Identifier: Apache-2.0
"""Rows that the registers of a cluster hold: each CTA selects its part of the answer.

A geometry without a number of samples asks for it. A capacity of 1 means the least that
there is, 2 k or 64 slots, so that few rows are short enough to be the leader's alone.
"""

import functools

import inputs
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from devices import plan
from implementations import Implementation, as_float32, parameters
from test_windows import poison_outside

THREADS = 512
MOST = 32  # columns of a thread
N, K = 5003, 300
# CTAs, columns, k: all the kernels, which have 8, 16 or 32 columns for each thread.
CASES = [
    (2, 8003, 300),
    (16, 50_003, 1),
    (4, 27_001, 2048),
    (8, 60_005, 700),
    (2, 30_011, 4096),
    (16, 200_003, 2048),
]
EACH_CASE = pytest.mark.parametrize(
    ("bent", "n", "k"),
    [
        pytest.param(bent, n, k, id=f"{bent}-{n}-{k}", marks=bent.mark)
        for bent, n, k in (
            (Implementation("cluster", "cuda", (ctas, 1, 0, 0, 0)), n, k)
            for ctas, n, k in CASES
        )
    ],
)
EACH_SIZE = pytest.mark.parametrize(
    "bent",
    parameters(
        Implementation("cluster", "cuda", (ctas, 1, 0, 0, 0)) for ctas in (2, 4, 8, 16)
    ),
)
DTYPES = [np.float32, jnp.bfloat16, np.float16]
NAMES = [
    *("normal", "plateau", "random_bits", "two_plateaus", "outlier_max", "all_equal"),
    *("few_of_each_special_value", "nan_83_percent", "negative_nans", "signed_zeros"),
    *("kth_in_a_crowd_of_neighbours", "least_of_all", "winners_in_one_region"),
    *("every_magnitude", "sorted_up", "mostly_minus_inf"),
]


def check_both_orders(bent, scores, *window, k=K, labels=None):
    for sorted in (False, True):
        bent.check(scores, k, *window, sorted=sorted, labels=labels)


def chunk_of(n, ctas):
    """Columns of a chunk."""
    share = -(-n // ctas)
    return -(-share // 16) * 16


def test_the_rows_of_these_tests_are_held_and_reach_every_kernel():
    columns = set()
    for ctas, n, k in [*CASES, *((ctas, N, K) for ctas in (2, 4, 8, 16))]:
        geometry = (ctas, 1, 0, 0, 0)
        made = plan("H200", 60, n, k, implementation="cluster", geometry=geometry)
        assert made.held and made.ctas_per_row == ctas
        assert made.capacity == max(2 * k, 64) < n
        width = chunk_of(n, ctas) + 7  # rows are not aligned
        columns.add(next(c for c in (8, 16, 32) if width <= c * THREADS))
    assert columns == {8, 16, 32}


@functools.lru_cache(maxsize=2)
def distributions(n, k, dtype):
    names = NAMES if n > 100_000 else None
    labels, scores = inputs.batch(n, k, dtype, names)
    return labels, scores, [oracle.top_k(scores, k, sorted=s) for s in (False, True)]


@EACH_CASE
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_distribution_is_exact_in_rows_that_are_held(bent, n, k, dtype):
    labels, scores, expected = distributions(n, k, dtype)
    for sorted in (False, True) if dtype == np.float32 else (False,):
        bent.check(scores, k, sorted=sorted, labels=labels, expected=expected[sorted])


@EACH_CASE
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: np.dtype(d).name)
def test_windows_of_such_rows_begin_and_end_anywhere(bent, n, k, dtype):
    """Some are the leader's alone, some so short that not all CTAs have a column."""
    alone = max(2 * k, 64)
    rng = inputs.generator("held windows", n)
    labels, scores = inputs.batch(n, k, dtype, NAMES * 3)
    count = len(labels)
    starts = np.arange(count, dtype=np.int32)  # every alignment
    starts[-8:] = rng.integers(0, n // 2, 8)
    lengths = [n, *(alone + np.array([1, 2, 3, 16, 17, 100, 0])), 5, k, k + 1, 0]
    lengths = np.resize([*lengths, n // 2, n // 3, n - 60, n - 33, 8193, 8192], count)
    window = lengths.astype(np.int32), starts
    scores = poison_outside(scores, *window)
    check_both_orders(bent, scores, *window, k=k, labels=labels)


# Of clusters of two: where a thread has one column more, and where registers do not do.
LIMITS = [
    *(8191, 8192, 8193, 16_368, 16_384, 16_385),
    *(32_736, 32_737, 32_751, 32_752, 32_767, 32_768, 32_769),
]


@pytest.mark.gpu(clusters=True)
@pytest.mark.parametrize("n", LIMITS)
def test_rows_just_short_enough_and_just_too_long_to_be_held(n):
    bent = Implementation("cluster", "cuda", (2, 1, 0, 0, 0))
    k, rows = 100, 9
    made = plan("H200", rows, n, k, implementation="cluster", geometry=bent.geometry)
    assert made.held == (n <= 2 * MOST * THREADS)
    rng = inputs.generator("limits", n)
    for dtype, sorted in ((np.float32, True), (jnp.bfloat16, False)):
        scores = rng.standard_normal((rows, n)).astype(dtype)
        middle = chunk_of(n, 2)
        for first in (0, middle - 5, middle, n - 5):  # the ends of both chunks
            scores[:, first : first + 5] = 9 + rng.random((rows, 5)).astype(dtype)
        bent.check(scores, k, sorted=sorted)
        starts = np.arange(rows, dtype=np.int32)
        lengths = np.resize([n, n - 9, n - 8], rows).astype(np.int32)
        scores = poison_outside(scores, lengths, starts)
        bent.check(scores, k, lengths, starts, sorted=sorted)
        bent.check(scores, k, None, starts, sorted=sorted)


@pytest.mark.gpu(clusters=True)
@pytest.mark.parametrize("k", [1, 300, 4096])
@pytest.mark.parametrize("ctas", [2, 16])
def test_rows_barely_longer_than_one_cta_keeps(ctas, k):
    bent = Implementation("cluster", "cuda", (ctas, 0, 0, 0, 0))
    n = 8200
    rng = inputs.generator("barely", k)
    scores = rng.standard_normal((24, n)).astype(np.float32)
    scores[::3] = np.maximum(scores[::3] - 1, 0)
    lengths = (8184 + np.arange(24)).astype(np.int32)
    starts = (np.arange(24) // 3).astype(np.int32)
    scores = poison_outside(scores, lengths, starts)
    check_both_orders(bent, scores, lengths, starts, k=k)
    check_both_orders(bent, scores, k=k)


@pytest.mark.gpu(clusters=True)
@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
def test_rows_that_are_held_are_answered_in_slots_too(sorted):
    rng = inputs.generator("held pages")
    for ctas in (2, 8):
        bent = Implementation("cluster", "cuda", (ctas, 1, 0, 0, 0), paged=True)
        labels, scores = inputs.batch(N, K, np.float32, NAMES)
        bent.check(scores, K, sorted=sorted, labels=labels)
        lengths = rng.integers(0, N, len(labels)).astype(np.int32)
        starts = rng.integers(0, 999, len(labels)).astype(np.int32)
        bent.check(scores, K, lengths, starts, sorted=sorted, labels=labels)


# Words that crowd in a bin ------------------------------------------------------------


def kinds_of_ties(rng, shape):
    """(a tie, scores above it, scores below it), for each kind there is."""
    above = 1 + rng.random(shape, np.float32)
    below = -5 - rng.random(shape, np.float32)
    ordinary = rng.standard_normal(shape, np.float32)
    nans = as_float32(rng.integers(0x7F800001, 0x80000000, shape, np.uint32))
    negative = as_float32(rng.integers(0xFF800001, 0xFFFFFFFF, shape, np.uint32))
    return [
        (np.float32(0), above, below),
        (np.float32(-0.0), np.where(above < 1.5, 0, above), below),
        (as_float32(0x3F800001), above + 1, np.where(below < -5.5, 1, below)),
        (np.float32(np.inf), nans, ordinary),
        (np.float32(-np.inf), ordinary, negative),
        (as_float32(0xFFC00000), ordinary, as_float32(0xFFFFFFFF)),
        (as_float32(0x7FC00000), as_float32(0x7FE00000), ordinary),
    ]


@EACH_SIZE
def test_ties_of_several_ctas_of_which_only_some_are_selected(bent):
    """The last of them is the last of a CTA, the first of the next, or in between."""
    ctas = bent.geometry[0]
    chunk = chunk_of(N, ctas)
    owner = np.arange(N) // chunk
    rng = inputs.generator("quota", ctas)
    rows, labels = [], []
    for layout in range(3):
        most = K // ctas
        counts = rng.integers(1, 2 * most, ctas) if layout else np.full(ctas, most)
        counts[rng.permutation(ctas)[: layout * ctas // 4]] = 0
        assert counts.sum() > 64  # crowded
        order = rng.permutation(N)
        columns = [order[owner[order] == i][: counts[i]] for i in range(ctas)]
        ties = np.concatenate(columns)
        others = np.setdiff1d(np.arange(N), ties)
        ends = np.cumsum(counts)
        quotas = {q for end in ends for q in (end - 1, end, end + 1)}
        quotas |= {end - count // 2 for end, count in zip(ends, counts, strict=True)}
        quotas = [q for q in quotas if 0 < q <= min(K, ends[-1])]
        for i, quota in enumerate(quotas):
            kinds = kinds_of_ties(rng, N)
            tie, above, below = kinds[(i + layout) % len(kinds)]
            row = np.resize(below, N).astype(np.float32)
            row[ties] = tie
            winners = rng.permutation(others)[: K - quota]
            row[winners] = np.resize(above, N)[winners]
            rows.append(row)
            labels.append(f"layout {layout}, {quota} of {ends[-1]} ties")
    check_both_orders(bent, np.stack(rows), labels=labels)


def few_in_a_bin(rng, ctas, inside, rank, equal, together):
    """A row whose k-th largest is the rank-th of `inside` words of about 1."""
    row = rng.uniform(-1, 0.9, N).astype(np.float32)
    columns = rng.permutation(N)
    if together:  # of one CTA
        chunk = chunk_of(N, ctas)
        mine = columns // chunk == rng.integers(ctas)
        columns = np.concatenate([columns[mine], columns[~mine]])
    steps = np.zeros(inside) if equal else rng.permutation(inside) // 2
    row[columns[:inside]] = 1 + steps * 2.0**-23
    row[columns[inside : inside + K - rank]] = 2 + rng.random(K - rank)
    return row


@EACH_SIZE
def test_about_as_many_in_the_bin_as_are_compared(bent):
    rng = inputs.generator("few in a bin")
    rows = [
        few_in_a_bin(rng, bent.geometry[0], inside, rank, equal, together)
        for inside in (1, 2, 31, 63, 64, 65, 66, 100, 128)
        for rank in sorted({1, (inside + 1) // 2, inside})
        for equal in (False, True)
        for together in (False, True)
    ]
    check_both_orders(bent, np.stack(rows))


@EACH_SIZE
def test_several_rounds_by_key(bent):
    """The k-th largest is among words of which each round sees one bin."""
    rng = inputs.generator("rounds")
    rows = []
    for tiers in (
        (5, 5, 4993),
        (100, 100, 4803),
        (100, 195, 4708),
        (299, 0, 4704),
        (0, 299, 4704),
        (200, 2000, 2803),
    ):
        for base in (0x20000000, 0xA0000000, 0x00000000, 0x80000000):
            distance = np.concatenate(
                [
                    rng.integers(1 << 20, 1 << 29, tiers[0]),
                    rng.integers(1 << 9, 1 << 19, tiers[1]),
                    rng.integers(0, 200, N - tiers[0] - tiers[1]),
                ]
            )
            rows.append(as_float32(base + rng.permutation(distance)))
    rows = np.stack(rows)
    check_both_orders(bent, np.concatenate([rows, -rows]))


@EACH_SIZE
def test_specials_of_both_signs_in_every_cta(bent):
    rng = inputs.generator("specials in every cta")
    values = as_float32(
        [
            *(0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001),
            *(0xFFC00000, 0xFFFFFFFF, 0xFFFFFFFE, 0, 0x80000000, 0x7F7FFFFF, 1),
            *(0xFF7FFFFF, 0x80000001),
        ]
    )
    rows = []
    for share in (0.01, 0.1, 0.5, 1.0):
        for kinds in (2, 4, 8, len(values)):
            for _ in range(3):
                some = rng.permutation(values)[:kinds]
                row = rng.standard_normal(N).astype(np.float32)
                rows.append(np.where(rng.random(N) < share, rng.choice(some, N), row))
    check_both_orders(bent, np.stack(rows))


# A guess that misleads ----------------------------------------------------------------


@EACH_SIZE
def test_a_guess_that_misleads_costs_time_and_nothing_else(bent):
    labels, scores = inputs.against_the_guess(N, K)
    check_both_orders(bent, scores, labels=labels)
    # The same in windows, in which the same places are looked at.
    n, rows = N + 20, len(scores)
    rng = inputs.generator("guess in windows")
    starts = (np.arange(rows) % 19).astype(np.int32)
    lengths = np.full(rows, N, np.int32)
    wide = rng.standard_normal((rows, n)).astype(np.float32)
    for row, start in enumerate(starts):
        wide[row, start : start + N] = scores[row]
    wide = poison_outside(wide, lengths, starts)
    check_both_orders(bent, wide, lengths, starts, labels=labels)


@EACH_CASE
def test_a_guess_that_misleads_in_every_kernel(bent, n, k):
    labels, scores = inputs.against_the_guess(n, k)
    bent.check(scores, k, sorted=False, labels=labels)

# SPDX-License-Identifier: Apache-2.0
"""Rows that the kernels keep in registers, and rows that are a little too long for it.

Up to 8192 columns fit; fewer where the row begins within a vector of 16 bytes, which an
odd width makes each row do at another place. `test_select.py` has bent geometries.
"""

import functools

import implementations
import inputs
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from implementations import Implementation
from test_windows import poison_outside

# A page table changes nothing here.
EVERY = [
    *implementations.ON_CPU,
    *implementations.ON_GPU,
    Implementation("row", "cuda", (0, 0, 0, 0, 2)),
]
DTYPES = [np.float32, jnp.bfloat16, np.float16]
NAMES = [
    *("normal", "outlier_max", "outlier_min", "neighbouring_floats", "ties_that_fit"),
    *("kth_in_a_crowd_of_neighbours", "all_equal", "signed_zeros", "two_plateaus"),
    *("k_plus_one_winners_on_a_plateau", "few_of_each_special_value", "denormals"),
    *("both_infinities", "both_largest", "least_of_all", "positive_denormals"),
    *("nan_everywhere", "random_bits", "last_column"),
]
SIZES = [
    *((1, 1), (2, 1), (40, 39), (511, 510), (4095, 4095), (4096, 4096), (4097, 4096)),
    *((8185, 2048), (8189, 1), (8190, 4096), (8191, 2048), (8192, 4096), (8192, 300)),
    *((8193, 2048), (8196, 4096), (8197, 4096), (8200, 2048)),
]


@pytest.fixture(params=implementations.parameters(EVERY))
def implementation(request):
    """Each implementation, and the kernel that shares its SM."""
    return request.param


@functools.lru_cache(maxsize=4)
def problem(n, k, dtype):
    labels, scores = inputs.batch(n, k, dtype, NAMES)
    return labels, scores, [oracle.top_k(scores, k, sorted=s) for s in (False, True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_rows_around_the_width_of_the_registers(implementation, n, k, dtype):
    labels, scores, expected = problem(n, k, dtype)
    for sorted in (False, True):
        implementation.check(
            scores, k, sorted=sorted, labels=labels, expected=expected[sorted]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("n", [8191, 8192, 8208])
def test_windows_that_begin_and_end_anywhere_in_such_a_row(implementation, n, dtype):
    k = 2048
    rng = inputs.generator("windows of short rows", n)
    labels, scores = inputs.batch(n, k, dtype, NAMES * 2)
    starts = np.arange(len(labels), dtype=np.int32)  # every alignment
    starts[len(NAMES) :] = rng.integers(0, n - k, len(NAMES))
    lengths = (n - starts - np.resize([0, 1, 2, 3, 5, 9, 16], len(starts))).astype(
        np.int32
    )
    lengths[::5] = k + np.arange(len(lengths[::5])) - 3
    scores = poison_outside(scores, lengths, starts)
    for sorted in (False, True):
        implementation.check(scores, k, lengths, starts, sorted, labels=labels)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("full", [512, 1024, 8192])
def test_the_least_nan_is_selected_where_columns_are_masked(
    implementation, full, dtype
):
    """A masked column has its bits, also one before the window: none of those counts.

    A warp has 512 columns. The windows fill whole warps, so that few are masked.
    """
    k, count = min(full - 9, 4096), 12
    rng = inputs.generator("least", full)
    starts = np.resize([*range(16), 0, 0], 54).astype(np.int32)
    lengths = (full - starts % 8 - np.resize([0, 0, 0, 1, 7], 54)).astype(np.int32)
    lengths = np.maximum(lengths, k)
    scores = rng.standard_normal((54, full + 24)).astype(dtype)
    for row, start in enumerate(starts):
        # Those of all columns but k - 3, so that three of them are selected.
        nans = lengths[row] - (k - 3) if row % 2 else count
        columns = start + rng.permutation(lengths[row])[:nans]
        scores[row, columns] = inputs.least_nans(nans, dtype)
    scores = poison_outside(scores, lengths, starts)
    for sorted in (False, True):
        implementation.check(scores, k, lengths, starts, sorted)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("full", [512, 4096])
def test_the_least_nan_is_selected_in_rows_that_fill_whole_warps(
    implementation, full, dtype
):
    """No place is without a column, but for the few outside of the window."""
    k = full - 15
    rng = inputs.generator("whole warps", full)
    starts = np.resize(np.arange(9), 40).astype(np.int32)
    lengths = (full - starts - np.resize([0, 1, 0, 0], 40)).astype(np.int32)
    scores = rng.standard_normal((40, full)).astype(dtype)
    for row, start in enumerate(starts):
        nans = lengths[row] - (k - 3)  # three of them are selected
        columns = start + rng.permutation(lengths[row])[:nans]
        scores[row, columns] = inputs.least_nans(nans, dtype)
    scores = poison_outside(scores, lengths, starts)
    for sorted in (False, True):
        implementation.check(scores, k, lengths, starts, sorted)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("n", [8185, 8190, 8191, 20_481, 20_483, 20_486])
def test_the_first_and_the_last_columns_of_all_rows(implementation, n, dtype):
    """The last row ends within a vector, and nothing behind it may be read."""
    k = 20
    for rows in (1, 3):
        scores = -np.ones((rows, n), dtype)
        ends = [*range(9), *range(n - 9, n)]
        scores[:, ends] = np.arange(rows * 18).reshape(rows, 18) % 19
        implementation.check(scores, k, sorted=False)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_short_rows_between_those_that_are_shared(implementation, dtype):
    """Some CTAs of a row have nothing to read, or the row is of one of them only."""
    n, k = 131_072, 2048
    rng = inputs.generator("shared")
    scores = rng.standard_normal((4, n)).astype(dtype)
    scores[1] = np.maximum(scores[1], 0)
    for lengths, starts in (
        ([n, 8192, 40_000, 9000], [0, 0, 0, 0]),
        ([8193, n, 8192, 20_003], [0, 1, 1, 77]),
        ([5, 70_001, 0, 12_289], [9, 3, 0, 50_001]),
    ):
        window = np.array(lengths, np.int32), np.array(starts, np.int32)
        for sorted in (False, True):
            implementation.check(scores, k, *window, sorted)


@pytest.mark.parametrize(
    "bent",
    implementations.parameters(
        [
            Implementation("cluster", "cuda", (8, 0, 2048, 0, 0)),
            Implementation("cluster", "cuda", (8, 0, 0, 0, 0)),
            Implementation("cluster", "cuda", (4, 1, 16, 0, 0)),
            Implementation("split", "cuda", (8, 0, 0, 0, 0)),
            Implementation("row", "cuda", (0, 0, 0, 0, 2)),
        ]
    ),
)
@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
def test_rows_of_changing_lengths_one_after_the_other(bent, sorted):
    """A cluster or the CTAs of a row meet for one row, and not for the next."""
    n, k, rows = 20_011, 512, 120
    labels, scores = inputs.batch(n, k, np.float32, [*NAMES, "plateau", "late_plateau"])
    rng = inputs.generator("turns")
    which = rng.integers(0, len(labels), rows)
    lengths = rng.choice([n, n, 0, 8192, 8193, 8300, k, 100, 15_000, n - 1], rows)
    starts = rng.choice([0, 0, 1, 2, 3, 1000], rows)
    window = lengths.astype(np.int32), starts.astype(np.int32)
    labels = [labels[one] for one in which]
    bent.check(scores[which], k, *window, sorted, labels=labels)

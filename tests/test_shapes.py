# SPDX-License-Identifier: Apache-2.0
"""Widths, ks, row counts and leading axes at which indexing goes wrong."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from implementations import Implementation, parameters


def test_every_width_up_to_64_in_one_program(implementation):
    rng = inputs.generator("widths")
    widths = range(1, 65)
    scores = [rng.integers(-9, 9, (3, n)).astype(np.float32) for n in widths]

    def all_of_them(scores):
        return [
            implementation.jitted(n // 2 + 1, n % 2 == 0)(row, None, None)
            for n, row in zip(widths, scores, strict=True)
        ]

    operands = jax.device_put(scores, implementation.device)
    results = jax.device_get(jax.jit(all_of_them)(operands))
    for n, row, result in zip(widths, scores, results, strict=True):
        oracle.check(result, row, n // 2 + 1, sorted=n % 2 == 0)


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 1, 1),
        (5, 4097, 705),
        (3, 4096, 4096),  # the whole row, at the largest native k
        (2, 4097, 4096),
        (3, 8209, 2051),
        (1, 65_537, 3001),
        (3, 65_537, 4096),
        (7, 16_385, 1),
        (1, 131_071, 127),
    ],
)
@pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
def test_odd_and_prime_widths_and_ks(implementation, rows, n, k, dtype, sorted):
    rng = inputs.generator("odd", rows, n, k)
    scores = rng.standard_normal((rows, n)).astype(dtype)
    implementation.check(scores, k, sorted=sorted)


def test_a_k_beyond_the_native_kernels_is_answered_all_the_same(other_implementation):
    rng = inputs.generator("large k")
    scores = rng.integers(-500, 500, (2, 9001)).astype(np.float32)
    for sorted in (True, False):
        other_implementation.check(scores, 5000, sorted=sorted)


@pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"]
)
def test_k_above_the_width_is_padded_when_lengths_are_given(implementation, dtype):
    rng = inputs.generator("padded")
    scores = rng.standard_normal((4, 37)).astype(dtype)
    lengths = np.array([37, 36, 5, 99], np.int32)
    for sorted in (True, False):
        implementation.check(scores, 101, lengths, sorted=sorted)


def test_a_window_of_exactly_k_is_returned_whole(implementation):
    rng = inputs.generator("exactly k")
    scores = rng.integers(-9, 9, (6, 20_011)).astype(np.float32)
    lengths = np.array([705, 704, 706, 705, 705, 705], np.int32)
    starts = np.array([0, 1, 2, 3, 19_306, 10_000], np.int32)
    for sorted in (True, False):
        implementation.check(scores, 705, lengths, starts, sorted)


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 3, 2)], ids=str)
def test_any_number_of_leading_axes(implementation, leading):
    rng = inputs.generator("leading")
    scores = rng.standard_normal((*leading, 257)).astype(np.float32)
    implementation.check(scores, 33)
    lengths = rng.integers(0, 258, leading).astype(np.int32)
    implementation.check(scores, 33, lengths)


@pytest.mark.parametrize(
    ("shape", "k"),
    [((0, 9), 4), ((3, 0, 9), 4), ((3, 9), 0), ((3, 0), 0), ((0, 0), 0), ((0,), 0)],
    ids=str,
)
def test_empty_problems_have_empty_answers(other_implementation, shape, k):
    scores = np.zeros(shape, np.float32)
    other_implementation.check(scores, k)
    lengths = np.zeros(shape[:-1], np.int32)
    other_implementation.check(scores, k, lengths)


def test_rows_of_no_columns_are_all_padding(other_implementation):
    for dtype in (np.float32, jnp.bfloat16, np.int32):
        scores = np.zeros((3, 0), dtype)
        other_implementation.check(scores, 5, np.array([0, 4, -1], np.int32))


def test_more_rows_than_a_grid_axis_holds(implementation):
    rng = inputs.generator("many rows")
    scores = rng.integers(-50, 50, (70_001, 24)).astype(np.float32)
    implementation.check(scores, 5)
    lengths = rng.integers(-1, 26, 70_001).astype(np.int32)
    implementation.check(scores, 5, lengths, sorted=False)


def test_columns_beyond_the_24_bits_of_a_float(implementation):
    n, k = (1 << 24) + 4099, 1000
    rng = inputs.generator("wide")
    scores = rng.integers(-(1 << 20), 1 << 20, (1, n)).astype(np.float32)
    scores[0, -k // 2 :] = 1 << 21
    implementation.check(scores, k, sorted=False)


OTHER_DTYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.bool_]
OTHER_DTYPES += [jnp.float8_e5m2, jnp.float8_e4m3fn]


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=lambda d: np.dtype(d).name)
def test_scores_of_other_dtypes_take_the_reference(other_implementation, dtype):
    rng = inputs.generator("other dtypes")
    scores = inputs.from_bits(rng, (5, 300), np.uint8 if dtype == np.bool_ else dtype)
    scores = scores > 99 if dtype == np.bool_ else scores
    lengths = np.array([300, 299, 20, 0, -1], np.int32)
    other_implementation.check(scores, 40)
    other_implementation.check(scores, 40, lengths, sorted=False)
    other_implementation.check(scores, 310, lengths)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_64_bit_scores_take_the_reference(other_implementation, dtype):
    rng = inputs.generator("64 bits")
    scores = inputs.from_bits(rng, (5, 300), dtype)
    scores[:, ::3] = scores[:, :1]
    lengths = np.array([300, 299, 20, 0, -1], np.int32)
    with jax.enable_x64(True):
        other_implementation.check(scores, 40)
        other_implementation.check(scores, 40, lengths, sorted=False)


# More than 2**31 of anything. Without 12 GiB to spare the CPU is left out.

LARGE = [
    Implementation("cpu", "cpu"),
    Implementation("row", "cuda"),
    Implementation("split", "cuda"),
    Implementation("cluster", "cuda"),
]


@pytest.mark.parametrize("implementation", parameters(LARGE))
def test_more_than_2_to_31_scores(implementation):
    rows, n, k = 33_001, 65_537, 64
    implementation.skip_without_room(12)

    @jax.jit
    def scores_of(first):  # a hash of row and column, the same for any part
        row = first + jax.lax.broadcasted_iota(np.uint32, (rows, 1), 0)
        column = jax.lax.broadcasted_iota(np.uint32, (1, n), 1)
        mixed = (row * np.uint32(2654435761)) ^ (column * np.uint32(2246822519))
        mixed = (mixed ^ (mixed >> 15)) * np.uint32(3266489917)
        bits = ((mixed >> 17) & 0x3FFF).astype(np.uint16)  # positive and finite
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)

    with jax.default_device(implementation.device):
        scores = scores_of(np.uint32(0))
        result = implementation.jitted(k)(scores, None, None)
        for part in (slice(0, 3), slice(32_766, 32_770), slice(rows - 40, rows)):
            some = jax.device_get((scores[part], result.values[part]))
            indices = jax.device_get(result.indices[part])
            oracle.check((some[1], indices), some[0], k)
        scores.delete()


@pytest.mark.parametrize("implementation", parameters(LARGE))
def test_the_widest_row_there_is(implementation):
    n, k = 2**31 - 1, 64
    implementation.skip_without_room(12)
    # A few winners on zeros: the rest of the answer is the first columns.
    columns = np.array([5, 2**30, 2**30 + 1, 2**31 - 70, 2**31 - 3, n - 1])
    winners = np.array([1, 3, 2, 3, 7, 5], np.float32)
    order = np.lexsort((columns, -winners))
    zeros = [c for c in range(k) if c not in columns][: k - len(columns)]
    with jax.default_device(implementation.device):
        scores = jax.jit(
            lambda c, w: jnp.zeros((1, n), jnp.bfloat16).at[0, c].set(w, mode="drop")
        )(columns.astype(np.int32), winners.astype(jnp.bfloat16))
        result = jax.device_get(implementation.jitted(k)(scores, None, None))
        scores.delete()
    assert result.indices[0].tolist() == [*columns[order].tolist(), *zeros]
    want = [*winners[order].tolist(), *[0.0] * len(zeros)]
    assert result.values[0].astype(np.float32).tolist() == want

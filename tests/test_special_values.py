# SPDX-License-Identifier: Apache-2.0
"""NaNs, zeros of both signs, denormals, infinities and every 16-bit pattern."""

import inputs
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from implementations import as_float32

HALVES = [jnp.bfloat16, np.float16]
SPECIAL_F32 = as_float32(
    [
        pattern | sign
        for sign in (0, 0x80000000)
        for pattern in (
            *(0x00000000, 0x00000001, 0x00000002, 0x007FFFFF),  # zero, denormals
            *(0x00800000, 0x00800001, 0x3F800000, 0x3F800001),  # smallest normals, one
            *(0x477FE000, 0x477FFFFF, 0x47800000, 0x7F7FFFFF),  # around 65504, 65536
            *(0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000),  # inf, signalling, quiet
            *(0x7FC00001, 0x7FFFFFFE, 0x7FFFFFFF),
        )
    ]
)


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: np.dtype(d).name)
def test_every_16_bit_pattern_is_ordered_and_returned(implementation, dtype, sorted):
    rng = inputs.generator("patterns")
    patterns = rng.permutation(1 << 16).astype(np.uint16)
    scores = patterns.view(dtype).reshape(16, 4096)
    implementation.check(scores, 4096, sorted=sorted)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: np.dtype(d).name)
def test_the_best_of_all_16_bit_patterns(implementation, dtype):
    rng = inputs.generator("all patterns")
    scores = np.stack([rng.permutation(1 << 16) for _ in range(3)])
    scores = scores.astype(np.uint16).view(dtype)
    # The window decides whether NaNs, infinities or ordinary numbers win.
    starts = np.array([0, 17, 60_001], np.int32)
    implementation.check(scores, 2051, starts=starts)


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("k", [5, 19, 38, 300])
def test_special_float32_among_ordinary_numbers(implementation, k, sorted):
    rng = inputs.generator("special")
    scores = rng.standard_normal((32, 600)).astype(np.float32)
    for row in range(32):  # from a few special values to nothing else
        count = min(20 * (row + 1), 600)
        columns = rng.permutation(600)[:count]
        scores[row, columns] = rng.choice(SPECIAL_F32, count)
    implementation.check(scores, k, sorted=sorted)


def test_each_special_float32_is_placed_as_the_total_order_says(implementation):
    rng = inputs.generator("order")
    order = np.stack([rng.permutation(len(SPECIAL_F32)) for _ in range(8)])
    scores = SPECIAL_F32[order]
    got = implementation(scores, len(SPECIAL_F32))
    signed = SPECIAL_F32.view(np.int32).astype(np.int64)
    rank = np.where(signed < 0, -(signed & 0x7FFFFFFF) - 1, signed)
    want = SPECIAL_F32[np.argsort(-rank)]
    for row in got.values:
        assert row.tobytes() == want.tobytes()


@pytest.mark.parametrize("percent", [83, 100])
@pytest.mark.parametrize("dtype", [np.float32, *HALVES], ids=lambda d: np.dtype(d).name)
def test_indices_of_rows_full_of_nan_are_unique_and_in_range(
    implementation, dtype, percent
):
    n, k = 4099, 705
    name = "nan_everywhere" if percent == 100 else "nan_83_percent"
    rng = inputs.generator(name)
    scores = inputs.DISTRIBUTIONS[name](rng, 16, n, k, dtype)
    result = implementation(scores, k)
    for row in result.indices:
        assert len(set(row.tolist())) == k and 0 <= row.min() and row.max() < n
    oracle.check(result, scores, k)


def test_the_position_of_a_nan_does_not_change_the_values(implementation):
    rng = inputs.generator("position")
    row = rng.standard_normal(1000).astype(np.float32)
    row[:40] = as_float32(rng.integers(0x7F800001, 0x80000000, 40, np.uint32))
    row[40:80] = as_float32(rng.integers(0xFF800001, 1 << 32, 40, np.uint32))
    scores = np.stack([rng.permutation(row) for _ in range(16)])
    for k in (20, 990):
        values = implementation(scores, k).values
        assert len({one.tobytes() for one in values}) == 1


@pytest.mark.parametrize("dtype", [np.float32, *HALVES], ids=lambda d: np.dtype(d).name)
def test_zeros_keep_their_sign_and_positive_ones_come_first(implementation, dtype):
    scores = np.array([[0.0, -0.0, 0.0, -0.0, -0.0, 0.0, -1.0, -2.0]] * 2, dtype)
    result = implementation(scores, 7)
    assert result.indices[0].tolist() == [0, 2, 5, 1, 3, 4, 6]
    assert np.signbit(result.values[0]).tolist() == [False] * 3 + [True] * 4
    oracle.check(result, scores, 7)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: np.dtype(d).name)
def test_small_negative_halves_are_not_flushed_to_zero(implementation, dtype):
    rng = inputs.generator("small negatives")
    scores = inputs.DISTRIBUTIONS["small_negatives"](rng, 8, 3001, 300, dtype)
    result = implementation(scores, 300)
    assert (result.values < 0).all()
    oracle.check(result, scores, 300)


def test_valid_minus_infinities_come_before_padding(implementation):
    scores = np.full((3, 500), -np.inf, np.float32)
    scores[1] = as_float32(0xFFC00001)  # -NaN: below -inf and yet a score
    lengths = np.array([70, 70, 0], np.int32)
    result = implementation(scores, 100, lengths)
    assert result.indices[:2, :70].tolist() == [list(range(70))] * 2
    oracle.check(result, scores, 100, lengths)

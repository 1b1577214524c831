# SPDX-License-Identifier: Apache-2.0
"""Lengths and starts: clamped as signed numbers, nothing outside is ever seen."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_topk

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
POISON = np.array([np.nan, np.inf, 1e30, -np.nan], np.float32)


def poison_outside(scores, lengths=None, starts=None):
    """Fills the columns beyond each window with what would win if it were seen."""
    first, last = oracle.windows(scores.shape, lengths, starts)
    columns = np.arange(scores.shape[-1])
    outside = (columns < first[:, None]) | (columns >= last[:, None])
    with np.errstate(over="ignore"):
        poison = np.resize(POISON, scores.shape).astype(scores.dtype)
    return np.where(outside.reshape(scores.shape), poison, scores)


@pytest.mark.parametrize("k", [7, 100, 130])
@pytest.mark.parametrize("sorted", [True, False])
def test_every_start_and_length_is_clamped(implementation, k, sorted):
    n = 100
    ends = [
        INT_MIN,
        INT_MIN + 1,
        -n - 1,
        -5,
        -1,
        0,
        1,
        k - 1,
        k,
        k + 1,
        n - 1,
        n,
        n + 1,
    ]
    ends = np.array([*ends, n + 17, INT_MAX - 1, INT_MAX], np.int32)
    starts, lengths = (x.reshape(-1) for x in np.meshgrid(ends, ends))
    rng = inputs.generator("windows")
    scores = rng.standard_normal((len(starts), n)).astype(np.float32)
    scores = poison_outside(scores, lengths, starts)
    implementation.check(scores, k, lengths, starts, sorted)


def test_lengths_alone_and_starts_alone(implementation):
    n, k = 2000, 64
    rng = inputs.generator("alone")
    ends = [INT_MIN, -1, 0, 1, k - 1, k, k + 1, 1000, n - 1, n, n + 17, INT_MAX]
    ends = np.array(ends, np.int32)
    scores = rng.standard_normal((len(ends), n)).astype(np.float32)
    implementation.check(poison_outside(scores, lengths=ends), k, ends, None)
    implementation.check(poison_outside(scores, starts=ends), k, None, ends)


def test_a_length_of_minus_one_is_an_empty_row(implementation):
    rng = inputs.generator("minus one")
    scores = rng.standard_normal((8, 16384)).astype(np.float32)
    lengths = np.array([16384, 5000, 2048, 2047, 1, 16383, -1, 0], np.int32)
    implementation.check(poison_outside(scores, lengths), 2048, lengths)


def test_speculative_rows_end_one_column_apart(implementation):
    next_n, n, k = 4, 300, 4
    rng = inputs.generator("speculative")
    scores = rng.standard_normal((2, next_n, n)).astype(np.float32)
    lengths = np.array([[2], [6]], np.int32) - next_n + 1 + np.arange(next_n)
    lengths = lengths.astype(np.int32)
    assert lengths.tolist() == [[-1, 0, 1, 2], [3, 4, 5, 6]]
    implementation.check(scores, k, lengths)


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (3, 1), (1, 5), (3, 5)], ids=lambda s: str(list(s))
)
def test_lengths_and_starts_broadcast_to_the_leading_axes(implementation, shape):
    rng = inputs.generator("broadcast")
    scores = rng.standard_normal((3, 5, 130)).astype(np.float32)
    lengths = rng.integers(0, 131, shape).astype(np.int32)
    starts = rng.integers(0, 100, shape[-1:]).astype(np.int32)
    implementation.check(scores, 20, lengths, starts)


def test_lengths_beyond_int32_are_long_not_negative(other_implementation):
    scores = inputs.generator("int64").standard_normal((4, 90)).astype(np.float32)
    lengths = np.array([2**40, -(2**40), 2**32 + 1, 2**31], np.int64)
    with jax.default_device(other_implementation.device):
        for given in (lengths, lengths.astype(np.uint64)):
            want = np.where(given > 90, 90, given).astype(np.int64)
            result = jax_topk.top_k(
                scores, 9, lengths=given, implementation=other_implementation.name
            )
            oracle.check(jax.device_get(result), scores, 9, want)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_indices_are_absolute_and_neighbours_of_the_window_are_not_seen(
    implementation, dtype
):
    n, k, rows = 20_011, 512, 40
    rng = inputs.generator("neighbours")
    scores = rng.standard_normal((rows, n)).astype(dtype)
    starts = 2 * np.arange(rows, dtype=np.int32)  # every alignment of the first column
    lengths = np.resize([700, 5000, 511, 512, 19_900, 1025, 16_384], rows)
    lengths = (lengths + np.arange(rows) // 7).astype(np.int32)
    for row in range(rows):  # better scores on either side of the window
        start, stop = starts[row], starts[row] + lengths[row]
        scores[row, max(start - 3, 0) : start] = 50
        scores[row, stop : stop + 3] = 50
    implementation.check(scores, k, lengths, starts, sorted=False)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("n", [5003, 40_009])
def test_every_distribution_is_exact_in_a_ragged_batch(implementation, n, dtype):
    k = 300
    labels, scores = inputs.batch(n, k, dtype)
    rng = inputs.generator("ragged", n)
    starts = rng.integers(0, n // 3, len(labels)).astype(np.int32)
    lengths = rng.integers(0, n, len(labels)).astype(np.int32)
    lengths[::7] = rng.integers(k - 2, k + 3, len(lengths[::7]))
    scores = poison_outside(scores, lengths, starts)
    implementation.check(scores, k, lengths, starts, labels=labels)


def test_windows_of_long_rows_that_are_shared(implementation):
    n, k = 400_009, 2048
    names = ["normal", "plateau", "random_bits"]
    labels, scores = inputs.batch(n, k, np.float32, names)
    for lengths, starts in (
        ([n, n, n], [1, 77_777, 200_003]),
        ([399_000, 300_001, 270_003], [5, 99_999, 130_001]),
        ([n + 3, k, k + 1], [-3, 399_000, 131_072]),
        ([262_145, -1, 2], [131_071, 0, n - 2]),
    ):
        window = np.array(lengths, np.int32), np.array(starts, np.int32)
        given = poison_outside(scores, *window)
        implementation.check(given, k, *window, labels=labels)


def test_a_prefill_in_chunks_equals_the_whole_prefill(implementation):
    rows, n, k = 96, 3000, 128
    rng = inputs.generator("prefill")
    scores = rng.standard_normal((rows, n)).astype(np.float32)
    lengths = (np.arange(rows) * 31 + 1).astype(np.int32)  # causal
    whole = implementation(scores, k, lengths)
    oracle.check(whole, scores, k, lengths)
    for i in range(0, rows, 32):
        part = slice(i, i + 32)
        chunk = implementation(scores[part], k, lengths[part])
        assert chunk.values.tobytes() == whole.values[part].tobytes()
        assert chunk.indices.tobytes() == whole.indices[part].tobytes()

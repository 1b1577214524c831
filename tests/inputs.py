# SPDX-License-Identifier: Apache-2.0
"""Named score distributions, each aimed at one way in which a selection goes wrong.

A distribution is a function (rng, rows, n, k, dtype) -> scores[rows, n]. Tests use them
side by side, one row each, so that one compiled shape is checked against all of them.
"""

import zlib

import ml_dtypes
import numpy as np

DISTRIBUTIONS = {}


def _distribution(function):
    def cast(rng, rows, n, k, dtype):
        with np.errstate(all="ignore"):  # 16-bit overflow to inf is welcome
            winners = min(max(k, 1), n)
            scores = np.asarray(function(rng, rows, n, winners, np.dtype(dtype)))
            return np.ascontiguousarray(scores.astype(dtype, copy=False))

    DISTRIBUTIONS[function.__name__] = cast
    return cast


def generator(*seed):
    """A random generator that depends on the given words and numbers alone."""
    return np.random.default_rng(zlib.crc32(repr(seed).encode()))


def batch(n, k, dtype, names=None):
    """One row of each distribution: (labels, scores[len(labels), n])."""
    labels = list(DISTRIBUTIONS if names is None else names)
    name = np.dtype(dtype).name
    rows = [
        DISTRIBUTIONS[label](generator(label, n, k, name), 1, n, k, dtype)
        for label in labels
    ]
    return labels, np.concatenate(rows)


def from_bits(rng, shape, dtype):
    """Uniformly random bit patterns: every exponent, NaN payload and sign."""
    return (
        np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
        .reshape(shape)
        .copy()
    )


# Where the native implementations look for their sample: at four neighbours (eight in
# the CUDA kernels that filter) from each of so many equal parts of a row, at a place
# that a hash of the part's number gives.
# Copied from the sources, since nothing else can mislead a sample; a test makes sure
# that the copies have not fallen behind.

SAMPLERS_IN_THE_SOURCES = {
    "cpu_top_k.cc": (
        "within = (i + 1) * 0x9E3779B97F4A7C15u >> 32;",
        "(i * span + kRun * (within * span >> 32)) >> log2",
    ),
    "select.cuh": (
        "i = j * kThreads + threadIdx.x; if (i < sample->groups)",
        "jitter = i * 2654435761u;",
        "shift > 0 ? i << (32 - shift) | jitter >> shift : jitter;",
        "place = __umulhi(fraction, num_whole);",
        "return first + uint64_t{place} * Sampling::kGroup;",
        "first = vectors.data + vectors.first_whole * Sampling::kGroup;",
    ),
    "held_top_k.cu": (
        "kParts = kThreads / 4; constexpr int kLogParts = 7;",
        "part = threadIdx.x / 4;",
        "fraction = part << (32 - kLogParts) | part * 2654435761u >> kLogParts;",
        "place = __umulhi(fraction, length - 3) + (threadIdx.x & 3);",
        "entries.data + entries.columns.start + place",
    ),
}


def columns_that_cpu_samples(length, num_samples):
    run = 4  # neighbours
    i = np.arange(0, num_samples, run, dtype=np.uint64)
    span = np.uint64(length - (run - 1))
    place = (i + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    place = place * span >> np.uint64(32)
    first = (i * span + np.uint64(run) * place) // np.uint64(num_samples)
    return (first[:, None] + np.arange(run, dtype=np.uint64)).ravel()


def columns_that_cuda_samples(length, num_samples):
    """Those of a row that begins at a group, as all do whose length divides by 8."""
    group, shift = 8, (num_samples // 8).bit_length() - 1
    i = np.arange(1 << shift, dtype=np.uint64)
    jitter = i * np.uint64(2654435761) & np.uint64(2**32 - 1)
    fraction = i << np.uint64(32 - shift) | jitter >> np.uint64(shift)
    place = fraction * np.uint64(length // group) >> np.uint64(32)
    first = np.uint64(group) * place
    return (first[:, None] + np.arange(group, dtype=np.uint64)).ravel()


def columns_that_held_samples(length):
    """Those of a window, from its start, that a range is guessed from: 512 of them."""
    part = np.arange(128, dtype=np.uint64)
    hashed = part * np.uint64(2654435761) & np.uint64(2**32 - 1)
    fraction = part << np.uint64(25) | hashed >> np.uint64(7)
    place = fraction * np.uint64(length - 3) >> np.uint64(32)
    return (place[:, None] + np.arange(4, dtype=np.uint64)).ravel().astype(np.int64)


def against_the_guess(n, k):
    """Rows, with labels, whose guessed range is far from the k-th largest, or none.

    The columns that are looked at hold one thing, all the others another.
    """
    columns = columns_that_held_samples(n)
    rng = generator("against the guess", n, k)
    ordinary = rng.standard_normal((n,)).astype(np.float32)
    ties = rng.integers(0, 9, n).astype(np.float32)
    largest = np.finfo(np.float32).max
    sampled = {
        "winners elsewhere": ordinary[columns] - 100,
        "winners and no others": ordinary[columns] + 100,
        # Fewer than k that have a place in a range.
        "too high": np.where(
            np.arange(len(columns)) < k // 2, np.resize([50, 51], len(columns)), -np.inf
        ),
        "too low": np.resize([-50, -51], len(columns)),
        "all equal": 0.25,
        "all equal and above": 7.5,
        "minus zeros": -0.0,
        "two neighbours": np.resize([1, 1 + 2.0**-23], len(columns)),
        "denormals": np.resize(as_floats([1, 2, 3, 0x80000001]), len(columns)),
        "both largest": np.resize([largest, -largest], len(columns)),
        "inf": np.inf,
        "minus inf": -np.inf,
        "nans": as_floats([0x7FC00000]),
        "negative nans": as_floats([0xFFC00000]),
        "least of all": as_floats([0xFFFFFFFF]),
        "one finite": np.where(np.arange(len(columns)) == 77, 0.5, np.inf),
        "special": np.resize(
            as_floats([0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 1 << 31]),
            len(columns),
        ),
    }
    labels, rows = [], []
    for base_name, base in (("ordinary", ordinary), ("ties", ties)):
        for name, values in sampled.items():
            row = base.copy()
            row[columns] = values
            rows.append(row)
            labels.append(f"{base_name}, {name}")
    return labels, np.stack(rows)


def as_floats(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def against_the_sample(n, num_samples):
    """Rows whose sample misleads, with labels: too high a threshold, then too low.

    Once within ordinary scores, and once within equal ones that a late few exceed by
    the last bit: whoever drops what does not fit must not drop those.
    """
    labels, rows = [], []
    for sampler in (columns_that_cpu_samples, columns_that_cuda_samples):
        rng = generator(sampler.__name__, n, num_samples)
        columns = sampler(n, num_samples).astype(np.int64)
        ordinary = rng.standard_normal(n).astype(np.float32)
        step = np.full(n, 1.0, np.float32)
        late = n - 1 - rng.permutation(n // 3)[:400]
        step[late] = np.nextafter(np.float32(1), np.float32(2))
        for base in (ordinary, step):
            high, low = base.copy(), base.copy()
            high[columns[:: max(num_samples // 1000, 1)]] += 100  # fewer than k
            low[columns] -= 100
            rows += [high, low]
            labels += [f"{sampler.__name__} {num_samples} {h}" for h in ("high", "low")]
    return labels, np.stack(rows)


def _unsigned(dtype):
    return np.dtype(f"u{dtype.itemsize}")


def _mantissa_bits(dtype):
    return ml_dtypes.finfo(dtype).nmant


def _exponent_mask(dtype):
    """The bits of +inf."""
    return int(np.array(np.inf, dtype).view(_unsigned(dtype)))


def _nans(rng, shape, dtype):
    """NaNs of random sign and random, nonzero payload."""
    unsigned = _unsigned(dtype)
    payload = rng.integers(1, 1 << _mantissa_bits(dtype), shape)
    sign = rng.integers(0, 2, shape) << (8 * dtype.itemsize - 1)
    return (payload | sign | _exponent_mask(dtype)).astype(unsigned).view(dtype)


def least_nans(count, dtype):
    """The NaN below all others: every bit is set."""
    return np.full(count, -1, f"i{np.dtype(dtype).itemsize}").view(dtype)


def _scatter(rng, scores, columns, winners):
    """Puts `winners` into the given columns of each row."""
    scores[:, columns] = winners
    return scores


def _random_columns(rng, n, count):
    return rng.permutation(n)[:count]


# Ordinary.


@_distribution
def normal(rng, rows, n, k, dtype):
    return rng.standard_normal((rows, n), np.float32)


@_distribution
def uniform(rng, rows, n, k, dtype):
    return rng.random((rows, n), np.float32)


@_distribution
def small_negatives(rng, rows, n, k, dtype):
    return -1e-3 * np.abs(rng.standard_normal((rows, n), np.float32)) - 1e-4


@_distribution
def every_magnitude(rng, rows, n, k, dtype):
    exponents = rng.uniform(-44, 38, (rows, n)) if dtype != np.float16 else None
    if exponents is None:
        exponents = rng.uniform(-7.5, 4.7, (rows, n))
    sign = rng.choice([-1.0, 1.0], (rows, n))
    return sign * 10.0**exponents


# Narrow: all scores share the leading bits, so a coarse digit sees one bin.


@_distribution
def narrow_bin(rng, rows, n, k, dtype):
    return rng.uniform(1.0, 1.245, (rows, n))


@_distribution
def narrow_around_mean(rng, rows, n, k, dtype):
    return 12.5 * (1 + 0.02 * rng.standard_normal((rows, n)))


@_distribution
def narrow_hundredth(rng, rows, n, k, dtype):
    return 1 + 0.01 * rng.random((rows, n))


@_distribution
def neighbouring_floats(rng, rows, n, k, dtype):
    """Few adjacent bit patterns: only the lowest bits differ."""
    one = int(np.array(1.5, dtype).view(_unsigned(dtype)))
    return (one + rng.integers(0, 64, (rows, n))).astype(_unsigned(dtype)).view(dtype)


@_distribution
def descending_above_fp16(rng, rows, n, k, dtype):
    """Integers above 65504, where an fp16 digit saturates."""
    return np.broadcast_to(65505.0 + np.arange(n)[::-1], (rows, n))


@_distribution
def outlier_max(rng, rows, n, k, dtype):
    """One huge score stretches the range so that all the others share one bin."""
    scores = rng.standard_normal((rows, n), np.float32)
    scores[:, n // 3] = 6e4 if dtype == np.float16 else 1e30
    return scores


@_distribution
def outlier_min(rng, rows, n, k, dtype):
    scores = 1 + 0.01 * rng.random((rows, n))
    scores[:, n // 2] = -6e4 if dtype == np.float16 else -1e30
    return scores


# Plateaus and ties.


@_distribution
def plateau(rng, rows, n, k, dtype):
    """Almost all scores are exactly 0 and the k-th value may be 0."""
    return np.maximum(rng.standard_normal((rows, n), np.float32) - 3, 0)


@_distribution
def half_zeros(rng, rows, n, k, dtype):
    return np.maximum(rng.standard_normal((rows, n), np.float32), 0)


@_distribution
def all_equal(rng, rows, n, k, dtype):
    return np.full((rows, n), -2.75)


@_distribution
def signed_zeros(rng, rows, n, k, dtype):
    return rng.choice([0.0, -0.0], (rows, n))


@_distribution
def groups_of_four(rng, rows, n, k, dtype):
    values = np.repeat(rng.standard_normal((rows, n // 4 + 1)), 4, axis=-1)[:, :n]
    return rng.permuted(values, axis=-1)


@_distribution
def bf16_rounded(rng, rows, n, k, dtype):
    return rng.standard_normal((rows, n), np.float32).astype(ml_dtypes.bfloat16)


@_distribution
def two_plateaus(rng, rows, n, k, dtype):
    return rng.choice([0.5, 2.0], (rows, n))


@_distribution
def three_plateaus_and_noise(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n))
    return np.where(rng.random((rows, n)) < 0.9, rng.integers(-1, 2, (rows, n)), scores)


@_distribution
def winners_last(rng, rows, n, k, dtype):
    """Too few winners (k / 4), at the end of a row of equal scores."""
    scores = np.full((rows, n), 0.25)
    count = max(k // 4, 1)
    scores[:, n - count :] = 1 + rng.random((rows, count))
    return scores


@_distribution
def k_winners_on_a_plateau(rng, rows, n, k, dtype):
    scores = np.zeros((rows, n))
    return _scatter(rng, scores, _random_columns(rng, n, k), 1 + rng.random(k))


@_distribution
def k_minus_one_winners_on_a_plateau(rng, rows, n, k, dtype):
    scores = np.zeros((rows, n))
    return _scatter(rng, scores, _random_columns(rng, n, k - 1), 1 + rng.random(k - 1))


@_distribution
def k_plus_one_winners_on_a_plateau(rng, rows, n, k, dtype):
    scores = np.full((rows, n), -7.0)
    count = min(k + 1, n)
    return _scatter(rng, scores, _random_columns(rng, n, count), 1 + rng.random(count))


def _early_winners_and_a_late_plateau(count):
    """Equal scores matter, and only some of them, after many that do not matter."""

    def early_winners_and_a_late_plateau(rng, rows, n, k, dtype):
        scores = np.full((rows, n), -3.0)
        scores[:, n // 2 :] = 0.0
        winners = min(max(k + count, 0), n)
        scores[:, :winners] = np.where(rng.random((rows, winners)) < 0.5, 0.0, 2.0)
        return scores

    name = f"k{count:+}_early_winners_and_a_late_plateau"
    early_winners_and_a_late_plateau.__name__ = name
    return _distribution(early_winners_and_a_late_plateau)


for _count in (-2, -1, 0, 1):
    _early_winners_and_a_late_plateau(_count)


@_distribution
def ties_that_fit(rng, rows, n, k, dtype):
    """Three quarters of k winners and as many ties, far from filling a list."""
    count = max(3 * k // 4, 1)
    scores = -1 - rng.random((rows, n))
    columns = _random_columns(rng, n, 2 * count)
    _scatter(rng, scores, columns[count:], 0.75)
    return _scatter(rng, scores, columns[:count], 1 + rng.random(len(columns[:count])))


@_distribution
def kth_in_a_crowd_of_neighbours(rng, rows, n, k, dtype):
    """The k-th of all is the 20th of 100 that differ in their lowest bits only."""
    scores = (-5 - 4 * rng.random((rows, n))).astype(dtype)
    columns = _random_columns(rng, n, k - min(20, k) + 100)
    bits = int(np.array(1.5, dtype).view(_unsigned(dtype)))
    crowd = (bits + rng.integers(0, 40, min(100, n))).astype(_unsigned(dtype))
    _scatter(rng, scores, columns[:100], crowd.view(dtype)[: len(columns[:100])])
    winners = (10 + 90 * rng.random(len(columns[100:]))).astype(dtype)
    return _scatter(rng, scores, columns[100:], winners)


@_distribution
def late_plateau(rng, rows, n, k, dtype):
    """Every tie sits in the last tenth of the row, above all the rest."""
    scores = rng.standard_normal((rows, n)) - 10
    scores[:, n - n // 10 - 1 :] = 4.0
    return scores


# Order within the row.


@_distribution
def sorted_up(rng, rows, n, k, dtype):
    return np.sort(rng.standard_normal((rows, n), np.float32), axis=-1)


@_distribution
def sorted_down(rng, rows, n, k, dtype):
    return np.sort(rng.standard_normal((rows, n), np.float32), axis=-1)[:, ::-1]


@_distribution
def sawtooth(rng, rows, n, k, dtype):
    return np.broadcast_to(np.arange(n) % 61, (rows, n))


@_distribution
def sawtooth_of_a_power_of_two(rng, rows, n, k, dtype):
    """A period that a strided sample is likely to share."""
    return np.broadcast_to(np.arange(n) % 32, (rows, n))


@_distribution
def long_teeth(rng, rows, n, k, dtype):
    return np.broadcast_to(-(np.arange(n) % max(n // 7, 1)), (rows, n))


# Against sampling: what decides the answer hides from, or fills, the sample.


@_distribution
def winners_hidden_at_random(rng, rows, n, k, dtype):
    scores = 1e-3 * rng.standard_normal((rows, n))
    count = max(k // 2, 1)
    return _scatter(rng, scores, _random_columns(rng, n, count), 5 + rng.random(count))


@_distribution
def winners_at_regular_strides(rng, rows, n, k, dtype):
    """Where a strided sample looks: it takes the winners for the whole row."""
    scores = 1e-3 * rng.standard_normal((rows, n))
    columns = np.arange(0, n, max(n // k, 1))
    return _scatter(rng, scores, columns, 5 + rng.random(len(columns)))


@_distribution
def winners_between_regular_strides(rng, rows, n, k, dtype):
    """Only odd columns hold scores that matter: nowhere an even stride looks."""
    scores = rng.standard_normal((rows, n))
    scores[:, ::2] = -100 + 1e-3 * scores[:, ::2]
    return scores


@_distribution
def even_columns_only(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n))
    scores[:, 1::2] = -100
    return scores


@_distribution
def winners_clustered_at_the_end(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n))
    count = max(k // 2, 1)
    scores[:, n - count :] += 100
    return scores


@_distribution
def winners_in_one_region(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n))
    first = min(n // 3, n - k)
    scores[:, first : first + k] += 20
    return scores


@_distribution
def winners_at_both_ends(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n))
    scores[:, : k // 2] += 20
    scores[:, n - (k - k // 2) :] += 20
    return scores


@_distribution
def last_column(rng, rows, n, k, dtype):
    scores = -1 - rng.random((rows, n))
    scores[:, -1] = 3.0
    return scores


@_distribution
def first_column(rng, rows, n, k, dtype):
    scores = -1 - rng.random((rows, n))
    scores[:, 0] = 3.0
    return scores


@_distribution
def quiet_start(rng, rows, n, k, dtype):
    """The first half says nothing about the second."""
    scores = 1e-3 * rng.standard_normal((rows, n))
    scores[:, n // 2 :] = 10 + rng.standard_normal((rows, n - n // 2))
    return scores


# Special values.


@_distribution
def more_inf_than_k(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n), np.float32)
    columns = _random_columns(rng, n, min(k + max(k // 3, 1), n))
    return _scatter(rng, scores, columns, np.inf)


@_distribution
def mostly_minus_inf(rng, rows, n, k, dtype):
    """Fewer than k finite scores: valid -inf entries fill the rest."""
    scores = np.full((rows, n), -np.inf)
    count = max(k // 3, 1) if k > 1 else 0
    winners = rng.standard_normal(count)
    return _scatter(rng, scores, _random_columns(rng, n, count), winners)


@_distribution
def nan_83_percent(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n), np.float32).astype(dtype)
    return np.where(rng.random((rows, n)) < 0.83, _nans(rng, (rows, n), dtype), scores)


@_distribution
def nan_everywhere(rng, rows, n, k, dtype):
    return _nans(rng, (rows, n), dtype)


@_distribution
def one_kind_of_nan(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n), np.float32)
    scores[rng.random((rows, n)) < 0.5] = np.nan
    return scores


@_distribution
def negative_nans(rng, rows, n, k, dtype):
    """NaNs that come last of all, below -inf, and fill most of the row."""
    sign = _unsigned(dtype).type(1 << (8 * dtype.itemsize - 1))
    nans = (_nans(rng, (rows, n), dtype).view(_unsigned(dtype)) | sign).view(dtype)
    scores = rng.choice([-np.inf, -1.0, 0.0], (rows, n)).astype(dtype)
    return np.where(rng.random((rows, n)) < 0.9, nans, scores)


@_distribution
def few_of_each_special_value(rng, rows, n, k, dtype):
    """Ordinary scores; here and there an infinity or a NaN, of both signs."""
    scores = rng.standard_normal((rows, n), np.float32).astype(dtype)
    values = [np.inf, -np.inf, *_nans(rng, 6, dtype), *least_nans(5, dtype)]
    values += [ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min]
    values = np.array(values, dtype)
    columns = _random_columns(rng, n, len(values))
    return _scatter(rng, scores, columns, values[: len(columns)])


@_distribution
def both_infinities(rng, rows, n, k, dtype):
    scores = rng.standard_normal((rows, n), np.float32)
    columns = _random_columns(rng, n, max(k // 2, 2))
    return _scatter(rng, scores, columns, rng.choice([-np.inf, np.inf], len(columns)))


@_distribution
def both_largest(rng, rows, n, k, dtype):
    """The difference of the largest and the least score is no number any more."""
    scores = rng.standard_normal((rows, n), np.float32).astype(dtype)
    ends = np.array([ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min], dtype)
    columns = _random_columns(rng, n, 4)
    return _scatter(rng, scores, columns, np.resize(ends, len(columns)))


@_distribution
def least_of_all(rng, rows, n, k, dtype):
    """Too few ordinary scores; the rest are NaNs that come after all others."""
    scores = np.resize(least_nans(1, dtype), (rows, n))
    count = max(k - 3, 0)
    winners = rng.standard_normal(count).astype(dtype)
    return _scatter(rng, scores, _random_columns(rng, n, count), winners)


@_distribution
def random_bits(rng, rows, n, k, dtype):
    return from_bits(rng, (rows, n), dtype)


@_distribution
def denormals(rng, rows, n, k, dtype):
    bits = rng.integers(0, 1 << _mantissa_bits(dtype), (rows, n))
    sign = rng.integers(0, 2, (rows, n)) << (8 * dtype.itemsize - 1)
    return (bits | sign).astype(_unsigned(dtype)).view(dtype)


@_distribution
def positive_denormals(rng, rows, n, k, dtype):
    """Between the largest and the least there is less than a reciprocal can tell."""
    bits = 1 + rng.integers(0, 1 << _mantissa_bits(dtype), (rows, n)) // 8
    return bits.astype(_unsigned(dtype)).view(dtype)


@_distribution
def extremes(rng, rows, n, k, dtype):
    """The values at which a conversion saturates, flushes or loses a sign."""
    largest = float(ml_dtypes.finfo(dtype).max)
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
    values = np.array([0.0, tiny, tiny / 2, 1.0, 65504, 65536, largest, np.inf])
    return rng.choice(np.concatenate([values, -values]), (rows, n))

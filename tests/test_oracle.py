# SPDX-License-Identifier: Apache-2.0
"""The oracle agrees with a brute force; the check turns red for each kind of fault."""

import pathlib
import re

import inputs
import ml_dtypes
import numpy as np
import oracle
import pytest

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]


def brute_force(row, k, first, last, sorted_):
    """One row, in plain Python: explicit keys, no bit tricks."""

    def key(column):
        if row.dtype.kind in "iu":
            return -int(row[column]), column
        pattern = row[column].tobytes()[::-1]
        magnitude = int.from_bytes(bytes([pattern[0] & 0x7F]) + pattern[1:], "big")
        negative = pattern[0] >> 7
        return negative, magnitude if negative else -magnitude, column

    columns = sorted(range(first, last), key=key)[:k]
    if not sorted_:
        columns.sort()
    pad = -np.inf if row.dtype.kind not in "iu" else np.iinfo(row.dtype).min
    values = [row[c] for c in columns] + [row.dtype.type(pad)] * (k - len(columns))
    return np.array(values, row.dtype), columns + [-1] * (k - len(columns))


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, np.float64, np.int32, np.uint8, np.int64])
def test_the_oracle_agrees_with_a_brute_force(dtype, sorted):
    rng = np.random.default_rng(5)
    for n in (1, 2, 7, 40):
        scores = inputs.from_bits(rng, (24, n), dtype)
        scores[8:16] = rng.integers(0, 3, (8, n)).astype(dtype)
        starts = rng.integers(-3, n + 3, 24)
        lengths = rng.integers(-2, n + 4, 24)
        for k in (1, n // 2 + 1, n, n + 3):
            values, indices = oracle.top_k(scores, k, lengths, starts, sorted)
            for r in range(24):
                first = min(max(starts[r], 0), n)
                last = min(max(starts[r] + max(lengths[r], 0), first), n)
                want = brute_force(scores[r], k, first, last, sorted)
                assert values[r].tobytes() == want[0].tobytes()
                assert indices[r].tolist() == want[1]


def test_the_oracle_broadcasts_windows_over_leading_axes():
    scores = np.random.default_rng(0).standard_normal((2, 3, 9), np.float32)
    values, indices = oracle.top_k(scores, 4, lengths=[[5], [9]], starts=[0, 2, 8])
    assert values.shape == indices.shape == (2, 3, 4)
    for i, length in enumerate((5, 9)):
        for j, start in enumerate((0, 2, 8)):
            stop = min(start + length, 9)
            want = brute_force(scores[i, j], 4, start, stop, True)
            assert values[i, j].tobytes() == want[0].tobytes()
            assert indices[i, j].tolist() == want[1]


def test_the_oracle_orders_special_values_as_the_contract_says():
    patterns = [
        *(0x7FFFFFFF, 0x7FC00000, 0x7F800001),  # +NaN, larger payloads first
        *(0x7F800000, 0x3F800000, 0x00000001, 0x00000000),  # +inf, 1, denormal, +0
        *(0x80000000, 0x80000001, 0xBF800000, 0xFF800000),  # -0, denormal, -1, -inf
        *(0xFF800001, 0xFFC00000, 0xFFFFFFFF),  # -NaN, smaller payloads first
    ]
    descending = np.array(patterns, np.uint32).view(np.float32)
    order = np.random.default_rng(1).permutation(len(descending))
    values, indices = oracle.top_k(descending[order], len(order))
    assert values.tobytes() == descending.tobytes()
    assert order[indices].tolist() == list(range(len(order)))


def test_a_valid_minus_infinity_comes_before_padding():
    scores = np.full(5, -np.inf, np.float32)
    values, indices = oracle.top_k(scores, 5, lengths=3)
    assert indices.tolist() == [0, 1, 2, -1, -1]
    assert np.isneginf(values).all()


def answer():
    """A right answer with a short row, zeros of both signs and a NaN in it."""
    scores = np.random.default_rng(2).standard_normal((3, 50)).astype(np.float32)
    scores[1, 20] = np.array(0x7FC00123, np.uint32).view(np.float32)
    scores[1, 21:] = -1 - np.arange(29)
    scores[1, :20] = 0.0
    scores[1, 10:20] = -0.0
    lengths = np.array([50, 50, 3])
    return scores, lengths, *oracle.top_k(scores, 16, lengths)


def next_entry(scores, values, indices):
    values[0, 15], indices[0, 15] = oracle.top_k(scores, 17)[0][0, 16], 0
    indices[0, 15] = oracle.top_k(scores, 17)[1][0, 16]


def repeated_index(scores, values, indices):
    indices[0, 3], values[0, 3] = indices[0, 2], values[0, 2]


def zero_for_padding(scores, values, indices):
    indices[2, 10] = 0


def zero_for_a_pad_value(scores, values, indices):
    values[2, 10] = 0


def flipped_bit(scores, values, indices):
    values.view(np.uint32)[0, 7] ^= 1


def wrong_payload(scores, values, indices):
    values.view(np.uint32)[1, 0] = 0x7FC00000


def wrong_zero(scores, values, indices):
    values[1, 1] = -0.0


def other_zero_of_a_pair(scores, values, indices):
    assert (values[1, 10], values[1, 11]) == (0.0, -0.0)
    values[1, [10, 11]], indices[1, [10, 11]] = (
        values[1, [11, 10]],
        indices[1, [11, 10]],
    )


def later_of_two_ties(scores, values, indices):
    indices[1, 15] += 1


def unsorted_pair(scores, values, indices):
    values[0, [4, 5]], indices[0, [4, 5]] = values[0, [5, 4]], indices[0, [5, 4]]


@pytest.mark.parametrize(
    ("fault", "row", "slot"),
    [
        (next_entry, 0, 15),
        (repeated_index, 0, 3),
        (zero_for_padding, 2, 10),
        (zero_for_a_pad_value, 2, 10),
        (flipped_bit, 0, 7),
        (wrong_payload, 1, 0),
        (wrong_zero, 1, 1),
        (other_zero_of_a_pair, 1, 10),
        (later_of_two_ties, 1, 15),
        (unsorted_pair, 0, 4),
    ],
)
def test_check_names_the_first_wrong_slot(fault, row, slot):
    scores, lengths, values, indices = answer()
    oracle.check((values, indices), scores, 16, lengths)
    fault(scores, values, indices)
    with pytest.raises(AssertionError, match=rf"row {row} \(name\).*slot {slot}: "):
        labels = ["name"] * 3
        oracle.check((values, indices), scores, 16, lengths, labels=labels)


def test_check_counts_the_rows_that_differ():
    scores, lengths, values, indices = answer()
    values[1:, 0] = 7
    with pytest.raises(AssertionError, match=re.escape("2 of 3 rows differ; row 1")):
        oracle.check((values, indices), scores, 16, lengths)


@pytest.mark.parametrize(
    "change",
    [
        lambda values, indices: (values.astype(np.float64), indices),
        lambda values, indices: (values, indices.astype(np.int64)),
        lambda values, indices: (values, indices.astype(np.uint32)),
        lambda values, indices: (values[:, :-1], indices[:, :-1]),
        lambda values, indices: (values[None], indices[None]),
    ],
)
def test_check_wants_the_right_dtypes_and_shapes(change):
    scores, lengths, values, indices = answer()
    with pytest.raises(AssertionError, match="expected"):
        oracle.check(change(values, indices), scores, 16, lengths)


def test_check_tells_the_two_orders_apart():
    scores, lengths, values, indices = answer()
    with pytest.raises(AssertionError, match="sorted=False"):
        oracle.check((values, indices), scores, 16, lengths, sorted=False)


@pytest.mark.parametrize("name", inputs.SAMPLERS_IN_THE_SOURCES)
def test_the_adversaries_know_where_the_sources_sample(name):
    source = pathlib.Path(__file__).parent.parent.joinpath("ffi", name).read_text()
    source = " ".join(source.split())
    for line in inputs.SAMPLERS_IN_THE_SOURCES[name]:
        assert line in source, f"the sampler has changed: adapt tests/inputs.py, {line}"


def test_a_sample_sees_what_the_adversaries_show_it():
    n = 70_008
    for sampler, run in (
        (inputs.columns_that_cpu_samples, 4),
        (inputs.columns_that_cuda_samples, 8),
    ):
        columns = sampler(n, 2048).astype(np.int64)
        part = np.arange(2048 // run + 1) * n // (2048 // run)
        first = columns[::run]
        assert (first > part[:-1] - run).all() and (first <= part[1:]).all()
        assert columns.max() < n and len(np.unique(columns)) > 2020
    columns = inputs.columns_that_held_samples(n)
    first = columns[::4]
    part = np.arange(129) * n // 128
    assert (first > part[:-1] - run).all() and (first <= part[1:]).all()
    assert columns.max() < n and len(np.unique(columns)) == 512
    labels, scores = inputs.against_the_sample(n, 2048)
    high = scores[labels.index("columns_that_cpu_samples 2048 high")]
    low = scores[labels.index("columns_that_cpu_samples 2048 low")]
    assert (high > 50).sum() > 1020 and (low < -50).sum() > 2040


@pytest.mark.parametrize(("n", "num_samples"), [(70_008, 2048), (400_008, 8192)])
def test_the_adversaries_mislead_a_sample_in_either_direction(n, num_samples):
    """As the kernels draw it: too few columns pass, or more than any list holds."""
    k, most = 2048, 12_288
    columns = inputs.columns_that_cuda_samples(n, num_samples).astype(np.int64)
    mean = k * num_samples / n
    rank = int(mean + 6 * mean**0.5 + 8)
    labels, scores = inputs.against_the_sample(n, num_samples)
    for label, row in zip(labels, scores, strict=True):
        if "cuda" in label:
            threshold = np.sort(row[columns])[-rank]
            passed = (row > threshold).sum(), (row >= threshold).sum()
            assert passed[1] < k if label.endswith("high") else passed[0] > most


@pytest.mark.parametrize(("n", "k"), [(5003, 300), (30_011, 2048)])
def test_the_adversaries_mislead_a_guess_in_every_direction(n, k):
    """As the kernels make it: the k-th largest is above it, below, or in a crowd."""
    columns = inputs.columns_that_held_samples(n)
    scores = inputs.against_the_guess(n, k)[1]
    above = below = none = crowded = 0
    for row in scores:
        sample = row[columns]
        sample = sample[np.isfinite(sample)].astype(np.float64)
        keys = np.sort(oracle.total_order(row))[::-1]
        (kth,) = row[oracle.total_order(row) == keys[k - 1]][:1]
        none += len(sample) == 0
        if len(sample) > 0:
            width = sample.max() - sample.min()
            above += kth > sample.max() + 0.5 * width
            below += kth < sample.min() - 0.5 * width
            if np.isfinite(kth) and width > 0:
                # More than are compared, in a bin or a little more of it.
                crowded += (abs(row - kth) < width / 1024).sum() > 64
    assert min(above, below, none, crowded) >= 2, (above, below, none, crowded)


def test_distributions_are_what_their_names_say():
    n, k = 3000, 100
    for dtype in DTYPES:
        labels, scores = inputs.batch(n, k, dtype)
        assert scores.shape == (len(labels), n) and scores.dtype == dtype
        again = inputs.batch(n, k, dtype)[1]
        assert scores.tobytes() == again.tobytes()
        row = dict(zip(labels, scores.astype(np.float32), strict=True))
        assert np.isnan(row["nan_everywhere"]).all()
        nans = oracle.unsigned_bits(scores[labels.index("nan_everywhere")])
        assert len(np.unique(nans)) > 250
        assert abs(np.isnan(row["nan_83_percent"]).mean() - 0.83) < 0.03
        assert np.isposinf(row["more_inf_than_k"]).sum() > k
        assert np.isfinite(row["mostly_minus_inf"]).sum() < k
        assert set(row["plateau"][row["plateau"] <= 0]) == {0.0}
        assert (row["plateau"] == 0).mean() > 0.99
        zeros = oracle.unsigned_bits(scores[labels.index("signed_zeros")])
        assert len(np.unique(zeros)) == 2
        assert (np.diff(row["sorted_up"]) >= 0).all()
        assert (np.diff(row["sorted_down"]) <= 0).all()
        picked = oracle.top_k(scores, k, sorted=False)[1]
        picked = dict(zip(labels, picked, strict=True))
        assert picked["winners_last"].max() == n - 1
        assert np.ptp(picked["winners_in_one_region"]) == k - 1
        assert (row["ties_that_fit"] == 0.75).sum() == 3 * k // 4
        assert (row["kth_in_a_crowd_of_neighbours"] >= 10).sum() == k - 20
        crowd = row["kth_in_a_crowd_of_neighbours"]
        assert ((crowd >= 1.5) & (crowd < 10)).sum() == 100
        bits = oracle.unsigned_bits(scores)
        least = np.iinfo(bits.dtype).max
        assert (bits[labels.index("least_of_all")] == least).sum() == n - k + 3
        special = row["few_of_each_special_value"]
        assert np.isnan(special).sum() == 11 and np.isinf(special).sum() == 2
        assert picked["last_column"].max() == n - 1
        halves = picked["winners_at_both_ends"]
        assert ((halves < k) | (halves >= n - k)).all()
    f32 = inputs.DISTRIBUTIONS["descending_above_fp16"]
    down = f32(np.random.default_rng(0), 1, n, k, np.float32)
    assert (np.diff(down) < 0).all() and down.min() > 65504

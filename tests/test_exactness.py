# SPDX-License-Identifier: Apache-2.0
"""No distribution of scores makes the answer approximate."""

import functools
import pathlib

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from devices import plan

DTYPES = [np.float32, jnp.bfloat16, np.float16]
# From rows that fit in registers to rows that several CTAs share.
SHAPES = [(40, 1), (1000, 16), (4099, 705), (16411, 2048), (70001, 512)]


@functools.lru_cache(maxsize=4)
def every_distribution(n, k, dtype):
    """One row of each distribution, shared by the implementations."""
    labels, scores = inputs.batch(n, k, dtype)
    return labels, scores, [oracle.top_k(scores, k, sorted=s) for s in (False, True)]


@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_distribution_is_selected_exactly(implementation, n, k, dtype, sorted):
    labels, scores, expected = every_distribution(n, k, dtype)
    implementation.check(
        scores, k, sorted=sorted, labels=labels, expected=expected[sorted]
    )


@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_distribution_is_exact_where_the_planner_decides(
    other_implementation, dtype, sorted
):
    n, k = 4099, 16  # XLA's own GPU top-k breaks ties wrongly up to k = 16
    labels, scores, expected = every_distribution(n, k, dtype)
    other_implementation.check(
        scores, k, sorted=sorted, labels=labels, expected=expected[sorted]
    )


@functools.lru_cache(maxsize=2)
def long_rows(first, dtype):
    """So few rows and so long that each is shared by CTAs, or by threads."""
    n, k = (1 << 20) + 9, 2048  # from 2^20 columns on threads share a row on CPU
    names = list(inputs.DISTRIBUTIONS)[first : first + 3]
    labels, scores = inputs.batch(n, k, dtype, (names * 3)[:3])
    return labels, scores, oracle.top_k(scores, k, sorted=False)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("first", range(0, len(inputs.DISTRIBUTIONS), 3))
def test_every_distribution_is_selected_exactly_in_a_long_row(
    implementation, first, dtype
):
    labels, scores, expected = long_rows(first, dtype)
    implementation.check(scores, 2048, sorted=False, labels=labels, expected=expected)


@pytest.mark.parametrize(
    ("n", "num_samples"),
    [
        (70_008, (512, 1024, 2048, 4096, 8192)),
        (400_008, (2048,)),
        (400_008, (4096,)),
        (400_008, (8192,)),
    ],
    ids=["many-rows", "2048-samples", "4096-samples", "8192-samples"],
)
def test_a_sample_that_misleads_costs_time_and_nothing_else(
    implementation, n, num_samples
):
    batches = [inputs.against_the_sample(n, one) for one in num_samples]
    scores = np.concatenate([rows for _, rows in batches])
    labels = [label for names, _ in batches for label in names]
    if len(num_samples) == 1:  # few enough rows for each to be shared
        for i in range(0, len(scores), 2):
            implementation.check(scores[i : i + 2], 2048, labels=labels[i : i + 2])
    else:
        implementation.check(scores, 2048, labels=labels)


@pytest.mark.parametrize("device", ["H200", "GB10"])
def test_the_kernels_draw_samples_of_a_number_that_was_tried_above(device):
    for rows, n, several in ((40, 70_008, (1024, 2048, 4096)), (2, 400_008, (8192,))):
        for name in ("", "row", "split"):
            made = plan(device, rows, n, 2048, implementation=name)
            assert made.num_samples in several


@pytest.mark.parametrize("k", [512, 2048])
def test_one_bin_just_below_at_and_above_common_buffer_sizes(implementation, k):
    rng = inputs.generator("one bin")
    around = np.array([3708, 4096, 16384])[:, None] + [-1, 0, 1]
    lengths = np.resize(around, 33).astype(np.int32)
    scores = rng.uniform(1.0, 1.245, (33, 16400)).astype(np.float32)
    implementation.check(scores, k, lengths)


def test_descending_integers_above_65504_on_each_of_fifty_calls(implementation):
    length, n, k = 4096, 806_736, 512
    scores = np.full((1, n), -np.inf, np.float32)
    scores[0, :length] = 806_736 - np.arange(length)
    select = implementation.jitted(k)
    operands = jax.device_put(
        (scores, np.array([length], np.int32), None), implementation.device
    )
    for _ in range(50):
        values, indices = jax.device_get(select(*operands))
        assert indices.tolist() == [list(range(k))]
        assert values.tobytes() == scores[0, :k].tobytes()


def test_narrow_scores_around_a_mean_in_long_ragged_rows(implementation):
    rows, length, n, k = 33, 134_249, 262_144, 2048
    rng = inputs.generator("narrow mean")
    scores = np.full((rows, n), 1e30, np.float32)
    scores[:, :length] = 0.7 + 0.014 * rng.standard_normal((rows, length), np.float32)
    lengths = np.full(rows, length, np.int32)
    implementation.check(scores, k, lengths, sorted=False)


@pytest.mark.parametrize("winners_first", [0, 8000, 3333])
def test_every_slot_is_written_when_few_winners_stand_on_a_plateau(
    implementation, winners_first
):
    n, k, rows = 8500, 2048, 5
    rng = inputs.generator("few winners", winners_first)
    scores = np.full((rows, n), -0.5, np.float32)
    scores[:, winners_first : winners_first + 500] = rng.random((rows, 500))
    with jax.default_device(implementation.device):
        # The memory that the outputs get held this before.
        for _ in range(4):
            garbage = [jnp.full((rows, k), 7.5), jnp.full((rows, k), 7, np.int32)]
            jax.block_until_ready(garbage)
            for buffer in garbage:
                buffer.delete()
            implementation.check(scores, k)


def test_more_infinities_than_k_and_fewer_finite_scores_than_k(implementation):
    n, k = 9001, 300
    rng = inputs.generator("infinities")
    scores = rng.standard_normal((6, n)).astype(np.float32)
    for row, count in enumerate((k - 1, k, k + 1, n)):
        scores[row, rng.permutation(n)[:count]] = np.inf
    scores[4:] = -np.inf
    scores[4, rng.permutation(n)[: k - 1]] = 1.0
    lengths = np.array([n, n, n, n, n, k + 5], np.int32)
    implementation.check(scores, k, lengths)


DATA = pathlib.Path(__file__).parent.parent / "examples/data/indexer_scores.npz"


@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_real_indexer_scores(implementation, dtype, sorted):
    with np.load(DATA) as data:
        scores, lengths = data["scores"].astype(dtype), data["lengths"]
    assert scores.shape == (8, 65_536) and (scores == 0).mean() > 0.1
    implementation.check(scores, 2048, lengths, sorted=sorted)

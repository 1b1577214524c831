# SPDX-License-Identifier: Apache-2.0
"""Ties go to the smaller index, and the same question has one answer, to the bit."""

import concurrent.futures

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

TIED = [
    *("groups_of_four", "bf16_rounded", "plateau", "half_zeros", "all_equal"),
    *("signed_zeros", "two_plateaus", "three_plateaus_and_noise", "sawtooth"),
    *("winners_last", "k_plus_one_winners_on_a_plateau", "late_plateau"),
]


@pytest.mark.parametrize(("n", "k"), [(20_011, 512), (131_072, 2048)])
def test_equal_scores_are_taken_by_ascending_index(implementation, n, k):
    labels, scores = inputs.batch(n, k, np.float32, TIED)
    implementation.check(scores, k, labels=labels)


def test_a_hundred_calls_give_the_same_bits(implementation):
    n, k = 20_011, 512
    labels, scores = inputs.batch(n, k, np.float32, TIED)
    for sorted in (True, False):
        select = implementation.jitted(k, sorted)
        operands = jax.device_put((scores, None, None), implementation.device)
        want = oracle.top_k(scores, k, sorted=sorted)
        for _ in range(100):
            got = jax.device_get(select(*operands))
            oracle.check(got, scores, k, sorted=sorted, labels=labels, expected=want)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_fewer_are_a_prefix_of_more(implementation, dtype):
    n = 3001
    _, scores = inputs.batch(n, 705, dtype)
    more = implementation(scores, 706)
    for k in (1, 63, 64, 704, 705):
        fewer = implementation(scores, k)
        assert fewer.values.tobytes() == more.values[:, :k].tobytes()
        assert fewer.indices.tobytes() == more.indices[:, :k].tobytes()


def test_the_order_asked_for_does_not_change_the_set(implementation):
    n, k = 4099, 705
    _, scores = inputs.batch(n, k, np.float32)
    by_value = implementation(scores, k, sorted=True)
    by_index = implementation(scores, k, sorted=False)
    order = np.argsort(by_value.indices, axis=-1)
    for a, b in zip(by_value, by_index, strict=True):
        assert np.take_along_axis(a, order, -1).tobytes() == b.tobytes()
    assert (np.diff(by_index.indices) > 0).all()


def test_a_row_alone_gets_the_answer_it_gets_in_a_batch(implementation):
    n, k = 40_009, 300
    names = list(inputs.DISTRIBUTIONS)
    labels, scores = inputs.batch(n, k, np.float32)
    together = implementation(scores, k)
    for name in (*TIED, "normal", "nan_83_percent", "random_bits"):
        row = names.index(name)
        alone = implementation(scores[row : row + 1], k)
        for a, b in zip(together, alone, strict=True):
            assert a[row].tobytes() == b[0].tobytes(), labels[row]


def test_threads_that_share_an_executable_do_not_disturb_each_other(implementation):
    n, k = 20_011, 512
    batches = []
    for seed in range(4):
        rng = inputs.generator("threads", seed)
        batches.append(rng.integers(-99, 99, (5, n)).astype(np.float32))
    want = [oracle.top_k(scores, k) for scores in batches]
    implementation.check(batches[0], k)  # compiled before the threads race

    def work(i):
        for _ in range(20):
            implementation.check(batches[i], k, expected=want[i])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, i) for i in range(4)]:
            done.result()

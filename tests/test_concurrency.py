# SPDX-License-Identifier: Apache-2.0
"""Calls that run beside others: no hang, and the same bits."""

import concurrent.futures
import functools

import inputs
import jax
import numpy as np
import oracle
import other_stream
import pytest
from implementations import Implementation

pytestmark = pytest.mark.gpu

N, K, ROWS = 1200, 32, 6
SPLIT = Implementation("split", "cuda", (6, 200, 0, 0, 0))
OVERFLOWING = Implementation("split", "cuda", (8, 1, 16, 0, 0))
ROW = Implementation("row", "cuda", (0, 1, 16, 0, 2))
CLUSTER = Implementation("cluster", "cuda", (4, 200, 64, 0, 0))
HELD = Implementation("cluster", "cuda", (4, 1, 0, 0, 0))
HAS_CLUSTERS = pytest.mark.gpu(clusters=True)


@functools.cache
def batches(steps, rows=ROWS, n=N):
    """Batches of the stacked shape (steps, rows, n), their lengths, their answers."""
    rng = inputs.generator("concurrency", steps, rows, n)
    scores = rng.integers(-99, 99, (steps, rows, n)).astype(np.float32)
    lengths = rng.integers(-1, n + 2, (steps, rows)).astype(np.int32)
    lengths[:, ::3] = n
    return scores, lengths, oracle.top_k(scores, K, lengths)


def scanned(*implementations):
    """A jitted scan, with a call of each of the implementations in each step."""

    def step(_, one):
        results = [
            tuple(bent.jitted(K)(one[0], one[1], None)) for bent in implementations
        ]
        return None, tuple(results)

    return jax.jit(lambda *xs: jax.lax.scan(step, None, xs)[1])


def check_all(results, given):
    scores, lengths, expected = given
    for result in results:
        oracle.check(jax.device_get(result), scores, K, lengths, expected=expected)


def test_two_calls_side_by_side_in_ten_thousand_steps():
    given = batches(1000)
    program = scanned(SPLIT, OVERFLOWING)
    operands = jax.device_put(given[:2], SPLIT.device)
    for _ in range(10):
        check_all(program(*operands), given)


@HAS_CLUSTERS
def test_clusters_beside_other_calls_in_two_thousand_steps():
    given = batches(1000)
    operands = jax.device_put(given[:2], CLUSTER.device)
    for other in (SPLIT, CLUSTER, HELD):
        program = scanned(CLUSTER, other)
        check_all(program(*operands), given)


def test_threads_that_share_an_executable_and_threads_with_their_own():
    given = batches(500)
    shared = scanned(SPLIT)
    own = [scanned(OVERFLOWING), scanned(ROW, SPLIT)]
    operands = jax.device_put(given[:2], SPLIT.device)

    def work(program):
        for _ in range(5):
            check_all(program(*operands), given)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, one) for one in (shared, shared, *own)]:
            done.result()


@pytest.mark.parametrize("per_sm", [1, 2], ids=["half-the-threads", "every-thread"])
@pytest.mark.parametrize(
    ("name", "bent"),
    [
        pytest.param("split", (SPLIT, OVERFLOWING), id="split"),
        pytest.param("cluster", (CLUSTER, HELD), id="cluster", marks=HAS_CLUSTERS),
    ],
)
def test_while_another_stream_holds_the_sms(name, bent, per_sm):
    """Whoever spins on a CTA that is not resident would hang here."""
    given = batches(200)
    long = Implementation(name, "cuda")  # as many CTAs as there are SMs, or can be
    rng = inputs.generator("long")
    wide = rng.integers(-99_999, 99_999, (2, 400_009)).astype(np.float32)
    want = oracle.top_k(wide, K)
    program = scanned(*bent)
    operands = jax.device_put(given[:2], SPLIT.device)
    check_all(program(*operands), given)  # compiled before the SMs are taken
    long.check(wide, K, expected=want)
    with other_stream.Spinner(per_sm) as spinner:
        for i in range(6):
            spinner.launch(milliseconds=30 + 7 * i)
            check_all(program(*operands), given)
            long.check(wide, K, expected=want)
        assert spinner.launches == 6


def test_two_devices_in_one_process():
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    rng = inputs.generator("two devices")
    wide = rng.integers(-99_999, 99_999, (2, 400_009)).astype(np.float32)
    want = oracle.top_k(wide, 2048)
    given = batches(200)

    def work(device):
        for implementation in ("split", "row"):
            select = Implementation(implementation, "cuda").jitted(2048)
            operands = jax.device_put((wide, None, None), device)
            for _ in range(5):
                result = jax.device_get(select(*operands))
                oracle.check(result, wide, 2048, expected=want)
        operands = jax.device_put(given[:2], device)
        for _ in range(5):
            check_all(scanned(SPLIT)(*operands), given)

    for device in devices[:2]:
        work(device)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, device) for device in devices[:2]]:
            done.result()

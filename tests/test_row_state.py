# SPDX-License-Identifier: Apache-2.0
"""Nothing is carried from one row, call, replay or neighbour to the next.

The split kernel's CTAs meet in a workspace of arbitrary bytes. Its geometry is bent so
that small rows are shared by several CTAs and thousands of calls take no time.
"""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from devices import plan
from implementations import Implementation

INT_MIN = -(2**31)
N, K = 1000, 48
SPLIT = Implementation("split", "cuda", (4, 256, 0, 0, 0))
OVERFLOWING = Implementation("split", "cuda", (5, 1, 16, 0, 0))
ROW = Implementation("row", "cuda", (0, 1, 16, 0, 2))
CLUSTER = Implementation("cluster", "cuda", (4, 1, 16, 0, 0))
HELD = Implementation("cluster", "cuda", (4, 1, 0, 0, 0))
EACH = pytest.mark.parametrize(
    "bent",
    [
        pytest.param(bent, id=str(bent), marks=bent.mark)
        for bent in (SPLIT, OVERFLOWING, ROW, CLUSTER, HELD)
    ],
)


@pytest.mark.parametrize("bent", [SPLIT, OVERFLOWING], ids=str)
def test_rows_of_these_tests_are_shared_by_several_ctas(bent):
    made = plan("H200", 8, N, K, implementation="split", geometry=bent.geometry)
    assert made.ctas_per_row == bent.geometry[0] and made.capacity < N


@functools.cache
def contents(rows, n, k):
    """Batches of different contents, and of distributions that take different paths."""
    names = ["normal", "plateau", "narrow_bin", "all_equal", "random_bits"]
    names += ["sorted_up", "winners_last", "nan_83_percent", "two_plateaus"]
    _, scores = inputs.batch(n, k, np.float32, names)
    return [np.roll(scores, i, axis=0)[np.arange(rows) % 9] for i in range(9)]


def select(bent, scores, k, lengths=None, sorted=True):
    return bent.jitted(k, sorted)(scores, lengths, None)


@EACH
def test_lengths_that_rotate_at_every_call(bent):
    ends = [INT_MIN, -1, 0, 1, K - 1, K, K + 1, N - 1, N, N + 17, 2**31 - 1]
    for call in range(3 * len(ends)):
        lengths = np.roll(ends, call).astype(np.int32)
        scores = contents(len(ends), N, K)[call % 9]
        bent.check(scores, K, lengths)


@EACH
def test_short_rows_between_long_ones(bent):
    n, rows = 100 * K, 12
    batches = contents(rows, n, K)
    for call, pattern in enumerate(
        ([n, 3, n], [K - 1, n], [n, K, K + 1], [2, n, n, 0])
    ):
        lengths = np.resize(pattern, rows).astype(np.int32)
        for scores in batches[call : call + 3]:
            bent.check(scores, K, lengths)


@EACH
def test_ten_thousand_calls_in_scans(bent):
    rows, n, k, steps = 3, 600, 16, 1000
    rng = inputs.generator("scan")
    scores = rng.integers(-99, 99, (steps, rows, n)).astype(np.float32)
    lengths = rng.integers(-1, n + 2, (steps, rows)).astype(np.int32)
    want = oracle.top_k(scores, k, lengths)

    @jax.jit
    def scanned(scores, lengths):
        def step(_, one):
            return (None, tuple(select(bent, one[0], k, one[1])))

        return jax.lax.scan(step, None, (scores, lengths))[1]

    operands = jax.device_put((scores, lengths), bent.device)
    for _ in range(10):
        got = jax.device_get(scanned(*operands))
        oracle.check(got, scores, k, lengths, expected=want)


@EACH
def test_twelve_call_sites_in_one_program(bent):
    rows = 6
    shapes = [(N, K), (700, 33), (N, K), (2051, 100)] * 3

    @jax.jit
    def program(batches):
        return [
            select(bent, scores, k, sorted=i % 2 == 0)
            for i, (scores, (_, k)) in enumerate(zip(batches, shapes, strict=True))
        ]

    for call in range(6):
        batches = [
            contents(rows, n, k)[(call + i) % 9] for i, (n, k) in enumerate(shapes)
        ]
        results = jax.device_get(program(jax.device_put(batches, bent.device)))
        for i, (scores, (_, k)) in enumerate(zip(batches, shapes, strict=True)):
            oracle.check(results[i], scores, k, sorted=i % 2 == 0)


@EACH
def test_programs_of_other_shapes_in_between(bent):
    for call in range(12):
        for rows, n, k in ((8, N, K), (3, 4001, 128), (20, 130, 5)):
            bent.check(contents(rows, n, k)[call % 9], k)


@EACH
def test_whatever_the_memory_held_before(bent):
    rows = 8
    patterns = [0x00, 0xFF, 0x5A, 0x7F, None]
    rng = inputs.generator("poison")
    with jax.default_device(bent.device):
        for call in range(4 * len(patterns)):
            # The allocator gives the call memory that these buffers have just left.
            poison = []
            for size in (1 << 12, 1 << 14, 1 << 16, 1 << 18, rows * K * 4):
                pattern = patterns[call % len(patterns)]
                fill = rng.bytes(size) if pattern is None else bytes([pattern]) * size
                poison += [jnp.array(np.frombuffer(fill, np.uint8)) for _ in range(3)]
            jax.block_until_ready(poison)
            for buffer in poison:
                buffer.delete()
            bent.check(contents(rows, N, K)[call % 9], K)


@EACH
def test_scratch_that_other_ops_of_the_program_have_used(bent):
    rows = 8

    @jax.jit
    def program(scores, seed):
        # Sorts need scratch and leave their bytes in it before each selection.
        results = []
        for i in range(3):
            noise = jax.lax.iota(np.uint32, 1 << 15) * (seed + np.uint32(2 * i + 1))
            largest = jnp.sort(noise)[-1]
            scores = jnp.where(largest == 1, 0, scores)  # never so, but who knows
            results.append(select(bent, scores, K))
            scores = -scores
        return results

    numbers = contents(rows, N, K)[0]
    numbers = np.where(np.isfinite(numbers), numbers, 7).astype(np.float32)
    for call in range(6):
        scores = np.roll(numbers, call, axis=0)
        results = program(*jax.device_put((scores, np.uint32(call)), bent.device))
        for result, given in zip(jax.device_get(results), (1, -1, 1), strict=True):
            oracle.check(result, np.float32(given) * scores, K)


@EACH
def test_a_loop_whose_trip_count_is_data(bent):
    rows = 4

    @jax.jit
    def program(scores, turns):
        def body(state):
            i, scores, _ = state
            rolled = jnp.roll(scores, 1, axis=0)
            return i + 1, rolled, tuple(select(bent, rolled, K, sorted=False))

        first = tuple(select(bent, scores, K, sorted=False))
        state = jax.lax.while_loop(lambda s: s[0] < turns, body, (0, scores, first))
        return state[2]

    for turns in (0, 1, 5, 2):
        scores = contents(rows, N, K)[turns]
        got = jax.device_get(program(*jax.device_put((scores, turns), bent.device)))
        oracle.check(got, np.roll(scores, turns, axis=0), K, sorted=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",
    ["--xla_gpu_graph_min_graph_size=1", "--xla_gpu_enable_command_buffer="],
    ids=["every-call-in-a-graph", "no-graphs"],
)
def test_replays_at_unchanged_addresses_see_the_new_contents(python_under, flags):
    assert "all calls right" in python_under(flags, "replay.py")

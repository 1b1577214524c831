# SPDX-License-Identifier: Apache-2.0
"""More than 2**31 of what `test_shapes.py` does not have so many of."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import raw_calls
from implementations import Implementation, kernels, parameters

pytestmark = pytest.mark.gpu

KERNELS = pytest.mark.parametrize("name", kernels())


def test_more_than_2_to_31_answers():
    """Tiny rows whose answers, mostly padding, are what takes the room."""
    rows, n, k = (1 << 19) + 9, 3, 4096
    row = Implementation("row", "cuda")
    row.skip_without_room(30)
    rng = inputs.generator("answers")
    scores = rng.integers(-9, 9, (rows, n)).astype(jnp.bfloat16)
    lengths = rng.integers(-1, n + 2, rows).astype(np.int32)
    operands = jax.device_put((scores, lengths, None), row.device)
    result = row.jitted(k)(*operands)
    for part in (slice(0, 3), slice((1 << 18) - 2, (1 << 18) + 2), slice(-12, None)):
        got = jax.device_get((result.values[part], result.indices[part]))
        oracle.check(got, scores[part], k, lengths[part])
    for x in result:
        x.delete()


def test_more_than_2_to_31_bytes_of_workspace():
    geometry = (8, 1, 0, 0, 0)
    n, k = 8200, 4096
    size = raw_calls.workspace_bytes(1, n, k, geometry)
    rows = (1 << 31) // size + 9
    bent = Implementation("split", "cuda", geometry)
    bent.skip_without_room(8)
    rng = inputs.generator("workspace")
    few = rng.integers(-999, 999, (101, n)).astype(jnp.bfloat16)
    scores = jnp.tile(jax.device_put(few, bent.device), (rows // 101 + 1, 1))[:rows]
    result = bent.jitted(k, False)(scores, None, None)
    values, indices = oracle.top_k(few, k, sorted=False)
    which = np.arange(rows) % 101
    with jax.default_device(bent.device):
        bits = jax.lax.bitcast_convert_type(result.values, np.uint16)
        wanted = jnp.asarray(oracle.unsigned_bits(values))[which]
        assert bool(jnp.array_equal(bits, wanted))
        assert bool(jnp.array_equal(result.indices, jnp.asarray(indices)[which]))


@KERNELS
@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
def test_131072_rows(name, sorted):
    rows, n, k = 131_072, 150, 16
    rng = inputs.generator("rows")
    scores = rng.integers(-40, 40, (rows, n)).astype(np.float32)
    lengths = rng.integers(-1, n + 2, rows).astype(np.int32)
    Implementation(name, "cuda").check(scores, k, lengths, sorted=sorted)


@KERNELS
def test_ties_beyond_the_24_bits_of_a_float(name):
    n, k = (1 << 24) + 70_001, 1000
    scores = np.full((2, n), -1, np.float32)
    scores[0, (1 << 24) + 1 :: 131] = 0  # fewer than k: columns 0, 1, ... follow
    scores[1, (1 << 24) + 1 :: 3] = 0  # more than k
    for sorted in (True, False):
        Implementation(name, "cuda").check(scores, k, sorted=sorted)


THOUSANDS = [
    Implementation("row", "cuda", (0, 1, 16, 0, 2)),
    Implementation("row", "cuda", (0, 0, 0, 0, 1)),
    Implementation("cluster", "cuda", (2, 1, 16, 0, 0)),
    Implementation("cluster", "cuda", (8, 256, 64, 0, 0)),
    Implementation("cluster", "cuda", (4, 1, 0, 0, 0)),
]


@pytest.mark.parametrize("bent", parameters(THOUSANDS))
@pytest.mark.parametrize("sorted", [True, False], ids=["sorted", "unsorted"])
def test_an_sm_goes_through_thousands_of_rows(bent, sorted):
    """Whatever a row leaves in shared memory meets the next row of another kind."""
    n, k = 900, 100
    names = ["normal", "all_equal", "plateau", "random_bits", "winners_last"]
    labels, scores = inputs.batch(n, k, np.float32, names)
    rng = inputs.generator("one cta")
    which = rng.integers(0, len(labels), 3000)
    lengths = rng.choice([n, n, 1, k, k + 1, 0, 300], 3000).astype(np.int32)
    bent.check(scores[which], k, lengths, sorted=sorted)


@KERNELS
def test_the_largest_k_in_a_row_of_a_million(name):
    n, k = 1_000_003, 4096
    labels, scores = inputs.batch(n, k, np.float32, ["normal", "plateau", "sorted_up"])
    for sorted in (True, False):
        Implementation(name, "cuda").check(scores, k, sorted=sorted, labels=labels)

# SPDX-License-Identifier: Apache-2.0
"""Loops, branches and rematerialisation keep the answer and the number of calls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.ad_checkpoint import checkpoint_name

from jax_topk import top_k

N, K = 300, 20


def test_scan_with_captured_scores(platform, scores, lengths):
    def step(carry, length):
        return carry + 1, tuple(top_k(scores, K, lengths=length))

    _, stacked = jax.jit(lambda n: jax.lax.scan(step, 0, n))(lengths)
    for i, length in enumerate(lengths):
        oracle.check([x[i] for x in stacked], scores, K, length)


def test_cond_while_and_map(platform, scores, lengths):
    def few(x):
        return tuple(top_k(x, K, lengths=lengths))

    def all_(x):
        return tuple(top_k(x, K))

    choose = jax.jit(lambda p, x: jax.lax.cond(p, few, all_, x))
    oracle.check(choose(True, scores), scores, K, lengths)
    oracle.check(choose(False, scores), scores, K)
    mapped = jax.vmap(lambda p, x: jax.lax.cond(p, all_, all_, x))
    oracle.check(mapped(np.array([True, False, True]), scores), scores, K)
    oracle.check(jax.lax.map(lambda x: tuple(top_k(x, K)), scores), scores, K)

    def body(state):
        i, x, _ = state
        return i + 1, -x, tuple(top_k(x, K, sorted=False))

    @jax.jit
    def program(x):
        first = tuple(top_k(x, K, sorted=False))
        return jax.lax.while_loop(lambda s: s[0] < 3, body, (0, -x, first))[2]

    oracle.check(program(scores), -scores, K, sorted=False)


def test_remat(platform, scores):
    def loss(x):
        return jnp.sum(top_k(-2 * x, K).values)

    want = jax.grad(loss)(scores)
    np.testing.assert_array_equal(jax.grad(jax.checkpoint(loss))(scores), want)


def selections(function, *arguments):
    """How often a program selects, inner programs included."""
    return len(re.findall(r"= top_k\[", str(jax.make_jaxpr(function)(*arguments))))


def test_a_plain_checkpoint_selects_again_and_a_policy_does_not(platform, scores):
    def loss(x):
        return jnp.sum(top_k(-2 * x, K).values ** 2)

    def keep(primitive, *_, **__):
        return primitive.name == "top_k"

    want = jax.grad(loss)(scores)
    policies = jax.checkpoint_policies
    for policy, count in (
        (None, 2),
        (policies.nothing_saveable, 2),
        (policies.everything_saveable, 1),
        (policies.save_only_these_names("top_k"), 1),
        (policies.save_any_names_but_these("top_k"), 2),
        (keep, 1),
    ):
        gradient = jax.grad(jax.checkpoint(loss, policy=policy))
        assert selections(gradient, scores) == count
        np.testing.assert_array_equal(jax.jit(gradient)(scores), want)


def test_a_name_given_to_the_answer_can_be_saved(platform, scores):
    def loss(x):
        best = checkpoint_name(top_k(x, K), "best")
        return jnp.sum(best.values**2) + jnp.sum(
            jnp.take_along_axis(x, best.indices, -1)
        )

    policy = jax.checkpoint_policies.save_only_these_names("best")
    saved = jax.grad(jax.checkpoint(loss, policy=policy))
    np.testing.assert_array_equal(saved(scores), jax.grad(loss)(scores))


def test_a_loop_that_is_unrolled_and_one_that_runs_backwards(platform, scores):
    rows = scores.reshape(-1, N)
    for options in ({"unroll": 3}, {"reverse": True}):
        _, result = jax.jit(
            lambda x, options=options: jax.lax.scan(
                lambda c, row: (c, top_k(row, K)), 0, x, **options
            )
        )(rows)
        oracle.check(result, rows, K)


def test_gradients_through_a_scan(platform, scores):
    rows = scores.reshape(-1, N)

    def loss(x):
        return jax.lax.scan(lambda c, r: (c + top_k(r, K).values.sum(), None), 0.0, x)[
            0
        ]

    want = jax.grad(lambda x: top_k(x, K).values.sum())(rows)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(rows), want)


def test_fori_loop_with_lengths_that_grow(platform, scores):
    # Sequence lengths of a decoding loop: data of the loop, never of the host.
    def step(i, carry):
        best, length = carry
        selected = top_k(scores, K, lengths=length, sorted=False)
        return best.at[i].set(selected.indices), length + 7

    @jax.jit
    def decode(length, steps):
        best = jnp.zeros((5, 3, 4, K), np.int32)
        return jax.lax.fori_loop(0, steps, step, (best, length))[0]

    length = np.arange(12, dtype=np.int32).reshape(3, 4)
    got = decode(length, 5)  # a traced trip count: a while loop
    for i in range(5):
        _, want = oracle.top_k(scores, K, length + 7 * i, sorted=False)
        np.testing.assert_array_equal(got[i], want)


def test_switch_between_ks(platform, scores):
    ks = (1, 5, K)

    def padded(k):
        return lambda x: jnp.pad(top_k(x, k).indices, ((0, 0), (0, 0), (0, K - k)))

    choose = jax.jit(lambda i, x: jax.lax.switch(i, [padded(k) for k in ks], x))
    for i, k in enumerate(ks):
        _, want = oracle.top_k(scores, k)
        np.testing.assert_array_equal(choose(i, scores)[..., :k], want)


def test_lax_map_in_batches(platform, scores):
    rows = scores.reshape(-1, N)
    result = jax.lax.map(lambda x: top_k(x, K), rows, batch_size=5)
    oracle.check(result, rows, K)


def test_a_selection_feeds_the_next_one(platform, scores):
    @jax.jit
    def twice(x):
        first = top_k(x, 100, sorted=False)
        second = top_k(first.values, K)
        return second.values, jnp.take_along_axis(first.indices, second.indices, -1)

    oracle.check(twice(scores), scores, K)

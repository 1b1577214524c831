# SPDX-License-Identifier: Apache-2.0
"""Derivatives: a gather at the indices forward, a scatter-add at them backward."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_topk import top_k

N, K = 300, 20


def pulled_back(scores, cotangent, lengths=None):
    """The gradient of the scores: the cotangent at the oracle's indices."""
    _, indices = oracle.top_k(scores, K, lengths)
    gradient = np.zeros(scores.shape, np.float32)
    for row in np.ndindex(scores.shape[:-1]):
        real = indices[row] >= 0  # padding pulls back to nothing
        gradient[row][indices[row][real]] = cotangent[row][real]
    return gradient


def test_gradients_scatter_to_the_selected_columns(platform, scores, lengths):
    cotangent = inputs.generator("cotangent").standard_normal((3, 4, K))
    cotangent = cotangent.astype(np.float32)
    for given in (None, lengths):

        def loss(x, given=given):
            values = top_k(x, K, lengths=given).values
            return jnp.sum(jnp.where(jnp.isneginf(values), 0, values * cotangent))

        want = pulled_back(scores, cotangent, given)
        for gradient in (
            jax.grad(loss),
            jax.jit(jax.grad(loss)),
            jax.grad(jax.jit(loss)),
        ):
            np.testing.assert_array_equal(gradient(scores), want)


def test_vjp_ignores_the_padding(platform, scores, lengths):
    def select(x):
        return top_k(x, K, lengths=lengths).values

    _, pull = jax.vjp(select, scores)
    cotangent = np.arange(12 * K, dtype=np.float32).reshape(3, 4, K) + 1
    (gradient,) = pull(jnp.asarray(cotangent))
    np.testing.assert_array_equal(gradient, pulled_back(scores, cotangent, lengths))


def test_forward_derivatives_gather_the_tangents(platform, scores, lengths):
    tangent = inputs.generator("tangent").standard_normal(scores.shape)
    tangent = tangent.astype(np.float32)

    def select(x):
        return top_k(x, K, lengths=lengths)

    result, (dvalues, dindices) = jax.jvp(select, (scores,), (tangent,))
    oracle.check(result, scores, K, lengths)
    _, indices = oracle.top_k(scores, K, lengths)
    want = np.take_along_axis(tangent, np.maximum(indices, 0), -1)
    np.testing.assert_array_equal(dvalues, np.where(indices < 0, 0, want))
    assert dindices.dtype == jax.dtypes.float0 and dindices.shape == indices.shape


def test_vmap_of_grad_equals_grad_of_vmap(platform, scores):
    cotangent = np.arange(K, dtype=np.float32) + 1

    def loss(row):
        return jnp.sum(top_k(row, K).values * cotangent)

    rows = scores.reshape(-1, N)
    inner = jax.vmap(jax.grad(loss))(rows)
    outer = jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x)))(rows)
    want = pulled_back(rows, np.broadcast_to(cotangent, (12, K)))
    np.testing.assert_array_equal(inner, want)
    np.testing.assert_array_equal(outer, want)


def test_second_derivatives(platform):
    row = np.array([3.0, 1.0, 2.0], np.float32)

    def loss(x):
        return jnp.sum(top_k(x, 2).values ** 3)

    for hessian in (jax.hessian(loss), jax.jacrev(jax.jacfwd(loss))):
        np.testing.assert_array_equal(hessian(row), np.diag([18.0, 0.0, 12.0]))


def test_hessian_vector_products(platform, scores, lengths):
    rng = inputs.generator("hvp")
    tangent = rng.integers(-9, 9, scores.shape).astype(np.float32)

    def loss(x):
        values = top_k(x, K, lengths=lengths).values
        return jnp.sum(jnp.where(jnp.isneginf(values), 0, values) ** 3)

    at = np.zeros(scores.shape, np.float32)
    _, indices = oracle.top_k(scores, K, lengths)
    for row in np.ndindex(scores.shape[:-1]):
        at[row][indices[row][indices[row] >= 0]] = 1
    want = at * 6 * scores * tangent
    _, forward = jax.jvp(jax.grad(loss), (scores,), (tangent,))
    reverse = jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), tangent))(scores)
    np.testing.assert_array_equal(forward, want)
    np.testing.assert_array_equal(reverse, want)


def test_linearize_and_jacobians_agree(platform):
    row = np.array([3.0, 1.0, 2.0, 5.0], np.float32)

    def select(x):
        return top_k(x, 3, lengths=2).values

    want = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]], np.float32)
    for jacobian in (jax.jacfwd, jax.jacrev):
        np.testing.assert_array_equal(jacobian(select)(row), want)
    values, linear = jax.linearize(select, row)
    np.testing.assert_array_equal(values, [3, 1, -np.inf])
    np.testing.assert_array_equal(linear(row), [3, 1, 0])
    np.testing.assert_array_equal(
        jax.linear_transpose(linear, row)(values * 0 + 1)[0], [1, 1, 0, 0]
    )


def test_integers_and_rows_have_no_derivative(platform, scores, lengths):
    def values(x, r, s):
        return jnp.sum(top_k(x, K, lengths=r, starts=s).values[..., 0])

    starts = np.zeros((3, 4), np.int32)
    gradients = jax.grad(values, argnums=(1, 2), allow_int=True)(
        scores, np.maximum(lengths, 1), starts
    )
    for gradient in gradients:
        assert gradient.dtype == jax.dtypes.float0 and gradient.shape == (3, 4)

    whole = scores.astype(np.int32)
    none = np.zeros(whole.shape, jax.dtypes.float0)
    result, moved = jax.jvp(lambda x: top_k(x, K), (whole,), (none,))
    oracle.check(result, whole, K)
    assert moved.values.dtype == moved.indices.dtype == jax.dtypes.float0


def test_nothing_flows_through_the_indices(platform, scores):
    def loss(x):
        return jnp.sum(top_k(x, K).indices * 1.0)

    assert not np.any(jax.grad(loss)(scores))


def test_an_infinite_or_nan_score_has_a_derivative_too(platform):
    row = np.array([np.nan, -np.inf, 1, np.inf], np.float32)
    gradient = jax.grad(lambda x: (top_k(x, 4).values * jnp.arange(1.0, 5)).sum())
    np.testing.assert_array_equal(gradient(row), [1, 4, 3, 2])


def test_the_order_of_the_answer_is_that_of_the_derivative(platform):
    row, weights = np.array([4, 9, 2], np.float32), np.array([1, 10], np.float32)
    for sorted, want in ((True, [10, 1, 0]), (False, [1, 10, 0])):

        def loss(x, sorted=sorted):
            return (top_k(x, 2, sorted=sorted).values * weights).sum()

        np.testing.assert_array_equal(jax.grad(loss)(row), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
def test_gradients_are_of_the_dtype_of_the_scores(platform, dtype):
    scores = inputs.generator("dtype").permutation(N).astype(dtype)
    gradient = jax.grad(lambda x: top_k(x, K).values.sum().astype(np.float32))(
        jnp.asarray(scores)
    )
    assert gradient.dtype == dtype and float(gradient.astype(np.float32).sum()) == K


def test_derivatives_of_empty_problems(platform):
    for shape, k in (((0, 5), 2), ((3, 5), 0), ((3, 0), 2)):
        scores = np.zeros(shape, np.float32)

        def select(x, k=k):
            return top_k(x, k, lengths=1).values

        _, moved = jax.jvp(select, (scores,), (scores,))
        assert moved.shape == (shape[0], k) and not np.any(moved)
        gradient = jax.grad(lambda x: select(x)[:0].sum())(scores)
        assert gradient.shape == shape


def test_reverse_mode_selects_once():
    def loss(x):
        return jnp.sum(top_k(x, K).values ** 2)

    shape = jax.ShapeDtypeStruct((3, N), np.float32)
    text = jax.jit(jax.grad(loss)).lower(shape).as_text()
    assert text.count("custom_call @jax_topk") <= 1
    jaxpr = jax.make_jaxpr(jax.grad(loss))(shape)
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names.count("top_k") == 1


def test_custom_rules_around_a_selection(platform, scores):
    @jax.custom_vjp
    def straight_through(x):
        return top_k(x, K).values

    straight_through.defvjp(
        lambda x: (straight_through(x), x.shape),
        lambda shape, g: (jnp.full(shape, g.sum()),),
    )
    gradient = jax.grad(lambda x: straight_through(x).sum())(scores)
    np.testing.assert_array_equal(gradient, np.full(scores.shape, 12.0 * K))

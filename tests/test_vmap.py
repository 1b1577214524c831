# SPDX-License-Identifier: Apache-2.0
"""vmap makes one more leading axis of the one call, whatever is mapped."""

import re

import inputs
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_topk import top_k

N, K = 300, 20


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_vmap_over_any_axis(platform, scores, axis):
    moved = np.moveaxis(scores, 0, axis)
    oracle.check(jax.vmap(lambda x: top_k(x, K), in_axes=axis)(moved), scores, K)


def test_vmap_nested_and_with_lengths_mapped_or_not(platform, scores, lengths):
    def select(row, length):
        return top_k(row, K, lengths=length, sorted=False)

    result = jax.vmap(jax.vmap(select))(scores, lengths)
    oracle.check(result, scores, K, lengths, sorted=False)
    result = jax.jit(jax.vmap(select, in_axes=(0, None)))(scores, lengths[0])
    oracle.check(result, scores, K, lengths[0], sorted=False)
    result = jax.vmap(select, in_axes=(None, 0))(scores[0], lengths)
    oracle.check(result, np.stack([scores[0]] * 3), K, lengths, sorted=False)


def test_vmap_over_starts_alone(platform, scores):
    starts = np.array([0, 7, 299], np.int32)
    result = jax.vmap(lambda s: top_k(scores[0, 0], K, starts=s))(starts)
    oracle.check(result, np.stack([scores[0, 0]] * 3), K, None, starts)


def test_vmap_over_a_negative_axis_and_to_another_place(platform, scores):
    moved = np.moveaxis(scores, 0, 2)
    select = jax.vmap(lambda x: top_k(x, K), in_axes=-1, out_axes=1)
    values, indices = select(moved)
    result = [np.moveaxis(np.asarray(x), 1, 0) for x in (values, indices)]
    oracle.check(result, scores, K)


def test_vmap_with_each_operand_along_its_own_axis(platform, scores, lengths):
    starts = np.array([[0, 7, 299], [1, 2, 3], [-5, 0, 290], [9, 9, 9]], np.int32)

    def select(x, r, s):
        return top_k(x, K, lengths=r, starts=s)

    mapped = jax.jit(jax.vmap(select, in_axes=(2, 0, 1)))
    result = mapped(np.moveaxis(scores, 0, 2), lengths, starts)
    oracle.check(result, scores, K, lengths, starts.T)


def test_vmap_over_nothing_of_ours(platform, scores):
    # Rules are also called when none of the operands is mapped.
    result = jax.vmap(lambda y: (top_k(scores, K), y))(np.arange(2.0))[0]
    oracle.check(result, np.stack([scores] * 2), K)
    hessian = jax.hessian(lambda y: (top_k(scores, K).values.sum() * y**2).sum())
    assert hessian(np.ones(2, np.float32)).shape == (2, 2)


def test_vmap_of_an_empty_axis(platform):
    result = jax.vmap(lambda x: top_k(x, K))(np.zeros((0, 2, N), np.float32))
    assert result.values.shape == result.indices.shape == (0, 2, K)


@pytest.mark.parametrize("platform_name", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "case", ["nested", "lengths_unmapped", "scores_unmapped", "of_grad", "of_scan"]
)
def test_whatever_is_mapped_there_is_one_call_and_no_loop(platform_name, case):
    x = jax.ShapeDtypeStruct((2, 5, N, 3), np.float32)
    r = jax.ShapeDtypeStruct((5,), np.int32)

    def select(x, r):
        return top_k(x, K, lengths=r)

    if case == "nested":
        mapped = jax.vmap(
            jax.vmap(jax.vmap(select, in_axes=(1, None)), in_axes=(0, 0)),
            in_axes=(0, None),
        )
    elif case == "lengths_unmapped":
        mapped = jax.vmap(lambda x, r: select(x[..., 0], r), in_axes=(0, None))
    elif case == "scores_unmapped":
        mapped = jax.vmap(lambda x, r: select(x[0, 0, :, 0], r), in_axes=(None, 0))
    elif case == "of_grad":
        gradient = jax.grad(lambda x, r: jnp.sum(select(x, r).values))
        mapped = jax.vmap(
            jax.vmap(lambda x, r: gradient(x[:, 0], r), in_axes=(0, 0)),
            in_axes=(0, None),
        )
    else:  # jax makes the loop, and the rows of a step are still one call
        mapped = jax.vmap(
            lambda x, r: jax.lax.scan(lambda c, y: (c, select(y[..., 0], r[0])), 0, x)[
                1
            ],
            in_axes=(0, None),
        )
    traced = jax.jit(mapped).trace(x, r)
    text = traced.lower(lowering_platforms=(platform_name,)).as_text()
    assert len(re.findall(r"custom_call @jax_topk_\w+", text)) == 1
    assert text.count("stablehlo.while") == (case == "of_scan")


def test_vmap_with_an_axis_name_and_a_mesh_axis(devices):
    mesh = meshes.mesh(devices)
    rng = inputs.generator("spmd")
    scores = rng.integers(-40, 40, (8, 4, N)).astype(np.float32)
    rows = meshes.placed(scores, mesh, P("x"))
    select = jax.jit(jax.vmap(lambda x: top_k(x, K), spmd_axis_name="x"))
    compiled = select.lower(rows).compile()
    assert not meshes.collectives(compiled)
    oracle.check(jax.device_get(compiled(rows)), scores, K)


def test_vmap_over_an_explicit_mesh_axis(devices):
    mesh = meshes.mesh(devices, axis_type=AxisType.Explicit)
    scores = inputs.generator("lead").standard_normal((8, N)).astype(np.float32)
    lengths = np.arange(8, dtype=np.int32) * 40
    with jax.set_mesh(mesh):
        rows = jax.device_put(scores, P("x", None))
        sharded_lengths = jax.device_put(lengths, P("x"))
        result = jax.jit(jax.vmap(lambda x: top_k(x, K)))(rows)
        assert jax.typeof(result.values).sharding.spec == P("x", None)
        oracle.check(jax.device_get(result), scores, K)
        # A constant has no mesh of its own: the mapped lengths bring the axis.
        row = scores[0]
        mapped = jax.jit(jax.vmap(lambda r: top_k(row, K, lengths=r)))
        result = mapped(sharded_lengths)
        assert jax.typeof(result.indices).sharding.spec == P("x", None)
    oracle.check(jax.device_get(result), np.stack([row] * 8), K, lengths)

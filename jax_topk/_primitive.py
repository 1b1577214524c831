# SPDX-License-Identifier: Apache-2.0
"""The primitive ``top_k``: its transforms, its sharding, and how it is lowered.

One primitive that emits one FFI custom call with all leading axes in place. The rules
here and three annotations of the call keep every transform and every sharding of the
leading axes free of loops and collectives. All of jax that is not plain public API is
used in this module only.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_topk import _plan
from jax_topk._reference import empty_top_k, top_k_reference

FFI_TARGETS: tuple[str, ...] = tuple(_plan.TARGETS.values())
# The operands that may follow the scores, in this order.
WINDOW = ("lengths", "starts")

# Operands: scores (..., n), then those of lengths (...) and starts (...), both int32,
# that the parameter `window` names. Results: values (..., k) and indices (..., k).
top_k_p = Primitive("top_k")
top_k_p.multiple_results = True


def bind_top_k(scores: jax.Array, *rows: jax.Array, **params: Any) -> list[jax.Array]:
    """Binds the primitive; under an explicit mesh, rows follow the scores' sharding."""
    spec = _spec(scores)
    if spec[-1] is not None:
        # Raises jax's own error, with jax's own words for the sharding.
        jax.eval_shape(lambda x: lax.top_k(x, 0), scores)
    rows = tuple(_reshard(row, P(*spec[:-1]), scores) for row in rows)
    return top_k_p.bind(scores, *rows, **params)


def _spec(x: jax.Array) -> tuple[Any, ...]:
    return _partitions(jax.typeof(x).sharding.spec)


def _partitions(spec: Any) -> tuple[Any, ...]:
    # A PartitionSpec with unreduced axes refuses to be indexed. Public from 0.10.2 on.
    return spec.partitions if hasattr(spec, "partitions") else spec._partitions


def _reshard(x: jax.Array, spec: P, like: jax.Array) -> jax.Array:
    # Without explicit mesh axes all specs are empty and nothing happens. A constant has
    # no mesh, not even under jax.set_mesh: hence the one of `like`.
    if jax.typeof(x).sharding.spec == spec:
        return x
    mesh = jax.typeof(like).sharding.mesh
    return jax.sharding.reshard(x, spec if mesh.empty else NamedSharding(mesh, spec))


# Evaluation --------------------------------------------------------------------------

_STATIC = ("k", "window", "sorted", "implementation", "geometry")


def _evaluate(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    return top_k_p.bind(*operands, **params)


# As jax marks its own primitives. Where jax.debug_nans finds a NaN it would otherwise
# call the function anew, to see where in it, and so on for ever.
_evaluate.__name__ = _evaluate.__qualname__ = "top_k"
_evaluate.__dict__["_apply_primitive"] = True
_jitted = jax.jit(_evaluate, static_argnames=_STATIC)


@top_k_p.def_impl
def _impl(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    # Under a user's jax.disable_jit(), bind and impl would call each other for ever.
    with jax.disable_jit(False):
        return _jitted(*operands, **params)


@top_k_p.def_abstract_eval
def _abstract_eval(scores: Any, *rows: Any, k: int, **_: Any) -> tuple[Any, Any]:
    spec = scores.sharding.spec
    kinds = [operand.manual_axis_type for operand in (scores, *rows)]
    unreduced = spec.unreduced.union(*(kind.unreduced for kind in kinds))
    if unreduced:
        raise ValueError(
            "top_k requires scores that are not partial sums; got sums to be reduced "
            f"over {sorted(unreduced)} (scores: {scores}, k={k})"
        )
    # A result varies over every mesh axis that any operand varies over: with the
    # scores' axes alone, gradients of shared scores would lack a psum.
    varying = frozenset().union(*(kind.varying for kind in kinds))
    values = scores.update(
        shape=(*scores.shape[:-1], k),
        weak_type=False,
        sharding=scores.sharding.update(spec=P(*_partitions(spec)[:-1], None)),
        manual_axis_type=kinds[0].update(varying=varying),
    )
    return values, values.update(dtype=np.dtype(np.int32))


# Transforms --------------------------------------------------------------------------


def _batch(axis: Any, operands: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    # Rules of this table are also called when nothing is mapped.
    if all(dim is None for dim in dims):
        return top_k_p.bind(*operands, **params), (None, None)
    lead = axis.explicit_mesh_axis
    scores, *rows = (
        batching.bdim_at_front(x, dim, axis.size, lead)
        for x, dim in zip(operands, dims, strict=True)
    )
    if lead is not None:  # which broadcasting a constant has lost
        scores = _reshard(scores, P(lead, *_spec(scores)[1:]), scores)
    return bind_top_k(scores, *rows, **params), (0, 0)


batching.fancy_primitive_batchers[top_k_p] = _batch


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    # What a derivative needs of the forward pass: named, so that a checkpoint's policy
    # may save it.
    values, indices = out = checkpoint_name(top_k_p.bind(*primals, **params), "top_k")
    dvalues, dindices = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out)
    dscores = tangents[0]
    if type(dscores) is not ad.Zero and values.size and dscores.shape[-1] != 0:
        columns = jnp.maximum(indices, 0) if params["window"] else indices
        dvalues = jnp.take_along_axis(dscores, columns, -1, mode="promise_in_bounds")
        if params["window"]:
            dvalues = jnp.where(indices < 0, 0, dvalues)
    return out, [dvalues, dindices]


ad.primitive_jvps[top_k_p] = _jvp


# Lowering ----------------------------------------------------------------------------


def _lower(
    ctx: Any,
    *operands: Any,
    platform: str | None = None,
    implementation: str | None,
    geometry: tuple[int, ...],
    **params: Any,
) -> Any:
    scores, k = ctx.avals_in[0], params["k"]
    if k == 0 or 0 in scores.shape:
        return _lower_jax(empty_top_k, ctx, *operands, **params)
    where = platform or str((ctx.platforms or ctx.module_context.platforms)[0])
    # With jax.export, or lowering_platforms, the backend is the host's: its devices say
    # nothing of where the program will run.
    backend = ctx.module_context.backend
    here = where == "cuda" and getattr(backend, "platform", "") in ("gpu", "cuda")
    choice = _plan.choose(
        scores.shape[:-1],
        scores.shape[-1],
        k,
        scores.dtype,
        _plan.device_facts(where, backend.devices() if here else ()),
        implementation=implementation,
        geometry=geometry,
    )
    if choice.implementation == "xla":
        return _lower_jax(top_k_reference, ctx, *operands, **params)
    if choice.implementation not in _plan.TARGETS:
        raise ValueError(
            "top_k requires an implementation that can run here; got "
            f"implementation={implementation!r}, but {choice.reason} "
            f"(scores.shape={scores.shape}, scores.dtype={scores.dtype}, k={k}, "
            f"platform={where!r})"
        )
    attributes = {f"has_{name}": name in params["window"] for name in WINDOW}
    attributes |= {"k": np.int64(k), "sorted": params["sorted"]}
    if where == "cuda":
        attributes["geometry"] = np.asarray(geometry or (0,) * 5, np.int64)
    target = _plan.TARGETS[choice.implementation]
    workspace = choice.plan.workspace_bytes_per_row
    return _custom_call(target, ctx, operands, workspace, attributes)


def _lower_jax(function: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    # A copy of the context, since lower_fun marks it as used.
    lower = mlir.lower_fun(functools.partial(function, **params))
    # Nothing in these functions depends on the switch, except that scores of 64 bits,
    # made where it was on, may be selected where it is off.
    with jax.enable_x64(True):
        return lower(ctx.replace(), *operands)


def _custom_call(
    target: str,
    ctx: Any,
    operands: Any,
    workspace_bytes_per_row: int,
    attributes: dict[str, Any],
) -> Any:
    """Emits the call; shapes in the handler are those of a device's shard.

    The attributes are made from global shapes, so no number of rows may be in them.
    """
    scores, *rows = ctx.avals_in
    batch = scores.shape[:-1]
    # With no axis of its own an operand would pass for a replicated one in XLA's batch
    # partitioner: (..., 1) instead of (...). A workspace of one axis would be split up.
    columns = [row.update(shape=(*batch, 1)) for row in rows]
    expand = mlir.lower_fun(lambda *xs: [x[..., None] for x in xs])
    expanded = expand(ctx.replace(avals_in=rows, avals_out=columns), *operands[1:])
    results = list(ctx.avals_out)
    if workspace_bytes_per_row:
        shape = (*batch, workspace_bytes_per_row)
        results.append(scores.update(shape=shape, dtype=np.dtype(np.uint8)))
    ctx = ctx.replace(avals_in=[scores, *columns], avals_out=results)

    # All three of num_batch_dims, the sharding rule, and the registration of the target
    # as batch partitionable are needed to leave sharded rows where they are.
    num_batch_dims = mlir.ir_attribute({"num_batch_dims": str(len(batch))})
    annotations = {"mhlo.frontend_attributes": num_batch_dims}
    if all(isinstance(size, int) for size in scores.shape):  # a rule has static sizes
        widths = [aval.shape[-1] for aval in (*ctx.avals_in, *results)]
        rule = _sharding_rule(batch, widths, len(ctx.avals_in))
        annotations["sdy.sharding_rule"] = rule
    lower = jax.ffi.ffi_lowering(target, extra_attributes=annotations)
    return lower(ctx, operands[0], *expanded, **attributes)[:2]


def _sharding_rule(batch: Any, widths: list[int], num_operands: int) -> Any:
    # Leading axes map through; the last axis of each array is its own and kept whole.
    factors = [
        sdy.DimMappingAttr.get(factor_indices=[i])
        for i in range(len(batch) + len(widths))
    ]
    lead, own = factors[: len(batch)], factors[len(batch) :]
    arrays = [sdy.TensorMappingAttr.get(dim_mappings=[*lead, last]) for last in own]
    return sdy.OpShardingRuleAttr.get(
        factor_sizes=[*batch, *widths],
        operand_mappings=arrays[:num_operands],
        result_mappings=arrays[num_operands:],
        need_replication_factors=list(range(len(batch), len(factors))),
        is_custom=True,
    )


mlir.register_lowering(top_k_p, _lower)
for _platform in ("cpu", "cuda"):
    _rule = functools.partial(_lower, platform=_platform)
    mlir.register_lowering(top_k_p, _rule, platform=_platform)

for _platform, _handlers in _plan.REGISTRATIONS.items():
    for _name, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_name, _handler, platform=_platform)
# Also those that this build has no handler for: a program may be exported for them.
for _name in FFI_TARGETS:
    jax.ffi.register_ffi_target_as_batch_partitionable(_name)

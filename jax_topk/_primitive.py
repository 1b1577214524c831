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
from jax_topk._reference import empty_top_k, slots_of, spread, top_k_reference

FFI_TARGETS: tuple[str, ...] = (
    *_plan.TARGETS.values(),
    *_plan.PAGED_TARGETS.values(),
)
# The operands that may follow the scores, in this order.
WINDOW = ("lengths", "starts")

# Operands: scores (..., n), then those of lengths (...) and starts (...), both int32,
# that the parameter `window` names. Results: values (..., k) and indices (..., k).
#
# If the parameter `paging` is (page_size, page_stride) instead of None, an int32 page
# table (..., pages) follows, whose leading axes are the first of the scores', and index
# i of a row is the slot table[i // page_size] * page_stride + i % page_size.
top_k_p = Primitive("top_k")
top_k_p.multiple_results = True


def bind_top_k(scores: jax.Array, *others: jax.Array, **params: Any) -> list[jax.Array]:
    """Binds the primitive; under an explicit mesh, rows follow the scores' sharding."""
    spec = _spec(scores)
    if spec[-1] is not None:
        # Raises jax's own error, with jax's own words for the sharding.
        jax.eval_shape(lambda x: lax.top_k(x, 0), scores)
    rows, tables = _split(others, params["paging"] is not None)
    rows = [_reshard(row, P(*spec[:-1]), scores) for row in rows]
    if any(spec):
        tables = [_reshard(spread(x, scores), P(*spec), scores) for x in tables]
    return top_k_p.bind(scores, *rows, *tables, **params)


def _split(others: Any, paged: bool) -> tuple[Any, Any]:
    """What follows the scores: numbers of each row, and the page table, if any."""
    return others[: len(others) - paged], others[len(others) - paged :]


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

_STATIC = ("k", "window", "paging", "sorted", "implementation", "geometry")


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
    scores, *others = (
        batching.bdim_at_front(x, dim, axis.size, lead)
        for x, dim in zip(operands, dims, strict=True)
    )
    if lead is not None:  # which broadcasting a constant has lost
        scores = _reshard(scores, P(lead, *_spec(scores)[1:]), scores)
    return bind_top_k(scores, *others, **params), (0, 0)


batching.fancy_primitive_batchers[top_k_p] = _batch


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    # What a derivative needs of the forward pass is named, so that the policy of a
    # checkpoint may save it.
    dscores, paging = tangents[0], params["paging"]
    moves = type(dscores) is not ad.Zero
    if moves and paging is not None:
        # Tangents belong to columns. The table that maps a column to itself gives those
        # that the one at hand gives slots for, and XLA makes the slots of them.
        scores, *rows, table = primals
        params = {**params, "paging": (paging[0], paging[0])}
        itself = lax.iota(np.int32, table.shape[-1])
        out = bind_top_k(scores, *rows, itself, **params)
        values, columns = checkpoint_name(out, "top_k")
        out = [values, slots_of(columns, table, paging)]
    else:
        out = checkpoint_name(top_k_p.bind(*primals, **params), "top_k")
        values, columns = out
    dvalues, dindices = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out)
    if moves and values.size and dscores.shape[-1] != 0:
        padded = params["window"] or paging is not None
        places = jnp.maximum(columns, 0) if padded else columns
        dvalues = jnp.take_along_axis(dscores, places, -1, mode="promise_in_bounds")
        if padded:
            dvalues = jnp.where(columns < 0, 0, dvalues)
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
        return _lower_jax(empty_top_k, ctx, *operands, k=k)
    where = platform or str((ctx.platforms or ctx.module_context.platforms)[0])
    choice = _choose(
        ctx,
        where,
        scores.shape,
        scores.dtype,
        k,
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
    targets = _plan.TARGETS
    if params["paging"] is not None:
        targets = _plan.PAGED_TARGETS
        page_size, page_stride = map(np.int64, params["paging"])
        attributes |= {"page_size": page_size, "page_stride": page_stride}
    target = targets[choice.implementation]
    workspace = choice.plan.workspace_bytes_per_row
    return _custom_call(target, ctx, operands, workspace, attributes)


def _choose(
    ctx: Any, where: str, shape: Any, dtype: Any, k: int, **forced: Any
) -> _plan.Choice:
    # With jax.export, or lowering_platforms, the backend is the host's: its devices say
    # nothing of where the program will run.
    backend = ctx.module_context.backend
    here = where == "cuda" and getattr(backend, "platform", "") in ("gpu", "cuda")
    device = _plan.device_facts(where, backend.devices() if here else ())
    return _plan.choose(shape[:-1], shape[-1], k, dtype, device, **forced)


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
    scores, *others = ctx.avals_in
    batch = scores.shape[:-1]
    paged = "page_size" in attributes
    rows, tables = _split(others, paged)
    # With no axis of its own an operand would pass for a replicated one in XLA's batch
    # partitioner: (..., 1) instead of (...). So would a page table of fewer axes, which
    # rows share only where nothing is partitioned. A workspace of one axis would be
    # split up.
    shared = not (paged and _may_be_partitioned(ctx))

    def expand(scores: jax.Array, *others: jax.Array) -> list[jax.Array]:
        rows, tables = _split(others, paged)
        tables = [table if shared else spread(table, scores) for table in tables]
        return [*(row[..., None] for row in rows), *tables]

    expanded = [row.update(shape=(*batch, 1)) for row in rows]
    expanded += [
        table if shared else table.update(shape=(*batch, table.shape[-1]))
        for table in tables
    ]
    lower = mlir.lower_fun(expand)
    operands = [operands[0], *lower(ctx.replace(avals_out=expanded), *operands)]
    results = list(ctx.avals_out)
    if workspace_bytes_per_row:
        shape = (*batch, workspace_bytes_per_row)
        results.append(scores.update(shape=shape, dtype=np.dtype(np.uint8)))
    ctx = ctx.replace(avals_in=[scores, *expanded], avals_out=results)

    # All three of num_batch_dims, the sharding rule, and the registration of the target
    # as batch partitionable are needed to leave sharded rows where they are.
    num_batch_dims = mlir.ir_attribute({"num_batch_dims": str(len(batch))})
    annotations = {"mhlo.frontend_attributes": num_batch_dims}
    if all(isinstance(size, int) for size in scores.shape):  # a rule has static sizes
        rule = _sharding_rule(batch, (*ctx.avals_in, *results), len(ctx.avals_in))
        annotations["sdy.sharding_rule"] = rule
    lower = jax.ffi.ffi_lowering(target, extra_attributes=annotations)
    return lower(ctx, *operands, **attributes)[:2]


def _may_be_partitioned(ctx: Any) -> bool:
    """Whether XLA may give the handler a part of the leading axes."""
    if ctx.module_context.lowering_parameters.for_export:
        return True  # exported for one device, a program may yet run on many
    context = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):
        return context.num_devices > 1
    return context.manual_axes != frozenset(context.mesh.axis_names)


def _sharding_rule(batch: Any, avals: Any, num_operands: int) -> Any:
    # Leading axes map through; the last axis of each array is its own and kept whole.
    widths = [aval.shape[-1] for aval in avals]
    factors = [
        sdy.DimMappingAttr.get(factor_indices=[i])
        for i in range(len(batch) + len(widths))
    ]
    lead, own = factors[: len(batch)], factors[len(batch) :]
    arrays = [
        sdy.TensorMappingAttr.get(dim_mappings=[*lead[: aval.ndim - 1], last])
        for aval, last in zip(avals, own, strict=True)
    ]
    return sdy.OpShardingRuleAttr.get(
        factor_sizes=[*batch, *widths],
        operand_mappings=arrays[:num_operands],
        result_mappings=arrays[num_operands:],
        need_replication_factors=list(range(len(batch), len(factors))),
        is_custom=True,
    )


# jax.lax.top_k -----------------------------------------------------------------------

# Whether it is lowered to this primitive. A user context is part of the keys of all of
# jax's caches, so that nothing traced or lowered under one value is used under another.
# Made at import: one context more, and all is traced anew.
accelerated = jax.make_user_context(False)
# Of which jax 0.10.0 has no public way to the value for all threads.
accelerated_everywhere = accelerated._obj


@functools.cache
def replace_lax_lowering() -> None:
    """Puts rules for CPU and CUDA before jax's own, which these ask for the rest.

    There is no public way to read a rule that is registered.
    """
    from jax._src.interpreters import mlir as internal

    for platform in ("cpu", "cuda"):
        special = internal._platform_specific_lowerings[platform]
        own = special.get(lax.top_k_p) or internal._lowerings[lax.top_k_p]
        rule = functools.partial(_lower_lax, own.rule, platform)
        mlir.register_lowering(lax.top_k_p, rule, platform=platform)


def _lower_lax(
    own_rule: Any, platform: str, ctx: Any, operand: Any, *, k: Any, axis: int, **others
) -> Any:
    def ours(x: jax.Array) -> tuple[jax.Array, ...]:
        scores = jnp.moveaxis(x, axis, -1)
        options = {"window": (), "paging": None, "sorted": True}
        options |= {"implementation": None, "geometry": ()}
        out = top_k_p.bind(scores, k=k, **options)
        return tuple(jnp.moveaxis(x, -1, axis) for x in out)

    x = ctx.avals_in[0]
    shape = (*x.shape[:axis], *x.shape[axis + 1 :], x.shape[axis])
    if accelerated.value and isinstance(k, int) and k > 0 and 0 not in shape:
        choice = _choose(ctx, platform, shape, x.dtype, k)
        if choice.implementation in _plan.TARGETS:
            return _lower_jax(ours, ctx, operand)
    return own_rule(ctx, operand, k=k, axis=axis, **others)


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

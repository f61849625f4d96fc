"""One device's share of a step or of an evaluation, inside shard_map, before anything is summed over devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import quoted
from shardkit._jax.compat import on_this_mesh
from shardkit._jax.jaxprs import PER_MICROBATCH, PLAN, kind_of, mesh_axes, walk
from shardkit._jax.one_device import or_note
from shardkit.collectives._sums import added, typed_zeros
from shardkit.meshes.layout import path_name, spec_axes
from shardkit.on_device.batch import device_keys, split_microbatches, take_microbatch
from shardkit.on_device.gradient import GradFn, LossFn, Mean, Sum, call_loss, kind, named_means, on_mesh_or_alone
from shardkit.on_device.groups import split_over, sums_of_groups
from shardkit.on_device.handles import cast_floating, parts, with_parts
from shardkit.on_device.loss_weights import in_compute
from shardkit.on_device.pipelines import Staged
from shardkit.on_device.token_axes import tokens_split
from shardkit.plans.storage import unpadded

T = TypeVar("T")


def local_gradients(
    grad_fn: GradFn,
    seen: Any,
    batch: Any,
    key: jax.Array,
    scale: jax.Array,
    batch_spec: PartitionSpec,
    compute: Any,
    accumulate: int,
    groups: bool = False,
    split: str = "",
) -> tuple[Any, dict[str, Any], Any]:
    """What one device computes in a step: its batch as the loss sees it, its Means by name, and its gradients.

    `seen` are the parameters as `enter` returns them; `split` names a leaf of which they have a part. Means and
    gradients are sums over the microbatches, in float32 if there are several.

    Cost: what the GradFn sends, `accumulate` times.
    """
    keys = device_keys(key, batch, batch_spec)

    def computed(batch: Any, keys: Any) -> tuple[Any, Any, Any]:
        out = grad_fn(seen, batch, keys, scale=scale)
        _check_three(out)
        return out

    def first(batch: Any) -> dict[str, Any]:
        loss, aux, _ = computed(*take_microbatch(split_microbatches((batch, keys), accumulate), 0))
        return named_means((loss, aux))

    def call(batch: Any, keys: jax.Array) -> tuple[dict[str, Any], Any]:
        loss, aux, grads = computed(batch, keys)
        taken = {"loss", "weight", "finite", "loss_scale"} & set(aux)
        if taken:
            raise ValueError(f"make_train_step: aux must not use the names {quoted(sorted(taken))}. Rename them.")
        _check_gradients(seen, grads)
        if isinstance(loss, Sum) and (accumulate > 1 or groups):
            raise ValueError(
                "make_train_step: a sum of means divides by the weights of the whole batch before the gradient, so it "
                f"must be computed at once; got {'deterministic' if groups else f'accumulate={accumulate}'}. Leave "
                "that out, or weight the values of one Mean."
            )
        return named_means((loss, aux)), grads

    with tokens_split(_token_axes(batch_spec), split):
        once = accumulate == 1 and not groups and _sees_all(batch_spec, grad_fn)
        batch = in_compute(first, batch, compute, once=once)
        if accumulate == 1 and not groups:
            return batch, *call(batch, keys)
        split = split_microbatches((batch, keys), accumulate)
        leaves, structure = jax.tree.flatten(split)
        arrays = [x for x in leaves if x.ndim]

        def one(arrays: list[jax.Array]) -> tuple[dict[str, Mean], Any]:
            here = iter(arrays)  # scan takes no scalars
            return call(*jax.tree.unflatten(structure, [next(here) if x.ndim else x for x in leaves]))

        if groups:
            return batch, *sums_of_groups(one, arrays, scale > 0, split_over(batch_spec))
        zeros = lambda x: typed_zeros(x, dtype=jnp.float32)  # noqa: E731
        sums = jax.tree.map(zeros, _of_microbatch(call, take_microbatch(split, 0), accumulate, split_over(batch_spec)))

        def add(sums: Any, arrays: list[jax.Array]) -> tuple[Any, None]:
            return added(sums, one(arrays)), None

        return batch, *jax.lax.scan(add, sums, arrays)[0]


def _of_microbatch(call: Callable[..., Any], example: Any, accumulate: int, axes: tuple[str, ...]) -> Any:
    """The shapes of what one microbatch gives, after a warning where its loss mixes examples of several devices.

    It would mix those of one microbatch: a contrastive loss has fewer negatives, a norm over the batch other moments.
    What the plan sends for its leaves is right in each microbatch, and marked.
    """
    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(*example)
    for site in walk(jaxpr.jaxpr):
        mixed = kind_of(site.equation) and set(mesh_axes(site.equation)) & set(axes)
        if mixed and not site.backward and not (site.within(PLAN) or site.within(PER_MICROBATCH)):
            warnings.warn(
                f"make_train_step: with accumulate={accumulate} the loss gets one microbatch at a time, and the "
                "results of what it sends over an axis of the batch are those of a microbatch; it calls "
                f"{kind_of(site.equation)} over {quoted(sorted(mixed))} at {site.source}. Leave accumulate at 1, and "
                "save memory with scan_layers(..., microbatches=) or remat=, if all examples count together.",
                stacklevel=2,
            )
            break
    return on_this_mesh(shapes)


def local_means(
    loss_fn: LossFn,
    seen: Any,
    batch: Any,
    batch_spec: PartitionSpec,
    compute: Any,
    *carried: Any,
    split: str,
    local: bool,
) -> dict[str, Any]:
    """What one device computes in an evaluation: its Means, the loss under "loss". `seen` comes from `enter`.

    Cost: what the loss sends.
    """
    own = [with_parts(each, parts(each)) for each in (seen, *carried)]

    def through(call: Any, batch: Any) -> Any:
        return call(partial(call_loss, loss_fn), own[0], batch, None, *own[1:])

    def means(batch: Any) -> dict[str, Any]:
        return named_means(on_mesh_or_alone(through, local, batch))

    with tokens_split(_token_axes(batch_spec), split):
        return means(in_compute(means, batch, compute, once=_sees_all(batch_spec, loss_fn)))


def or_column_linear(run: Callable[[Any], T], seen: Any, params: Any, compute: Any, leaf: str) -> T:
    """`run(seen)`. Where the loss fails to be traced, and not with all leaves of `params` whole, a note says so.

    `leaf` is the path of one of which the loss gets a part, if there is one.
    """
    if not leaf:
        return run(seen)

    def whole() -> Any:
        return jax.eval_shape(run, jax.eval_shape(lambda params: cast_floating(unpadded(params), compute), params))

    note = (
        f"make_train_step: the plan passes the loss a part of leaf {leaf}, and the loss takes it whole. Multiply by "
        "parts with sk.layers.column_linear and row_linear, or let the rules of the plan keep the leaf whole."
    )
    return or_note(partial(run, seen), whole, note)


def _check_three(out: Any) -> None:
    """Refuses what a loss returns, from a function whose signature does not tell that it is one."""
    if not isinstance(out, tuple | list) or isinstance(out, Mean) or len(out) != 3:
        raise TypeError(
            f"make_train_step: a GradFn must return (Mean, aux, gradients); got {kind(out)}. Pass "
            "sk.value_and_grad(loss_fn)."
        )


def _check_gradients(params: Any, grads: Any) -> None:
    """Refuses gradients that differ in tree or shape from the parameters that the GradFn got."""
    rule = "make_train_step: a GradFn must return a gradient of every parameter, of the shape that it was given"
    remedy = "Return what value_and_grad returns, or pytrees like it."
    seen = parts(params)
    ours, theirs = str(jax.tree.structure(grads)), str(jax.tree.structure(seen))
    if ours != theirs:
        raise ValueError(f"{rule}; got {ours} for {theirs}. {remedy}")
    for (path, grad), x in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(seen), strict=True):
        if jnp.shape(grad) != x.shape:
            raise ValueError(f"{rule}; leaf {path_name(path)} has {x.shape}, its gradient {jnp.shape(grad)}. {remedy}")


def _token_axes(batch_spec: PartitionSpec) -> tuple[str, ...]:
    return spec_axes(batch_spec)[1] if len(batch_spec) > 1 else ()


def _sees_all(batch_spec: PartitionSpec, function: Any) -> bool:
    """Whether a function sees all examples of a batch at once: on one device, and in no pipeline."""
    return not any(spec_axes(batch_spec)) and not isinstance(function, Staged)

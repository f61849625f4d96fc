"""One device's share of a step or of an evaluation, inside shard_map, before anything is summed over devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import quoted
from shardkit._jax.one_device import noting
from shardkit.meshes.layout import path_name, spec_axes
from shardkit.on_device.batch import device_keys, split_microbatches, take_microbatch, tokens_split
from shardkit.on_device.gradient import (
    GradFn,
    LossFn,
    Sum,
    alone,
    call_loss,
    is_mean,
    kind,
    loss_alone,
    named_means,
    noting_types,
    terms_of,
    untyped,
)
from shardkit.on_device.groups import Groups
from shardkit.on_device.handles import cast_floating, parts, with_parts
from shardkit.on_device.loss_weights import in_compute
from shardkit.on_device.microbatches import Microbatches
from shardkit.on_device.pipelines import Staged
from shardkit.on_device.precision import Precision
from shardkit.plans.plan import Placement
from shardkit.plans.storage import unpadded


def local_gradients(
    grad_fn: GradFn,
    seen: Any,
    batch: Any,
    key: jax.Array,
    scale: jax.Array,
    placement: Placement,
    policy: Precision,
    microbatches: Microbatches | Groups,
) -> tuple[Any, dict[str, Any], Any]:
    """What one device computes in a step: its batch as the loss sees it, its Means by name, and its gradients.

    `seen` are the parameters as `enter` returns them. Means and gradients are sums over the device's microbatches or
    groups, in float32 if there are several.

    Cost: what the GradFn sends, once for each microbatch.
    """
    keys = device_keys(key, batch, placement.batch)

    def of_examples(batch: Any, keys: jax.Array) -> tuple[dict[str, Any], Any]:
        loss, aux, grads = _three(grad_fn(seen, batch, keys, scale=scale))
        taken = {"loss", "weight", "finite", "loss_scale"} & set(aux)
        if taken:
            raise ValueError(f"make_train_step: aux must not use the names {quoted(sorted(taken))}. Rename them.")
        _check_gradients(seen, grads)
        if isinstance(loss, Sum) and microbatches.words:
            raise ValueError(
                "make_train_step: a sum of means divides by the weights of the whole batch before the gradient, so it "
                f"must be computed at once; got {microbatches.words}. Leave that out, or weight the values of one Mean."
            )
        return named_means((loss, aux)), grads

    def first_means(batch: Any) -> dict[str, Any]:
        return of_examples(*take_microbatch(split_microbatches((batch, keys), microbatches.parts), 0))[0]

    with tokens_split(_token_axes(placement.batch), placement.part_in_loss):
        once = not microbatches.words and _sees_all(placement.batch, grad_fn)
        reads, split = "carried" in getattr(grad_fn, "keywords", {}), _first_split(placement.batch)
        batch = in_compute(first_means, batch, policy.compute, once=once, split=split, reads=reads)
        if not microbatches.words:
            return batch, *of_examples(batch, keys)
        return batch, *microbatches.of(of_examples, batch, keys, scale, placement)


def local_loss(
    grad_fn: GradFn, seen: Any, batch: Any, keys: jax.Array, placement: Placement, policy: Precision
) -> tuple[Any, ...]:
    """The Means of which the loss of this device's examples is the sum, without gradients; `seen` is of `enter`.

    Cost: what the loss sends.
    """

    def loss_of(batch: Any) -> Any:
        with loss_alone():
            return grad_fn(seen, batch, keys)[0]

    def first_means(batch: Any) -> dict[str, Any]:
        return {f"{number}": mean for number, mean in enumerate(terms_of(loss_of(batch)))}

    with tokens_split(_token_axes(placement.batch), placement.part_in_loss):
        reads = "carried" in getattr(grad_fn, "keywords", {})
        split = _first_split(placement.batch)
        batch = in_compute(first_means, batch, policy.compute, once=False, split=split, reads=reads)
        return tuple(terms_of(loss_of(batch)))


def local_means(
    loss_fn: LossFn, seen: Any, batch: Any, placement: Placement, policy: Precision, *carried: Any, local: bool
) -> dict[str, Any]:
    """What one device computes in an evaluation: its Means, the loss under "loss". `seen` comes from `enter`.

    Cost: what the loss sends.
    """
    own = [with_parts(each, parts(each)) for each in (seen, *carried)]

    def called(by: Any, batch: Any) -> Any:
        return by(partial(call_loss, loss_fn), own[0], batch, None, *own[1:])

    def means(batch: Any) -> dict[str, Any]:
        if local:
            return named_means(called(alone, batch))
        with noting_types(partial(called, alone, batch), partial(called, untyped, batch)):
            return named_means(call_loss(loss_fn, own[0], batch, None, *own[1:]))

    with tokens_split(_token_axes(placement.batch), placement.part_in_loss):
        once, split = _sees_all(placement.batch, loss_fn), _first_split(placement.batch)
        return means(in_compute(means, batch, policy.compute, once=once, split=split, reads=bool(carried)))


def noting_whole(
    run: Callable[[Any], Any], params: Any, placement: Placement, compute: Any
) -> AbstractContextManager[None]:
    """Where `run(seen)` inside of it cannot be traced, and could with all leaves of `params` whole, a note says so."""
    leaf = placement.part_in_loss

    def whole() -> Any:
        return jax.eval_shape(run, jax.eval_shape(lambda params: cast_floating(unpadded(params), compute), params))

    note = (
        f"make_train_step: the plan passes the loss a part of leaf {leaf}, and the loss takes it whole. Multiply by "
        "parts with sk.layers.column_linear and row_linear, or let the rules of the plan keep the leaf whole."
    )
    return noting((note, whole)) if leaf else nullcontext()


def _three(out: Any) -> Any:
    """What a GradFn returned, after a check: of a loss the signature does not always tell that it is none."""
    if not isinstance(out, tuple | list) or is_mean(out) or len(out) != 3:
        raise TypeError(
            f"make_train_step: a GradFn must return (Mean, aux, gradients); got {kind(out)}. Pass "
            "sk.value_and_grad(loss_fn)."
        )
    return out


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


def _first_split(batch_spec: PartitionSpec) -> int:
    return next((dim for dim, axes in enumerate(spec_axes(batch_spec)) if axes), 0)


def _sees_all(batch_spec: PartitionSpec, function: Any) -> bool:
    """Whether a function sees all examples of a batch at once: on one device, and in no pipeline."""
    return not any(spec_axes(batch_spec)) and not isinstance(function, Staged)

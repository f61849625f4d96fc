"""One device's share of a step or of an evaluation, inside shard_map, before anything is summed over devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import quote
from shardkit._jax.one_device import noting
from shardkit.meshes.layout import path_name, spec_axes
from shardkit.on_device.batch import bind_token_axes, device_keys, split_microbatches, take_microbatch
from shardkit.on_device.gradient import GradFn, LossFn, WithCarried, call_loss, loss_alone
from shardkit.on_device.groups import Groups
from shardkit.on_device.handles import cast_floating, open_before_loss, strip_handles
from shardkit.on_device.loss_results import named_means, terms_by_name
from shardkit.on_device.loss_weights import cast_batch
from shardkit.on_device.means import Sum, describe_type, is_mean
from shardkit.on_device.microbatches import Microbatches
from shardkit.on_device.one_device import call_on_one_device, note_type_errors
from shardkit.on_device.pipelines import Staged, pipeline_remedy
from shardkit.on_device.precision import Precision
from shardkit.plans.plan import Placement
from shardkit.plans.storage import unpadded


def local_gradients(
    grad_fn: GradFn,
    params: Any,
    batch: Any,
    key: jax.Array,
    scale: jax.Array,
    placement: Placement,
    policy: Precision,
    microbatches: Microbatches | Groups,
) -> tuple[Any, dict[str, Any], Any]:
    """One device's batch as the loss sees it, its Means by name, and its gradients.

    `params` are the parameters as `enter` returns them. If the device has several microbatches or groups, Means and
    gradients are sums over them, in float32.

    Cost: what the GradFn sends, once for each microbatch.
    """
    # Keys are made here, from the examples' numbers in the whole batch, before it is split into microbatches: an
    # example draws the same on every mesh and under every accumulation.
    keys = device_keys(key, batch, placement.batch)

    def read_results(out: Any) -> tuple[dict[str, Any], Any]:
        """The Means by name, and the gradients, of what the GradFn returned."""
        loss, aux, grads = _check_results(out)
        _check_names(aux)
        _check_gradients(params, grads)
        if isinstance(loss, Sum) and microbatches.words:
            raise ValueError(
                "make_train_step: a sum of means divides by the weights of the whole batch before the gradient, so it "
                f"must be computed at once; got {microbatches.words}. Leave that out, or weight the values of one Mean."
            )
        return named_means((loss, aux)), grads

    def compute_sums(batch: Any, keys: jax.Array) -> tuple[dict[str, Any], Any]:
        return read_results(grad_fn(params, batch, keys, scale=scale))

    def compute_first_means(batch: Any) -> dict[str, Any]:
        examples = split_microbatches((batch, keys), microbatches.parts)
        first_batch, first_keys = take_microbatch(examples, 0)
        means, _ = compute_sums(first_batch, first_keys)
        return means

    with _bind_layout(placement):
        # The batch is cast here and not by the loss, which would round the arrays that its weight is computed from.
        batch = cast_batch(
            compute_first_means,
            batch,
            policy.compute,
            once=not microbatches.words and _sees_all(placement.batch, grad_fn),
            split=_first_split(placement.batch),
            reads=isinstance(grad_fn, WithCarried),
        )
        # The results are this device's sums. A sum over devices would be sent for each microbatch here; `leave` sends
        # one for all microbatches.
        if microbatches.words:
            means, grads = microbatches.sum_examples(compute_sums, batch, keys, scale, placement)
        else:
            # As `compute_sums`, without its frame.
            means, grads = read_results(grad_fn(params, batch, keys, scale=scale))
    return batch, means, grads


def local_terms(
    grad_fn: GradFn, params: Any, batch: Any, keys: Any, placement: Placement, policy: Precision
) -> dict[str, tuple[Any, ...]]:
    """The Means of this device's examples by name, without gradients; `params` come from `enter`.

    Cost: what the loss sends.
    """

    def compute_terms(batch: Any) -> dict[str, tuple[Any, ...]]:
        # Losses alone are compared: a backward pass would take most of the time, and send what nobody reads.
        with loss_alone():
            loss, aux, _ = grad_fn(params, batch, keys)
        return terms_by_name({"loss": loss, **aux})

    def compute_means(batch: Any) -> dict[str, Any]:
        means = {}
        for name, terms in compute_terms(batch).items():
            for number, mean in enumerate(terms):
                means[f"{name} {number}"] = mean
        return means

    with _bind_layout(placement):
        batch = cast_batch(
            compute_means,
            batch,
            policy.compute,
            once=False,
            split=_first_split(placement.batch),
            reads=isinstance(grad_fn, WithCarried),
        )
        return compute_terms(batch)


def local_means(
    loss_fn: LossFn, params: Any, batch: Any, placement: Placement, policy: Precision, *carried: Any, local: bool
) -> dict[str, Any]:
    """One device's Means in an evaluation by name, the loss under "loss"; `params` come from `enter`.

    Cost: what the loss sends.
    """
    weights = open_before_loss(params)
    state = [open_before_loss(tree) for tree in carried]

    def compute_means(batch: Any) -> dict[str, Any]:
        args = (partial(call_loss, loss_fn), weights, batch, None, *state)
        if local:
            return named_means(call_on_one_device(*args))
        with note_type_errors(lambda caller: caller(*args)):
            return named_means(call_loss(loss_fn, weights, batch, None, *state))

    with _bind_layout(placement):
        batch = cast_batch(
            compute_means,
            batch,
            policy.compute,
            once=_sees_all(placement.batch, loss_fn),
            split=_first_split(placement.batch),
            reads=bool(carried),
        )
        return compute_means(batch)


def note_split_leaf(
    run: Callable[[Any], Any], function: Any, params: Any, placement: Placement, compute: Any
) -> AbstractContextManager[None]:
    """A context that adds a note to an error of `run(params)` if the error is gone with all leaves whole.

    `function` is the GradFn or the loss that it runs. If the plan has stages and the function is no pipeline, the note
    says to pass a pipeline.
    """
    leaf = placement.part_in_loss
    if not leaf:
        return nullcontext()

    def make_whole(params: Any) -> Any:
        return cast_floating(unpadded(params), compute)

    def run_on_whole() -> Any:
        return jax.eval_shape(run, jax.eval_shape(make_whole, params))

    remedy = (
        "Multiply by parts with sk.layers.column_linear and row_linear, or let the rules of the plan keep the leaf "
        "whole."
    )
    stage_axes = placement.plan.stage_axes
    if stage_axes and not isinstance(function, Staged):
        remedy = pipeline_remedy(stage_axes)
    note = f"make_train_step: the plan passes the loss a part of leaf {leaf}, and the loss takes it whole. {remedy}"
    return noting((note, run_on_whole))


def _check_results(out: Any) -> Any:
    """The results of a GradFn, after a check: a loss passed in its place is refused here, if not by its signature."""
    if not isinstance(out, tuple | list) or is_mean(out) or len(out) != 3:
        raise TypeError(
            f"make_train_step: a GradFn must return (Mean, aux, gradients); got {describe_type(out)}. Pass "
            "sk.value_and_grad(loss_fn)."
        )
    return out


def _check_names(aux: Mapping[str, Any]) -> None:
    """Refuses auxiliary means with the names of a step's other metrics."""
    taken = {"loss", "weight", "finite", "loss_scale"} & set(aux)
    if taken:
        raise ValueError(f"make_train_step: aux must not use the names {quote(sorted(taken))}. Rename them.")


def _check_gradients(params: Any, grads: Any) -> None:
    """Refuses gradients that differ in tree or shape from the parameters that the GradFn got."""
    rule = "make_train_step: a GradFn must return a gradient of every parameter, with its shape"
    remedy = "Return the same as value_and_grad, or pytrees like it."
    leaves = strip_handles(params)
    ours = str(jax.tree.structure(grads))
    theirs = str(jax.tree.structure(leaves))
    if ours != theirs:
        raise ValueError(f"{rule}; got {ours} for {theirs}. {remedy}")
    grads_with_path = jax.tree_util.tree_leaves_with_path(grads)
    for (path, grad), x in zip(grads_with_path, jax.tree.leaves(leaves), strict=True):
        if jnp.shape(grad) != x.shape:
            raise ValueError(f"{rule}; leaf {path_name(path)} has {x.shape}, its gradient {jnp.shape(grad)}. {remedy}")


def _bind_layout(placement: Placement) -> AbstractContextManager[None]:
    """A context that binds the axes that split the tokens, and the path of a leaf of which a device has only a part."""
    batch_axes = spec_axes(placement.batch)
    token_axes = batch_axes[1] if len(batch_axes) > 1 else ()
    return bind_token_axes(token_axes, placement.part_in_loss)


def _first_split(batch_spec: PartitionSpec) -> int:
    """The first dim of the batch that devices split; 0 if they split none."""
    for dim, axes in enumerate(spec_axes(batch_spec)):
        if axes:
            return dim
    return 0


def _sees_all(batch_spec: PartitionSpec, function: Any) -> bool:
    """Whether a function sees all examples of a batch at once: on one device, and in no pipeline."""
    return not any(spec_axes(batch_spec)) and not isinstance(function, Staged)

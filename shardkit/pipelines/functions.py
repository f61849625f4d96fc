"""The GradFn and the loss of a pipeline, from its pieces and its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from shardkit.on_device.frozen import check_trained, chosen
from shardkit.on_device.gradient import Mean
from shardkit.on_device.handles import is_handle, part_gradient, parts, with_parts
from shardkit.on_device.pipelines import PipelineGradFn, PipelineLoss
from shardkit.pipelines.pieces import Model
from shardkit.pipelines.run import Mode, run
from shardkit.schedules import Schedule, Stages


def gradient_of(
    model: Model, schedule: Schedule, stages: Stages, mode: Mode, recompute: bool, trained: Any = None
) -> PipelineGradFn:
    """The GradFn of a model in pieces."""
    check_trained(trained)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        opened = with_parts(params, parts(params))
        sums = run(model, schedule, stages, opened, batch, keys, scale, mode, recompute, train=True)
        layers = jax.tree.leaves(parts(opened["layers"]))
        stack = [total.reshape(leaf.shape) for total, leaf in zip(sums.layers, layers, strict=True)]
        grads = sums.shared | {"layers": jax.tree.unflatten(jax.tree.structure(parts(opened["layers"])), stack)}
        grads = jax.tree.map(_left, params, grads, is_leaf=is_handle)
        means = dict(sums.means)
        some, _, gradients = chosen({name: grads[name] for name in params}, trained)
        return means.pop("loss"), means, gradients(some)

    return PipelineGradFn(stages, grad_fn, schedule)


def loss_of(model: Model, schedule: Schedule, stages: Stages, mode: Mode) -> PipelineLoss:
    """The loss of a model in pieces, by the forward actions of the schedule."""
    forward = schedule.forward()

    def loss(params: Any, batch: Any, keys: Any) -> tuple[Mean, dict[str, Mean]]:
        means = dict(run(model, forward, stages, params, batch, keys, 1, mode, False, train=False).means)
        return means.pop("loss"), means

    return PipelineLoss(stages, loss, forward)


def _left(node: Any, grad: Any) -> Any:
    """The gradient of a leaf as it leaves the GradFn: of a lazy leaf with `entry`, that of its part."""
    return part_gradient(node, grad) if is_handle(node) and node.entry else grad

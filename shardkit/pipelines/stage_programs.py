"""The programs of one stage of a pipeline on its own mesh: forward, backward, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit.collectives import all_reduce, vary
from shardkit.meshes.layout import all_axes, broadcast_specs, canonical, check_spec
from shardkit.on_device.gradient import value_and_grad
from shardkit.on_device.mean_sums import global_means
from shardkit.on_device.means import Mean, divisor_of

Stage = Callable[[Any, Any], jax.Array]


class Station(NamedTuple):
    """A stage of the model and its mesh."""

    kernel: Stage  # `(params, x) -> y` on one device of the sub-mesh; y varies over the axes of `leaving`
    mesh: Mesh  # the devices of this stage
    entering: PartitionSpec  # layout of x
    leaving: PartitionSpec  # layout of y
    params: Any  # layouts of the parameters, a prefix of their pytree

    @property
    def examples(self) -> frozenset[str]:
        """The axes that split examples: gradients are unreduced over them until `finish`."""
        return all_axes(self.entering) & all_axes(self.leaving)

    def find_unreduced(self, spec: PartitionSpec) -> tuple[str, ...]:
        """The axes over which the gradient of a leaf of that layout is unreduced."""
        unreduced = self.examples - all_axes(spec)
        return tuple(axis for axis in self.mesh.axis_names if axis in unreduced)

    def find_sum_specs(self, specs: Any) -> Any:
        """The layouts of the sums of gradients: dim 0 counts the unreduced parts.

        Worked example: on a mesh of data=4 a weight [8, 8] that all devices have, `P()`. Its sum is [4, 8, 8] with
        `P("data")`: each device has its own part [1, 8, 8], of its own examples.
        """
        return jax.tree.map(lambda spec: PartitionSpec(self.find_unreduced(spec) or None, *spec), specs)


def run_checked(where: str, stage: Stage, leaving: PartitionSpec, mesh: Mesh, params: Any, x: Any) -> jax.Array:
    """The output of a stage, checked against its layout and varying over all axes of it."""
    y = stage(params, x)
    check_spec(where, leaving, mesh, y.ndim)
    return vary(y, tuple(sorted(all_axes(leaving))))


def fit_specs(spec: PartitionSpec, tree: Any) -> Any:
    """The spec for every leaf of a tree, truncated to its dims."""
    return jax.tree.map(lambda x: canonical(PartitionSpec(*spec[: x.ndim])), tree)


def build_forward(station: Station) -> Any:
    """A program that runs the stage on one microbatch."""

    def run(params: Any, x: Any) -> jax.Array:
        in_specs = (broadcast_specs(station.params, params), fit_specs(station.entering, x))
        return jax.shard_map(station.kernel, mesh=station.mesh, in_specs=in_specs, out_specs=station.leaving)(params, x)

    return jax.jit(run)


def build_zeros(station: Station) -> Any:
    """A program that returns zeros for the sums of gradients."""

    def kernel(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros((1, *p.shape), jnp.float32), params)

    def run(params: Any) -> Any:
        specs = broadcast_specs(station.params, params)
        sum_specs = station.find_sum_specs(specs)
        return jax.shard_map(kernel, mesh=station.mesh, in_specs=(specs,), out_specs=sum_specs)(params)

    return jax.jit(run)


def build_backward(station: Station, first: bool) -> Any:
    """A program that adds one microbatch's gradients to the sums and returns the cotangent of x."""

    def kernel(params: Any, x: Any, dy: jax.Array, sums: Any) -> tuple[Any, Any]:
        # The gradients of varying parameters are unreduced: they are reduced once, in `finish`.
        params = vary(params, tuple(sorted(station.examples)))
        if first:  # the pipeline's input need not be floating point
            _, pullback = jax.vjp(lambda params: station.kernel(params, x), params)
            (grads,) = pullback(dy)
            dx = None
        else:
            _, pullback = jax.vjp(station.kernel, params, x)
            grads, dx = pullback(dy)
        sums = jax.tree.map(lambda total, grad: total + grad[None].astype(jnp.float32), sums, grads)
        return sums, dx

    def run(params: Any, x: Any, dy: jax.Array, sums: Any) -> tuple[Any, Any]:
        specs = broadcast_specs(station.params, params)
        sum_specs = station.find_sum_specs(specs)
        in_specs = (specs, fit_specs(station.entering, x), station.leaving, sum_specs)
        out_specs = (sum_specs, station.entering)
        return jax.shard_map(kernel, mesh=station.mesh, in_specs=in_specs, out_specs=out_specs)(params, x, dy, sums)

    return jax.jit(run, donate_argnums=3)


def build_finish(station: Station) -> Any:
    """A program that reduces the sums of gradients and divides by the global weight."""

    def run(sums: Any, weight: jax.Array) -> Any:
        specs = broadcast_specs(station.params, sums)

        def kernel(sums: Any, weight: jax.Array) -> Any:
            def average(total: jax.Array, spec: PartitionSpec) -> jax.Array:
                grad = total[0]
                axes = station.find_unreduced(spec)
                if axes:
                    # Once a step, and not in `build_backward`, where each microbatch would send all gradients.
                    grad = all_reduce(grad, axes)
                return grad / divisor_of(weight)

            return jax.tree.map(average, sums, specs)

        in_specs = (station.find_sum_specs(specs), PartitionSpec())
        return jax.shard_map(kernel, mesh=station.mesh, in_specs=in_specs, out_specs=specs)(sums, weight)

    return jax.jit(run, donate_argnums=0)


def build_head(station: Station, loss: Callable[[jax.Array, Any], Any]) -> Any:
    """A program that returns the loss's sums over the mesh, and the cotangent of the last stage's output."""
    grad_fn: Any = value_and_grad(lambda y, targets, keys: loss(y, targets))

    def kernel(y: jax.Array, targets: Any) -> tuple[dict[str, Mean], jax.Array]:
        mean, aux, dy = grad_fn(y, targets, None)
        return global_means({"loss": mean, **aux}, all_axes(station.leaving)), dy

    def run(y: jax.Array, targets: Any) -> tuple[dict[str, Mean], jax.Array]:
        in_specs = (station.leaving, fit_specs(station.leaving, targets))
        out_specs = (PartitionSpec(), station.leaving)
        return jax.shard_map(kernel, mesh=station.mesh, in_specs=in_specs, out_specs=out_specs)(y, targets)

    return jax.jit(run)


@jax.jit
def compute_averages(means: list[dict[str, Mean]]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The weight of the loss, and every mean over all microbatches."""
    sums = jax.tree.map(lambda *terms: sum(terms), *means)
    averages = {}
    for name, mean in sums.items():
        averages[name] = mean.total / divisor_of(mean.weight)
    return sums["loss"].weight, averages

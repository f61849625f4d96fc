"""Layers that gather their weights: one layer, or a stack in which the next layer's gather is in flight.

Each is a function with its own derivative. Its forward pass saves the values that the policy names; its backward pass
gathers the weights again, and scatters each gradient once, after the last microbatch.

Why not jax.checkpoint around gather and layer? It would gather again too. But a policy could then save gathered
weights, and each microbatch would gather the weights and scatter a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._jax.compat import eval_shape, varying_axes
from shardkit.collectives._sums import add_terms, typed_zeros, wide_zeros
from shardkit.on_device.batch import take_row
from shardkit.on_device.handles import gather_kept, is_handle, open_handles, reduce_to_part, strip_handles
from shardkit.remat.recompute import (
    LayerPasses,
    LeafPartition,
    Leaves,
    Traced,
    WantedGradients,
    is_differentiable,
    run_for_results,
)

LayerFn = Callable[[Any, Any], Any]
# One layer with gathered weights: `(weights, shared, x) -> (y, residuals)`, lists of leaves.
Forward = Callable[[Leaves, Leaves, Leaves], tuple[list[Any], list[Any]]]


def regather_layer(layer_fn: LayerFn, weights: Any, x: Any, *, policy: Any, microbatches: int = 1) -> Any:
    """`layer_fn(open_handles(weights), x)`, whose backward pass gathers the weights again.

    Several microbatches, which dim 0 of the activations counts, run one after the other between gathering the weights
    and scattering their gradient.
    """
    return _RegatheredLayers(layer_fn, _OneLayer(), weights, x, policy, microbatches).run(weights, x)


def regather_stack(layer_fn: LayerFn, stacked: Any, x: Any, *, layers: int, policy: Any, microbatches: int = 1) -> Any:
    """A stack of layers, as by `regather_layer`, each gathered while its neighbor computes."""
    return _RegatheredLayers(layer_fn, _PrefetchedStack(layers), stacked, x, policy, microbatches).run(stacked, x)


class _RegatheredLayers:
    """A layer, or a stack of layers, as a function of flat leaves with a derivative of its own.

    Args:
        layer_fn: one layer, `(weights, x) -> y`, of gathered weights.
        sweep: when which layer is gathered and run.
        weights: handles and arrays: the layer's, or the stack's.
        x: activations; with several microbatches dim 0 counts them.
        policy: what the forward pass saves.
        microbatches: their number.
    """

    def __init__(
        self,
        layer_fn: LayerFn,
        sweep: _OneLayer | _PrefetchedStack,
        weights: Any,
        x: Any,
        policy: Any,
        microbatches: int,
    ):
        def take_microbatch(x: Any) -> Any:
            return take_row(x, 0) if microbatches > 1 else x

        # Shapes alone: a gather that stood here would be sent in addition to those of the two passes.
        gathered = eval_shape(sweep.gather, weights)
        microbatch = eval_shape(take_microbatch, x)
        self._sweep = sweep
        self._policy = policy
        self._microbatches = microbatches
        self._layer = Traced(layer_fn, gathered, microbatch)
        self._examples = (jax.tree.leaves(gathered), self._layer.constants, jax.tree.leaves(microbatch))
        arguments = (weights, self._layer.constants, jax.tree.leaves(x))
        self._arguments = jax.tree.structure(arguments)
        flags = jax.tree.map(flag_differentiable, arguments, is_leaf=is_handle)
        self._differentiable = jax.tree.leaves(flags)
        # jax.jit and jax.checkpoint keep a trace, which may serve several calls that ask for different gradients. But
        # jax keeps one tree of residuals and one backward pass for all of them. So both are made for every possible
        # gradient. Which gradients a call asks for is told by its forward pass to its backward pass in the shape of an
        # empty array: the length is an index into this list.
        self._masks: list[list[bool]] = []

    def run(self, weights: Any, x: Any) -> Any:
        """The layer's or the stack's y."""
        call = jax.custom_vjp(self._run_primal)
        call.defvjp(self._run_forward, self._run_backward, symbolic_zeros=True)
        leaves = jax.tree.leaves((weights, self._layer.constants, x))
        return jax.tree.unflatten(jax.tree.structure(self._layer.out), call(leaves))

    @cached_property
    def _wanted(self) -> WantedGradients:
        """Every possible gradient."""
        weights, shared, x = jax.tree.unflatten(self._arguments, self._differentiable)
        return WantedGradients(jax.tree.leaves(strip_handles(weights)), shared, x)

    @cached_property
    def _passes(self) -> LayerPasses:
        return LayerPasses(self._layer, self._policy, self._microbatches, self._examples, self._wanted)

    def _run_primal(self, leaves: Leaves) -> list[Any]:
        """The call without a derivative: nothing is saved."""

        def run_layer(weights: Leaves, shared: Leaves, x: Leaves) -> tuple[list[Any], list[Any]]:
            def run_microbatch(x: Any) -> list[Any]:
                return jax.tree.leaves(self._layer(weights, x, constants=shared))

            if self._microbatches == 1:
                return run_microbatch(x), []
            return jax.lax.map(run_microbatch, x), []

        weights, shared, x = jax.tree.unflatten(self._arguments, leaves)
        y, _ = self._sweep.forward(run_layer, weights, shared, x)
        return y

    def _run_forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        mask = self._find_asked(leaves)
        if mask not in self._masks:
            self._masks.append(mask)
        weights, shared, x = jax.tree.unflatten(self._arguments, [leaf.value for leaf in leaves])
        y, residuals = self._sweep.forward(self._passes.forward, weights, shared, x)
        mask_number = jnp.zeros((0, self._masks.index(mask)))
        return y, (weights, shared, residuals, mask_number)

    def _find_asked(self, leaves: Leaves) -> list[bool]:
        """For each leaf, whether this call asks for its gradient."""
        asked = []
        for flag, leaf in zip(self._differentiable, leaves, strict=True):
            asked.append(flag and leaf.perturbed)
        if self._sweep.is_stack:  # after the first layer, every activation depends on weights
            _, _, x = self._examples
            first = len(leaves) - len(x)
            asked[first:] = self._differentiable[first:]
        return asked

    def _run_backward(self, saved: Any, dy: Leaves) -> tuple[list[Any]]:
        weights, shared, residuals, mask_number = saved
        asked = self._masks[mask_number.shape[1]]
        cotangents = []
        for ct, out in zip(dy, jax.tree.leaves(self._layer.out), strict=True):
            if is_differentiable(out):
                cotangents.append(_materialize(ct))
        # The sweep returns every possible gradient. Gradients that nobody asks for are dropped, with all that only they
        # need.
        flags = list(compress(asked, self._differentiable))
        run = partial(self._sweep.backward, self._passes, self._wanted)
        grads = run_for_results(run, flags, weights, shared, residuals, cotangents)
        # To jax None is a gradient of zeros.
        zeros = [None] * asked.count(False)
        return (LeafPartition(asked).combine(grads, zeros),)


class _OneLayer:
    """One layer, gathered before its forward pass and again before its backward pass."""

    is_stack = False

    def gather(self, weights: Any) -> Any:
        """The weights of the layer."""
        return open_handles(weights)

    def forward(self, run_layer: Forward, weights: Any, shared: Leaves, x: Leaves) -> tuple[list[Any], Any]:
        """y and residuals, with the secondary parts that `fsdp(secondary=...)` keeps for the backward pass."""
        # The gather stands directly before its layer, inside the loop over layers: outside of this loop all layers'
        # weights would be in memory at once. It stands outside of the loop over microbatches, which is in `run_layer`:
        # inside it each microbatch would gather.
        weights, secondary = gather_kept(weights)
        y, residuals = run_layer(jax.tree.leaves(open_handles(weights)), shared, x)
        return y, (residuals, secondary)

    def backward(
        self, passes: LayerPasses, wanted: WantedGradients, weights: Any, shared: Leaves, residuals: Any, dy: Leaves
    ) -> list[Any]:
        """The gradients of weights, shared leaves and activations that are wanted."""
        residuals, secondary = residuals
        nearby, _ = gather_kept(weights, secondary)
        # The weights are gathered a second time, because the forward pass has not kept them.
        delayed = _delay_gathers(nearby, dy)
        grads, dx = passes.backward(jax.tree.leaves(open_handles(delayed)), shared, residuals, dy)
        # Here the layer's gradients are sums over all microbatches, and are reduced once. Earlier, each microbatch
        # would send its own gradients; later, outside of the loop over layers, all layers' whole gradients would be in
        # memory.
        nodes = _select_nodes(weights, wanted) + list(compress(shared, wanted.shared))
        return _reduce_to_parts(nodes, grads) + dx


def _delay_gathers(weights: Any, dy: Leaves) -> Any:
    """The weights, not gathered before the cotangents exist.

    Without a barrier the compiler merges this gather with the gather of the forward pass, and keeps all weights in
    between. The results of a barrier vary over the axes of all its operands. So a part waits only for cotangents that
    vary over no other axes than the part.
    """

    def delay(node: Any) -> Any:
        if not is_handle(node) or not node.gathers:
            return node
        field = "part" if node.whole is None else "whole"  # what is gathered
        x = getattr(node, field)
        cotangents = []
        for cotangent in dy:
            if varying_axes(cotangent) <= varying_axes(x):
                cotangents.append(cotangent)
        x, _ = jax.lax.optimization_barrier((x, cotangents))
        return replace(node, **{field: x})

    return jax.tree.map(delay, weights, is_leaf=is_handle)


class _StackResiduals(NamedTuple):
    """The values that the forward pass of a prefetched stack saves."""

    layers: Any  # residuals and secondary parts of all layers but the last, stacked
    last: Any  # residuals and secondary parts of the last layer
    weights: list[Any]  # the gathered weights of the last layer


class _PrefetchedStack:
    """A stack of layers, each gathered while its neighbor computes.

    Worked example: the two passes of three layers, from top to bottom. In a line, neither side needs the other, so that
    the compiler may overlap them.

        compute              gather in flight
                             layer 0
        forward, layer 0     layer 1
        forward, layer 1     layer 2
        forward, layer 2                        (the weights of layer 2 are kept)
        backward, layer 2    layer 1
        backward, layer 1    layer 0
        backward, layer 0
    """

    is_stack = True

    def __init__(self, layers: int):
        self.layers = layers

    def gather(self, stacked: Any) -> Any:
        """The weights of layer 0: the other layers' have the same shapes, for which this is called."""
        return open_handles(take_row(stacked, 0))

    def forward(self, run_layer: Forward, stacked: Any, shared: Leaves, x: Leaves) -> tuple[list[Any], Any]:
        """All layers, each gathered while the one before it computes; the last one is outside the loop.

        Its gathered weights are kept: the backward pass begins with it, when no compute is left to hide another gather.
        """

        def fetch(number: Any) -> Any:
            weights, secondary = gather_kept(take_row(stacked, number))
            return jax.tree.leaves(open_handles(weights)), secondary

        def run_round(carry: Any, number: jax.Array) -> Any:
            x, (weights, secondary) = carry
            # The gather is issued before the layer and used in the next round. Issued after the layer, it would have no
            # compute to overlap with.
            following = fetch(number + 1)
            x, residuals = run_layer(weights, shared, x)
            return (x, following), (residuals, secondary)

        carry = (x, fetch(0))
        carry, residuals = jax.lax.scan(run_round, carry, jnp.arange(self.layers - 1))
        x, (weights, secondary) = carry
        x, last = run_layer(weights, shared, x)
        return x, _StackResiduals(residuals, (last, secondary), weights)

    def backward(
        self,
        passes: LayerPasses,
        wanted: WantedGradients,
        stacked: Any,
        shared: Leaves,
        residuals: _StackResiduals,
        dy: Leaves,
    ) -> list[Any]:
        """All layers from the last to the first, each gathered while the one after it computes."""
        layer_residuals, secondary = residuals.layers
        last_residuals, _ = residuals.last
        nodes = _select_nodes(stacked, wanted)
        shared_nodes = list(compress(shared, wanted.shared))

        def fetch(number: Any) -> list[Any]:
            kept = take_row(secondary, number)
            weights, _ = gather_kept(take_row(stacked, number), kept)
            return jax.tree.leaves(open_handles(weights))

        def run_layer(number: Any, weights: Leaves, residuals: Leaves, sums: Any) -> Any:
            dy, stack_grads, shared_sums = sums
            grads, dx = passes.backward(weights, shared, residuals, dy)
            # A layer's gradients are reduced in its round, for the reason that `_OneLayer` gives. The gradients of
            # shared leaves are sums over layers, and are reduced once, after the last round.
            layer_grads = _reduce_to_parts(nodes, grads[: len(nodes)])
            stored_grads = []
            for stack, grad in zip(stack_grads, layer_grads, strict=True):
                stored_grads.append(jax.lax.dynamic_update_index_in_dim(stack, grad, number, 0))
            return dx, stored_grads, add_terms(shared_sums, grads[len(nodes) :])

        def run_round(carry: Any, number: jax.Array) -> Any:
            weights, sums = carry
            previous = fetch(number - 1)
            sums = run_layer(number, weights, take_row(layer_residuals, number), sums)
            return (previous, sums), None

        # [layers, ...] of the parts: each round writes the row of its layer, so memory holds one whole gradient at a
        # time.
        stack_grads = [typed_zeros(part) for part in strip_handles(nodes)]
        shared_sums = [wide_zeros(leaf) for leaf in shared_nodes]
        sums = (dy, stack_grads, shared_sums)
        final = self.layers - 1
        previous: list[Any] = []
        if final > 0:
            # Issued before the backward pass of the last layer, which hides it.
            previous = fetch(final - 1)
        sums = run_layer(final, residuals.weights, last_residuals, sums)
        if final > 0:
            # Layer 0 stands after the loop: behind it nothing is left to gather.
            numbers = jnp.arange(final - 1, 0, -1)
            (previous, sums), _ = jax.lax.scan(run_round, (previous, sums), numbers)
            sums = run_layer(0, previous, take_row(layer_residuals, 0), sums)
        dx, stack_grads, shared_sums = sums
        shared_grads = _reduce_to_parts(shared_nodes, shared_sums)
        return [*stack_grads, *shared_grads, *dx]


def _select_nodes(weights: Any, wanted: WantedGradients) -> list[Any]:
    """The handles and arrays whose gradient is wanted."""
    return list(compress(jax.tree.leaves(weights, is_leaf=is_handle), wanted.weights))


def _reduce_to_parts(nodes: Leaves, grads: Leaves) -> list[jax.Array]:
    """Gradients of weights: those of handles are summed over devices and scattered, those of arrays only cast."""
    return [reduce_to_part(node, grad) for node, grad in zip(nodes, grads, strict=True)]


def flag_differentiable(node: Any) -> Any:
    """For an array, or for each array of a handle, whether it can have a gradient."""
    if not is_handle(node):
        return is_differentiable(node)
    flags = replace(node, part=is_differentiable(node.part))
    if node.whole is not None:
        flags = replace(flags, whole=False)  # the gradient of a whole weight goes to its part
    return flags


def _materialize(ct: Any) -> Any:
    """A cotangent as an array: jax passes zeros as a symbol."""
    if isinstance(ct, jax.custom_derivatives.SymbolicZero):
        return typed_zeros(ct.aval)
    return ct

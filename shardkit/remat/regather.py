"""Layers that gather their weights: one layer, or a stack in which the next layer's gather is in flight.

Each is a function with its own derivative. Its forward pass saves what the policy names; its backward pass gathers the
weights again, and scatters each gradient once, after the last microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._jax.compat import eval_shape, varying_axes
from shardkit.collectives._sums import add_terms, typed_zeros, wide_zeros
from shardkit.on_device.batch import row
from shardkit.on_device.handles import gather_kept, is_handle, open_handles, parts, reduce_to_part
from shardkit.remat.recompute import Halves, Leaves, Traced, halves, learnable, some_of

Forward = Callable[[Leaves, Leaves, Leaves], tuple[list[Any], list[Any]]]


def regathered(layer_fn: Callable[[Any, Any], Any], weights: Any, x: Any, *, policy: Any, microbatches: int = 1) -> Any:
    """`layer_fn(opened(weights), x)`, whose backward pass gathers the weights again.

    Several microbatches, which dim 0 of the activations counts, run one after the other between gathering the weights
    and scattering their gradient.
    """
    sweep = _Sweep(open_handles, _one_layer, _one_layer_back, stack=False)
    return _with_derivative(layer_fn, sweep, weights, x, policy, microbatches)


def regathered_stack(
    layer_fn: Callable[[Any, Any], Any], stacked: Any, x: Any, *, layers: int, policy: Any, microbatches: int = 1
) -> Any:
    """A stack of layers, as by `regathered`, each gathered while its neighbor computes."""
    forward, backward = partial(_prefetched, layers=layers), partial(_prefetched_back, layers=layers)
    sweep = _Sweep(lambda w: open_handles(row(w, 0)), forward, backward, stack=True)
    return _with_derivative(layer_fn, sweep, stacked, x, policy, microbatches)


class _Wanted(NamedTuple):
    """For each gathered weight, shared leaf and activation whether its gradient is wanted."""

    weights: list[bool]
    shared: list[bool]
    x: list[bool]


class _Sweep(NamedTuple):
    """How one layer, or a stack of them, runs."""

    gather: Callable[[Any], Any]  # the weights of one layer, gathered
    # `(one layer's forward pass, weights, shared, x) -> (y, residuals)`
    forward: Callable[[Forward, Any, Leaves, Leaves], tuple[list[Any], Any]]
    # `(halves, wanted, weights, shared, residuals, dy) -> the wanted gradients`; the residuals of `forward` include the
    # weights' secondary parts
    backward: Callable[[Halves, _Wanted, Any, Leaves, Any, Leaves], list[Any]]
    stack: bool  # whether the weights are those of several layers


def _with_derivative(
    layer_fn: Callable[[Any, Any], Any], sweep: _Sweep, weights: Any, x: Any, policy: Any, microbatches: int
) -> Any:
    whole = eval_shape(sweep.gather, weights)
    one = eval_shape(lambda x: row(x, 0) if microbatches > 1 else x, x)
    layer = Traced(layer_fn, whole, one)
    examples = (jax.tree.leaves(whole), layer.constants, jax.tree.leaves(one))
    leaves, tree = jax.tree.flatten((weights, layer.constants, jax.tree.leaves(x)))
    possible = jax.tree.leaves(jax.tree.map(learned, jax.tree.unflatten(tree, leaves), is_leaf=is_handle))

    def primal(weights: Leaves, shared: Leaves, x: Leaves) -> tuple[list[Any], list[Any]]:
        def run(x: Any) -> list[Any]:
            return jax.tree.leaves(layer(weights, x, constants=shared))

        return (run(x) if microbatches == 1 else jax.lax.map(run, x)), []

    # One trace of a call may serve several: jax.jit and jax.checkpoint keep it. What is wanted may differ between them,
    # and jax keeps one tree of residuals and one backward pass for all. So both are those of every gradient that there
    # can be, and what is wanted goes from the forward pass to the backward pass as the shape of an empty array.
    masks: list[list[bool]] = []

    @cache
    def every() -> tuple[Halves, _Wanted]:
        flags, shared_flags, x_flags = jax.tree.unflatten(tree, possible)
        wanted = _Wanted(jax.tree.leaves(parts(flags)), shared_flags, x_flags)
        return halves(layer, policy, microbatches, examples, wanted), wanted

    @jax.custom_vjp
    def call(leaves: Leaves) -> list[Any]:
        return sweep.forward(primal, *jax.tree.unflatten(tree, leaves))[0]

    def forward(leaves: Leaves) -> tuple[list[Any], Any]:
        asked = [flag and leaf.perturbed for flag, leaf in zip(possible, leaves, strict=True)]
        if sweep.stack:  # after the first layer, every activation depends on weights
            first = len(leaves) - len(examples[2])
            asked[first:] = possible[first:]
        if asked not in masks:
            masks.append(asked)
        weights, shared, x = jax.tree.unflatten(tree, [leaf.value for leaf in leaves])
        y, residuals = sweep.forward(every()[0].forward, weights, shared, x)
        return y, (weights, shared, residuals, jnp.zeros((0, masks.index(asked))))

    def backward(saved: Any, dy: Leaves) -> tuple[list[Any]]:
        weights, shared, residuals, mask = saved
        asked = masks[mask.shape[1]]
        dy = [_instantiated(ct) for ct, out in zip(dy, jax.tree.leaves(layer.out), strict=True) if learnable(out)]
        run = partial(sweep.backward, *every())
        grads = iter(some_of(run, list(compress(asked, possible)), weights, shared, residuals, dy))
        return ([next(grads) if flag else None for flag in asked],)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return jax.tree.unflatten(jax.tree.structure(layer.out), call(leaves))


def _one_layer(forward: Forward, weights: Any, shared: Leaves, x: Leaves) -> tuple[list[Any], Any]:
    weights, kept = gather_kept(weights)
    y, residuals = forward(jax.tree.leaves(open_handles(weights)), shared, x)
    return y, (residuals, kept)


def _one_layer_back(
    passes: Halves, wanted: _Wanted, weights: Any, shared: Leaves, residuals: Any, dy: Leaves
) -> list[Any]:
    residuals, kept = residuals
    again = _after(dy, gather_kept(weights, kept)[0])
    grads, dx = passes.backward(jax.tree.leaves(open_handles(again)), shared, residuals, dy)
    return [*_part_gradients([*_nodes(weights, wanted), *compress(shared, wanted.shared)], grads), *dx]


def _after(dy: Leaves, weights: Any) -> Any:
    """The weights, not gathered before the cotangents exist.

    Without a barrier the compiler merges this gather with that of the forward pass, and keeps all weights in between. A
    result of a barrier varies wherever one of its operands does, so a part waits only for those that vary no further.
    """

    def one(node: Any) -> Any:
        if not (is_handle(node) and node.gathers):
            return node
        held = "part" if node.whole is None else "whole"  # what is gathered
        x = getattr(node, held)
        first = [ct for ct in dy if varying_axes(ct) <= varying_axes(x)]
        return replace(node, **{held: jax.lax.optimization_barrier((x, first))[0]})

    return jax.tree.map(one, weights, is_leaf=is_handle)


def _prefetched(forward: Forward, stacked: Any, shared: Leaves, x: Leaves, *, layers: int) -> tuple[list[Any], Any]:
    """All layers, each gathered while the one before it computes; the last one is outside the loop.

    Its gathered weights are kept: the backward pass begins with it, when no compute is left to hide another gather.
    """

    def fetch(i: Any) -> Any:
        weights, kept = gather_kept(row(stacked, i))
        return jax.tree.leaves(open_handles(weights)), kept

    def body(carry: Any, i: jax.Array) -> Any:
        x, (weights, kept) = carry
        ahead = fetch(i + 1)
        x, residuals = forward(weights, shared, x)
        return (x, ahead), (residuals, kept)

    (x, (weights, kept)), residuals = jax.lax.scan(body, (x, fetch(0)), jnp.arange(layers - 1))
    x, last = forward(weights, shared, x)
    return x, (residuals, (last, kept), weights)


def _prefetched_back(
    passes: Halves, wanted: _Wanted, stacked: Any, shared: Leaves, residuals: Any, dy: Leaves, *, layers: int
) -> list[Any]:
    """All layers from the last to the first, each gathered while the one after it computes."""
    (residuals, kept), (last, _), weights = residuals
    nodes, shared_nodes = _nodes(stacked, wanted), list(compress(shared, wanted.shared))

    def fetch(i: Any, kept: Leaves) -> list[Any]:
        return jax.tree.leaves(open_handles(gather_kept(row(stacked, i), kept)[0]))

    def layer(i: Any, weights: Leaves, residuals: Leaves, carry: Any) -> Any:
        dy, stores, sums = carry
        grads, dx = passes.backward(weights, shared, residuals, dy)
        found = _part_gradients(nodes, grads[: len(nodes)])
        stores = [jax.lax.dynamic_update_index_in_dim(s, g, i, 0) for s, g in zip(stores, found, strict=True)]
        return dx, stores, add_terms(sums, grads[len(nodes) :])

    def body(carry: Any, i: jax.Array) -> Any:
        weights, carry = carry
        ahead = fetch(i - 1, row(kept, i - 1))
        return (ahead, layer(i, weights, row(residuals, i), carry)), None

    stores = [typed_zeros(p) for p in parts(nodes)]
    carry = (dy, stores, [wide_zeros(leaf) for leaf in shared_nodes])
    final = layers - 1
    ahead = fetch(final - 1, row(kept, final - 1)) if final else []
    carry = layer(final, weights, last, carry)
    if final:
        (ahead, carry), _ = jax.lax.scan(body, (ahead, carry), jnp.arange(final - 1, 0, -1))
        carry = layer(0, ahead, row(residuals, 0), carry)
    dx, stores, sums = carry
    return [*stores, *_part_gradients(shared_nodes, sums), *dx]


def _nodes(weights: Any, wanted: _Wanted) -> list[Any]:
    """The handles and arrays whose gradient is wanted."""
    return list(compress(jax.tree.leaves(weights, is_leaf=is_handle), wanted.weights))


def _part_gradients(nodes: Leaves, grads: Leaves) -> list[jax.Array]:
    return [reduce_to_part(node, grad) for node, grad in zip(nodes, grads, strict=True)]


def learned(node: Any) -> Any:
    """For an array, or for each array of a handle, whether its gradient is wanted."""
    if is_handle(node):
        return replace(node, part=learnable(node.part), whole=None if node.whole is None else False)
    return learnable(node)


def _instantiated(ct: Any) -> Any:
    if isinstance(ct, jax.custom_derivatives.SymbolicZero):
        return typed_zeros(ct.aval)
    return ct

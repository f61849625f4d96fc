"""Layers that open their own weights: one by itself, or a stack in which the next layer's gather is on its way.

Both are functions with a derivative of their own. Forward they keep what the policy saves; backward they gather the
weights again, and scatter each gradient once, after the last microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._compat import varying_axes
from shardkit.collectives._sums import typed_zeros, wide_zeros
from shardkit.partitioning.handles import is_handle, opened, part_gradient, parts
from shardkit.remat.recompute import Halves, Mask, Traced, learnable

Leaves = Sequence[Any]
Forward = Callable[[Leaves, Leaves, Leaves], tuple[list[Any], list[Any]]]


def reopened(
    layer_fn: Callable[[Any, Any], Any], weights: Any, x: Any, *, policy: Any, microbatches: int = 1, layers: int = 0
) -> Any:
    """`layer_fn(opened(weights), x)`, with weights that are gathered again for the backward pass.

    Args:
        layer_fn: a layer.
        weights: pytree of handles and arrays.
        x: pytree of activations; of several microbatches, which are dim 0.
        policy: the jax policy of what may be saved.
        microbatches: how many run one after the other between gathering the weights and scattering their gradient.
        layers: of a stack, the layers that dim 0 of the weights counts: each is gathered while its neighbour computes.
    """
    whole = jax.eval_shape(lambda w: opened(_at(w, 0) if layers else w), weights)
    one = jax.eval_shape(lambda x: _at(x, 0) if microbatches > 1 else x, x)
    layer = Traced(layer_fn, whole, one)
    examples = (jax.tree.leaves(whole), layer.shared, jax.tree.leaves(one))
    args = (weights, layer.shared, jax.tree.leaves(x))
    leaves, tree = jax.tree.flatten(args)
    mask = Mask(jax.tree.leaves(jax.tree.map(learned, args, is_leaf=is_handle)))
    sweep = (lambda *args: _ahead(*args, layers=layers)) if layers else _here
    sweep_back = (lambda *args: _back_ahead(*args, layers=layers)) if layers else _back_here

    def primal(weights: Leaves, shared: Leaves, x: Leaves) -> tuple[list[Any], list[Any]]:
        run = lambda x: layer(weights, shared, x)  # noqa: E731
        return (run(x) if microbatches == 1 else jax.lax.map(run, x)), []

    @jax.custom_vjp
    def call(learned: Leaves, others: Leaves) -> list[Any]:
        return sweep(primal, *jax.tree.unflatten(tree, mask.join(learned, others)))[0]

    def forward(learned: Leaves, others: Leaves) -> tuple[list[Any], Any]:
        flags = jax.tree.unflatten(tree, mask.join([leaf.perturbed for leaf in learned], [False] * len(others)))
        values = mask.join(*([leaf.value for leaf in leaves] for leaves in (learned, others)))
        weights, shared, x = jax.tree.unflatten(tree, values)
        # In a stack, activations follow from weights.
        wanted = [jax.tree.leaves(parts(flags[0])), flags[1], [learnable(leaf) for leaf in x] if layers else flags[2]]
        halves = Halves(layer, policy, microbatches, examples, wanted)
        y, saved = sweep(halves.forward, weights, shared, x)

        def backward(weights: Any, shared: Leaves, saved: Any, ct: Leaves) -> tuple[list[Any], None]:
            ct = [_instantiated(c) for c in halves.out.split(ct)[0]]
            grads = iter(sweep_back(halves, weights, shared, saved, ct))
            asked = zip([flag for flags in wanted for flag in flags], jax.tree.leaves(parts(args)), strict=True)
            return [next(grads) if flag else None for flag, leaf in asked if learnable(leaf)], None

        return y, jax.tree_util.Partial(backward, weights, shared, saved)

    call.defvjp(forward, lambda backward, ct: backward(ct), symbolic_zeros=True)
    return jax.tree.unflatten(layer.structure, call(*mask.split(leaves)))


def _here(forward: Forward, weights: Any, shared: Leaves, x: Leaves) -> tuple[list[Any], list[Any]]:
    return forward(jax.tree.leaves(opened(weights)), shared, x)


def _back_here(halves: Halves, weights: Any, shared: Leaves, saved: Leaves, ct: Leaves) -> list[Any]:
    grads, x_grads = halves.backward(jax.tree.leaves(opened(_waiting(weights, ct))), shared, saved, ct)
    nodes = [*jax.tree.leaves(weights, is_leaf=is_handle), *shared]
    return [*_part_gradients(halves.wanted_of(nodes), grads), *x_grads]


def _waiting(weights: Any, ct: Leaves) -> Any:
    """The weights, not to be gathered before the cotangents are there.

    Without a barrier the compiler finds the same gather in the forward pass, and keeps all weights from there to here.
    What comes out of one varies wherever something that goes in does, so a part waits for those that vary no further.
    """

    def one(node: Any) -> Any:
        if not (is_handle(node) and node.gathers):
            return node
        first = [c for c in ct if varying_axes(c) <= varying_axes(node.part)]
        return node.replaced(part=jax.lax.optimization_barrier((node.part, first))[0])

    return jax.tree.map(one, weights, is_leaf=is_handle)


def _ahead(forward: Forward, stacked: Any, shared: Leaves, x: Leaves, *, layers: int) -> tuple[list[Any], Any]:
    """All layers, each gathered while the one before it computes; the last one stands outside the loop."""

    def fetch(i: Any) -> list[Any]:
        return jax.tree.leaves(opened(_at(stacked, i)))

    def body(carry: Any, i: jax.Array) -> Any:
        x, weights = carry
        ahead = fetch(i + 1)
        x, saved = forward(weights, shared, x)
        return (x, ahead), saved

    (x, weights), saved = jax.lax.scan(body, (x, fetch(0)), jnp.arange(layers - 1))
    x, last = forward(weights, shared, x)
    return x, (saved, last)


def _back_ahead(halves: Halves, stacked: Any, shared: Leaves, saved: Any, ct: Leaves, *, layers: int) -> list[Any]:
    """All layers from the last to the first, each gathered while the one after it computes."""
    saved, last = saved
    stacks = halves.wanted_of(jax.tree.leaves(stacked, is_leaf=is_handle))
    held = halves.wanted_of([*[None] * len(halves.wanted[0]), *shared])[len(stacks) :]

    def fetch(i: Any) -> list[Any]:
        return jax.tree.leaves(opened(_at(stacked, i)))

    def layer(i: Any, weights: Leaves, saved: Leaves, carry: Any) -> Any:
        ct, stores, sums = carry
        grads, ct = halves.backward(weights, shared, saved, ct)
        found = _part_gradients(stacks, grads[: len(stacks)])
        stores = [jax.lax.dynamic_update_index_in_dim(s, g, i, 0) for s, g in zip(stores, found, strict=True)]
        return ct, stores, [s + g.astype(s.dtype) for s, g in zip(sums, grads[len(stacks) :], strict=True)]

    def body(carry: Any, i: jax.Array) -> Any:
        weights, carry = carry
        ahead = fetch(i - 1)
        return (ahead, layer(i, weights, _at(saved, i), carry)), None

    stores = [typed_zeros(p) for p in parts(stacks)]
    carry = (ct, stores, [wide_zeros(leaf) for leaf in held])
    final = layers - 1
    ahead = fetch(final - 1) if final else []
    carry = layer(final, fetch(final), last, carry)
    if final:
        (ahead, carry), _ = jax.lax.scan(body, (ahead, carry), jnp.arange(final - 1, 0, -1))
        carry = layer(0, ahead, _at(saved, 0), carry)
    ct, stores, sums = carry
    return [*stores, *_part_gradients(held, sums), *ct]


def _part_gradients(nodes: Leaves, grads: Leaves) -> list[jax.Array]:
    return [part_gradient(node, grad) for node, grad in zip(nodes, grads, strict=True)]


def _at(tree: Any, i: Any) -> Any:
    """A layer of a stack, or a microbatch of several."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree)


def learned(node: Any) -> Any:
    """For an array, or for each array of a handle, whether its gradient is wanted."""
    if is_handle(node):
        return node.replaced(part=learnable(node.part), whole=None if node.whole is None else False)
    return learnable(node)


def _instantiated(ct: Any) -> Any:
    if isinstance(ct, jax.custom_derivatives.SymbolicZero):
        return typed_zeros(ct.aval)
    return ct

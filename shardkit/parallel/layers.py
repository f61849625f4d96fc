"""A stack of layers: one after the other, with the next layer's weights on their way while this one computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._check import quoted
from shardkit._compat import varying_axes
from shardkit.collectives import vary
from shardkit.parallel.handles import gathered, is_handle, opened, parts, to_parts, with_parts

# What a layer's backward pass may find saved; gathered weights are among none of it.
POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
LayerFn = Callable[[Any, Any], Any]


def scan_layers(layer_fn: LayerFn, stacked: Any, x: Any, *, prefetch: bool = False, remat: str | None = None) -> Any:
    """Runs a stack of layers, `x = layer_fn(weights, x)` from the first to the last.

    One text of a loss runs on one device and under every plan: plain arrays are scanned as they are, handles are opened
    layer by layer.

    Args:
        layer_fn: a layer: its weights (one slice of `stacked`) and the activations to the next activations, of the
            same shapes and dtypes. With `prefetch` it must not close over values that are differentiated.
        stacked: pytree whose arrays and handles have the layer as dim 0; integers, such as layer numbers, are allowed.
        x: pytree of activations.
        prefetch: gather the next layer's weights while this one computes, forward and backward, and scatter the last
            layer's gradient meanwhile. Each layer is recomputed from its input.
        remat: what the backward pass recomputes: "full" all from the layer's input, "dots" all but the results of
            matmuls, "dots_without_batch" all but those of matmuls without batch dims; None keeps what jax keeps of
            plain arrays, and is "dots" for handles.

    Returns:
        The activations after the last layer.

    Raises:
        ValueError: an unknown policy, another policy than "full" with `prefetch`, or leaves with different numbers of
            layers.

    Cost: two all_gathers and one reduce_scatter of each layer's weights, with `prefetch` as without it.

    Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3.3: forward and backward prefetching.
    """
    if remat is not None and remat not in POLICIES:
        raise ValueError(f"scan_layers: remat must be None or one of {quoted(POLICIES)}; got {remat!r}. Choose one.")
    if prefetch and remat not in (None, "full"):
        raise ValueError(
            f"scan_layers: with prefetch every layer is recomputed from its input; got remat={remat!r}. Pass "
            "remat='full', or leave prefetch out."
        )
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(parts(stacked))}
    if len(counts) != 1:
        raise ValueError(
            f"scan_layers: all leaves must have the same number of layers along dim 0; got {sorted(counts)}. Stack "
            "them, and pass what the layers share through layer_fn."
        )
    (layers,) = counts
    first = jax.tree.map(lambda leaf: leaf[0], stacked)
    after = jax.eval_shape(lambda w, x: layer_fn(opened(w), x), first, x)
    x = jax.tree.map(lambda x, y: vary(x, tuple(varying_axes(y))), x, after)  # as the layers will type it
    handles = any(is_handle(leaf) for leaf in jax.tree.leaves(stacked, is_leaf=is_handle))
    if prefetch and handles:
        return _Prefetched(layer_fn, stacked, layers)(x)

    layer = gathered(layer_fn)
    if remat is not None:
        layer = jax.checkpoint(lambda w, x: layer_fn(opened(w), x), policy=POLICIES[remat])
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, stacked)[0]


class _Prefetched:
    """The stack as one function with its own derivative; what it differentiates are parts and plain leaves."""

    def __init__(self, layer_fn: LayerFn, stacked: Any, layers: int):
        self.layer_fn, self.stacked, self.layers = layer_fn, stacked, layers
        leaves, self.structure = jax.tree.flatten(parts(stacked))
        self.leaves = leaves
        self.floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def __call__(self, x: Any) -> Any:
        wholes = [h.whole for h in jax.tree.leaves(self.stacked, is_leaf=is_handle) if is_handle(h)]

        @jax.custom_vjp
        def run(learned: list[jax.Array], fixed: list[jax.Array], wholes: list[Any], x: Any) -> Any:
            return forward(learned, fixed, wholes, x)[0]

        def forward(learned: list[jax.Array], fixed: list[jax.Array], wholes: list[Any], x: Any) -> Any:
            fetch = self._fetcher(learned, fixed, wholes)

            def body(carry: Any, i: jax.Array) -> Any:
                x, weights = carry
                ahead = fetch(i + 1)
                return (self.layer_fn(weights, x), ahead), x

            (x, weights), inputs = jax.lax.scan(body, (x, fetch(0)), jnp.arange(self.layers - 1))
            return self.layer_fn(weights, x), (learned, fixed, wholes, inputs, x)

        def backward(saved: Any, ct: Any) -> Any:
            learned, fixed, wholes, inputs, last = saved
            fetch = self._fetcher(learned, fixed, wholes)

            def layer_back(weights: Any, x: Any, ct: Any) -> Any:
                floats, others = self._split(weights)
                _, pull = jax.vjp(lambda floats, x: self.layer_fn(self._join(floats, others), x), floats, x)
                return pull(ct)

            def store(grads: Any, i: Any, whole: Any) -> Any:
                return [
                    jax.lax.dynamic_update_index_in_dim(buffer, part, i, 0)
                    for buffer, part in zip(grads, self._scatter(whole), strict=True)
                ]

            grads = [vary(jnp.zeros(p.shape, p.dtype), tuple(varying_axes(p))) for p in learned]
            final = self.layers - 1
            ahead = fetch(final - 1) if final else None
            whole, ct = layer_back(fetch(final), last, ct)

            def body(carry: Any, i: jax.Array) -> Any:
                ct, weights, whole, grads = carry
                ahead = fetch(i - 1)
                grads = store(grads, i + 1, whole)
                whole, ct = layer_back(weights, jax.tree.map(lambda x: x[i], inputs), ct)
                return (ct, ahead, whole, grads), None

            if final:
                order = jnp.arange(final - 1, 0, -1)
                (ct, ahead, whole, grads), _ = jax.lax.scan(body, (ct, ahead, whole, grads), order)
                grads = store(grads, 1, whole)
                whole, ct = layer_back(ahead, jax.tree.map(lambda x: x[0], inputs), ct)
            return store(grads, 0, whole), None, None, ct

        run.defvjp(forward, backward)
        learned = [leaf for leaf, floating in zip(self.leaves, self.floating, strict=True) if floating]
        fixed = [leaf for leaf, floating in zip(self.leaves, self.floating, strict=True) if not floating]
        return run(learned, fixed, wholes, x)

    def _fetcher(self, learned: list[jax.Array], fixed: list[jax.Array], wholes: list[Any]) -> Callable[[Any], Any]:
        """The opened weights of a layer, by its number."""
        leaves = self._join(learned, fixed)
        held = iter(wholes)
        tree = with_parts(self.stacked, leaves)
        tree = jax.tree.map(lambda h: h.replaced(whole=next(held)) if is_handle(h) else h, tree, is_leaf=is_handle)

        def fetch(i: Any) -> Any:
            return opened(jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree))

        return fetch

    def _scatter(self, whole: list[jax.Array]) -> list[jax.Array]:
        """The gradients of a layer's opened weights as the gradients of its parts."""
        nodes = jax.tree.leaves(self.stacked, is_leaf=is_handle)
        learned = [node for node, floating in zip(nodes, self.floating, strict=True) if floating]
        out = []
        for node, grad in zip(learned, whole, strict=True):
            if is_handle(node):
                dtype = node.part.dtype
                grad = to_parts(to_parts(grad, node.gathers, node.reduce), node.scatters, node.reduce).astype(dtype)
            out.append(grad)
        return out

    def _split(self, tree: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        leaves = jax.tree.leaves(tree)
        pairs = list(zip(leaves, self.floating, strict=True))
        return [x for x, floating in pairs if floating], [x for x, floating in pairs if not floating]

    def _join(self, learned: list[jax.Array], fixed: list[jax.Array]) -> Any:
        a, b = iter(learned), iter(fixed)
        return jax.tree.unflatten(self.structure, [next(a) if floating else next(b) for floating in self.floating])

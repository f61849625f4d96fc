"""Activations that pass through layers one after the other: their type, which one program for all layers needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardkit._jax.compat import varying_axes
from shardkit.collectives.axes import vary_like


def widen_carry(eval_layer: Callable[[Any], Any], x: Any) -> Any:
    """Activations, marked as varying over all axes over which those after some layer vary.

    One program runs all layers, as the body of a scan or on all devices of a pipeline, and what it takes has one type.
    So the layer is traced with wider types until it returns what it takes. `eval_layer` returns the activations after a
    layer, or their shapes and types.

    Worked example: a layer (a, b) -> (a * w, a + b), whose w alone varies over "data". After the first layer a varies
    too, and b after the second: the layer is traced three times.
    """
    while True:
        widened = jax.tree.map(vary_like, x, eval_layer(x))
        if _list_axes(widened) == _list_axes(x):
            return widened
        x = widened


def _list_axes(tree: Any) -> list[frozenset[str]]:
    """The axes over which each leaf varies; in a list, since two trees are equal only if their classes say so."""
    return [varying_axes(leaf) for leaf in jax.tree.leaves(tree)]

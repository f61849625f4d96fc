"""Gradients of some leaves: the others are constants of the loss, and no gradient of theirs is computed or sent."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

_RULE = "value_and_grad: trained must be a tree of bools like the parameters, or a prefix of them"


def check_trained(trained: Any) -> None:
    """Refuses what is no tree of bools, or True nowhere.

    Raises:
        TypeError: a leaf that is not a bool.
        ValueError: no leaf is True.
    """
    flags = jax.tree.leaves(trained)
    for flag in flags:
        if not isinstance(flag, bool):
            raise TypeError(f"{_RULE}; got {flag!r} in it. Pass for example {{'layers': False, 'head': True}}.")
    if trained is not None and not any(flags):
        raise ValueError(f"{_RULE}, True for some leaf; got {trained!r}. Set True for what is trained.")


def chosen(tree: Any, trained: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Callable[[list[Any]], Any]]:
    """The leaves that are trained; the tree with other values for them; their gradients in a tree with zeros elsewhere.

    The zeros are the same on all devices, so that nothing sums them.

    Raises:
        ValueError: `trained` is not a prefix of the tree.
    """
    leaves, structure = jax.tree.flatten(tree)
    flags = _flags(tree, True if trained is None else trained)

    def joined(values: list[Any], others: list[Any]) -> Any:
        given = iter(values)
        each = [next(given) if flag else other for flag, other in zip(flags, others, strict=True)]
        return jax.tree.unflatten(structure, each)

    def gradients(values: list[Any]) -> Any:
        return joined(values, [jnp.zeros(x.shape, x.dtype) for x in leaves])

    return list(compress(leaves, flags)), lambda values: joined(values, leaves), gradients


def _flags(tree: Any, trained: Any) -> list[bool]:
    """For each leaf of the tree whether it is trained."""
    try:
        return jax.tree.leaves(jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), trained, tree))
    except ValueError as error:
        ours, theirs = jax.tree.structure(trained), jax.tree.structure(tree)
        raise ValueError(f"{_RULE}; got {ours} for {theirs}. Make it with jax.tree.map.") from error

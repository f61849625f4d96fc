"""The leaves that a GradFn trains, by `trained=`, and those that it freezes: no gradient, and no update in the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

_TRAINED = "value_and_grad: trained must be a tree of bools like the parameters, or a prefix of them"


def check_trained(trained: Any) -> None:
    """Refuses what is no tree of bools, or True nowhere."""
    flags = jax.tree.leaves(trained)
    for flag in flags:
        if not isinstance(flag, bool):
            raise TypeError(f"{_TRAINED}; got {flag!r} in it. Pass for example {{'layers': False, 'head': True}}.")
    if trained is not None and not any(flags):
        raise ValueError(f"{_TRAINED}, True for some leaf; got {trained!r}. Set True for what is trained.")


# What GradFns say of the leaves that they train, while a step is traced: it leaves frozen ones as they are.
_NOTED: ContextVar[list[Any] | None] = ContextVar("trained leaves", default=None)


@contextmanager
def noting_trained() -> Iterator[list[Any]]:
    """Inside of it, each GradFn with a `trained` notes a tree of bools, True for the leaves that it trains."""
    noted: list[Any] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def frozen_leaves(noted: list[Any], structure: Any) -> list[bool]:
    """For each leaf of the parameters, whether no GradFn trains it. A sum of several GradFns trains what one does.

    `structure` is that of the parameters in their original form.

    Raises:
        ValueError: a GradFn with frozen leaves was passed another tree than the parameters of the step.
    """
    frozen = [bool(noted)] * structure.num_leaves
    for flags in noted:
        tree: Any = jax.tree.structure(flags)
        if tree != structure:
            if all(jax.tree.leaves(flags)):
                return [False] * structure.num_leaves
            raise ValueError(
                "make_train_step: a GradFn with trained= must be passed the parameters of the step, which keeps frozen "
                f"leaves as they are; it was passed {tree} for {structure}. Pass it the same "
                "tree, or use jax.lax.stop_gradient in the loss and optax.masked around the optimizer."
            )
        for number, is_trained in enumerate(jax.tree.leaves(flags)):
            frozen[number] = frozen[number] and not is_trained
    return frozen


def chosen(tree: Any, trained: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Callable[[list[Any]], Any]]:
    """The leaves that are trained; the tree with other values for them; their gradients in a tree with zeros elsewhere.

    The zeros are the same on all devices, so that nothing sums them. `trained` must be a prefix of the tree.
    """
    leaves, structure = jax.tree.flatten(tree)
    flags = _flags(tree, True if trained is None else trained)
    noted = _NOTED.get()
    if noted is not None:
        noted.append(jax.tree.unflatten(structure, flags))

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
        raise ValueError(f"{_TRAINED}; got {ours} for {theirs}. Make it with jax.tree.map.") from error

"""The leaves that a GradFn trains, by `trained=`, and those that it freezes: no gradient, and no update in the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

_TRAINED = "value_and_grad: trained must be a tree of bools like the parameters, or a prefix of them"


def check_trained(trained: Any) -> None:
    """Refuses a `trained` that is no tree of bools, or that is False everywhere."""
    flags = jax.tree.leaves(trained)
    for flag in flags:
        if not isinstance(flag, bool):
            raise TypeError(f"{_TRAINED}; got {flag!r} in it. Pass for example {{'layers': False, 'head': True}}.")
    if trained is not None and not any(flags):
        raise ValueError(f"{_TRAINED}, True for some leaf; got {trained!r}. Set True for the leaves that you train.")


# While a step is traced, each GradFn adds a tree of bools here: which leaves it trains. The step leaves leaves that no
# GradFn trains as they are.
_NOTED: ContextVar[list[Any] | None] = ContextVar("trained leaves", default=None)


@contextmanager
def noting_trained() -> Iterator[list[Any]]:
    """A context in which each GradFn notes a tree of bools in the list: True for the leaves that it trains."""
    noted: list[Any] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def frozen_leaves(noted: list[Any], structure: Any) -> list[bool]:
    """For each leaf of the parameters, whether it is frozen: no GradFn of the step trains it.

    `structure` is the tree structure of the parameters in their original form.

    Raises:
        ValueError: a GradFn with frozen leaves was passed another tree than the parameters of the step.
    """
    # Frozen until some GradFn trains it. A GradFn of the user's own notes nothing, and then all leaves are trained.
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


class TrainedLeaves:
    """Which leaves of a tree are trained, by `trained=`, a prefix of the tree: splits trees like it, and joins them.

    Making one notes the trained leaves for the step that is being traced.

    Worked example: of `{"head": w, "norm": g, "scale": s}` with `trained={"head": True, "norm": False, "scale": True}`,
    `select()` is `[w, s]`, `merge([v, t])` is `{"head": v, "norm": g, "scale": t}`, and `with_zeros([dw, ds])` is
    `{"head": dw, "norm": 0, "scale": ds}`.
    """

    def __init__(self, tree: Any, trained: Any):
        self._leaves, self._structure = jax.tree.flatten(tree)
        if trained is None:
            trained = True
        self._flags = _repeat_flags(tree, trained)
        noted = _NOTED.get()
        if noted is not None:
            noted.append(jax.tree.unflatten(self._structure, self._flags))

    def select(self, tree: Any = None) -> list[Any]:
        """The leaves that are trained, of this tree or another one."""
        leaves = self._leaves
        if tree is not None:
            leaves = jax.tree.leaves(tree)
        return list(itertools.compress(leaves, self._flags))

    def merge(self, values: list[Any]) -> Any:
        """The tree with other values for the leaves that are trained."""
        return self._fill_trained(values, self._leaves)

    def with_zeros(self, grads: list[Any]) -> Any:
        """The gradients of all leaves. Zeros are the same on all devices, so that nothing sums them."""
        zeros = [jnp.zeros(x.shape, x.dtype) for x in self._leaves]
        return self._fill_trained(grads, zeros)

    def _fill_trained(self, values: list[Any], constants: list[Any]) -> Any:
        """The tree with these values for the trained leaves, in their order, and constants for the frozen ones."""
        leaves = list(constants)
        places = [place for place, is_trained in enumerate(self._flags) if is_trained]
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        return jax.tree.unflatten(self._structure, leaves)


def _repeat_flags(tree: Any, trained: Any) -> list[bool]:
    """For each leaf of the tree whether it is trained."""

    def repeat(flag: bool, subtree: Any) -> Any:
        return jax.tree.map(lambda _: flag, subtree)

    try:
        # `trained` first: jax lets the first tree be a prefix of the others.
        return jax.tree.leaves(jax.tree.map(repeat, trained, tree))
    except ValueError as error:
        ours = jax.tree.structure(trained)
        theirs = jax.tree.structure(tree)
        raise ValueError(f"{_TRAINED}; got {ours} for {theirs}. Make it with jax.tree.map.") from error

"""What a backward pass finds saved and what it computes again; weights are never among what is saved.

A layer is cut into two halves: a forward pass that returns what a policy saves, and a backward pass that is given it.
Only values that depend on the activations are handed over. Weights, and all that follows from them alone, the backward
pass makes again, so that no policy can keep a gathered weight, not even by way of a cast of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit import _compat
from shardkit._check import quoted
from shardkit.collectives._sums import DOT, wide_zeros

POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names(DOT)
    ),
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
Remat = str | tuple[str, ...] | Callable[..., Any] | None


def policy_of(where: str, remat: Remat, offload: bool) -> Any:
    """The jax policy that `remat` names, given as a name, as the names of what is saved, or as itself."""
    if offload:
        return _offloading(where, remat)
    if isinstance(remat, str) and remat in POLICIES:
        return POLICIES[remat]
    if isinstance(remat, tuple) and remat and all(isinstance(name, str) for name in remat):
        return jax.checkpoint_policies.save_only_these_names(*remat)
    if callable(remat):
        return remat
    raise ValueError(
        f"{where}: remat must be None, one of {quoted(POLICIES)}, a tuple of checkpoint names, or a policy of "
        f"jax.checkpoint_policies; got {remat!r}. Choose one."
    )


def _offloading(where: str, remat: Remat) -> Any:
    """The policy that puts into the host's memory what `remat` would save."""
    policies = jax.checkpoint_policies
    if remat == "dots_without_batch":
        return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    if isinstance(remat, tuple) and remat and all(isinstance(name, str) for name in remat):
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(remat),
            offload_src="device",
            offload_dst="pinned_host",
        )
    raise ValueError(
        f"{where}: offload must go with remat='dots_without_batch' or a tuple of checkpoint names, which say what is "
        f"put into the host's memory; got remat={remat!r}. Pass one of them, or leave offload out."
    )


class Mask:
    """Cuts a list of leaves into those that are chosen and the others, and joins them again."""

    def __init__(self, chosen: Sequence[bool]):
        self.chosen = tuple(chosen)

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The chosen leaves, and the others."""
        pairs = list(zip(leaves, self.chosen, strict=True))
        return [x for x, chosen in pairs if chosen], [x for x, chosen in pairs if not chosen]

    def join(self, chosen: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """All leaves in their order."""
        a, b = iter(chosen), iter(others)
        return [next(a) if chosen else next(b) for chosen in self.chosen]


def learnable(x: Any) -> bool:
    """Whether an array can have a gradient."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


class Traced:
    """A layer as a function of three lists of leaves: its weights, what it closes over, and the activations.

    Attributes:
        shared: the arrays that the layer closes over.
        structure: of what it returns.
    """

    def __init__(self, layer_fn: Callable[[Any, Any], Any], weights: Any, x: Any):
        closed, out = jax.make_jaxpr(layer_fn, return_shape=True)(weights, x)
        self._jaxpr, self.shared = closed.jaxpr, list(closed.consts)
        self.out, self.structure = jax.tree.flatten(out)

    def __call__(self, weights: Sequence[Any], shared: Sequence[Any], x: Sequence[Any]) -> list[Any]:
        return _compat.eval_jaxpr(self._jaxpr, shared, *weights, *x)


class Halves:
    """The forward and the backward pass of a traced layer over some microbatches, one after the other.

    Args:
        layer: the layer.
        policy: what may be saved; None saves all that the backward pass needs.
        microbatches: their number; of several, dim 0 of activations and of what is saved counts them.
        examples: the leaves of weights, of what is shared, and of one microbatch's activations.
        wanted: for each of them whether its gradient is wanted.
    """

    def __init__(
        self,
        layer: Traced,
        policy: Any,
        microbatches: int,
        examples: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
        wanted: Sequence[Sequence[bool]],
    ):
        self.microbatches, self.wanted = microbatches, wanted
        self.out = Mask([learnable(y) for y in layer.out])
        weights, given = len(examples[0]), len(examples[0]) + len(examples[1])
        learned = Mask([flag for flags in wanted for flag in flags])

        def forward(*leaves: Any) -> Any:
            moving, others = learned.split(leaves)

            def run(moving: Sequence[Any]) -> Any:
                args = learned.join(moving, others)
                return self.out.split(layer(args[:weights], args[weights:given], args[given:]))

            saving = run if policy is None else jax.checkpoint(run, policy=policy, prevent_cse=False)
            y, pull, rest = jax.vjp(saving, moving, has_aux=True)
            kept, self.pull = jax.tree.flatten(pull)
            return self.out.join(y, rest), kept

        closed, (_, kept) = jax.make_jaxpr(forward, return_shape=True)(*examples[0], *examples[1], *examples[2])
        self._forward = partial(_compat.eval_jaxpr, closed.jaxpr, closed.consts)
        unmoved, moved = _compat.not_reached(closed.jaxpr, given, len(kept))
        self.saved = Mask(moved)
        self._unmoved = partial(_compat.eval_jaxpr, unmoved, closed.consts)

    def wanted_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Those of the leaves of weights, or of weights and what is shared, whose gradient is wanted."""
        flags = [*self.wanted[0], *self.wanted[1]][: len(leaves)]
        return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]

    def forward(self, weights: Sequence[Any], shared: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What the layer returns, and what its backward pass is to be given."""

        def one(x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            out = self._forward(*weights, *shared, *x)
            count = len(self.out.chosen)
            return out[:count], self.saved.split(out[count:])[0]

        return one(x) if self.microbatches == 1 else jax.lax.map(one, x)

    def backward(
        self, weights: Sequence[Any], shared: Sequence[Any], saved: Sequence[Any], ct: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The gradients of weights and shared leaves, in float32 if there are several microbatches, and of activations.

        Args:
            weights, shared, saved: as the forward pass was given and as it returned them.
            ct: cotangents of the results that can have one.
        """
        unmoved = self._unmoved(*weights, *shared)

        def one(saved: Sequence[Any], ct: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            pull = jax.tree.unflatten(self.pull, self.saved.join(saved, unmoved))
            (grads,) = pull(list(ct))
            before = sum(self.wanted[0]) + sum(self.wanted[1])
            return grads[:before], grads[before:]

        if self.microbatches == 1:
            return one(saved, ct)

        def add(sums: list[Any], each: Any) -> tuple[list[Any], list[Any]]:
            grads, x = one(*each)
            return [total + g.astype(total.dtype) for total, g in zip(sums, grads, strict=True)], x

        shapes, _ = jax.eval_shape(one, *jax.tree.map(lambda leaf: leaf[0], (saved, ct)))
        sums = [wide_zeros(g) for g in shapes]
        return jax.lax.scan(add, sums, (saved, ct))

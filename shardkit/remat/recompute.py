"""What is saved for a backward pass, and what it recomputes; gathered weights are never saved.

A layer is split into a forward pass that returns residuals, as a policy says, and a backward pass that takes them. Only
values that depend on activations are residuals: the backward pass recomputes whatever follows from weights alone, so
that no policy can save a gathered weight, or a cast of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from shardkit._arguments.checks import quoted
from shardkit._jax.compat import eval_shape, on_this_mesh
from shardkit._jax.jaxprs import not_reached
from shardkit.collectives._sums import DOT, add_terms, wide_zeros

POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names(DOT)
    ),
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
Leaves = Sequence[Any]
Remat = str | tuple[str, ...] | Callable[..., Any] | None


def policy_of(where: str, remat: Remat, offload: bool) -> Any:
    """The jax policy for `remat`: a policy's name, the names of what is saved, or a policy."""
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
        f"jax.checkpoint_policies; got {remat!r}. Pass for example remat='dots'."
    )


def _offloading(where: str, remat: Remat) -> Any:
    """The policy that saves to host memory what `remat` saves."""
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
        f"saved to host memory; got remat={remat!r}. Pass remat='dots_without_batch', or leave offload out."
    )


class Mask:
    """Splits a list of leaves into chosen ones and others, and joins them again."""

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
    """A function traced once, called with other arrays of the same shapes and types.

    Attributes:
        jaxpr: its equations.
        constants: the arrays that it closes over.
        out: the ShapeDtypeStructs of what it returns.
    """

    def __init__(self, fn: Callable[..., Any], *examples: Any):
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*examples)
        self.out = on_this_mesh(out)
        # What no result needs is not sent: a derivative computes its function again, as far as it needs that.
        self.jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
        self.constants = closed.consts

    def __call__(self, *args: Any, constants: Sequence[Any] | None = None) -> Any:
        """Its results for these arguments; `constants` replace the arrays that it closes over."""
        constants = self.constants if constants is None else constants
        flat = jax.core.eval_jaxpr(self.jaxpr, constants, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.out), flat)


def some_of(fn: Callable[..., list[Any]], flags: list[bool], *args: Any) -> list[Any]:
    """The results of a function that are flagged; what only the others need is neither computed nor sent."""
    if all(flags):
        return fn(*args)
    traced = Traced(fn, *args)
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, flags, instantiate=True)
    return jax.core.eval_jaxpr(jaxpr, traced.constants, *jax.tree.leaves(args))


class Halves(NamedTuple):
    """A layer's forward and backward pass over its microbatches, one after the other.

    Attributes:
        forward: `(weights, shared, x) -> (y, residuals)`, lists of leaves.
        backward: `(weights, shared, residuals, dy) -> (gradients of weights and shared leaves, dx)`: those wanted, with
            dy for the leaves of y that can have a gradient; over several microbatches sums in float32.
    """

    forward: Callable[[Leaves, Leaves, Leaves], tuple[list[Any], list[Any]]]
    backward: Callable[[Leaves, Leaves, Leaves, Leaves], tuple[list[Any], list[Any]]]


def halves(layer: Traced, policy: Any, microbatches: int, examples: Sequence[Leaves], wanted: Sequence[Any]) -> Halves:
    """The two passes of a layer.

    The leaves that a layer `(weights, x) -> y` closes over, its constants, are called shared. `examples` are the leaves
    of weights, shared leaves, and those of one microbatch's activations; `wanted` says of which the gradient is.
    """
    weights_end, parameters_end = len(examples[0]), len(examples[0]) + len(examples[1])
    moving = Mask([flag for flags in wanted for flag in flags])
    out = Mask([learnable(y) for y in jax.tree.leaves(layer.out)])

    def with_pullback(*leaves: Any) -> Any:
        chosen, others = moving.split(leaves)

        def run(chosen: Leaves) -> Any:
            args = moving.join(chosen, others)
            shared = args[weights_end:parameters_end]
            return out.split(jax.tree.leaves(layer(args[:weights_end], args[parameters_end:], constants=shared)))

        saving = run if policy is None else jax.checkpoint(run, policy=policy, prevent_cse=False)
        y, pullback, rest = jax.vjp(saving, chosen, has_aux=True)
        return out.join(y, rest), pullback

    traced = Traced(with_pullback, *(leaf for leaves in examples for leaf in leaves))
    residuals, pullback_of = jax.tree.flatten(traced.out[1])
    rebuilt_jaxpr, from_activations = not_reached(traced.jaxpr, parameters_end, len(residuals))
    saved = Mask(from_activations)
    rebuilt = partial(jax.core.eval_jaxpr, rebuilt_jaxpr, traced.constants)  # what follows from weights alone

    def forward(weights: Leaves, shared: Leaves, x: Leaves) -> tuple[list[Any], list[Any]]:
        def one(x: Leaves) -> tuple[list[Any], list[Any]]:
            y, pullback = traced(weights, shared, x)
            return y, saved.split(jax.tree.leaves(pullback))[0]

        return one(x) if microbatches == 1 else jax.lax.map(one, x)

    def backward(weights: Leaves, shared: Leaves, residuals: Leaves, dy: Leaves) -> tuple[list[Any], list[Any]]:
        others = rebuilt(*weights, *shared)
        parameters = sum(wanted[0]) + sum(wanted[1])

        def one(residuals: Leaves, dy: Leaves) -> tuple[list[Any], list[Any]]:
            (grads,) = jax.tree.unflatten(pullback_of, saved.join(residuals, others))(list(dy))
            return grads[:parameters], grads[parameters:]

        if microbatches == 1:
            return one(residuals, dy)

        def add(sums: list[Any], each: Any) -> tuple[list[Any], list[Any]]:
            grads, dx = one(*each)
            return add_terms(sums, grads), dx

        shapes, _ = eval_shape(one, *jax.tree.map(lambda leaf: leaf[0], (residuals, dy)))
        return jax.lax.scan(add, [wide_zeros(g) for g in shapes], (residuals, dy))

    return Halves(forward, backward)

"""Which values a layer saves for its backward pass, and which it recomputes; gathered weights are never saved.

A layer is split into a forward pass, which returns residuals as a policy says, and a backward pass, which takes them.
Only values that depend on activations are residuals. The backward pass recomputes values that follow from weights
alone, so that no policy can save a gathered weight, or a cast of one.

Worked example: the layer `tanh(x @ w.astype(bfloat16))` with w f32[8, 8] and x bf16[4, 8], and the policy "full", which
saves only inputs. jax would save w, its cast and x. Here x [4, 8] depends on activations and is saved. The cast of w
follows from w alone: the backward pass, which is given w again, casts it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from shardkit._arguments.checks import quote
from shardkit._jax.compat import eval_shape, on_this_mesh
from shardkit._jax.dependence import find_independent
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


def find_policy(where: str, remat: Remat, offload: bool) -> Any:
    """The jax policy for `remat`: a policy's name, the names of what is saved, or a policy."""
    if offload:
        return _find_offload_policy(where, remat)
    if isinstance(remat, str) and remat in POLICIES:
        return POLICIES[remat]
    if _is_tuple_of_names(remat):
        return jax.checkpoint_policies.save_only_these_names(*remat)
    if callable(remat):
        return remat
    raise ValueError(
        f"{where}: remat must be None, one of {quote(POLICIES)}, a tuple of checkpoint names, or a policy of "
        f"jax.checkpoint_policies; got {remat!r}. Pass for example remat='dots'."
    )


def find_policy_if_asked(where: str, remat: Remat, offload: bool) -> Any:
    """The policy of `remat` and `offload`; None if the caller asks for neither."""
    if remat is None and not offload:
        return None
    return find_policy(where, remat, offload)


def checkpoint_if_asked(fn: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """A function whose backward pass recomputes as a policy says; without a policy, the function as it is."""
    if policy is None:
        return fn
    return jax.checkpoint(fn, policy=policy)


def _find_offload_policy(where: str, remat: Remat) -> Any:
    """The policy that saves to host memory what `remat` saves."""
    policies = jax.checkpoint_policies
    if remat == "dots_without_batch":
        return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    if _is_tuple_of_names(remat):
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(remat),
            offload_src="device",
            offload_dst="pinned_host",
        )
    raise ValueError(
        f"{where}: offload must go with remat='dots_without_batch' or a tuple of checkpoint names, which name the "
        f"values to save to host memory; got remat={remat!r}. Pass remat='dots_without_batch', or leave offload out."
    )


def _is_tuple_of_names(remat: Any) -> TypeGuard[tuple[str, ...]]:
    if not isinstance(remat, tuple) or not remat:
        return False
    return all(isinstance(name, str) for name in remat)


class LeafPartition:
    """Partitions a list of leaves into the chosen and the unchosen, and combines them again, as equinox does of trees.

    Worked example: by the flags [True, False, True], `[a, b, c]` is partitioned into `[a, c]` and `[b]`, and these are
    combined to `[a, b, c]`.
    """

    def __init__(self, flags: Sequence[bool]):
        self.flags = tuple(flags)

    def partition(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The chosen leaves, and the unchosen ones."""
        chosen = []
        unchosen = []
        for leaf, flag in zip(leaves, self.flags, strict=True):
            if flag:
                chosen.append(leaf)
            else:
                unchosen.append(leaf)
        return chosen, unchosen

    def combine(self, chosen: Sequence[Any], unchosen: Sequence[Any]) -> list[Any]:
        """All leaves in their order."""
        next_chosen = iter(chosen)
        next_unchosen = iter(unchosen)
        leaves = []
        for flag in self.flags:
            if flag:
                leaves.append(next(next_chosen))
            else:
                leaves.append(next(next_unchosen))
        return leaves


def is_differentiable(x: Any) -> bool:
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
        # Equations that no result needs are removed, so that their collectives are not sent: the trace of a derivative
        # has its whole function in it, of which it may need only a part.
        needed = [True] * len(closed.jaxpr.outvars)
        self.jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, needed, instantiate=True)
        self.constants = closed.consts

    def __call__(self, *args: Any, constants: Sequence[Any] | None = None) -> Any:
        """Its results for these arguments; `constants` replace the arrays that it closes over."""
        if constants is None:
            constants = self.constants
        results = jax.core.eval_jaxpr(self.jaxpr, constants, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.out), results)


def run_for_results(fn: Callable[..., list[Any]], flags: list[bool], *args: Any) -> list[Any]:
    """The flagged results of a function; what only the other results need is neither computed nor sent."""
    if all(flags):
        return fn(*args)
    traced = Traced(fn, *args)
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, flags, instantiate=True)
    return jax.core.eval_jaxpr(jaxpr, traced.constants, *jax.tree.leaves(args))


class WantedGradients(NamedTuple):
    """For each weight, shared leaf and activation of a layer, whether its gradient is wanted."""

    weights: Sequence[bool]
    shared: Sequence[bool]
    x: Sequence[bool]


class LayerPasses:
    """A layer's forward and backward pass over its microbatches, one after the other.

    Args:
        layer: a layer `(weights, x) -> y`. The leaves that it closes over, its constants, are called shared.
        policy: says which values the forward pass saves; None for jax's own choice.
        microbatches: their number; above 1, dim 0 of activations, residuals and dy counts microbatches.
        examples: the leaves of weights, the shared leaves, and the leaves of one microbatch's activations.
        wanted: which gradients the backward pass returns.
    """

    def __init__(
        self, layer: Traced, policy: Any, microbatches: int, examples: Sequence[Leaves], wanted: WantedGradients
    ):
        weights, shared, _ = examples
        self._microbatches = microbatches
        self._parameter_gradients = sum(wanted.weights) + sum(wanted.shared)
        self._forward = _trace_with_pullback(layer, policy, examples, wanted)
        _, pullback = self._forward.out
        residuals, self._pullback_tree = jax.tree.flatten(pullback)
        jaxpr, from_activations = find_independent(self._forward.jaxpr, len(weights) + len(shared), len(residuals))
        # In the worked example above the residuals x, the cast of w and w have the flags True, False, False: x alone is
        # saved.
        self._saved = LeafPartition(from_activations)
        # Computes the values that follow from weights alone: the backward pass does it once for all microbatches.
        self._rebuild = partial(jax.core.eval_jaxpr, jaxpr, self._forward.constants)

    def forward(self, weights: Leaves, shared: Leaves, x: Leaves) -> tuple[list[Any], list[Any]]:
        """`(y, residuals)`, lists of leaves."""

        def run_microbatch(x: Leaves) -> tuple[list[Any], list[Any]]:
            y, pullback = self._forward(weights, shared, x)
            residuals, _ = self._saved.partition(jax.tree.leaves(pullback))
            return y, residuals

        if self._microbatches == 1:
            return run_microbatch(x)
        return jax.lax.map(run_microbatch, x)

    def backward(self, weights: Leaves, shared: Leaves, residuals: Leaves, dy: Leaves) -> tuple[list[Any], list[Any]]:
        """`(gradients of weights and shared leaves, dx)`, with wanted gradients only.

        `dy` is for the leaves of y that can have a gradient. Over microbatches the gradients are summed in float32.
        """
        rebuilt = self._rebuild(*weights, *shared)

        def run_microbatch(residuals: Leaves, dy: Leaves) -> tuple[list[Any], list[Any]]:
            pullback = jax.tree.unflatten(self._pullback_tree, self._saved.combine(residuals, rebuilt))
            (grads,) = pullback(list(dy))
            return grads[: self._parameter_gradients], grads[self._parameter_gradients :]

        if self._microbatches == 1:
            return run_microbatch(residuals, dy)

        def accumulate(sums: list[Any], microbatch: Any) -> tuple[list[Any], list[Any]]:
            grads, dx = run_microbatch(*microbatch)
            return add_terms(sums, grads), dx

        first = jax.tree.map(lambda leaf: leaf[0], (residuals, dy))
        # The sums must vary over the axes of the terms before the first is added, and only a trace tells these axes.
        shapes, _ = eval_shape(run_microbatch, *first)
        zeros = [wide_zeros(x) for x in shapes]
        return jax.lax.scan(accumulate, zeros, (residuals, dy))


def _trace_with_pullback(layer: Traced, policy: Any, examples: Sequence[Leaves], wanted: WantedGradients) -> Traced:
    """A layer as `(weights, shared, x) -> (leaves of y, pullback)`; the leaves of the pullback are its residuals."""
    weights, shared, x = examples
    weights_end = len(weights)
    shared_end = weights_end + len(shared)
    differentiated = LeafPartition([*wanted.weights, *wanted.shared, *wanted.x])
    # Integers among the activations, such as keys or counts, go around the derivative as auxiliary values.
    out = LeafPartition([is_differentiable(y) for y in jax.tree.leaves(layer.out)])

    def run_with_pullback(*leaves: Any) -> Any:
        # jax.vjp differentiates floating-point leaves alone: keys and integers are constants to it.
        chosen, constants = differentiated.partition(leaves)

        def run(chosen: Leaves) -> Any:
            args = differentiated.combine(chosen, constants)
            y = layer(args[:weights_end], args[shared_end:], constants=args[weights_end:shared_end])
            return out.partition(jax.tree.leaves(y))

        if policy is not None:
            run = jax.checkpoint(run, policy=policy, prevent_cse=False)
        y, pullback, integers = jax.vjp(run, chosen, has_aux=True)
        return out.combine(y, integers), pullback

    return Traced(run_with_pullback, *weights, *shared, *x)

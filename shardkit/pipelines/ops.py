"""What one device computes in a tick: forward (F), backward (B), input gradient (I), weight gradient (W).

Every device runs the same program. Where an op is not its own, it either computes it all the same and discards the
result (masked), or takes an empty branch (branched).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._jax.compat import eval_shape
from shardkit.collectives._sums import add_terms, typed_zeros
from shardkit.on_device.batch import row
from shardkit.pipelines.pieces import Given, Piece, Pieces
from shardkit.pipelines.split_backward import TwoHalves

Fields = dict[str, jax.Array]  # a row of the table
Leaves = list[jax.Array]
Fn = Callable[..., Any]


class Sums(NamedTuple):
    """What a step sums, in float32: gradients of the layers `[chunks, layers, ...]`, of shared leaves, and means."""

    layers: Leaves
    shared: Any
    means: Any


class LoopState(NamedTuple):
    """The carry of the loop over ticks. A buffer is a list of arrays `[slots, ...]`."""

    inputs: Leaves
    saved: Leaves
    cotangents: Leaves
    weight_residuals: Leaves
    sums: Sums


class Exclusion(NamedTuple):
    """How the devices that an op does not belong to leave it out."""

    # `(on, fn, otherwise, *args)`: `fn(*args)` where on; elsewhere `otherwise(*args)`, or values to discard
    run: Callable[..., Any]
    # `(on, fn, otherwise, piece)`: `fn()` where on, elsewhere `otherwise()`; `fn` runs that piece
    choose: Callable[[Any, Fn, Fn, Piece], Any]
    update: Callable[[Any, jax.Array, jax.Array], jax.Array]  # `(on, new, old)`: what `run` leaves of a sum


def _select(on: Any, fn: Fn, otherwise: Fn, piece: Piece) -> Any:
    if piece.silent:
        return lax.cond(on, fn, otherwise)
    return jax.tree.map(partial(jnp.where, on), fn(), otherwise())


# Selected, not multiplied by zero: what is discarded may be NaN.
MASKED = Exclusion(lambda on, fn, otherwise, *args: fn(*args), _select, jnp.where)
BRANCHED = Exclusion(lax.cond, lambda on, fn, otherwise, piece: lax.cond(on, fn, otherwise), lambda on, new, old: new)


class Ops(NamedTuple):
    """The ops of a schedule, each `(state, row of the table) -> state`, with what it sends where it sends something."""

    pieces: Pieces  # embedding, stage and head
    given: Callable[[Any, Any, Any], Given]  # the arguments of the pieces by stage, chunk and microbatch
    shared: Any  # the parameters beside the layers
    scale: Any  # the loss scale
    last: int  # number of the last stage
    saves: bool  # F saves what B needs; otherwise B starts from the stage's input
    train: bool  # with a backward pass
    split: TwoHalves | None  # the stage's backward pass as I and W; None where it runs whole
    exclusion: Exclusion  # MASKED or BRANCHED
    # `given` of embed and head by microbatch, where all devices run them together; None where one of them does
    common: Callable[[Any], Given] | None

    def forward(self, state: LoopState, at: Fields) -> tuple[LoopState, Leaves]:
        """F: the stage, after the embedding on the first and, in evaluation, before the head on the last."""
        p, given, x = self.pieces, self._given(at, "forward"), row(state.inputs, at["forward_input"])

        def run() -> Any:
            here = self._embedded(at, "forward", given, x)
            return p.forward(given, here) if self.saves else (p.stage(given, here), [])

        y, residuals = self.exclusion.run(at["forward_on"] > 0, run, lambda: jax.tree.map(typed_zeros, eval_shape(run)))
        if self.saves:
            state = state._replace(saved=write(state.saved, at["forward_saved"], [*residuals, *y]))
        if not self.train:
            means, last = state.sums.means, (at["forward_stage"] == self.last) & (at["forward_on"] > 0)
            given, last = self._end(at, "head", given, last)
            means = self._choose(last, lambda: add_terms(means, p.head(self.shared, given, y)), lambda: means, p.head)
            state = state._replace(sums=state.sums._replace(means=means))
        return state, y

    def backward(self, state: LoopState, at: Fields) -> tuple[LoopState, Leaves]:
        """B: the gradients of a stage's input and of its weights."""

        def through(layers: Leaves, given: Given, residuals: Leaves, dy: Leaves) -> tuple[Leaves, Leaves, Leaves]:
            grads, dx = self.pieces.backward(given, residuals, dy)
            return self._added(layers, grads, at["backward_chunk"], at["backward_on"] > 0), dx, []

        state, dx, _ = self._back(state, at, through, [])
        return state, dx

    def input_gradient(self, state: LoopState, at: Fields, whole: bool) -> tuple[LoopState, Leaves]:
        """I: the gradient of a stage's input. Where `whole`, some devices run B in this tick: I, and W at once."""
        split = self.split
        assert split

        def through(layers: Leaves, given: Given, residuals: Leaves, dy: Leaves) -> tuple[Leaves, Leaves, Leaves]:
            dx, found = split.first(*jax.tree.leaves((given, residuals, dy)))
            if whole:
                layers = self._with_weights(layers, given, found, at["backward_chunk"], at["backward_on"] == 1)
            return layers, dx, found

        state, dx, found = self._back(state, at, through, split.residuals)
        return state._replace(weight_residuals=write(state.weight_residuals, at["backward_kept"], found)), dx

    def weight_gradient(self, state: LoopState, at: Fields) -> LoopState:
        """W: the gradients of a stage's weights, from the residuals of I."""
        given, residuals = self._given(at, "weight"), row(state.weight_residuals, at["weight_kept"])
        on = at["weight_on"] > 0
        layers = self._with_weights(state.sums.layers, given, residuals, at["weight_chunk"], on)
        return state._replace(sums=state.sums._replace(layers=layers))

    def _back(
        self, state: LoopState, at: Fields, through: Callable[..., tuple[Leaves, Leaves, Leaves]], residuals: list[Any]
    ) -> tuple[LoopState, Leaves, Leaves]:
        """A backward pass: `through` the stage, after the head on the last and before the embedding on the first.

        Returns:
            The state, dx, and what `through` returns beside it, of the shapes of `residuals`.
        """
        p, given, on = self.pieces, self._given(at, "backward"), at["backward_on"]
        again = row(state.inputs, at["backward_input"])
        saved = row(state.saved, at["backward_saved"])
        received = row(state.cotangents, at["backward_cotangent"])

        def run(sums: Sums) -> Any:
            first = self._first(at, "backward")
            if self.saves:
                residuals, y = saved[: -len(p.x)], saved[-len(p.x) :]
            else:
                y, residuals = p.forward(given, self._embedded(at, "backward", given, again))
            last = (at["backward_stage"] == self.last) & (on > 0)
            given_head, heads = self._end(at, "head", given, last)

            def head() -> Any:
                means, grads, dy = p.head_backward(self.shared, given_head, y, self.scale)
                return add_terms(sums.means, means), add_terms(sums.shared, grads), self._own(last, dy, received)

            means, shared, dy = self._choose(heads, head, lambda: (sums.means, sums.shared, received), p.head_backward)
            layers, dx, found = through(sums.layers, given, residuals, dy)
            given_embed, embeds = self._end(at, "embed_gradient", given, first)

            def embed() -> Leaves:
                leaving = self._own(first, dx, [jnp.zeros_like(x) for x in dx])
                return add_terms(shared, p.embed_backward(self.shared, given_embed, leaving))

            shared = self._choose(embeds, embed, lambda: shared, p.embed_backward)
            return Sums(layers, shared, means), dx, found

        def skip(sums: Sums) -> Any:
            return sums, [typed_zeros(x) for x in p.moving.split(p.x)[0]], [typed_zeros(x) for x in residuals]

        sums, dx, found = self.exclusion.run(on > 0, run, skip, state.sums)
        return state._replace(sums=sums), dx, found

    def _with_weights(self, layers: Leaves, given: Given, residuals: Leaves, chunk: Any, on: Any) -> Leaves:
        """The sums with the weight gradients of one stage and microbatch."""

        def run(layers: Leaves) -> Leaves:
            assert self.split
            return self._added(layers, self.split.second(*jax.tree.leaves(given), residuals=residuals), chunk, on)

        return self.exclusion.run(on, run, lambda layers: layers, layers)

    def _added(self, layers: Leaves, grads: Leaves, chunk: Any, on: Any) -> Leaves:
        """The sums with a stage's gradients added to its chunk."""
        out = []
        for total, grad in zip(layers, grads, strict=True):
            here = 0 if total.shape[0] == 1 else chunk
            new = self.exclusion.update(on, add_terms(total[here], grad), total[here])
            out.append(lax.dynamic_update_index_in_dim(total, new, here, 0))
        return out

    def _embedded(self, at: Fields, op: str, given: Given, x: Leaves) -> Leaves:
        """The stage's input: on the first stage the embedding's."""
        embed, first = self.pieces.embed, self._first(at, op)
        given, embeds = self._end(at, "embed" if op == "forward" else "embed_gradient", given, first)
        return self._choose(embeds, lambda: self._own(first, embed(self.shared, given), x), lambda: x, embed)

    def _end(self, at: Fields, what: str, given: Given, mine: Any) -> tuple[Given, Any]:
        """The arguments of embedding or head, and whether they run: on this device, or if spread on all of them."""
        if self.common is None:
            return given, mine
        return (self.common(at[what]), True) if what in at else (given, False)

    def _own(self, mine: Any, here: Leaves, otherwise: Leaves) -> Leaves:
        """Of what all devices compute together, what the device of that stage goes on with."""
        return here if self.common is None else jax.tree.map(partial(jnp.where, mine), here, otherwise)

    def _choose(self, on: Any, fn: Fn, otherwise: Fn, piece: Piece) -> Any:
        if isinstance(on, bool):
            return fn() if on else otherwise()
        return self.exclusion.choose(on, fn, otherwise, piece)

    def _given(self, at: Fields, op: str) -> Given:
        given = self.given(*(at[f"{op}_{what}"] for what in ("stage", "chunk", "microbatch")))
        return given._replace(keys=jax.tree.map(jax.random.clone, given.keys))  # other ops draw the same, as intended

    def _first(self, at: Fields, op: str) -> Any:
        return (at[f"{op}_stage"] == 0) & (at[f"{op}_on"] > 0)


def write(buffers: Leaves, slot: Any, leaves: Leaves) -> Leaves:
    """The arrays with one slot replaced."""
    return [lax.dynamic_update_index_in_dim(b, x, slot, 0) for b, x in zip(buffers, leaves, strict=True)]

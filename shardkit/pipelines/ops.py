"""What one device computes in a tick: forward (F), backward (B), input gradient (I), weight gradient (W).

Every device runs the same program. In a tick in which it has no such op, a device either computes the op all the same
and discards the result (masked), or takes an empty branch (branched).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._jax.compat import eval_shape
from shardkit._jax.jaxprs import RunShare, share_scope
from shardkit.collectives._sums import add_terms, typed_zeros
from shardkit.on_device.batch import take_row
from shardkit.pipelines.pieces import Piece, PieceArguments, Pieces
from shardkit.pipelines.split_backward import TwoHalves

Leaves = list[jax.Array]
Fn = Callable[..., Any]
# `(layers, args, residuals, dy) -> (layers, dx, weight_residuals)`: a stage's backward pass. `layers` are the sums of
# the layers' gradients so far, to which it adds its own.
StageBackward = Callable[[Leaves, PieceArguments, Leaves, Leaves], tuple[Leaves, Leaves, Leaves]]


class Sums(NamedTuple):
    """What a step sums, in float32: gradients of the layers `[chunks, layers, ...]`, of shared leaves, and means."""

    layers: Leaves
    shared: Any
    means: Any


class CommonEnd(NamedTuple):
    """An end of the model, embedding or head, that all devices run together in some ticks of a segment."""

    microbatch: jax.Array  # for which they run it in this tick, the same on all devices; -1 for none
    share: RunShare  # in how many ticks of the segment


class TickRow(NamedTuple):
    """What a device does in a tick: its row of the table, and which ends all devices run together."""

    fields: Mapping[str, jax.Array]  # a number for each of `schedules.table.FIELDS`
    common_ends: Mapping[str, CommonEnd]

    def is_on(self, op: str) -> jax.Array:
        """Whether this device runs an op."""
        return self.fields[f"{op}_on"] > 0

    def is_on_stage(self, op: str, stage: int) -> jax.Array:
        """Whether this device runs an op of this stage."""
        return (self.fields[f"{op}_stage"] == stage) & self.is_on(op)


class LoopState(NamedTuple):
    """The carry of the loop over ticks: buffers, lists of arrays `[slots, ...]` by the names of the table, and sums."""

    inputs: Leaves  # of stages
    saved: Leaves  # residuals of F, for B or I
    cotangents: Leaves  # of the outputs of stages
    kept: Leaves  # residuals of I, for W
    sums: Sums


class Masked:
    """Devices that an op does not belong to compute it, and discard the result.

    So all devices meet in every collective of the op, whichever axis it is over.
    """

    def run(self, on: Any, fn: Fn, otherwise: Fn, *args: Any) -> Any:
        """`fn(*args)`; where not `on` its results are to be discarded."""
        return fn(*args)

    def choose(self, on: Any, fn: Fn, otherwise: Fn, piece: Piece) -> Any:
        """`fn()` where on, elsewhere `otherwise()`; `piece` is what `fn` runs."""
        if piece.silent:
            return lax.cond(on, fn, otherwise)
        # Selected, not multiplied by zero: a discarded value may be NaN.
        return jax.tree.map(partial(jnp.where, on), fn(), otherwise())

    def update(self, on: Any, new: jax.Array, old: jax.Array) -> jax.Array:
        """A sum after `run`: `new` where on, elsewhere `old`."""
        return jnp.where(on, new, old)


class Branched:
    """Devices that an op does not belong to take an empty branch."""

    def run(self, on: Any, fn: Fn, otherwise: Fn, *args: Any) -> Any:
        """`fn(*args)` where on, elsewhere `otherwise(*args)`."""
        return lax.cond(on, fn, otherwise, *args)

    def choose(self, on: Any, fn: Fn, otherwise: Fn, piece: Piece) -> Any:
        """`fn()` where on, elsewhere `otherwise()`."""
        return lax.cond(on, fn, otherwise)

    def update(self, on: Any, new: jax.Array, old: jax.Array) -> jax.Array:
        """A sum after `run`: `new`, because only devices that are on run the branch in which this stands."""
        return new


class Ops(NamedTuple):
    """The ops of a schedule. Each takes the state and a row of the table, and returns the state and what it sends.

    Worked example: tick 4 of 1F1B on two devices with three microbatches, in which device 0 runs 0F2 and device 1 runs
    1B1. The program of both is F, then B.

        device 0   F: the embedding of microbatch 2, then the stage, gives y. It sends y to device 1.
                   B: is off. Masked, it is computed with the arguments of microbatch 0, and its gradients are not
                   added; branched, it gives zeros. Nobody reads what it sends.
        device 1   F: is off.
                   B: reads the stage's input of microbatch 1 from slot 1 of `inputs`, computes residuals and y again,
                   adds the head's loss to the means, gets dy from the head, adds the gradients of its layers to the
                   sums, and sends dx to device 0.
    """

    pieces: Pieces  # embedding, stage and head
    find_arguments: Callable[[Any, Any, Any], PieceArguments]  # of the pieces, by stage, chunk and microbatch
    shared: Any  # the parameters beside the layers
    scale: Any  # the loss scale
    last: int  # number of the last stage
    saves: bool  # F saves what B needs; otherwise B starts from the stage's input
    train: bool  # with a backward pass
    halves: TwoHalves | None  # the stage's backward pass as I and W; None where it runs whole
    exclusion: Masked | Branched  # how devices leave out an op that is not theirs
    # the arguments of embed and head by microbatch, where all devices run them together; None where one of them does
    find_common: Callable[[Any], PieceArguments] | None

    def forward(self, state: LoopState, tick: TickRow) -> tuple[LoopState, Leaves]:
        """F: the stage, after the embedding on the first and, in evaluation, before the head on the last."""
        args = self._find_op_arguments(tick, "forward")
        received = take_row(state.inputs, tick.fields["forward_input"])

        def run() -> Any:
            x = self._embed_on_first(tick, "forward", args, received)
            if self.saves:
                return self.pieces.forward(args, x)
            return self.pieces.stage(args, x), []

        def skip() -> Any:
            return jax.tree.map(typed_zeros, eval_shape(run))

        y, residuals = self.exclusion.run(tick.is_on("forward"), run, skip)
        if self.saves:
            saved = write_slot(state.saved, tick.fields["forward_saved"], [*residuals, *y])
            state = state._replace(saved=saved)
        if not self.train:
            means = self._add_means(state.sums.means, tick, args, y)
            state = state._replace(sums=state.sums._replace(means=means))
        return state, y

    def _add_means(self, means: Any, tick: TickRow, args: PieceArguments, y: Leaves) -> Any:
        """The means in an evaluation, to which the last stage adds the means of the head."""
        is_last = tick.is_on_stage("forward", self.last)
        args, runs = self._find_end(tick, "head", args, is_last)

        def run_head() -> Any:
            return add_terms(means, self.pieces.head(self.shared, args, y))

        return self._choose(runs, run_head, lambda: means, self.pieces.head)

    def backward(self, state: LoopState, tick: TickRow) -> tuple[LoopState, Leaves]:
        """B: the gradients of a stage's input and of its weights."""

        def run_stage(
            layers: Leaves, args: PieceArguments, residuals: Leaves, dy: Leaves
        ) -> tuple[Leaves, Leaves, Leaves]:
            grads, dx = self.pieces.backward(args, residuals, dy)
            chunk = tick.fields["backward_chunk"]
            layers = self._add_to_chunk(layers, grads, chunk, tick.is_on("backward"))
            return layers, dx, []

        state, dx, _ = self._run_backward(state, tick, run_stage, [])
        return state, dx

    def input_gradient(self, state: LoopState, tick: TickRow, some_run_both: bool) -> tuple[LoopState, Leaves]:
        """I: the gradient of a stage's input. In this tick some devices may run B: I, and W at once."""
        halves = self.halves
        assert halves is not None

        def run_stage(
            layers: Leaves, args: PieceArguments, residuals: Leaves, dy: Leaves
        ) -> tuple[Leaves, Leaves, Leaves]:
            dx, weight_residuals = halves.first(*jax.tree.leaves((args, residuals, dy)))
            if some_run_both:
                runs_both = tick.fields["backward_on"] == 1
                chunk = tick.fields["backward_chunk"]
                layers = self._add_weight_gradients(layers, args, weight_residuals, chunk, runs_both)
            return layers, dx, weight_residuals

        state, dx, weight_residuals = self._run_backward(state, tick, run_stage, halves.residuals)
        slots = write_slot(state.kept, tick.fields["backward_kept"], weight_residuals)
        return state._replace(kept=slots), dx

    def weight_gradient(self, state: LoopState, tick: TickRow) -> LoopState:
        """W: the gradients of a stage's weights, from the residuals of I."""
        args = self._find_op_arguments(tick, "weight")
        residuals = take_row(state.kept, tick.fields["weight_kept"])
        chunk = tick.fields["weight_chunk"]
        layers = self._add_weight_gradients(state.sums.layers, args, residuals, chunk, tick.is_on("weight"))
        return state._replace(sums=state.sums._replace(layers=layers))

    def _run_backward(
        self, state: LoopState, tick: TickRow, run_stage: StageBackward, weight_residuals: list[Any]
    ) -> tuple[LoopState, Leaves, Leaves]:
        """A backward pass: through the stage, after the head on the last and before the embedding on the first.

        Args:
            state: buffers and sums.
            tick: the row of the table.
            run_stage: the backward pass of the stage.
            weight_residuals: the shapes of the weight residuals that it returns.

        Returns:
            The state, dx, and the residuals of weight gradients.
        """
        args = self._find_op_arguments(tick, "backward")
        received_x = take_row(state.inputs, tick.fields["backward_input"])
        saved = take_row(state.saved, tick.fields["backward_saved"])
        received_dy = take_row(state.cotangents, tick.fields["backward_cotangent"])
        activations = len(self.pieces.x)

        def run(sums: Sums) -> Any:
            is_first = tick.is_on_stage("backward", 0)
            if self.saves:
                residuals = saved[:-activations]
                y = saved[-activations:]
            else:
                x = self._embed_on_first(tick, "backward", args, received_x)
                y, residuals = self.pieces.forward(args, x)
            means, shared, dy = self._run_head_backward(sums, tick, args, y, received_dy)
            layers, dx, weight_residuals = run_stage(sums.layers, args, residuals, dy)
            shared = self._run_embed_backward(shared, tick, args, dx, is_first)
            return Sums(layers, shared, means), dx, weight_residuals

        def skip(sums: Sums) -> Any:
            dx, _ = self.pieces.differentiable.partition(self.pieces.x)
            return sums, jax.tree.map(typed_zeros, dx), jax.tree.map(typed_zeros, weight_residuals)

        sums, dx, residuals = self.exclusion.run(tick.is_on("backward"), run, skip, state.sums)
        return state._replace(sums=sums), dx, residuals

    def _run_head_backward(
        self, sums: Sums, tick: TickRow, args: PieceArguments, y: Leaves, received: Leaves
    ) -> tuple[Any, Any, Leaves]:
        """Means, sums of shared gradients, and dy: the last stage gets dy from the head, others from the next stage."""
        is_last = tick.is_on_stage("backward", self.last)
        args, runs = self._find_end(tick, "head", args, is_last)

        def run_head() -> Any:
            means, grads, dy = self.pieces.head_backward(self.shared, args, y, self.scale)
            means = add_terms(sums.means, means)
            shared = add_terms(sums.shared, grads)
            return means, shared, self._select_at_stage(is_last, dy, received)

        def skip() -> Any:
            return sums.means, sums.shared, received

        return self._choose(runs, run_head, skip, self.pieces.head_backward)

    def _run_embed_backward(self, shared: Any, tick: TickRow, args: PieceArguments, dx: Leaves, is_first: Any) -> Any:
        """Sums of shared gradients; the first stage adds the gradients of the embedding."""
        args, runs = self._find_end(tick, "embed_gradient", args, is_first)

        def run_embed() -> Leaves:
            zeros = [jnp.zeros_like(x) for x in dx]
            first_dx = self._select_at_stage(is_first, dx, zeros)
            return add_terms(shared, self.pieces.embed_backward(self.shared, args, first_dx))

        return self._choose(runs, run_embed, lambda: shared, self.pieces.embed_backward)

    def _embed_on_first(self, tick: TickRow, op: str, args: PieceArguments, received: Leaves) -> Leaves:
        """The stage's input: on the first stage the result of the embedding, elsewhere what was received."""
        embed = self.pieces.embed
        is_first = tick.is_on_stage(op, 0)
        end = "embed" if op == "forward" else "embed_gradient"
        args, runs = self._find_end(tick, end, args, is_first)

        def run_embed() -> Leaves:
            return self._select_at_stage(is_first, embed(self.shared, args), received)

        return self._choose(runs, run_embed, lambda: received, embed)

    def _add_weight_gradients(
        self, layers: Leaves, args: PieceArguments, residuals: Leaves, chunk: Any, on: Any
    ) -> Leaves:
        """The sums with the weight gradients of one stage and microbatch."""

        def run(layers: Leaves) -> Leaves:
            assert self.halves is not None
            grads = self.halves.second(*jax.tree.leaves(args), residuals=residuals)
            return self._add_to_chunk(layers, grads, chunk, on)

        return self.exclusion.run(on, run, lambda layers: layers, layers)

    def _add_to_chunk(self, layers: Leaves, grads: Leaves, chunk: Any, on: Any) -> Leaves:
        """The sums, with a stage's gradients added to those of its chunk."""
        sums = []
        for total, grad in zip(layers, grads, strict=True):
            index = 0 if total.shape[0] == 1 else chunk
            chunk_sum = self.exclusion.update(on, add_terms(total[index], grad), total[index])
            sums.append(lax.dynamic_update_index_in_dim(total, chunk_sum, index, 0))
        return sums

    def _find_op_arguments(self, tick: TickRow, op: str) -> PieceArguments:
        """The arguments of the pieces in an op of this row."""
        stage = tick.fields[f"{op}_stage"]
        chunk = tick.fields[f"{op}_chunk"]
        args = self.find_arguments(stage, chunk, tick.fields[f"{op}_microbatch"])
        return args._replace(keys=jax.tree.map(jax.random.clone, args.keys))  # other ops draw the same, as intended

    # ---- embedding and head on one device, or spread over all

    def _find_end(self, tick: TickRow, end: str, args: PieceArguments, at_stage: Any) -> tuple[PieceArguments, Any]:
        """The arguments of embedding or head, and whether this device runs it.

        On one device, only the device of the first or last stage runs it, `at_stage`. Spread, all devices run it
        together in some ticks, for the microbatch that the table's `ends` name. The answer is True or False where that
        holds in all ticks of the segment, and elsewhere the `CommonEnd`.
        """
        if self.find_common is None:
            return args, at_stage
        if end not in tick.common_ends:
            return args, False
        common = tick.common_ends[end]
        if common.share.runs == common.share.ticks:
            return self.find_common(common.microbatch), True
        return self.find_common(jnp.maximum(common.microbatch, 0)), common

    def _select_at_stage(self, at_stage: Any, results: Leaves, otherwise: Leaves) -> Leaves:
        """The results of a spread embedding or head on the device of its stage; elsewhere `otherwise`."""
        if self.find_common is None:
            return results
        return jax.tree.map(partial(jnp.where, at_stage), results, otherwise)

    def _choose(self, on: Any, fn: Fn, otherwise: Fn, piece: Piece) -> Any:
        if on is True:
            return fn()
        if on is False:
            return otherwise()
        if isinstance(on, CommonEnd):
            # The pieces hold collectives, which may stand in this branch: the number is a constant of the table, and
            # the same on all devices, so that all of them take it or none does.
            with jax.named_scope(share_scope(on.share)):
                return lax.cond(on.microbatch >= 0, fn, otherwise)
        return self.exclusion.choose(on, fn, otherwise, piece)


def write_slot(buffers: Leaves, slot: Any, leaves: Leaves) -> Leaves:
    """The arrays with one slot replaced."""
    updated = []
    for buffer, x in zip(buffers, leaves, strict=True):
        updated.append(lax.dynamic_update_index_in_dim(buffer, x, slot, 0))
    return updated

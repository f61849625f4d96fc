"""The GradFn and the loss of a pipeline: what is prepared before the first tick, and what becomes of the sums after the
last. `run.py` has the ticks.

The stack of layers is reshaped by chunk, the examples are split into microbatches, and each piece of the model is
traced once. Then a table of the schedule is run, which returns sums over this device's microbatches.

Embedding and head are "spread" where the plan of their leaves lays them out over the pipe axis: then all devices run
them together, each with its part, and not the first and the last stage alone.

In the words of Megatron a chunk is a virtual stage, I is dgrad and W wgrad.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import name_axes, quote
from shardkit._jax.compat import bound, eval_shape
from shardkit.collectives import axis_index, axis_size, vary
from shardkit.layers.matmul import live_axes
from shardkit.on_device.batch import split_microbatches, take_microbatch
from shardkit.on_device.gradient import is_loss_alone
from shardkit.on_device.handles import is_handle, open_before_loss, reduce_to_part, strip_handles, unseal_handles
from shardkit.on_device.means import Mean
from shardkit.on_device.pipelines import PipelineGradFn, PipelineLoss
from shardkit.on_device.trained import TrainedLeaves, check_trained
from shardkit.pipelines.divergent import refuse_divergent, refuse_mixed
from shardkit.pipelines.in_sequence import compute_in_sequence, count_layers, find_starts
from shardkit.pipelines.ops import Branched, Masked, Ops, Sums
from shardkit.pipelines.pieces import Piece, PieceArguments, Pieces, StagedModel
from shardkit.pipelines.run import TableRunner
from shardkit.pipelines.split_backward import TwoHalves
from shardkit.schedules import Schedule
from shardkit.schedules.action import device_of
from shardkit.schedules.stages import Stages
from shardkit.schedules.table import Table

Mode = Literal["masked", "branch"]


def build_grad_fn(
    model: StagedModel, schedule: Schedule, stages: Stages, mode: Mode, recompute: bool, trained: Any = None
) -> PipelineGradFn:
    """The GradFn of a model in pieces."""
    check_trained(trained)
    model.check()
    run = StagedRun(model, schedule, stages, mode, recompute)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        # Leaves that are opened just before the loss; `_reduce_opened` takes their gradients back to the parts.
        opened = open_before_loss(params)
        if is_loss_alone():  # asked by what compares the loss with one device's (`gradient.loss_alone`): no gradients
            means = dict(compute_in_sequence(model, schedule, stages, opened, batch, keys))
            return means.pop("loss"), means, jax.tree.map(jnp.zeros_like, strip_handles(params))
        sums = run.sum_microbatches(opened, batch, keys, scale)
        stack_grads = _join_chunks(sums.layers, strip_handles(opened[stages.stack]))
        grads = sums.shared | {stages.stack: stack_grads}
        grads = jax.tree.map(_reduce_opened, params, grads, is_leaf=is_handle)
        grads_in_order = {name: grads[name] for name in params}
        leaves = TrainedLeaves(grads_in_order, trained)
        means = dict(sums.means)
        # The gradients of the trained leaves as they are, and zeros for frozen ones.
        return means.pop("loss"), means, leaves.with_zeros(leaves.select())

    return PipelineGradFn(stages, grad_fn, schedule)


def _join_chunks(sums: Sequence[jax.Array], stack: Any) -> Any:
    """Sums `[chunks, layers, ...]` as the stack `[chunks * layers, ...]` that they are the gradients of."""
    leaves, tree = jax.tree.flatten(stack)
    grads = []
    for total, leaf in zip(sums, leaves, strict=True):
        grads.append(total.reshape(leaf.shape))
    return jax.tree.unflatten(tree, grads)


def _reduce_opened(node: Any, grad: Any) -> Any:
    """The gradient of a leaf as it leaves the GradFn: that of its part, if it was opened before the loss."""
    if is_handle(node) and node.opened_before_loss:
        return reduce_to_part(node, grad)
    return grad


def build_loss(model: StagedModel, schedule: Schedule, stages: Stages, mode: Mode) -> PipelineLoss:
    """The loss of a model in pieces, by the forward actions of the schedule."""
    model.check()
    forward = schedule.forward()
    run = StagedRun(model, forward, stages, mode, train=False)

    # The step has opened the leaves that are opened before the loss.
    def loss(params: Any, batch: Any, keys: Any) -> tuple[Mean, dict[str, Mean]]:
        means = dict(run.sum_microbatches(params, batch, keys).means)
        return means.pop("loss"), means

    return PipelineLoss(stages, loss, forward)


class _DeviceInputs(NamedTuple):
    """This device's layers and examples, and which layers each stage of the model has."""

    stacks: Any  # its part of the stack, `[chunks, layers, ...]`
    microbatches: Any  # batch and keys, `[microbatches, examples, ...]`
    starts: np.ndarray  # for each stage of the model the index of its first layer
    counts: np.ndarray  # and its number of layers

    def find_arguments(self, stage: Any, chunk: Any, microbatch: Any) -> PieceArguments:
        """The arguments of the pieces for a stage, which is this chunk of the device, and a microbatch."""
        batch, keys = take_microbatch(self.microbatches, microbatch)
        layers = take_microbatch(self.stacks, chunk)
        start = jnp.asarray(self.starts)[stage]
        count = jnp.asarray(self.counts)[stage]
        return PieceArguments(layers, start, count, batch, keys)

    def find_common(self, microbatch: Any) -> PieceArguments:
        """The arguments of embed and head where all devices run them together.

        All devices pass the same number, so that the collectives of embed and of head meet.
        """
        return self.find_arguments(0, 0, microbatch)


class _Pipe(NamedTuple):
    """The pipe axis, as a device sees it."""

    names: tuple[str, ...]  # the mesh axes that it is made of
    live: tuple[str, ...]  # those of several devices, or over which an array varies; () where nothing is sent
    device: jax.Array  # the place of this device along it
    is_spread: bool  # whether all devices run embedding and head together, each with its part of the shared leaves


class StagedRun(NamedTuple):
    """A model in pieces, and how it is run."""

    model: StagedModel  # the pieces
    schedule: Schedule  # which device runs what in which tick
    stages: Stages  # which layers are where
    mode: Mode  # in an op of another device, a device computes too and discards it ("masked"), or waits ("branch")
    recompute: bool = False  # whether backward passes compute their residuals again
    train: bool = True  # whether there are backward passes

    def sum_microbatches(self, params: Any, batch: Any, keys: Any, scale: Any = 1) -> Sums:
        """The sums over all microbatches on this device."""
        names = bound(self.model.where, self.stages.axis)
        self._check_devices(names)
        self._check_params(params)
        self._check_examples((batch, keys))
        pipe = self._find_pipe(names, params)
        layers, shared = self._mark_varying(params, pipe)
        inputs = self._arrange_inputs(layers, (batch, keys))
        pieces = self._trace_pieces(inputs, shared, pipe)
        self._check_collectives(pieces, pipe)
        table = self.schedule.table(saved=not self.recompute, spread=pipe.is_spread)
        halves = self._find_halves(pieces, table)
        ops = self._make_ops(pieces, inputs, shared, scale, halves, pipe)
        wraps = self.schedule.chunks > 1 and self.schedule.placement == "loop"
        runner = TableRunner(table, ops, pipe.live or None, wraps)
        return runner.run(jax.tree.leaves(strip_handles(inputs.stacks)), pipe.device)

    def _find_pipe(self, names: tuple[str, ...], params: Any) -> _Pipe:
        live = live_axes(self.model.where, names, *jax.tree.leaves(params))
        device = axis_index(names) if live else jnp.int32(0)
        is_spread = self.stages.spread is not None and bool(live)
        return _Pipe(names, live, device, is_spread)

    def _mark_varying(self, params: Any, pipe: _Pipe) -> tuple[Any, dict[str, Any]]:
        """The stack of layers and the shared leaves, marked as varying over the pipe.

        So their gradients stay sums of this device, which the step reduces once after the last tick: jax would reduce
        that of an unmarked leaf in every tick. Where embedding and head are spread, no shared leaf is marked: a spread
        leaf is a part already, and embedding and head have to return the same on all devices, which they would not do
        by their types if they read a marked leaf.
        """
        shared = unseal_handles(dict(params))
        layers = vary(shared.pop(self.stages.stack), pipe.live)
        if not pipe.is_spread:
            shared = vary(shared, pipe.live)
        return layers, shared

    def _arrange_inputs(self, layers: Any, examples: Any) -> _DeviceInputs:
        """Layers by chunk, and batch and keys by microbatch."""
        chunks = self.schedule.chunks

        def reshape_by_chunk(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(chunks, leaf.shape[0] // chunks, *leaf.shape[1:])

        counts = count_layers(self.stages, self.schedule.devices, layers)
        microbatches = split_microbatches(examples, self.schedule.microbatches)
        stacks = jax.tree.map(reshape_by_chunk, layers)
        return _DeviceInputs(stacks, microbatches, find_starts(counts), np.array(counts, np.int32))

    def _trace_pieces(self, inputs: _DeviceInputs, shared: Any, pipe: _Pipe) -> Pieces:
        """The pieces, traced for the arguments of any stage and microbatch."""
        zero = vary(jnp.int32(0), pipe.live)
        common = None
        owner = None
        if pipe.is_spread:
            common = eval_shape(inputs.find_common, jnp.int32(0))
            # The device of the last stage: the heads read its output.
            owner = device_of(self._last_stage, self.schedule.devices, self.schedule.placement)
        example = eval_shape(inputs.find_arguments, zero, zero, zero)
        return Pieces(self.model, shared, example, pipe.live, int(inputs.counts.min()), common, owner)

    def _make_ops(
        self, pieces: Pieces, inputs: _DeviceInputs, shared: Any, scale: Any, halves: TwoHalves | None, pipe: _Pipe
    ) -> Ops:
        return Ops(
            pieces=pieces,
            find_arguments=inputs.find_arguments,
            shared=shared,
            scale=jnp.asarray(scale, jnp.float32),
            last=self._last_stage,
            saves=self.train and not self.recompute,
            train=self.train,
            halves=halves,
            exclusion=Branched() if self.mode == "branch" else Masked(),
            find_common=inputs.find_common if pipe.is_spread else None,
        )

    @property
    def _last_stage(self) -> int:
        return self.schedule.devices * self.schedule.chunks - 1

    def _find_halves(self, pieces: Pieces, table: Table) -> TwoHalves | None:
        """The two halves of a backward pass, where the schedule has I and W, and the stage can be cut."""
        has_halves = any("I" in segment.ops for segment in table.segments)
        if not self.train or not has_halves:
            return None
        halves = pieces.halves
        if not halves.uncut:
            return halves
        warnings.warn(
            f"{self.model.where}: the schedule splits backward passes, but those of this stage run whole, in place of "
            f"I. {halves.why}",
            stacklevel=4,
        )
        return None

    # ---- what is refused

    def _check_devices(self, names: tuple[str, ...]) -> None:
        count = axis_size(names)
        if count != self.schedule.devices:
            raise ValueError(
                f"{self.model.where}: the schedule must be for the devices of {name_axes(names)}; it is for "
                f"{self.schedule.devices} and there are {count}. Make one with devices={count}."
            )

    def _check_params(self, params: Any) -> None:
        stack = self.stages.stack
        if not isinstance(params, Mapping) or stack not in params:
            got = quote(params) if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"{self.model.where}: the parameters must be a mapping with the entry {stack!r}, the stack; got {got}. "
                f"Put the stack of layers under {stack!r}, and everything else beside it."
            )

    def _check_examples(self, examples: Any) -> None:
        microbatches = self.schedule.microbatches
        sizes = set()
        for leaf in jax.tree.leaves(examples):
            if leaf.ndim:
                sizes.add(leaf.shape[0])
        if any(size % microbatches for size in sizes):
            raise ValueError(
                f"{self.model.where}: a device's examples must be divisible by the schedule's microbatches; got "
                f"{', '.join(map(str, sorted(sizes)))} examples for {microbatches} microbatches. Choose another batch "
                "or a schedule for other microbatches."
            )

    def _check_collectives(self, pieces: Pieces, pipe: _Pipe) -> None:
        """Refuses collectives of the pieces that would wait for devices that do something else, or mix microbatches.

        In a branch the other devices do something else. Masked, all devices meet, each with another microbatch.
        Branches beside spread ends are refused before.
        """
        where = self.model.where
        if self.mode == "branch":
            jaxprs = [piece.jaxpr for piece in self._list_pieces(pieces)]
            refuse_divergent(f"{where}: mode='branch'", jaxprs, pipe.names, "Use mode='masked'.")
        elif pipe.live:
            traced = [pieces.stage]
            if self.stages.spread is None:
                head = pieces.head_backward if self.train else pieces.head
                traced += [pieces.embed, head]
            refuse_mixed(where, [piece.jaxpr for piece in traced], pipe.names)

    def _list_pieces(self, pieces: Pieces) -> list[Piece]:
        """All pieces that ops run."""
        if not self.train:
            return [pieces.embed, pieces.stage, pieces.head]
        return [pieces.embed, pieces.forward, pieces.backward, pieces.embed_backward, pieces.head_backward]

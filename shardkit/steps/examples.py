"""Whether the loss of a step adds over its examples, so that it is the same number on every mesh.

Each device computes the loss of its own examples, and the step divides the sum of the totals by that of the weights.
Most losses are seen to add over their examples in their trace (`on_device/additive.py`), which compiles and runs
nothing. Where the trace does not tell, the loss of the examples of two devices together is compared with those of both,
with the numbers of the first batch and with others in their place, as NaN: a guard such as
`jnp.where(jnp.isnan(loss), 0, loss)` is the same on every mesh until the first NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardkit._jax.compat import varying_axes
from shardkit.collectives import all_reduce, shift, vary
from shardkit.on_device.additive import Loss, read_loss
from shardkit.on_device.batch import device_keys, example_axes, split_microbatches, take_microbatch
from shardkit.on_device.example_states import Rows, State, any_whole
from shardkit.on_device.local_step import local_loss
from shardkit.on_device.pipelines import Staged
from shardkit.on_device.seam import enter
from shardkit.plans.plan import Placement
from shardkit.steps.carry import Carried
from shardkit.steps.state import TrainState
from shardkit.steps.train import TrainProgram

# The largest difference, as a share of the losses, that is taken for rounding: of float32, and of 16 bits.
ROUNDING = 2e-5
ROUNDING_16_BITS = 1e-2


class WrongProgramError(ValueError):
    """What the first call of a step refuses, because it would give other numbers than one device."""


class _Split(NamedTuple):
    """How a step splits its examples, and what its loss is called with."""

    program: TrainProgram
    placement: Placement
    carried: Carried
    axes: tuple[str, ...]  # the mesh axes that split the examples
    parts: int  # of a device's examples, as microbatches

    @property
    def devices(self) -> int:
        """Among how many devices the examples are split."""
        return math.prod(self.placement.mesh.shape[axis] for axis in self.axes)

    def loss(self, params: Any, carried: Any, batch: Any, keys: Any) -> tuple[Any, ...]:
        """The Means of a device's loss, inside shard_map."""
        policy = self.program.policy
        grad_fn = self.program.grad_fn
        weights = enter(params, self.placement, policy)
        if self.program.reads:
            grad_fn = self.carried.bind(grad_fn, carried, policy)
        return local_loss(grad_fn, weights, batch, keys, self.placement, policy)

    def map_devices(self, on_device: Callable[..., Any], batch: Any, keys: PartitionSpec, out: PartitionSpec) -> Any:
        """`on_device(params, carried, batch, keys)` on every device."""
        batch_spec = self.placement.batch
        specs = jax.tree.map(lambda x: PartitionSpec(*batch_spec[: jnp.ndim(x)]), batch)
        return jax.shard_map(
            on_device,
            mesh=self.placement.mesh,
            in_specs=(self.placement.rest, self.carried.specs, specs, keys),
            out_specs=out,
            axis_names=set(self.program.manual),
        )


def check_examples(program: TrainProgram, state: TrainState, key: jax.Array, batch: Any) -> None:
    """Refuses a loss in which examples meet, under a plan or an accumulation that splits them.

    Not checked: losses that send over an axis of the batch themselves, and those of pipelines. Where the trace does not
    tell, nor are those that call back into Python, which would print twice, and steps inside of another jit.

    Raises:
        WrongProgramError: names the line where they meet.
    """
    placement = program.plan.placement(state.params, program.mesh)
    carried = Carried("step", state.carried, state.params, placement)
    parts = program.microbatches.for_batch(batch, placement).parts
    split = _Split(program, placement, carried, example_axes(placement.batch), parts)
    if split.devices * parts == 1 or isinstance(program.grad_fn, Staged):
        return
    loss = read_trace(split, state, key, batch)
    runs_later = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, batch)))
    if loss.met is None or loss.sends or loss.acts or runs_later:
        return
    has_16_bits = jnp.finfo(program.policy.compute).bits < 32
    rounding = ROUNDING_16_BITS if has_16_bits else ROUNDING
    compare = make_comparison(split, batch)
    when = ""
    comparison = compare(state.params, key, Planted.NOTHING)
    if comparison.gap <= rounding:
        when = " at parameters nearby"
        comparison = compare(perturb(state.params), key, Planted.NOTHING)
    for planted, words in _PLANTED.items():
        if comparison.gap <= rounding:
            when = words
            comparison = compare(state.params, key, planted)
    if comparison.gap <= rounding:
        return
    place = f" at {loss.met.line}" if loss.met.line else ""
    two = "two microbatches" if split.parts > 1 else "two devices"
    losses = f"is {comparison.together:.6g}{when}, and not the mean of theirs, {comparison.apart:.6g}"
    raise WrongProgramError(
        "step: the loss must be a sum over examples, because each device computes the loss of its examples alone; "
        f"{loss.met.how}{place}, so the loss of the examples of {two} {losses}. Return sk.Mean(total, weight) of sums "
        "over examples, send the values that other examples need, as sk.all_gather does, or pass "
        "make_train_step(..., examples='mixed') if you mean to mix the examples of each device."
    )


def read_trace(split: _Split, state: TrainState, key: jax.Array, batch: Any) -> Loss:
    """What the trace of the loss tells, for the examples of a device and for twice as many."""
    examples = next(jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x))
    size = examples // (split.devices * split.parts)
    state_shapes = jax.tree.map(_shape, (state.params, split.carried.tree))
    every_device = PartitionSpec(split.program.manual)

    def trace(count: int) -> Any:
        """The program for so many examples on each device."""
        shapes = jax.tree.map(lambda x: _with_examples(_shape(x), count * split.devices), batch)
        keys = jax.ShapeDtypeStruct((count * split.devices,), key.dtype)

        def on_device(params: Any, carried: Any, batch: Any, keys: Any) -> list[jax.Array]:
            means = split.loss(params, carried, batch, keys)
            return [vary(x, split.program.manual).reshape(1) for mean in means for x in mean]

        run = split.map_devices(on_device, shapes, PartitionSpec(split.axes), every_device)
        return jax.make_jaxpr(run)(*state_shapes, shapes, keys)

    few = trace(size)
    many = trace(2 * size)
    number_of_state = len(jax.tree.leaves(state_shapes))
    states: list[State] = []
    for number, variable in enumerate(many.jaxpr.invars):
        of_examples = number >= number_of_state and variable.aval.ndim
        states.append(Rows(0) if of_examples else any_whole(variable))
    loss = read_loss(few, many, states, 2 * size, split.axes)
    return loss._replace(acts=bool(many.effects))


@jax.jit
def perturb(params: Any) -> Any:
    """Parameters nearby: where a loss begins with zeros, as of a new head, examples may meet in its gradient alone.

    By waves rather than random numbers, which take longer to compile than many a loss.
    """
    leaves, structure = jax.tree.flatten(params)
    moved = []
    for number, x in enumerate(leaves):
        wave = jnp.cos(2.4 * jnp.arange(x.size, dtype=jnp.float32) + number).reshape(x.shape)
        size = 0.5 + jnp.abs(x.astype(jnp.float32))
        moved.append(x + (0.05 * wave * size).astype(x.dtype))
    return jax.tree.unflatten(structure, moved)


class Planted(IntEnum):
    """What stands in the batch in place of the examples of every second device, or of every second microbatch.

    A comparison over the examples may be the same for both parts of the first batch, and another for a later one:
    `jnp.any(errors > 5)`. So one part is made smaller or larger than the other, or zeros and NaN, which padding and
    overflow put there.
    """

    NOTHING = 0
    SMALL = 1
    LARGE = 2
    ZEROS = 3
    NOT_A_NUMBER = 4


_PLANTED = {
    Planted.SMALL: " where those of one are an eighth",
    Planted.LARGE: " where those of one are eight times as large",
    Planted.ZEROS: " where those of one are zeros",
    Planted.NOT_A_NUMBER: " where those of one are NaN",
}


class LossComparison(NamedTuple):
    """The mean of the losses of two parts of the examples, that of both together, and by what share they differ."""

    apart: float
    together: float
    gap: float


def make_comparison(split: _Split, batch: Any) -> Callable[..., LossComparison]:
    """A function of parameters, the run's key and `Planted` that compares two parts of a batch with both together.

    It returns what the device computes whose losses differ most. With microbatches the parts are the first two of each
    device; else they are those of a device and of the one before it. It is compiled once.

    Worked example: a loss is the mean of squares, divided by the largest of them. Device 1 has [1, 2], and device 0
    before it [3, 4]. Apart the losses are 2.5 / 4 and 12.5 / 16, with a mean of 0.70; together 7.5 / 16 = 0.47. So the
    loss does not add over its examples: the step would compute 0.70, and one device 0.47.
    """
    axes = split.axes

    def on_device(params: Any, carried: Any, batch: Any, key: jax.Array) -> jax.Array:
        examples = batch, device_keys(key, batch, split.placement.batch)
        if split.parts > 1:
            microbatches = split_microbatches(examples, split.parts)
            first = take_microbatch(microbatches, 0)
            second = take_microbatch(microbatches, 1)
        else:
            # The examples are sent here, before the loss: what a loss of two devices' examples is, only a device that
            # has them both can say. Nothing of it is in the step, which sends no examples.
            first = examples
            second = jax.tree.map(lambda x: _take_from_neighbor(x, axes) if x.ndim else x, examples)
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]) if a.ndim else a, first, second)

        def loss_sums(part: Any) -> jax.Array:
            return _sum_parts(split.loss(params, carried, *part), axes)

        apart = jax.lax.map(loss_sums, jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second))
        together = loss_sums(both)[None]
        return vary(jnp.concatenate([apart, together]), split.program.manual)[None]

    run = split.map_devices(on_device, batch, PartitionSpec(), PartitionSpec(split.program.manual))

    examples = next(x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x))
    part = examples // (split.devices * split.parts)

    @jax.jit
    def find_largest_gap(params: Any, carried: Any, batch: Any, key: jax.Array, planted: Any) -> jax.Array:
        batch = jax.tree.map(lambda x: _plant(x, part, planted), batch)
        first, second, both = jnp.moveaxis(run(params, carried, batch, key), 1, 0)
        apart = _divide(first + second)
        together = _divide(both)
        size = sum(jnp.abs(_divide(x)) for x in (first, second, both))
        gap = jnp.where(apart == together, 0.0, jnp.abs(apart - together) / size)
        gap = jnp.where(jnp.isnan(apart) & jnp.isnan(together), 0.0, jnp.nan_to_num(gap, nan=jnp.inf))
        worst = jnp.argmax(gap)
        return jnp.stack([apart[worst], together[worst], gap[worst]])

    def compare(params: Any, key: jax.Array, planted: Planted) -> LossComparison:
        numbers = np.asarray(find_largest_gap(params, split.carried.tree, batch, key, int(planted)))
        return LossComparison(*map(float, numbers))

    return compare


def _plant(x: Any, part: int, planted: Any) -> Any:
    """A leaf of the batch with what is planted in every second part of so many examples.

    With part=2, examples 2, 3, 6, 7, ... are planted: those of devices 1, 3, ...
    """
    if not jnp.ndim(x):
        return x
    numbers = jnp.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
    is_planted = numbers // part % 2 == 1
    x = jnp.where(is_planted & (planted == Planted.ZEROS), jnp.zeros_like(x), x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    x = jnp.where(is_planted & (planted == Planted.SMALL), x / 8, x)
    x = jnp.where(is_planted & (planted == Planted.LARGE), x * 8, x)
    return jnp.where(is_planted & (planted == Planted.NOT_A_NUMBER), jnp.full_like(x, jnp.nan), x)


def _with_examples(x: Any, count: int) -> jax.ShapeDtypeStruct:
    """The shape of a leaf of the batch for so many examples; a scalar stays one."""
    shape = (count, *x.shape[1:]) if x.shape else ()
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """An array or number as jit takes it: 64-bit integers of numpy become 32-bit ones."""
    shape = jax.eval_shape(lambda x: x, x)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type)


def _take_from_neighbor(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The array of the device before this one. Keys are sent as the numbers that they are made of."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return shift(x, axes)
    return jax.random.wrap_key_data(shift(jax.random.key_data(x), axes), impl=jax.random.key_impl(x))


def _sum_parts(means: tuple[Any, ...], axes: tuple[str, ...]) -> jax.Array:
    """Totals and weights, `[mean, 2]`, summed over the devices that have parts of the same examples."""
    pairs = []
    for mean in means:
        part_axes = tuple(sorted(varying_axes(mean.total) - set(axes)))
        pair = jnp.stack([vary(x.astype(jnp.float32), part_axes) for x in mean])
        if part_axes:
            pair = all_reduce(pair, part_axes)
        pairs.append(vary(pair, axes))
    return jnp.stack(pairs)


def _divide(sums: jax.Array) -> jax.Array:
    """The loss of each device, from totals and weights `[device, mean, 2]`."""
    total = sums[..., 0]
    weight = sums[..., 1]
    return jnp.sum(total / jnp.where(weight == 0, 1, weight), axis=-1)

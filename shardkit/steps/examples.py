"""Whether the loss of a step adds over its examples, so that it is the same number on every mesh.

Each device computes the loss of its own examples, and the step divides the sum of the totals by that of the weights.
Most losses are seen to add over their examples in their trace (`on_device/additive.py`), which compiles and runs
nothing. Where the trace does not tell, the loss of the examples of two devices together is compared with those of both,
once, with the numbers of the first batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardkit._jax.compat import varying_axes
from shardkit.collectives import all_reduce, shift, vary
from shardkit.on_device.additive import Loss, read_loss
from shardkit.on_device.batch import device_keys, split_microbatches, split_over, take_microbatch
from shardkit.on_device.example_states import Rows, State, any_whole
from shardkit.on_device.local_step import local_loss
from shardkit.on_device.pipelines import Staged
from shardkit.on_device.seam import enter
from shardkit.plans.plan import Placement
from shardkit.steps.carry import Carried
from shardkit.steps.state import TrainState
from shardkit.steps.train import TrainProgram

# The largest difference, as a share of the losses, that is taken for rounding: of float32, and of 16 bits.
ROUNDING, ROUNDING_16_BITS = 2e-5, 1e-2


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
        policy, grad_fn = self.program.policy, self.program.grad_fn
        seen = enter(params, self.placement, policy)
        if self.program.reads:
            grad_fn = self.carried.bind(grad_fn, carried, policy)
        return local_loss(grad_fn, seen, batch, keys, self.placement, policy)

    def on_mesh(self, on_device: Callable[..., Any], batch: Any, keys: PartitionSpec, out: PartitionSpec) -> Any:
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
    split = _Split(program, placement, carried, split_over(placement.batch), parts)
    if split.devices * parts == 1 or isinstance(program.grad_fn, Staged):
        return
    loss = read_trace(split, state, key, batch)
    runs_later = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, batch)))
    if loss.met is None or loss.sends or loss.acts or runs_later:
        return
    sixteen_bits = jnp.finfo(program.policy.compute).bits < 32
    rounding = ROUNDING_16_BITS if sixteen_bits else ROUNDING
    compare, nearby = comparing(split, batch), ""
    compared = compare(state.params, key)
    if compared.gap <= rounding:
        compared, nearby = compare(perturbed(state.params), key), " at parameters nearby"
    if compared.gap <= rounding:
        return
    place = f" at {loss.met.line}" if loss.met.line else ""
    two = "two microbatches" if split.parts > 1 else "two devices"
    losses = f"is {compared.together:.6g}{nearby}, and not the mean of theirs, {compared.apart:.6g}"
    raise WrongProgramError(
        f"step: the loss must add over its examples, because each device computes that of its own; {loss.met.how}"
        f"{place}, so the loss of the examples of {two} {losses}. Return sk.Mean(total, weight) of sums over examples, "
        "send what other examples need, as sk.all_gather does, or pass make_train_step(..., examples='mixed') if each "
        "device's own examples are meant to meet."
    )


def read_trace(split: _Split, state: TrainState, key: jax.Array, batch: Any) -> Loss:
    """What the trace of the loss tells, for the examples of a device and for twice as many."""
    size = next(jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)) // (split.devices * split.parts)

    def traced(count: int) -> Any:
        shapes = jax.tree.map(lambda x: _with_examples(_shape(x), count * split.devices), batch)
        keys = jax.ShapeDtypeStruct((count * split.devices,), key.dtype)

        def on_device(params: Any, carried: Any, batch: Any, keys: Any) -> list[jax.Array]:
            means = split.loss(params, carried, batch, keys)
            return [vary(x, split.program.manual).reshape(1) for mean in means for x in mean]

        every = PartitionSpec(split.program.manual)
        on_mesh = split.on_mesh(on_device, shapes, PartitionSpec(split.axes), every)
        own = jax.tree.map(_shape, (state.params, split.carried.tree))
        return jax.make_jaxpr(on_mesh)(*own, shapes, keys), len(jax.tree.leaves(own))

    few, _ = traced(size)
    many, whole = traced(2 * size)
    states: list[State] = []
    for number, variable in enumerate(many.jaxpr.invars):
        if number < whole or not variable.aval.ndim:
            states.append(any_whole(variable))
        else:
            states.append(Rows(0))
    return read_loss(few, many, states, 2 * size, split.axes)._replace(acts=bool(many.effects))


@jax.jit
def perturbed(params: Any) -> Any:
    """Parameters nearby: where a loss begins with zeros, as of a new head, examples may meet in its gradient alone.

    By waves rather than random numbers, which take longer to compile than many a loss.
    """
    leaves, structure = jax.tree.flatten(params)
    moved = []
    for number, x in enumerate(leaves):
        wave = jnp.cos(2.4 * jnp.arange(x.size, dtype=jnp.float32) + number).reshape(x.shape)
        moved.append(x + (0.05 * wave * (0.5 + jnp.abs(x.astype(jnp.float32)))).astype(x.dtype))
    return jax.tree.unflatten(structure, moved)


class LossComparison(NamedTuple):
    """The mean of the losses of two parts of the examples, that of both together, and by what share they differ."""

    apart: float
    together: float
    gap: float


def comparing(split: _Split, batch: Any) -> Callable[..., LossComparison]:
    """A function of parameters and the run's key that compares two parts of a batch with both together.

    It returns what the device finds whose losses differ most. With microbatches the parts are the first two of each
    device; else they are those of a device and of the one before it. It is compiled once.
    """
    axes = split.axes

    def on_device(params: Any, carried: Any, batch: Any, key: jax.Array) -> jax.Array:
        examples = batch, device_keys(key, batch, split.placement.batch)
        if split.parts > 1:
            pieces = split_microbatches(examples, split.parts)
            first, second = take_microbatch(pieces, 0), take_microbatch(pieces, 1)
        else:
            # The examples are sent here, before the loss: what a loss of two devices' examples is, only a device that
            # has them both can say. Nothing of it is in the step, which sends no examples.
            first, second = examples, jax.tree.map(lambda x: _from_neighbor(x, axes) if x.ndim else x, examples)
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]) if a.ndim else a, first, second)

        def sums(part: Any) -> jax.Array:
            return _sums(split.loss(params, carried, *part), axes)

        apart = jax.lax.map(sums, jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second))
        return vary(jnp.concatenate([apart, sums(both)[None]]), split.program.manual)[None]

    on_mesh = split.on_mesh(on_device, batch, PartitionSpec(), PartitionSpec(split.program.manual))

    @jax.jit
    def differences(*args: Any) -> jax.Array:
        first, second, both = jnp.moveaxis(on_mesh(*args), 1, 0)
        apart, together = _quotient(first + second), _quotient(both)
        size = sum(jnp.abs(_quotient(x)) for x in (first, second, both))
        gap = jnp.where(apart == together, 0.0, jnp.abs(apart - together) / size)
        gap = jnp.where(jnp.isnan(apart) & jnp.isnan(together), 0.0, jnp.nan_to_num(gap, nan=jnp.inf))
        worst = jnp.argmax(gap)
        return jnp.stack([apart[worst], together[worst], gap[worst]])

    def compare(params: Any, key: jax.Array) -> LossComparison:
        return LossComparison(*map(float, np.asarray(differences(params, split.carried.tree, batch, key))))

    return compare


def _with_examples(x: Any, count: int) -> jax.ShapeDtypeStruct:
    shape = (count, *x.shape[1:]) if x.shape else ()
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """An array or number as jit takes it: 64-bit integers of numpy become 32-bit ones."""
    taken = jax.eval_shape(lambda x: x, x)
    return jax.ShapeDtypeStruct(taken.shape, taken.dtype, weak_type=taken.weak_type)


def _from_neighbor(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The array of the device before this one. Keys are sent as the numbers that they are made of."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return shift(x, axes)
    return jax.random.wrap_key_data(shift(jax.random.key_data(x), axes), impl=jax.random.key_impl(x))


def _sums(means: tuple[Any, ...], axes: tuple[str, ...]) -> jax.Array:
    """Totals and weights, `[mean, 2]`, summed over the devices that have parts of the same examples."""
    pairs = []
    for mean in means:
        over = tuple(sorted(varying_axes(mean.total) - set(axes)))
        pair = jnp.stack([vary(x.astype(jnp.float32), over) for x in mean])
        pairs.append(all_reduce(pair, over) if over else pair)
    return jnp.stack([vary(pair, axes) for pair in pairs])


def _quotient(sums: jax.Array) -> jax.Array:
    """The loss of each device, from totals and weights `[device, mean, 2]`."""
    total, weight = sums[..., 0], sums[..., 1]
    return jnp.sum(total / jnp.where(weight == 0, 1, weight), axis=-1)

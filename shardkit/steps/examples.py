"""The examples of a step: how they are split, and whether the traces of its loss show that it adds over them.

Each device computes the loss of its own examples, and the step divides the sum of the totals by the sum of the weights,
for the loss and for each metric. That is the same on every mesh if the loss and the metrics add over their examples.
The trace of most losses shows that they do (`on_device/additive.py`); this compiles and runs nothing. If it does not
tell, `mixed_examples.py` compares numbers.

A plan may split further dims of the batch, as `cp` splits the tokens along dim 1. A loss that sends nothing over the
axes of a dim must then add along this dim, over its tokens as over its examples. Attention over a device's own tokens
does not add, nor does a loss whose positions begin with 0 on each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardkit._jax import compat
from shardkit._jax.compat import varying_axes
from shardkit._jax.dependence import without_unused
from shardkit._jax.jaxprs import PLAN, walk
from shardkit.collectives import all_reduce, vary
from shardkit.meshes.layout import split_dims
from shardkit.on_device.additive import Loss, read_loss
from shardkit.on_device.batch import example_axes
from shardkit.on_device.example_states import Met, Rows, State, any_whole
from shardkit.plans.plan import Placement


class WrongProgramError(ValueError):
    """The first call of a step raises this for a program that would give other numbers than one device."""


class Examples(NamedTuple):
    """How a step or an evaluation splits its examples, or the tokens of each, and what it computes of them.

    Attributes:
        placement: where each leaf of the parameters is.
        carried: the carried state.
        carried_specs: its layouts.
        manual: the axes that are Manual.
        parts: the number of microbatches into which a device splits its examples; the tokens are not split by it.
        compute: `compute(params, carried, batch, keys)`, the terms of the loss and of each metric by name, in
            shard_map.
        dim: the dim of the batch that is split: 0 for the examples, 1 for their tokens.
    """

    placement: Placement
    carried: Any
    carried_specs: Any
    manual: tuple[str, ...]
    parts: int
    compute: Callable[[Any, Any, Any, Any], dict[str, tuple[Any, ...]]]
    dim: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split this dim."""
        return split_dims(self.placement.batch).get(self.dim, ())

    @property
    def devices(self) -> int:
        """How many devices split the examples."""
        return math.prod(self.placement.mesh.shape[axis] for axis in self.axes)

    @property
    def are_split(self) -> bool:
        """Whether there are several devices or microbatches; else all examples meet as they should."""
        return self.devices * self.parts > 1

    @property
    def keys_spec(self) -> PartitionSpec:
        """The layout of the keys, one for each example."""
        return PartitionSpec(example_axes(self.placement.batch))

    def split_along_dims(self) -> list[Examples]:
        """The same for every dim of the batch that is split, beginning with the examples."""
        splits = [self] if self.are_split else []
        for dim in sorted(split_dims(self.placement.batch)):
            if dim > 0:
                splits.append(self._replace(dim=dim, parts=1))
        return [split for split in splits if split.are_split]

    def map_devices(self, on_device: Callable[..., Any], batch: Any, keys: PartitionSpec, out: PartitionSpec) -> Any:
        """`on_device(params, carried, batch, keys)` on every device."""
        batch_spec = self.placement.batch
        specs = jax.tree.map(lambda x: PartitionSpec(*batch_spec[: jnp.ndim(x)]), batch)
        return jax.shard_map(
            on_device,
            mesh=self.placement.mesh,
            in_specs=(self.placement.rest, self.carried_specs, specs, keys),
            out_specs=out,
            axis_names=set(self.manual),
        )


class Readings(NamedTuple):
    """The facts that the traces of a loss and its metrics show.

    Attributes:
        losses: for the loss and each metric, by name, whether it adds over its examples.
        jaxpr: the program for the examples of a device.
        calls_python: whether it calls back into Python, or has another effect.
        loops: whether it has a loop whose end depends on numbers.
        has_16_bits: whether it computes with 16 bits or fewer, by `precision=` or by itself.
        rounds_weights: whether the plan rounds the weights that it sends, as a compressed gather does.
    """

    losses: dict[str, Loss]
    jaxpr: Any
    calls_python: bool
    loops: bool
    has_16_bits: bool
    rounds_weights: bool

    def suspects(self) -> dict[str, Met]:
        """The loss and metrics in which examples may meet, by name, except if they send over an axis of the batch."""
        suspects: dict[str, Met] = {}
        for name, loss in self.losses.items():
            if loss.met is not None and not loss.sends:
                suspects[name] = loss.met
        return suspects


def read_traces(examples: Examples, params: Any, batch: Any, key: jax.Array | None) -> Readings:
    """Traces the loss and each metric for the examples of a device, and for twice as many, and reads both traces.

    For `examples.dim` 1 the tokens are twice as many, and the examples as many.
    """
    few = _trace(examples, params, batch, key, times=1)
    can_be_traced = True
    try:
        many = _trace(examples, params, batch, key, times=2)
    except Exception:
        # The loss is written for so many on a device. It is right on this mesh, and cannot be compared; only where it
        # sends is read.
        many = few
        can_be_traced = False
    lengths = set()
    for x in jax.tree.leaves(batch):
        if jnp.ndim(x) > examples.dim:
            lengths.add(jnp.shape(x)[examples.dim])
    size = max(lengths) // (examples.devices * examples.parts)
    states = _find_states(many.program, examples.dim, len(jax.tree.leaves((params, examples.carried))))
    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(many.results):
        names.append(path[0].key)
    losses = {}
    for name, shapes in many.results.items():
        if shapes != few.results[name]:
            continue  # an array with an entry for each example: nothing that one device would compute alike
        used = [result_name == name for result_name in names]  # what another metric sends is its own affair
        small_program = without_unused(few.program, used)
        large_program = without_unused(many.program, used)
        loss = read_loss(small_program, large_program, states, 2 * size, examples.axes)
        if not can_be_traced:
            loss = loss._replace(met=None)
        elif len(lengths) > 1:
            loss = loss._replace(met=Met("arrays of the batch have different numbers of examples", ""))
        losses[name] = loss
    return _read_equations(few.program.jaxpr, losses)


class _Trace(NamedTuple):
    """The program of a loss and its metrics, and the shapes of its results by the name of the loss or metric."""

    program: Any
    results: dict[str, list[jax.ShapeDtypeStruct]]


def _trace(examples: Examples, params: Any, batch: Any, key: jax.Array | None, times: int) -> _Trace:
    """The trace for so many times a device's examples: the totals and weights of all devices, along dim 0."""
    state_shapes = jax.tree.map(_shape, (params, examples.carried))
    shapes = jax.tree.map(lambda x: _resize(_shape(x), examples.dim, times, examples.parts), batch)
    keys = None
    if key is not None:
        arrays = [x for x in jax.tree.leaves(shapes) if x.shape]
        (count,) = {x.shape[0] for x in arrays}
        keys = jax.ShapeDtypeStruct((count,), key.dtype)

    def on_device(params: Any, carried: Any, batch: Any, keys: Any) -> dict[str, list[jax.Array]]:
        results: dict[str, list[jax.Array]] = {}
        for name, terms in examples.compute(params, carried, batch, keys).items():
            results[name] = []
            for mean in terms:
                results[name].append(vary(mean.total, examples.manual).reshape(-1))
                results[name].append(vary(mean.weight, examples.manual).reshape(-1))
        return results

    # Dim 0 of each result counts the devices: as terms of the sums they stay apart, and no collective of the step hides
    # what the loss itself sends.
    every_device = PartitionSpec(examples.manual)
    run = examples.map_devices(on_device, shapes, examples.keys_spec, every_device)
    program, results = jax.make_jaxpr(run, return_shape=True)(*state_shapes, shapes, keys)
    return _Trace(program, results)


def _find_states(program: Any, dim: int, whole_leaves: int) -> list[State]:
    """What each argument of a trace holds of the examples.

    In the order of the arguments: parameters and carried state, `whole_leaves` in number, then batch and keys, with
    rows along `dim`. A leaf that lacks the dim, as the keys where tokens are read, is whole.
    """
    states: list[State] = []
    for number, variable in enumerate(program.jaxpr.invars):
        has_rows = number >= whole_leaves and variable.aval.ndim > dim
        states.append(Rows(dim) if has_rows else any_whole(variable))
    return states


def _read_equations(jaxpr: Any, losses: dict[str, Loss]) -> Readings:
    """The readings, with what the equations of the program show."""
    calls_python = False
    loops = False
    has_16_bits = False
    rounds_weights = False
    for site in walk(jaxpr):
        calls_python |= compat.calls_python(site.equation)
        loops |= site.name == "while"
        has_16_bits |= any(_has_16_bits(variable) for variable in site.equation.outvars)
        rounds_weights |= site.within(PLAN) and _rounds(site.equation)
    return Readings(losses, jaxpr, calls_python, loops, has_16_bits, rounds_weights)


def _has_16_bits(variable: Any) -> bool:
    """Whether a variable is of floats of 16 bits or fewer."""
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _rounds(equation: Any) -> bool:
    """Whether floats become integers or floats of 8 bits here."""
    if equation.primitive.name != "convert_element_type":
        return False
    operand = equation.invars[0].aval.dtype
    result = equation.outvars[0].aval.dtype
    if not jnp.issubdtype(operand, jnp.floating):
        return False
    return bool(jnp.issubdtype(result, jnp.integer) or result.itemsize == 1)


def _resize(x: Any, dim: int, times: int, parts: int) -> jax.ShapeDtypeStruct:
    """The shape of a leaf of the batch with `times` of its `parts` parts along a dim; a scalar stays a scalar.

    With 4 microbatches, a leaf [8, 16] of the batch is [4, 16] for two of them.
    """
    shape = list(x.shape)
    if len(shape) > dim:
        shape[dim] = shape[dim] // parts * times
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype, weak_type=x.weak_type)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that jit gives an array or number: 64-bit integers of numpy become 32-bit integers."""
    shape = jax.eval_shape(lambda x: x, x)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type)


def sum_means(means: tuple[Any, ...], axes: tuple[str, ...]) -> jax.Array:
    """Totals and weights, `[mean, 2]`, summed over all axes but `axes`: along these, each device keeps its own."""
    pairs = []
    for mean in means:
        part_axes = tuple(sorted(varying_axes(mean.total) - set(axes)))
        weight = jnp.broadcast_to(mean.weight, jnp.shape(mean.total))
        columns = []
        for x in (mean.total, weight):
            columns.append(vary(x.astype(jnp.float32).reshape(-1), part_axes))
        pair = jnp.stack(columns, axis=-1)
        if part_axes:
            # Over the axes that are not compared, as a tp axis or a pipeline's: there a device may have a part of the
            # loss. Along `axes` each keeps the loss of its own examples, which is what is compared.
            pair = all_reduce(pair, part_axes)
        pairs.append(vary(pair, axes))
    return jnp.concatenate(pairs)


def read_means(sums: jax.Array) -> jax.Array:
    """The means, from their totals and weights in the last dim."""
    total = sums[..., 0]
    weight = sums[..., 1]
    return total / jnp.where(weight == 0, 1, weight)

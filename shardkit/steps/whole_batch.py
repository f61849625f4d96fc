"""Whether a loss that sends over an axis of the batch is that of one device with the whole batch.

What devices send each other inside of a loss is its own affair, and its trace does not tell what was meant: a
contrastive loss that gathers the examples of all devices, and forgets where its own stand among them, is as good a
program as one that does not. So the loss of the first batch is computed once more, over a mesh with one device along
the axes of the examples, and compared with the metric of the first step. No gradients are computed for it. A loss that
sends over the axes of the tokens, as ring attention does, is compared with one device that has whole sequences; so is
one that only asks for the index of the device.

Worked example: four devices have two pairs each, and a loss gathers the eight texts. The image of row 1 on device 2
belongs to text 5. A loss that takes text 1 for it is 2.9 on this mesh. One device has all pairs, so that row 5 is text
5 there, and the same loss is 1.4.

A pipeline sends over its own axis, and what its stages compute must not depend on the device: if a stage asks for the
index of its device, the loss is computed once more with all stages on one device, for this mesh and its microbatches.

Not compared with one device and the whole batch:

- a loss that calls back into Python, and one whose random numbers depend on the device, as by `sk.fold_axis`. Random
  numbers by the positions of tokens among all tokens are the same on one device, and are compared;
- a plan that rounds the weights it sends, as a compressed gather: one device has them as they are;
- microbatches, which have other examples each (`make_train_step` warns of them where a loss sends);
- meshes of several processes, or with axes that are not Manual;
- what is larger than `MOST_BYTES`, because one device must hold it beside the state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import axis_names, quote
from shardkit._jax import compat
from shardkit._jax.interpreter import FactInterpreter
from shardkit._jax.jaxprs import mesh_axes, walk
from shardkit.collectives import axis_index
from shardkit.on_device.advice import Unintended
from shardkit.on_device.batch import device_keys, split_microbatches
from shardkit.on_device.pipelines import Staged
from shardkit.plans.storage import pad_leaves
from shardkit.steps.examples import Examples, Readings, read_means, sum_means
from shardkit.steps.state import TrainState
from shardkit.steps.state_layouts import shardings

MOST_BYTES = 2**30  # of parameters, batch and intermediate arrays, on one device
# The difference that is taken for rounding, as a share of both losses, and their smallest size. Products of other
# shapes are summed in another order, and a loss near 0, as one of normalized advantages, is a difference of larger
# numbers.
ROUNDING = 1e-3
SMALLEST = 0.1
# The CPU computes float32 with 24 bits; others round the factors of a product. A mistake among tokens changes the loss
# of a new model by little: whatever the positions, it predicts all tokens alike.
ROUNDING_OF_CPU = 1e-5
SMALLEST_OF_CPU = 1.0
ROUNDING_16_BITS = 1e-2
SMALLEST_16_BITS = 1.0
_FOLD = "random_fold_in"
_DRAWS = ("random_bits", "random_gamma", "threefry2x32")


class Sent(NamedTuple):
    """Where a loss sends over the axes of the batch, or asks for the index of a device along them.

    Attributes:
        line: the first place where it sends; if it sends nothing, where it asks.
        only_asks: whether it sends nothing.
        axes: over which it sends or asks.
        split_axes: of each dim of the batch that has some of these, all axes that split it.
        of_tokens: whether examples are split, or their tokens alone.
        has_16_bits: whether the loss is computed with 16 bits.
        on_cpu: whether the CPU computes it.
        of_stages: whether it asks along the axis of a pipeline.
    """

    line: str
    only_asks: bool
    axes: tuple[str, ...]
    split_axes: tuple[str, ...]
    of_tokens: bool
    has_16_bits: bool
    on_cpu: bool
    of_stages: bool = False

    def describe_whole(self) -> str:
        """What the one device has, and the remedy: the end of a sentence."""
        if self.of_stages:
            return _OF_STAGES
        return _OF_TOKENS if self.of_tokens else _OF_EXAMPLES


class LossOfWholeBatch(NamedTuple):
    """What the first step's loss must be.

    Attributes:
        loss: of one device with all examples.
        sent: where the loss sends.
    """

    loss: float
    sent: Sent

    def compare(self, metrics: Any) -> None:
        """Warns if the loss of the first step is another."""
        # With steps= a metric has a number for each step, and the first step is the one that was computed again.
        loss = float(np.ravel(np.asarray(metrics["loss"], np.float32))[0])
        if not np.isfinite(loss) or not np.isfinite(self.loss):
            return
        sent = self.sent
        size = abs(loss) + abs(self.loss)
        tolerance = ROUNDING * max(size, SMALLEST)
        if sent.on_cpu:
            tolerance = ROUNDING_OF_CPU * max(size, SMALLEST_OF_CPU)
        if sent.has_16_bits or metrics["loss"].dtype.itemsize < 4:
            tolerance = ROUNDING_16_BITS * max(size, SMALLEST_16_BITS)
        if abs(loss - self.loss) <= tolerance:
            return
        verb = "sends over"
        if sent.only_asks:
            verb = "asks for the index of a device along"
        warnings.warn(
            f"step: {sent.line}: the loss, which {verb} {quote(sent.axes)} here, must be the same on every mesh; it "
            f"is {loss:.6g} on this one, and {self.loss:.6g} where one device has {sent.describe_whole()}",
            Unintended,
            stacklevel=3,
        )


_OF_EXAMPLES = (
    "the whole batch. Find the place of a device's own examples among all by sk.axis_index, and sum over all devices "
    "what counts or divides, or pass make_train_step(..., examples='mixed') if each device is meant to compute what it "
    "does, as with a capacity of each device in a mixture of experts."
)
_OF_TOKENS = (
    "all tokens. Attend over the tokens of all devices, as sk.layers.ring_attention does, take the positions of a "
    "device's own from sk.layers.positions and what stands beside them from sk.collectives.halo_exchange, put them "
    "into another order by sk.layers.zigzag inside of the loss, or pass make_train_step(..., examples='mixed') if each "
    "device is meant to compute what it does, as of a batch that is in the order of this mesh."
)
_OF_STAGES = (
    "all stages. Pass value_and_grad(..., layer_numbers=True) for the number of a layer, and draw by "
    "sk.fold_keys(keys, number)."
)


def find_sent(splits: Sequence[tuple[Examples, Readings]]) -> Sent:
    """Where a loss sends over any of these dims of the batch."""
    lines: list[str] = []
    index_lines: list[str] = []
    axes: set[str] = set()
    split_axes: list[str] = []
    of_tokens = True
    has_16_bits = False
    for examples, readings in splits:
        loss = readings.losses["loss"]
        lines += loss.lines
        index_lines += loss.index_lines
        axes |= loss.sends
        split_axes += examples.axes
        of_tokens = of_tokens and examples.dim > 0
        has_16_bits = has_16_bits or readings.has_16_bits
    line = (lines or index_lines)[0]
    mesh = splits[0][0].placement.mesh
    return Sent(
        line,
        only_asks=not lines,
        axes=tuple(sorted(axes)),
        split_axes=tuple(split_axes),
        of_tokens=of_tokens,
        has_16_bits=has_16_bits,
        on_cpu=_is_cpu(mesh),
    )


def find_index_of_stage(jaxpr: Any, axes: Sequence[str]) -> str:
    """The first line that asks for the index of a device along the axis of a pipeline; "" if none does."""
    for site in walk(jaxpr):
        if site.name == "axis_index" and set(mesh_axes(site.equation)) & set(axes):
            return site.source
    return ""


def make_mesh_of_one(mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """The mesh with its first device alone along these axes."""
    devices = mesh.devices
    for dim, axis in enumerate(mesh.axis_names):
        if axis in axes:
            devices = devices.take([0], axis=dim)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def move(tree: Any, storage: Any, mesh: Mesh) -> Any:
    """Arrays in their original form, stored over another mesh."""
    return jax.device_put(pad_leaves(tree, storage, mesh), shardings(mesh, storage))


def can_be_whole(examples: Examples, readings: Readings, state: TrainState, batch: Any) -> bool:
    """Whether a loss sends over the axes of a dim of the batch, and can be compared with that of one device."""
    mesh = examples.placement.mesh
    if not readings.losses["loss"].sends or compat.is_tracing():
        return False
    if examples.parts > 1 or set(examples.manual) != set(mesh.axis_names):
        return False
    if not _is_here(mesh):
        return False
    if count_bytes((state.params, state.carried, batch)) > MOST_BYTES:
        return False
    return not (readings.calls_python or readings.rounds_weights or draws_by_device(readings.jaxpr))


def compute_whole_batch(
    examples: Examples, sent: Sent, params: Any, batch: Any, key: jax.Array
) -> LossOfWholeBatch | None:
    """The loss over a mesh on which `params` and the carried state are; None if it takes too much memory.

    `key` is that of the step.
    """

    def on_device(params: Any, carried: Any, batch: Any, key: jax.Array) -> jax.Array:
        keys = device_keys(key, batch, examples.placement.batch)
        return sum_means(examples.compute(params, carried, batch, keys)["loss"], ())

    replicated = NamedSharding(examples.placement.mesh, PartitionSpec())
    batch, key = jax.device_put((batch, key), replicated)
    return _run_if_it_fits(on_device, examples, params, batch, key, sent)


def compute_in_sequence(
    pipeline: Staged, examples: Examples, readings: Readings, state: TrainState, batch: Any, key: jax.Array
) -> LossOfWholeBatch | None:
    """The loss of a pipeline of which one device runs all stages; None if it asks for no index of a stage's device.

    `key` is that of the step.

    Worked example: a stage multiplies by `axis_index("stage") + 1`. Two devices multiply by 1 and then by 2, and one
    device with both stages by 1 and by 1.
    """
    mesh = examples.placement.mesh
    axes = axis_names("step", pipeline.stages.axis)
    line = find_index_of_stage(readings.jaxpr, axes)
    # The collectives of a spread head need the index of each device.
    if not line or pipeline.stages.spread is not None or readings.losses["loss"].sends:
        return None
    if readings.calls_python or not _is_here(mesh):
        return None

    def on_device(params: Any, carried: Any, batch: Any, key: jax.Array) -> jax.Array:
        keys = device_keys(key, batch, examples.placement.batch)
        is_first = axis_index(axes) == 0

        def sum_microbatch(microbatch: Any) -> jax.Array:
            terms = examples.compute(params, carried, *microbatch)["loss"]
            # Each device has another index; the first one is the one device.
            terms = jax.tree.map(lambda x: jnp.where(is_first, x, 0), terms)
            return sum_means(terms, ())

        microbatches = split_microbatches((batch, keys), examples.parts)
        return jnp.sum(jax.lax.map(sum_microbatch, microbatches), axis=0)

    sent = Sent(
        line,
        only_asks=True,
        axes=axes,
        split_axes=(),
        of_tokens=False,
        has_16_bits=readings.has_16_bits,
        on_cpu=_is_cpu(mesh),
        of_stages=True,
    )
    return _run_if_it_fits(on_device, examples, state.params, batch, key, sent)


def _run_if_it_fits(
    on_device: Callable[..., jax.Array], examples: Examples, params: Any, batch: Any, key: jax.Array, sent: Sent
) -> LossOfWholeBatch | None:
    """The loss from the `sum_means` that `on_device` returns; None if it takes too much memory."""
    run = examples.map_devices(on_device, batch, PartitionSpec(), PartitionSpec())
    args = (params, examples.carried, batch, key)
    compiled = jax.jit(run).lower(*args).compile()
    memory = compiled.memory_analysis()
    if memory is not None and memory.temp_size_in_bytes > MOST_BYTES:
        return None
    loss = read_means(compiled(*args)).sum()
    return LossOfWholeBatch(float(loss), sent)


def _is_here(mesh: Mesh) -> bool:
    """Whether this process has all devices."""
    return {device.process_index for device in mesh.devices.flat} == {jax.process_index()}


def _is_cpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "cpu")


def count_bytes(tree: Any) -> int:
    """The size of all arrays of a tree, in bytes."""
    total = 0
    for x in jax.tree.leaves(tree):
        total += jnp.size(x) * jnp.result_type(x).itemsize
    return total


def draws_by_device(jaxpr: Any) -> bool:
    """Whether random numbers depend on the index of a device along its axes, but for an index of each token.

    Worked example: `fold_in(key, axis_index("context"))` of a scalar gives each device one key, which one device alone
    does not have. `fold_in(keys, axis_index("context") * 8 + arange(8))` gives each token the key of its position,
    which one device alone computes too.
    """
    reader = _DrawsReader()
    reader.run(jaxpr, [_Source.ARGUMENTS] * len(jaxpr.invars))
    return reader.draws


class _Source(IntEnum):
    """What a value follows from."""

    ARGUMENTS = 0
    DEVICE = 1  # the index of a device
    PLACES = 2  # the index of a device, and another one for each token: the place of the token among all


class _DrawsReader(FactInterpreter[_Source]):
    """Follows what depends on the index of a device; `draws` says whether random numbers do."""

    draws = False

    def constant(self, x: Any) -> _Source:
        """Closed-over arrays depend on no device."""
        return _Source.ARGUMENTS

    def literal(self, atom: Any) -> _Source:
        """Nor do literals."""
        return _Source.ARGUMENTS

    def join(self, facts: Sequence[_Source], variable: Any) -> _Source:
        """What may depend on a device does."""
        return max(facts)

    def equation(self, equation: Any, operands: list[_Source]) -> Sequence[_Source]:
        """The results follow from all operands; the index of a device from the device."""
        name = equation.primitive.name
        source = max(operands, default=_Source.ARGUMENTS)
        if name == "axis_index":
            source = _Source.DEVICE
        elif source == _Source.DEVICE and self._adds_places(equation, operands):
            source = _Source.PLACES
        elif name == _FOLD and operands[1] == _Source.PLACES:  # keys, and the numbers that are folded into them
            source = operands[0]
        if name in _DRAWS and source != _Source.ARGUMENTS:
            self.draws = True
        return [source] * len(equation.outvars)

    def _adds_places(self, equation: Any, operands: Sequence[_Source]) -> bool:
        """Whether integers of a device meet others, one for each token, as `device * 8` meets `arange(8)`."""
        if not equation.outvars or not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer):
            return False
        for variable, source in zip(equation.invars, operands, strict=True):
            if source == _Source.ARGUMENTS and variable.aval.size > 1:
                return True
        return False

    def shard_map(self, equation: Any, body: Any, operands: list[_Source]) -> Sequence[_Source]:
        """As a call."""
        return self.run(body, operands)

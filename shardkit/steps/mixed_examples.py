"""Losses and metrics in which examples meet, by numbers: where the trace does not tell (`examples.py`).

The loss of two devices' examples together is compared with the losses of the two devices apart. They are compared for
the first batch, and for other numbers in its place, such as NaN: a guard such as `jnp.where(jnp.isnan(loss), 0, loss)`
is the same on every mesh until the first NaN.

The tokens of two devices are compared in their order: the tokens of the earlier device come first. No integers are
planted among them: integers may be the numbers of documents, and zeros would make one document of two.

Not compared:

- a program that calls back into Python or has another effect: it would be called with numbers that no batch has;
- a step that is called inside another jit: there are no numbers yet;
- a loss or metric that sends over an axis of the batch itself: `whole_batch.py` compares it with one device.

A program with a `while` is compared for the numbers of the first batch alone: with other numbers its loop may never
end. Only losses are compared. A `custom_vjp` may mix examples in its backward pass alone, for instance by clipping
cotangents by the whole batch: `testing.assert_same_training` finds this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardkit._jax import compat
from shardkit.collectives import axis_index, shift, vary
from shardkit.on_device.batch import device_keys, split_microbatches, take_microbatch
from shardkit.on_device.example_states import Met
from shardkit.steps.examples import Examples, Readings, read_means, sum_means

# A difference up to this share of the losses counts as rounding, in float32 and in 16 bits.
ROUNDING = 2e-5
ROUNDING_16_BITS = 1e-2
# Losses below this are compared as if they were this large: a loss near zero is often a difference of larger numbers,
# and has their rounding.
_SMALLEST = 1e-2


class Mixed(NamedTuple):
    """A loss or a metric in which examples meet.

    Attributes:
        name: "loss", or the path of the metric in the auxiliary values.
        met: how they meet, and the line.
        comparison: the losses that differ.
        numbers: the numbers with which they differ, as the end of a clause; "" for the numbers of the first batch.
        parts: the number of microbatches of a device.
        dim: 0 where examples meet, 1 where their tokens do.
    """

    name: str
    met: Met
    comparison: LossComparison
    numbers: str
    parts: int
    dim: int

    @property
    def noun(self) -> str:
        """What meets."""
        return noun_of(self.dim)

    def describe(self) -> str:
        """Where examples meet, and what follows: the middle of a sentence.

        Worked example: "because each device computes that of its own; sqrt is applied to a sum over the examples at
        train.py:12, so the loss of the examples of two devices is 1.7, and not the mean of theirs, 1.5".
        """
        # The loss is the subject of the sentence; a metric stands in the clause before, and is "that" here.
        loss = "the loss" if self.name == "loss" else "that"
        parts = "two microbatches" if self.parts > 1 else "two devices"
        together = f"{loss} of the {self.noun}s of {parts} is {self.comparison.together:.6g}{self.numbers}"
        apart = f"the mean of theirs, {self.comparison.apart:.6g}"
        return (
            f"because each device computes that of its own; {self._describe_meeting()}, so {together}, and not {apart}"
        )

    def _describe_meeting(self) -> str:
        """How examples meet, and at which line."""
        how = self.met.how
        if self.dim:
            how = _name_tokens(how, self.noun)
        if not self.met.line:
            return how
        return f"{how} at {self.met.line}"


def _name_tokens(how: str, noun: str) -> str:
    """Words of the rules in `on_device/`, which speak of the examples of a batch, for the tokens of a sequence.

    Worked example: "sorts an example by its place in the batch" becomes "sorts a token by its place in the sequence".
    """
    article = "an" if noun == "element" else "a"
    how = how.replace("an example", f"{article} {noun}")
    how = how.replace("example", noun)
    return how.replace("batch", "sequence")


def noun_of(dim: int) -> str:
    """What a dim of the batch counts."""
    return {0: "example", 1: "token"}.get(dim, "element")


def rounding_of(readings: Readings) -> float:
    """The largest difference of two losses, as a share of them, that counts as rounding."""
    return ROUNDING_16_BITS if readings.has_16_bits else ROUNDING


def find_mixed(examples: Examples, readings: Readings, params: Any, batch: Any, key: jax.Array | None) -> list[Mixed]:
    """The loss and the metrics in which examples meet. If the loss is one of them, the metrics are not compared.

    `key` is the run's; None for an evaluation, which has none.
    """
    suspects = readings.suspects()
    if not suspects or readings.calls_python or compat.is_tracing():
        return []
    compare = make_comparison(examples, batch, list(suspects))
    rounding = rounding_of(readings)
    numbers: Sequence[tuple[str, bool, Planted]] = _NUMBERS
    if readings.loops:
        numbers = _NUMBERS[:1]
    mixed: dict[str, Mixed] = {}
    for words, nearby, planted in numbers:
        if "loss" in mixed or len(mixed) == len(suspects):
            break
        comparisons = compare(perturb(params) if nearby else params, key, planted)
        for name, comparison in comparisons.items():
            if name not in mixed and comparison.gap > rounding:
                mixed[name] = Mixed(name, suspects[name], comparison, words, examples.parts, examples.dim)
    return list(mixed.values())


@jax.jit
def perturb(params: Any) -> Any:
    """Parameters near these: if a new head is zero, the loss may not show that examples meet, only its gradient.

    Waves are added instead of random numbers, which take longer to compile than many a loss.
    """
    leaves, structure = jax.tree.flatten(params)
    moved = []
    for number, x in enumerate(leaves):
        wave = jnp.cos(2.4 * jnp.arange(x.size, dtype=jnp.float32) + number).reshape(x.shape)
        size = 0.5 + jnp.abs(x.astype(jnp.float32))
        moved.append(x + (0.05 * wave * size).astype(x.dtype))
    return jax.tree.unflatten(structure, moved)


class Planted(IntEnum):
    """The change to the examples of every second device, or of every second microbatch.

    A condition over the examples, such as `jnp.any(errors > 5)`, may have one answer for all parts of the first batch,
    and differ between the parts of a later batch. So one part is made smaller or larger than the other, or zeros, as in
    padding, or NaN, as after an overflow.
    """

    NOTHING = 0
    SMALL = 1
    LARGE = 2
    ZEROS = 3
    NOT_A_NUMBER = 4


# The comparisons in order: the words of the error about the numbers, whether parameters are moved by `perturb`, and the
# change to the batch.
_NUMBERS = (
    ("", False, Planted.NOTHING),
    (" at parameters nearby", True, Planted.NOTHING),
    (" where those of one are an eighth", False, Planted.SMALL),
    (" where those of one are eight times as large", False, Planted.LARGE),
    (" where those of one are zeros", False, Planted.ZEROS),
    (" where those of one are NaN", False, Planted.NOT_A_NUMBER),
)


class LossComparison(NamedTuple):
    """The losses of two parts of the examples, apart and together."""

    apart: float  # the mean of both parts, each computed alone
    together: float  # the loss of both parts at once
    gap: float  # their difference as a share of the losses


def make_comparison(examples: Examples, batch: Any, names: Sequence[str]) -> Callable[..., dict[str, LossComparison]]:
    """A function of parameters, the run's key and `Planted` that compares two parts of a batch with both together.

    It returns, for the loss or metric of each name, the comparison of the device whose parts differ most. With
    microbatches the parts are the first two microbatches of a device; else they are the examples of a device and of the
    device before it. It is compiled once.

    Worked example: a loss is the mean of squares, divided by the largest of them. Device 1 has [1, 2], and device 0
    before it [3, 4]. Apart the losses are 2.5 / 4 and 12.5 / 16, with a mean of 0.70; together 7.5 / 16 = 0.47. So the
    loss does not add over its examples: the step would compute 0.70, and one device 0.47.
    """
    axes = examples.axes
    dim = examples.dim

    def join(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.concatenate([a, b], dim) if a.ndim > dim else a

    def on_device(params: Any, carried: Any, batch: Any, key: jax.Array | None) -> dict[str, jax.Array]:
        keys = None
        if key is not None:
            keys = device_keys(key, batch, examples.placement.batch)
        first, second = _take_two_parts(examples, (batch, keys))
        whole_batch = jax.tree.map(join, first, second)

        def sum_terms(part: Any) -> dict[str, jax.Array]:
            terms = examples.compute(params, carried, *part)
            return {name: sum_means(terms[name], axes) for name in names}

        # One after the other, by a program that is compiled once for both parts.
        apart = jax.lax.map(sum_terms, jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second))
        together = sum_terms(whole_batch)
        results = {}
        for name in names:
            if dim:  # no tokens stand before those of the first device, and the last ones do not lead to them
                sum_of_parts = apart[name][0] + apart[name][1]
                together[name] = jnp.where(axis_index(axes) > 0, together[name], sum_of_parts)
            sums = jnp.concatenate([apart[name], together[name][None]])
            results[name] = vary(sums, examples.manual)[None]
        return results

    run = examples.map_devices(on_device, batch, PartitionSpec(), PartitionSpec(examples.manual))

    @jax.jit
    def find_largest_gaps(
        params: Any, carried: Any, batch: Any, key: jax.Array | None, planted: Any
    ) -> dict[str, jax.Array]:
        batch = jax.tree.map(lambda x: _plant(x, dim, examples.devices * examples.parts, planted), batch)
        gaps = {}
        for name, sums in run(params, carried, batch, key).items():
            gaps[name] = _find_largest_gap(sums)
        return gaps

    def compare(params: Any, key: jax.Array | None, planted: Planted) -> dict[str, LossComparison]:
        gaps = find_largest_gaps(params, examples.carried, batch, key, int(planted))
        comparisons = {}
        for name, numbers in gaps.items():
            apart, together, gap = np.asarray(numbers).tolist()
            comparisons[name] = LossComparison(apart, together, gap)
        return comparisons

    return compare


def _take_two_parts(examples: Examples, local_examples: Any) -> tuple[Any, Any]:
    """A device's first two microbatches; without microbatches the examples of the device before it, and its own."""
    if examples.parts > 1:
        microbatches = split_microbatches(local_examples, examples.parts)
        return take_microbatch(microbatches, 0), take_microbatch(microbatches, 1)

    # The examples are sent before the loss: only a device that has the examples of two devices can compute the loss of
    # both. The step itself sends no examples.
    def take_from_neighbor(x: jax.Array) -> jax.Array:
        return _take_from_neighbor(x, examples.axes) if x.ndim > examples.dim else x

    return jax.tree.map(take_from_neighbor, local_examples), local_examples


def _find_largest_gap(sums: jax.Array) -> jax.Array:
    """A LossComparison, from `[device, 3, mean, 2]`: totals and weights of the two parts, and of both together."""
    # Worked example: two examples with the losses 2 and 4, of weight 1 each. The parts are [2, 1] and [4, 1], together
    # [6, 2]: the mean is 3 either way, and the gap 0. If the loss divides by the largest of its batch, the parts are
    # [1, 1] and [1, 1], together [1.5, 2]: the means are 1 and 0.75, and the gap 0.25 / (1 + 1 + 0.75).
    first, second, whole_batch = jnp.moveaxis(sums, 1, 0)
    apart = read_means(first + second)
    together = read_means(whole_batch)
    is_same = (apart == together) | (jnp.isnan(apart) & jnp.isnan(together))
    difference = jnp.sum(jnp.where(is_same, 0.0, jnp.abs(apart - together)), axis=-1)
    # If one of several means is NaN on both sides, it is left out: it says nothing about the rounding of the others.
    sizes = jnp.abs(read_means(first)) + jnp.abs(read_means(second)) + jnp.abs(read_means(whole_batch))
    size = jnp.maximum(jnp.sum(jnp.where(is_same, 0.0, sizes), axis=-1), _SMALLEST)
    gap = jnp.where(difference == 0, 0.0, jnp.nan_to_num(difference / size, nan=jnp.inf))
    worst = jnp.argmax(gap)
    return jnp.stack([apart[worst].sum(), together[worst].sum(), gap[worst]])


def _plant(x: Any, dim: int, parts: int, planted: Any) -> Any:
    """A leaf of the batch, cut into `parts` parts along a dim, and changed as `planted` says in every second part.

    With 8 examples in 4 parts, examples 2, 3, 6 and 7 are changed, which are on devices 1 and 3.
    """
    if jnp.ndim(x) <= dim:
        return x
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    length = x.shape[dim]
    part = length // parts
    dims_behind = (1,) * (x.ndim - 1 - dim)
    numbers = jnp.arange(length).reshape(length, *dims_behind)
    is_planted = numbers // part % 2 == 1
    if is_float or dim == 0:  # integers of tokens may be the numbers of documents, of which zeros would make one
        x = jnp.where(is_planted & (planted == Planted.ZEROS), jnp.zeros_like(x), x)
    if not is_float:
        return x
    x = jnp.where(is_planted & (planted == Planted.SMALL), x / 8, x)
    x = jnp.where(is_planted & (planted == Planted.LARGE), x * 8, x)
    return jnp.where(is_planted & (planted == Planted.NOT_A_NUMBER), jnp.full_like(x, jnp.nan), x)


def _take_from_neighbor(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The array of the device before this one. Keys are sent as their raw numbers."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return shift(x, axes)
    return jax.random.wrap_key_data(shift(jax.random.key_data(x), axes), impl=jax.random.key_impl(x))

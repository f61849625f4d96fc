"""Inputs for which both programs differ in floats, among many: they are proposed to the field, which decides.

Where results depend on comparisons the sides may differ for few inputs, and a run in the field takes milliseconds, so
that there are some dozens. In floats a compiled program takes thousands of inputs in the same time.
Floats cannot decide, because they round: near a threshold both sides may differ by rounding alone. So inputs of which
floats say that the sides differ become the real values of a draw, and the residues of that draw say whether they do.

Worked example: `where(abs(s) > 0.25, s, 0)` and `s`, where s is a minimum that is zero for 32 inputs of 33. Of 40 draws
none may have an s between 0 and 0.25. Of 4,096 inputs 20 have, and the first one is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit.testing._compare import is_float
from shardkit.testing.exact.arguments import describe_array
from shardkit.testing.exact.numbers.field import KINDS, MIXED, SIMILAR, WHOLE, Field
from shardkit.testing.exact.numbers.inputs import draw_real, draw_whole, list_compared_constants

# Real values of the inputs of a draw, by their names.
RealInputs = Mapping[str, np.ndarray]
# Gives inputs for which both sides differ in floats; takes a field, whose constants inputs are drawn around, and of how
# many inputs it chooses them. None if the programs do not run so.
Propose = Callable[[Field, int], Sequence[RealInputs] | None]

# So many inputs are proposed by each measure: those that differ most, and as many of the others that differ.
_MOST_BY_MEASURE = 4
_MOST_ELEMENTS = 2**20  # of the inputs that run together
_ANY_SIZE = "any size"
_ONE_APART = "one apart"
# Inputs of any size are drawn twice as often: nothing else reaches the far end of a table.
_KINDS = (*KINDS, MIXED, SIMILAR, WHOLE, _ANY_SIZE, _ANY_SIZE, _ONE_APART)
_GROUPS = 16  # of inputs of a kind
_FEW = 1024  # inputs of programs that run one after the other
_EPSILON = 2.0**-23  # also of 16 bits, in which both sides may be rounded alike and differ by less than a rounding
_SMALL_SHARE = 1e-3  # numbers below this share of others say little
_SMALLEST = 1e-30
_SIZES = (-1.0, 3.0)  # the decimal exponents of the sizes of inputs of any size
# Differences below so many roundings are taken for rounding.
_ROUNDINGS = 32.0
# The distance of another integer: before all floats.
_OTHER_INTEGER = 1e9
# The distance of what is no number on one side: behind all numbers that differ.
_NO_NUMBER = 2 * _ROUNDINGS


def propose_inputs(
    on_mesh: Callable[..., Any], alone: Callable[..., Any], args: Sequence[Any], field: Field, count: int
) -> list[RealInputs] | None:
    """Inputs for which the results of two functions differ in floats, those that differ most first.

    Args:
        on_mesh: the program on the mesh, as a function that runs on one device (`emulate`).
        alone: the reference.
        args: the arguments; floats may be ShapeDtypeStructs.
        field: the field of a draw, whose constants inputs of the kind "near" are drawn around.
        count: the number of inputs.

    Returns:
        The inputs, by the number of the argument; None if jax cannot run both functions so.

    Cost: both functions are compiled once for a batch of inputs.
    """
    leaves, structure = jax.tree.flatten(tuple(args))
    rng = np.random.default_rng(0)
    inputs = {}
    for index, leaf in enumerate(leaves):
        if is_float(leaf):
            inputs[index] = _draw_inputs(field, rng, np.shape(leaf), count)

    def measure(floats: Mapping[int, Any]) -> Any:
        values = list(leaves)
        for index, x in floats.items():
            values[index] = x.astype(describe_array(leaves[index]).dtype)
        inputs_of_sides = jax.tree.unflatten(structure, values)
        return _measure_distance(on_mesh(*inputs_of_sides), alone(*inputs_of_sides))

    distances = _run_all(measure, inputs)
    if distances is None:
        return None
    proposals: list[RealInputs] = []
    for number in _rank(distances):
        values_by_name = {str(index): np.asarray(x[number], np.float64) for index, x in inputs.items()}
        proposals.append(values_by_name)
    return proposals


def _run_all(measure: Callable[..., Any], inputs: Mapping[int, np.ndarray]) -> np.ndarray | None:
    """float32 [inputs, measures]: the distances of all inputs; None where jax does not run the programs."""
    # As many at once as fit: 16,384 inputs of a kernel on [128, 64] would be 0.5 GiB.
    elements = sum(math.prod(x.shape[1:]) for x in inputs.values())
    batch_size = max(1, _MOST_ELEMENTS // max(elements, 1))
    options = _choose_compiler_options()
    # Both programs have been traced already. What fails here is a primitive that jax cannot batch, or that has no
    # meaning on one device. The certificate says so.
    with suppress(Exception):
        run_together = jax.jit(partial(jax.lax.map, measure, batch_size=batch_size), compiler_options=options)
        return np.asarray(run_together(inputs))
    # One after the other is a hundred times slower, and needs no rule for batches.
    few_inputs = {index: x[:_FEW] for index, x in inputs.items()}
    with suppress(Exception):
        run_one_by_one = jax.jit(partial(jax.lax.map, measure), compiler_options=options)
        return np.asarray(run_one_by_one(few_inputs))
    return None


def _choose_compiler_options() -> dict[str, Any]:
    """Those of a program that runs once, for milliseconds: compiling it takes most of the time."""
    if jax.default_backend() != "cpu":
        return {}
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _rank(distances: np.ndarray) -> list[int]:
    """The inputs by which the results differ most, by each measure: first the largest ones of all measures.

    Each result has measures of its own. The rounding of one, as of sin(1000 x), would otherwise hide another.

    Worked example: by a first measure the inputs 7 and 3 differ, by a second one 3 and 5. The order is 7, 3, 5.
    """
    ranks_by_measure = []
    for measure in range(distances.shape[1]):
        order = np.argsort(-distances[:, measure], kind="stable")
        differing = int((distances[:, measure] > _ROUNDINGS).sum())
        ranks_by_measure.append(order[_choose_ranks(differing)].tolist())
    # A dict is a set that keeps its order.
    ranked: dict[int, None] = {}
    for inputs in itertools.zip_longest(*ranks_by_measure):
        for number in inputs:
            if number is not None:
                ranked[number] = None
    return list(ranked)


def _choose_ranks(differing: int) -> list[int]:
    """Which of the inputs that differ are proposed, of those in order: the first ones, and some of all the others.

    Those that differ most may be of one kind that tells nothing: a compiler may drop NaN from a minimum, so that floats
    give 0 and 1 for an input for which both sides are NaN. So others are proposed too, evenly over all that differ.

    Worked example: of 300 that differ the places 0, 1, 2 and 3 are proposed, and the places 78, 152, 225 and 299.
    """
    if differing <= _MOST_BY_MEASURE:
        return list(range(differing))
    ends = np.linspace(_MOST_BY_MEASURE, differing - 1, _MOST_BY_MEASURE + 1)
    others = np.rint(ends[1:]).astype(int)
    return [*range(_MOST_BY_MEASURE), *others.tolist()]


def _draw_inputs(field: Field, rng: np.random.Generator, shape: Sequence[int], count: int) -> np.ndarray:
    """float32 [count, ...]: inputs, of each kind as many."""
    size = math.ceil(count / len(_KINDS) / _GROUPS)
    groups = []
    for kind in _KINDS:
        # In groups, because what is similar is so within a group.
        for _ in range(_GROUPS):
            groups.append(_draw_group(field, rng, kind, (size, *shape)))
    inputs = np.concatenate(groups)
    # Each argument has its kinds in an order of its own, so that any two kinds meet.
    order = rng.permutation(len(inputs))[:count]
    return inputs[order].astype(np.float32)


def _draw_group(field: Field, rng: np.random.Generator, kind: str, shape: Sequence[int]) -> np.ndarray:
    """Inputs of a kind. Of inputs of any size, one may have elements of one size, or of a size each."""
    if kind == WHOLE:
        return draw_whole(rng, shape)
    if kind == _ONE_APART:
        return _draw_one_apart(field, rng, shape)
    if kind != _ANY_SIZE:
        return draw_real(field, rng, kind, shape)
    # One choice for each input, which broadcasts against its elements.
    shape_of_choices = (shape[0], *[1] * (len(shape) - 1))
    has_one_size = rng.uniform(size=shape_of_choices) < 0.5
    sizes_of_inputs = rng.uniform(*_SIZES, shape_of_choices)
    sizes_of_elements = rng.uniform(*_SIZES, shape)
    sizes = 10 ** np.where(has_one_size, sizes_of_inputs, sizes_of_elements)
    is_positive = rng.uniform(size=shape_of_choices) < 0.5
    values = rng.uniform(-1, 1, shape)
    return sizes * np.where(is_positive, np.abs(values), values)


def _draw_one_apart(field: Field, rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Inputs of which one element is on the other side of a compared constant than all others.

    Worked example: `all(x > 0)` of 24 elements and of the first 23 differ only where the last one alone is negative.
    Of inputs that are drawn element by element one in 16 million is such a one; of these, one in 48.
    """
    count = shape[0]
    sizes = math.prod(shape[1:])
    distances = np.exp(rng.normal(size=(count, sizes)))
    sides = rng.choice([-1.0, 1.0], size=(count, 1))
    signs = np.repeat(sides, sizes, 1)
    if sizes:
        odd = rng.integers(sizes, size=count)
        signs[np.arange(count), odd] *= -1
    centres = rng.choice(list_compared_constants(field), size=(count, 1))
    return np.asarray((centres + signs * distances).reshape(shape))


def _measure_distance(results: Any, expected_results: Any) -> jax.Array:
    """float32 [measures]: by how many roundings each result of one input differs at most, in two measures."""
    measures = [jnp.zeros(())]  # of a program without results
    for result, expected in zip(jax.tree.leaves(results), jax.tree.leaves(expected_results), strict=True):
        if not result.size or jnp.issubdtype(result.dtype, jax.dtypes.prng_key):
            continue
        if is_float(result):
            measures += _measure_roundings(result.astype(jnp.float32), expected.astype(jnp.float32))
        else:
            measures.append(jnp.where((result != expected).any(), _OTHER_INTEGER, 0))
    return jnp.stack([measure.astype(jnp.float32) for measure in measures])


def _measure_roundings(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """By how many roundings two arrays of floats differ at most, in two measures.

    Of numbers of a size below one thousandth rounding says little; but all numbers of a program may be so small. So the
    first measure takes an element for as large as a thousandth at least, and the second one for as large as a
    thousandth of the largest element.
    """
    are_numbers = jnp.isfinite(x) & jnp.isfinite(y)
    is_nan_on_one_side = jnp.isnan(x) != jnp.isnan(y)
    is_other_infinity = ~are_numbers & (x != y) & ~jnp.isnan(x) & ~jnp.isnan(y)
    size = jnp.where(are_numbers, jnp.maximum(jnp.abs(x), jnp.abs(y)), 0)
    roundings = jnp.where(are_numbers, jnp.abs(x - y), 0) / _EPSILON
    is_other_kind = is_nan_on_one_side | is_other_infinity
    distance = jnp.where(is_other_kind, _NO_NUMBER, roundings / jnp.maximum(size, _SMALL_SHARE))
    smallest_size = jnp.maximum(_SMALL_SHARE * size.max(), _SMALLEST)
    by_size = roundings / jnp.maximum(size, smallest_size)
    return [distance.max(), by_size.max()]

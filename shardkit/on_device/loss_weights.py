"""The weights of a loss are data: the arrays from which they are computed are not rounded, and count once.

The traced loss says from which arrays of the batch a weight is computed. A comparison ends the dependence on an array's
precision: a mask is exact even if it is computed from rounded numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.interpreter import FactInterpreter
from shardkit._jax.primitives import registered
from shardkit.meshes.layout import path_name
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.means import means_by_path

MeansFn = Callable[[Any], Mapping[str, Any]]


class _Tag(NamedTuple):
    """A leaf of the batch on which a value depends.

    A value that is computed from a leaf has two tags, with `value` True and False. A comparison drops the True ones:
    its result depends on the leaf, but not on the digits of the leaf's numbers.
    """

    leaf: int
    value: bool


Tags = frozenset[_Tag]
_NOTHING: Tags = frozenset()
_STATE = -1  # in place of a leaf: parameters and carried state
_KEYS = -2  # the keys of this device's examples


class _Leaves(NamedTuple):
    """The leaves of a batch by their numbers."""

    scalars: set[int]
    whole: set[int]  # leaves without a dim that devices split
    rounded: set[int]  # leaves that the compute dtype would round


class _TracedMean(NamedTuple):
    """What a traced mean depends on."""

    name: str
    unshared_axes: frozenset[str]  # the axes over which its total varies and its weight does not
    total: Tags
    weight: Tags


def cast_batch(means_of: MeansFn, batch: Any, compute: Any, *, once: bool, split: int = 0, reads: bool = False) -> Any:
    """The batch as a loss sees it: floating-point arrays in the compute dtype, except for those that make a weight.

    `means_of` returns the loss and the auxiliary means of a batch by name; `once` says whether all examples are on one
    device, in one microbatch; `split` is the first dim that devices split, and `reads` whether the loss takes
    carried state.

    Raises:
        ValueError: each device and each microbatch would count the same weight again. The weight of a total over
            examples is computed from scalar leaves only, or from carried state only; or that of a total over parts of
            examples from leaves that are whole on each device.

    Cost: nothing is sent. A batch with arrays that would be rounded, or with scalars, and carried state cost a second
        trace of the loss.
    """
    # Worked example: a batch {"x": float32[8, 4], "mask": float32[8]} in bfloat16, with the weight sum(mask). In the
    # trace the weight depends on the value of "mask", which stays float32: bfloat16 counts exactly only up to 256. A
    # weight sum(mask > 0) depends on it through a comparison alone, and "mask" may be rounded.
    paths_and_arrays, structure = jax.tree_util.tree_flatten_with_path(batch)
    arrays = [x for _, x in paths_and_arrays]
    leaves = _sort_leaves(arrays, compute, split)

    def cast_all_but(exact: Collection[int]) -> Any:
        cast = []
        for number, x in enumerate(arrays):
            cast.append(x if number in exact else cast_floating(x, compute))
        return jax.tree.unflatten(structure, cast)

    # A trace takes as long as that of the loss itself, and is made only if a weight could be rounded or counted twice.
    counted_twice = not once and (bool(leaves.whole) or reads)
    if not leaves.rounded and not counted_twice:
        return cast_all_but(())
    try:
        means = _trace_means(means_of, cast_all_but(()))
    except TypeError as error:
        # Probably the loss sums a weight in the compute dtype, which a Mean refuses. In the dtypes of the batch the
        # loss can be traced, and the trace shows which arrays make the weight.
        try:
            means = _trace_means(means_of, cast_all_but(leaves.rounded))
        except Exception:
            raise error from None
    names = [path_name(path) for path, _ in paths_and_arrays]
    exact: set[int] = set()
    for mean in means:
        _check_weight(mean, leaves, names, once, split)
        for tag in mean.weight:
            if tag.value and tag.leaf in leaves.rounded:
                exact.add(tag.leaf)
    return cast_all_but(exact)


def _sort_leaves(arrays: Sequence[Any], compute: Any, split: int) -> _Leaves:
    """Which leaves of a batch are scalars, which every device has whole, and which the compute dtype rounds."""
    leaves = _Leaves(set(), set(), set())
    for number, x in enumerate(arrays):
        if not x.ndim:
            leaves.scalars.add(number)
        if x.ndim <= split:
            leaves.whole.add(number)
        if _rounds(x.dtype, compute):
            leaves.rounded.add(number)
    return leaves


def _trace_means(means_of: MeansFn, batch: Any) -> list[_TracedMean]:
    """On which leaves of the batch the total and the weight of each mean depend."""
    leaves, structure = jax.tree.flatten(batch)
    names_and_axes: list[tuple[str, frozenset[str]]] = []

    def list_totals_and_weights(*leaves: Any) -> list[Any]:
        means = means_of(jax.tree.unflatten(structure, leaves))
        results = []
        names_and_axes.clear()
        for name, mean in means_by_path(means):
            unshared_axes = compat.varying_axes(mean.total) - compat.varying_axes(mean.weight)
            names_and_axes.append((name, unshared_axes))
            results += [mean.total, mean.weight]
        return results

    closed = jax.make_jaxpr(list_totals_and_weights)(*leaves)
    tags = _TagReader().run(closed, [_make_tags(number) for number in range(len(leaves))])
    totals = tags[::2]
    weights = tags[1::2]
    means = []
    for (name, unshared_axes), total, weight in zip(names_and_axes, totals, weights, strict=True):
        means.append(_TracedMean(name, unshared_axes, total, weight))
    return means


def _check_weight(mean: _TracedMean, leaves: _Leaves, names: Sequence[str], once: bool, split: int) -> None:
    """Refuses a weight that each device, or each microbatch, counts in full, while its total is a share of a sum."""
    made_of = {tag.leaf for tag in mean.weight}
    counted = {tag.leaf for tag in mean.total} - {_STATE}
    axes = quote(sorted(mean.unshared_axes))
    if mean.unshared_axes and counted and made_of == {_STATE}:
        raise ValueError(
            f"Mean {mean.name!r}: the weight of examples must be a sum over them, because it counts once on each "
            f"device along {axes}, and in each microbatch; got one that depends only on parameters or carried state. "
            "Pass the weights of this device's examples, or vary(weight, axes) of this device's share."
        )
    made_of -= {_STATE}
    if not made_of:
        return
    if not once and made_of <= leaves.scalars and not counted <= leaves.scalars:
        raise ValueError(
            f"Mean {mean.name!r}: the weight of examples must be a sum over them, because the weights of all devices "
            f"and microbatches are added; got one that depends only on leaf {names[min(made_of)]}, a "
            "scalar. Pass a weight for each example: an array with the examples along dim 0."
        )
    if split and mean.unshared_axes and made_of <= leaves.whole and not counted <= leaves.whole:
        raise ValueError(
            f"Mean {mean.name!r}: the weight must count this device's parts of examples, because it is added once on "
            f"each device along {axes}; got one that depends only on leaf {names[min(made_of)]}, which every device "
            "has whole. Pass a weight for each part, as an array with its dims, or vary(weight, axes) if the total "
            "is of whole examples too."
        )


def _rounds(dtype: Any, compute: Any) -> bool:
    """Whether numbers of a dtype lose digits, or overflow, in the compute dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    before = jnp.finfo(dtype)
    after = jnp.finfo(compute)
    return bool(before.nmant > after.nmant or before.maxexp > after.maxexp)


class _TagReader(FactInterpreter[Tags]):
    """Follows the tags of values through a traced loss."""

    def constant(self, x: Any) -> Tags:
        # What is traced outside of the loss is keys or state; a number depends on nothing.
        if not isinstance(x, jax.core.Tracer):
            return _NOTHING
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return _make_tags(_KEYS)
        return _make_tags(_STATE)

    def literal(self, atom: Any) -> Tags:
        return _NOTHING

    def join(self, facts: Sequence[Tags], variable: Any) -> Tags:
        return _NOTHING.union(*facts)

    def step(self, equation: Any, operands: list[Tags]) -> Sequence[Tags]:
        if not any(operands):
            return [_NOTHING] * len(equation.outvars)
        results = list(super().step(equation, operands))
        for number, variable in enumerate(equation.outvars):
            is_comparison = getattr(variable.aval, "dtype", None) == np.bool_
            if is_comparison:
                results[number] = frozenset(tag for tag in results[number] if not tag.value)
        return results

    def equation(self, equation: Any, operands: list[Tags]) -> Sequence[Tags]:
        count = len(equation.outvars)
        row = registered(equation.primitive.name)
        result_for_each_operand = row.same or row.kind
        if result_for_each_operand and len(operands) == count:
            return operands
        return [_NOTHING.union(*operands)] * count


def _make_tags(leaf: int) -> Tags:
    return frozenset({_Tag(leaf, True), _Tag(leaf, False)})

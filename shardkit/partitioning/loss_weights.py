"""The weights of a loss are data: what they are made of is not rounded, and counts once.

Which arrays of the batch the weights are made of is read from the traced loss. A value goes on through whatever
computes numbers from numbers; a comparison ends it: of a mask made of rounded numbers nothing is left to be rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit import _compat
from shardkit._jaxprs import called, flow, scan_operands, settled
from shardkit.layout import path_name
from shardkit.partitioning.gradient import Mean
from shardkit.partitioning.handles import cast

MeansFn = Callable[[Any], Mapping[str, Mean]]


class _Tag(NamedTuple):
    """Where something comes from: the leaf of the batch, and whether as its value or by way of a comparison, too."""

    leaf: int
    value: bool


Tags = frozenset[_Tag]
_ONE_TO_ONE = {"optimization_barrier", *_compat.COLLECTIVES}  # each result is that of the operand at its place


def in_compute(means_of: MeansFn, batch: Any, compute: Any, *, once: bool) -> Any:
    """The batch as a loss sees it: floating-point arrays in the compute dtype, but for those that weights are made of.

    Args:
        means_of: the loss and the auxiliary means of a batch, by name.
        batch: this device's examples.
        compute: the dtype.
        once: all examples are on one device, in one microbatch.

    Returns:
        The batch with other dtypes.

    Raises:
        ValueError: a total of examples, with a weight that is made of scalar leaves alone: each device and each
            microbatch would count it again.

    Cost: none that is sent; where the question arises, the loss is traced once more.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(batch)
    leaves = [leaf for _, leaf in paths]
    scalars = {i for i, leaf in enumerate(leaves) if not leaf.ndim}
    rounded = {i for i, leaf in enumerate(leaves) if _rounds(leaf.dtype, compute)}
    lower = lambda exact: [x if i in exact else cast(x, compute) for i, x in enumerate(leaves)]  # noqa: E731
    if not rounded and (once or not scalars):
        return jax.tree.unflatten(structure, lower(()))
    names: list[str] = []

    def pairs(*leaves: Any) -> list[Any]:
        means = means_of(jax.tree.unflatten(structure, leaves))
        names[:] = means
        return [x for mean in means.values() for x in mean]

    try:
        jaxpr = jax.make_jaxpr(pairs)(*lower(())).jaxpr
    except TypeError as error:  # a weight that is summed in the compute dtype is refused; which one, float32 tells
        try:
            jaxpr = jax.make_jaxpr(pairs)(*lower(rounded)).jaxpr
        except Exception:
            raise error from None
    tags = _flow(jaxpr, [frozenset({_Tag(i, True), _Tag(i, False)}) for i in range(len(leaves))])
    exact: set[int] = set()
    for name, total, weight in zip(names, tags[::2], tags[1::2], strict=True):
        exact |= {tag.leaf for tag in weight if tag.value} & rounded
        made_of, counted = {tag.leaf for tag in weight}, {tag.leaf for tag in total}
        if not once and made_of and made_of <= scalars and not counted <= scalars:
            raise ValueError(
                f"Mean {name!r}: the weight of examples must be summed over them, because each device and microbatch "
                f"adds its own; this one is made of the scalar leaf {path_name(paths[min(made_of)][0])} alone, which "
                "all of them would add. Pass a weight for each example: an array with the examples along dim 0."
            )
    return jax.tree.unflatten(structure, lower(exact))


def _rounds(dtype: Any, compute: Any) -> bool:
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    given, here = jnp.finfo(dtype), jnp.finfo(compute)
    return bool(given.nmant > here.nmant or given.maxexp > here.maxexp)


def _flow(jaxpr: Any, given: Sequence[Tags]) -> list[Tags]:
    """For each result of a jaxpr what it is made of, from the same of its arguments."""

    def step(equation: Any, ins: list[Tags]) -> list[Tags]:
        outs = zip(equation.outvars, _step(equation, ins), strict=True)
        return [_compared(tags) if getattr(v.aval, "dtype", None) == np.bool_ else tags for v, tags in outs]

    return flow(jaxpr, [*[frozenset[_Tag]()] * len(jaxpr.constvars), *given], step, lambda _: frozenset())


def _step(equation: Any, ins: list[Tags]) -> list[Tags]:
    name, count = equation.primitive.name, len(equation.outvars)
    inner = [sub for _, sub in _compat.inner_jaxprs(equation)]
    if not frozenset[_Tag]().union(*ins):
        return [frozenset()] * count
    if (sub := called(equation)) is not None:
        return _flow(sub, ins)
    if name == "cond":
        branches = [_flow(sub, ins[1:]) for sub in inner]
        return [ins[0].union(*each) for each in zip(*branches, strict=True)]
    if name == "scan":
        return _scan(equation, inner[0], ins)
    if name in _ONE_TO_ONE and len(ins) == count:
        return ins
    return [frozenset[_Tag]().union(*ins)] * count


def _scan(equation: Any, body: Any, ins: list[Tags]) -> list[Tags]:
    """A loop of known length: what is known of its carry holds in every turn."""
    fixed, carried, each = scan_operands(equation, ins)

    def turn(held: list[Tags]) -> list[Tags]:
        return [old | new for old, new in zip(held, _flow(body, [*fixed, *held, *each]), strict=False)]

    carried = settled(carried, turn)
    return [*carried, *_flow(body, [*fixed, *carried, *each])[len(carried) :]]


def _compared(tags: Tags) -> Tags:
    return frozenset(tag for tag in tags if not tag.value)

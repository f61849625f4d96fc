"""The rules of values that do not depend on the examples: which elements differ, and how they grow with the number.

Worked examples, for n examples:

- `arange(n)` is whole: it is the same whatever the examples are. Its elements differ along dim 0, and each is its own
  index. Added to a row for each example, it would tell the examples apart by their place in the batch.
- `sum(ones(n))` is whole too, and has scale 2: it is twice as large for twice as many examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardkit._jax.primitives import ELEMENTWISE, LINEAR
from shardkit.on_device.elementwise_rules import scale_of
from shardkit.on_device.example_states import UNKNOWN, Pair, State, Whole, any_whole, select, shift_dims

WholeRule = Callable[[Pair, list[Whole]], list[Whole]]


def whole_results(pair: Pair, operands: list[State]) -> list[State]:
    """The states of an equation's results, if all its operands are whole."""
    wholes = select(operands, Whole)
    if pair.name not in _KEEPS_ELEMENTS and _depends_on_size(pair, wholes):
        return [any_whole(variable, UNKNOWN) for variable in pair.many.outvars]
    rule = _RULES.get(pair.name, _unknown)
    if pair.name.startswith(("reduce_max", "reduce_min", "reduce_and", "reduce_or")):
        rule = _reduce
    return list(rule(pair, wholes))


def _depends_on_size(pair: Pair, wholes: Sequence[Whole]) -> bool:
    """Whether more examples may change a result, such as the maximum of `arange(n)`, or its last element."""
    # Of equal elements, as in `ones(n)`, a longer array has the same maximum and the same last element.
    shapes = [variable.aval.shape for variable in pair.few.invars]
    shapes_for_many = [pair.shape(number) for number in range(len(shapes))]
    return shapes != shapes_for_many and any(state.differs for state in wholes)


def _unknown(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    """A primitive without a rule: its results are whole, and all their elements may differ."""
    scale = 1.0 if all(state.scale == 1 for state in wholes) else UNKNOWN
    return [any_whole(variable, scale) for variable in pair.many.outvars]


def _iota(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    dim = pair.many.params["dimension"]
    differs = frozenset({dim}) if pair.out[dim] > 1 else frozenset[int]()
    return [Whole(differs, index=dim)]


def _broadcast(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    (whole,) = wholes[:1]
    places = pair.many.params["broadcast_dimensions"]
    index = None if whole.index is None else places[whole.index]
    return [replace(whole, differs=frozenset(places[dim] for dim in whole.differs), index=index)]


def _keep(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    return list(wholes)


def _compare_with_zero(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    # jax reads `x[i]` at `where(i < 0, i + n, i)`. Of `i = arange(n)` the condition is known to be False, so that the
    # indices stay an arange, and `gather` sees that each example reads its own row.
    first, second = wholes
    if first.index is not None and second.zero:
        return [Whole(zero=pair.name == "lt")]  # an index is not negative
    return _combine(pair, wholes)


def _select(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    # `select_n(False, a, b)` is a.
    if wholes[0].zero:
        return [wholes[1]]
    return _combine(pair, wholes)


def _combine(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    """An elementwise operation."""
    differs = frozenset[int]().union(*(state.differs for state in wholes))
    zero = False
    if pair.name in LINEAR:
        zero = wholes[0].zero
    elif pair.name == "mul":
        zero = any(state.zero for state in wholes)
    return [Whole(differs, scale_of(pair, wholes), zero)] * len(pair.many.outvars)


def _reshape(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    (whole,) = wholes[:1]
    if not whole.differs:
        return [Whole(scale=whole.scale, zero=whole.zero)]
    before = _dims_above_one(pair.shape(0))
    after = _dims_above_one(pair.out)
    if [pair.shape(0)[dim] for dim in before] != [pair.out[dim] for dim in after]:
        return [any_whole(pair.many.outvars[0], whole.scale)]
    places = dict(zip(before, after, strict=True))  # only dims of size 1 came or went
    index = None if whole.index is None else places.get(whole.index)
    return [replace(whole, differs=frozenset(places[dim] for dim in whole.differs), index=index)]


def _dims_above_one(shape: Sequence[int]) -> list[int]:
    return [dim for dim, size in enumerate(shape) if size != 1]


def _transpose(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    (whole,) = wholes[:1]
    order = list(pair.many.params["permutation"])
    index = None if whole.index is None else order.index(whole.index)
    return [replace(whole, differs=frozenset(order.index(dim) for dim in whole.differs), index=index)]


def _squeeze(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    (whole,) = wholes[:1]
    return [replace(whole, differs=shift_dims(whole.differs, pair.many.params["dimensions"]), index=None)]


def _reduce(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    (whole,) = wholes[:1]
    return [Whole(shift_dims(whole.differs, pair.many.params["axes"]), whole.scale)]


def _sum(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    (whole,) = wholes[:1]
    axes = pair.many.params["axes"]
    scale = whole.scale
    few = pair.few.invars[0].aval.shape
    for dim in axes:
        if few[dim] != pair.shape(0)[dim]:  # a sum over a dim that counts the examples
            scale = UNKNOWN if dim in whole.differs else scale * pair.shape(0)[dim] / few[dim]
    return [Whole(shift_dims(whole.differs, axes), scale, whole.zero)]


def _product(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    lhs, rhs = wholes
    contract, batch = pair.many.params["dimension_numbers"]
    shapes = (pair.shape(0), pair.shape(1))
    differs = set()
    for side, state in enumerate(wholes):
        for dim in state.differs:
            if dim in batch[side]:
                differs.add(list(batch[side]).index(dim))
            elif dim not in contract[side]:
                differs.add(free_dim_of_product(side, dim, contract, batch, shapes))
    scale = lhs.scale * rhs.scale
    few_shape = pair.few.invars[0].aval.shape
    for dim in contract[0]:
        if few_shape[dim] != pair.shape(0)[dim]:  # the sum is over more terms, for more examples
            scale = UNKNOWN
    return [Whole(frozenset(differs), scale, lhs.zero or rhs.zero)]


def free_dim_of_product(side: int, dim: int, contract: Any, batch: Any, shapes: Any) -> int:
    """The dim of dot_general's result that a dim of an operand becomes, which is neither contracted nor shared."""
    # The result has the shared dims first, then the free ones of the left operand, then those of the right one.
    place = len(batch[0])
    for number in range(side + 1):
        used = {*contract[number], *batch[number]}
        free = [free_dim for free_dim in range(len(shapes[number])) if free_dim not in used]
        if number == side:
            return place + free.index(dim)
        place += len(free)
    raise AssertionError(side)


def _change_some_dims(pair: Pair, wholes: list[Whole]) -> list[Whole]:
    """Slices, paddings, concatenations, running sums: along the dims that they do not change, elements stay apart.

    Worked examples:

    - `concatenate([zeros, ones], 1)` of two arrays [n, 3] that differ along no dim: the result differs along dim 1.
    - `cumsum(ones, 0)` of an array [n, 3] has the rows 1, 2, ..., n: it differs along dim 0.
    - `x[:, :2]` of an array that differs along dim 0 alone: the result may differ along dims 0 and 1. Its columns are
      equal in truth, but a dim that changed is not looked at further.
    """
    results = pair.many.outvars
    scale = UNKNOWN
    if len({state.scale for state in wholes}) == 1:
        scale = wholes[0].scale
    if all(state.zero for state in wholes) and pair.name != "cumlogsumexp":  # log(1 + 1) of two zeros is not zero
        return [Whole(scale=scale, zero=True)] * len(results)
    differs = _find_changed_dims(pair)
    for state in wholes:
        differs |= state.differs
    return [Whole(differs, scale)] * len(results)


def _find_changed_dims(pair: Pair) -> frozenset[int]:
    """The dims whose size changes, and the dim along which arrays are joined or elements are combined."""
    changed = set()
    for dim, (size, new_size) in enumerate(zip(pair.shape(0), pair.out, strict=True)):
        if size != new_size:
            changed.add(dim)
    params = pair.many.params
    for name in ("dimension", "axis"):  # of concatenate; of cumsum and its like
        if name in params:
            changed.add(params[name])
    return frozenset(changed)


_CHANGES_SOME_DIMS = ("slice", "rev", "pad", "concatenate", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_RULES: dict[str, WholeRule] = {
    **dict.fromkeys(ELEMENTWISE, _combine),
    **dict.fromkeys(_CHANGES_SOME_DIMS, _change_some_dims),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _keep,
    "lt": _compare_with_zero,
    "ge": _compare_with_zero,
    "select_n": _select,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reduce_sum": _sum,
    "dot_general": _product,
}
# Primitives that leave the first elements as they are when an array gets more, or whose rule considers its length.
_KEEPS_ELEMENTS = {
    *ELEMENTWISE,
    *("iota", "broadcast_in_dim", "reshape", "transpose", "squeeze", "reduce_sum", "dot_general"),
}

"""The rules of values that do not depend on the examples: which elements differ, and how they grow with the number.

Worked examples, for n examples:

- `arange(n)` is whole: it is the same whatever the examples are. Its elements differ along dim 0, and each is its own
  index. Added to a row for each example, it would tell the examples apart by their place in the batch.
- `sum(ones(n))` is whole too, and has scale 2: it is twice as large for twice as many examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardkit._jax.primitives import ELEMENTWISE, LINEAR
from shardkit.on_device.elementwise_rules import find_scale
from shardkit.on_device.example_states import UNKNOWN, Pair, State, Whole, any_whole, select, shift_dims

# From the operands of an equation to its result; all of its results, where it has several, get the same state.
WholeRule = Callable[[Pair, list[Whole]], Whole]


def whole_results(pair: Pair, operands: list[State]) -> list[State]:
    """The states of an equation's results, if all its operands are whole."""
    wholes = select(operands, Whole)
    results = pair.many.outvars
    if pair.name not in _KEEPS_ELEMENTS and _depends_on_size(pair, wholes):
        return [any_whole(variable, UNKNOWN) for variable in results]
    rule = _RULES.get(pair.name)
    if rule is None:
        # Nothing is known of a primitive without a rule, but that its results are whole: all elements may differ.
        scale = 1.0 if all(state.scale == 1 for state in wholes) else UNKNOWN
        return [any_whole(variable, scale) for variable in results]
    result = rule(pair, wholes)
    return [result] * len(results)


def _depends_on_size(pair: Pair, wholes: Sequence[Whole]) -> bool:
    """Whether more examples may change a result, such as the maximum of `arange(n)`, or its last element."""
    # Of equal elements, as in `ones(n)`, a longer array has the same maximum and the same last element.
    if not any(state.differs for state in wholes):
        return False
    for number, variable in enumerate(pair.few.invars):
        if variable.aval.shape != pair.shape(number):
            return True
    return False


def _move_dims(whole: Whole, new_dims: Mapping[int, int]) -> Whole:
    """The same elements with their dims in other places: `new_dims` has the place of each dim along which they differ.

    Worked example: `arange(n)` as a row of [1, n] differs along dim 0, which is dim 1 of the row, as is its index.
    """
    differs = frozenset(new_dims[dim] for dim in whole.differs)
    index = None if whole.index is None else new_dims.get(whole.index)
    return replace(whole, differs=differs, index=index)


def _iota(pair: Pair, wholes: list[Whole]) -> Whole:
    dim = pair.many.params["dimension"]
    differs = frozenset({dim}) if pair.out[dim] > 1 else frozenset[int]()
    return Whole(differs, index=dim)


def _broadcast(pair: Pair, wholes: list[Whole]) -> Whole:
    new_dims = pair.many.params["broadcast_dimensions"]
    return _move_dims(wholes[0], dict(enumerate(new_dims)))


def _keep(pair: Pair, wholes: list[Whole]) -> Whole:
    return wholes[0]


def _reinterpret(pair: Pair, wholes: list[Whole]) -> Whole:
    """The bits of numbers as other numbers: those of another width have a dim more, or a dim less."""
    combined = _combine(pair, wholes)
    if len(pair.shape(0)) == len(pair.out):
        return combined
    return any_whole(pair.many.outvars[0], combined.scale)


def _compare_with_zero(pair: Pair, wholes: list[Whole]) -> Whole:
    # jax reads `x[i]` at `where(i < 0, i + n, i)`. Of `i = arange(n)` the condition is known to be False, so that the
    # indices stay an arange, and `gather` sees that each example reads its own row.
    first, second = wholes
    if first.index is not None and second.zero:
        return Whole(zero=pair.name == "lt")  # an index is not negative
    return _combine(pair, wholes)


def _select(pair: Pair, wholes: list[Whole]) -> Whole:
    # `select_n(False, a, b)` is a.
    if wholes[0].zero:
        return wholes[1]
    return _combine(pair, wholes)


def _combine(pair: Pair, wholes: list[Whole]) -> Whole:
    """An elementwise operation."""
    differs = _join_differing_dims(wholes)
    zero = False
    if pair.name in LINEAR:
        zero = wholes[0].zero
    elif pair.name == "mul":
        zero = any(state.zero for state in wholes)
    return Whole(differs, find_scale(pair, wholes), zero)


def _join_differing_dims(wholes: Sequence[Whole]) -> frozenset[int]:
    """The dims along which the elements of any of these values differ."""
    dims = frozenset[int]()
    for whole in wholes:
        dims |= whole.differs
    return dims


def _reshape(pair: Pair, wholes: list[Whole]) -> Whole:
    whole = wholes[0]
    if not whole.differs:
        return Whole(scale=whole.scale, zero=whole.zero)
    before = _find_dims_above_one(pair.shape(0))
    after = _find_dims_above_one(pair.out)
    if list(before.values()) != list(after.values()):
        return any_whole(pair.many.outvars[0], whole.scale)
    # Only dims of size 1 came or went: the others are in their order.
    return _move_dims(whole, dict(zip(before, after, strict=True)))


def _find_dims_above_one(shape: Sequence[int]) -> dict[int, int]:
    """The dims of another size than 1, with their sizes, in order."""
    return {dim: size for dim, size in enumerate(shape) if size != 1}


def _transpose(pair: Pair, wholes: list[Whole]) -> Whole:
    old_dims = pair.many.params["permutation"]
    return _move_dims(wholes[0], {old: new for new, old in enumerate(old_dims)})


def _squeeze(pair: Pair, wholes: list[Whole]) -> Whole:
    differs = shift_dims(wholes[0].differs, pair.many.params["dimensions"])
    return replace(wholes[0], differs=differs, index=None)


def _reduce(pair: Pair, wholes: list[Whole]) -> Whole:
    differs = shift_dims(wholes[0].differs, pair.many.params["axes"])
    return Whole(differs, wholes[0].scale)


def _sum(pair: Pair, wholes: list[Whole]) -> Whole:
    whole = wholes[0]
    dims = pair.many.params["axes"]
    scale = whole.scale
    shape_for_few = pair.few.invars[0].aval.shape
    shape_for_many = pair.shape(0)
    for dim in dims:
        size = shape_for_many[dim]
        if size == shape_for_few[dim]:
            continue
        # A sum over a dim that counts the examples. Of equal elements it grows with their number, as `sum(ones(n))`.
        if dim in whole.differs:
            scale = UNKNOWN
        else:
            scale = scale * size / shape_for_few[dim]
    return Whole(shift_dims(whole.differs, dims), scale, whole.zero)


def _multiply(pair: Pair, wholes: list[Whole]) -> Whole:
    lhs, rhs = wholes
    contract, batch = pair.many.params["dimension_numbers"]
    shapes = (pair.shape(0), pair.shape(1))
    differs = set()
    for side, state in enumerate(wholes):
        for dim in state.differs:
            if dim in batch[side]:
                differs.add(list(batch[side]).index(dim))
            elif dim not in contract[side]:
                differs.add(find_free_dim(side, dim, contract, batch, shapes))
    scale = lhs.scale * rhs.scale
    few_shape = pair.few.invars[0].aval.shape
    for dim in contract[0]:
        if few_shape[dim] != pair.shape(0)[dim]:  # the sum is over more terms, for more examples
            scale = UNKNOWN
    return Whole(frozenset(differs), scale, lhs.zero or rhs.zero)


def find_free_dim(side: int, dim: int, contract: Any, batch: Any, shapes: Any) -> int:
    """The dim of dot_general's result that a dim of an operand becomes, which is neither contracted nor shared."""
    # The result has the shared dims first, then the free ones of the left operand, then those of the right one.
    dims_before = len(batch[0])
    if side == 1:
        dims_before += len(_list_free_dims(0, contract, batch, shapes))
    return dims_before + _list_free_dims(side, contract, batch, shapes).index(dim)


def _list_free_dims(side: int, contract: Any, batch: Any, shapes: Any) -> list[int]:
    used = {*contract[side], *batch[side]}
    return [dim for dim in range(len(shapes[side])) if dim not in used]


def _change_some_dims(pair: Pair, wholes: list[Whole]) -> Whole:
    """Slices, paddings, concatenations, running sums: along the dims that they do not change, elements stay apart.

    Worked examples:

    - `concatenate([zeros, ones], 1)` of two arrays [n, 3] that differ along no dim: the result differs along dim 1.
    - `cumsum(ones, 0)` of an array [n, 3] has the rows 1, 2, ..., n: it differs along dim 0.
    - `x[:, :2]` of an array that differs along dim 0 alone: the result may differ along dims 0 and 1. Its columns are
      equal in truth, but a dim that changed is not looked at further.
    """
    scale = UNKNOWN
    if len({state.scale for state in wholes}) == 1:
        scale = wholes[0].scale
    if all(state.zero for state in wholes) and pair.name != "cumlogsumexp":  # log(1 + 1) of two zeros is not zero
        return Whole(scale=scale, zero=True)
    return Whole(_find_changed_dims(pair) | _join_differing_dims(wholes), scale)


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
_EXTREMA = ("reduce_max", "reduce_min", "reduce_and", "reduce_or")
_RULES: dict[str, WholeRule] = {
    **dict.fromkeys(ELEMENTWISE, _combine),
    **dict.fromkeys(_CHANGES_SOME_DIMS, _change_some_dims),
    **dict.fromkeys(_EXTREMA, _reduce),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _keep,
    "bitcast_convert_type": _reinterpret,
    "lt": _compare_with_zero,
    "ge": _compare_with_zero,
    "select_n": _select,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reduce_sum": _sum,
    "dot_general": _multiply,
}
# Primitives that leave the first elements as they are when an array gets more, or whose rule considers its length.
_KEEPS_ELEMENTS = {
    *ELEMENTWISE,
    *("iota", "broadcast_in_dim", "reshape", "transpose", "squeeze", "reduce_sum", "dot_general"),
}

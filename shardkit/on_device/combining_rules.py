"""The rules of reductions, products, sorts, factorizations and random draws.

Worked examples, of rows x[n, 8] with the examples along dim 0:

- The sum over dim 1 has a row for each example, [n]. The sum over dim 0 is a Total.
- The maximum over dim 0 compares the examples with each other: they meet.
- `x @ w` with a whole w[8, 6] is rows along dim 0. `x.T @ x` contracts the examples, and is a Total. `x @ x.T` pairs
  each example with all: they meet.
"""

from __future__ import annotations

from dataclasses import replace

from shardkit.on_device.elementwise_rules import combine_elements, scale_total
from shardkit.on_device.example_states import (
    UNKNOWN,
    Pair,
    Rows,
    State,
    Total,
    Whole,
    fits_beside,
    select,
    shift_dim,
)
from shardkit.on_device.whole_rules import find_free_dim


def reduce_dims(pair: Pair, rows: Rows) -> State:
    """A sum, product or extremum over some dims."""
    axes = pair.many.params["axes"]
    if rows.dim in axes:
        if pair.name == "reduce_sum":
            return Total(rows.scale)
        return pair.met(f"{pair.name} is taken over the examples")
    if pair.name == "reduce_prod" and rows.scale != 1:
        return pair.met("reduce_prod combines examples with the number of examples")
    return replace(rows, dim=shift_dim(rows.dim, axes))


def find_extremum(pair: Pair, rows: Rows) -> State:
    """The index of an extremum, within each example."""
    axes = pair.many.params["axes"]
    if rows.dim in axes:
        return pair.met(f"{pair.name} is taken over the examples")
    # Of scale 1: an index does not grow with the values among which it was found.
    return Rows(shift_dim(rows.dim, axes), rows.copies)


def accumulate(pair: Pair, rows: Rows) -> State:
    """A running sum, product or extremum along a dim."""
    if pair.many.params["axis"] == rows.dim:
        return pair.met(f"{pair.name} runs over the examples")
    if pair.name in ("cumprod", "cumlogsumexp") and rows.scale != 1:
        return pair.met(f"{pair.name} combines examples with the number of examples")
    return rows


def multiply(pair: Pair, operands: list[State]) -> State:
    """A dot_general."""
    if select(operands, Total):
        return _multiply_total(pair, operands)
    lhs, rhs = operands
    assert isinstance(lhs, Rows | Whole)
    assert isinstance(rhs, Rows | Whole)
    scale = lhs.scale * rhs.scale
    if scale == UNKNOWN:
        return pair.met("dot_general combines examples with the number of examples")
    results: list[State] = []
    for side, state in enumerate(operands):
        if not isinstance(state, Rows):
            continue
        result = _multiply_rows(pair, side, state, operands[1 - side], scale)
        if result is None:
            return pair.met("dot_general multiplies examples by others, or by values that depend on their place")
        results.append(result)
    # Of `x @ y.T` either side gives rows, along dim 0 and along dim 1: an element belongs to two examples.
    if len(set(results)) > 1:
        return pair.met("dot_general pairs every example with every other")
    return results[0]


def _multiply_total(pair: Pair, operands: list[State]) -> State:
    totals = select(operands, Total)
    factors = select(operands, Whole)
    if len(totals) == 1 and len(factors) == 1:
        return scale_total(pair, totals[0], factors[0].scale)
    return pair.met("dot_general multiplies a sum over the examples by examples")


def _multiply_rows(pair: Pair, side: int, rows: Rows, other: State, scale: float) -> State | None:
    """What the rows of one operand become; None where they are multiplied by rows of other examples."""
    contract, batch = pair.many.params["dimension_numbers"]
    # An example's row must be multiplied by a row of the same example, or by a value that is the same for all.
    for dims in (batch, contract):
        if rows.dim not in dims[side]:
            continue
        number = list(dims[side]).index(rows.dim)
        partner = dims[1 - side][number]
        same_example = isinstance(other, Rows) and (other.dim, other.copies) == (partner, rows.copies)
        same_for_all = isinstance(other, Whole) and partner not in other.differs
        if not same_example and not same_for_all:
            return None
        # A contraction over the examples is a sum over them, as of a weight's gradient `x.T @ dy`.
        if dims is contract:
            return Total(scale)
        # The result begins with the batch dims, in their order.
        return Rows(number, rows.copies, scale)
    dim = find_free_dim(side, rows.dim, contract, batch, (pair.shape(0), pair.shape(1)))
    return Rows(dim, rows.copies, scale)


def convolve(pair: Pair, operands: list[State]) -> State:
    """A convolution of each image with the same kernel."""
    image, kernel = operands
    dims = pair.many.params["dimension_numbers"]
    is_plain = pair.many.params["batch_group_count"] == 1
    if not is_plain or not isinstance(image, Rows) or not isinstance(kernel, Whole):
        return pair.met("conv_general_dilated combines different examples")
    scale = image.scale * kernel.scale
    if image.dim != dims.lhs_spec[0] or scale == UNKNOWN:
        return pair.met("conv_general_dilated runs over the examples")
    return Rows(dims.out_spec[0], image.copies, scale)


def reduce_windows(pair: Pair, operands: list[State]) -> State:
    """A sum or extremum over windows, within each example."""
    rows = operands[0]
    if not isinstance(rows, Rows) or pair.many.params["window_dimensions"][rows.dim] != 1:
        return pair.met(f"{pair.name} runs over the examples")
    return rows


def sort(pair: Pair, operands: list[State]) -> State:
    """A sort within each example."""
    rows = select(operands, Rows)
    if not rows or rows[0].dim == pair.many.params["dimension"]:
        return pair.met("sort orders the examples")
    # Several operands are sorted together, by the first: they must belong to the same examples, as in a sum.
    return combine_elements(pair, operands)


def take_top(pair: Pair, operands: list[State]) -> State:
    """The largest values within each example."""
    rows = operands[0]
    ndim = len(pair.shape(0))
    axis = pair.many.params.get("axis", ndim - 1) % ndim
    if not isinstance(rows, Rows) or rows.dim == axis:
        return pair.met(f"{pair.name} chooses among the examples")
    return Rows(rows.dim, rows.copies)


def factorize(pair: Pair, operands: list[State]) -> State:
    """Factorizations and solvers: of every matrix in the last two dims."""
    rows = select(operands, Rows)
    for number, state in enumerate(operands):
        if isinstance(state, Total):
            return pair.met(f"{pair.name} is applied to a sum over the examples")
        first_dim_of_matrix = len(pair.shape(number)) - 2
        if isinstance(state, Rows) and (state.dim != rows[0].dim or state.dim >= first_dim_of_matrix):
            return pair.met(f"{pair.name} takes the examples for a matrix")
        if isinstance(state, Whole) and rows[0].dim in state.differs:
            return pair.met(f"{pair.name} combines an example with a value that depends on its place in the batch")
    for state in operands:
        if isinstance(state, Rows | Whole) and state.scale != 1:
            return pair.met(f"{pair.name} combines examples with the number of examples")
    return Rows(rows[0].dim, rows[0].copies)


def transform(pair: Pair, rows: Rows) -> State:
    """A Fourier transform of the last dims."""
    first_transformed = len(pair.shape(0)) - len(pair.many.params["fft_lengths"])
    if rows.dim >= first_transformed:
        return pair.met("fft runs over the examples")
    return rows


def draw(pair: Pair, operands: list[State]) -> State:
    """Random draws with one key for each example; beside the keys may be whole parameters of the distribution."""
    rows = select(operands, Rows)
    wholes = select(operands, Whole)
    layouts = {(state.dim, state.copies) for state in rows}
    if len(layouts) != 1 or len(rows) + len(wholes) < len(operands):
        return pair.met(f"{pair.name} combines examples with others")
    if not all(fits_beside(state, rows[0]) for state in wholes):
        return pair.met(f"{pair.name} combines an example with a value that depends on its place in the batch")
    return rows[0]

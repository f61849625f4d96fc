"""`RULES`: for each primitive, the rule that gives the state of its result from the states of its operands.

The states are in `example_states.py`. A primitive without a rule may mix examples, and is treated as if it did. The
rules are in a file for each kind of primitive: elementwise, moving, combining, indexing.
"""

from __future__ import annotations

from typing import Any

from shardkit._jax.jaxprs import kind_of
from shardkit._jax.primitives import ELEMENTWISE, registered
from shardkit.on_device import combining_rules as combining
from shardkit.on_device import moving_rules as moving
from shardkit.on_device.elementwise_rules import combine_elements
from shardkit.on_device.example_states import Pair, Rows, State, Total, Whole, any_whole
from shardkit.on_device.indexing_rules import scatter
from shardkit.on_device.moving_rules import Rule, wrap_one_operand

_MOVED_DIMS = ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")


def send_along(pair: Pair, state: State, result: Any) -> State:
    """The state of a collective's result over axes whose devices share their examples, such as a tp or cp axis."""
    params = pair.many.params
    if isinstance(state, Whole):
        return any_whole(result, state.scale)
    if kind_of(pair.many) in ("all_reduce", "ppermute"):
        if isinstance(state, Total) and registered(pair.name).reduces in ("maximum", "minimum"):
            return pair.met(f"{pair.name} is applied to a sum over the examples")
        return state
    # A gather, scatter or all_to_all along other dims leaves the rows of the examples where they are. One that is not
    # tiled adds or removes a dim, and nothing is said of it.
    moves_rows = isinstance(state, Rows) and state.dim in [params.get(key) for key in _MOVED_DIMS]
    if moves_rows or not params.get("tiled", True):
        return pair.met(f"{pair.name} moves the examples")
    return state


_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_WINDOWS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min")
_MATRICES = ("cholesky", "lu", "qr", "householder_product", "svd", "eigh", "triangular_solve")
_SCATTERS = ("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max")
_DRAWS = ("random_wrap", "random_unwrap", "random_bits", "random_split", "random_gamma")

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, combine_elements),
    **dict.fromkeys(_REDUCTIONS, wrap_one_operand(combining.reduce_dims)),
    **dict.fromkeys(("argmax", "argmin"), wrap_one_operand(combining.find_extremum)),
    **dict.fromkeys(_CUMULATIVE, wrap_one_operand(combining.accumulate)),
    **dict.fromkeys(_WINDOWS, combining.reduce_windows),
    **dict.fromkeys(_MATRICES, combining.factorize),
    **dict.fromkeys(_SCATTERS, scatter),
    **dict.fromkeys(_DRAWS, combining.draw),
    "random_fold_in": combine_elements,
    "broadcast_in_dim": wrap_one_operand(moving.broadcast),
    "transpose": wrap_one_operand(moving.transpose),
    "squeeze": wrap_one_operand(moving.squeeze),
    "reshape": wrap_one_operand(moving.reshape),
    "rev": wrap_one_operand(moving.reverse),
    "slice": wrap_one_operand(moving.take_slice),
    "split": moving.split,
    "stack": moving.stack,
    "unstack": wrap_one_operand(moving.unstack),
    "dynamic_slice": wrap_one_operand(moving.dynamic_slice),
    "dynamic_update_slice": moving.dynamic_update,
    "pad": moving.pad,
    "concatenate": moving.concatenate,
    "dot_general": combining.multiply,
    "conv_general_dilated": combining.convolve,
    "sort": combining.sort,
    "top_k": combining.take_top,
    "fft": wrap_one_operand(combining.transform),
}

"""What a traced function computes and keeps: FLOPs of matmuls and convolutions, bytes for a backward pass.

A multiply-add is two FLOPs. Products with padding, and with the holes of a dilation, are left out.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from shardkit._arguments.checks import quote
from shardkit._jax.compat import inner_jaxprs
from shardkit._jax.dependence import find_independent
from shardkit._jax.interpreter import inline_jaxpr
from shardkit.analysis.jaxpr.census import size_of
from shardkit.meshes.rng import example_keys
from shardkit.on_device.gradient import LossFn, call_loss, value_and_grad
from shardkit.on_device.loss_results import loss_and_aux
from shardkit.on_device.means import terms_of


class LossCounts(NamedTuple):
    """What a loss computes and keeps.

    Attributes:
        flops: FLOPs of the forward pass, per example.
        step_flops: FLOPs of forward and backward pass, per example, with those that jax.checkpoint repeats.
        kept_bytes: bytes that the forward pass keeps for the backward pass, per example, where nothing is fused.
        copied_bytes: bytes that it keeps of what follows from the parameters alone, such as copies in another dtype.
    """

    flops: float
    step_flops: float
    kept_bytes: float
    copied_bytes: float


def of_loss(loss_fn: LossFn, params: Any, batch: Any, iterations: int | None = None) -> LossCounts:
    """The counts of a loss, from its trace on the shapes of parameters and batch.

    Raises:
        ValueError: arrays of the batch with different numbers of examples; as `flops`.
    """
    examples = _count_examples(batch)
    keys = jax.eval_shape(lambda: example_keys(jax.random.key(0), examples))
    args = (params, batch, keys)

    def compute_total(*args: Any) -> Any:
        loss, _ = loss_and_aux(call_loss(loss_fn, *args), allow_sum=True)
        return sum(mean.total for mean in terms_of(loss))

    def compute_residuals(params: Any, *args: Any) -> Any:
        # The backward function is a pytree, whose leaves are the arrays that the forward pass keeps for it.
        _, vjp = jax.vjp(lambda params: compute_total(params, *args), params)
        return vjp

    forward = jax.make_jaxpr(compute_total)(*args)
    step = jax.make_jaxpr(value_and_grad(loss_fn))(*args)
    residuals = jax.make_jaxpr(compute_residuals)(*args)
    # With its calls inlined the program shows which residuals follow from the parameters alone.
    evaluate = partial(inline_jaxpr, residuals.jaxpr, residuals.consts)
    leaves = jax.tree.leaves(args)
    inlined = jax.make_jaxpr(evaluate)(*leaves)
    copied_bytes, kept_bytes = count_kept_bytes(inlined.jaxpr, len(jax.tree.leaves(params)))
    return LossCounts(
        flops=flops(forward.jaxpr, iterations) / examples,
        step_flops=flops(step.jaxpr, iterations) / examples,
        kept_bytes=kept_bytes / examples,
        copied_bytes=copied_bytes,
    )


def _count_examples(batch: Any) -> int:
    """The number of examples, along dim 0 of every array of a batch."""
    counts = set()
    for leaf in jax.tree.leaves(batch):
        if leaf.shape:
            counts.add(leaf.shape[0])
        else:
            counts.add(0)
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "counted: every array of the batch must have the same number of examples along dim 0; got "
            f"{quote(sorted(counts))}. Pass a batch as the loss takes it."
        )
    return int(counts.pop())


# This recursion is no walk of `JaxprInterpreter`: it counts equations, and follows no value from one to the next. Nor
# is it a sum over `walk`, because of the branches of a cond the largest one counts.
def flops(jaxpr: Any, iterations: int | None = None) -> int:
    """FLOPs of a jaxpr: of loops with all their iterations, of a cond those of the larger branch.

    Args:
        jaxpr: a jaxpr.
        iterations: of each while loop with matmuls.

    Raises:
        ValueError: such a loop without `iterations`.
    """
    total = 0
    for equation in jaxpr.eqns:
        total += flops_of(equation)
        inner = [flops(inner_jaxpr, iterations) for _, inner_jaxpr in inner_jaxprs(equation)]
        if not any(inner):  # a while loop without matmuls need not say how often it runs
            continue
        if equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += _count_iterations(equation, iterations) * sum(inner)
    return total


def _count_iterations(equation: Any, iterations: int | None) -> int:
    """How often an equation runs the programs that it holds."""
    name = equation.primitive.name
    if name == "scan":
        return int(equation.params["length"])
    if name == "pallas_call":
        return math.prod(equation.params["grid_mapping"].grid)
    if name != "while":
        return 1
    if iterations is None:
        raise ValueError(
            "counted: a while loop with matmuls must say how often it runs; got iterations=None. Pass "
            "iterations=, or write the loop as a scan."
        )
    return iterations


def flops_of(equation: Any) -> int:
    """FLOPs of a matmul or a convolution; 0 of anything else."""
    name = equation.primitive.name
    if name == "dot_general":
        lhs = equation.invars[0].aval.shape
        result = equation.outvars[0].aval.shape
        (contracted_dims, _), _ = equation.params["dimension_numbers"]
        # [32, 64] by [64, 16]: each of 512 results adds 64 products. A batch dim is in the result, and so in the count.
        return 2 * math.prod(result) * math.prod(lhs[dim] for dim in contracted_dims)
    if name == "ragged_dot_general":  # each row with the matrix of its group, or each pair of rows
        # [rows, k] by [groups, k, n]: 2 k n a row, however many groups there are.
        lhs, rhs = (v.aval.shape for v in equation.invars[:2])
        return 2 * math.prod(lhs) * int(rhs[-1])
    if name == "conv_general_dilated":
        return _flops_of_convolution(equation)
    return 0


def _flops_of_convolution(equation: Any) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    lhs, rhs = (v.aval.shape for v in equation.invars)
    result = equation.outvars[0].aval.shape
    pairs = 1  # of an output position and an input element, over all spatial dims
    for dim, (low, _) in enumerate(params["padding"]):
        pairs *= taps(
            lhs[numbers.lhs_spec[dim + 2]],
            rhs[numbers.rhs_spec[dim + 2]],
            result[numbers.out_spec[dim + 2]],
            stride=params["window_strides"][dim],
            low=low,
            step=params["rhs_dilation"][dim],
            holes=params["lhs_dilation"][dim],
        )
    batch = result[numbers.out_spec[0]]
    features_out = result[numbers.out_spec[1]]
    # The kernel's, not the input's: with feature_group_count g it has 1/g of them, and each result adds as many.
    features_in = rhs[numbers.rhs_spec[1]]
    return int(2 * pairs * batch * features_out * features_in)


def taps(size: int, kernel: int, result: int, *, stride: int, low: int, step: int, holes: int) -> int:
    """Pairs of an output position and a kernel position of a convolution that meet an input element."""
    # Worked example: a row of 4 elements, kernel 3, stride 1 and a padding of 1 in front (low=1) and behind. The 4
    # output positions see 2, 3, 3 and 2 elements: 10 taps, where 12 would count the zeros of the padding.
    if kernel == 1 and low == 0 and holes == 1:
        return result
    last = (size - 1) * holes
    count = 0
    for position in range(result):
        for tap in range(kernel):
            place = position * stride + tap * step - low
            if 0 <= place <= last and place % holes == 0:
                count += 1
    return count


def count_kept_bytes(jaxpr: Any, given: int) -> tuple[int, int]:
    """Bytes of the results of a jaxpr that are no arguments, such as those of `jax.vjp`, kept for the backward pass.

    Returns:
        The bytes of what follows from the first `given` arguments alone, and of all else.
    """
    _, depends = find_independent(jaxpr, given, len(jaxpr.outvars))
    residuals: dict[Any, bool] = {}  # a value that is a result twice is kept once
    for variable, other_arguments in zip(jaxpr.outvars, depends, strict=True):
        # A backward pass that reads a parameter or the batch keeps nothing for that: they are there anyway.
        if not isinstance(variable, Literal) and variable not in jaxpr.invars:
            residuals[variable] = other_arguments
    copied = 0
    kept = 0
    for variable, other_arguments in residuals.items():
        if other_arguments:
            kept += size_of(variable)
        else:
            copied += size_of(variable)
    return copied, kept

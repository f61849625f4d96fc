"""What a traced function computes and keeps: FLOPs of matmuls and convolutions, bytes for a backward pass.

A multiply-add is two FLOPs. Products with padding, and with the holes of a dilation, are left out.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from shardkit._arguments.checks import quoted
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
    counts = {(*leaf.shape, 0)[0] for leaf in jax.tree.leaves(batch)}
    if len(counts) != 1 or not min(counts):
        raise ValueError(
            "counted: every array of the batch must have the same number of examples along dim 0; got "
            f"{quoted(sorted(counts))}. Pass a batch as the loss takes it."
        )
    examples = min(counts)
    args = (params, batch, jax.eval_shape(lambda: example_keys(jax.random.key(0), examples)))

    def total(*args: Any) -> Any:
        loss, _ = loss_and_aux(call_loss(loss_fn, *args), allow_sum=True)
        return sum(mean.total for mean in terms_of(loss))

    def residuals(params: Any, *args: Any) -> Any:
        return jax.vjp(lambda params: total(params, *args), params)[1]

    forward, step, backward = (jax.make_jaxpr(fn)(*args) for fn in (total, value_and_grad(loss_fn), residuals))
    flat = jax.make_jaxpr(partial(inline_jaxpr, backward.jaxpr, backward.consts))(*jax.tree.leaves(args))
    copied, varying = kept(flat.jaxpr, len(jax.tree.leaves(params)))
    forward_flops, step_flops = flops(forward.jaxpr, iterations), flops(step.jaxpr, iterations)
    return LossCounts(forward_flops / examples, step_flops / examples, varying / examples, copied)


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
        name, params = equation.primitive.name, equation.params
        inner = [flops(sub, iterations) for _, sub in inner_jaxprs(equation)]
        times = 1
        if name == "scan":
            times = params["length"]
        elif name == "pallas_call":
            times = math.prod(params["grid_mapping"].grid)
        elif name == "while" and sum(inner):
            if iterations is None:
                raise ValueError(
                    "counted: a while loop with matmuls must say how often it runs; got iterations=None. Pass "
                    "iterations=, or write the loop as a scan."
                )
            times = iterations
        total += flops_of(equation) + times * (max(inner) if name == "cond" else sum(inner))
    return total


def flops_of(equation: Any) -> int:
    """FLOPs of a matmul or a convolution; 0 of anything else."""
    name, params = equation.primitive.name, equation.params
    if name not in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
        return 0
    left, right, *_ = (v.aval.shape for v in equation.invars)
    result = equation.outvars[0].aval.shape
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * math.prod(result) * math.prod(left[dim] for dim in contracted)
    if name == "ragged_dot_general":  # each row with the matrix of its group, or each pair of rows
        return 2 * math.prod(left) * right[-1]
    numbers = params["dimension_numbers"]
    pairs = 1
    for dim, (low, _) in enumerate(params["padding"]):
        sizes = left[numbers.lhs_spec[dim + 2]], right[numbers.rhs_spec[dim + 2]], result[numbers.out_spec[dim + 2]]
        holes, step = params["lhs_dilation"][dim], params["rhs_dilation"][dim]
        pairs *= taps(*sizes, stride=params["window_strides"][dim], low=low, step=step, holes=holes)
    return 2 * pairs * result[numbers.out_spec[0]] * result[numbers.out_spec[1]] * right[numbers.rhs_spec[1]]


def taps(size: int, kernel: int, result: int, *, stride: int, low: int, step: int, holes: int) -> int:
    """Pairs of an output position and a kernel position of a convolution that meet an input element."""
    if kernel == 1 and low == 0 and holes == 1:
        return result
    places = (o * stride + k * step - low for k in range(kernel) for o in range(result))
    return sum(0 <= place <= (size - 1) * holes and place % holes == 0 for place in places)


def kept(jaxpr: Any, given: int) -> tuple[int, int]:
    """Bytes of the results of a jaxpr that are no arguments, such as those of `jax.vjp`, kept for the backward pass.

    Returns:
        The bytes of what follows from the first `given` arguments alone, and of all else.
    """
    _, moved = find_independent(jaxpr, given, len(jaxpr.outvars))
    pairs = zip(jaxpr.outvars, moved, strict=True)
    varies = {v: moves for v, moves in pairs if not isinstance(v, Literal) and v not in jaxpr.invars}
    total, varying = sum(map(size_of, varies)), sum(size_of(v) for v, moves in varies.items() if moves)
    return total - varying, varying

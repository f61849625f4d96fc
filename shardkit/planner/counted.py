"""Models that are no transformer: what the trace of their loss says, and the layouts that fit a machine.

    model = planner.counted(loss_fn, params, batch)
    found = planner.search(model, chip="v5e", chips=8, batch=256)

The loss is traced on shapes, and nothing is compiled. As for transformers, memory per device is that of float32
parameters and two Adam moments, float32 gradients, copies in the dtype of compute (of layers that are gathered one by
one, of two), and what the backward pass keeps. Compute is the FLOPs of matmuls and convolutions, forward and backward
as traced, over the chips' peak. What is gathered at once is exposed; all else that is sent overlaps with compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from shardkit import cost
from shardkit._arguments import checks
from shardkit._arguments.typed import Arrays, DType, typed
from shardkit._jax.compat import inner_jaxprs
from shardkit._jax.jaxprs import not_reached
from shardkit.analysis.hlo.compute import taps
from shardkit.meshes.layout import local_shape, path_name
from shardkit.meshes.mesh import abstract_mesh
from shardkit.meshes.rng import example_keys
from shardkit.on_device.gradient import GradFn, LossFn, call_loss, loss_and_aux, terms_of, value_and_grad
from shardkit.on_device.handles import cast_floating
from shardkit.planner.candidates import Candidate
from shardkit.planner.estimate import bandwidth, check_shares
from shardkit.plans.dim_rules import in_subtrees
from shardkit.plans.plan import Plan
from shardkit.steps.builder import make_train_step
from shardkit.strategies.data import dp
from shardkit.strategies.zero import fsdp, zero1


class Counted(NamedTuple):
    """What the trace of a loss says of its model; `planner.counted` makes it.

    Attributes:
        loss_fn: the loss.
        params: the shapes of the parameters.
        compute: the dtype of compute.
        layerwise: the subtrees that the loss gathers layer by layer; (): none.
        layers: the number of their layers; 0: none.
        flops: FLOPs of the forward pass, per example.
        step_flops: FLOPs of forward and backward pass, per example, with those that jax.checkpoint repeats.
        kept_bytes: bytes that the forward pass keeps for the backward pass, per example.
        copied_bytes: bytes that it keeps of what follows from the parameters alone, such as copies in another dtype.
    """

    loss_fn: LossFn
    params: Any
    compute: Any
    layerwise: tuple[str, ...]
    layers: int
    flops: float
    step_flops: float
    kept_bytes: float
    copied_bytes: float

    @property
    def leaves(self) -> dict[str, int]:
        """The number of parameters of each leaf, by path."""
        paths = jax.tree_util.tree_leaves_with_path(self.params)
        return {path_name(path): math.prod(leaf.shape) for path, leaf in paths}

    def parameters(self) -> int:
        """The number of parameters."""
        return sum(self.leaves.values())


class Ways(NamedTuple):
    """A layout of a counted model.

    Attributes:
        plan: "dp", "zero1", "fsdp", or "layerwise", which is fsdp layer by layer.
        data: the devices, all of them along one axis.
        accumulate: microbatches per step.
    """

    plan: str
    data: int
    accumulate: int

    @property
    def axes(self) -> dict[str, int]:
        """The size of the mesh axis "data"."""
        return {"data": self.data}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._asdict().items())


class Found(Candidate):
    """A candidate whose model was counted."""

    def plan(self, rules: Any = None) -> Plan:
        """The plan of the layout, over the axis "data"."""
        if rules is not None:
            raise ValueError("planner: a counted model is not split over tensor ways; got rules. Leave them out.")
        return _plans(self.model)[self.layout.plan]

    def config(self) -> Any:
        """Refused: the model is none of `models.transformer`."""
        raise ValueError("planner: config is of a transformer; got a counted model. Pass grad_fn() to make_train_step.")

    def grad_fn(self) -> GradFn:
        """The GradFn of the loss that was counted."""
        return value_and_grad(self.model.loss_fn)


@typed
def counted(
    loss_fn: Callable[..., Any],
    params: Arrays,
    batch: Arrays,
    *,
    compute: DType = jnp.bfloat16,
    layerwise: tuple[str, ...] | None = None,
    iterations: int | None = None,
) -> Counted:
    """Counts a model of your own, from the trace of its loss: parameters, FLOPs, and what the backward pass keeps.

    Args:
        loss_fn: as for `value_and_grad`, without carried state: `loss_fn(params, batch, keys)`, of one device.
        params: the parameters, or their shapes.
        batch: a batch of any number of examples along dim 0, or its shapes. What is counted is divided by that number.
        compute: the dtype of parameters and batch in the loss: with `precision="bf16"` bfloat16.
        layerwise: subtrees that the loss gathers layer by layer, as for `fsdp`; None: "layers", if the loss does so.
        iterations: how often each while loop runs that contains matmuls; such loops do not say it.

    Returns:
        Counted, for `search`.

    Raises:
        ValueError: a batch without examples along dim 0; a while loop with matmuls, and no `iterations`.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((64, 8), jnp.float32)}
        >>> loss_fn = lambda params, batch, keys: sk.Mean.of(jnp.tanh(batch @ params["w"]))
        >>> model = sk.planner.counted(loss_fn, params, jax.ShapeDtypeStruct((32, 64), jnp.float32))
        >>> model.parameters(), model.flops
        (512, 1024.0)
        >>> found = sk.planner.search(model, chip="v5e", chips=8, batch=64)
        >>> print(found[0].layout)
        plan=dp data=8 accumulate=1
    """
    params, batch = jax.eval_shape(lambda *trees: trees, params, batch)
    rows = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(batch)}
    if len(rows) != 1 or not min(rows):
        raise ValueError(
            f"planner: the arrays of batch must have the examples along dim 0, as many in each; got {sorted(rows)}. "
            "Pass a batch as the loss takes it."
        )
    examples = min(rows)
    keys = jax.eval_shape(lambda: example_keys(jax.random.key(0), examples))
    seen = jax.eval_shape(lambda *trees: cast_floating(trees, compute), params, batch)

    def total(params: Any, batch: Any, keys: Any) -> jax.Array:
        loss, _ = loss_and_aux(call_loss(loss_fn, params, batch, keys), several=True)
        return sum(mean.total for mean in terms_of(loss))

    def residuals(params: Any, *args: Any) -> Any:
        return jax.vjp(lambda params: total(params, *args), params)[1]

    flops, step_flops = (
        matmul_flops(jax.make_jaxpr(fn)(*seen, keys).jaxpr, iterations) for fn in (total, value_and_grad(loss_fn))
    )
    of_params, of_batch = _kept(jax.make_jaxpr(residuals)(*seen, keys).jaxpr, len(jax.tree.leaves(params)))
    names, layers = _stack(loss_fn, params, batch, layerwise)
    per_example = (flops / examples, step_flops / examples, of_batch / examples)
    return Counted(loss_fn, params, jnp.dtype(compute), names, layers, *per_example, of_params)


def search_counted(
    model: Counted,
    chip: cost.Chip,
    chips: int,
    batch: int,
    memory_share: float,
    efficiency: float,
    links: cost.Links | None,
) -> list[Candidate]:
    """`planner.search` of a counted model."""
    check_shares(memory_share=memory_share, efficiency=efficiency)
    chips, batch = checks.whole("planner", chips=chips, batch=batch)
    if batch % chips:
        raise ValueError(
            f"planner: batch must be divisible by the chips; got {batch} over {chips}. Change the batch or the chips."
        )
    rate, latency = bandwidth(chip, 1, chips, 1), 0.0
    if links is not None:
        rate, latency = links.of("data").bandwidth, links.of("data").latency
    seconds = batch * model.step_flops / (chips * chip.flops * efficiency)
    model_flops = batch * min(3 * model.flops, model.step_flops)  # what jax.checkpoint repeats is no model FLOPs
    found = []
    for name, plan in _plans(model).items():
        state = _state(model, plan, chips)
        for accumulate in (n for n in range(1, batch // chips + 1) if batch // chips % n == 0):
            hidden, exposed = _sent(model, name, plan, chips, accumulate)
            messages = 3 * model.layers * accumulate if name == "layerwise" else 2
            hidden = hidden / rate + messages * (chips - 1) * latency
            candidate = Found(
                model,  # type: ignore[arg-type]
                Ways(name, chips, accumulate),  # type: ignore[arg-type]
                state,
                model.kept_bytes * (batch // chips // accumulate),
                memory_share * chip.hbm_bytes,
                seconds,
                hidden,
                exposed / rate,
                0.0,
            )
            mfu = cost.mfu(model_flops, candidate.seconds, peak=chip, chips=chips) if candidate.seconds else 0.0
            found.append(candidate._replace(mfu=mfu))
    order = list(_plans(model))
    fitting = [each for each in found if each.fits]
    return sorted(fitting, key=lambda c: (c.seconds, c.layout.accumulate, order.index(c.layout.plan)))


def _plans(model: Counted) -> dict[str, Plan]:
    """The plans of a counted model, the simplest first."""
    plans = {"dp": dp("data"), "zero1": zero1("data"), "fsdp": fsdp("data")}
    return plans | ({"layerwise": fsdp("data", layerwise=model.layerwise)} if model.layerwise else {})


def _placed(model: Counted, plan: Plan, chips: int) -> Iterator[tuple[int, Any, Callable[[Any], int]]]:
    """Of each leaf its size, its layout, and its size on a device with a spec."""
    mesh = abstract_mesh(data=chips)
    layouts = jax.tree.leaves(plan.layouts(model.params, mesh), is_leaf=lambda x: hasattr(x, "splits"))
    for leaf, layout in zip(jax.tree.leaves(model.params), layouts, strict=True):
        yield math.prod(leaf.shape), layout, lambda spec, leaf=leaf: math.prod(local_shape(leaf.shape, spec, mesh))


def _state(model: Counted, plan: Plan, chips: int) -> float:
    """Bytes of parameters, moments, gradients and copies on one device."""
    total = model.copied_bytes
    for size, layout, local in _placed(model, plan, chips):
        total += 4 * local(layout.rest) + 8 * local(layout.update) + 4 * local(layout.grad)
        if layout.lazy:
            total += 2 * model.compute.itemsize * size / model.layers
        elif model.compute.itemsize < 4 or layout.rest != layout.seen:
            total += model.compute.itemsize * size
    return total


def _sent(model: Counted, name: str, plan: Plan, chips: int, accumulate: int) -> tuple[float, float]:
    """Bytes that a device sends in a step beside compute, and before or after it."""
    hidden = exposed = 0.0
    for size, layout, _ in _placed(model, plan, chips):
        stage = {"dp": 0, "zero1": 1}.get(name, 3) if layout.splits else 0
        gathered = 4 if stage == 1 else model.compute.itemsize
        volume = partial(cost.zero_volume, size, chips, stage, layerwise=layout.lazy, accumulate=accumulate)
        reduced = volume(parameter_bytes=0, gradient_bytes=4)
        both = volume(parameter_bytes=gathered, gradient_bytes=4)
        hidden, exposed = hidden + (both if layout.lazy else reduced), exposed + (0 if layout.lazy else both - reduced)
    return hidden, exposed


def _stack(loss_fn: LossFn, params: Any, batch: Any, names: tuple[str, ...] | None) -> tuple[tuple[str, ...], int]:
    """The subtrees that the loss gathers layer by layer, and the number of their layers."""
    asked, names = names is not None, ("layers",) if names is None else names
    heads = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for name in [name for name in names if in_subtrees(path_name(path), (name,))]:
            first, _, rest = path_name(path)[len(name) + 1 :].partition(".")
            heads.add((name, first) if first.isdigit() and rest else (leaf.shape or (0,))[0])
    stacked = all(isinstance(each, int) for each in heads)
    layers = (min(heads) if len(heads) == 1 else 0) if stacked else len(heads)
    if not layers and not asked:
        return (), 0
    plan = fsdp("data", layerwise=names, min_size=1)
    init, step = make_train_step(value_and_grad(loss_fn), optax.sgd(0.1), mesh=abstract_mesh(data=2), plan=plan)
    twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), batch)
    try:
        jax.eval_shape(step, init.abstract(params), twice)
    except Exception:  # a loss that uses lazy leaves as arrays, which jax refuses in many ways
        if asked:
            raise
        return (), 0
    return names, layers


def matmul_flops(jaxpr: Any, iterations: int | None = None) -> int:
    """FLOPs of the matmuls and convolutions of a jaxpr, in its loops too; of a cond those of the larger branch."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [matmul_flops(sub, iterations) for _, sub in inner_jaxprs(equation)]
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
        elif name == "ragged_dot_general":  # each row with the matrix of its group
            rows, matrix = (v.aval.shape for v in equation.invars[:2])
            total += 2 * math.prod(rows) * matrix[-1]
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        elif name == "while" and sum(inner):
            if iterations is None:
                raise ValueError(
                    "planner: how often a while loop with matmuls runs must be given, because it does not say so; got "
                    "none. Pass iterations=, or write the loop as a scan."
                )
            total += iterations * sum(inner)
        elif name == "cond":
            total += max(inner)
        elif name == "scan":
            total += params["length"] * inner[0]
        elif name == "pallas_call":
            total += math.prod(params["grid_mapping"].grid) * inner[0]
        else:
            total += sum(inner)
    return total


def _convolution(equation: Any) -> int:
    """FLOPs of a convolution, without those with padding and with holes."""
    left, kernel = (v.aval.shape for v in equation.invars)
    result, params = equation.outvars[0].aval.shape, equation.params
    of_left, of_kernel, of_result = params["dimension_numbers"]
    pairs = result[of_result[0]] * result[of_result[1]] * kernel[of_kernel[1]]
    for dim, (low, _) in enumerate(params["padding"]):
        sizes = left[of_left[dim + 2]], kernel[of_kernel[dim + 2]], result[of_result[dim + 2]]
        holes, step = params["lhs_dilation"][dim], params["rhs_dilation"][dim]
        pairs *= taps(*sizes, {2: params["window_strides"][dim], 3: low, 5: step, 6: holes})
    return 2 * pairs


def _kept(jaxpr: Any, params: int) -> tuple[int, int]:
    """Bytes of the results of a jaxpr: those that follow from its first `params` arguments alone, and all others."""
    _, moved = not_reached(jaxpr, params, len(jaxpr.outvars))
    sizes: dict[Any, tuple[bool, int]] = {}
    for result, varies in zip(jaxpr.outvars, moved, strict=True):
        if not isinstance(result, Literal) and result not in jaxpr.invars:
            sizes[result] = varies, math.prod(result.aval.shape) * result.aval.dtype.itemsize
    return sum(size for varies, size in sizes.values() if not varies), sum(s for varies, s in sizes.values() if varies)

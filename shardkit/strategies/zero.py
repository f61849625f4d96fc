"""ZeRO: optimizer state, gradients and parameters split over the devices that split the batch.

| plan | a device holds at rest | gradients | sent per step, in parameter bytes x (n-1)/n |
|---|---|---|---|
| `dp` | all | all | 2 |
| `zero1` | parameters, 1/n of the optimizer state | all | 2 |
| `zero1(layerwise=...)` | parameters, 1/n of the optimizer state | 1/n if k is 1, otherwise all | 2 |
| `zero2` | parameters, 1/n of the optimizer state | 1/n | k + 1 |
| `fsdp` | 1/n of everything | all | 2, gathered once per step |
| `fsdp(layerwise=...)` | 1/n of everything | 1/n | 3k, 2k or 3 |

k is the number of microbatches (`accumulate`): collectives inside the loss are sent in each of them. Layer by layer,
`gathered(keep=True)` sends 2k, and `scan_layers(microbatches=k)`, which runs all microbatches through a layer before
the next, sends 3. With `uneven="pad"` a leaf counts with its padding, in memory and when sent.

The options are the same for all three:

- `layerwise` names subtrees of lazy leaves, such as "layers": `gathered` and `scan_layers` gather (zero1 and zero2:
  scatter the gradients of) one layer at a time, so that no more than a layer is whole at once. Dim 0 of a stack, the
  layer, is not split; in a list of layers dim 0 may be.
- `rules` chooses the dim of each leaf, as a function of path and shape (None: leave the leaf whole), or as a pytree of
  PartitionSpecs that name `axis`, such as `specs_from_rules` returns. Without rules it is a dim that divides and
  over which collectives are fast: the largest, but of three or more dims not the last, and none between the first and
  the last two.
- `gather` and `reduce` are the algorithms of the collectives, such as `sk.algorithms.ring()`. ZeRO++ is
  `fsdp(("node", "gpu"), layerwise=..., gather=compressed(int8), secondary="gpu", reduce=compressed(int4))`.
- `uneven` says what to do with a leaf of which no dim divides: "replicate" leaves it whole, "refuse" raises, and "pad"
  stores and sends it with zeros at the end of the dim that grows least; `unpadded` removes them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple, NoReturn

from shardkit._arguments.checks import Axis, at_least, axis_names, name_axes, quote
from shardkit._arguments.typed import typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.plans.dim_rules import ChooseDim, DimRules, is_in_subtrees, is_stacked, make_dim_chooser
from shardkit.plans.plan import Plan, strategy
from shardkit.plans.splits import Gather, Leaf, Scatter, Split

# A leaf of fewer elements has less than 4 KB in float32, and each Adam moment as much: too little for collectives of
# its own.
MIN_SIZE = 1024
Uneven = Literal["replicate", "refuse", "pad"]


@typed
def zero1(
    axis: Axis,
    *,
    layerwise: tuple[str, ...] = (),
    min_size: int = MIN_SIZE,
    rules: DimRules | None = None,
    uneven: Uneven = "replicate",
    gather: Algorithm = PLAIN,
    reduce: Algorithm = PLAIN,
) -> Plan:
    """ZeRO-1: the optimizer state is split; parameters and gradients are whole on every device.

    Layout: `grads[D, ..] {U_a} -> grads[D_a, ..]`, and after the update `params[D_a, ..] -> params[D, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: subtrees, such as "layers". In a step of one microbatch, `gathered` or `scan_layers` scatter their
            gradients layer by layer, so no device ever holds them whole.
        min_size: leaves with fewer elements stay whole.
        rules: the dim to split of each leaf: a function `(path, shape) -> dim` or None, or a pytree of PartitionSpecs.
        uneven: how to treat a leaf without a dim that divides: "replicate", "refuse" or "pad".
        gather: the algorithm that gathers parameters.
        reduce: the algorithm that reduces gradients.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names; at trace time a lazy leaf that you use outside of
            `gathered` and `scan_layers`.
        ValueError: an unknown `uneven`; an algorithm without the collective, or that cannot run over `axis`. At trace
            time: with `uneven="refuse"` a leaf that does not divide, a chosen dim that cannot be padded, or a name that
            matches no leaf.

    Cost: a reduce_scatter of every gradient and an all_gather of every updated parameter once per step, 2 (n-1)/n of
        the parameters' bytes, whatever the accumulation. A device holds 1/n of the optimizer state.

    Example:
        >>> layout = sk.zero1("data").layouts({"w": jnp.ones((64, 32))}, mesh)["w"]
        >>> tuple(layout.rest), tuple(layout.update)
        ((), ('data',))

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.1.
    """
    options = _Options("zero1", axis, layerwise, min_size, rules, uneven, gather, reduce)
    # With several microbatches a gradient scattered in the backward pass would be sent in each of them: `once` leaves
    # it whole until the end of the step.
    # Gathered after the update, and not before the next loss: the state is to hold whole parameters.
    return _make_plan(options, rank=2, once=True, eager=_Times("update", "step"), lazy=_Times("update", "layer"))


@typed
def zero2(
    axis: Axis,
    *,
    layerwise: tuple[str, ...] = (),
    min_size: int = MIN_SIZE,
    rules: DimRules | None = None,
    uneven: Uneven = "replicate",
    gather: Algorithm = PLAIN,
    reduce: Algorithm = PLAIN,
) -> Plan:
    """ZeRO-2: optimizer state and gradients are split; each gradient is scattered inside the backward pass.

    So accumulation never holds a whole gradient: it sums parts.

    Layout: in each microbatch `grads[D, ..] {U_a} -> grads[D_a, ..]`; in the end `params[D_a, ..] -> params[D, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: subtrees, such as "layers"; `gathered` scatters their gradients layer by layer.
        min_size, rules, uneven, gather, reduce: as for `zero1`.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError, ValueError: as for `zero1`.

    Cost: a reduce_scatter of every gradient in each of k microbatches and an all_gather of every updated parameter once
        per step: (k + 1) (n-1)/n of the parameters' bytes. A device holds 1/n of gradients and optimizer state.

    Example:
        >>> layout = sk.zero2("data").layouts({"w": jnp.ones((64, 32))}, mesh)["w"]
        >>> tuple(layout.rest), tuple(layout.grad), tuple(layout.update)
        ((), ('data',), ('data',))

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.2.
    """
    options = _Options("zero2", axis, layerwise, min_size, rules, uneven, gather, reduce)
    # No `once` here: a gradient that waited for the end of the step would be whole until then, on every device. This is
    # the memory that ZeRO-2 saves, and the k reduce_scatters are its price.
    return _make_plan(options, rank=2, eager=_Times("update", "microbatch"), lazy=_Times("update", "layer"))


@typed
def fsdp(
    axis: Axis,
    *,
    layerwise: tuple[str, ...] = (),
    min_size: int = MIN_SIZE,
    rules: DimRules | None = None,
    uneven: Uneven = "replicate",
    gather: Algorithm = PLAIN,
    reduce: Algorithm = PLAIN,
    secondary: Axis | None = None,
) -> Plan:
    """ZeRO-3, fully sharded data parallelism: parameters, gradients and optimizer state are split.

    Layout: `params[D_a, ..] -> params[D, ..]` to be used, `grads[D, ..] {U_a} -> grads[D_a, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: subtrees, such as "layers". Your loss gathers them layer by layer, with `gathered` or `scan_layers`.
            The step gathers all other leaves once, at its start.
        min_size, rules, uneven, gather, reduce: as for `zero1`.
        secondary: the axes with the fast links, some of `axis`. The forward pass gathers a layer's weights over the
            other axes, and each device keeps a part over the secondary axes, in the compute dtype. The backward pass
            gathers these parts over the secondary axes alone. `gather` and `reduce` are then the algorithms of the
            other axes: of ("rack", "node", "gpu") with secondary="gpu", for example `hierarchical("node")`.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others. For hybrid sharding pass `chain(dp("replica"),
            fsdp("shard"))`: it sums parts over the replicas after the scatter, so the slow axis carries 1/n.

    Raises:
        TypeError: as for `zero1`.
        ValueError: as for `zero1`; a `secondary` with an axis outside of `axis` or with all of them, or without
            `layerwise`; an algorithm that does not run over the axes beside it.

    Cost: for leaves gathered once per step an all_gather and a reduce_scatter, 2 (n-1)/n of their bytes, whatever the
        accumulation; for layer-wise ones two gathers and a reduce_scatter in each of k microbatches, 3 k (n-1)/n, or 2
        k with `gathered(keep=True)`. Gathers are in the compute dtype, reductions in the reduce dtype. With `secondary`
        over I of n devices, the bytes of fsdp over I devices, and over the others one gather and one reduce_scatter of
        1/I of the bytes; a device keeps 1/I of the weights until the backward pass.

    Example:
        >>> params = {"embed": jnp.ones((64, 32)), "layers": jnp.ones((4, 32, 32))}
        >>> layouts = sk.fsdp("data", layerwise=("layers",)).layouts(params, mesh)
        >>> tuple(layouts["embed"].rest), tuple(layouts["layers"].rest)
        (('data',), (None, 'data'))
        >>> small = {"gather": sk.algorithms.compressed(jnp.int8), "reduce": sk.algorithms.compressed(jnp.int4)}
        >>> plan = sk.fsdp(("data", "model"), layerwise=("layers",), secondary="model", **small)  # ZeRO++
        >>> tuple(plan.layouts(params, mesh)["layers"].rest)
        (None, ('model', 'data'))

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.3; Zhao et al., PyTorch FSDP (VLDB 2023); Wang et al., ZeRO++
        (arXiv:2306.10209), for `secondary`.
    """
    fast_axes = () if secondary is None else axis_names("fsdp", secondary)
    axes = axis_names("fsdp", axis)
    # With all axes there is nothing to gather first and keep: that is fsdp as it is. Without layerwise no backward pass
    # gathers again.
    if fast_axes and (not set(fast_axes) < set(axes) or not layerwise):
        raise ValueError(
            "fsdp: secondary must be some of the axes, and not all, for the weights that layerwise names; got "
            f"secondary={quote(fast_axes)} for the axes {quote(axes)} and layerwise={layerwise!r}. Pass for example "
            "fsdp(('node', 'gpu'), layerwise=('layers',), secondary='gpu')."
        )
    options = _Options("fsdp", axis, layerwise, min_size, rules, uneven, gather, reduce)
    # Once per step: between microbatches the weights do not change, so a gather in each would send the same bytes
    # again. Lazy leaves pay this, because only one layer of them is whole at a time. Rank 1 comes before the 2 of
    # zero1: on a dim that both split, zero1 cuts the parts of fsdp, and the state holds the part of fsdp.
    eager = _Times("step", "step")
    return _make_plan(options, rank=1, eager=eager, lazy=_Times("layer", "layer"), secondary=fast_axes)


class _Options(NamedTuple):
    """The arguments of `zero1`, `zero2` or `fsdp`."""

    name: str
    axis: Axis
    layerwise: tuple[str, ...]
    min_size: int
    rules: DimRules | None
    uneven: Uneven
    gather: Algorithm
    reduce: Algorithm

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return axis_names(self.name, self.axis)


class _Times(NamedTuple):
    """When a leaf is gathered, and when its gradient is scattered; `Split` says what the words mean."""

    gather: Gather
    scatter: Scatter


def _make_plan(
    options: _Options,
    *,
    rank: int,
    eager: _Times,
    lazy: _Times,
    once: bool = False,
    secondary: tuple[str, ...] = (),
) -> Plan:
    """The plan of a strategy that splits each leaf over the axes of the batch, with these times."""
    at_least(options.name, 0, min_size=options.min_size)
    choose_by_rules = None
    if options.rules is not None:
        choose_by_rules = make_dim_chooser(options.name, options.axes, options.rules)

    def place(leaf: Leaf) -> Split | str:
        dim = _choose_dim(options, choose_by_rules, leaf)
        if isinstance(dim, str):
            return dim
        # The subtrees that the user named have leaves which the loss opens itself; the step gathers and scatters all
        # others.
        times = lazy if is_in_subtrees(leaf.path, options.layerwise) else eager
        return Split(
            dim,
            times.gather,
            times.scatter,
            once=once,
            pad=options.uneven == "pad",
            # In a list of layers a leaf is no stack, and other strategies may split its dim 0.
            stack=is_stacked(leaf.path, options.layerwise),
            secondary=secondary,
        )

    _check_algorithm(options, secondary, "gather", "all_gather")
    _check_algorithm(options, secondary, "reduce", "reduce_scatter")
    plan = strategy(
        options.name,
        options.axis,
        rank=rank,
        batch_dim=0,
        place=place,
        names=options.layerwise,
        rules=options.rules,
    )
    # The algorithms are set here, because `strategy` would check them over all axes: over the secondary axes they need
    # not run.
    (bare_strategy,) = plan.strategies
    return Plan((bare_strategy._replace(gather=options.gather, reduce=options.reduce),))


def _check_algorithm(
    options: _Options, secondary: tuple[str, ...], argument: Literal["gather", "reduce"], kernel: str
) -> None:
    """Refuses an algorithm that cannot run over its axes: all axes of the strategy but the secondary ones.

    Worked example: over the axes "rack", "node" and "gpu" with secondary="gpu", a gather crosses racks and nodes by its
    algorithm, which may be hierarchical("node"), and the GPUs of a node by the plain one.
    """
    algorithm: Algorithm = getattr(options, argument)
    axes = tuple(axis for axis in options.axes if axis not in secondary)
    try:
        algorithm.check(options.name, argument, kernel, axes)
    except ValueError as error:
        # An algorithm without this kernel is wrong over any axes: its sentence stands. Otherwise the sentence must name
        # the axes that are left beside the secondary ones, which the user has not written.
        if not secondary or getattr(algorithm, kernel) is None:
            raise
        raise ValueError(
            f"{options.name}: {argument}= must run over the axes beside secondary={quote(secondary)}, which are "
            f"{quote(axes)}; got {algorithm}. Pass an algorithm for these axes, or leave out secondary=."
        ) from error


def _choose_dim(options: _Options, choose_by_rules: ChooseDim | None, leaf: Leaf) -> int | str:
    """The dim of a leaf to split, or the reason in words why the leaf stays whole.

    Worked example: `fsdp("d", layerwise=("layers",))` over 8 devices, and layers.query, a stack of projections into
    heads of shape [4 layers, 512 model, 8 heads, 64 head size].

    - scan takes a layer along dim 0, so the first dim that may be split is dim 1.
    - 512, 8 and 64 divide by 8: dims 1, 2 and 3 are candidates.
    - Dim 3 is the last of a stack, whose parts are less contiguous. Of dims 1 and 2 the larger is split: dim 1.

    A device holds [4, 64, 8, 64], and a layer gathers [64, 8, 64] to [512, 8, 64].
    """
    # The reasons are printed as they are, in the last column of `describe(plan, params)`.
    if leaf.ways == 1:
        return "the axis has one device"
    if not leaf.shape:
        return "a scalar, which has no dim"
    size = math.prod(leaf.shape)
    if size < options.min_size:
        elements = "element" if size == 1 else "elements"
        return f"{size:,} {elements}, fewer than min_size={options.min_size:,}"
    first = 1 if leaf.stack or is_stacked(leaf.path, options.layerwise) else 0  # scan removes dim 0
    # Also with rules: a dim that they choose must be one of these.
    candidates = _find_candidates(leaf, first, options.uneven)
    if choose_by_rules is not None:
        dim = choose_by_rules(leaf.path, leaf.shape)
        if dim is None:
            return "no dim was chosen"
        if dim not in candidates:
            _refuse_chosen_dim(options, leaf, dim)
        return dim
    if candidates:
        return min(candidates, key=partial(_price, leaf, first))
    if options.uneven == "pad":
        return "no dim is left to pad"
    if options.uneven == "refuse":
        raise ValueError(
            f"{options.name}: one dim of leaf {leaf.path} must be divisible by {name_axes(options.axes)}; got shape "
            f"{leaf.shape} over {leaf.ways} devices. Pass uneven='pad' or uneven='replicate'."
        )
    if first > 0:
        return f"no dim except the layer divides by {leaf.ways}"
    return f"no dim divides by {leaf.ways}"


def _find_candidates(leaf: Leaf, first: int, uneven: Uneven) -> list[int]:
    """The dims, from the first that may be split, that divide or can be padded.

    Of a stack `[4 layers, 6, 8]` over 4 devices: dim 2, which divides; with uneven="pad" dim 1 too, padded to 8.
    """
    fixed_dims = leaf.split | leaf.automatic  # other strategies split them, and know their sizes
    candidates = []
    for dim in range(first, len(leaf.shape)):
        rows = leaf.shape[dim]
        divides = rows % leaf.ways == 0
        can_be_padded = uneven == "pad" and dim not in fixed_dims
        # Zero rows divide by any number, but a dim without rows has nothing to split.
        if rows and (divides or can_be_padded):
            candidates.append(dim)
    return candidates


def _refuse_chosen_dim(options: _Options, leaf: Leaf, dim: int) -> NoReturn:
    rule = ""
    remedy = "Choose another dim, or pass uneven='pad'."
    if options.uneven == "pad":
        rule = " or one that can be padded, which a layer dim, or a dim that another strategy splits, cannot"
        remedy = "Choose another dim."
    raise ValueError(
        f"{options.name}: dim {dim} of leaf {leaf.path} must be divisible by {name_axes(options.axes)}{rule}; got "
        f"shape {leaf.shape} over {leaf.ways} devices. {remedy}"
    )


def _price(leaf: Leaf, first: int, dim: int) -> tuple[bool, float, bool, bool, int]:
    """The cost of splitting a dim: data that the partitioner moves, padding, slow collectives, few rows.

    Tuples compare from the left: the first difference decides.
    """
    rows = leaf.shape[dim]
    padded = math.ceil(rows / leaf.ways) * leaf.ways
    # The TPU compiler runs a reduce_scatter over a dim in the middle as an all_reduce, of twice the bytes. Over the
    # last dim of a stack, parts are less contiguous: on CPU a reduce_scatter takes 1.4 times as long.
    in_the_middle = first < dim < len(leaf.shape) - 2
    last_of_a_stack = 2 <= dim == len(leaf.shape) - 1
    # The dearest first. A dim that the partitioner splits is gathered by it before each collective. Rows of zeros are
    # stored and sent. Then the two above. Of the dims that are left, the one with the most rows.
    return dim in leaf.automatic, padded / rows, in_the_middle, last_of_a_stack, -rows

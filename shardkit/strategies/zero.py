"""ZeRO: optimizer state, gradients and parameters split over the devices that split the batch.

| plan | a device holds at rest | gradients | sent per step, in parameter bytes x (n-1)/n |
|---|---|---|---|
| `dp` | all | all | 2 |
| `zero1` | parameters, 1/n of the optimizer state | all | 2 |
| `zero1(layerwise=...)` | parameters, 1/n of the optimizer state | 1/n if k is 1, otherwise all | 2 |
| `zero2` | parameters, 1/n of the optimizer state | 1/n | k + 1 |
| `fsdp` | 1/n of everything | all | 2, gathered once per step |
| `fsdp(layerwise=...)` | 1/n of everything | 1/n | 3k, 2k or 3 |

k is the number of microbatches (`accumulate`): what the loss gathers or reduces is sent in each of them. Layer by
layer, `gathered(keep=True)` sends 2k, and `scan_layers(microbatches=k)`, which runs all microbatches through a layer
before the next, sends 3. With `uneven="pad"` a leaf counts with its padding, in memory and when sent.

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn

from shardkit._arguments.checks import Axis, at_least, axis_names, named, quoted
from shardkit._arguments.typed import typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.plans.dim_rules import DimRules, is_in_subtrees, is_stacked, make_dim_chooser
from shardkit.plans.plan import Plan, strategy
from shardkit.plans.splits import Gather, Leaf, Scatter, Split

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
        layerwise: subtrees, such as "layers", whose gradients are scattered layer by layer, by `gathered` or
            `scan_layers`, in a step of one microbatch, so that they are never whole.
        min_size: leaves with fewer elements stay whole.
        rules: which dim of a leaf is split: `(path, shape) -> dim` or None, or a pytree of PartitionSpecs.
        uneven: what to do with a leaf of which no dim divides: "replicate", "refuse" or "pad".
        gather: the algorithm that gathers parameters.
        reduce: the algorithm that reduces gradients.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names; at trace time a lazy leaf that is used unopened.
        ValueError: an unknown `uneven`; at trace time a leaf that does not divide, with `uneven="refuse"`, a chosen dim
            that cannot be padded, or a name that matches no leaf; an algorithm without the collective, or that cannot
            run over `axis`.

    Cost: a reduce_scatter of every gradient and an all_gather of every updated parameter once per step, 2 (n-1)/n of
        the parameters' bytes, whatever the accumulation. A device holds 1/n of the optimizer state.

    Example:
        >>> layout = sk.zero1("data").layouts({"w": jnp.ones((64, 32))}, mesh)["w"]
        >>> tuple(layout.rest), tuple(layout.update)
        ((), ('data',))

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.1.
    """
    own = _Zero("zero1", axis, layerwise, min_size, rules, uneven, gather, reduce)
    return own.plan(rank=2, once=True, whole=("update", "step"), layer=("update", "layer"))


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

    Accumulation therefore never holds a whole gradient: it sums parts.

    Layout: in each microbatch `grads[D, ..] {U_a} -> grads[D_a, ..]`; in the end `params[D_a, ..] -> params[D, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: subtrees, such as "layers", whose gradients are scattered layer by layer, by `gathered`.
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
    own = _Zero("zero2", axis, layerwise, min_size, rules, uneven, gather, reduce)
    return own.plan(rank=2, whole=("update", "microbatch"), layer=("update", "layer"))


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
        layerwise: subtrees, such as "layers", that the loss gathers layer by layer, by `gathered` or `scan_layers`. All
            other leaves are gathered once, at the start of the step.
        min_size, rules, uneven, gather, reduce: as for `zero1`.
        secondary: some of the axes, those of the fast links. A layer's weights are gathered over the other axes in the
            forward pass alone; the backward pass gathers them again from the parts over these, which it kept in the
            compute dtype. `gather` and `reduce` are then the algorithms of the other axes.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others. `chain(dp("replica"), fsdp("shard"))` is hybrid
            sharding: parts are summed over the replicas after the scatter, so the slow axis carries 1/n.

    Raises:
        TypeError: as for `zero1`.
        ValueError: as for `zero1`; a `secondary` that is not some of the axes, or without `layerwise`.

    Cost: for leaves gathered once per step an all_gather and a reduce_scatter, 2 (n-1)/n of their bytes, whatever the
        accumulation; for layer-wise ones two gathers and a reduce_scatter in each of k microbatches, 3 k (n-1)/n, or
        2 k with `gathered(keep=True)`. Gathers are in the compute dtype, reductions in the reduce dtype. With
        `secondary` over I of n devices, what fsdp over I devices sends, and over the others one gather and one
        reduce_scatter of 1/I of the bytes; a device keeps 1/I of the weights until the backward pass.

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
    fast = () if secondary is None else axis_names("fsdp", secondary)
    axes = axis_names("fsdp", axis)
    if fast and (not set(fast) < set(axes) or not layerwise):
        raise ValueError(
            "fsdp: secondary must be some of the axes, and not all, for the weights that layerwise names; got "
            f"secondary={quoted(fast)} for the axes {quoted(axes)} and layerwise={layerwise!r}. Pass for example "
            "fsdp(('node', 'gpu'), layerwise=('layers',), secondary='gpu')."
        )
    own = _Zero("fsdp", axis, layerwise, min_size, rules, uneven, gather, reduce)
    return own.plan(rank=1, whole=("step", "step"), layer=("layer", "layer"), secondary=fast)


@dataclass(frozen=True)
class _Zero:
    """A strategy that splits each leaf over the axes of the batch, with its options as the user passed them."""

    name: str
    axis: Axis
    layerwise: tuple[str, ...]
    min_size: int
    rules: DimRules | None
    uneven: Uneven
    gather: Algorithm
    reduce: Algorithm

    def plan(
        self,
        *,
        rank: int,
        whole: tuple[Gather, Scatter],
        layer: tuple[Gather, Scatter],
        once: bool = False,
        secondary: tuple[str, ...] = (),
    ) -> Plan:
        """Its plan; `whole` and `layer` say when a leaf is gathered and its gradient scattered."""
        at_least(self.name, 0, min_size=self.min_size)
        choose = self._chooser()

        def place(leaf: Leaf) -> Split | str:
            dim = choose(leaf)
            if isinstance(dim, str):
                return dim
            gather, scatter = layer if is_in_subtrees(leaf.path, self.layerwise) else whole
            return Split(
                dim,
                gather,
                scatter,
                once=once,
                pad=self.uneven == "pad",
                stack=is_stacked(leaf.path, self.layerwise),
                secondary=secondary,
            )

        others = tuple(axis for axis in axis_names(self.name, self.axis) if axis not in secondary)
        self.gather.check(self.name, "gather", "all_gather", others)
        self.reduce.check(self.name, "reduce", "reduce_scatter", others)
        return strategy(
            self.name,
            self.axis,
            rank=rank,
            batch_dim=0,
            place=place,
            names=self.layerwise,
            rules=self.rules,
            gather=self.gather,
            reduce=self.reduce,
        )

    def _chooser(self) -> Callable[[Leaf], int | str]:
        """Which dim of a leaf is split, or why none."""
        axes = axis_names(self.name, self.axis)
        dim = None if self.rules is None else make_dim_chooser(self.name, axes, self.rules)
        return partial(self._choose_dim, dim)

    def _choose_dim(self, choose: Callable[[str, tuple[int, ...]], int | None] | None, leaf: Leaf) -> int | str:
        """The dim of a leaf that is split, or in words why none is; `choose` is that of rules that a user gave."""
        if leaf.ways == 1:
            return "the axis has one device"
        if not leaf.shape:
            return "a scalar, which has no dim"
        size = math.prod(leaf.shape)
        if size < self.min_size:
            return f"{size:,} element{'s' * (size != 1)}, fewer than min_size={self.min_size:,}"
        first = 1 if leaf.stack or is_stacked(leaf.path, self.layerwise) else 0  # scan removes dim 0
        candidates = self._find_candidates(leaf, first)
        if choose is not None:
            dim = choose(leaf.path, leaf.shape)
            if dim is None:
                return "no dim was chosen"
            if dim not in candidates:
                self._refuse_chosen_dim(leaf, dim)
            return dim
        if candidates:
            return min(candidates, key=partial(_price, leaf, first))
        if self.uneven == "pad":
            return "no dim is left to pad"
        if self.uneven == "refuse":
            raise ValueError(
                f"{self.name}: one dim of leaf {leaf.path} must be divisible by {self._axes_in_words()}; got shape "
                f"{leaf.shape} over {leaf.ways} devices. Pass uneven='pad' or uneven='replicate'."
            )
        return f"no dim{' except the layer' if first else ''} divides by {leaf.ways}"

    def _find_candidates(self, leaf: Leaf, first: int) -> list[int]:
        """The dims, from the first that may be split, that divide or can be padded.

        Of a stack `[4 layers, 6, 8]` over 4 devices: dim 2, which divides; with uneven="pad" dim 1 too, padded to 8.
        """
        fixed = leaf.split | leaf.automatic  # other strategies split them, and know their sizes
        candidates = []
        for dim in range(first, len(leaf.shape)):
            rows = leaf.shape[dim]
            divides = rows % leaf.ways == 0
            can_be_padded = self.uneven == "pad" and dim not in fixed
            if rows and (divides or can_be_padded):
                candidates.append(dim)
        return candidates

    def _refuse_chosen_dim(self, leaf: Leaf, dim: int) -> NoReturn:
        rule, remedy = "", "Choose another dim, or pass uneven='pad'."
        if self.uneven == "pad":
            rule = " or one that can be padded, which a layer dim, or a dim that another strategy splits, cannot"
            remedy = "Choose another dim."
        raise ValueError(
            f"{self.name}: dim {dim} of leaf {leaf.path} must be divisible by {self._axes_in_words()}{rule}; got shape "
            f"{leaf.shape} over {leaf.ways} devices. {remedy}"
        )

    def _axes_in_words(self) -> str:
        return named(axis_names(self.name, self.axis))


def _price(leaf: Leaf, first: int, dim: int) -> tuple[bool, float, bool, bool, int]:
    """What splitting a dim costs: the factor by which padding lengthens it, then what collectives need."""
    rows = leaf.shape[dim]
    padded = -(-rows // leaf.ways) * leaf.ways
    # The TPU compiler runs a reduce_scatter over a dim in the middle as an all_reduce, of twice the bytes. Over the
    # last dim of a stack, parts are less contiguous: on CPU a reduce_scatter takes 1.4 times as long.
    in_the_middle = first < dim < len(leaf.shape) - 2
    last_of_a_stack = 2 <= dim == len(leaf.shape) - 1
    return dim in leaf.automatic, padded / rows, in_the_middle, last_of_a_stack, -rows

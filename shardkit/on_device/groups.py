"""A step whose bits do not depend on the mesh: the batch in fixed groups, summed in a fixed order.

Group g of G is the g-th part of the global batch. The loss, weight and gradient of each group are computed apart, and
added in the order of the tree in `collectives/deterministic.py`, whichever device has the group. A device adds the
groups of each subtree (a run of groups) that it has whole, and sends one partial sum for it. If the number of its
groups is a power of two, all of them are one subtree.

Worked example: 8 groups on 2 devices. Device 0 has groups 0 to 3, one subtree: it adds (0 + 1) + (2 + 3), and sends
that sum. On 8 devices each sends its one group, and on 1 device the whole tree is added: the same additions in all
cases. Of 12 groups a device has 6, three subtrees of 2 groups, so it sends three sums.

A fixed order of the sums is not enough. A compiler fuses a product with the addition that uses it, without rounding the
product, and which of two products it takes depends on the code around them. On one device, without collectives, the
update of Adam was fused with the reshapes of the gradient, and its moments differed from the moments on two devices
after three steps (jax 0.10, CPU). So the code that multiplies and adds is compiled apart, in the same way on every
mesh:

- A group is computed in the branch of a conditional that is always taken; the compiler cannot know that. A loop around
  it would not work: on as many devices as groups its length is 1, and the compiler inlines it.
- The optimizer is the body of a loop of one turn; again the compiler cannot know that. A loop updates its state in
  place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from shardkit._arguments.checks import at_least, name_axes, quote
from shardkit._jax import compat
from shardkit._jax.jaxprs import PLAN, communicates, walk
from shardkit.collectives import vary
from shardkit.collectives.algorithms import PLAIN
from shardkit.collectives.axes import axis_size
from shardkit.collectives.deterministic import sum_pairwise, sum_pieces
from shardkit.meshes.layout import all_axes, count_devices, path_name, spec_axes
from shardkit.on_device.batch import example_axes, split_microbatches
from shardkit.on_device.means import divisor_of
from shardkit.on_device.metrics import sum_means_of_groups
from shardkit.on_device.microbatches import (
    ComputeSums,
    ComputeSumsOfLeaves,
    Leaves,
    TracedFunction,
    split_leaves,
)
from shardkit.on_device.precision import Precision
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.splits import Cuts, LeafLayout, is_layout, map_layouts
from shardkit.plans.storage import wrap_stored

_PRODUCTS = ("dot_general", "conv_general")
_SUMS = ("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "scatter-add")


class Groups(NamedTuple):
    """The batch in a number of groups, in place of `Microbatches`."""

    number: int  # of the whole batch
    parts: int = 0  # of one device; 0 until `for_batch`

    @property
    def words(self) -> str:
        """The option that asks for groups, as errors name it."""
        return "deterministic"

    def check(self, accumulate: int, plan: Plan, mesh: Mesh, reduce: Any) -> None:
        """Refuses options and plans that cannot give the same bits on every mesh, before anything is traced."""
        at_least("make_train_step", 1, deterministic=self.number)
        rule = f"make_train_step: with deterministic={self.number}"
        if accumulate > 1:
            raise ValueError(
                f"{rule} the groups are the microbatches; got accumulate={accumulate} too. Leave accumulate at 1, "
                "and pass more groups for smaller microbatches."
            )
        if jnp.dtype(reduce) != jnp.float32:
            raise ValueError(
                f"{rule} gradients are summed in float32; got a precision with reduce={jnp.dtype(reduce).name}. "
                "Pass one with reduce=jnp.float32."
            )
        for strategy in plan.strategies:
            if strategy.batch_dim != 0:
                raise ValueError(
                    f"{rule} every strategy must split the examples of the batch, because sums inside the loss "
                    f"depend on the mesh; {strategy.name} does not. Use dp, zero1 and fsdp alone."
                )
            for argument, algorithm in (("gather", strategy.gather), ("reduce", strategy.reduce)):
                if algorithm is not PLAIN:
                    raise ValueError(
                        f"{rule} the step fixes the order of its sums; {strategy.name} has {argument}={algorithm}. "
                        f"Leave out {argument}=."
                    )
        axes = example_axes(plan.batch_spec(mesh))
        devices = count_devices(mesh, axes)
        if self.number % devices:
            raise ValueError(
                f"make_train_step: deterministic must be a multiple of the devices that split the batch; got "
                f"{self.number} groups over {devices} devices of {name_axes(axes)}. Pass for example "
                f"deterministic={devices}, on every mesh that is to have the same bits."
            )

    def for_batch(self, batch: Any, placement: Placement) -> Groups:
        """The groups with `parts`, the number of groups that a device has of this batch.

        Raises:
            ValueError: a batch that the groups do not divide, or a leaf whose gradient is not summed once per step.
        """
        for path, layout in jax.tree_util.tree_leaves_with_path(placement.layouts, is_leaf=is_layout):
            if any(split.scatter != "step" for split in layout.splits):
                raise ValueError(
                    "make_train_step: with deterministic= every gradient must be summed at the end of the step; the "
                    f"gradient of leaf {path_name(path)} is not. Use dp, zero1, or fsdp without layerwise=."
                )
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            if jnp.ndim(x) and jnp.shape(x)[0] % self.number:
                raise ValueError(
                    f"make_train_step: batch dim 0 must be divisible by deterministic; leaf {path_name(path)} has "
                    f"size {jnp.shape(x)[0]} over {self.number} groups. Choose another size, or pad with examples of "
                    "weight 0."
                )
        devices = count_devices(placement.mesh, example_axes(placement.batch))
        return self._replace(parts=self.number // devices)

    def hide_scale(self, scale: jax.Array, step: jax.Array) -> jax.Array:
        """The factor on the gradients inside the GradFn, which the compiler cannot take for a constant."""
        # A step is never below 0, but the compiler cannot know it.
        return jnp.where(step < 0, 0.0, scale)

    def sum_examples(
        self, compute_sums: ComputeSums, batch: Any, keys: jax.Array, scale: jax.Array, placement: Placement
    ) -> Any:
        """The Means and gradients of each subtree of this device's groups, `[runs, ...]` in float32."""
        compute_sums_of_group, leaves = split_leaves(compute_sums, batch, keys, self.parts)
        return sum_groups(compute_sums_of_group, leaves, scale > 0, example_axes(placement.batch))

    def leave(
        self, means: Any, grads: Any, placement: Placement, policy: Precision, scale: jax.Array, residuals: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        """The means over all devices, the gradients in the layout of the update, and the residuals as they were.

        Cost: for each leaf an all_to_all over the axes of the batch, and an all_gather over those of them that do not
            split its update: the bytes of a reduce_scatter and all_reduce, if a device's groups are a power of two.
        """
        axes = example_axes(placement.batch)
        means = sum_means_of_groups(means, axes)
        divisor = divisor_of(means["loss"].weight) * scale

        def leave_leaf(layout: LeafLayout, grad: jax.Array) -> Any:
            grad = _sum_in_order(grad, layout.cuts(scatter=("step",)), axes)
            return wrap_stored(grad / divisor, layout.padded, layout.rows)

        return means, map_layouts(leave_leaf, placement.layouts, grads), residuals

    def update_apart(
        self,
        update: Callable[[Any, Any], Any],
        inputs: Any,
        old: Any,
        *,
        step: jax.Array,
        specs: Any,
        words: tuple[str, str],
    ) -> Any:
        """`update(inputs, old)`, the new parameters and optimizer state, compiled apart.

        The inputs, such as gradients, are in the loop's carry, and a turn replaces them by zeros. If a turn left them
        as they were, the compiler would move what is computed from them out of the loop, and fuse it with other code.

        Refuses a function that multiplies matrices, or that sums over elements while a leaf is split by `specs`, the
        layouts of the parameters. `words` name the function in the error, and say what to use instead.
        """
        function, remedy = words
        _check_update(jax.make_jaxpr(update)(inputs, old).jaxpr, specs, function, remedy)

        def run_update(_: Any, carry: Any) -> Any:
            inputs, old = carry
            return jax.tree.map(jnp.zeros_like, inputs), update(inputs, old)

        # Always one turn, again unknown to the compiler: with the constant 1 it would inline the body.
        turns = jnp.where(step < 0, 0, 1)
        _, new = lax.fori_loop(0, turns, run_update, (inputs, old))
        return new


def _check_update(jaxpr: Any, specs: Any, function: str, remedy: str) -> None:
    """Refuses an update with sums whose order depends on the compiler or on the mesh."""
    split_leaves = []
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        if any(spec_axes(spec)):
            split_leaves.append((path_name(path), spec))
    for site in walk(jaxpr):
        # A scalar has nothing to sum.
        if all(math.prod(variable.aval.shape) <= 1 for variable in site.equation.invars):
            continue
        if site.name.startswith(_PRODUCTS):  # Newton-Schulz on one device was other bits than on two
            raise ValueError(
                f"make_train_step: with deterministic= {function} must not multiply matrices, because the compiler "
                f"orders their sums by the program around them; got {site.name}. Leave out deterministic=, or use "
                "one without it."
            )
        if split_leaves and site.name.startswith(_SUMS):
            name, spec = split_leaves[0]
            raise ValueError(
                f"make_train_step: with deterministic= {function} that sums over elements ({site.name}) must have "
                f"whole leaves, because the order of its sums depends on the mesh; leaf {name} is split over "
                f"{quote(sorted(all_axes(spec)))}. {remedy}"
            )


def sum_groups(compute_sums: ComputeSumsOfLeaves, leaves: Leaves, always: jax.Array, axes: tuple[str, ...]) -> Any:
    """The sums of this device's groups in float32, `[runs, ...]`: dim 0 counts the device's subtrees.

    `compute_sums` makes the Means and gradients of one group from its arrays, of the batch and the keys. `leaves` are
    the arrays of all groups, with the group as dim 0. `always` is a boolean scalar that is True, and not a constant.
    """
    traced = TracedFunction(compute_sums, [x[0] for x in leaves])
    _check_local(traced.jaxpr)

    def compute_group(group: Leaves) -> Any:
        return jax.tree.map(lambda x: vary(x.astype(jnp.float32), axes), traced(group))

    def make_zeros(_: Any = None) -> Any:
        return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, jnp.float32), axes), traced.shapes)

    def sum_tree(leaves: Leaves) -> Any:
        """The sum of a power of two of groups, as a tree: the sum of the first half plus the sum of the second half."""
        if len(leaves[0]) == 1:
            group = [x[0] for x in leaves]
            return lax.cond(always, compute_group, make_zeros, group)

        def add_half(total: Any, turn: Any) -> tuple[Any, None]:
            is_first, half = turn

            def add(total: jax.Array, term: jax.Array) -> jax.Array:
                return jnp.where(is_first, term, total + term)

            return jax.tree.map(add, total, sum_tree(half)), None

        halves = split_microbatches(leaves, 2)
        is_first = jnp.array([True, False])
        total, _ = lax.scan(add_half, make_zeros(), (is_first, halves))
        return total

    count = len(leaves[0])
    run = count & -count  # the largest power of two that divides it: 4 of 12 groups
    if count == run:
        return jax.tree.map(lambda x: x[None], sum_tree(leaves))
    return lax.map(sum_tree, split_microbatches(leaves, count // run))


@jax.named_scope(PLAN)
def _sum_in_order(x: jax.Array, cuts: Cuts, axes: tuple[str, ...]) -> jax.Array:
    """The sum over dim 0 of all devices' `[runs, ...]`; each device keeps its part of the sum by these cuts."""
    # Worked example: x[runs, 8, 6] over "data" of 2 and "fsdp" of 4, of which "fsdp" cuts the 8 rows.
    #   [runs, 8, 6] -> [runs, 4, 2, 6]       the 8 rows are 4 parts of 2
    #                -> [4, runs, 2 * 6]      the axis that cuts in front, and a part as one row of 12 elements
    #                -> [4, 2, runs, 6]       "data" cuts nothing: its 2 devices share the row, 2 pieces of 6
    #                -> [2, 4, runs, 6]       in the order of the axes: a piece for each of the 8 devices
    # Each device gets its piece from all devices, [8, runs, 6], sums them in order, and gathers the two pieces of its
    # part over "data": [12] -> [2, 6].
    if not axes:
        return sum_pairwise(x)
    x, cut_axes = _move_parts_to_front(x, cuts, axes)
    shared_axes = tuple(axis for axis in axes if axis not in cut_axes)
    part_shape = x.shape[len(cut_axes) + 1 :]
    size = math.prod(part_shape)
    if not size:  # jax refuses to gather empty arrays
        return jnp.zeros(part_shape, x.dtype)
    counts = [axis_size(axis) for axis in shared_axes]
    pieces = _split_parts(x, counts, len(cut_axes))
    front_axes = (*cut_axes, *shared_axes)
    order = [front_axes.index(axis) for axis in axes]
    pieces = jnp.transpose(pieces, (*order, len(axes), len(axes) + 1))
    pieces = pieces.reshape(-1, *pieces.shape[-2:])
    # An all_to_all and a sum in a fixed order stand in place of a reduce_scatter, whose order of additions is the
    # backend's choice and changes with the number of devices. The bytes are the same.
    total = sum_pieces(pieces, axes)
    if shared_axes:
        total = compat.all_gather_replicated(total, shared_axes, 0)
    return total[:size].reshape(part_shape)


def _move_parts_to_front(x: jax.Array, cuts: Cuts, axes: tuple[str, ...]) -> tuple[jax.Array, list[str]]:
    """`[runs, ...]` as `[size of each axis that cuts.., runs, part..]`, padded where it must be; these axes."""
    axes_by_dim = {}
    for cut in cuts:
        axes_by_dim[cut.dim] = [axis for axis in cut.axes if axis in axes]
    shape = [len(x)]
    widths = [(0, 0)]
    dim_by_axis: dict[str, int] = {}  # the dim that counts the parts over an axis
    for dim, size in enumerate(x.shape[1:]):
        parts = 1
        for axis in axes_by_dim.get(dim, []):
            dim_by_axis[axis] = len(shape)
            shape.append(axis_size(axis))
            parts *= axis_size(axis)
        widths.append((0, -size % parts))
        shape.append(-(-size // parts))
    x = jnp.pad(x, widths).reshape(shape)
    x = jnp.moveaxis(x, list(dim_by_axis.values()), range(len(dim_by_axis)))
    return x, list(dim_by_axis)


def _split_parts(x: jax.Array, counts: Sequence[int], runs_dim: int) -> jax.Array:
    """`[.., runs, part..]` as `[.., counts.., runs, piece]`, padded where it must be; `runs_dim` counts the runs."""
    front = x.shape[: runs_dim + 1]
    size = math.prod(x.shape[runs_dim + 1 :])
    x = x.reshape(*front, size)
    widths = [(0, 0)] * len(front)
    widths.append((0, -size % math.prod(counts)))
    x = jnp.pad(x, widths)
    x = x.reshape(*front, *counts, -1)
    return jnp.moveaxis(x, runs_dim, -2)


def _check_local(jaxpr: Any) -> None:
    """Refuses a loss that depends on other devices."""
    collective = communicates(jaxpr)
    if collective:
        raise ValueError(
            f"make_train_step: with deterministic= the loss must not depend on the mesh; it calls {collective}. Return "
            "Mean(total, weight) of the examples that it gets, and let the step sum it."
        )

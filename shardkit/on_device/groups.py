"""A step whose bits do not depend on the mesh: the batch in fixed groups, summed in a fixed order.

Group g of G is the g-th part of the global batch. The loss, weight and gradient of each group are computed on their
own, and added in the tree's order of `collectives/deterministic.py`, whichever device has them. A device adds the runs
of its groups that are subtrees, and sends one partial sum for each: one, if its groups are a power of two.

That is not enough. A compiler fuses a product with the addition that uses it, without rounding the product, and which
of two products it takes depends on the code around them: on one device, without collectives, the update of Adam was
fused with the reshapes of the gradient, and its moments differed from those on two devices after three steps (jax 0.10,
CPU). So what multiplies and adds is compiled separately, in the same way on every mesh:

- a group is the branch of a conditional that is always taken, which the compiler cannot know. A loop around it would
  not work: one of length 1, on as many devices as groups, is inlined;
- the optimizer is the body of a loop of one turn, which again the compiler cannot know. A loop updates its state in
  place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from shardkit._arguments.checks import at_least, named, quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import PLAN, communicates, walk
from shardkit.collectives import vary
from shardkit.collectives.algorithms import PLAIN
from shardkit.collectives.axes import axis_size
from shardkit.collectives.deterministic import pairwise, sum_of_pieces
from shardkit.meshes.layout import all_axes, path_name, spec_axes
from shardkit.on_device.batch import split_microbatches, split_over
from shardkit.on_device.gradient import divisor_of
from shardkit.on_device.metrics import means_of_groups
from shardkit.on_device.microbatches import OfExamples, of_arrays
from shardkit.on_device.precision import Precision
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.splits import Cuts, LeafLayout, is_layout, map_layouts
from shardkit.plans.storage import wrap_stored

Leaves = list[jax.Array]
_PRODUCTS = ("dot_general", "conv_general")
_SUMS = ("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "scatter-add")


class Groups(NamedTuple):
    """The batch in a number of groups, in place of `Microbatches`."""

    number: int  # of the whole batch
    parts: int = 0  # of one device; 0 until `placed`

    @property
    def words(self) -> str:
        """The option that asks for it, for errors."""
        return "deterministic"

    def check(self, accumulate: int, plan: Plan, mesh: Mesh, reduce: Any) -> None:
        """Refuses what cannot have the same bits on every mesh, before anything is traced."""
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
        for s in plan.strategies:
            if s.batch_dim != 0:
                raise ValueError(
                    f"{rule} every strategy must split the examples of the batch, because sums inside the loss "
                    f"depend on the mesh; {s.name} does not. Use dp, zero1 and fsdp alone."
                )
            for argument, algorithm in (("gather", s.gather), ("reduce", s.reduce)):
                if algorithm is not PLAIN:
                    raise ValueError(
                        f"{rule} the step fixes the order of its sums; {s.name} has {argument}={algorithm}. Leave "
                        f"out {argument}=."
                    )
        axes = split_over(plan.batch_spec(mesh))
        devices = math.prod(mesh.shape[axis] for axis in axes)
        if self.number % devices:
            raise ValueError(
                f"make_train_step: deterministic must be a multiple of the devices that split the batch; got "
                f"{self.number} groups over {devices} devices of {named(axes)}. Pass for example "
                f"deterministic={devices}, on every mesh that is to have the same bits."
            )

    def placed(self, batch: Any, placement: Placement) -> Groups:
        """With the number of `parts` that a device has of this batch.

        Raises:
            ValueError: a batch that the groups do not divide, or a leaf whose gradient is not summed once per step.
        """
        for path, layout in jax.tree_util.tree_leaves_with_path(placement.layouts, is_leaf=is_layout):
            if any(s.scatter != "step" for s in layout.splits):
                raise ValueError(
                    "make_train_step: with deterministic= every gradient must be summed at the end of the step; that "
                    f"of leaf {path_name(path)} is not. Use dp, zero1, or fsdp without layerwise=."
                )
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            if jnp.ndim(x) and jnp.shape(x)[0] % self.number:
                raise ValueError(
                    f"make_train_step: batch dim 0 must be divisible by deterministic; leaf {path_name(path)} has "
                    f"size {jnp.shape(x)[0]} over {self.number} groups. Choose another size, or pad with examples of "
                    "weight 0."
                )
        devices = math.prod(placement.mesh.shape[axis] for axis in split_over(placement.batch))
        return self._replace(parts=self.number // devices)

    def unfolded(self, scale: jax.Array, step: jax.Array) -> jax.Array:
        """The factor on the gradients inside the GradFn, which the compiler cannot take for a constant."""
        return jnp.where(step < 0, 0.0, scale)

    def of(self, of_examples: OfExamples, batch: Any, keys: jax.Array, scale: jax.Array, placement: Placement) -> Any:
        """The Means and gradients of each subtree that a device's groups are, `[runs, ...]` in float32."""
        call, arrays = of_arrays(of_examples, batch, keys, self.parts)
        return sums_of_groups(call, arrays, scale > 0, split_over(placement.batch))

    def leave(
        self, means: Any, grads: Any, placement: Placement, policy: Precision, scale: jax.Array, residuals: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        """The means over all devices, the gradients in the layout of the update, and the residuals as they were.

        Cost: for each leaf an all_to_all over the axes of the batch, and an all_gather over those of them that do not
            split its update: the bytes of a reduce_scatter and all_reduce, if a device's groups are a power of two.
        """
        axes = split_over(placement.batch)
        means = means_of_groups(means, axes)
        divisor = divisor_of(means["loss"].weight) * scale

        def one(layout: LeafLayout, grad: jax.Array) -> Any:
            grad = _summed(grad, layout.cuts(scatter=("step",)), axes)
            return wrap_stored(grad / divisor, layout.padded, layout.rows)

        return means, map_layouts(one, placement.layouts, grads), residuals

    def apart(
        self,
        update: Callable[[Any, Any], Any],
        given: Any,
        held: Any,
        *,
        step: jax.Array,
        specs: Any,
        what: tuple[str, str],
    ) -> Any:
        """`update(given, held)`, of what changes in a step, such as parameters and optimizer state, compiled apart.

        What is given, such as gradients, is carried and zeroed: the compiler would take out of the loop, and fuse with
        other code, whatever follows from what a turn leaves as it was.

        It refuses a function that multiplies matrices, or sums over elements where a leaf is split by `specs`, the
        layouts of the parameters here; `what` are its words for the function, and for what to use instead of it.
        """
        leaves = jax.tree_util.tree_leaves_with_path(specs)
        split = [(path_name(path), spec) for path, spec in leaves if any(spec_axes(spec))]
        for site in walk(jax.make_jaxpr(update)(given, held).jaxpr):
            wide = any(math.prod(v.aval.shape) > 1 for v in site.equation.invars)
            if wide and site.name.startswith(_PRODUCTS):  # Newton-Schulz on one device was other bits than on two
                raise ValueError(
                    f"make_train_step: with deterministic= {what[0]} must not multiply matrices, because the compiler "
                    f"orders their sums by the program around them; got {site.name}. Leave out deterministic=, or use "
                    "one without it."
                )
            if wide and split and site.name.startswith(_SUMS):
                path, spec = split[0]
                raise ValueError(
                    f"make_train_step: with deterministic= {what[0]} that sums over elements ({site.name}) must have "
                    f"whole leaves, because the order of its sums depends on the mesh; leaf {path} is split over "
                    f"{quoted(sorted(all_axes(spec)))}. {what[1]}"
                )

        def turn(_: Any, carried: Any) -> Any:
            given, held = carried
            return jax.tree.map(jnp.zeros_like, given), update(given, held)

        return lax.fori_loop(0, jnp.where(step < 0, 0, 1), turn, (given, held))[1]


def sums_of_groups(call: Callable[[Leaves], Any], arrays: Leaves, always: jax.Array, axes: tuple[str, ...]) -> Any:
    """The sums of this device's groups in float32, `[runs, ...]`: dim 0 counts the subtrees that it has.

    `call` makes the Means and gradients of one group, from arrays of the batch and its keys whose dim 0 is the group;
    `always` is a boolean scalar that is True, and not a constant.
    """
    one = [x[0] for x in arrays]
    shapes = _local(call, one)

    def wide(group: Leaves) -> Any:
        return jax.tree.map(lambda x: vary(x.astype(jnp.float32), axes), call(group))

    def zeros() -> Any:
        return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, jnp.float32), axes), shapes)

    def tree(arrays: Leaves) -> Any:
        if len(arrays[0]) == 1:
            group = [x[0] for x in arrays]
            return lax.cond(always, wide, lambda _: zeros(), group)

        def add(first_half: Any, each: Any) -> tuple[Any, None]:
            first, half = each
            return jax.tree.map(lambda a, b: jnp.where(first, b, a + b), first_half, tree(half)), None

        return lax.scan(add, zeros(), (jnp.array([True, False]), split_microbatches(arrays, 2)))[0]

    count = len(arrays[0])
    run = count & -count  # the largest power of two that divides it
    if count == run:
        return jax.tree.map(lambda x: x[None], tree(arrays))
    return lax.map(tree, split_microbatches(arrays, count // run))


@jax.named_scope(PLAN)
def _summed(x: jax.Array, cuts: Cuts, axes: tuple[str, ...]) -> jax.Array:
    """The sum over dim 0 of all devices' `[runs, ...]`, of which each device keeps its part by these cuts."""
    if not axes:
        return pairwise(x)
    ways = {axis: axis_size(axis) for axis in axes}
    over = {cut.dim: [axis for axis in cut.axes if axis in ways] for cut in cuts}
    shape, widths = [len(x)], [(0, 0)]
    found: dict[str, int] = {}  # the dim that counts the parts over an axis
    for dim, size in enumerate(x.shape[1:]):
        parts = math.prod(ways[axis] for axis in over.get(dim, ()))
        widths.append((0, -size % parts))
        for axis in over.get(dim, ()):
            found[axis] = len(shape)
            shape.append(ways[axis])
        shape.append(-(-size // parts))
    cut = list(found)
    rest = tuple(axis for axis in axes if axis not in found)
    x = jnp.moveaxis(jnp.pad(x, widths).reshape(shape), [found[axis] for axis in cut], range(len(cut)))
    part = x.shape[len(cut) + 1 :]
    size, count = math.prod(part), math.prod(ways[axis] for axis in rest)
    if not size:  # jax refuses to gather empty arrays
        return jnp.zeros(part, x.dtype)
    x = x.reshape(*x.shape[: len(cut) + 1], size)
    x = jnp.pad(x, [(0, 0)] * (len(cut) + 1) + [(0, -size % count)])
    x = x.reshape(*x.shape[:-1], *(ways[axis] for axis in rest), -1)
    x = jnp.moveaxis(x, len(cut), -2)  # [cut axes, remaining axes, runs, piece]
    given = (*cut, *rest)
    x = jnp.transpose(x, (*(given.index(axis) for axis in axes), len(axes), len(axes) + 1))
    # An all_to_all and a sum in a fixed order, in place of a reduce_scatter: the order in which a reduction adds is the
    # backend's choice, and another one for each number of devices. The bytes are the same.
    total = sum_of_pieces(x.reshape(-1, *x.shape[-2:]), axes)
    if rest:
        total = compat.all_gather_replicated(total, rest, 0)
    return total[:size].reshape(part)


def _local(call: Callable[[Leaves], Any], group: Leaves) -> Any:
    """The shapes of what a group computes, after a check that it does not depend on other devices."""
    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(group)
    if found := communicates(jaxpr.jaxpr):
        raise ValueError(
            f"make_train_step: with deterministic= the loss must not depend on the mesh; it calls {found}. Return "
            "Mean(total, weight) of the examples that it gets, and let the step sum it."
        )
    return shapes

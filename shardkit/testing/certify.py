"""Certifies gradient code, or names the axis over which gradients are over- or under-reduced."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import axis_names, format_sizes, name_axes
from shardkit._arguments.typed import Arrays, Specs, typed
from shardkit.collectives import vary
from shardkit.meshes.layout import all_axes, broadcast_specs, check_axes, check_spec, path_name, spec_axes
from shardkit.meshes.mesh import make_mesh
from shardkit.testing._compare import (
    check_conclusive,
    check_relative,
    constant_factor,
    distance,
    format_factor,
    is_float,
    magnitude,
    replace_none,
)
from shardkit.testing._interpreter import add_mesh_dims, split_shards


class Certificate(NamedTuple):
    """The meshes on which the gradients equal the reference.

    Attributes:
        meshes: axis name and size of each.
        leaves: the number of gradient leaves.
    """

    meshes: tuple[dict[str, int], ...]
    leaves: int

    def __str__(self) -> str:
        meshes = "; ".join(format_sizes(sizes.items()) for sizes in self.meshes)
        return f"the gradients of {self.leaves} leaves are those of one device on {len(self.meshes)} meshes: {meshes}"


@typed
def certify_gradients(
    grad_fn: Callable[[Any, Any], Any],
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Arrays,
    batch: Arrays,
    *,
    axes: str | Sequence[str] = ("data",),
    batch_spec: Specs | None = None,
    param_specs: Specs | None = None,
    devices: int | None = None,
    relative: float = 1e-4,
    check_vma: bool = True,
) -> Certificate:
    """Proves a per-device gradient function on every mesh over your axes, or names the axis with a wrong reduction.

    `grad_fn` runs inside shard_map on every mesh that fits: its number of devices divides `devices`, and its axes
    divide the arrays. The gradients on every device must equal the gradients on one device.

    Args:
        grad_fn: `(params, batch) -> grads` on local arrays, the gradients like the local parameters.
        loss_fn: `(params, batch) -> scalar` on one device, over the whole batch; its gradient is the reference.
        params: the parameters, a pytree of global arrays.
        batch: the global batch, a pytree of arrays.
        axes: names of the mesh axes, or one name.
        batch_spec: one PartitionSpec, or a pytree of them, where None is `P()`; by default dim 0 is split over
            `axes[0]`, and scalars are replicated.
        param_specs: the layout of the parameters that `grad_fn` gets, in the same form; by default replicated.
        devices: the number of devices to use; by default all.
        relative: the largest difference, relative to the largest magnitude in the leaf.
        check_vma: pass False if you wrote the function for `jax.shard_map(..., check_vma=False)`. jax then does not sum
            the gradient of a replicated value, and `pmean(jax.grad(loss))` is right.

    Returns:
        Certificate: the list of proved meshes; print it.

    Raises:
        AssertionError: a gradient that differs from the reference. The message names the axis and the factor.
        ValueError: no mesh of two or more devices fits the arrays; an axis named twice; a spec with another axis; fewer
            than two devices, or more than there are.
        TypeError: an integer parameter, or axes that are not names.

    Example:
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> gradient = lambda w, x: sk.all_reduce(jax.grad(loss)(sk.vary(w, "data"), x), "data", op="mean")
        >>> certificate = sk.testing.certify_gradients(gradient, loss, np.ones(3, "f"), np.ones((8, 3), "f"), devices=2)
        >>> certificate.meshes
        ({'data': 1}, {'data': 2})
    """
    __tracebackhide__ = True
    if not isinstance(axes, str):
        axes = tuple(axes)
    axes = axis_names("certify_gradients", axes)
    count = _count_devices(devices)
    check_relative("certify_gradients", relative)
    _check_params(params)
    if batch_spec is None:
        batch_spec = jax.tree.map(partial(_split_examples, axes[0]), batch)
    arguments = (params, batch)
    specs = _complete_specs(param_specs, batch_spec, arguments, axes)
    expected = jax.tree.map(np.asarray, jax.grad(loss_fn)(params, batch))
    check_conclusive("certify_gradients", expected)
    proved: list[dict[str, int]] = []
    mistakes: list[_Mistake] = []
    for sizes in _list_meshes(axes, count):
        divides = jax.tree.map(partial(_divides, sizes), arguments, specs)
        if not all(jax.tree.leaves(divides)):
            continue
        grads = _compute_gradients(grad_fn, arguments, sizes, specs, check_vma)
        expected_shards = jax.tree.map(partial(_split_gradient, sizes), expected, specs[0])
        mistakes_of_mesh = _diagnose(grads, expected_shards, sizes, relative)
        if mistakes_of_mesh:
            mistakes += mistakes_of_mesh
        else:
            proved.append(sizes)
    if mistakes:
        raise AssertionError(_report(mistakes))
    # On a mesh of one device every reduction is the identity, so that it alone proves nothing.
    device_counts = [math.prod(sizes.values()) for sizes in proved]
    if max(device_counts, default=0) <= 1:
        raise ValueError(
            f"certify_gradients: the batch and the parameters must be divisible by {name_axes(tuple(axes))}; they fit "
            f"no mesh of 2 to {count} devices. Pass larger arrays or other specs."
        )
    return Certificate(tuple(proved), len(jax.tree.leaves(expected)))


def _split_examples(axis: str, x: Any) -> PartitionSpec:
    """The spec of a leaf of the batch where the caller names none: its examples over the axis."""
    if np.ndim(x):
        return PartitionSpec(axis)
    return PartitionSpec()


def _check_params(params: Any) -> None:
    """Refuses parameters without a gradient."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not is_float(x):
            raise TypeError(
                f"certify_gradients: the parameters must be floating-point numbers; leaf {path_name(path)} is "
                f"{jnp.result_type(x)}. Move it to the batch, or close over it."
            )


def _complete_specs(param_specs: Any, batch_spec: Any, arguments: Any, axes: Sequence[str]) -> Any:
    """A spec for each leaf of the arguments, (params, batch); refuses specs that do not fit them."""
    params, batch = arguments
    param_specs = replace_none(param_specs)
    batch_spec = replace_none(batch_spec)
    check_axes("certify_gradients", (batch_spec, param_specs), axes)
    # Each leaf gets its own spec here, so that all that follows is one `jax.tree.map` over arguments and specs.
    specs = (broadcast_specs(param_specs, params), broadcast_specs(batch_spec, batch))
    # Whether a spec fits an array's dims does not depend on the sizes of the axes.
    mesh: Any = jax.sharding.AbstractMesh((1,) * len(axes), tuple(axes))

    def check_leaf(x: Any, spec: PartitionSpec) -> None:
        check_spec("certify_gradients", spec, mesh, np.ndim(x))

    jax.tree.map(check_leaf, arguments, specs)
    return specs


def _count_devices(devices: int | None) -> int:
    """How many devices to use."""
    available = len(jax.devices())
    count = devices
    if count is None:
        count = available
    if not 2 <= count <= available:
        raise ValueError(
            f"certify_gradients: devices must be between 2 and the number of devices, {available}; got {count}. "
            f"Pass another number, or call simulate_devices({max(count, 2)}) before jax starts."
        )
    return count


class _Mistake(NamedTuple):
    """A wrong leaf on one mesh, described in words."""

    path: str
    sizes: dict[str, int]
    text: str

    @property
    def split_axes(self) -> frozenset[str]:
        """The axes of several devices."""
        return frozenset(name for name, size in self.sizes.items() if size > 1)

    @property
    def simplicity(self) -> tuple[int, int]:
        """A key for sorting: few axes first, then large meshes, because a factor of 8 is clearer than a factor of 2."""
        return (len(self.split_axes), -math.prod(self.sizes.values()))


def _list_meshes(axes: Sequence[str], count: int) -> list[dict[str, int]]:
    """Every mesh over the axes whose number of devices divides `count`, small meshes first."""
    meshes = []
    for sizes in sorted(factorizations(count, len(axes)), key=math.prod):
        if count % math.prod(sizes) == 0:
            meshes.append(dict(zip(axes, sizes, strict=True)))
    return meshes


def factorizations(devices: int, k: int) -> list[tuple[int, ...]]:
    """Every tuple of k sizes with a product of at most `devices`; of 2 devices and k=2: (1, 1), (1, 2), (2, 1)."""
    if k == 1:
        return [(n,) for n in range(1, devices + 1)]
    tuples = []
    for n in range(1, devices + 1):
        for minor_sizes in factorizations(devices // n, k - 1):
            tuples.append((n, *minor_sizes))
    return tuples


def _divides(sizes: dict[str, int], x: Any, spec: PartitionSpec) -> bool:
    """Whether the axes of a mesh divide the dims that they split."""
    # A spec may have fewer entries than the array has dims. No axis splits the others.
    for size, axes in zip(np.shape(x), spec_axes(spec), strict=False):
        pieces = math.prod(sizes[axis] for axis in axes)
        if size % pieces:
            return False
    return True


def _compute_gradients(
    grad_fn: Callable[[Any, Any], Any], arguments: Any, sizes: dict[str, Any], specs: Any, check_vma: bool
) -> Any:
    """The gradients on every device: arrays [*sizes, *local shape]."""
    names = tuple(sizes)
    mesh = make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)

    def run_device(params: Any, batch: Any) -> Any:
        grads = grad_fn(params, batch)
        if check_vma:  # out_specs stack over every axis, also where a gradient is the same
            grads = vary(grads, names)
        return add_mesh_dims(grads, len(names))

    mapped = jax.shard_map(run_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(*names), check_vma=check_vma)
    return jax.jit(mapped)(*arguments)


def _split_gradient(sizes: dict[str, int], x: np.ndarray, spec: PartitionSpec) -> np.ndarray:
    """A gradient of the reference as each device should hold it: [*sizes, *local shape].

    For example, [8, 6] with spec P("data") on data=2, model=4 is split to [2, 4, 6], and repeated to [2, 4, 4, 6].
    """
    shards = split_shards(x, spec, sizes)
    split_axes = all_axes(spec)
    missing_dims = [dim for dim, name in enumerate(sizes) if name not in split_axes]
    shards = np.expand_dims(shards, missing_dims)
    mesh_shape = tuple(sizes.values())
    local_shape = shards.shape[len(sizes) :]
    return np.broadcast_to(shards, mesh_shape + local_shape)


def _diagnose(grads: Any, expected: Any, sizes: dict[str, int], relative: float) -> list[_Mistake]:
    """The wrong leaves of one mesh; gradients and the reference are [*sizes, *local shape]."""
    actual_paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    if actual_paths != paths:
        raise AssertionError(
            "certify_gradients: the gradients must be a pytree like the parameters; got "
            f"{jax.tree.structure(grads)}. Return one gradient for each parameter."
        )
    mistakes = []
    actual_leaves = jax.tree.leaves(grads)
    expected_leaves = jax.tree.leaves(expected)
    overall = max(map(magnitude, expected_leaves), default=0.0)
    for path, x, y in zip(paths, actual_leaves, expected_leaves, strict=True):
        x = np.asarray(x)
        if x.shape != y.shape:
            local_dims = slice(len(sizes), None)
            text = f"have shape {x.shape[local_dims]} on each device where the parameters have {y.shape[local_dims]}"
            mistakes.append(_Mistake(path_name(path), sizes, text))
            continue
        # Where the true gradient of a leaf is zero, as of a shift of all logits, the leaf holds rounding alone. A share
        # of the largest gradient allows for it.
        allowed = relative * max(magnitude(y), 1e-3 * overall)
        if np.max(distance(x, y), initial=0.0) > allowed:
            mistakes.append(_Mistake(path_name(path), sizes, _describe_mistake(x, y, sizes, relative)))
    return mistakes


def _describe_mistake(x: np.ndarray, y: np.ndarray, sizes: dict[str, int], relative: float) -> str:
    """How gradients x differ from y, both [*sizes, *local shape]: by a factor, between devices, or otherwise."""
    near = relative * max(magnitude(x), magnitude(y))
    unreduced = _find_unreduced(x, y, len(sizes), near)
    factor = constant_factor(x, y)
    if unreduced:
        return _describe_unreduced(x, y, unreduced, sizes, near)
    if factor is not None:
        return f"are {format_factor(factor)} the reference: {_explain_factor(factor, sizes)}"
    if not np.isfinite(x).all():
        return "are not finite where the reference is"
    gap = distance(x, y)
    worst = np.unravel_index(int(np.argmax(gap)), x.shape)
    text = (
        "differ from the reference, by no common factor: the largest difference is "
        f"{float(gap[worst]):.3g}, where it is {x[worst]:.6g} and the reference {y[worst]:.6g}"
    )
    if math.prod(sizes.values()) > 1:
        text += ", as when means of unequal weight are averaged"
    return text


def _describe_unreduced(x: np.ndarray, y: np.ndarray, dims: list[int], sizes: dict[str, int], near: float) -> str:
    """How gradients x that differ along some mesh dims, where y is the same, become y: by a sum, a mean or neither."""
    names = list(sizes)
    descriptions = []
    for dim in dims:
        name = names[dim]
        descriptions.append(f"axis {name!r} (size {sizes[name]})")
    axes = " and ".join(descriptions)
    expected = _take_first(y, dims)
    # Devices that hold partial sums add up to the reference. Devices that each divided by their own number of examples
    # have the reference as their mean.
    total = x.sum(tuple(dims), keepdims=True)
    if np.max(distance(total, expected)) <= near:
        return f"differ between devices: {axes} is not reduced; the sum over it is the reference"
    mean = x.mean(tuple(dims), keepdims=True)
    if np.max(distance(mean, expected)) <= near:
        return f"differ between devices: {axes} is not reduced; the mean over it is the reference"
    return f"differ between devices along {axes}, and neither their sum nor their mean is the reference"


def _find_unreduced(x: np.ndarray, y: np.ndarray, mesh_dims: int, near: float) -> list[int]:
    """The mesh dims along which the devices' gradients x differ, where the reference's are the same."""
    dims = []
    for dim in range(mesh_dims):
        x_gap = np.max(distance(x, _take_first(x, [dim])), initial=0.0)
        # Where this is not 0, each device should hold another shard of the gradient, and nothing is left to reduce.
        y_gap = np.max(distance(y, _take_first(y, [dim])), initial=0.0)
        if x_gap > near and y_gap == 0:
            dims.append(dim)
    return dims


def _take_first(x: np.ndarray, dims: list[int]) -> np.ndarray:
    """The first element along some dims, which keep size 1."""
    index = [slice(None)] * x.ndim
    for dim in dims:
        index[dim] = slice(0, 1)
    return x[tuple(index)]


def _explain_factor(factor: float, sizes: dict[str, int]) -> str:
    """The axes whose sizes, to the fewest powers, multiply to the factor.

    For example, 1/2 with data=4, model=2 is model to the power -1, and 8 is data and model to the power 1 each.
    """
    names = [name for name, size in sizes.items() if size > 1]
    if not names:
        return "already on one device, so no axis is to blame"
    # A mistake of one axis is likelier than one of several, and a missing sum likelier than two.
    all_powers = itertools.product((0, 1, -1, 2, -2), repeat=len(names))
    for powers in sorted(all_powers, key=_count_mistakes):
        product = 1.0
        explanations = []
        for name, power in zip(names, powers, strict=True):
            product *= float(sizes[name]) ** power
            if power:
                explanations.append(_explain_power(name, sizes[name], power))
        if explanations and math.isclose(product, factor, rel_tol=0.02):
            return " and ".join(explanations)
    return "no axis explains this factor"


def _count_mistakes(powers: Sequence[int]) -> int:
    """The sums that are missing or too many: of the powers (1, -2) these are 3."""
    return sum(map(abs, powers))


def _explain_power(name: str, size: int, power: int) -> str:
    """The likely mistake, if the gradients are the reference times a power of an axis size."""
    axis = f"axis {name!r} (size {size})"
    if power == 1:
        return f"{axis} is summed twice, or a division by its size is missing"
    if power == -1:
        return f"{axis} is divided by once too often, or a sum over it is missing"
    operation = "summed" if power > 0 else "divided by"
    return f"{axis} is {operation} {abs(power)} times too often"


def _report(mistakes: list[_Mistake]) -> str:
    """Each kind of error on the simplest mesh that shows it; leaves with the same error together."""
    lines: list[str] = []
    explained_axes: dict[str, list[frozenset[str]]] = {}  # by path
    for mistake in sorted(mistakes, key=operator.attrgetter("simplicity")):
        axes = mistake.split_axes
        # What goes wrong over "data" alone also goes wrong over "data" and "model": it is reported once.
        simpler_axes = explained_axes.get(mistake.path, [])
        if any(map(axes.issuperset, simpler_axes)):
            continue
        paths = []
        for same_mesh_mistake in mistakes:
            if same_mesh_mistake.sizes == mistake.sizes and same_mesh_mistake.text == mistake.text:
                paths.append(same_mesh_mistake.path)
                explained_axes.setdefault(same_mesh_mistake.path, []).append(axes)
        names = ", ".join(f"`{path}`" for path in paths[:5])
        if len(paths) > 5:
            names += f" and {len(paths) - 5} more"
        lines.append(f"on mesh {format_sizes(mistake.sizes.items())}, gradients of {names} {mistake.text}")
    return (
        "certify_gradients: the gradients must equal the reference on every mesh; "
        + ";\n  ".join(lines)
        + ". Cast parameters with sk.vary over the batch axes, differentiate, and reduce the gradients once."
    )

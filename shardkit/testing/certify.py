"""Certifies gradient code, or names the axis over which gradients are over- or under-reduced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import axis_names, named, sized
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
    """The meshes on which the gradients equal the reference."""

    meshes: tuple[dict[str, int], ...]
    leaves: int

    def __str__(self) -> str:
        meshes = "; ".join(sized(sizes.items()) for sizes in self.meshes)
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
    """Proves a per-device gradient function on every mesh over the given axes, or names the axis reduced wrongly.

    `grad_fn` runs inside shard_map on every mesh whose number of devices divides `devices` and whose axes divide the
    arrays. The gradients on every device are compared with those of one device.

    Args:
        grad_fn: `(params, batch) -> grads` on local arrays, the gradients like the local parameters.
        loss_fn: `(params, batch) -> scalar` on one device, over the whole batch; its gradient is the reference.
        params: the parameters, a pytree of global arrays.
        batch: the global batch, a pytree of arrays.
        axes: names of the mesh axes, or one name.
        batch_spec: one PartitionSpec, or a pytree of them, where None is `P()`; by default dim 0 is split over
            `axes[0]`, and scalars are replicated.
        param_specs: the layout of the parameters that `grad_fn` gets, likewise; by default replicated.
        devices: the number of devices to use; by default all.
        relative: the largest difference, relative to the largest magnitude in the leaf.
        check_vma: False for a function written for `jax.shard_map(..., check_vma=False)`, where the gradient of a
            replicated value is not summed, and `pmean(jax.grad(loss))` is right.

    Returns:
        Certificate: the meshes on which it was proved; print it.

    Raises:
        AssertionError: a gradient that differs from the reference; names the axis and the factor.
        ValueError: no mesh of two or more devices fits the arrays; an axis named twice; a spec with another axis; more
            devices than there are, or fewer than two.
        TypeError: an integer parameter, or axes that are not names.

    Example:
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> gradient = lambda w, x: sk.all_reduce(jax.grad(loss)(sk.vary(w, "data"), x), "data", op="mean")
        >>> certificate = sk.testing.certify_gradients(gradient, loss, np.ones(3, "f"), np.ones((8, 3), "f"), devices=2)
        >>> certificate.meshes
        ({'data': 1}, {'data': 2})
    """
    axes = axis_names("certify_gradients", axes if isinstance(axes, str) else tuple(axes))
    count = _count(devices)
    check_relative("certify_gradients", relative)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not is_float(x):
            raise TypeError(
                f"certify_gradients: the parameters must be floating-point numbers; leaf {path_name(path)} is "
                f"{jnp.result_type(x)}. Move it to the batch, or close over it."
            )
    if batch_spec is None:
        batch_spec = jax.tree.map(lambda x: PartitionSpec(axes[0]) if np.ndim(x) else PartitionSpec(), batch)
    batch_spec, param_specs = replace_none(batch_spec), replace_none(param_specs)
    check_axes("certify_gradients", (batch_spec, param_specs), axes)
    arguments = params, batch
    specs = broadcast_specs(param_specs, params), broadcast_specs(batch_spec, batch)
    mesh: Any = jax.sharding.AbstractMesh((1,) * len(axes), axes)
    jax.tree.map(lambda x, spec: check_spec("certify_gradients", spec, mesh, np.ndim(x)), arguments, specs)
    expected = jax.tree.map(np.asarray, jax.grad(loss_fn)(params, batch))
    check_conclusive("certify_gradients", expected)
    proved: list[dict[str, int]] = []
    found: list[_Finding] = []
    for sizes in _meshes(axes, count):
        if not all(jax.tree.leaves(jax.tree.map(partial(_divides, sizes), arguments, specs))):
            continue
        held = _held_gradients(grad_fn, arguments, sizes, specs, check_vma)
        wrong = _diagnose(held, jax.tree.map(partial(_pieces, sizes), expected, specs[0]), sizes, relative)
        found += wrong
        proved += [] if wrong else [sizes]
    if not any(math.prod(sizes.values()) > 1 for sizes in proved) and not found:
        raise ValueError(
            f"certify_gradients: the batch and the parameters must be divisible by {named(tuple(axes))}; they fit no "
            f"mesh of 2 to {count} devices. Pass larger arrays or other specs."
        )
    if found:
        raise AssertionError(_report(found))
    return Certificate(tuple(proved), len(jax.tree.leaves(expected)))


def _count(devices: int | None) -> int:
    """How many devices to use."""
    available = len(jax.devices())
    count = available if devices is None else devices
    if not 2 <= count <= available:
        raise ValueError(
            f"certify_gradients: devices must be between 2 and the number of devices, {available}; got {count}. "
            f"Pass another number, or call simulate_devices({max(count, 2)}) before jax starts."
        )
    return count


class _Finding(NamedTuple):
    """A wrong leaf on one mesh, described in words."""

    path: str
    sizes: dict[str, int]
    text: str

    @property
    def simplicity(self) -> tuple[int, int]:
        """Few axes first, then large ones: a factor of 8 is clearer than one of 2."""
        return (sum(size > 1 for size in self.sizes.values()), -math.prod(self.sizes.values()))


def _meshes(axes: Sequence[str], count: int) -> list[dict[str, int]]:
    """Every mesh over the axes whose number of devices divides `count`, small ones first."""
    every = [sizes for sizes in factorizations(count, len(axes)) if count % math.prod(sizes) == 0]
    return [dict(zip(axes, sizes, strict=True)) for sizes in sorted(every, key=math.prod)]


def factorizations(devices: int, k: int) -> list[tuple[int, ...]]:
    """Every tuple of k sizes whose product is at most `devices`."""
    if k == 1:
        return [(n,) for n in range(1, devices + 1)]
    return [(n, *rest) for n in range(1, devices + 1) for rest in factorizations(devices // n, k - 1)]


def _divides(sizes: dict[str, int], x: Any, spec: PartitionSpec) -> bool:
    split = zip(np.shape(x), spec_axes(spec), strict=False)
    return all(n % math.prod(sizes[axis] for axis in axes) == 0 for n, axes in split)


def _held_gradients(
    grad_fn: Callable[[Any, Any], Any], arguments: Any, sizes: dict[str, Any], specs: Any, check_vma: bool
) -> Any:
    """The gradients on every device: arrays [*sizes, *local shape]."""
    names = tuple(sizes)
    mesh = make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)

    def device(params: Any, batch: Any) -> Any:
        grads = grad_fn(params, batch)
        return add_mesh_dims(vary(grads, names) if check_vma else grads, len(names))

    mapped = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(*names), check_vma=check_vma)
    return jax.jit(mapped)(*arguments)


def _pieces(sizes: dict[str, int], x: np.ndarray, spec: PartitionSpec) -> np.ndarray:
    """A gradient of the reference as each device should hold it: [*sizes, *local shape]."""
    pieces = split_shards(x, spec, sizes)
    pieces = np.expand_dims(pieces, [at for at, name in enumerate(sizes) if name not in all_axes(spec)])
    return np.broadcast_to(pieces, (*sizes.values(), *pieces.shape[len(sizes) :]))


def _diagnose(held: Any, pieces: Any, sizes: dict[str, int], relative: float) -> list[_Finding]:
    got, wanted = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (held, pieces))
    if [path for path, _ in got] != [path for path, _ in wanted]:
        raise AssertionError(
            "certify_gradients: the gradients must be a pytree like the parameters; got "
            f"{jax.tree.structure(held)}. Return one gradient for each parameter."
        )
    found = []
    overall = max((magnitude(y) for _, y in wanted), default=0.0)
    for (path, x), (_, y) in zip(got, wanted, strict=True):
        x = np.asarray(x)
        if x.shape != y.shape:
            lead = len(sizes)
            text = f"have shape {x.shape[lead:]} on each device where the parameters have {y.shape[lead:]}"
        elif np.max(distance(x, y), initial=0.0) <= relative * max(magnitude(y), 1e-3 * overall):
            continue
        else:
            text = _words(x, y, sizes, relative)
        found.append(_Finding(path_name(path), sizes, text))
    return found


def _words(x: np.ndarray, y: np.ndarray, sizes: dict[str, int], relative: float) -> str:
    def first(v: np.ndarray, along: list[int]) -> np.ndarray:
        return v[tuple(slice(0, 1) if i in along else slice(None) for i in range(v.ndim))]

    names = list(sizes)
    near = relative * max(magnitude(x), magnitude(y))
    apart = [
        at
        for at in range(len(names))
        if np.max(distance(x, first(x, [at]))) > near and not np.max(distance(y, first(y, [at])))
    ]
    factor = constant_factor(x, y)
    if factor is not None and not apart:
        return f"are {format_factor(factor)} the reference: {_axes_of(factor, sizes)}"
    if apart:
        axes = " and ".join(f"axis {names[at]!r} (size {sizes[names[at]]})" for at in apart)
        for word, joined in (
            ("sum", x.sum(tuple(apart), keepdims=True)),
            ("mean", x.mean(tuple(apart), keepdims=True)),
        ):
            if np.max(distance(joined, first(y, apart))) <= near:
                return f"differ between devices: {axes} is not reduced; the {word} over it is the reference"
        return f"differ between devices along {axes}, and neither their sum nor their mean is the reference"
    if not np.isfinite(x).all():
        return "are not finite where the reference is"
    gap = distance(x, y)
    at = np.unravel_index(int(np.argmax(gap)), x.shape)
    return (
        "differ from the reference, by no common factor: the largest difference is "
        f"{float(gap[at]):.3g}, where it is {x[at]:.6g} and the reference {y[at]:.6g}"
        + (", as when means of unequal weight are averaged" if math.prod(sizes.values()) > 1 else "")
    )


def _axes_of(factor: float, sizes: dict[str, int]) -> str:
    """The axes whose sizes, to the fewest powers, multiply to the factor."""
    used = [(name, size) for name, size in sizes.items() if size > 1]
    every = itertools.product((0, 1, -1, 2, -2), repeat=len(used))
    for powers in sorted(every, key=lambda each: sum(map(abs, each))):
        size = math.prod(float(size) ** power for (_, size), power in zip(used, powers, strict=True))
        if any(powers) and math.isclose(size, factor, rel_tol=0.02):
            return " and ".join(_power_words(*axis, power) for axis, power in zip(used, powers, strict=True) if power)
    return "no axis explains this factor" if used else "already on one device, so no axis is to blame"


def _power_words(name: str, size: int, power: int) -> str:
    axis = f"axis {name!r} (size {size})"
    if power == 1:
        return f"{axis} is summed twice, or a division by its size is missing"
    if power == -1:
        return f"{axis} is divided by once too often, or a sum over it is missing"
    return f"{axis} is {'summed' if power > 0 else 'divided by'} {abs(power)} times too often"


def _report(found: list[_Finding]) -> str:
    """Each kind of error on the simplest mesh that shows it; leaves with the same error together."""
    lines: list[str] = []
    explained: list[tuple[str, frozenset[str]]] = []
    for finding in sorted(found, key=lambda f: f.simplicity):
        axes = frozenset(name for name, size in finding.sizes.items() if size > 1)
        if any(path == finding.path and known <= axes for path, known in explained):
            continue
        same = [f.path for f in found if f.sizes == finding.sizes and f.text == finding.text]
        explained += [(path, axes) for path in same]
        names = ", ".join(f"`{path}`" for path in same[:5]) + (f" and {len(same) - 5} more" if len(same) > 5 else "")
        lines.append(f"on mesh {sized(finding.sizes.items())}, gradients of {names} {finding.text}")
    return (
        "certify_gradients: the gradients must equal the reference on every mesh; "
        + ";\n  ".join(lines)
        + ". Cast parameters with sk.vary over the batch axes, differentiate, and reduce the gradients once."
    )

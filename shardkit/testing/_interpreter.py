"""Interprets a traced shard_map on one device: its jaxpr, under nested vmap with axis names."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import mesh_axes, scan_operands, source_line, walk, while_operands
from shardkit._jax.primitives import ASSUMED, TABLE, registered
from shardkit.meshes.layout import all_axes, spec_axes
from shardkit.testing._compare import distance, first_other_bits, is_float

_SOLVE = "custom_linear_solve"
# Called with a sentence when the program runs and a value differs that `assume_replicated` says is equal.
Note = Callable[[str], None]


def on_one_device(function: Callable[..., Any], mesh: Any, note: Note) -> Callable[..., Any]:
    """`function`, with its shard_maps over `mesh` interpreted on one device; its derivatives stay the same."""

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):  # in place of the caller's mesh
            try:
                closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            except (AssertionError, NotImplementedError) as error:
                raise _worded(error, mesh) from error
        given = [jnp.asarray(x) for x in (*closed.consts, *jax.tree.leaves(args))]
        return jax.tree.unflatten(jax.tree.structure(shapes), _flat(closed.jaxpr, mesh, note)(*given))

    return run


def _worded(error: Exception, mesh: Any) -> Exception:
    """An error that jax raises without a message, with one; any other unchanged."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(jax.__file__).parent not in Path(frame.filename).parents]
    if str(error) or ours[-1] is frames[-1]:
        return error
    line = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    return ValueError(
        f"emulate: jax.shard_map must support what the kernel calls at {line}; it raises {type(error).__name__} "
        "without a message, as for a psum with axis_index_groups or over an unknown axis. Use the mesh's axes, "
        f"{quoted(mesh.axis_names)}, and make groups an axis of the mesh."
    )


def _flat(jaxpr: Any, mesh: Any, note: Note) -> Callable[..., list[Any]]:
    """A jaxpr as a function of its constants and arguments.

    A custom derivative in the kernel (jax.custom_jvp, jax.custom_vjp) must be traced inside shard_map too. The returned
    function therefore has a custom derivative: that of the jaxpr with its shard_maps, interpreted in the same way.
    """
    constants = len(jaxpr.constvars)

    def original(*xs: Any) -> list[Any]:
        return jax.core.eval_jaxpr(jaxpr, xs[:constants], *xs[constants:])

    def emulated(*xs: Any) -> list[Any]:
        return _evaluated(jaxpr, xs, note)

    own = _own_derivatives(jaxpr)
    # jax 0.12 linearizes while it traces, and cannot transpose a rule that calls custom_jvp again.
    if own and (jax.__version_info__ >= (0, 11) or any("jvp" not in name for name in own)):
        pulled: Any = jax.custom_vjp(emulated)
        pulled.defvjp(lambda *xs: (emulated(*xs), xs), partial(_pulled_back, original, mesh, note))
        return pulled
    if own:
        pushed: Any = jax.custom_jvp(emulated)
        pushed.defjvp(partial(_pushed_forward, original, mesh, note))
        return pushed
    return emulated


def _own_derivatives(jaxpr: Any) -> set[str]:
    return {
        site.name
        for site in walk(jaxpr)
        if site.name.startswith(("custom_jvp", "custom_vjp"))
        or (site.name == _SOLVE and _on_devices(site.equation.params["jaxprs"].solve.jaxpr))
    }


def _on_devices(jaxpr: Any) -> bool:
    """Whether a jaxpr has a cast or a collective, which need a surrounding shard_map."""
    return any(site.name == "shard_map" or (row := registered(site.name)).cast or row.kind for site in walk(jaxpr))


def _pushed_forward(original: Callable[..., list[Any]], mesh: Any, note: Note, primals: Any, tangents: Any) -> Any:
    floats = [i for i, x in enumerate(primals) if is_float(x)]

    def both(primals: Any, tangents: Any) -> Any:
        outs, moved = jax.jvp(of_floats(original, primals), ([primals[i] for i in floats],), (tangents,))
        return _with_floats(original(*primals), outs), moved

    outs, moved = on_one_device(both, mesh, note)(list(primals), [tangents[i] for i in floats])
    still = [np.zeros(jnp.shape(y), jax.dtypes.float0) for y in outs]
    return outs, _with_floats(still, moved, [is_float(y) for y in outs])


def _pulled_back(original: Callable[..., list[Any]], mesh: Any, note: Note, primals: Any, cotangents: Any) -> Any:
    floats = [i for i, x in enumerate(primals) if is_float(x)]

    def back(primals: Any, cotangents: Any) -> Any:
        return jax.vjp(of_floats(original, primals), [primals[i] for i in floats])[1](cotangents)[0]

    kept = [c for c in cotangents if jnp.result_type(c) != jax.dtypes.float0]
    grads = iter(on_one_device(back, mesh, note)(list(primals), kept))
    return tuple(next(grads) if i in floats else None for i in range(len(primals)))


def of_floats(original: Callable[..., list[Any]], primals: Any) -> Callable[[list[Any]], list[Any]]:
    """The floating-point results as a function of the floating-point arguments."""

    def restricted(floats: list[Any]) -> list[Any]:
        return [y for y in original(*_with_floats(primals, floats)) if is_float(y)]

    return restricted


def _with_floats(values: Any, floats: Any, places: Sequence[bool] | None = None) -> list[Any]:
    new = iter(floats)
    places = [is_float(x) for x in values] if places is None else places
    return [next(new) if place else x for x, place in zip(values, places, strict=True)]


def _evaluated(jaxpr: Any, given: Sequence[Any], note: Note) -> list[Any]:
    """The results of a jaxpr for the values of its constants and arguments, in that order."""
    values = {v: _untyped(x) for v, x in zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True)}
    for equation in jaxpr.eqns:
        operands = [_untyped(compat.value_of(v, values)) for v in equation.invars]
        values.update(zip(equation.outvars, _step(equation, operands, note), strict=True))
    return [_untyped(compat.value_of(v, values)) for v in jaxpr.outvars]


def _untyped(x: Any) -> Any:
    """Drops the mesh that jax records in the constants of a shard_map."""
    if isinstance(x, jax.core.Tracer) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        return x
    return np.asarray(x, jnp.result_type(x))


def _step(equation: Any, operands: list[Any], note: Note) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    row = registered(name)
    if name == ASSUMED:
        _compare(operands[0], equation, note)
    if row.cast:
        return operands
    if row.emulate is not None:
        if params.get("axis_index_groups") is not None:
            raise ValueError(
                f"emulate: {name} must run over whole axes; got axis_index_groups {params['axis_index_groups']}. Make "
                "the groups an axis of the mesh."
            )
        return [row.emulate(x, mesh_axes(equation), params) for x in operands]
    if row.kind is not None:
        some = quoted(sorted(each.name for each in TABLE.values() if each.emulate))
        raise ValueError(
            f"emulate: a collective must be one of {some}; got {name}. Run the kernel with jax.shard_map on simulated "
            "devices."
        )
    inner = [
        partial(_inner, sub, constants, note)
        for (_, sub), constants in zip(compat.inner_jaxprs(equation), compat.inner_constants(equation), strict=True)
    ]
    if name == "shard_map":
        return _by_vmap(equation, inner[0], operands)
    if name == "scan":
        return _scan(equation, inner[0], operands)
    if name == "while":
        return _while(equation, operands, note)
    if name == "cond":
        return list(lax.switch(operands[0], inner, *operands[1:]))
    if name in compat.CALLS and len(inner) == 1:
        return inner[0](*operands)
    if not any(_on_devices(sub) for _, sub in compat.inner_jaxprs(equation)):
        # `compat.bind` would restore the mesh.
        params = {name: None if isinstance(each, NamedSharding) else each for name, each in params.items()}
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
        return list(results) if equation.primitive.multiple_results else [results]
    if name == _SOLVE:
        solve, lengths = params["jaxprs"].solve, params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        return _inner(
            solve.jaxpr, solve.consts, note, *operands[first : first + lengths.solve], *operands[sum(lengths) :]
        )
    raise ValueError(
        f"emulate: {name} must not contain a collective or a cast, because emulate cannot interpret it. Run the kernel "
        "with jax.shard_map on simulated devices."
    )


def _compare(x: Any, equation: Any, note: Note) -> None:
    """Compares the bits that the devices hold at an `assume_replicated` when the program runs."""
    names, line = list(compat.bound_axes()), source_line(equation)
    along = [names.index(name) for name in equation.params["axes"]]

    def look(values: np.ndarray) -> None:
        for at in along:
            devices = np.moveaxis(values, at, 0)
            other = first_other_bits(list(devices))
            if other:
                gap = np.max(distance(devices[other], devices[0]))
                note(
                    f"assume_replicated needs the same bits on all devices along axis {names[at]!r}; at {line} device "
                    f"{other} differs from device 0 by up to {gap:.3g}. Complete the exchange over {names[at]!r}, or "
                    "leave the value varying."
                )
                return

    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    for name in reversed(names):
        x = lax.all_gather(x, name)
    jax.debug.callback(look, x)


def _inner(jaxpr: Any, constants: Sequence[Any], note: Note, *operands: Any) -> list[Any]:
    return _evaluated(jaxpr, [*constants, *operands], note)


def _scan(equation: Any, body: Callable[..., list[Any]], operands: list[Any]) -> list[Any]:
    fixed, held, each = scan_operands(equation, operands)
    carry = len(held)

    def step(held: list[Any], each: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*fixed, *held, *each)
        return results[:carry], results[carry:]

    length, reverse = equation.params["length"], equation.params["reverse"]
    held, each = lax.scan(step, held, each, length=length, reverse=reverse)
    return [*held, *each]


def _while(equation: Any, operands: list[Any], note: Note) -> list[Any]:
    test, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
    of_test, of_body, held = while_operands(equation, operands)
    return list(
        lax.while_loop(
            lambda held: _inner(test.jaxpr, test.consts, note, *of_test, *held)[0],
            lambda held: _inner(body.jaxpr, body.consts, note, *of_body, *held),
            held,
        )
    )


def _by_vmap(equation: Any, body: Callable[..., list[Any]], operands: list[Any]) -> list[Any]:
    """A shard_map on one device: every axis becomes a vmap with its name."""
    params = equation.params
    sizes = {name: params["mesh"].shape[name] for name in compat.manual_axes(equation)}
    split = [tuple(name for name in sizes if name in all_axes(spec)) for spec in params["in_specs"]]

    def one(_: Any, *leaves: Any) -> list[Any]:
        return body(*leaves)

    for name in reversed(sizes):
        one = jax.vmap(one, in_axes=(0, *(0 if name in axes else None for axes in split)), axis_name=name)
    pieces = [pieces_of(x, spec, sizes) for x, spec in zip(operands, params["in_specs"], strict=True)]
    # jax keeps the names that vmap binds in the order in which it first met them. That of this mesh decides.
    with jax.sharding.use_abstract_mesh(params["mesh"]):
        results = one(jnp.zeros(tuple(sizes.values()), jnp.int8), *pieces)
    return [joined(x, spec, sizes) for x, spec in zip(results, params["out_specs"], strict=True)]


def stackable(tree: Any, axes: int) -> Any:
    """The results of one device with a dim of size 1 for each mesh axis, over which out_specs stacks them."""
    return jax.tree.map(lambda x: jnp.expand_dims(x, tuple(range(axes))), tree)


def pieces_of(x: Any, spec: PartitionSpec, sizes: dict[str, int]) -> Any:
    """From a global array to the pieces of all devices: [*sizes of the axes that split it, *local shape]."""
    shape: list[int] = []
    at: dict[str, int] = {}
    for dim, axes in enumerate(spec_axes(spec) + [()] * (x.ndim - len(spec))):
        for axis in axes:
            at[axis] = len(shape)
            shape.append(sizes[axis])
        shape.append(x.shape[dim] // math.prod(sizes[axis] for axis in axes))
    lead = [at[name] for name in sizes if name in at]
    rest = [i for i in range(len(shape)) if i not in lead]
    return x.reshape(shape).transpose(lead + rest)


def joined(x: Any, spec: PartitionSpec, sizes: dict[str, int]) -> Any:
    """From [*all sizes, *local shape] to the global array; along axes that do not split it, the first device's."""
    local = x.shape[len(sizes) :]
    x = x[tuple(slice(None) if name in all_axes(spec) else 0 for name in sizes)]
    split = [name for name in sizes if name in all_axes(spec)]
    order: list[int] = []
    shape: list[int] = []
    for dim, axes in enumerate(spec_axes(spec) + [()] * (len(local) - len(spec))):
        order += [split.index(axis) for axis in axes] + [len(split) + dim]
        shape.append(local[dim] * math.prod(sizes[axis] for axis in axes))
    return x.transpose(order).reshape(shape)

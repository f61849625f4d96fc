"""Interprets a traced shard_map on one device: its jaxpr, under nested vmap with axis names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter, scan_operands, solve_operands, while_operands
from shardkit._jax.jaxprs import mesh_axes, source_line, walk
from shardkit._jax.primitives import ASSUMED, TABLE, registered
from shardkit._jax.ragged import describe_exchange, find_fault_on_mesh, refuse_gradient
from shardkit.meshes.layout import all_axes, split_dims
from shardkit.testing._compare import distance, find_other_bits, is_float
from shardkit.testing._kernels import explain_error

# Called with a sentence when the program runs and a value differs that `assume_replicated` says is equal.
Note = Callable[[str], None]
# Primitives that jax cannot map by a vmap within another, nor along any dim but the first.
_HARD_TO_MAP = {"ragged_dot_general"}
# A function of arrays that returns a list of them.
ArrayFunction = Callable[..., list[Any]]


def interpret(function: Callable[..., Any], mesh: Any, note: Note) -> Callable[..., Any]:
    """`function`, with its shard_maps over `mesh` interpreted on one device; its derivatives stay the same."""

    def run(*args: Any) -> Any:
        # Traced with its shard_maps, which are interpreted below: so jax checks varying types and differentiates as on
        # a real mesh.
        with jax.sharding.use_abstract_mesh(mesh):  # in place of the caller's mesh
            try:
                closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            except (AssertionError, NotImplementedError) as error:
                raise explain_error("emulate", error, mesh) from error
        leaves = jax.tree.leaves(args)
        inputs = [jnp.asarray(x) for x in [*closed.consts, *leaves]]
        outputs = _make_function(closed.jaxpr, mesh, note)(*inputs)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def _make_function(jaxpr: Any, mesh: Any, note: Note) -> ArrayFunction:
    """A jaxpr as a function of its constants and arguments, which runs on one device.

    A custom derivative in the kernel (jax.custom_jvp, jax.custom_vjp) must be traced inside shard_map too, where its
    collectives have their axes. The returned function therefore has a custom derivative of its own: it differentiates
    the jaxpr with its shard_maps, and interprets the result in the same way.

    For example, the gradient of a kernel that calls `jax.nn.relu`, a custom_jvp. Without the detour, jax would trace
    the JVP of relu among the vmaps, outside of any shard_map, where a value that varies over "data" has no meaning.
    """
    count = len(jaxpr.constvars)

    def run_with_shard_maps(*xs: Any) -> list[Any]:
        constants = xs[:count]
        arguments = xs[count:]
        return jax.core.eval_jaxpr(jaxpr, constants, *arguments)

    def run_on_one_device(*xs: Any) -> list[Any]:
        constants = list(xs[:count])
        arguments = xs[count:]
        return _Emulator(note).run(ClosedJaxpr(jaxpr, constants), arguments)

    rules = _find_custom_derivatives(jaxpr)
    if not rules:
        return run_on_one_device
    # jax 0.12 linearizes while it traces, and cannot transpose a rule that calls custom_jvp again.
    can_transpose_jvp = jax.__version_info__ < (0, 11)
    has_only_jvps = all("jvp" in name for name in rules)
    if not (can_transpose_jvp and has_only_jvps):

        def run_and_save(*xs: Any) -> tuple[list[Any], tuple[Any, ...]]:
            return run_on_one_device(*xs), xs

        with_vjp: Any = jax.custom_vjp(run_on_one_device)
        with_vjp.defvjp(run_and_save, partial(_pull_back, run_with_shard_maps, mesh, note))
        return with_vjp
    with_jvp: Any = jax.custom_jvp(run_on_one_device)
    with_jvp.defjvp(partial(_push_forward, run_with_shard_maps, mesh, note))
    return with_jvp


def _find_custom_derivatives(jaxpr: Any) -> set[str]:
    """The names of the primitives in a jaxpr whose derivatives must be traced inside shard_map."""
    names = set()
    for site in walk(jaxpr):
        if site.name.startswith(("custom_jvp", "custom_vjp")):
            names.add(site.name)
        # jax's gradient of a ragged_all_to_all is another one. Where it is wrong, as for a row that is sent twice, that
        # of the vmaps would be right, and so not what a chip computes.
        if registered(site.name).sent is not None:
            names.add(site.name)
        # What runs for one device after the other has no gradient: the program of its derivative runs likewise.
        if site.name in _HARD_TO_MAP:
            names.add(site.name)
        if site.name == compat.SOLVE and _needs_shard_map(site.equation.params["jaxprs"].solve.jaxpr):
            names.add(site.name)
    return names


def _needs_shard_map(jaxpr: Any) -> bool:
    """Whether a jaxpr has a shard_map, or a cast or a collective, which need a surrounding one."""
    for site in walk(jaxpr):
        row = registered(site.name)
        if site.name == "shard_map" or row.cast or row.kind:
            return True
    return False


def _push_forward(original: ArrayFunction, mesh: Any, note: Note, primals: Any, tangents: Any) -> Any:
    """The results and their tangents: the JVP of the original, traced and interpreted in the same way."""
    is_float_primal = _mark_floats(primals)

    def compute_both(primals: Any, float_tangents: Any) -> Any:
        float_primals = _select(primals, is_float_primal)
        restricted = restrict_to_floats(original, primals)
        float_outs, out_tangents = jax.jvp(restricted, (float_primals,), (float_tangents,))
        # The JVP has the floating-point results alone; integers and booleans come from the original.
        outs = original(*primals)
        outs = _replace_floats(outs, float_outs, _mark_floats(outs))
        return outs, out_tangents

    float_tangents = _select(tangents, is_float_primal)
    outs, out_tangents = interpret(compute_both, mesh, note)(list(primals), float_tangents)
    # The tangent of an integer is float0, which jax calls a zero.
    zeros = []
    for y in outs:
        zeros.append(np.zeros(jnp.shape(y), jax.dtypes.float0))
    tangents_of_outs = _replace_floats(zeros, out_tangents, _mark_floats(outs))
    return outs, tangents_of_outs


def _pull_back(original: ArrayFunction, mesh: Any, note: Note, primals: Any, cotangents: Any) -> Any:
    """The gradients of the arguments: the VJP of the original, traced and interpreted in the same way."""
    is_float_primal = _mark_floats(primals)

    def compute_gradients(primals: Any, float_cotangents: Any) -> Any:
        float_primals = _select(primals, is_float_primal)
        restricted = restrict_to_floats(original, primals)
        _, vjp = jax.vjp(restricted, float_primals)
        (grads,) = vjp(float_cotangents)
        return grads

    # The cotangent of an integer result is float0.
    is_float_cotangent = [jnp.result_type(c) != jax.dtypes.float0 for c in cotangents]
    float_cotangents = _select(cotangents, is_float_cotangent)
    grads = interpret(compute_gradients, mesh, note)(list(primals), float_cotangents)
    # To jax, None is a zero gradient of any dtype, so that an integer needs no float0 of its shape.
    no_gradients = [None] * len(primals)
    grads = _replace_floats(no_gradients, grads, is_float_primal)
    return tuple(grads)


def restrict_to_floats(original: ArrayFunction, primals: Any) -> Callable[[list[Any]], list[Any]]:
    """The floating-point results as a function of the floating-point arguments.

    For example, of `f(w, tokens) -> [loss, count]` with floats w and loss, a function of [w] that returns [loss], which
    jax differentiates; the tokens are those of `primals`.
    """

    def compute_floats(floats: list[Any]) -> list[Any]:
        arguments = _replace_floats(primals, floats, _mark_floats(primals))
        outs = original(*arguments)
        return _select(outs, _mark_floats(outs))

    return compute_floats


def _mark_floats(values: Any) -> list[bool]:
    """A mask: which of the values have a derivative."""
    return [is_float(x) for x in values]


def _select(values: Any, mask: Sequence[bool]) -> list[Any]:
    """The values where the mask is True."""
    return list(itertools.compress(values, mask))


def _replace_floats(values: Any, floats: Any, mask: Sequence[bool]) -> list[Any]:
    """The values with `floats`, in order, where the mask is True."""
    remaining = iter(floats)
    replaced = []
    for x, is_replaced in zip(values, mask, strict=True):
        if is_replaced:
            x = next(remaining)
        replaced.append(x)
    return replaced


def _drop_mesh(x: Any) -> Any:
    """Drops the mesh that jax records in the constants of a shard_map."""
    if isinstance(x, jax.core.Tracer) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        return x
    return np.asarray(x, jnp.result_type(x))


@dataclass(frozen=True)
class _Emulator(JaxprInterpreter[Any]):
    """Runs a program with its shard_maps on one device; inside of them, under vmap, on each device at once.

    Every frame below stands in the errors of what it calls: a jit within a shard_map is `run`, `step`, `call`, `run`.
    """

    note: Note
    backward: bool = False  # whether differentiation made the program for the backward pass

    def constant(self, x: Any) -> Any:
        return _drop_mesh(x)

    def literal(self, atom: Any) -> Any:
        return atom.val

    def read(self, atom: Any, values: Mapping[Any, Any]) -> Any:
        return _drop_mesh(super().read(atom, values))

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        row = registered(name)
        if name == ASSUMED:
            _compare_devices(operands[0], equation, self.note)
        # A cast changes over which axes a value varies by its type. Under vmap there are no such types, nor futures.
        if row.cast or row.waits:
            return operands
        if row.sent is not None and row.emulate is not None:
            _check_slices(equation, operands, self.note, self.backward or compat.in_backward(equation))
            return [row.emulate(operands, mesh_axes(equation), equation.params)]
        if row.emulate is not None or row.kind is not None:
            return _run_collective(equation, operands)
        inner_jaxprs = [jaxpr for _, jaxpr in compat.inner_jaxprs(equation)]
        if name in _HARD_TO_MAP and compat.bound_axes():
            return _bind_in_turn(equation, operands)
        if not any(map(_needs_shard_map, inner_jaxprs)):
            return _bind_without_mesh(equation, operands)
        if name == compat.SOLVE:
            (solve,) = compat.inner_programs(equation)
            return self.run(solve, solve_operands(equation, operands))
        raise ValueError(
            f"emulate: {name} must not contain a collective or a cast, because emulate cannot interpret it. Run the "
            "kernel with jax.shard_map on simulated devices."
        )

    def call(self, equation: Any, body: Any, operands: list[Any]) -> Sequence[Any]:
        inside = replace(self, backward=self.backward or compat.in_backward(equation))
        return inside.run(body, operands)

    def cond(self, equation: Any, branches: list[Any], operands: list[Any]) -> Sequence[Any]:
        index, *arguments = operands

        def run_branch(branch: Any, *arguments: Any) -> list[Any]:
            return self.run(branch, arguments)

        functions = [partial(run_branch, branch) for branch in branches]
        return list(lax.switch(index, functions, *arguments))

    def scan(self, equation: Any, body: Any, operands: list[Any]) -> Sequence[Any]:
        constants, carry, rows = scan_operands(equation, operands)
        carries = len(carry)

        def run_body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(body, [*constants, *carry, *row])
            return results[:carries], results[carries:]

        length = equation.params["length"]
        reverse = equation.params["reverse"]
        carry, rows = lax.scan(run_body, carry, rows, length=length, reverse=reverse)
        return [*carry, *rows]

    def while_loop(self, equation: Any, test: Any, body: Any, operands: list[Any]) -> Sequence[Any]:
        test_constants, body_constants, carry = while_operands(equation, operands)

        def run_test(carry: Any) -> Any:
            return self.run(test, [*test_constants, *carry])[0]

        def run_body(carry: Any) -> list[Any]:
            return self.run(body, [*body_constants, *carry])

        return list(lax.while_loop(run_test, run_body, carry))

    def shard_map(self, equation: Any, body: Any, operands: list[Any]) -> Sequence[Any]:
        """A shard_map on one device: every axis becomes a vmap with its name.

        For example, on a mesh data=2, model=4, an argument [8, 6] with spec P("data") becomes shards [2, 4, 6]. The
        vmap of "data" maps its dim 0 and the vmap of "model" none, so that the body sees [4, 6] as a device does. A
        result comes back as [2, 4, *local shape], whatever its spec.
        """
        params = equation.params
        sizes = {name: params["mesh"].shape[name] for name in compat.manual_axes(equation)}
        specs = params["in_specs"]
        inside = replace(self, backward=self.backward or compat.in_backward(equation))

        def run_device(_: Any, *leaves: Any) -> list[Any]:
            return inside.run(body, leaves)

        # The last axis of the mesh is the innermost vmap: so each vmap maps dim 0 of its arrays. The first argument,
        # `devices`, has every axis, so that each vmap maps at least one.
        run_devices = run_device
        for name in reversed(sizes):
            in_axes: list[int | None] = [0]
            for spec in specs:
                is_split = name in all_axes(spec)
                in_axes.append(0 if is_split else None)
            run_devices = jax.vmap(run_devices, in_axes=tuple(in_axes), axis_name=name)
        shards = []
        for x, spec in zip(operands, specs, strict=True):
            shards.append(split_shards(x, spec, sizes))
        devices = jnp.zeros(tuple(sizes.values()), jnp.int8)
        # jax keeps the names that vmap binds in the order in which it first met them. That of this mesh decides.
        with jax.sharding.use_abstract_mesh(compat.abstract_mesh_of(params["mesh"])):
            results = run_devices(devices, *shards)
        arrays = []
        for x, spec in zip(results, params["out_specs"], strict=True):
            arrays.append(join_shards(x, spec, sizes))
        return arrays


def _run_collective(equation: Any, operands: list[Any]) -> list[Any]:
    name = equation.primitive.name
    row = registered(name)
    if row.emulate is None:
        names = []
        for primitive in TABLE.values():
            if primitive.emulate and not primitive.starts:
                names.append(primitive.name)
        raise ValueError(
            f"emulate: a collective must be one of {quote(sorted(names))}; got {name}. Run the kernel with "
            "jax.shard_map on simulated devices."
        )
    groups = equation.params.get("axis_index_groups")
    if groups is not None:
        raise ValueError(
            f"emulate: {name} must run over whole axes; got axis_index_groups {groups}. Make the groups an axis of the "
            "mesh."
        )
    axes = mesh_axes(equation)
    return [row.emulate(x, axes, equation.params) for x in operands]


def _check_slices(equation: Any, operands: list[Any], note: Note, is_gradient: bool) -> None:
    """Notes what is wrong about the offsets and sizes of a ragged_all_to_all when the program runs."""
    sizes = compat.bound_axes()
    axes = mesh_axes(equation)
    where = f"{equation.primitive.name} at {source_line(equation)}"
    devices = math.prod(sizes[name] for name in axes)
    groups = equation.params["axis_index_groups"]
    try:
        avals = [variable.aval for variable in equation.invars]
        if is_gradient:
            refuse_gradient(avals, axes, devices, groups)
        exchange = describe_exchange(avals, axes, devices, groups, is_gradient)
    except ValueError as error:
        raise ValueError(f"emulate: {where} {error}") from error

    def check(values: np.ndarray) -> None:
        sentence = find_fault_on_mesh(exchange, values, dict(sizes))
        if sentence:
            note(f"{where} {sentence}")

    # [4, slices]: the offsets and sizes of this device; then [*sizes of the mesh, 4, slices], as for a comparison.
    slices = jnp.stack([x.astype(jnp.int32) for x in operands[2:]])
    for name in reversed(sizes):
        slices = lax.all_gather(slices, name)
    jax.debug.callback(check, slices)


def _bind_without_mesh(equation: Any, operands: list[Any]) -> list[Any]:
    """Binds the primitive itself; `compat.bind` would restore the mesh."""
    primitive = equation.primitive
    params = {}
    for name, value in equation.params.items():
        has_mesh = isinstance(value, NamedSharding)
        params[name] = None if has_mesh else value
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    if primitive.multiple_results:
        return list(results)
    return [results]


def _bind_in_turn(equation: Any, operands: list[Any]) -> list[Any]:
    """Binds the primitive for one device after the other, where jax cannot map it."""

    @jax.custom_batching.sequential_vmap
    def bind(*operands: Any) -> list[Any]:
        return _bind_without_mesh(equation, list(operands))

    return bind(*operands)


def _compare_devices(x: Any, equation: Any, note: Note) -> None:
    """Compares the bits that the devices hold at an `assume_replicated` when the program runs."""
    names = list(compat.bound_axes())
    line = source_line(equation)
    dims = [names.index(name) for name in equation.params["axes"]]

    def compare(values: np.ndarray) -> None:
        for dim in dims:
            devices = np.moveaxis(values, dim, 0)
            number = find_other_bits(list(devices))
            if number:
                gap = np.max(distance(devices[number], devices[0]))
                note(
                    f"assume_replicated needs the same bits on all devices along axis {names[dim]!r}; at {line} device "
                    f"{number} differs from device 0 by up to {gap:.3g}. Complete the exchange over {names[dim]!r}, or "
                    "leave the value varying."
                )
                return

    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    # Each gather puts its axis in front, so that x becomes [*sizes of names, *local shape]. After the last one no vmap
    # maps x any more, and the callback runs once with the values of all devices.
    for name in reversed(names):
        x = lax.all_gather(x, name)
    jax.debug.callback(compare, x)


def add_mesh_dims(tree: Any, axes: int) -> Any:
    """The results of one device with a dim of size 1 for each mesh axis, over which out_specs stacks them."""
    dims = tuple(range(axes))
    return jax.tree.map(lambda x: jnp.expand_dims(x, dims), tree)


def split_shards(x: Any, spec: PartitionSpec, sizes: dict[str, int]) -> Any:
    """From a global array to the shards of all devices: [*sizes of the axes that split it, *local shape].

    For example, [8, 6] with spec P(("a", "b")) on a=2, b=2 is reshaped to [2, 2, 2, 6], in which the dims of a and b
    come first already; with P("b", "a") it is reshaped to [2, 4, 2, 3] and transposed to [2 (a), 2 (b), 4, 3].
    """
    shape: list[int] = []
    local_dims: list[int] = []
    dim_of_axis: dict[str, int] = {}
    axes_of_dim = split_dims(spec)
    for dim, local_size in enumerate(x.shape):
        for axis in axes_of_dim.get(dim, ()):
            dim_of_axis[axis] = len(shape)
            shape.append(sizes[axis])
            local_size //= sizes[axis]
        local_dims.append(len(shape))
        shape.append(local_size)
    mesh_dims = [dim_of_axis[name] for name in sizes if name in dim_of_axis]
    return x.reshape(shape).transpose(mesh_dims + local_dims)


def join_shards(x: Any, spec: PartitionSpec, sizes: dict[str, int]) -> Any:
    """From [*all sizes, *local shape] to the global array; along axes that do not split it, the first device's.

    For example, [2 (a), 2 (b), 4, 3] with P("b") on a=2, b=2: the first device along a has [2 (b), 4, 3], in which the
    dim of b comes directly before the one that it splits already; reshaped it is [8, 3].
    """
    split_axes: list[str] = []
    index: list[Any] = []
    for name in sizes:
        if name in all_axes(spec):
            split_axes.append(name)
            index.append(slice(None))
        else:
            index.append(0)
    shards = x[tuple(index)]  # [*sizes of the axes that split it, *local shape]
    local_shape = x.shape[len(sizes) :]
    order: list[int] = []
    shape: list[int] = []
    axes_of_dim = split_dims(spec)
    for dim, size in enumerate(local_shape):
        for axis in axes_of_dim.get(dim, ()):
            order.append(split_axes.index(axis))
            size *= sizes[axis]
        order.append(len(split_axes) + dim)
        shape.append(size)
    return shards.transpose(order).reshape(shape)

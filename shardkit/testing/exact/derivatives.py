"""Functions and their derivatives as traced programs of arrays, which the interpreter runs.

Worked example: f(x) = x * x of x [2]. The program with gradients takes ([x], [a cotangent c [2]]), both unknown, and
returns [x * x, 2 * c * x]. If two functions have the same gradient for an unknown c, they have it for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from shardkit._jax.jaxprs import Site, source_line, walk
from shardkit.meshes.layout import path_name
from shardkit.testing._compare import is_float
from shardkit.testing._interpreter import restrict_to_floats

# Takes the leaves of the arguments, and returns the leaves of the results.
FlatFunction = Callable[..., list[Any]]


class DerivedPrograms(NamedTuple):
    """Functions of the same arguments, traced with their derivatives.

    Worked example: two functions `f(w, x) -> y` of floats w [3], x [8, 3] and y [8], with gradients. Each program takes
    ([w, x], [a cotangent [8] of y]) and returns [y, the gradient [3] of w, the gradient [8, 3] of x].

    Attributes:
        programs: a ClosedJaxpr for each function, of (leaves of the arguments, vectors), which returns the results,
            then the derivatives. What no result needs is still in it.
        vectors: the shapes of the vectors: cotangents of the results, or tangents of the arguments.
        names: the derivatives in words, as "gradient of argument [0]['w']".
        compared: the results of the programs in words, as "values and gradients".
    """

    programs: list[Any]
    vectors: list[Any]
    names: list[str]
    compared: str


def trace_with_derivatives(
    functions: Sequence[Callable[..., Any]], shapes: Any, results: Any, grad: bool
) -> DerivedPrograms:
    """Traces functions with their gradients, or, where a loop has no known end, with their forward derivatives.

    A `while` loop that numbers end cannot be run backwards. Forwards it can, and if the derivatives along one unknown
    direction are equal, then they are for all directions, and so are the gradients. Worked example: f(x, y) = x y has
    the derivative t y + s x along the unknown (t, s). A program with the same one has the gradient (y, x), too.

    Args:
        functions: of the same arguments, with the same structure of results.
        shapes: the arguments as a tuple of pytrees of ShapeDtypeStructs.
        results: the results, likewise.
        grad: whether to trace derivatives at all.
    """
    leaves, structure = jax.tree.flatten(shapes)
    flat_functions = [_flatten(function, structure) for function in functions]
    if not grad:
        programs = _trace_all(flat_functions, _drop_vectors, leaves, [])
        return DerivedPrograms(programs, [], [], "values")
    try:
        return _trace_gradients(flat_functions, shapes, results)
    except ValueError:
        # That is how jax refuses to run a while loop backwards. Without such a loop it says something else.
        if not any(_has_while_loop(function, leaves) for function in flat_functions):
            raise
    return _trace_forward(flat_functions, shapes, results)


def name_result(path: Any) -> str:
    """`result ['loss']`; `result` where there is one alone."""
    if not path:
        return "result"
    return f"result {path_name(path)}"


def _trace_gradients(functions: Sequence[FlatFunction], shapes: Any, results: Any) -> DerivedPrograms:
    cotangents = [y for y in jax.tree.leaves(results) if is_float(y)]
    programs = _trace_all(functions, _add_gradients, jax.tree.leaves(shapes), cotangents)
    names = []
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
        if is_float(x):
            names.append(f"gradient of argument {path_name(path)}")
    return DerivedPrograms(programs, cotangents, names, "values and gradients")


def _trace_forward(functions: Sequence[FlatFunction], shapes: Any, results: Any) -> DerivedPrograms:
    leaves = jax.tree.leaves(shapes)
    tangents = [x for x in leaves if is_float(x)]
    programs = _trace_all(functions, _add_forward_derivatives, leaves, tangents)
    names = []
    for path, y in jax.tree_util.tree_leaves_with_path(results):
        if is_float(y):
            names.append(f"derivative of the {name_result(path)}")
    compared = "values and forward derivatives, because a loop has no known end"
    return DerivedPrograms(programs, tangents, names, compared)


def _trace_all(
    functions: Sequence[FlatFunction],
    add_derivatives: Callable[[FlatFunction], Callable[..., list[Any]]],
    leaves: list[Any],
    vectors: list[Any],
) -> list[Any]:
    """Each function, with the derivatives that are added to it, as a traced program of leaves and vectors."""
    programs = []
    for function in functions:
        derived_function = add_derivatives(function)
        programs.append(jax.make_jaxpr(derived_function)(leaves, vectors))
    return programs


def _has_while_loop(function: FlatFunction, leaves: list[Any]) -> bool:
    traced = jax.make_jaxpr(function)(*leaves)
    return any(site.name == "while" for site in walk(traced.jaxpr))


def _flatten(function: Callable[..., Any], structure: Any) -> FlatFunction:
    """A function of pytrees as one of their leaves, with a list of results."""

    def flat_function(*leaves: Any) -> list[Any]:
        results = function(*jax.tree.unflatten(structure, leaves))
        return [jnp.asarray(y) for y in jax.tree.leaves(results)]

    return flat_function


def _drop_vectors(function: FlatFunction) -> Callable[..., list[Any]]:
    """The results alone, with the arguments of the other programs."""

    def compute_values(leaves: list[Any], vectors: list[Any]) -> list[Any]:
        return function(*leaves)

    return compute_values


def _add_gradients(function: FlatFunction) -> Callable[..., list[Any]]:
    """The results, then the gradient of each float argument for cotangents of the float results."""

    def compute_both(leaves: list[Any], cotangents: list[Any]) -> list[Any]:
        # The results come first in the program, too: a search for a wrong line runs it hundreds of times up to the
        # first wrong result, and comes to no gradient then. So the function is traced twice.
        values = function(*leaves)
        floats = [x for x in leaves if is_float(x)]
        _, pull_back = jax.vjp(restrict_to_floats(function, leaves), floats)
        (grads,) = pull_back(list(cotangents))
        return [*values, *grads]

    return compute_both


def _add_forward_derivatives(function: FlatFunction) -> Callable[..., list[Any]]:
    """The results, then the derivative of each float result along tangents of the float arguments."""

    def compute_both(leaves: list[Any], tangents: list[Any]) -> list[Any]:
        values = function(*leaves)
        floats = [x for x in leaves if is_float(x)]
        _, derivatives = jax.jvp(restrict_to_floats(function, leaves), [floats], [tangents])
        return [*values, *derivatives]

    return compute_both


def find_exchange_without_derivative(program: Any) -> str:
    """The line of an untiled all_to_all of which jax has no derivative; "" if there is none.

    jax gives the derivative of an untiled all_to_all from dim 0 to dim 2, say, the shape that an all_to_all from dim 2
    to dim 0 has, and then refuses it.
    """
    for site in walk(program.jaxpr):
        is_untiled = site.name == "all_to_all" and not site.equation.params["tiled"]
        if is_untiled and not _has_derivative(site):
            return source_line(site.equation)
    return ""


def _has_derivative(site: Site) -> bool:
    """Whether jax can trace the derivative of an equation with one operand and one result, or integers need none."""
    equation = site.equation
    [operand] = equation.invars
    if not is_float(operand.aval):
        return True

    def run_equation(x: Any) -> Any:
        return equation.primitive.bind(x, **equation.params)

    def pull_back_result(x: Any) -> Any:
        y, pull_back = jax.vjp(run_equation, x)
        return pull_back(y)

    # Each device gets an array of the operand's shape: its part of dim 0.
    axes = tuple(site.sizes)
    axis_sizes = tuple(site.sizes.values())
    spec = PartitionSpec(axes)
    on_devices = jax.shard_map(pull_back_result, mesh=AbstractMesh(axis_sizes, axes), in_specs=spec, out_specs=spec)
    rows, *other_dims = operand.aval.shape
    shape = (math.prod(axis_sizes) * rows, *other_dims)
    try:
        jax.eval_shape(on_devices, jax.ShapeDtypeStruct(shape, operand.aval.dtype))
    except ValueError:
        return False
    return True

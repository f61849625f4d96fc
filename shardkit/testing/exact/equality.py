"""Proves that a kernel equals a plain function for all inputs, and says what that means."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardkit._arguments.checks import at_least, mesh_in_context, quoted
from shardkit._arguments.typed import Specs, typed
from shardkit._jax import compat
from shardkit._jax.dependence import without_unused
from shardkit._jax.jaxprs import walk
from shardkit.meshes.layout import path_name
from shardkit.testing._compare import UnequalError, describe_kinds, describe_mesh, describe_shapes, is_float
from shardkit.testing._interpreter import restrict_to_floats
from shardkit.testing._kernels import (
    check_args,
    check_arity,
    check_axes_of_specs,
    checked_kernel,
    checked_reference,
)
from shardkit.testing.exact.draws import equal, of_kernels
from shardkit.testing.exact.interpreter import Interpreter, Seen
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.tower import LEVELS
from shardkit.testing.exact.program_pair import Evidence, UnprovableError
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand, is_key
from shardkit.testing.exact.rules.primitive_rules import ORDERED

# What a proof takes on one core, about: per element and component, and per product of a matmul.
_DRAWS = 8  # about
_SECONDS = {"element": 4e-8, "product": 4e-9, "equation": 2e-4}

ASSUMED = (
    "numbers are real and inputs finite: nothing is said about rounding, overflow, the compiler, second derivatives, "
    "or inputs for which a divisor or the argument of a logarithm is zero",
    "integers, booleans, keys and all arrays that a function closes over are as they were",
    "a float constant is the simplest rational that rounds to it",
    "constants beyond 1e9 and -1e9 are infinite",
    "functions of different arguments have independent values",
)
# Of programs that compare floats.
SAMPLED = "what hangs on several comparisons at once is seen as far as draws show it; gradients, where inputs differ"
# Of logarithms that are multiplied.
POSITIVE = "logarithms are of positive numbers"


class Equality(NamedTuple):
    """What was proved, and how surely: a certificate, as text by `print` and as JSON by `to_json`.

    Attributes:
        what: the two sides, and their mesh.
        shapes: dtype and shape of each input.
        points: at how many random points of the field both sides were evaluated.
        chance: a bound of the probability that sides which differ agree at all of them.
        uninterpreted: the functions of which only that equal arguments have equal values was used.
        compared: what was seen of comparisons, by line where they went one way; empty if there are none.
        assumed: the assumptions.
    """

    what: str
    shapes: tuple[str, ...]
    points: int
    chance: float
    uninterpreted: tuple[str, ...]
    compared: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ASSUMED

    def __str__(self) -> str:
        functions = (
            f"uninterpreted: {', '.join(self.uninterpreted)}" if self.uninterpreted else "no function is uninterpreted"
        )
        verdict = "of a wrong verdict"
        if self.compared:
            verdict = "that a difference on the branches of the first draw was missed"
        lines = [
            f"equal for all inputs: {self.what}",
            f"inputs: {', '.join(self.shapes)}",
            f"{self.points} points; the chance {verdict} is at most {self.chance:.1g}",
            functions,
            *self.compared,
            *(f"assumed: {each}" for each in self.assumed),
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The certificate as JSON, an object of the attributes."""
        return json.dumps(self._asdict())


@typed
def assert_equal_for_all_inputs(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Specs | None,
    out_specs: Specs,
    args: Sequence[Any],
    grad: bool = True,
    points: int = 3,
    check_vma: bool = True,
) -> Equality:
    """Proves a kernel against a plain function without a tolerance: the same values and gradients for all inputs.

    Both are traced, and run with numbers of a finite field in place of floats: every float of `args` is an unknown,
    drawn at random, and only its shape and dtype matter. Integers, booleans and keys keep their values. Programs that
    agree there are the same function of real numbers, but for a chance that the result bounds; one that is wrong by a
    part in 10^12 is found. Comparisons are decided by real inputs that are drawn too, several times, and by random
    orders where no draw reached a branch; the result says what was seen. NaN is a value of its own. Rounding is not
    seen: `assert_matches_reference` compares floats.

    Args:
        kernel: the function that each device runs.
        reference: the same as a function of the global arrays, in jax and without collectives.
        mesh: the mesh, also of devices that do not exist (`sk.abstract_mesh`); by default that of `jax.set_mesh`.
        in_specs: as for `jax.shard_map`.
        out_specs: as for `jax.shard_map`.
        args: the global arguments, a tuple of pytrees of arrays or ShapeDtypeStructs; small shapes prove as much.
        grad: compare gradients too, for unknown cotangents; where a loop has no known end, derivatives along an unknown
            direction, which are equal if gradients are.
        points: the number of random points, at least two; each multiplies the chance of a wrong verdict by that of one.
        check_vma: as for `jax.shard_map`; False for a kernel of others that does not type what varies.

    Returns:
        Equality: what was proved, the chance of a wrong verdict, and what was assumed; print it.

    Raises:
        AssertionError: a difference; names the result or gradient, the line of the first value that the reference does
            not have, and how it differs: a factor, a missing sum, another device's piece.
        TypeError: args that is not a tuple, or what is no array among arguments or results. What the functions raise
            themselves stays, with a note that says what they were called with.
        ValueError: what is neither proved nor refuted: a comparison of which one branch was not met and may differ, a
            missing law of a function, by its line; specs that do not fit arguments or results; no float among the
            arguments; what has no meaning in a field, by its name and line; programs that are nested deeper, or larger,
            than can be proved, with what to shrink.

    Cost: seconds on the host for shapes of a few hundred elements; neither program is compiled.

    Example:
        >>> found = sk.testing.assert_equal_for_all_inputs(
        ...     lambda x: sk.all_reduce(jnp.exp(x), "data"), lambda x: jnp.exp(x[:2]) + jnp.exp(x[2:]),
        ...     mesh=mesh, in_specs=P("data"), out_specs=P(), args=(np.zeros(4, "f"),),
        ... )
        >>> found.points, found.chance < 1e-15
        (3, True)

    Source: Schwartz, Fast Probabilistic Algorithms for Verification of Polynomial Identities, JACM 1980; Zhang et al.,
        Mirage, OSDI 2025.
    """
    where = "assert_equal_for_all_inputs"
    mesh = mesh_in_context(where, mesh)
    at_least(where, 1, points=points)
    check_axes_of_specs(where, mesh, in_specs, out_specs)
    check_args(where, mesh, in_specs, args, symbolic=True)
    args = tuple(args)
    check_arity(where, "kernel", kernel, args)
    check_arity(where, "reference", reference, args)
    mapped = jax.shard_map(
        checked_kernel(where, kernel, mesh, out_specs, check_vma),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )
    shapes = jax.tree.map(described, args)
    check_floats(where, shapes)
    plain = checked_reference(where, reference)
    got, wanted = jax.eval_shape(mapped, *shapes), jax.eval_shape(plain, *shapes)
    wrong = describe_shapes(got, wanted) or describe_kinds(got, wanted)
    if wrong:
        raise UnequalError(
            f"{where}: {describe_mesh(mesh)}, the result must have the reference's structure, shapes and kinds of "
            f"dtype; {wrong}. Check out_specs and the gathers."
        )
    values = [f"result{_behind(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(wanted)]
    everything, vectors, derivatives, compared = _trace((mapped, plain), shapes, wanted, grad)
    traced = [without_unused(program) for program in everything]
    seconds = check_size(where, traced, points, _DRAWS)
    names = [*values, *derivatives]
    symbols = [*jax.tree.leaves(args), *vectors]

    def run(program: Any, field: Field, seen: Seen | None) -> list[Operand]:
        inputs = [symbol(field, f"{i}", x) for i, x in enumerate(symbols)]
        return Interpreter(field, seen=seen).run(program, inputs)

    programs = partial(run, traced[0]), partial(run, traced[1])
    subject = f"{where}: {describe_mesh(mesh)}, "
    # What a wrong kernel computes and does not use may be what it should have used.
    with_unused = partial(run, everything[0])
    evidence = equal(where, subject, names, programs, points, of_kernels(seconds), len(values), with_unused=with_unused)
    return Equality(
        f"{_name(kernel)} and {_name(reference)}, {describe_mesh(mesh)}, {compared}",
        tuple(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(shapes)),
        evidence.field.points,
        evidence.field.chance(evidence.degree),
        tuple(sorted(evidence.field.uninterpreted)),
        _describe(evidence),
        (*ASSUMED, *([POSITIVE] if evidence.field.logs else []), *([SAMPLED] if evidence.decisions else [])),
    )


def _describe(evidence: Evidence) -> tuple[str, ...]:
    """What was seen of comparisons, as sentences."""
    lines = []
    if evidence.decisions:
        by_line = {decision.line for decision in evidence.decisions if not decision.open}
        runs = f"{evidence.draws} draws of real inputs"
        if evidence.orders:
            runs += f" and {evidence.orders} random orders"
        lines.append(f"comparisons: at {len(by_line)} {'line' if len(by_line) == 1 else 'lines'}, both ways in {runs}")
    for decision in evidence.decisions:
        if decision.open:
            lines.append(f"never else than {decision.outcome}: {decision.what} at {decision.line}")
    if not evidence.orders:
        for decision in evidence.foreign:
            lines.append(f"only one side compares, and only draws say that it may: {decision.what} at {decision.line}")
    if evidence.outside:
        lines.append(f"not compared where a number is outside of a function's domain, as first at {evidence.outside}")
    for name, (elements, size) in evidence.alone.items():
        lines.append(f"NaN on one side alone there: up to {elements} of {size} elements of the {name}")
    for name, (elements, size) in evidence.no_number.items():
        lines.append(f"not a number on both sides: {elements} of {size} elements of the {name}")
    return tuple(lines)


def symbol(field: Field, name: str, x: Any) -> Operand:
    """An input: unknown if it is a float, else what it is."""
    if is_float(x):
        return draw_input(field, name, np.shape(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        raise UnprovableError(
            "assert_equal_for_all_inputs: integers, booleans and keys must be given, because a proof holds for their "
            f"values; got the shape {x.dtype}{list(x.shape)}. Pass an array."
        )
    return to_known(x)


def check_floats(where: str, shapes: Any) -> None:
    """Refuses inputs without a float, and complex ones."""
    leaves = jax.tree.leaves(shapes)
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves):
        raise UnprovableError(
            f"{where}: inputs must be real; got a complex one. Pass real and imaginary parts as two arrays, or compare "
            "floats with assert_matches_reference."
        )
    if not any(is_float(x) for x in leaves):
        raise UnprovableError(
            f"{where}: at least one input must be an array of floats, for which the proof holds; got "
            f"{quoted(sorted({str(x.dtype) for x in leaves})) or 'none'}. Compare integers with "
            "assert_matches_reference."
        )


def check_size(where: str, traced: Sequence[Any], points: int, draws: int, longest: float = 600.0) -> float:
    """Refuses programs that would take more than so many seconds; how many one draw takes."""
    seconds, runs, most = 0.0, 1, -1
    largest: Any = None  # the equation, whose line takes longer to find than all else here
    for closed in traced:
        for site in walk(closed.jaxpr):
            if compat.inner_jaxprs(site.equation):
                continue
            devices = 1
            for n in site.sizes.values():
                devices *= n
            times = (site.times or 1) * devices
            shapes = [v.aval.shape for v in site.equation.outvars if hasattr(v.aval, "shape")]
            size = max((int(np.prod(shape)) for shape in shapes), default=0)
            if size > most:
                most, largest = size, site
            inner = _products(site.equation)
            if site.name in ORDERED and is_float(site.equation.invars[0].aval):
                runs = draws
            seconds += (site.times or 1) * _SECONDS["equation"]
            seconds += times * LEVELS * points * size * (_SECONDS["element"] + inner * _SECONDS["product"])
    once, seconds = seconds, seconds * runs
    if seconds > longest:
        shape = max((v.aval.shape for v in largest.equation.outvars if hasattr(v.aval, "shape")), key=np.prod)
        raise UnprovableError(
            f"{where}: shapes must be small, because a proof holds for all values and not for more shapes; these would "
            f"take about {seconds / 60:,.0f} minutes, the largest array is {list(shape)} at {largest.source}. Shrink "
            "batch, sequence, widths and layers to a few elements per device, as testing.small does."
        )
    return once


def _products(equation: Any) -> int:
    """Of how many products, or of how many elements of a window, one element of the result is made."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        sizes = equation.invars[0].aval.shape
        return math.prod(sizes[dim] for dim in params["dimension_numbers"][0][0])
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return math.prod(kernel[dim] for dim in params["dimension_numbers"].rhs_spec[1:])
    return math.prod(params["window_dimensions"]) if name.startswith("reduce_window") else 1


def described(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an argument, as jax takes it."""
    x = x if hasattr(x, "dtype") else np.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype if is_key(x) else jax.dtypes.canonicalize_dtype(x.dtype))


def _behind(path: Any) -> str:
    return f" {path_name(path)}" if path else ""


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _Traced(NamedTuple):
    """Two functions, traced with their derivatives.

    Attributes:
        programs: (leaves of the arguments, vectors) -> [results, then derivatives], of both functions, with what no
            result needs.
        vectors: the shapes of cotangents, or of tangents.
        derivatives: their names.
        compared: what all that is, in words.
    """

    programs: list[Any]
    vectors: list[Any]
    derivatives: list[str]
    compared: str


def _trace(functions: Sequence[Callable[..., Any]], shapes: Any, results: Any, grad: bool) -> _Traced:
    """Both functions with their gradients, or, where a loop has no known end, with their forward derivatives.

    A loop that numbers end cannot be run backwards. Forwards it can, and derivatives along one unknown direction are
    equal for all directions, so gradients are too.
    """
    leaves, structure = jax.tree.flatten(shapes)
    floats = [x for x in leaves if is_float(x)]
    cotangents = [y for y in jax.tree.leaves(results) if is_float(y)]
    flat = [_flat(function, structure) for function in functions]
    if not grad:
        programs = [_values(function) for function in flat]
        return _Traced([_jaxpr(program, leaves, []) for program in programs], [], [], "values")
    try:
        programs = [_with_gradients(function) for function in flat]
        paths = [path for path, x in jax.tree_util.tree_leaves_with_path(shapes) if is_float(x)]
        names = [f"gradient of argument {path_name(path)}" for path in paths]
        traced = [_jaxpr(program, leaves, cotangents) for program in programs]
        return _Traced(traced, cotangents, names, "values and gradients")
    except ValueError:
        loops = [site for function in flat for site in walk(jax.make_jaxpr(function)(*leaves).jaxpr)]
        if not any(site.name == "while" for site in loops):
            raise
    programs = [_with_derivatives(function) for function in flat]
    paths = [path for path, y in jax.tree_util.tree_leaves_with_path(results) if is_float(y)]
    names = [f"derivative of the result{_behind(path)}" for path in paths]
    traced = [_jaxpr(program, leaves, floats) for program in programs]
    return _Traced(traced, floats, names, "values and forward derivatives, because a loop has no known end")


def _jaxpr(program: Callable[..., Any], leaves: list[Any], vectors: list[Any]) -> Any:
    return jax.make_jaxpr(program)(leaves, vectors)


def _flat(function: Callable[..., Any], structure: Any) -> Callable[..., list[Any]]:
    """The same function of leaves, with a list of results."""

    def flat(*leaves: Any) -> list[Any]:
        return [jnp.asarray(y) for y in jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))]

    return flat


def _values(flat: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def values(leaves: list[Any], _: list[Any]) -> list[Any]:
        return flat(*leaves)

    return values


def _with_gradients(flat: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def both(leaves: list[Any], cotangents: list[Any]) -> list[Any]:
        _, pull = jax.vjp(restrict_to_floats(flat, leaves), [x for x in leaves if is_float(x)])
        return [*flat(*leaves), *pull(list(cotangents))[0]]

    return both


def _with_derivatives(flat: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def both(leaves: list[Any], tangents: list[Any]) -> list[Any]:
        floats = [x for x in leaves if is_float(x)]
        _, derivatives = jax.jvp(restrict_to_floats(flat, leaves), [floats], [tangents])
        return [*flat(*leaves), *derivatives]

    return both

"""Proves that a kernel equals a plain function for all inputs, and says what that means.

Worked example, with one small prime, 7, in place of the tower, and one point in place of three. The kernel is
`psum(x * x, "data")` on data=2, the reference `x[:1] * x[:1] + x[1:] * x[1:]`, and x is float32[2].

    x               unknown; drawn modulo 7: 3 on device 0, 5 on device 1
    on the mesh     3 * 3 = 2 and 5 * 5 = 4 modulo 7; the psum is 6
    alone           9 + 25 = 34 = 6 modulo 7: equal here
    a mean instead  6 / 2 = 3: differs; no tolerance is needed to see it

Two different polynomials agree at few points of a field, so that programs which agree at random ones are the same
polynomial, but for a chance that `Equality.chance` bounds: with the real primes and three points it is 5e-28 here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardkit._arguments.checks import at_least, mesh_in_context, quoted
from shardkit._arguments.typed import Specs, typed
from shardkit._jax.dependence import without_unused
from shardkit.testing._compare import UnequalError, describe_kinds, describe_mesh, describe_shapes, is_float
from shardkit.testing._kernels import (
    check_args,
    check_arity,
    check_axes_of_specs,
    wrap_kernel,
    wrap_reference,
)
from shardkit.testing.exact.derivatives import find_untiled_exchange, name_result, trace_with_derivatives
from shardkit.testing.exact.draws import equal, of_kernels
from shardkit.testing.exact.interpreter import Interpreter, Seen
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.program_pair import Evidence, UnprovableError
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand, is_key
from shardkit.testing.exact.size import check_size

_DRAWS = 8  # of programs that compare floats, about

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
    """A certificate: the statement, and how sure it is. `print` shows it as text, `to_json` as JSON.

    Attributes:
        what: the two sides, and their mesh.
        shapes: dtype and shape of each input.
        points: the number of random points of the field.
        chance: a bound of the probability that two different sides agree at all points.
        uninterpreted: functions without a law: the proof knows only that equal arguments give equal values.
        compared: the comparisons, with the line of each one that went only one way; empty if there are none.
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
        verdict = "of a wrong verdict"
        if self.compared:
            verdict = "that a difference on the branches of the first draw was missed"
        functions = "no function is uninterpreted"
        if self.uninterpreted:
            functions = f"uninterpreted: {', '.join(self.uninterpreted)}"
        lines = [
            f"equal for all inputs: {self.what}",
            f"inputs: {', '.join(self.shapes)}",
            f"{self.points} points; the chance {verdict} is at most {self.chance:.1g}",
            functions,
            *self.compared,
        ]
        for assumption in self.assumed:
            lines.append(f"assumed: {assumption}")
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
    """Proves a kernel equal to a plain function, in values and gradients, for all inputs and without a tolerance.

    It traces both, and runs them with numbers of a finite field in place of floats. Every float of `args` is an
    unknown, drawn at random; only its shape and dtype matter. Integers, booleans and keys keep their values. Programs
    that agree there are the same function of real numbers, up to a chance, which the result bounds. You see an error of
    one part in 10^12. Comparisons are decided by real inputs, also drawn several times, and by random orders if no draw
    reached a branch; the result lists them. NaN is a separate value. A proof does not see rounding: for floats use
    `assert_matches_reference`.

    Args:
        kernel: the function that each device runs.
        reference: the same as a function of the global arrays, in jax and without collectives.
        mesh: the mesh, also one without devices (`sk.abstract_mesh`); by default the mesh of `jax.set_mesh`.
        in_specs: as for `jax.shard_map`.
        out_specs: as for `jax.shard_map`.
        args: the global arguments, a tuple of pytrees of arrays or ShapeDtypeStructs; small shapes prove as much.
        grad: compare gradients too, for unknown cotangents. If a loop has no known end, it compares derivatives along
            an unknown direction instead; they are equal if gradients are.
        points: the number of random points; one is taken as two, which tell a constant from an unknown. Each one
            multiplies the chance of a wrong verdict by a tiny factor.
        check_vma: as for `jax.shard_map`. Pass False for a foreign kernel without varying types.

    Returns:
        Equality: the statement, the chance of a wrong verdict, and the assumptions; print it.

    Raises:
        AssertionError: a difference. The message names the result or gradient, the line of the first value that the
            reference does not have, and the kind of difference: a factor, a missing sum, another device's piece.
        TypeError: args other than a tuple, or an argument or result other than an array. Errors of your functions
            stay as they are, with a note about their arguments.
        ValueError: no verdict: a comparison with a branch no draw met, or a function with an unknown law, by its
            line. Also specs that do not fit arguments or results; no float among the arguments; an operation without a
            meaning in a field, by its name and line; too large or too deeply nested programs, with the size to
            shrink.

    Cost: seconds on the host for shapes of a few hundred elements; neither program is compiled.

    Example:
        >>> proof = sk.testing.assert_equal_for_all_inputs(
        ...     lambda x: sk.all_reduce(jnp.exp(x), "data"), lambda x: jnp.exp(x[:2]) + jnp.exp(x[2:]),
        ...     mesh=mesh, in_specs=P("data"), out_specs=P(), args=(np.zeros(4, "f"),),
        ... )
        >>> proof.points, proof.chance < 1e-15
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
    on_mesh = jax.shard_map(
        wrap_kernel(where, kernel, mesh, out_specs, check_vma),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )
    alone = wrap_reference(where, reference)
    shapes = jax.tree.map(describe_array, args)
    check_floats(where, shapes)
    result = jax.eval_shape(on_mesh, *shapes)
    expected = jax.eval_shape(alone, *shapes)
    difference = describe_shapes(result, expected) or describe_kinds(result, expected)
    if difference:
        raise UnequalError(
            f"{where}: {describe_mesh(mesh)}, the result must have the reference's structure, shapes and kinds of "
            f"dtype; {difference}. Check out_specs and the gathers."
        )
    try:
        derived = trace_with_derivatives((on_mesh, alone), shapes, expected, grad)
    except ValueError as error:
        line = find_untiled_exchange(jax.make_jaxpr(on_mesh)(*shapes))
        if not grad or not line:
            raise
        raise UnprovableError(
            f"{where}: an untiled all_to_all must have a split_axis that is its concat_axis, because jax has no "
            f"derivative of others; the one at {line} has two axes. Pass tiled=True to it, or grad=False here."
        ) from error
    # A wrong kernel may compute what it should have used. Its line is looked for in the program with what is unused.
    kernel_with_unused = derived.programs[0]
    kernel_program, reference_program = [without_unused(program) for program in derived.programs]
    seconds = check_size(where, (kernel_program, reference_program), points, _DRAWS)
    value_names = [name_result(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    inputs = [*jax.tree.leaves(args), *derived.vectors]
    evidence = equal(
        where,
        f"{where}: {describe_mesh(mesh)}, ",
        [*value_names, *derived.names],
        (partial(_run, kernel_program, inputs), partial(_run, reference_program, inputs)),
        points,
        of_kernels(seconds),
        len(value_names),
        with_unused=partial(_run, kernel_with_unused, inputs),
    )
    sides = f"{_name_function(kernel)} and {_name_function(reference)}"
    return certify(f"{sides}, {describe_mesh(mesh)}, {derived.compared}", shapes, evidence)


def _run(program: Any, arrays: Sequence[Any], field: Field, seen: Seen | None) -> list[Operand]:
    """The results of a program in a field, where both programs draw the same numbers for the same argument."""
    inputs = [make_input(field, str(number), x) for number, x in enumerate(arrays)]
    return Interpreter(field, seen=seen).run(program, inputs)


def certify(what: str, shapes: Any, evidence: Evidence, assumed: Sequence[str] = ASSUMED) -> Equality:
    """The certificate of two programs that were found equal."""
    field = evidence.field
    assumptions = list(assumed)
    for (value, _), folded in evidence.folded.items():
        assumptions.append(f"the constant {value:.9g} is {folded.words}, rounded")
    if field.logs:
        assumptions.append(POSITIVE)
    if evidence.decisions:
        assumptions.append(SAMPLED)
    return Equality(
        what=what,
        shapes=tuple(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(shapes)),
        points=field.points,
        chance=field.chance(evidence.degree),
        uninterpreted=tuple(sorted(field.uninterpreted)),
        compared=_describe_comparisons(evidence),
        assumed=tuple(assumptions),
    )


def _describe_comparisons(evidence: Evidence) -> tuple[str, ...]:
    """What was seen of comparisons, as sentences."""
    sentences = []
    if evidence.decisions:
        lines = {decision.line for decision in evidence.decisions if not decision.open}
        lines_in_words = f"{len(lines)} {'line' if len(lines) == 1 else 'lines'}"
        runs = f"{evidence.draws} draws of real inputs"
        if evidence.orders:
            runs += f" and {evidence.orders} random orders"
        sentences.append(f"comparisons: at {lines_in_words}, both ways in {runs}")
    never: Counter[str] = Counter()
    for decision in evidence.decisions:
        if decision.open:
            never[f"never else than {decision.outcome}: {decision.what} at {decision.line}"] += 1
    for sentence, count in never.items():  # as of a line that both sides run, or that a loop runs in each round
        sentences.append(sentence if count == 1 else f"{sentence} ({count} comparisons)")
    if not evidence.orders:
        for decision in evidence.foreign:
            place = f"{decision.what} at {decision.line}"
            sentences.append(f"only one side compares, and only draws say that it may: {place}")
    if evidence.outside:
        place = f"as first at {evidence.outside}"
        sentences.append(f"not compared where a number is outside of a function's domain, {place}")
    for name, (count, size) in evidence.alone.items():
        sentences.append(f"NaN on one side alone there: up to {count} of {size} elements of the {name}")
    for name, (count, size) in evidence.alone_at_zeros.items():
        sentences.append(
            f"NaN on one side alone where a divisor is zero, or a logarithm's argument: {count} of {size} elements of "
            f"the {name}"
        )
    for name, (count, size) in evidence.no_number.items():
        sentences.append(f"not a number on both sides: {count} of {size} elements of the {name}")
    return tuple(sentences)


def make_input(field: Field, name: str, x: Any) -> Operand:
    """An argument in the field: random numbers in place of floats; integers, booleans and keys as they are."""
    if field.memory is not None:
        return field.memory.recall(field, name, (), partial(_make_input, field, name, x))
    return _make_input(field, name, x)


def _make_input(field: Field, name: str, x: Any) -> Operand:
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
        dtypes = sorted({str(x.dtype) for x in leaves})
        raise UnprovableError(
            f"{where}: at least one input must be an array of floats, for which the proof holds; got "
            f"{quoted(dtypes) or 'none'}. Compare integers with assert_matches_reference."
        )


def describe_array(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an argument, as jax takes it: float64 and Python numbers in its default precision."""
    if not hasattr(x, "dtype"):
        x = np.asarray(x)
    dtype = x.dtype
    if not is_key(x):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype)


def _name_function(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)

"""Proves that a kernel equals a plain function for all inputs: the function that users call.

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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from shardkit._arguments.checks import at_least, mesh_in_context
from shardkit._arguments.typed import Specs, typed
from shardkit._jax import compat
from shardkit._jax.dependence import without_unused
from shardkit._jax.pallas import writing_kernels_out
from shardkit.testing._compare import UnequalError, describe_kinds, describe_mesh, describe_shapes
from shardkit.testing._interpreter import interpret
from shardkit.testing._kernels import (
    check_args,
    check_arity,
    check_axes_of_specs,
    wrap_kernel,
    wrap_reference,
)
from shardkit.testing.exact.arguments import check_floats, check_values, describe_array, make_input
from shardkit.testing.exact.certificate import Equality, certify
from shardkit.testing.exact.derivatives import (
    DerivedPrograms,
    find_exchange_without_derivative,
    name_result,
    trace_with_derivatives,
)
from shardkit.testing.exact.draws import choose_effort, equal
from shardkit.testing.exact.evidence import UnprovableError
from shardkit.testing.exact.float_inputs import propose_inputs
from shardkit.testing.exact.interpreter import Interpreter, Seen
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.size import check_size

# About how many draws of inputs a program that compares floats needs: for the estimate of the time.
_DRAWS = 8


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

    It traces both functions, and runs them with numbers of a finite field in place of floats. Every float of `args` is
    an unknown, drawn at random; only its shape and dtype matter. Integers, booleans and keys keep their values.
    Programs that agree there are the same function of real numbers, up to a chance, which the result bounds. You see an
    error of one part in 10^12. Comparisons are decided by real inputs, also drawn several times, and by random orders
    if no draw reached a branch; the result lists them. NaN is a separate value. A proof does not see rounding: for
    floats use `assert_matches_reference`.

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

    Cost: seconds on the host for shapes of a few hundred elements. Programs that compare floats are compiled once, for
        many inputs together; others are not.

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
    check_values(where, args)
    result = jax.eval_shape(on_mesh, *shapes)
    expected = jax.eval_shape(alone, *shapes)
    difference = describe_shapes(result, expected) or describe_kinds(result, expected)
    if difference:
        raise UnequalError(
            f"{where}: {describe_mesh(mesh)}, the result must have the reference's structure, shapes and kinds of "
            f"dtype; {difference}. Check out_specs and the gathers."
        )
    derived = _trace_both(where, on_mesh, alone, shapes, expected, grad)
    # A wrong kernel may compute a value and forget to use it. So the line of a mistake is looked for in the program
    # with all its equations. The proof runs both programs without the equations that no result needs.
    kernel_with_unused, reference_with_unused = derived.programs
    kernel_program = without_unused(kernel_with_unused)
    reference_program = without_unused(reference_with_unused)
    seconds = check_size(where, (kernel_program, reference_program), points, _DRAWS)
    value_names = [name_result(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    inputs = [*jax.tree.leaves(args), *derived.vectors]
    # Both programs as functions of floats: the shard_maps of the kernel's run on one device, as by `emulate`.
    kernel_in_floats = interpret(jaxpr_as_fun(kernel_program), compat.abstract_mesh_of(mesh), _ignore)
    reference_in_floats = jaxpr_as_fun(reference_program)
    evidence = equal(
        where,
        f"{where}: {describe_mesh(mesh)}, ",
        [*value_names, *derived.names],
        (partial(_run, kernel_program, inputs), partial(_run, reference_program, inputs)),
        points,
        choose_effort(seconds),
        len(value_names),
        with_unused=partial(_run, kernel_with_unused, inputs),
        propose=partial(propose_inputs, kernel_in_floats, reference_in_floats, inputs),
    )
    names = f"{_name_function(kernel)} and {_name_function(reference)}"
    return certify(f"{names}, {describe_mesh(mesh)}, {derived.compared}", shapes, evidence)


def _trace_both(
    where: str, on_mesh: Callable[..., Any], alone: Callable[..., Any], shapes: Any, results: Any, grad: bool
) -> DerivedPrograms:
    """Traces both functions with their derivatives; names the line of a collective of which jax has none."""
    try:
        with writing_kernels_out():
            return trace_with_derivatives((on_mesh, alone), shapes, results, grad)
    except ValueError as error:
        line = find_exchange_without_derivative(jax.make_jaxpr(on_mesh)(*shapes))
        if not grad or not line:
            raise
        raise UnprovableError(
            f"{where}: an untiled all_to_all must have a split_axis that is its concat_axis, because jax has no "
            f"derivative of others; the one at {line} has two axes. Pass tiled=True to it, or grad=False here."
        ) from error


def _ignore(_: str) -> None:
    """What `assume_replicated` wrongly calls equal is for a proof to find."""


def _run(program: Any, arrays: Sequence[Any], field: Field, seen: Seen | None) -> list[Operand]:
    """The results of a program in a field. Arguments are named by their numbers, so that both programs draw alike."""
    inputs = [make_input(field, str(number), x) for number, x in enumerate(arrays)]
    return Interpreter(field, seen=seen).run(program, inputs)


def _name_function(function: Any) -> str:
    """The name of a function, or of its type if it has none, as a `functools.partial`."""
    return getattr(function, "__name__", type(function).__name__)

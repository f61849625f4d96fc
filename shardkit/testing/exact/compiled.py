"""Proves that a compiled program is the one that was traced, or a plain function, for all inputs.

A proof of a traced program ends where the compiler begins, and compilers have dropped sums and exchanged groups of
devices. Here the optimized module is read back as a function (`stablehlo/`, `imported.py`) and compared in the same
fields as any other program. So the statement covers the partitioner and all passes of the compiler, but not the code
that is generated for an operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import at_least
from shardkit._arguments.typed import typed
from shardkit._jax.jaxprs import walk
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.topology import parse_topology, tracing_for
from shardkit.steps.step import Step
from shardkit.testing._compare import UnequalError, describe_shapes
from shardkit.testing.exact.arguments import check_floats, check_values, describe_array, make_input
from shardkit.testing.exact.certificate import ASSUMED, Equality, certify
from shardkit.testing.exact.compiled_pair import CompiledPair
from shardkit.testing.exact.draws import choose_effort
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.size import check_size
from shardkit.testing.exact.stablehlo.undefined import UNDEFINED

_SHORT = 2  # bytes of a float whose rounding is told
_BITS_OF_FLOAT32 = 23  # of its mantissa
_DRAWS = 8  # of programs that compare floats, about
# Here the compiler is no assumption, but the code that it generates is one.
ASSUMED_AS_COMPILED = (
    "numbers are real and inputs finite: nothing is said about rounding, overflow, the code that is generated for an "
    "operation, or inputs for which a divisor or the argument of a logarithm is zero",
    *ASSUMED[1:],
)


@typed
def assert_compiled_equal(
    function: Any,
    *args: Any,
    reference: Callable[..., Any] | None = None,
    points: int = 3,
    topology: str | None = None,
) -> Equality:
    """Proves that the optimized program of a jitted function equals the traced one, for all inputs, exactly.

    It compiles the function for the devices and shardings of `args`, reads the optimized module of all devices, with
    the collectives that the partitioner and the compiler put in, and runs it with numbers of a finite field in place of
    floats. Every float of `args` is an unknown; integers, booleans and keys keep their values. All replicas of a result
    are compared. So you see a sum that the compiler dropped, a group of wrong devices, a slice before its sum. You do
    not see rounding, nor the machine code of an operation. A compiler folds constants in float32. Where that is
    one or two operations on constants of the trace, as 0.9 times 0.9, or in bfloat16 the inverse of a divisor, the
    certificate names it; where it is a longer chain, the verdict is "not decided".

    Args:
        function: a function of `jax.jit`, on any shardings, with or without `jax.shard_map` in it; or a step of
            `make_train_step`, with a state and a batch as `args`.
        *args: its arguments, pytrees of arrays. Small shapes are quick; the proof is of these shapes.
        reference: a plain function of the same arguments, to compare the compiled program with in place of the traced
            one.
        points: the number of random points, as of `assert_equal_for_all_inputs`.
        topology: chips that need not be present, as of `sk.aot.compile`: "v5e:2x4", "h100:1x1x8". Their compiler makes
            the program that is proved. None: the devices of the arguments.

    Returns:
        Equality: the statement with platform and version of the compiler, and its assumptions; print it.

    Raises:
        AssertionError: a difference, with the line of the first operation that has a wrong value.
        TypeError: a function without `trace`.
        ValueError: no verdict, as of `assert_equal_for_all_inputs`; also an operation of the compiled program that has
            no meaning as a function of arrays, by its name; an argument that was donated, or that is on devices of
            other processes.
        RuntimeError: the compiler of the topology is not installed, or refuses the program.

    Cost: compiles once, then seconds on the host for shapes of a few hundred elements.

    Example:
        >>> x = sk.shard(np.zeros((8, 2), "f"), mesh, P("data"))
        >>> proof = sk.testing.assert_compiled_equal(jax.jit(lambda x: jnp.exp(x).mean(0)), x)
        >>> proof.points
        3

    Source: Schwartz, Fast Probabilistic Algorithms for Verification of Polynomial Identities, JACM 1980; jaxlib's own
        conversion of a compiled module to StableHLO.
    """
    where = "assert_compiled_equal"
    at_least(where, 1, points=points)
    if not hasattr(function, "trace"):
        raise TypeError(
            f"{where}: function must be one of jax.jit, which can be traced and compiled; got "
            f"{type(function).__name__}. Pass jax.jit(function)."
        )
    _check_on_this_process(where, args)
    traced = _trace(function, args, topology)
    # A step takes (state, batch), and the program that it traces (state, key, batch). The proof is of the program.
    args_of_call = args
    if isinstance(function, Step):
        args, reference = _keep_key_outside(args, reference)
    shapes = jax.tree.map(describe_array, args)
    check_floats(where, shapes)
    check_values(where, args)
    # What the compiled program must equal: the trace, or the reference.
    side: Any = traced.jaxpr
    check_size(where, [side], points, _DRAWS)  # a large program takes long to compile, too
    leaves = jax.tree.leaves(args)
    against = "its trace"
    if reference is not None:
        side, result = jax.make_jaxpr(reference, return_shape=True)(*shapes)
        difference = describe_shapes(traced.out_info, result)
        if difference:
            raise UnequalError(f"{where}: the result must have the reference's structure and shapes; {difference}.")
        against = getattr(reference, "__name__", type(reference).__name__)
    if topology is None:
        executable = traced.lower().compile()
        pair = CompiledPair.of(where, executable, side)
    else:
        built = aot.build(traced, args_of_call, topology=topology)
        pair = CompiledPair.of_absent(where, built, topology, side)
    # The module has been read: now both programs are measured.
    seconds = check_size(where, pair.programs, points, _DRAWS)
    effort = choose_effort(seconds)
    evidence = pair.prove(where, f"{where}: ", "result", partial(_make_inputs, leaves), points, effort)
    name = getattr(function, "__name__", type(function).__name__)
    what = f"{name} as compiled on {pair.imported.describe_compiler()} and {against}"
    assumed = [
        *ASSUMED_AS_COMPILED,
        *describe_rounding(pair.on_devices, pair.traced),
        *describe_memory(pair.on_devices),
    ]
    return certify(what, shapes, evidence, assumed)


def _trace(function: Any, args: Any, topology: str | None) -> Any:
    """The trace of a jitted function; for absent chips, what the function chooses for them."""
    if topology is None:
        return function.trace(*args)
    with tracing_for(parse_topology(topology)):
        return function.trace(*args)


def describe_rounding(compiled: Any, traced: Any) -> list[str]:
    """Where a compiled program rounds to floats that the traced one does not have, which a proof does not see.

    Worked example: a TPU's compiler takes the operands of a float32 product as bfloat16: "that it rounds to bfloat16,
    first at model.py:12, where the other side does not, is no difference".
    """
    traced_lines = _find_short_floats(traced)
    sentences = []
    for name, line in _find_short_floats(compiled).items():
        if name not in traced_lines:
            place = f"first at {line}, where the other side does not"
            sentences.append(f"that it rounds to {name}, {place}, is no difference")
    return sentences


def describe_memory(compiled: Any) -> list[str]:
    """That numbers of which nothing is known are finite, if a compiled program may read some (`undefined.py`)."""
    for site in walk(compiled.jaxpr):
        if site.name == UNDEFINED:
            return ["what is read where nothing was written, or beyond an array, is a finite number"]
    return []


def _find_short_floats(program: Any) -> dict[str, str]:
    """The floats of 16 bits and fewer of a program, with the line of the first equation that gives each."""
    lines: dict[str, str] = {}
    for site in walk(program.jaxpr):
        for variable in site.equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= _SHORT:
                lines.setdefault(str(dtype), site.source)
        # A float32 that is rounded to fewer bits keeps its dtype.
        if site.name == "reduce_precision":
            exponent_bits = site.equation.params["exponent_bits"]
            mantissa_bits = site.equation.params["mantissa_bits"]
            if mantissa_bits < _BITS_OF_FLOAT32:
                lines.setdefault(f"{exponent_bits} + {mantissa_bits} bits", site.source)
    return lines


def _keep_key_outside(args: Any, reference: Callable[..., Any] | None) -> tuple[Any, Callable[..., Any] | None]:
    """The arguments of the program that a step traces, and a reference that takes them: (state, key, batch)."""
    state, batch = args
    args_of_trace = (state._replace(key=None), state.key, batch)
    if reference is None:
        return args_of_trace, None

    @functools.wraps(reference)
    def apply(state: Any, key: Any, batch: Any) -> Any:
        new_state, metrics = reference(state._replace(key=key), batch)
        return new_state._replace(key=None), metrics

    return args_of_trace, apply


def _check_on_this_process(where: str, args: Any) -> None:
    """Refuses arrays whose numbers this process does not have, or no longer."""
    for path, x in jax.tree_util.tree_leaves_with_path(args):
        name = f"args{jax.tree_util.keystr(path)}"
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                f"{where}: arguments must not have been donated; {name}, {x.dtype}{list(x.shape)}, was donated to an "
                "earlier call. Pass a new array, or a copy that was made before the call."
            )
        if not getattr(x, "is_fully_addressable", True):
            raise ValueError(
                f"{where}: arguments must be on devices of this process; {name}, {x.dtype}{list(x.shape)}, has pieces "
                "on those of others. Prove the function in one process, on as many simulated devices "
                "(sk.simulate_devices)."
            )


def _make_inputs(leaves: Sequence[Any], field: Field) -> list[Operand]:
    return [make_input(field, str(number), x) for number, x in enumerate(leaves)]

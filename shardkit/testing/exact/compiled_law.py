"""The law that the compiled step of a row equals the traced one, for all parameters and floats of a batch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardkit.analysis.hlo import aot
from shardkit.steps.step import Step
from shardkit.testing.exact.arguments import check_values
from shardkit.testing.exact.certificate import describe_folded_constants, make_note
from shardkit.testing.exact.compiled import describe_memory, describe_rounding
from shardkit.testing.exact.compiled_pair import CompiledPair
from shardkit.testing.exact.draws import STEP
from shardkit.testing.exact.evidence import UnprovableError
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.law import TracedRow, make_batch, make_inputs
from shardkit.testing.exact.numbers.arithmetic import power
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.size import check_size
from shardkit.testing.one_device import Reference
from shardkit.testing.program import Program

_POINTS = 2
_RUNS = 4  # of a step that compares floats, about
_MOST_SECONDS = 150.0
# The optimized module is the same, to the letter; the machine code, of which the law says nothing, takes half as long.
_ON_CPU = {"xla_backend_optimization_level": 0}


def compiled(program: Program, reference: Reference) -> str | None:
    """The optimized module of the step equals the traced step, for all parameters and floats of a batch.

    The compared step begins with the first state, but for the zeros in the optimizer's state. In their place stand
    squares of unknowns, because a second moment is not negative, and a count is 1. So a decay that multiplies a moment
    is seen too. The state after the step, all metrics and every replica of both are compared in a finite field, as in
    `assert_compiled_equal`; integers of the batch, as tokens, and keys keep their values. So a sum that the compiler
    dropped, or a group of wrong devices, is seen, and rounding is not. A note tells of a step that is neither proved
    nor refuted, or would take minutes; and of constants and roundings that a proof had to assume (`numbers/folded.py`).

    Example:
        >>> laws = [*sk.testing.LAWS, sk.testing.laws.compiled]  # for `prove(..., laws=laws)`
    """
    if not isinstance(program.step, Step):
        return "as compiled: the step must be one of make_train_step"
    try:
        assumed = prove_step(program)
    except UnprovableError as error:
        return f"not as compiled: {error}"
    return make_note(assumed)


def prove_step(program: Program, topology: str | None = None) -> list[str]:
    """Refuses a compiled step that differs from the traced one; returns the assumptions of a proof, as sentences.

    With a topology the step is compiled for chips that need not be present.
    """
    check_values("law", (program.params, program.batches))
    traced = TracedRow.of(program)
    check_size("law", [traced.program], _POINTS, _RUNS, longest=_MOST_SECONDS)  # compiling takes long, too
    if topology is None:
        executable = _compile(program, traced)
        pair = CompiledPair.of("law", executable, traced.step.jaxpr)
    else:
        built = aot.build(traced.step, (), topology=topology)
        pair = CompiledPair.of_absent("law", built, topology, traced.step.jaxpr)
    check_size("law", pair.programs, _POINTS, _RUNS, longest=_MOST_SECONDS)

    def make_arguments(field: Field) -> list[Any]:
        return _make_arguments(program, traced, field)

    evidence = pair.prove("law", "", "output", make_arguments, _POINTS, STEP)
    return [
        *describe_folded_constants(evidence),
        *describe_rounding(pair.on_devices, pair.traced),
        *describe_memory(pair.on_devices),
    ]


def _compile(program: Program, traced: TracedRow) -> Any:
    """The executable of the step, whose module is read and which does not run."""
    # A run has compiled the program already; without one, shapes are enough to compile it.
    if "compiled" in vars(program):
        return program.compiled
    options = None
    if program.mesh.devices.flat[0].platform == "cpu":
        options = _ON_CPU
    return traced.step.lower().compile(compiler_options=options)


def _make_arguments(program: Program, traced: TracedRow, field: Field) -> list[Operand]:
    """The leaves that the step takes: those of a state without its key, the key, and those of the batch."""
    params = make_inputs(field, "params", program.params)
    leaves = Interpreter(field).run(traced.init, params)
    state = jax.tree.unflatten(jax.tree.structure(traced.state), leaves)
    state = state._replace(key=None, opt_state=_fill_zeros(field, state.opt_state))
    batch = make_batch(program, 0, field)
    return [*jax.tree.leaves(state), to_known(program.key), *batch]


def _fill_zeros(field: Field, opt_state: Any) -> Any:
    """The state of an optimizer with unknowns in place of the zeros that it has before the first step.

    Beside zeros a step would not show what it does with its moments: 0.9 * 0 is 0.99 * 0. Two steps would, at three
    times the price, and they would nest the exps of both.

    Worked example, of adam: the moments mu and nu [3], which are zeros, become the squares of six unknowns, and the
    count 0 becomes 1. Squares, because nu is a mean of squares, of which a root is taken.
    """
    # Numbers that floats of the parameters gave are Exact; the others are arrays, with the values that init wrote.
    leaves, structure = jax.tree.flatten(opt_state)
    filled = []
    for number, x in enumerate(leaves):
        is_zeros = not isinstance(x, Exact) and not x.any()
        if is_zeros and x.dtype.kind == "f":
            # Nothing tells a first moment from a second one, so neither is negative.
            unknown = draw_input(field, f"moment {number}", x.shape)
            x = power(field, unknown, 2)
        elif is_zeros and x.dtype.kind == "i" and not x.shape:
            x = np.ones_like(x)  # a count of steps, as if there had been one
        filled.append(x)
    return jax.tree.unflatten(structure, filled)

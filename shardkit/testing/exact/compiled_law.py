"""The law that the compiled step of a row equals the traced one, for all parameters and floats of a batch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardkit.steps.step import Step
from shardkit.testing.exact.compiled_pair import CompiledPair
from shardkit.testing.exact.draws import STEP
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.law import TracedRow, make_batch, make_inputs
from shardkit.testing.exact.numbers.arithmetic import power
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.program_pair import UnprovableError
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.size import check_size
from shardkit.testing.one_device import Reference
from shardkit.testing.program import Program

_POINTS = 2
_RUNS = 4  # of a step that compares floats, about
# The optimized module is the same, to the letter; the machine code, of which the law says nothing, takes half as long.
_ON_CPU = {"xla_backend_optimization_level": 0}


def compiled(program: Program, reference: Reference) -> str | None:
    """The optimized module of the step equals the traced step, for all parameters and floats of a batch.

    The compared step begins with the first state, but for zeros in the optimizer's: in their place stand squares of
    unknowns, because a second moment is not negative, and a count is 1. So a decay that multiplies a moment is seen
    too. The state after it, all metrics and every replica of both are compared in a finite field, as in
    `assert_compiled_equal`; integers of the batch, as tokens, and keys keep their values. So a sum that the compiler
    dropped, or a group of wrong devices, is seen, and rounding is not. A constant that the compiler folded may stand
    for what it was computed of (`numbers/folded.py`). What is neither proved nor refuted, or would take minutes, is
    told in a note.

    Example:
        >>> laws = [*sk.testing.LAWS, sk.testing.laws.compiled]  # for `prove(..., laws=laws)`
    """
    if not isinstance(program.step, Step):
        return "as compiled: the step must be one of make_train_step"
    try:
        _prove(program)
    except UnprovableError as error:
        return f"not as compiled: {error}"
    return None


def _prove(program: Program) -> None:
    traced = TracedRow.of(program)
    # A run has the program already; without one, shapes are enough to compile it.
    executable = program.compiled if "compiled" in vars(program) else _compile(program, traced)
    pair = CompiledPair.of("law", executable, traced.step.jaxpr)
    check_size("law", pair.programs, _POINTS, _RUNS, longest=150.0)

    def make_arguments(field: Field) -> list[Any]:
        return _make_arguments(program, traced, field)

    pair.prove("law", "", "output", make_arguments, _POINTS, STEP)


def _compile(program: Program, traced: TracedRow) -> Any:
    """The executable of the step, whose module is read and which does not run."""
    on_cpu = program.mesh.devices.flat[0].platform == "cpu"
    return traced.step.lower().compile(compiler_options=_ON_CPU if on_cpu else None)


def _make_arguments(program: Program, traced: TracedRow, field: Field) -> list[Operand]:
    """The leaves that the step takes: those of a state without its key, the key, and those of the batch."""
    leaves = Interpreter(field).run(traced.init, make_inputs(field, "params", program.params))
    state = jax.tree.unflatten(jax.tree.structure(traced.state), leaves)
    state = state._replace(key=None, opt_state=_fill_zeros(field, state.opt_state))
    return [*jax.tree.leaves(state), to_known(program.key), *make_batch(program, 0, field)]


def _fill_zeros(field: Field, opt_state: Any) -> Any:
    """The state of an optimizer after any steps, in place of the zeros before the first one.

    A second step would show the same at three times the price, and nest the exps of two.
    """
    leaves, structure = jax.tree.flatten(opt_state)
    filled = []
    for number, x in enumerate(leaves):
        if isinstance(x, Exact) or x.any():
            filled.append(x)
        elif x.dtype.kind == "f":
            # A second moment is not negative, and a root is taken of it.
            unknown = draw_input(field, f"moment {number}", x.shape)
            filled.append(power(field, unknown, 2))
        elif x.dtype.kind == "i" and not x.shape:
            filled.append(np.ones_like(x))
        else:
            filled.append(x)
    return jax.tree.unflatten(structure, filled)

"""The law that the compiled step of a row equals the traced one, for all parameters and floats of a batch."""

from __future__ import annotations

from typing import Any

import jax

from shardkit.steps.step import Step
from shardkit.testing.exact.compiled_pair import CompiledPair
from shardkit.testing.exact.draws import STEP
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.law import TracedRow, make_batch, make_inputs
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.program_pair import UnprovableError
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.size import check_size
from shardkit.testing.one_device import Reference
from shardkit.testing.program import Program

_POINTS = 2
_RUNS = 4  # of a step that compares floats, about


def compiled(program: Program, reference: Reference) -> str | None:
    """The optimized module of the step equals the traced step, for all parameters and floats of a batch.

    The step that is compared is the first one. Its state, all metrics and every replica of both are compared in a
    finite field, as in `assert_compiled_equal`; integers of the batch, as tokens, and keys keep their values. So a sum
    that the compiler dropped, or a group of wrong devices, is seen, and rounding is not. A
    constant that the compiler folded may stand for what it was computed of (`numbers/folded.py`). What is neither
    proved nor refuted, or would take minutes, is told in a note.

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
    executable = program.compiled if "compiled" in vars(program) else traced.step.lower().compile()
    pair = CompiledPair.of("law", executable, traced.step.jaxpr)
    check_size("law", pair.programs, _POINTS, _RUNS, longest=150.0)

    def make_arguments(field: Field) -> list[Any]:
        return _make_arguments(program, traced, field)

    pair.prove("law", "", "output", make_arguments, _POINTS, STEP)


def _make_arguments(program: Program, traced: TracedRow, field: Field) -> list[Operand]:
    """The leaves that the step takes: those of the first state without its key, the key, and those of the batch."""
    leaves = Interpreter(field).run(traced.init, make_inputs(field, "params", program.params))
    state = jax.tree.unflatten(jax.tree.structure(traced.state), leaves)
    return [*jax.tree.leaves(state._replace(key=None)), to_known(program.key), *make_batch(program, 0, field)]

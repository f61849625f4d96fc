"""Whether all processes trace the same program: it is traced as two of them and compared."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shardkit._arguments.checks import describe_error, quote
from shardkit._jax import backends, compat
from shardkit._jax.jaxprs import kind_of, mesh_axes, source_line, walk
from shardkit.analysis.jaxpr.dataflow import Context, format_type
from shardkit.analysis.jaxpr.step import TracedStep, trace_step
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, find_first_line

_LARGEST_CONSTANT = 1 << 20  # elements; larger ones are not compared
_SIMPLE = (int, float, str, bool, type(None), np.dtype, jax.sharding.PartitionSpec)
_REMEDY = "Run the same program on every process, and pass differences as data or decide them outside."


class _Line(NamedTuple):
    """An equation, or a constant that the program closes over, with the key that must be equal on all processes."""

    key: tuple[Any, ...]
    equation: Any
    constant: str = ""

    @property
    def collective(self) -> bool:
        """Whether it communicates."""
        return not self.constant and kind_of(self.equation) is not None

    def __str__(self) -> str:
        if self.constant:
            return self.constant
        name = self.equation.primitive.name
        kind = kind_of(self.equation)
        if kind is not None:
            name = f"{kind} over {quote(mesh_axes(self.equation))}"
        types = ", ".join(format_type(operand) for operand in self.equation.invars)
        return f"{name}({types})"


def other_process(program: TracedProgram) -> Iterator[Finding]:
    """Programs that another process would trace differently."""
    # pmap asks for the devices of its process as it traces.
    has_pmap = any(compat.is_made_by_pmap(site.equation) for site in walk(program.step.jaxpr))
    if not has_pmap and not isinstance(program.step.fn, jax.stages.Traced):
        yield from differences_of_processes(program.step)


def differences_of_processes(step: TracedStep) -> Iterator[Finding]:
    """Compares a program that was traced here with what another process would trace.

    For example a step that calls `psum` only `if jax.process_index() == 0` has one collective as process 0 and none as
    process 1: process 0 waits for ever.
    """
    here = 0  # before jax starts
    if backends.jax_has_started():
        here = jax.process_index()
    there = 0
    if here == 0:
        there = 1
    try:
        with backends.as_process(there):
            other_step = trace_step(step.fn, step.args, step.kwargs)
    except Exception as error:
        yield Finding(
            "process-dependent-program",
            f"it can be traced as process {here} and raises {describe_error(error)} as process {there}.",
            _find_line_of_error(error),
            _REMEDY,
        )
        return
    lines = _list_program(step)
    other_lines = _list_program(other_step)
    # Collectives first: a difference there is a deadlock, which says more than the first line that differs.
    finding = _compare_collectives(lines, other_lines, here, there)
    if finding is None:
        finding = _compare_programs(lines, other_lines, here, there)
    if finding is not None:
        yield finding


def _compare_collectives(lines: list[_Line], other_lines: list[_Line], here: int, there: int) -> Finding | None:
    collectives = [line for line in lines if line.collective]
    other_collectives = [line for line in other_lines if line.collective]
    difference = _find_difference(collectives, other_collectives)
    if difference is None:
        return None
    counts = f"{len(collectives)} collectives as process {here} and {len(other_collectives)} as process {there}"
    return Finding(
        "process-dependent-communication",
        f"the program runs {counts}; the first difference is {difference}: a deadlock.",
        source_line(difference.equation),
        _REMEDY,
    )


def _compare_programs(lines: list[_Line], other_lines: list[_Line], here: int, there: int) -> Finding | None:
    difference = _find_difference(lines, other_lines)
    if difference is None:
        return None
    text = str(difference)
    if str(difference.line) == str(difference.other_line):
        text += " of other values"
    return Finding(
        "process-dependent-program",
        f"processes {here} and {there} trace different programs; the first difference is {text}.",
        find_first_line(difference.equation, Context()),
        _REMEDY,
    )


class _Difference(NamedTuple):
    """The first lines in which two programs differ; one of them may end before the other, and has None."""

    line: _Line | None
    other_line: _Line | None

    @property
    def equation(self) -> Any:
        """The equation of this program, or where it has ended of the other one."""
        line = self.line or self.other_line
        assert line is not None
        return line.equation

    def __str__(self) -> str:
        return f"{self.line or 'nothing'} against {self.other_line or 'nothing'}"


def _find_difference(lines: list[_Line], other_lines: list[_Line]) -> _Difference | None:
    for line, other_line in zip_longest(lines, other_lines):
        if line is None or other_line is None or line.key != other_line.key:
            return _Difference(line, other_line)
    return None


def _list_program(step: TracedStep) -> list[_Line]:
    closed_jaxpr = step.traced.jaxpr
    return list(_list_lines(closed_jaxpr.jaxpr, closed_jaxpr.consts))


def _list_lines(jaxpr: Any, constants: Sequence[Any], path: tuple[str, ...] = ()) -> Iterator[_Line]:
    """Every constant and equation of a program, the inner ones after the equation that holds them."""
    # The program of a `run_scoped` holds no constants: what it closes over are operands of its equation.
    closed_over = jaxpr.constvars[: len(constants)]
    for variable, constant in zip(closed_over, constants, strict=True):
        # A constant that no equation reads may differ.
        user = _find_user(jaxpr, variable)
        if user is not None:
            key = (path, "constant", _digest(constant))
            yield _Line(key, user, f"a constant {format_type(variable)}")
    for equation in jaxpr.eqns:
        operands = tuple(_describe_operand(operand) for operand in equation.invars)
        # What a parameter says only by an object, as a jaxpr or a function, is not in the key: jaxprs follow as lines
        # of their own, and the texts of functions contain addresses.
        params = []
        for name, value in equation.params.items():
            if _is_simple(value):
                params.append((name, _describe_value(value)))
        # With the path, because a psum in one branch and the same psum in the other, or behind the cond, differ.
        yield _Line((path, equation.primitive.name, operands, tuple(sorted(params))), equation)
        inner_programs = zip(compat.inner_jaxprs(equation), compat.inner_constants(equation), strict=True)
        for number, ((name, inner_jaxpr), inner_constants) in enumerate(inner_programs):
            inner_path = (*path, f"{equation.primitive.name}.{name}.{number}")
            yield from _list_lines(inner_jaxpr, inner_constants, inner_path)


def _find_user(jaxpr: Any, variable: Any) -> Any:
    """The first equation that reads a variable; None if none does."""
    for equation in jaxpr.eqns:
        if any(operand is variable for operand in equation.invars):
            return equation
    return None


def _describe_operand(operand: Any) -> str:
    """The value of a literal, else the type."""
    if not hasattr(operand, "val"):
        return str(operand.aval)
    value = operand.val
    if np.size(value) >= _LARGEST_CONSTANT:
        return repr(np.shape(value))
    return repr(np.asarray(value).tolist())


def _is_simple(value: Any) -> bool:
    """Whether a parameter is text, numbers, dtypes and specs, alone or in lists, so that its text says all of it."""
    if isinstance(value, tuple | list | frozenset):
        return all(_is_simple(element) for element in value)
    return isinstance(value, _SIMPLE)


def _describe_value(value: Any) -> str:
    """A simple parameter in words; equal sets read the same, though Python prints them in the order they were made."""
    if not isinstance(value, tuple | list | frozenset):
        return repr(value)
    elements = [_describe_value(element) for element in value]
    if isinstance(value, frozenset):
        elements.sort()
    return f"{type(value).__name__}({', '.join(elements)})"


def _digest(constant: Any) -> tuple[Any, ...]:
    """A key that equal constants share: with their bytes, if they are plain, addressable and not too large."""
    dtype = getattr(constant, "dtype", type(constant))
    key = (np.shape(constant), str(dtype))
    # A constant of an outer trace has no values yet.
    if not isinstance(dtype, np.dtype) or isinstance(constant, jax.core.Tracer):
        return key
    if not getattr(constant, "is_fully_addressable", True) or np.size(constant) > _LARGEST_CONSTANT:
        return key
    return (*key, np.asarray(constant).tobytes())


def _find_line_of_error(error: BaseException) -> str:
    """The innermost line outside jax and shardkit that raised an exception."""
    libraries = [Path(jax.__file__).parent, Path(compat.__file__).parents[1]]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not any(library in path.parents for library in libraries):
            return f"{path.name}:{frame.lineno} ({frame.name})"
    return "unknown"

"""Whether all processes trace the same program: it is traced as two of them and compared."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shardkit._arguments.checks import quoted, raised
from shardkit._jax import backends, compat
from shardkit._jax.jaxprs import kind_of, mesh_axes, source_line, walk
from shardkit.analysis.jaxpr.dataflow import Context, format_type
from shardkit.analysis.jaxpr.step import TracedStep, trace_step
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, find_first_line

_LARGEST_CONSTANT = 1 << 20  # elements; larger ones are not compared
_SIMPLE = (int, float, str, bool, type(None), np.dtype, jax.sharding.PartitionSpec)
_REMEDY = "Run the same program on every process, and pass what differs as data or decide it outside."


class _Line(NamedTuple):
    """An equation, or a constant that the program closes over, with the key that must be equal on all processes."""

    key: tuple[Any, ...]
    equation: Any
    constant: str = ""

    @property
    def collective(self) -> bool:
        """Whether it communicates."""
        return not self.constant and kind_of(self.equation) is not None


def other_process(program: TracedProgram) -> Iterator[Finding]:
    """Programs that another process would trace differently."""
    # pmap asks for the devices of its process as it traces.
    pmaps = any(compat.is_made_by_pmap(site.equation) for site in walk(program.step.jaxpr))
    if not pmaps and not isinstance(program.step.fn, jax.stages.Traced):
        yield from differences_of_processes(program.step)


def differences_of_processes(step: TracedStep) -> Iterator[Finding]:
    """Compares a program that was traced here with what another process would trace."""
    # Before jax starts, its index is 0.
    here = jax.process_index() if backends.jax_has_started() else 0
    there = 1 if here == 0 else 0
    try:
        with backends.as_process(there):
            other = trace_step(step.fn, step.args, step.kwargs)
    except Exception as error:
        yield Finding(
            "process-dependent-program",
            f"it can be traced as process {here} and raises {raised(error)} as process {there}.",
            _raised_at(error),
            _REMEDY,
        )
        return
    mine, theirs = (list(_lines(each.jaxpr, each.consts)) for each in (step.traced.jaxpr, other.traced.jaxpr))
    yield from _compare(mine, theirs, here, there)


def _compare(mine: list[_Line], theirs: list[_Line], here: int, there: int) -> Iterator[Finding]:
    messages = [[line for line in lines if line.collective] for lines in (mine, theirs)]
    if first := _first_difference(*messages):
        a, b = first
        counts = f"{len(messages[0])} collectives as process {here} and {len(messages[1])} as process {there}"
        yield Finding(
            "process-dependent-communication",
            f"the program runs {counts}; the first difference is {_told(a)} against {_told(b)}: a deadlock.",
            source_line((a or b).equation),  # type: ignore[union-attr]
            _REMEDY,
        )
        return
    if first := _first_difference(mine, theirs):
        a, b = first
        yield Finding(
            "process-dependent-program",
            f"processes {here} and {there} trace different programs; the first difference is "
            f"{_told(a)} against {_told(b)}{' of other values' if a and b and _told(a) == _told(b) else ''}.",
            find_first_line((a or b).equation, Context()),  # type: ignore[union-attr]
            _REMEDY,
        )


def _first_difference(mine: list[_Line], theirs: list[_Line]) -> tuple[_Line | None, _Line | None] | None:
    return next((pair for pair in zip_longest(mine, theirs) if None in pair or pair[0].key != pair[1].key), None)


def _lines(jaxpr: Any, constants: Sequence[Any], path: tuple[str, ...] = ()) -> Iterator[_Line]:
    """Every constant and equation of a program, the inner ones after the equation that holds them."""
    for variable, constant in zip(jaxpr.constvars, constants, strict=True):
        user = next((e for e in jaxpr.eqns if any(v is variable for v in e.invars)), None)
        if user is not None:
            yield _Line((path, "constant", _digest(constant)), user, f"a constant {format_type(variable)}")
    for equation in jaxpr.eqns:
        operands = tuple(_operand(v) for v in equation.invars)
        params = tuple(sorted((k, _written(v)) for k, v in equation.params.items() if _is_simple(v)))
        yield _Line((path, equation.primitive.name, operands, params), equation)
        inner = zip(compat.inner_jaxprs(equation), compat.inner_constants(equation), strict=True)
        for number, ((name, sub), held) in enumerate(inner):
            yield from _lines(sub, held, (*path, f"{equation.primitive.name}.{name}.{number}"))


def _operand(v: Any) -> str:
    if hasattr(v, "val"):
        value = v.val
        return repr(np.asarray(value).tolist() if np.size(value) < _LARGEST_CONSTANT else np.shape(value))
    return str(v.aval)


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple | list | frozenset):
        return all(_is_simple(each) for each in value)
    return isinstance(value, _SIMPLE)


def _written(value: Any) -> str:
    """A simple parameter in words; equal sets read the same, though Python prints them in the order they were made."""
    if isinstance(value, tuple | list | frozenset):
        parts = [_written(each) for each in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return repr(value)


def _digest(constant: Any) -> Any:
    """What distinguishes constants: their bytes, where they are plain, addressable and not too large."""
    shape, dtype = np.shape(constant), getattr(constant, "dtype", type(constant))
    plain = isinstance(dtype, np.dtype) and not isinstance(constant, jax.core.Tracer)  # inside an outer trace
    if not plain or not getattr(constant, "is_fully_addressable", True) or np.size(constant) > _LARGEST_CONSTANT:
        return shape, str(dtype)
    return shape, str(dtype), np.asarray(constant).tobytes()


def _told(line: _Line | None) -> str:
    if line is None:
        return "nothing"
    if line.constant:
        return line.constant
    equation, name = line.equation, line.equation.primitive.name
    if kind_of(equation) is not None:
        name = f"{kind_of(equation)} over {quoted(mesh_axes(equation))}"
    shapes = ", ".join(format_type(v) for v in equation.invars)
    return f"{name}({shapes})"


def _raised_at(error: BaseException) -> str:
    """The innermost line outside jax and shardkit that raised an exception."""
    libraries = [Path(jax.__file__).parent, Path(compat.__file__).parents[1]]
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not any(root in Path(f.filename).parents for root in libraries)
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].name})" if frames else "unknown"

"""Findings, rules, and the uses of a value in a traced program, for all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from shardkit._jax import compat
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.dataflow import Block, Context, enter_call, find_line


class Finding(NamedTuple):
    """One place of a program that breaks a rule.

    Attributes:
        rule: its name, which `ignore=` of `lint` and `audit` takes.
        message: the mistake, with its values; one sentence.
        source: your line, "file.py:12 (function)"; "" if the program has none.
        remedy: the way to correct it; one sentence.
    """

    rule: str
    message: str
    source: str
    remedy: str

    def __str__(self) -> str:
        sentence = f"{self.rule}: {self.message} {self.remedy}"
        if not self.source:
            return sentence
        return f"{self.source}: {sentence}"


class Rule(NamedTuple):
    """One rule.

    Attributes:
        name: its name in a finding and in `ignore=`.
        finds: the mistake, in a few words.
        reads: "trace": `lint` and `audit` apply it, to a `TracedProgram`; "compiled": `audit(..., compiled=True)` does,
            to a `CompiledProgram`.
        check: `check(program)` yields the findings. Rules may share one function, which runs once.
        wrong: whether the mistake gives other numbers than one device, or never ends. The first step of
            `make_train_step` then refuses the program.
    """

    name: str
    finds: str
    reads: Literal["trace", "compiled"]
    check: Callable[[Any], Iterator[Finding]]
    wrong: bool = False


def findings(rules: Iterable[Rule], program: Any) -> list[Finding]:
    """Applies rules to a program, in their order; a function that several rules share runs once."""
    rules = list(rules)
    names = {rule.name for rule in rules}
    checks = dict.fromkeys(rule.check for rule in rules)  # each once, in order
    distinct: dict[Finding, None] = {}
    for check in checks:
        for finding in check(program):
            # A function that several rules share finds for all of them, also for rules that are ignored.
            if finding.rule in names:
                distinct[finding] = None
    return list(distinct)


class Use(NamedTuple):
    """One use of a value in a traced program: the equation, which operand it is, and the block around it."""

    equation: Any
    position: int
    block: Block

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.equation.primitive.name)


def uses(block: Block, variable: Any) -> Iterator[Use | None]:
    """Every use of a value, through casts and into called functions; None where it leaves the block.

    For example in `y = pvary(g); z = jit(f)(y)` the uses of g are the uses of f's argument inside f.
    """
    if any(out is variable for out in block.jaxpr.outvars):
        yield None
    for equation in block.jaxpr.eqns:
        for position, operand in enumerate(equation.invars):
            if operand is not variable:
                continue
            if passes_on(equation):
                result = equation.outvars[0]
                if len(equation.outvars) > 1:  # a barrier returns all of its operands
                    result = equation.outvars[position]
                yield from uses(block, result)
                continue
            called = enter_call(block, equation)
            if called is None:
                yield Use(equation, position, block)
            else:
                yield from uses(called, called.jaxpr.invars[position])


def passes_on(equation: Any) -> bool:
    """Whether the results of an equation are its operands, in another type perhaps."""
    name = equation.primitive.name
    return name == "convert_element_type" or registered(name).same


def find_first_line(equation: Any, context: Context) -> str:
    """The line of an equation, or where it has none, as a differentiated shard_map, the first line inside."""
    line = find_line(equation, context)
    if line != "unknown":
        return line
    for _, jaxpr in compat.inner_jaxprs(equation):
        for inner_equation in jaxpr.eqns:
            line = find_first_line(inner_equation, context)
            if line != "unknown":
                return line
    return "unknown"

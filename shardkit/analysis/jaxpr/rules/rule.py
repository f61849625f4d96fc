"""What the lint's rules share: findings, the program that is linted, and how values are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardkit import _compat
from shardkit._jaxprs import IDENTITIES
from shardkit.analysis.jaxpr.dataflow import Block, Context, inside, where


class Finding(NamedTuple):
    """One place of a program that breaks a rule.

    Attributes:
        rule: a name in `shardkit.analysis.RULES`.
        message: what is wrong there, with the values; one sentence.
        source: the user's line, "file.py:12 (function)".
        remedy: what to do instead; one sentence.
    """

    rule: str
    message: str
    source: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.source}: {self.rule}: {self.message} {self.remedy}"


class Program(NamedTuple):
    """The program that is linted.

    Attributes:
        fn: the function, as it was passed.
        args: its positional arguments.
        kwargs: its keyword arguments.
        closed: its closed jaxpr.
        large: bytes from which a replicated input is reported.
        small: bytes below which waste is not reported.
        memory: bytes that one device holds; None if that is not known.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    closed: Any
    large: int
    small: int
    memory: int | None = None


class Rule(NamedTuple):
    """One rule of the lint.

    Attributes:
        name: what a finding and `lint(ignore=...)` call it.
        finds: what it finds, in a few words.
        check: `check(block, program)` yields the findings in one jaxpr of a program. The inner blocks come first; a
            rule on the whole program waits for the outermost, whose jaxpr is `program.closed.jaxpr`. Rules may share
            one function, which runs once.
    """

    name: str
    finds: str
    check: Callable[[Block, Program], Iterator[Finding]]


class Use(NamedTuple):
    """One use of a value: the equation, which operand it is, and the block around it."""

    equation: Any
    position: int
    block: Block

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.equation.primitive.name)


def uses(block: Block, variable: Any) -> Iterator[Use | None]:
    """Every use of a value, through casts and into called functions; None where it leaves the block."""
    if any(out is variable for out in block.jaxpr.outvars):
        yield None
    for equation in block.jaxpr.eqns:
        for position, each in enumerate(equation.invars):
            if each is not variable:
                continue
            if equation.primitive.name in IDENTITIES | {"convert_element_type"}:
                yield from uses(block, equation.outvars[position if len(equation.outvars) > 1 else 0])
                continue
            called = inside(block, equation)
            if called is None:
                yield Use(equation, position, block)
            else:
                yield from uses(called, called.jaxpr.invars[position])


def place(equation: Any, context: Context) -> str:
    """The line of an equation, or where it has none, as a differentiated shard_map, the first line inside."""
    known = where(equation, context)
    for _, sub in _compat.inner_jaxprs(equation) if known == "unknown" else ():
        lines = [line for each in sub.eqns if (line := place(each, context)) != "unknown"]
        known = lines[0] if lines else known
    return known

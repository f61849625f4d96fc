"""What two programs that were found equal have shown in all runs; and the errors of programs that cannot be proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardkit.testing.exact.decision import Decision
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.folded import Constant, Folded
from shardkit.testing.exact.numbers.values import Degree


class UnprovableError(ValueError):
    """Two programs cannot be proved equal for all inputs."""


class UndecidedError(UnprovableError):
    """Two programs are neither proved equal nor shown to differ."""


class Evidence(NamedTuple):
    """What two equal programs have shown in all runs.

    Attributes:
        field: the field of the first run.
        degree: bounds of the degree of the results, in all draws.
        draws: the number of draws of real inputs.
        orders: the number of random orders.
        decisions: all comparisons that could go both ways.
        foreign: those of the comparisons that only one side makes.
        outside: the line where a value was outside of the domain of a function in a draw; "" if none was.
        no_number: for each result in how many of its elements both sides are no number, and how many elements it has.
        alone: for each result in how many of its elements one side alone is outside of the domain of a function, at
            most, and how many elements it has.
        alone_at_zeros: the same of draws whose inputs were chosen, as zeros of a divisor.
        folded: constants that stand for the numbers from which they were computed.
        lacks_floats: whether floats were to propose inputs, and jax cannot run the programs for many of them.
        sorted_lines: the lines at which the place of a number among others is a result.
    """

    field: Field
    degree: Degree
    draws: int
    orders: int
    decisions: list[Decision]
    foreign: list[Decision]
    outside: str
    no_number: dict[str, tuple[int, int]]
    alone: dict[str, tuple[int, int]]
    alone_at_zeros: dict[str, tuple[int, int]]
    folded: Mapping[Constant, Folded]
    lacks_floats: bool = False
    sorted_lines: Sequence[str] = ()

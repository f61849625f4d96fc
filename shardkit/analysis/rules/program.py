"""A step as the rules on a trace see it, with the user's own lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardkit._arguments.checks import describe_error
from shardkit.analysis.jaxpr.census import Census, census_of
from shardkit.analysis.jaxpr.dataflow import Block, follow
from shardkit.analysis.jaxpr.futures import Future, find_futures
from shardkit.analysis.jaxpr.step import TracedStep


@dataclass(frozen=True)
class TracedProgram:
    """One call of a function as the rules on a trace read it."""

    step: TracedStep
    large: int  # bytes from which what several devices hold whole is reported
    small: int  # bytes below which waste is not reported
    capacity: int | None = None  # bytes that one device can hold, less activations; None if that is not known

    @cached_property
    def blocks(self) -> list[Block]:
        """Every jaxpr of the program with what is known of its values, the inner ones first."""
        blocks: list[Block] = []
        follow(self.step.jaxpr, blocks.append)
        return blocks

    @property
    def equations(self) -> Iterator[tuple[Block, Any]]:
        """Every equation, with the block that holds it."""
        for block in self.blocks:
            for equation in block.jaxpr.eqns:
                yield block, equation

    @cached_property
    def census(self) -> Census:
        """Every collective as written."""
        return census_of(self.step.jaxpr)

    @cached_property
    def futures(self) -> list[Future]:
        """Every collective that is started, and where its future ends."""
        return find_futures(self.step.jaxpr)


@contextmanager
def in_one_sentence(where: str, what: str) -> Iterator[None]:
    """Turns an exception of the step, of jax or of the compiler into one sentence."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{where}: the step must be {what} with these arguments; it raises {describe_error(error)}. Check the "
            "arguments, and the mesh context that the step needs."
        ) from error

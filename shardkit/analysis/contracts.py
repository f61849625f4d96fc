"""Contracts on communication: the collectives that a program may run, how often, and the bytes that they send."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import wraps
from typing import Any, NamedTuple

import jax

from shardkit._check import Axis, at_least, axis_names, quoted
from shardkit._typed import typed
from shardkit.analysis.hlo.differences import as_census, compiled
from shardkit.analysis.jaxpr.census import Census, Row, census
from shardkit.cost.collectives import COLLECTIVE_KINDS


class Collective(NamedTuple):
    """One kind of collective over the same axes, as `collective` describes it; None allows any value."""

    kind: str
    axes: tuple[str, ...]
    times: int | None = None
    sent: int | Fraction | None = None

    def __str__(self) -> str:
        times = "at least one" if self.times is None else f"{self.times} x"
        sent = "" if self.sent is None else f", {float(self.sent):,.0f} bytes sent"
        return f"{times} {self.kind} over {quoted(self.axes)}{sent}"


@typed
def collective(kind: str, axis: Axis, *, times: int | None = None, sent: int | Fraction | None = None) -> Collective:
    """Describes one kind of collective for `expects`.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ppermute".
        axis: mesh axis or tuple of axes, in any order.
        times: executions per call, over all call sites together; None: any number, at least one.
        sent: bytes sent per device and call; None: any.

    Raises:
        ValueError: kind is none of these; times or sent is negative.

    Example:
        >>> print(sk.collective("all_reduce", "model", times=1))
        1 x all_reduce over 'model'
    """
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(
            f"collective: kind must be one of {quoted(COLLECTIVE_KINDS)}; got {kind!r}. Pass for example 'all_reduce'."
        )
    at_least("collective", 0, times=times, sent=sent)
    return Collective(kind, tuple(sorted(axis_names("collective", axis))), times, sent)


class expects:
    """Asserts that a function runs exactly these collectives and no others.

    As a decorator, `@expects(collective("all_reduce", "data", times=2))` checks a call with a new argument signature
    before it runs. As a context manager, `with expects(...) as check: check(step, state, batch)`; leaving it without a
    check is an error. `expects(...).check_compiled(step, state, batch)` checks the compiled program.

    Args:
        *rows: the expected collectives, from `collective`; none: the function sends nothing.

    Raises:
        AssertionError: the program runs other collectives; the message lists the differences with source lines.
        ValueError: two rows for the same kind and axes.

    Example:
        >>> f = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> sk.expects(sk.collective("all_reduce", "model", times=1)).check(f, jnp.ones((8, 4))).count()
        1
    """

    def __init__(self, *rows: Collective):
        for row in rows:
            if not isinstance(row, Collective):
                raise TypeError(
                    f"expects: each row must be a collective; got {row!r}. Pass for example "
                    "sk.collective('all_reduce', 'data')."
                )
        keys = [(row.kind, row.axes) for row in rows]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(
                    f"expects: a kind over the same axes must have one row; got two for {key[0]} over "
                    f"{quoted(key[1])}. Add them up."
                )
        self.rows = rows
        self._checked = False

    def check(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Census:
        """Traces one call of `fn`, compares its collectives with the expected ones and returns the census."""
        self._checked = True
        found = census(fn, *args, **kwargs)
        wrong = differences(found, self.rows)
        if wrong:
            raise AssertionError("the program does not communicate as expected:\n" + "\n".join(wrong))
        return found

    def check_compiled(self, program: Any, *args: Any, **kwargs: Any) -> Census:
        """Compares a compiled program with the expected collectives and returns its collectives as a census.

        Args:
            program: a Report of `aot.compile`, or a function, which is compiled for the devices of this process.
            *args: the function's arguments.
            **kwargs: its keyword arguments.

        Raises:
            AssertionError: the compiled program runs other collectives; the message lists every difference, and what
                the compiler added, merged, dropped or changed.
        """
        self._checked = True
        made = compiled(program, *args, **kwargs) if callable(program) else program
        found = as_census(made.rows)
        wrong = differences(found, self.rows)
        if wrong:
            changes = [f"- {line}" for line in made.differences()]
            by_compiler = ["what the compiler changed:", *changes] if changes else ["the compiler changed nothing"]
            lines = ["the compiled program does not communicate as expected:", *wrong, *by_compiler]
            raise AssertionError("\n".join(lines))
        return found

    def __enter__(self) -> Callable[..., Census]:
        self._checked = False
        return self.check

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None and not self._checked:
            raise AssertionError(
                "expects: the block must check a function; nothing was checked. Call check(fn, *args) inside it."
            )

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        seen: set[Any] = set()

        @wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = jax.tree.flatten((args, kwargs))
            signature = (structure, tuple(str(jax.typeof(leaf)) for leaf in leaves))
            if signature not in seen:
                self.check(fn, *args, **kwargs)
                seen.add(signature)
            return fn(*args, **kwargs)

        return checked


def differences(found: Census, expected: tuple[Collective, ...]) -> list[str]:
    """The differences between a census and the expected collectives, one line each, with source lines."""
    groups: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in found.rows:
        groups.setdefault((row.kind, tuple(sorted(row.axes))), []).append(row)
    wrong = []
    for want in expected:
        rows = groups.pop((want.kind, want.axes), [])
        part = Census(tuple(rows))
        times, sent = part.count(), part.sent()
        if not rows and want.times != 0:
            wrong.append(f"- expected {want}; there is none")
        elif want.times not in (None, times) or want.sent not in (None, sent):
            got = Collective(want.kind, want.axes, times, sent if want.sent is not None else None)
            wrong.append(f"- expected {want}; found {got}{_places(rows)}")
    for (kind, axes), rows in sorted(groups.items()):
        part = Census(tuple(rows))
        wrong.append(f"- not expected: {Collective(kind, axes, part.count(), part.sent())}{_places(rows)}")
    return wrong


def _places(rows: list[Row]) -> str:
    places: dict[str, int | None] = {}
    for row in rows:
        before = places.get(row.source, 0)
        places[row.source] = None if row.count is None or before is None else before + row.count
    return "".join(f"\n    {'?' if count is None else count} x at {source}" for source, count in places.items())

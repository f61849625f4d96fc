"""Contracts on communication: the collectives that a program may run, how often, their bytes, and what they add in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least, axis_names, quoted
from shardkit._arguments.typed import DTYPE, short, typed
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import compiled
from shardkit.analysis.jaxpr.census import Census, CensusRow, census
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

    `expects(collective("all_reduce", "data", times=2)).check(step, state, batch)` traces a call and runs nothing, and
    `.check_compiled(step, state, batch)` checks the compiled program. As a context manager,
    `with expects(...) as check: check(step, state, batch)`, it is an error to leave it without a check.

    Args:
        *rows: the expected collectives, from `collective`; none: the function sends nothing, or with `sums` anything.
        sums: the dtype in which floats are added over devices, or a wider one, as "float32"; or one for each axis by
            name, as `{"data": "float32"}` where partial sums of tensor parallelism are bfloat16. A census row has what
            it adds in as `sums`. What is exchanged by an all_to_all and then added, as by `compressed`, is no sum here.

    Raises:
        AssertionError: the program runs other collectives, or adds in a narrower dtype; the message lists the
            differences with source lines.
        ValueError: two rows for the same kind and axes; `check_compiled` with `sums`.
        TypeError: `sums` is no dtype of floats.

    Example:
        >>> f = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> sk.expects(sk.collective("all_reduce", "model", times=1)).check(f, jnp.ones((8, 4))).count()
        1
        >>> try:
        ...     sk.expects(sums="float32").check(f, jnp.ones((8, 4), jnp.bfloat16))
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[1])
        - expected sums in float32; all_reduce over 'model' adds in bfloat16
    """

    def __init__(self, *rows: Collective, sums: Any = None):
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
        each = sums.values() if isinstance(sums, Mapping) else () if sums is None else (sums,)
        for dtype in each:
            if not DTYPE.test(dtype) or not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(
                    f"expects: sums must be a dtype of floats, or a dict of them by axis; got {short(sums)}. Pass for "
                    "example sums='float32'."
                )
        self.rows = rows
        self.sums = sums
        self._checked = False

    def check(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Census:
        """Traces one call of `fn`, compares its collectives with the expected ones and returns the census."""
        self._checked = True
        found = census(fn, *args, **kwargs)
        wrong = differences(found.rows, self.rows) if self.rows or self.sums is None else []
        if isinstance(self.sums, Mapping):
            idle = [axis for axis in self.sums if not found.select(axis=axis)]
            wrong += [f"- expected sums over {axis!r}; nothing is sent over it" for axis in idle]
        wrong += narrow_sums(found.rows, self.sums) if self.sums is not None else []
        if wrong:
            raise AssertionError("the program does not communicate as expected:\n" + "\n".join(wrong))
        return found

    def check_compiled(self, program: Any, *args: Any, **kwargs: Any) -> tuple[CompiledRow, ...]:
        """Compares a compiled program with the expected collectives and returns its collectives.

        Args:
            program: a Report of `aot.compile`, or a function, which is compiled for the devices of this process.
            *args: the function's arguments.
            **kwargs: its keyword arguments.

        Raises:
            AssertionError: the compiled program runs other collectives; the message lists every difference, and what
                the compiler added, merged, dropped or changed.
        """
        self._checked = True
        if self.sums is not None:
            raise ValueError(
                "expects: sums= is what the traced program adds in, because a compiler may widen or narrow a sum; got "
                "it in check_compiled. Call check, or leave sums out."
            )
        if not callable(program) and not hasattr(program, "differences"):
            raise TypeError(
                f"expects: check_compiled takes a function, or a Report of aot.compile; got {short(program)}. Pass the "
                "step, and its arguments."
            )
        made = compiled(program, *args, **kwargs) if callable(program) else program
        wrong = differences(made.rows, self.rows)
        if wrong:
            changes = [f"- {line}" for line in made.differences()]
            by_compiler = ["what the compiler changed:", *changes] if changes else ["the compiler changed nothing"]
            lines = ["the compiled program does not communicate as expected:", *wrong, *by_compiler]
            raise AssertionError("\n".join(lines))
        rows: tuple[CompiledRow, ...] = made.rows
        return rows

    def __enter__(self) -> Callable[..., Census]:
        self._checked = False
        return self.check

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None and not self._checked:
            raise AssertionError(
                "expects: the block must check a function; nothing was checked. Call check(fn, *args) inside it."
            )


def differences(found: Sequence[CensusRow | CompiledRow], expected: tuple[Collective, ...]) -> list[str]:
    """The differences between a program's collectives and the expected ones, one line each, with source lines."""
    groups: dict[tuple[str, tuple[str, ...]], list[CensusRow | CompiledRow]] = {}
    for row in found:
        groups.setdefault((row.kind, tuple(sorted(row.axes))), []).append(row)
    wrong = []
    for want in expected:
        rows = groups.pop((want.kind, want.axes), [])
        got = _together(want.kind, want.axes, rows)
        if not rows and want.times != 0:
            wrong.append(f"- expected {want}; there is none")
        elif want.times not in (None, got.times) or want.sent not in (None, got.sent):
            shown = got if want.sent is not None else got._replace(sent=None)
            wrong.append(f"- expected {want}; found {shown}{_places(rows)}")
    for (kind, axes), rows in sorted(groups.items()):
        wrong.append(f"- not expected: {_together(kind, axes, rows)}{_places(rows)}")
    return wrong


def narrow_sums(found: Sequence[CensusRow], asked: Any) -> list[str]:
    """The sums of floats in a dtype that is narrower than what is asked for, one line each, with source lines.

    `asked` is a dtype, or a dtype for each axis by name.
    """
    groups: dict[tuple[str, tuple[str, ...], str, str], list[CensusRow]] = {}
    for row in found:
        for dtype in _asked_for(row, asked):
            if not at_least_as_wide(row.sums, dtype):
                groups.setdefault((str(jnp.dtype(dtype)), row.axes, row.kind, row.sums), []).append(row)
                break
    return [
        f"- expected sums in {dtype}; {kind} over {quoted(axes)} adds in {sums}{_places(rows)}"
        for (dtype, axes, kind, sums), rows in groups.items()
    ]


def _asked_for(row: CensusRow, asked: Any) -> list[Any]:
    """The dtypes that are asked of what a row adds; none where one device adds nothing."""
    if row.n == 1 or not row.sums:
        return []
    return [asked[axis] for axis in row.axes if axis in asked] if isinstance(asked, Mapping) else [asked]


def at_least_as_wide(sums: str, asked: Any) -> bool:
    """Whether a sum in this dtype loses no more than one in the other; integers are added exactly."""
    if not jnp.issubdtype(sums, jnp.inexact):
        return True
    return jnp.dtype(sums) == jnp.dtype(asked) or jnp.finfo(sums).bits > jnp.finfo(asked).bits


def _together(kind: str, axes: tuple[str, ...], rows: Sequence[CensusRow | CompiledRow]) -> Collective:
    return Collective(kind, axes, sum(row.times for row in rows), sum((row.total for row in rows), Fraction(0)))


def _places(rows: Sequence[CensusRow | CompiledRow]) -> str:
    places: dict[str, int | None] = {}
    for row in rows:
        source = row.source if isinstance(row, CensusRow) else row.place
        before = places.get(source, 0)
        places[source] = None if row.count is None or before is None else before + row.count
    return "".join(f"\n    {'?' if count is None else count} x at {source}" for source, count in places.items())

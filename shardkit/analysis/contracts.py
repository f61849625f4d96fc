"""Contracts on communication: the collectives that a program may run, how often, their bytes, and what they add in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least, axis_names, quote
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
        times = "at least one"
        if self.times is not None:
            times = f"{self.times} x"
        text = f"{times} {self.kind} over {quote(self.axes)}"
        if self.sent is None:
            return text
        return f"{text}, {float(self.sent):,.0f} bytes sent"


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
            f"collective: kind must be one of {quote(COLLECTIVE_KINDS)}; got {kind!r}. Pass for example 'all_reduce'."
        )
    at_least("collective", 0, times=times, sent=sent)
    return Collective(kind, tuple(sorted(axis_names("collective", axis))), times, sent)


class expects:
    """Checks that a function runs exactly these collectives and no others.

    `expects(collective("all_reduce", "data", times=2)).check(step, state, batch)` traces a call and runs nothing, and
    `.check_compiled(step, state, batch)` checks the compiled program. You can also write `with expects(...) as check:
    check(step, state, batch)`: leaving the block without a check is then an error.

    Args:
        *rows: the expected collectives, from `collective`. Without rows, the function must send nothing; with `sums`,
            it may send anything.
        sums: the narrowest dtype in which devices may add floats, such as "float32". Pass a dict for a dtype on each
            axis, such as `{"data": "float32"}` if partial sums of tensor parallelism are bfloat16. A census row has its
            dtype as `sums`. Values that an all_to_all exchanges before they are added, as in `compressed`, do not count
            as sums.

    Raises:
        AssertionError: the program runs other collectives, or adds in a narrower dtype; the message lists the
            differences with source lines.
        ValueError: two rows for the same kind and axes; `check_compiled` with `sums`.
        TypeError: `sums` is not a floating-point dtype.

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
        # All call sites of a kind over the same axes are added up, so that a second row would find none left.
        keys = Counter((row.kind, row.axes) for row in rows)
        for (kind, axes), count in keys.items():
            if count > 1:
                raise ValueError(
                    f"expects: a kind over the same axes must have one row; got two for {kind} over {quote(axes)}. "
                    "Add them up."
                )
        for dtype in _list_dtypes(sums):
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
        __tracebackhide__ = True
        self._checked = True
        actual = census(fn, *args, **kwargs)
        lines = []
        # With `sums` alone, no row means that anything may be sent. Without it, no row means that nothing may.
        if self.rows or self.sums is None:
            lines += differences(actual.rows, self.rows)
        if isinstance(self.sums, Mapping):
            # A misspelled axis would otherwise ask for nothing, and hold.
            for axis in self.sums:
                if not actual.select(axis=axis):
                    lines.append(f"- expected sums over {axis!r}; nothing is sent over it")
        if self.sums is not None:
            lines += narrow_sums(actual.rows, self.sums)
        if lines:
            raise AssertionError("\n".join(["the program does not communicate as expected:", *lines]))
        return actual

    def check_compiled(self, program: Any, *args: Any, **kwargs: Any) -> tuple[CompiledRow, ...]:
        """Compares a compiled program with the expected collectives and returns its collectives.

        Args:
            program: a Report of `aot.compile`, or a function, which is compiled for the devices of this process.
            *args: the function's arguments.
            **kwargs: its keyword arguments.

        Raises:
            AssertionError: the compiled program runs other collectives; the message lists every difference, and every
                collective the compiler added, merged, dropped or changed.
        """
        __tracebackhide__ = True
        self._checked = True
        if self.sums is not None:
            raise ValueError(
                "expects: sums= is the dtype of sums in the traced program, because a compiler may widen or narrow a "
                "sum; got it in check_compiled. Call check, or leave sums out."
            )
        if not callable(program) and not hasattr(program, "differences"):
            raise TypeError(
                f"expects: check_compiled takes a function, or a Report of aot.compile; got {short(program)}. Pass the "
                "step, and its arguments."
            )
        report = program
        if callable(program):
            report = compiled(program, *args, **kwargs)
        rows: tuple[CompiledRow, ...] = report.rows
        lines = differences(rows, self.rows)
        if not lines:
            return rows
        changes = [f"- {line}" for line in report.differences()]
        if changes:
            changes.insert(0, "what the compiler changed:")
        else:
            changes.append("the compiler changed nothing")
        heading = "the compiled program does not communicate as expected:"
        raise AssertionError("\n".join([heading, *lines, *changes]))

    def __enter__(self) -> Callable[..., Census]:
        self._checked = False
        return self.check

    def __exit__(self, kind: Any, *_: Any) -> None:
        # An exception in the block says more than the missing check.
        if kind is None and not self._checked:
            raise AssertionError(
                "expects: the block must check a function; nothing was checked. Call check(fn, *args) inside it."
            )


def _list_dtypes(sums: Any) -> list[Any]:
    """The dtypes that `sums` of `expects` names."""
    if sums is None:
        return []
    if isinstance(sums, Mapping):
        return list(sums.values())
    return [sums]


def differences(rows: Sequence[CensusRow | CompiledRow], expected: Sequence[Collective]) -> list[str]:
    """The differences between a program's collectives and the expected ones, one line each, with source lines.

    For example of a step that should sum its gradients once, and does so for each of two leaves:

        - expected 1 x all_reduce over 'data', 512 bytes sent; found 2 x all_reduce over 'data', 512 bytes sent
            2 x at train.py:31 (loss)
    """
    groups: dict[tuple[str, tuple[str, ...]], list[CensusRow | CompiledRow]] = {}
    for row in rows:
        key = (row.kind, tuple(sorted(row.axes)))
        groups.setdefault(key, []).append(row)
    lines = []
    for contract in expected:
        group = groups.pop((contract.kind, contract.axes), [])
        actual = _add_up(contract.kind, contract.axes, group)
        # times=0 says that there must be none.
        if not group and contract.times != 0:
            lines.append(f"- expected {contract}; there is none")
        elif contract.times not in (None, actual.times) or contract.sent not in (None, actual.sent):
            if contract.sent is None:  # nobody asked for the bytes
                actual = actual._replace(sent=None)
            lines.append(f"- expected {contract}; found {actual}{_list_places(group)}")
    # What no contract has taken out.
    for (kind, axes), group in sorted(groups.items()):
        lines.append(f"- not expected: {_add_up(kind, axes, group)}{_list_places(group)}")
    return lines


def narrow_sums(rows: Sequence[CensusRow], expected: Any) -> list[str]:
    """The sums of floats in a dtype that is narrower than expected, one line each, with source lines.

    `expected` is a dtype, or a dtype for each axis by name.
    """
    groups: dict[tuple[str, tuple[str, ...], str, str], list[CensusRow]] = {}
    for row in rows:
        for dtype in _list_expected_dtypes(row, expected):
            if not at_least_as_wide(row.sums, dtype):
                key = (str(jnp.dtype(dtype)), row.axes, row.kind, row.sums)
                groups.setdefault(key, []).append(row)
                # A sum over two axes that ask for different dtypes is one line.
                break
    lines = []
    for (dtype, axes, kind, sums), group in groups.items():
        line = f"- expected sums in {dtype}; {kind} over {quote(axes)} adds in {sums}"
        lines.append(line + _list_places(group))
    return lines


def _list_expected_dtypes(row: CensusRow, expected: Any) -> list[Any]:
    """The dtypes that are asked of what a row adds; none where one device adds nothing."""
    if row.n == 1 or not row.sums:
        return []
    if not isinstance(expected, Mapping):
        return [expected]
    dtypes = []
    for axis in row.axes:
        if axis in expected:
            dtypes.append(expected[axis])
    return dtypes


def at_least_as_wide(sums: str, expected: Any) -> bool:
    """Whether a sum in this dtype loses no more than one in the other; integers are added exactly."""
    if not jnp.issubdtype(sums, jnp.inexact):
        return True
    # Of another dtype it must have more bits, as many are not enough: neither of bfloat16 and float16 has all numbers
    # of the other.
    return jnp.dtype(sums) == jnp.dtype(expected) or jnp.finfo(sums).bits > jnp.finfo(expected).bits


def _add_up(kind: str, axes: tuple[str, ...], rows: Sequence[CensusRow | CompiledRow]) -> Collective:
    """One row for several call sites."""
    times = sum(row.times for row in rows)
    sent = sum((row.total for row in rows), Fraction(0))
    return Collective(kind, axes, times, sent)


def _list_places(rows: Sequence[CensusRow | CompiledRow]) -> str:
    """The lines of rows, each on a line of its own with the number of executions; "?" where it is not known."""
    rows_at: dict[str, list[CensusRow | CompiledRow]] = {}
    for row in rows:
        place = row.source
        if isinstance(row, CompiledRow):
            place = row.place
        rows_at.setdefault(place, []).append(row)
    text = ""
    for place, members in rows_at.items():
        times = "?"
        if all(row.count is not None for row in members):
            times = str(sum(row.times for row in members))
        text += f"\n    {times} x at {place}"
    return text

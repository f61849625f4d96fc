"""A collective as data: which device sends which chunk to which other, step by step.

The whole array is cut into chunks, equally many for each device. In an all_gather a device begins with its own chunks,
in a reduce_scatter it ends with their sums; an all_reduce begins and ends with all of them. What is sent in a step is
what the source had before it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple, NoReturn, get_args

from shardkit._arguments import checks
from shardkit.collectives.tables.links import Links, Timeline, simulated
from shardkit.collectives.tables.messages import Message, messages
from shardkit.cost.collectives import Traffic

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]
_SHOWN = 8  # devices that an error names


class Send(NamedTuple):
    """One chunk on its way.

    Attributes:
        step: when, from 0.
        source, target: from which device to which.
        chunk: which chunk of the whole array.
        reduce: whether it is added to what the target has; else it takes its place.
    """

    step: int
    source: int
    target: int
    chunk: int
    reduce: bool

    def __str__(self) -> str:
        return f"{self.source}>{self.target} {'+' * self.reduce}{self.chunk}"


@dataclass(frozen=True)
class Table:
    """An all_gather, reduce_scatter or all_reduce as a list of messages.

    Attributes:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        devices: number n of devices.
        chunks: pieces of the whole array. But for an all_reduce it is a multiple of n, and device d owns as many from
            `d * chunks // n` on.
        sends: the messages, in the order of their steps.
        name: the name in errors and descriptions.
    """

    op: Op
    devices: int
    chunks: int
    sends: tuple[Send, ...]
    name: str = field(default="table", compare=False)

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return self.sends[-1].step + 1 if self.sends else 0

    @cached_property
    def by_step(self) -> tuple[tuple[Message, ...], ...]:
        """For each step the ppermutes that carry it out."""
        found: list[tuple[Message, ...]] = [()] * self.steps
        for step, group in groupby(self.sends, key=operator.attrgetter("step")):
            found[step] = messages(list(group), self.devices, self.chunks)
        return tuple(found)

    def traffic(self, size: float) -> Traffic:
        """What one device sends, the busiest in each ppermute, and in how many messages one after the other.

        Args:
            size: bytes of the operand on one device, for an all_gather of its piece.

        Example:
            >>> sk.tables.bruck("all_gather", 8).traffic(1024), sk.tables.ring("all_gather", 8).traffic(1024).hops
            (Traffic(sent=Fraction(7168, 1), hops=3), 7)
        """
        [size] = checks.at_least_zero("Table.traffic", size=size)
        whole = Fraction(size) * (self.devices if self.op == "all_gather" else 1)
        sent = sum(message.each for step in self.by_step for message in step)
        return Traffic(whole * sent / self.chunks, self.steps)

    def simulate(self, links: Links, size: float, *, latency: float = 1e-6) -> Timeline:
        """How long it takes on given links, and how busy these are. Steps follow each other.

        A message between devices that are not linked takes the shortest way; where there are several, equal parts.

        Args:
            links: bytes/s from one device to another, `{(source, target): bytes/s}`; see `torus_links`.
            size: bytes of the operand on one device, for an all_gather of its piece.
            latency: seconds for every link on the longest way of a step.

        Raises:
            ValueError: links that are not connected, or a bandwidth, size or latency that is none.

        Example:
            >>> links, size = sk.tables.torus_links((8,), bandwidth=1e9), 1e6
            >>> for table in (sk.tables.ring("all_gather", 8), sk.tables.bruck("all_gather", 8)):
            ...     print(table.name, table.simulate(links, size).seconds)
            ring 0.007007
            bruck 0.0...
        """
        return simulated(self, links, size, latency)

    def transpose(self) -> Table:
        """The table of the derivative: a reduce_scatter for an all_gather, and the other way round.

        Raises:
            ValueError: of an all_reduce: its result has the same derivative on every device, and nothing is sent.
        """
        if self.op == "all_reduce":
            raise ValueError(
                f"{self.name}: an all_reduce has no transpose as a table, because its derivative sends nothing; got "
                "op='all_reduce'. Transpose the reduce_scatter or the all_gather that it is made of."
            )
        back = [s._replace(step=self.steps - 1 - s.step, source=s.target, target=s.source) for s in self.sends]
        gathers = self.op == "all_gather"
        sends = tuple(s._replace(reduce=gathers) for s in sorted(back))
        return Table("reduce_scatter" if gathers else "all_gather", self.devices, self.chunks, sends, self.name)

    def then(self, gather: Table) -> Table:
        """The all_reduce of a reduce_scatter and the all_gather that follows it, of as many devices and chunks."""
        sizes = [(each.devices, each.chunks) for each in (self, gather)]
        if (self.op, gather.op) != ("reduce_scatter", "all_gather") or sizes[0] != sizes[1]:
            raise ValueError(
                "Table.then: a reduce_scatter must go before an all_gather of as many devices and chunks; got "
                f"{self.described()} before {gather.described()}. Pass the transpose of one of them."
            )
        later = tuple(s._replace(step=s.step + self.steps) for s in gather.sends)
        return Table("all_reduce", self.devices, self.chunks, self.sends + later, self.name)

    def described(self) -> str:
        """What it does, in a line."""
        return f"{self.op} over {self.devices} devices of {self.chunks} chunks in {self.steps} steps"

    def check(self) -> None:
        """Refuses a table after which a chunk is not what the op says, or in which the order of messages matters.

        Every device's part in every chunk is followed through all steps: in the end each contribution is there exactly
        once, and every device has added an all_reduce in one order, so that all have the same bits.

        Raises:
            ValueError: a message that is none, a chunk that the source does not have, a copy to a place that is
                written twice in a step, a contribution that counts twice or is missing; the first in order of steps.
        """
        _ = self._checked

    @cached_property
    def _checked(self) -> bool:
        _check(self)
        return True

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.described()}"]
        for step, group in groupby(self.sends, key=operator.attrgetter("step")):
            lines.append(f"step {step:<3} " + "  ".join(map(str, group)))
        return "\n".join(lines)


def _sends(step: int, message: Message) -> Iterator[Send]:
    for source, target in message.pairs:
        for chunk in message.taken[source]:
            yield Send(step, source, target, int(chunk), message.reduce)


def _owner(table: Table, chunk: int) -> int:
    return chunk * table.devices // table.chunks


def _check(table: Table) -> None:
    """See `Table.check`. A contribution is a bit, what a device has of a chunk a number of `devices` bits."""
    _check_sizes(table)
    n, gathers, scatters = table.devices, table.op == "all_gather", table.op == "reduce_scatter"
    everyone = (1 << n) - 1
    has = [[1 << d for _ in range(table.chunks)] for d in range(n)]
    if gathers:
        has = [[everyone * (_owner(table, chunk) == d) for chunk in range(table.chunks)] for d in range(n)]
    # The order in which a value was added, as a number: one that is added from the same two has the same.
    orders = [list(range(n)) for _ in range(table.chunks)]
    known: dict[tuple[int, int], int] = {}
    for step, sent in enumerate(table.by_step):
        sends = [send for message in sent for send in _sends(step, message)]  # in the order in which they are put
        written: dict[tuple[int, int], bool] = {}
        found = [(has[s.source][s.chunk], orders[s.chunk][s.source]) for s in sends]
        if scatters:  # what is sent on is no longer here
            for s in sends:
                has[s.source][s.chunk] = 0
        for s, (value, order) in zip(sends, found, strict=True):
            own = has[s.target][s.chunk]
            if not value:
                _refuse(table, s, "must send what its source has", "nothing of it is there", "Send it later, or once")
            if (s.target, s.chunk) in written and not (s.reduce and written[s.target, s.chunk]):
                _refuse(table, s, "that copies must be alone at its place", "another", "Send one a step later")
            if (gathers and s.reduce) or (scatters and not s.reduce):
                _refuse(table, s, f"of {table.op} must {'copy' if gathers else 'add'}", "the other", "Turn `reduce`")
            if scatters and _owner(table, s.chunk) == s.source:
                _refuse(table, s, "must leave a chunk with its owner", "its owner as source", "Leave it out")
            if s.reduce and value & own:
                _refuse(table, s, "must add each contribution once", f"{_devices(value & own)} twice", "Leave it out")
            if not s.reduce and own == everyone:
                _refuse(table, s, "must bring what is missing", "a whole chunk there already", "Leave it out")
            written[s.target, s.chunk] = s.reduce
            has[s.target][s.chunk] = value | own if s.reduce else value
            if s.reduce:
                pair = sorted((order, orders[s.chunk][s.target]))
                order = known.setdefault((pair[0], pair[1]), n + len(known))
            orders[s.chunk][s.target] = order
    for chunk, device in ((c, d) for c in range(table.chunks) for d in range(n)):
        if (not scatters or _owner(table, chunk) == device) and has[device][chunk] != everyone:
            missing = _devices(1 << _owner(table, chunk) if gathers else everyone & ~has[device][chunk])
            raise ValueError(
                f"{table.name}: device {device} must have the contribution of every device to chunk {chunk} in the end;"
                f" got none of {missing}. Add a message that brings it."
            )
        if table.op == "all_reduce" and orders[chunk][device] != orders[chunk][0]:
            raise ValueError(
                f"{table.name}: all devices must add chunk {chunk} in one order, to have the same bits; got another on "
                f"device {device} than on device 0. Send the sum of one of them."
            )


def _check_sizes(table: Table) -> None:
    """Refuses sizes, and messages that are outside of them or out of order."""
    checks.one_of(table.name, "op", table.op, get_args(Op))
    n, chunks = checks.whole(table.name, devices=table.devices, chunks=table.chunks)
    if table.op != "all_reduce" and chunks % n:
        raise ValueError(
            f"{table.name}: the chunks of an {table.op} must be a multiple of its devices; got {chunks} chunks for "
            f"{n} devices. Pass for example {n}."
        )
    last = 0
    for s in table.sends:
        inside = 0 <= s.source < n and 0 <= s.target < n and 0 <= s.chunk < chunks
        if s.source == s.target or not inside or s.step < last:
            _refuse(
                table,
                s,
                f"must go from one of {n} devices to another, with one of {chunks} chunks, after those before it",
                f"step {s.step}",
                "Correct its numbers, or sort",
            )
        last = s.step


def _refuse(table: Table, send: Send, rule: str, got: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"{table.name}: a message {rule}; got {got} for chunk {send.chunk} from device {send.source} to "
        f"{send.target} in step {send.step}. {remedy}."
    )


def _devices(bits: int) -> str:
    """The devices whose bits are set."""
    numbers = [str(d) for d in range(bits.bit_length()) if bits >> d & 1]
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"device{'s' * (len(numbers) > 1)} {', '.join(numbers[:_SHOWN])}{more}"

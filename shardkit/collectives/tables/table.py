"""A collective as data: which device sends which chunk to which other, step by step.

The whole array is cut into chunks, equally many for each device. In an all_gather a device begins with its own chunks,
in a reduce_scatter it ends with their sums; an all_reduce begins and ends with all of them. What is sent in a step is
what the source had before it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import groupby, product
from typing import Literal, NoReturn, get_args

from shardkit._arguments import checks
from shardkit.collectives.tables.links import Links, LinkTimes, checked, timed
from shardkit.collectives.tables.messages import Message, Send, messages
from shardkit.cost.collectives import Traffic

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]
_SHOWN = 8  # devices that an error names


@dataclass(frozen=True)
class SendTable:
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
        self.check()
        [size] = checks.at_least_zero("SendTable.traffic", size=size)
        whole = Fraction(size) * (self.devices if self.op == "all_gather" else 1)
        sent = sum(message.each for step in self.by_step for message in step)
        return Traffic(whole * sent / self.chunks, self.steps)

    def simulate(self, links: Links, size: float, *, latency: float = 1e-6) -> LinkTimes:
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
        self.check()
        size, latency = checks.at_least_zero("SendTable.simulate", size=size, latency=latency)
        checked("SendTable.simulate", links, self.devices)
        whole = float(size) * (self.devices if self.op == "all_gather" else 1)
        return timed(self.by_step, links, whole / self.chunks, latency)

    def transpose(self) -> SendTable:
        """The table of the derivative: a reduce_scatter for an all_gather, and the other way round.

        Raises:
            ValueError: of an all_reduce: its result has the same derivative on every device, and nothing is sent.
        """
        if self.op == "all_reduce":
            raise ValueError(
                f"{self.name}: an all_reduce has no transpose as a table, because its derivative sends nothing; got "
                "op='all_reduce'. Transpose the reduce_scatter or the all_gather that it is made of."
            )
        return self._transposed

    @cached_property
    def _transposed(self) -> SendTable:
        back = [s._replace(step=self.steps - 1 - s.step, source=s.target, target=s.source) for s in self.sends]
        gathers = self.op == "all_gather"
        sends = tuple(s._replace(reduce=gathers) for s in sorted(back))
        return SendTable("reduce_scatter" if gathers else "all_gather", self.devices, self.chunks, sends, self.name)

    def then(self, gather: SendTable) -> SendTable:
        """The all_reduce of a reduce_scatter and the all_gather that follows it, of as many devices and chunks."""
        sizes = [(each.devices, each.chunks) for each in (self, gather)]
        if (self.op, gather.op) != ("reduce_scatter", "all_gather") or sizes[0] != sizes[1]:
            raise ValueError(
                "SendTable.then: a reduce_scatter must go before an all_gather of as many devices and chunks; got "
                f"{self.described()} before {gather.described()}. Pass the transpose of one of them."
            )
        later = tuple(s._replace(step=s.step + self.steps) for s in gather.sends)
        return SendTable("all_reduce", self.devices, self.chunks, self.sends + later, self.name)

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


def _owner(table: SendTable, chunk: int) -> int:
    return chunk * table.devices // table.chunks


def _check(table: SendTable) -> None:
    """See `SendTable.check`. What a device has of a chunk is a number, with a bit for each contribution."""
    _check_sizes(table)
    n, everyone = table.devices, (1 << table.devices) - 1
    if table.op == "all_gather":
        has = [[everyone * (_owner(table, chunk) == d) for chunk in range(table.chunks)] for d in range(n)]
    else:
        has = [[1 << d] * table.chunks for d in range(n)]
    # The order in which a value was added, as a number: one that is added from the same two has the same.
    orders = [list(range(n)) for _ in range(table.chunks)]
    known: dict[tuple[int, ...], int] = {}
    for step, sent in enumerate(table.by_step):
        sends = [send for message in sent for send in _sends(step, message)]  # in the order in which they are put
        taken = [(has[s.source][s.chunk], orders[s.chunk][s.source]) for s in sends]
        if table.op == "reduce_scatter":  # what is sent on is no longer here
            for s in sends:
                has[s.source][s.chunk] = 0
        alone = Counter((s.target, s.chunk) for s in sends)
        for s, (value, order) in zip(sends, taken, strict=True):
            own = has[s.target][s.chunk]
            _check_send(table, s, value, own, alone[s.target, s.chunk] == 1)
            has[s.target][s.chunk] = value | own if s.reduce else value
            if s.reduce:
                order = known.setdefault(tuple(sorted((order, orders[s.chunk][s.target]))), n + len(known))
            orders[s.chunk][s.target] = order
    for chunk, device in product(range(table.chunks), range(n)):
        wanted = table.op != "reduce_scatter" or _owner(table, chunk) == device
        if wanted and has[device][chunk] != everyone:
            missing = 1 << _owner(table, chunk) if table.op == "all_gather" else everyone & ~has[device][chunk]
            raise ValueError(
                f"{table.name}: device {device} must have what every device has of chunk {chunk} in the end; got "
                f"nothing of {_devices(missing)}. Add a message that brings it."
            )
        if table.op == "all_reduce" and orders[chunk][device] != orders[chunk][0]:
            raise ValueError(
                f"{table.name}: all devices must add chunk {chunk} in one order, to have the same bits; got another on "
                f"device {device} than on device 0. Send the sum of one of them."
            )


def _check_send(table: SendTable, send: Send, value: int, own: int, alone: bool) -> None:
    """Refuses a message that brings `value` to a device that has `own`, `alone` or with others to its place."""
    everyone = (1 << table.devices) - 1
    if not value:
        _refuse(table, send, "must send what its source has", "nothing", "Send it later, or once")
    if not send.reduce and not alone:
        _refuse(table, send, "that copies must be alone at its place", "another", "Send one a step later")
    if table.op == "all_gather" and send.reduce:
        _refuse(table, send, "of an all_gather must copy", "one that adds", "Pass reduce=False")
    if table.op == "reduce_scatter" and not send.reduce:
        _refuse(table, send, "of a reduce_scatter must add", "one that copies", "Pass reduce=True")
    if table.op == "reduce_scatter" and _owner(table, send.chunk) == send.source:
        _refuse(table, send, "must leave a chunk with its owner", "one from the owner", "Leave it out")
    if send.reduce and value & own:
        _refuse(table, send, "must add each contribution once", f"{_devices(value & own)} twice", "Leave it out")
    if not send.reduce and own == everyone:
        _refuse(table, send, "must bring what is missing", "nothing new", "Leave it out")


def _check_sizes(table: SendTable) -> None:
    """Refuses sizes, and messages that are outside of them or out of order."""
    checks.one_of(table.name, "op", table.op, get_args(Op))
    n, chunks = checks.whole(table.name, devices=table.devices, chunks=table.chunks)
    if table.op != "all_reduce" and chunks % n:
        raise ValueError(
            f"{table.name}: the chunks of an {table.op} must be a multiple of its devices; got {chunks} chunks for "
            f"{n} devices. Pass for example {n}."
        )
    if not isinstance(table.sends, tuple) or not all(isinstance(s, Send) and _numbers(s) for s in table.sends):
        raise TypeError(
            f"{table.name}: sends must be a tuple of Send, each of whole numbers and a bool; got another. Pass for "
            "example (sk.tables.Send(step=0, source=0, target=1, chunk=0, reduce=False),)."
        )
    last = -1
    for s in table.sends:
        inside = 0 <= s.source < n and 0 <= s.target < n and 0 <= s.chunk < chunks
        if s.source == s.target or not inside or not max(0, last) <= s.step <= last + 1:
            _refuse(
                table,
                s,
                f"must go from one of {n} devices to another, with one of {chunks} chunks, after those before it",
                "another",
                "Pass numbers in range, in the order of steps, none left out",
            )
        last = s.step


def _numbers(send: Send) -> bool:
    return all(type(number) is int for number in send[:4]) and type(send.reduce) is bool


def _refuse(table: SendTable, send: Send, rule: str, got: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"{table.name}: a message {rule}; got {got}, of chunk {send.chunk} from device {send.source} to {send.target} "
        f"in step {send.step}. {remedy}."
    )


def _devices(bits: int) -> str:
    """The devices whose bits are set."""
    numbers = [str(d) for d in range(bits.bit_length()) if bits >> d & 1]
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"device{'s' * (len(numbers) > 1)} {', '.join(numbers[:_SHOWN])}{more}"

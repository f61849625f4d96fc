"""A collective as data: which device sends which chunk to which other, step by step.

The whole array is cut into chunks, equally many for each device. In an all_gather a device begins with its own chunks;
in a reduce_scatter it ends with the sums of its own chunks; in an all_reduce it begins and ends with all chunks. A
message carries the chunk that its source had before the step.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import groupby, product
from typing import Literal, NoReturn, get_args

from shardkit._arguments import checks
from shardkit.collectives.tables.links import Bandwidths, LinkTimes, check_links, time_steps
from shardkit.collectives.tables.messages import Message, Send, group_sends
from shardkit.cost.collectives import Traffic

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]
_SHOWN = 8  # devices that an error names


@dataclass(frozen=True)
class SendTable:
    """An all_gather, reduce_scatter or all_reduce as a list of messages.

    Attributes:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        devices: number n of devices.
        chunks: pieces of the whole array. Except for an all_reduce it is a multiple of n, and device d owns chunks / n
            of them, from `d * chunks // n` on.
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
        """The number of steps."""
        if not self.sends:
            return 0
        return self.sends[-1].step + 1

    @cached_property
    def by_step(self) -> tuple[tuple[Message, ...], ...]:
        """The ppermutes of each step."""
        steps: list[tuple[Message, ...]] = [()] * self.steps
        for step, sends in groupby(self.sends, key=operator.attrgetter("step")):
            steps[step] = group_sends(list(sends), self.devices, self.chunks)
        return tuple(steps)

    @property
    def _operands(self) -> int:
        """How many operands make up the whole array: n in an all_gather, where an operand is a piece; else 1."""
        if self.op == "all_gather":
            return self.devices
        return 1

    def traffic(self, size: float) -> Traffic:
        """Counts the bytes of the busiest device in each ppermute, and the messages one after the other.

        Args:
            size: bytes of the operand on one device; for an all_gather, its piece.

        Example:
            >>> sk.tables.bruck("all_gather", 8).traffic(1024), sk.tables.ring("all_gather", 8).traffic(1024).hops
            (Traffic(sent=Fraction(7168, 1), hops=3), 7)
        """
        self.check()
        [size] = checks.at_least_zero("SendTable.traffic", size=size)
        sent_chunks = 0
        for messages in self.by_step:
            for message in messages:
                sent_chunks += message.chunks
        array_bytes = Fraction(size) * self._operands
        return Traffic(array_bytes * sent_chunks / self.chunks, self.steps)

    def simulate(self, links: Bandwidths, size: float, *, latency: float = 1e-6) -> LinkTimes:
        """Times the table on your links, and says how busy they are. Steps follow each other.

        A message between devices without a link takes the shortest way; if there are several, it is split into equal
        parts.

        Args:
            links: bytes/s from one device to another, `{(source, target): bytes/s}`; see `torus_links`.
            size: bytes of the operand on one device; for an all_gather, its piece.
            latency: seconds for each link on the longest way of a step.

        Raises:
            ValueError: links that are not connected, or an invalid bandwidth, size or latency.

        Example:
            >>> links, size = sk.tables.torus_links((8,), bandwidth=1e9), 1e6
            >>> for table in (sk.tables.ring("all_gather", 8), sk.tables.bruck("all_gather", 8)):
            ...     print(table.name, table.simulate(links, size).seconds)
            ring 0.007007
            bruck 0.0...
        """
        self.check()
        size, latency = checks.at_least_zero("SendTable.simulate", size=size, latency=latency)
        check_links("SendTable.simulate", links, self.devices)
        array_bytes = float(size) * self._operands
        return time_steps(self.by_step, links, array_bytes / self.chunks, latency)

    def transpose(self) -> SendTable:
        """Returns the table of the derivative: a reduce_scatter for an all_gather, and the other way round.

        Raises:
            ValueError: for an all_reduce: its result has the same derivative on every device, and nothing is sent.
        """
        if self.op == "all_reduce":
            raise ValueError(
                f"{self.name}: an all_reduce has no transpose as a table, because its derivative sends nothing; got "
                "op='all_reduce'. Transpose the reduce_scatter or the all_gather that it is made of."
            )
        return self._derivative

    @cached_property
    def _derivative(self) -> SendTable:
        # A chunk that went from 0 to 1 in the first step and was copied comes back from 1 to 0 in the last, and is
        # added: the cotangents of all copies are summed on the device that had the chunk.
        op: Op = "all_gather"
        if self.op == "all_gather":
            op = "reduce_scatter"
        adds = op == "reduce_scatter"
        sends = []
        for send in self.sends:
            step = self.steps - 1 - send.step
            sends.append(Send(step, send.target, send.source, send.chunk, reduce=adds))
        return SendTable(op, self.devices, self.chunks, tuple(sorted(sends)), self.name)

    def then(self, gather: SendTable) -> SendTable:
        """Joins a reduce_scatter and an all_gather, with the same devices and chunks, into an all_reduce."""
        ops_fit = self.op == "reduce_scatter" and gather.op == "all_gather"
        sizes_fit = self.devices == gather.devices and self.chunks == gather.chunks
        if not ops_fit or not sizes_fit:
            raise ValueError(
                "SendTable.then: a reduce_scatter must go before an all_gather of as many devices and chunks; got "
                f"{self.described()} before {gather.described()}. Pass the transpose of one of them."
            )
        sends = list(self.sends)
        for send in gather.sends:
            sends.append(send._replace(step=send.step + self.steps))
        return SendTable("all_reduce", self.devices, self.chunks, tuple(sends), self.name)

    def described(self) -> str:
        """A description, in a line."""
        return f"{self.op} over {self.devices} devices of {self.chunks} chunks in {self.steps} steps"

    def check(self) -> None:
        """Raises an error if a chunk is wrong after the last step, or if the order of messages within a step matters.

        It follows every device's part in every chunk through all steps. In the end each contribution must be there
        exactly once, and all devices must add an all_reduce in the same order, so that all have the same bits.

        Raises:
            ValueError: an invalid message, a chunk that the source does not have, a copy to a place that is written
                twice in a step, a contribution that counts twice or is missing. You see the first one, in the order of
                steps.
        """
        _ = self._is_correct

    @cached_property
    def _is_correct(self) -> bool:  # cached: a table is checked once, in whichever program it is used first
        _check_sizes(self)
        _check_results(self, _Devices.run(self))
        return True

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.described()}"]
        for step, sends in groupby(self.sends, key=operator.attrgetter("step")):
            lines.append(f"step {step:<3} " + "  ".join(map(str, sends)))
        return "\n".join(lines)


def _find_owner(table: SendTable, chunk: int) -> int:
    return chunk * table.devices // table.chunks


class _Devices:
    """The chunks of all devices while the messages of a table are sent, to check the messages.

    A chunk's value is a number with a bit for each device whose contribution it contains.

    Worked example: chunk 0 in the reduce_scatter of a ring of three. At first the devices have their own contributions,
    001, 010 and 100. Step 0 sends 1>2, and device 2 has 110. Step 1 sends 2>0, and device 0 has 111: the sum. A message
    with a bit that its target has already would count this contribution twice.

    The order of the additions matters too: (a + b) + c and a + (b + c) have the same bits set, and differ by their
    rounding. So each value also has a number for its order; two sums have the same number if they add values of the
    same two orders.
    """

    def __init__(self, table: SendTable):
        self.table = table
        n = table.devices
        self.values: list[list[int]] = []  # by device and chunk
        for device in range(n):
            contribution = 1 << device
            if table.op == "all_gather":
                contribution = 0
            self.values.append([contribution] * table.chunks)
        if table.op == "all_gather":  # an owner has the chunk with all contributions, the others have nothing
            for chunk in range(table.chunks):
                self.values[_find_owner(table, chunk)][chunk] = _make_complete_value(table)
        # By chunk and device.
        self.orders = [list(range(n)) for _ in range(table.chunks)]
        # By the orders of the two that were added.
        self.sum_orders: dict[tuple[int, ...], int] = {}

    @classmethod
    def run(cls, table: SendTable) -> _Devices:
        """The devices after all steps; refuses the first message that is wrong."""
        devices = cls(table)
        for step, messages in enumerate(table.by_step):
            sends: list[Send] = []  # in the order in which they are stored
            for message in messages:
                sends += _list_sends(step, message)
            devices.run_step(sends)
        return devices

    def run_step(self, sends: Sequence[Send]) -> None:
        """Sends what the sources had before the step."""
        # All chunks are read before any is written: each device sends what it had before the step.
        sent = []
        for send in sends:
            value = self.values[send.source][send.chunk]
            order = self.orders[send.chunk][send.source]
            sent.append((value, order))
        if self.table.op == "reduce_scatter":  # the source passes its sum on, and keeps nothing of it
            for send in sends:
                self.values[send.source][send.chunk] = 0
        arrivals: Counter[tuple[int, int]] = Counter()
        for send in sends:
            arrivals[send.target, send.chunk] += 1
        for send, (value, order) in zip(sends, sent, strict=True):
            present = self.values[send.target][send.chunk]
            is_alone = arrivals[send.target, send.chunk] == 1
            _check_send(self.table, send, value, present, is_alone)
            if send.reduce:
                value |= present
                order = self._order_of_sum(order, self.orders[send.chunk][send.target])
            self.values[send.target][send.chunk] = value
            self.orders[send.chunk][send.target] = order

    def _order_of_sum(self, order: int, other: int) -> int:
        addends = tuple(sorted((order, other)))
        new_order = self.table.devices + len(self.sum_orders)
        return self.sum_orders.setdefault(addends, new_order)


def _make_complete_value(table: SendTable) -> int:
    """The value of a chunk with the contributions of all devices."""
    return (1 << table.devices) - 1


def _list_sends(step: int, message: Message) -> Iterator[Send]:
    for source, target in message.pairs:
        for chunk in message.sent_rows[source]:
            yield Send(step, source, target, int(chunk), message.reduce)


def _check_results(table: SendTable, devices: _Devices) -> None:
    """Refuses a table after which a device lacks a contribution, or has added in another order."""
    for chunk, device in product(range(table.chunks), range(table.devices)):
        owner = _find_owner(table, chunk)
        value = devices.values[device][chunk]
        is_result = table.op != "reduce_scatter" or device == owner
        if is_result and value != _make_complete_value(table):
            missing = _make_complete_value(table) & ~value
            if table.op == "all_gather":
                missing = 1 << owner
            raise ValueError(
                f"{table.name}: device {device} must have what every device has of chunk {chunk} in the end; got "
                f"nothing of {_name_devices(missing)}. Add a message that brings it."
            )
        orders = devices.orders[chunk]
        if table.op == "all_reduce" and orders[device] != orders[0]:
            raise ValueError(
                f"{table.name}: all devices must add chunk {chunk} in one order, to have the same bits; got another on "
                f"device {device} than on device 0. Send the sum of one of them."
            )


def _check_send(table: SendTable, send: Send, value: int, present: int, is_alone: bool) -> None:
    """Refuses a message that brings `value` to a place with `present`, alone or with others in this step."""
    # `value` and `present` have a bit for each device whose contribution is in them: of a sum over devices 0 and 2 they
    # are 0b101.
    if not value:
        _refuse(table, send, "must send what its source has", "nothing", "Send it later, or once")
    if not send.reduce and not is_alone:
        _refuse(table, send, "that copies must be alone at its place", "another", "Send one a step later")
    if table.op == "all_gather" and send.reduce:
        _refuse(table, send, "of an all_gather must copy", "one that adds", "Pass reduce=False")
    if table.op == "reduce_scatter" and not send.reduce:
        _refuse(table, send, "of a reduce_scatter must add", "one that copies", "Pass reduce=True")
    if table.op == "reduce_scatter" and _find_owner(table, send.chunk) == send.source:
        _refuse(table, send, "must leave a chunk with its owner", "one from the owner", "Leave it out")
    if send.reduce and value & present:
        twice = _name_devices(value & present)
        _refuse(table, send, "must add each contribution once", f"{twice} twice", "Leave it out")
    if not send.reduce and present == _make_complete_value(table):
        _refuse(table, send, "must bring what is missing", "nothing new", "Leave it out")


def _check_sizes(table: SendTable) -> None:
    """Refuses sizes, and messages that are outside of them or out of order."""
    checks.one_of(table.name, "op", table.op, get_args(Op))
    n, chunks = checks.integers_from_one(table.name, devices=table.devices, chunks=table.chunks)
    if table.op != "all_reduce" and chunks % n:
        raise ValueError(
            f"{table.name}: the chunks of an {table.op} must be a multiple of its devices; got {chunks} chunks for "
            f"{n} devices. Pass for example {n}."
        )
    if not isinstance(table.sends, tuple) or not all(map(_is_send, table.sends)):
        raise TypeError(
            f"{table.name}: sends must be a tuple of Send, each of whole numbers and a bool; got another. Pass for "
            "example (sk.tables.Send(step=0, source=0, target=1, chunk=0, reduce=False),)."
        )
    last_step = -1
    for send in table.sends:
        in_range = 0 <= send.source < n and 0 <= send.target < n and 0 <= send.chunk < chunks
        in_order = max(0, last_step) <= send.step <= last_step + 1
        if send.source == send.target or not in_range or not in_order:
            _refuse(
                table,
                send,
                f"must go from one of {n} devices to another, with one of {chunks} chunks, after those before it",
                "another",
                "Pass numbers in range, in the order of steps, none left out",
            )
        last_step = send.step


def _is_send(send: object) -> bool:
    if not isinstance(send, Send):
        return False
    return tuple(map(type, send)) == (int, int, int, int, bool)


def _refuse(table: SendTable, send: Send, rule: str, got: str, remedy: str) -> NoReturn:
    raise ValueError(
        f"{table.name}: a message {rule}; got {got}, of chunk {send.chunk} from device {send.source} to {send.target} "
        f"in step {send.step}. {remedy}."
    )


def _name_devices(bits: int) -> str:
    """`devices 0, 3`: those whose bits are set."""
    numbers = []
    for device in range(bits.bit_length()):
        if bits >> device & 1:
            numbers.append(str(device))
    if len(numbers) == 1:
        return f"device {numbers[0]}"
    names = f"devices {', '.join(numbers[:_SHOWN])}"
    if len(numbers) > _SHOWN:
        names += f" and {len(numbers) - _SHOWN} more"
    return names

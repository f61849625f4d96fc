"""Proof of the orders of Pallas calls: what they do on all devices, whatever comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.remote_copies.orders import Orders
from shardkit.remote_copies.program import KernelProgram
from shardkit.remote_copies.rules import add_call
from shardkit.remote_copies.verdicts import Mistake, judge


class OrdersError(AssertionError):
    """A kernel that goes wrong in some order; `mistakes` has all of them."""

    def __init__(self, mistakes: Sequence[Mistake]):
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in mistakes))


@dataclass(frozen=True)
class OrdersProof:
    """No order goes wrong.

    Attributes:
        devices: of the mesh.
        calls: the Pallas calls of the function, as often as it was repeated.
        events: of all cores and engines.
        sent: bytes that copies bring to other devices in one call of the function, all devices together.
    """

    devices: int
    calls: int
    events: int
    sent: int

    def __str__(self) -> str:
        events = f"{self.events} events on {self.devices} devices"
        return f"no race and no deadlock in any order of {events}, in {self.calls} calls"


def prove_calls(calls: Sequence[Any], axes: dict[str, int], repeats: int) -> OrdersProof:
    """The proof for equations of `pallas_call`, one after the other."""
    program = KernelProgram(axes)
    # A mistake of the first call is shown by a shorter order than one of a later call.
    for number in range(repeats):
        for place, equation in enumerate(calls):
            add_call(program, equation, number * len(calls) + place)
        mistakes = judge(Orders(program.events))
        if mistakes:
            raise OrdersError(mistakes)
    sent = 0
    for event in program.events:
        if event.copy is not None and event.copy.source.device != event.copy.target.device:
            sent += event.copy.read.bytes
    return OrdersProof(program.devices, repeats * len(calls), len(program.events), sent // repeats)

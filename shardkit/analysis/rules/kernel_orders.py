"""Pallas kernels of remote copies that go wrong in some order of what devices do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardkit._jax.jaxprs import walk
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding
from shardkit.remote_copies.equations import communicates
from shardkit.remote_copies.events import UnknownOrdersError
from shardkit.remote_copies.proof import OrdersError, prove_calls

_MOST_DEVICES = 8  # of a mesh: one run of all events for each event that others see takes minutes beyond
_CALLS = 2  # of the kernel in a row, because a barrier semaphore is the same one in both


def kernel_orders(program: TracedProgram) -> Iterator[Finding]:
    """Races, deadlocks and copies that nobody awaits, of each kernel alone on a mesh of at most 8 devices.

    A kernel whose copies depend on data is left out here; the census refuses it. `sk.testing.assert_kernel` proves the
    kernels of a function together, and what they compute.
    """
    for site in walk(program.step.jaxpr):
        if site.name != "pallas_call" or not site.sizes or not communicates(site.equation):
            continue
        if math.prod(site.sizes.values()) > _MOST_DEVICES:
            continue
        try:
            prove_calls([site.equation], dict(site.sizes), _CALLS)
        except OrdersError as error:
            for mistake in error.mistakes:
                yield Finding(
                    "kernel-order",
                    f"{mistake.kind}: {mistake.text}.",
                    site.source,
                    "Add the wait or the barrier that orders them; sk.testing.assert_kernel shows an order that fails.",
                )
        except (UnknownOrdersError, IndexError):
            continue

"""The notice that a process is to end soon, on which a run saves a last time and leaves."""

from __future__ import annotations

import signal
from typing import Any

import jax

from shardkit._typed import typed

PREEMPTED = 75  # the exit code after a save because of a notice: EX_TEMPFAIL, "try again later"


class _Notice:
    """A handler of SIGTERM that takes note of it."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: Any) -> None:
        self.received = True


def watch_preemption() -> None:
    """From here on SIGTERM does not end this process; `preempted` tells of it.

    Under `jax.distributed` jax listens already, and this does nothing. To be called on the main thread.
    """
    if not jax.distributed.is_initialized():
        signal.signal(signal.SIGTERM, _Notice())


@typed
def preempted(step: int) -> bool:
    """Whether SIGTERM, or the cloud's notice, was received by any process, and this is the step at which all save.

    Args:
        step: the number of the step; every process must ask after every step. With several processes all are told so at
            the same step, the first that none of them has passed.

    Raises:
        RuntimeError: nobody listens; `watch_preemption` has not been called.

    Source: `jax.experimental.multihost_utils.reached_preemption_sync_point`.
    """
    if jax.distributed.is_initialized():
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, _Notice):
        raise RuntimeError("preempted: nobody listens for SIGTERM in this process. Call watch_preemption() first.")
    return handler.received

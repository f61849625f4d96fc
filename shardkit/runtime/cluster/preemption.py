"""The notice of preemption, after which a run saves a last time and exits."""

from __future__ import annotations

import signal
from typing import Any

import jax

from shardkit._arguments.typed import typed

PREEMPTED = 75  # EX_TEMPFAIL, "try again later"
"""The exit code after a preempted run has saved."""


class _Notice:
    """A handler that remembers SIGTERM."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: Any) -> None:
        # Nothing more: a signal may come in the middle of a step. The loop asks when the step has ended.
        self.received = True


def watch_preemption() -> None:
    """From now on, SIGTERM sets `preempted` and does not end this process. Call it on the main thread.

    Under `jax.distributed`, where jax handles SIGTERM already, it does nothing.

    Example:
        Before the training loop:

            sk.runtime.watch_preemption()
    """
    if not jax.distributed.is_initialized():
        signal.signal(signal.SIGTERM, _Notice())


@typed
def preempted(step: int) -> bool:
    """Says whether to save and exit now: some process got SIGTERM or the cloud's notice, and all agree on this step.

    Args:
        step: the number of the step. Call this in every process after every step. It becomes true on all processes at
            the same step, the first one that no process has passed.

    Raises:
        RuntimeError: `watch_preemption` has not been called.

    Example:
        At the end of each step:

            if sk.runtime.preempted(step):
                checkpoints.save(state)
                checkpoints.wait()
                sk.runtime.finish(sk.runtime.PREEMPTED)

    Source: `jax.experimental.multihost_utils.reached_preemption_sync_point`.
    """
    if jax.distributed.is_initialized():
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, _Notice):
        raise RuntimeError("preempted: SIGTERM must be watched; got no handler. Call watch_preemption() first.")
    return handler.received

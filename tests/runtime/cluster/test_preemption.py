"""The notice of a single process; tests/runtime/checkpoint/test_processes.py has several."""

import os
import signal

import jax
import pytest

from shardkit.runtime.cluster.preemption import PREEMPTED, preempted, watch_preemption
from support.refusals import raises


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_notice_is_kept(handler):
    watch_preemption()
    assert not preempted(1)
    signal.raise_signal(signal.SIGTERM)
    assert preempted(2) and preempted(3)
    assert PREEMPTED == os.EX_TEMPFAIL
    watch_preemption()  # another run
    assert not preempted(1)


def test_somebody_must_listen(handler):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with raises(RuntimeError, "preempted: SIGTERM must be watched; got no handler. Call watch_preemption() first."):
        preempted(1)


def test_with_several_processes_jax_listens(handler, monkeypatch):
    asked = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point", lambda step: asked.append(step) or step == 2
    )
    before = signal.getsignal(signal.SIGTERM)
    watch_preemption()
    assert signal.getsignal(signal.SIGTERM) is before
    assert [preempted(step) for step in (1, 2)] == [False, True] and asked == [1, 2]

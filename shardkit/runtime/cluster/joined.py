"""Processes that jax has joined already, as an engine such as Ray Train does: where their monitors meet."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from shardkit import _platform
from shardkit.runtime.channel.place import TOKEN, Place, free_port
from shardkit.runtime.cluster.environment import Found

_KEY = "shardkit/monitors"


@contextmanager
def joined(found: Found, timeout: float) -> Iterator[Place]:
    """This process's place, by jax: process 0 tells the others a port, free inside, and a token if it has none.

    The port of the job's address is that of jax's coordination service, which tells them. Who can ask it for the token
    could end the job anyway.

    Raises:
        ValueError: what `found` says of the job differs from what jax says.
        RuntimeError: process 0 does not answer.
    """
    address, size, rank = _platform.joined_job()
    for name, given, actual in (("num_processes", found.size, size), ("process_id", found.rank, rank)):
        if given is not None and given != actual:
            raise ValueError(
                f"initialize: {name} must be {actual}, as in the job that jax has joined already; got {given}. Leave "
                "it out."
            )
    if found.local_devices is not None:
        raise ValueError(
            "initialize: local_device_ids must be passed to jax.distributed.initialize, which has been called already; "
            f"got {found.local_devices}. Leave it out."
        )
    host, cpu, token = address.rpartition(":")[0].strip("[]"), _platform.cpu_only(), os.environ.get(TOKEN, "")
    if rank:
        told = _platform.told(_KEY, timeout)
        if told is None:
            raise RuntimeError(
                f"initialize: process 0 must call it too; it did not within {timeout:g} s. Call it in every process, "
                "or raise timeout."
            )
        port, _, sent = told.partition(" ")
        yield Place(host, int(port), rank, size, timeout, cpu, token or sent)
        return
    with free_port("") as free:
        sent = "" if token else secrets.token_hex(32)
        _platform.tell_processes(_KEY, f"{free} {sent}")
        yield Place(host, free, 0, size, timeout, cpu, token or sent)

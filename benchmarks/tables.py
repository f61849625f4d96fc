"""Rings as tables beside the rings of `sk.ring`, and other tables, compiled for TPU v5e:2x4: what each needs.

8 devices, float32; an all_gather of a piece of 4 MiB, and a reduce_scatter and an all_reduce of 32 MiB on each. By the
model of `sk.aot`, the time of memory traffic, of the wire and of what of it is exposed; temporary memory. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit.meshes.layout import table

DEVICES = 8


def forms() -> dict[str, Callable[[Any], Any]]:
    """The kernels, by what they are called in the table."""
    builds = {
        "ring": sk.tables.ring,
        "ring both ways": partial(sk.tables.ring, bidirectional=True),
        "halving": sk.tables.halving,
        "bruck": sk.tables.bruck,
    }
    found: dict[str, Callable[[Any], Any]] = {}
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        for both in (False, True):
            kernel = getattr(sk.ring, op)
            found[f"{op}, sk.ring{' both ways' * both}"] = partial(kernel, axis="x", bidirectional=both)
        for name, build in builds.items():
            found[f"{op}, table {name}"] = partial(getattr(sk, op), axis="x", table=build(op, DEVICES))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles every form and prints a line of each."""
    options = start(__doc__, argv, devices=DEVICES)
    mesh, size = sk.abstract_mesh(x=DEVICES), 64 if options.smoke else 1024
    lines = [("", "memory ms", "wire ms", "exposed ms", "temp MiB")]
    for name, kernel in forms().items():
        if options.smoke and "halving" not in name:
            continue
        rows = size if name.startswith("all_gather") else DEVICES * size
        x = jax.ShapeDtypeStruct((DEVICES * rows, size), jnp.float32, sharding=NamedSharding(mesh, P("x")))
        step = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
        report = sk.aot.compile(step, (x,), topology="v5e:2x4")
        seconds = (report.compute.seconds, report.wire_seconds, report.exposed_seconds)
        assert report.memory
        lines.append((name, *(f"{1e3 * each:.3f}" for each in seconds), f"{report.memory.temp / 2**20:.1f}"))
        print(*lines[-1], flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()

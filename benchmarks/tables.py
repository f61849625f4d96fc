"""Rings as tables beside the rings of `sk.ring`, and other tables, compiled for TPU v5e:2x4: what each needs.

8 devices, float32; an all_gather of a piece of 4 MiB, and a reduce_scatter and an all_reduce of 32 MiB on each. By the
model of `sk.aot`, the time of memory traffic, of the wire and of what of it is exposed; temporary memory. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.compiled import describe_array, format_milliseconds, get_memory
from benchmarks.start import start
from shardkit.meshes.layout import table

DEVICES = 8
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
TABLES: dict[str, Callable[..., Any]] = {
    "ring": sk.tables.ring,
    "ring both ways": partial(sk.tables.ring, bidirectional=True),
    "halving": sk.tables.halving,
    "bruck": sk.tables.bruck,
}


class Form(NamedTuple):
    """A collective, by a ring's kernel or by a table."""

    operation: str
    name: str
    kernel: Callable[[Any], Any]


def list_forms() -> list[Form]:
    """The forms in the order of the table."""
    forms = []
    for operation in OPERATIONS:
        ring = getattr(sk.ring, operation)
        forms.append(Form(operation, "sk.ring", partial(ring, axis="x", bidirectional=False)))
        forms.append(Form(operation, "sk.ring both ways", partial(ring, axis="x", bidirectional=True)))
        for name, make_table in TABLES.items():
            kernel = partial(getattr(sk, operation), axis="x", table=make_table(operation, DEVICES))
            forms.append(Form(operation, f"table {name}", kernel))
    return forms


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles every form and prints a line of each."""
    options = start(__doc__, argv, devices=DEVICES)
    mesh = sk.abstract_mesh(x=DEVICES)  # of chips that are not there
    forms = list_forms()
    size = 1024
    if options.smoke:
        forms = [form for form in forms if form.name == "table halving"]
        size = 64
    rows: list[tuple[str, ...]] = [("", "memory ms", "wire ms", "exposed ms", "temp MiB")]
    for form in forms:
        # An all_gather begins with a piece on each device, the others with an array of all pieces.
        local_rows = DEVICES * size
        if form.operation == "all_gather":
            local_rows = size
        x = describe_array(mesh, P("x"), (DEVICES * local_rows, size), jnp.float32)
        step = jax.jit(jax.shard_map(form.kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
        report = sk.aot.compile(step, (x,), topology="v5e:2x4")
        row = (
            f"{form.operation}, {form.name}",
            *format_milliseconds(report.compute.seconds, report.wire_seconds, report.exposed_seconds, digits=3),
            f"{get_memory(report).temp / 2**20:.1f}",
        )
        rows.append(row)
        print(*row, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()

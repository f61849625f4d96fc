"""A layout changed by explicit collectives, by with_sharding_constraint and by device_put: bytes, memory, time.

One float32 matrix over data=2, model=4 goes to another layout. Bytes are those that each device sends in the compiled
program, beside the least that some device must receive. Memory is the compiler's for the temporaries, beside source and
target, as a fraction of these two shards; by default `reshard` moves shards of up to 16 MiB in one piece, "in pieces"
256 KiB at a time. Every variant moves the same array, and the results are compared bit by bit. On simulated devices a
byte costs a memory copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.analysis.hlo.differences import compiled
from shardkit.bench.records import Record

ROWS = {
    "fsdp to tp": (P("data"), P(None, "model")),
    "fsdp over another axis": (P("model"), P("data")),
    "rows to columns": (P("model"), P(None, "model")),
    "rows over all to columns": (P(("data", "model")), P(None, "model")),
    "rows to columns over another axis": (P("model"), P(None, "data")),
    "axes in another order": (P(("data", "model")), P(("model", "data"))),
    "axes trade places": (P("data", "model"), P("model", "data")),
    "fsdp to replicated": (P(("data", "model")), P()),
    "replicated to fsdp": (P(), P(("data", "model"))),
}
PIECE = 2**18
MIB = 2**20
Move = Callable[[jax.Array], jax.Array]


def moves(mesh: Mesh, source: P, target: P) -> dict[str, Move]:
    """By name: the array in its new layout."""
    there = NamedSharding(mesh, target)
    pinned = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, there))
    return {
        "with_sharding_constraint": pinned,
        "device_put": lambda x: jax.device_put(x, there),
        "reshard": lambda x: sk.reshard(x, source, target, mesh=mesh),
        "reshard in pieces": lambda x: sk.reshard(x, source, target, mesh=mesh, piece_bytes=PIECE),
    }


def variant(name: str, move: Move, x: jax.Array) -> bench.Case:
    """Moves the same array at every call, from Python as users do."""

    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry, move(x)

    step.lower = None  # type: ignore[attr-defined]  # it must not be jitted: device_put would be another program
    return bench.Case(name, step, jnp.zeros(()), (x,), lambda _, moved: moved)


def sizes(move: Move, x: jax.Array) -> dict[str, float]:
    """Bytes that each device sends in the compiled program, and its temporaries."""
    found = compiled(jax.jit(move), x)
    assert found.memory is not None
    return {"wire_bytes": float(sum(row.total for row in found.rows)), "temp_bytes": found.memory.temp}


def line(record: Record) -> str:
    """A record as a row of the table."""
    cells = [record["row"], record["case"], f"{record['least_bytes'] / MIB:.2f}"]
    cells += [f"{record['wire_bytes'] / MIB:.2f}", f"{record['temp_bytes'] / record['shards_bytes']:.2f}"]
    cells += [f"{record[name]:.2f}" for name in ("wall_us_median", "wall_ratio_median") if name in record]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    options = start(__doc__, argv, devices=8, explain="count bytes instead of timing")
    mesh = sk.make_mesh(data=2, model=-1)
    size = 64 if options.smoke else 2048
    head = ["change", "by", "least, MiB", "sent, MiB", "temp, of two shards"]
    head += [] if options.explain else ["us", "wall ratio"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row, (source, target) in ROWS.items():
        if options.smoke and row != "rows to columns":
            continue
        x = sk.shard(jnp.arange(size * size, dtype=jnp.float32).reshape(size, size), mesh, source)
        [move] = sk.reshard_steps(x, source, target, mesh=mesh).leaves
        both = (move.legs[0].route.shard_sizes[0] + move.legs[-1].route.shard_sizes[-1]) * 4
        each = moves(mesh, source, target)
        records: list[Record] = [
            {"benchmark": "reshard", "row": row, "case": name, "least_bytes": move.least, "shards_bytes": both}
            | sizes(fn, x)
            for name, fn in each.items()
        ]
        if not options.explain:
            steps = [variant(name, fn, x) for name, fn in each.items()]
            calls, rounds = (1, 1) if options.smoke else (options.calls or 3, options.rounds or 15)
            timed = bench.measure(
                "reshard", row, steps, mode="dispatched", calls=calls, rounds=rounds, donate=False, tolerance=0
            )
            records = [one | times for one, times in zip(records, timed, strict=True)]
        bench.report(records, options.json, line)


if __name__ == "__main__":
    main()

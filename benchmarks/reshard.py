"""A layout changed by explicit collectives, by with_sharding_constraint and by device_put: bytes, memory, time.

One float32 matrix over data=2, model=4 goes to another layout. Bytes are those that each device sends in the compiled
program, beside the least that some device must receive. Memory is the compiler's for the temporaries, beside source and
target, as a fraction of these two shards; by default `reshard` moves shards of up to 16 MiB in one piece, "in pieces"
256 KiB at a time. Every case moves the same array, and the results are compared bit by bit. On simulated devices a byte
costs a memory copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import choose_calls, choose_rounds, start
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
VALUE_BYTES = 4
Move = Callable[[jax.Array], jax.Array]


def list_moves(mesh: Mesh, source: P, target: P) -> dict[str, Move]:
    """What brings the array to its new layout, by name."""
    layout = NamedSharding(mesh, target)
    constrain = jax.jit(partial(jax.lax.with_sharding_constraint, shardings=layout))
    reshard = partial(sk.reshard, source=source, target=target, mesh=mesh)
    return {
        "with_sharding_constraint": constrain,
        "device_put": partial(jax.device_put, device=layout),
        "reshard": reshard,
        "reshard in pieces": partial(reshard, piece_bytes=PIECE),
    }


def make_case(name: str, move: Move, x: jax.Array) -> bench.Case:
    """Moves the same array at every call, from Python as users do."""

    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry, move(x)

    def get_moved(carry: jax.Array, moved: jax.Array) -> jax.Array:
        return moved

    step.lower = None  # type: ignore[attr-defined]  # it must not be jitted: device_put would be another program
    return bench.Case(name, step, jnp.zeros(()), (x,), get_moved)


def compile_move(move: Move, x: jax.Array) -> dict[str, float]:
    """Bytes that each device sends in the compiled program, and its temporaries."""
    program = compiled(jax.jit(move), x)
    assert program.memory is not None, "it compiles for this machine's devices"
    sent = sum(row.total for row in program.rows)
    return {"wire_bytes": float(sent), "temp_bytes": program.memory.temp}


def format_record(record: Record) -> str:
    """A record as a row of the table."""
    cells = [
        record["row"],
        record["case"],
        f"{record['least_bytes'] / MIB:.2f}",
        f"{record['wire_bytes'] / MIB:.2f}",
        f"{record['temp_bytes'] / record['shards_bytes']:.2f}",
    ]
    if "wall_us_median" in record:
        cells.append(f"{record['wall_us_median']:.2f}")
        cells.append(f"{record['wall_ratio_median']:.2f}")
    return f"| {' | '.join(cells)} |"


def measure_row(row: str, mesh: Mesh, size: int, options: argparse.Namespace) -> list[Record]:
    """The records of one change of layout."""
    source, target = ROWS[row]
    matrix = jnp.arange(size * size, dtype=jnp.float32).reshape(size, size)
    x = sk.shard(matrix, mesh, source)
    [move] = sk.reshard_steps(x, source, target, mesh=mesh).leaves
    source_size = move.legs[0].route.shard_sizes[0]
    target_size = move.legs[-1].route.shard_sizes[-1]
    moves = list_moves(mesh, source, target)
    records: list[Record] = []
    for name, function in moves.items():
        record = {
            "benchmark": "reshard",
            "row": row,
            "case": name,
            "least_bytes": move.least,
            "shards_bytes": (source_size + target_size) * VALUE_BYTES,
        }
        records.append(record | compile_move(function, x))
    if options.explain:
        return records
    cases = []
    for name, function in moves.items():
        cases.append(make_case(name, function, x))
    times = bench.measure(
        "reshard",
        row,
        cases,
        mode="dispatched",
        calls=choose_calls(options, 3, smoke=1),
        rounds=choose_rounds(options, 15, smoke=1),
        donate=False,  # the next call moves the same array
        tolerance=0,  # no bit of a moved array changes
    )
    for record, timed in zip(records, times, strict=True):
        record |= timed
    return records


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    options = start(__doc__, argv, devices=8, explain="count bytes instead of timing")
    mesh = sk.make_mesh(data=2, model=-1)
    rows = list(ROWS)
    size = 2048
    if options.smoke:
        rows = ["rows to columns"]
        size = 64
    columns = ["change", "by", "least, MiB", "sent, MiB", "temp, of two shards"]
    if not options.explain:
        columns += ["us", "wall ratio"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        bench.report(measure_row(row, mesh, size, options), options.json, format_record)


if __name__ == "__main__":
    main()

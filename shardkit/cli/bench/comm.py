"""`shardkit bench comm data=8 --op all_reduce --sizes 1K:64M:4`: collectives as nccl-tests measures them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

import shardkit as sk
from shardkit.bench.comm import measure_sweep, sweeps, table
from shardkit.cli.bench.options import Output, header, kept
from shardkit.cli.mesh import make_mesh
from shardkit.cli.target import function_of

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_QUICK: dict[str, Any] = {"sizes": "1K:4K:4", "calls": 2, "rounds": 2}
_SLOWLY: dict[str, Any] = {"sizes": None, "calls": 20, "rounds": 20}

EXAMPLES = {
    "shardkit bench comm data=8 --op all_reduce --sizes 1K:64M:4": "one operation over eight devices",
    "shardkit bench comm data=2 model=4 --axis model --json comm.jsonl": "every operation, kept",
    "shardkit bench comm data=8 --impl mine.py:kernel --op shift": "a kernel of your own",
}


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Options of `shardkit bench comm`."""

    mesh: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="AXIS=SIZE ...")]
    """Axes and sizes, such as data=8 or data=2 model=4. Without an accelerator, CPU devices are simulated."""
    op: tuple[str, ...] = ()
    """Operations, by default all: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, shift, gather_to_one,
    prefix_scan, halo_exchange."""
    impl: tuple[str, ...] = ()
    """Implementations, by default lax and ring: lax, ring, bidirectional, hierarchical, two_step, deterministic,
    leaves, bucketed, compressed, compressed_bfloat16, compressed_float8_e4m3fn, compressed_float8_e5m2,
    compressed_int4, compressed_twice, uneven, compressed_hierarchical, ragged. Or kernels of your own, as module:kernel
    or file.py:kernel, with the signature of the operation: (x, axis, **options)."""
    sizes: str | None = None
    """Bytes of the whole array, FIRST:LAST:FACTOR or one size, such as 1K:64M:4; by default 1K:4M:16 on CPUs and
    1K:64M:4 elsewhere."""
    dtype: tuple[str, ...] = ("float32",)
    """Of the array: float32, bfloat16, float16, float64, int32, int8, uint8."""
    redop: tuple[str, ...] = ("sum",)
    """Reductions: sum, mean, max, min."""
    axis: tuple[str, ...] = ()
    """The axis of the collective, or the axes, over which together it runs; by default all of the mesh."""
    mode: Literal["inside", "dispatched"] = "inside"
    """In a loop inside one jit, or called from Python."""
    calls: int | None = None
    """Calls in each round, 20 by default; times are divided by it."""
    rounds: int | None = None
    """Timed rounds, 20 by default; times are their medians and percentiles."""


def comm(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Measure collectives as nccl-tests does, each compared with its reference; exit code 1 if an element is wrong."""
    cluster = sk.runtime.initialize()
    how = {name: getattr(options, name) for name in _SLOWLY}
    usual = _QUICK if options.quick else _SLOWLY
    how = {name: usual[name] if value is None else value for name, value in how.items()}
    sizes = None if how["sizes"] is None else sizes_of(how["sizes"])
    mesh = make_mesh("bench comm", options.mesh, many=cluster.processes > 1)
    named = [word for word in options.impl if ":" not in word]
    tables = sweeps(
        mesh,
        ops=options.op or None,
        impls=named if options.impl else None,
        kernels={word: function_of(word) for word in options.impl if ":" in word},
        sizes=sizes,
        dtypes=options.dtype,
        redops=options.redop,
        axis=options.axis or None,
    )
    if cluster.is_master:
        print(header(), sk.describe(mesh), sep="\n", flush=True)
    records = []
    for each in tables:
        found = measure_sweep(each, mode=options.mode, calls=how["calls"], rounds=how["rounds"])
        records += found
        if cluster.is_master:
            print("", table(found), sep="\n", flush=True)
    if cluster.is_master:
        print(f"\nwrong elements: {sum(record['wrong'] for record in records)}")
    return kept(records, options if cluster.is_master else Output())


def sizes_of(text: str) -> list[int]:
    """The sizes of "1K:64M:4", or of "4M"."""
    found = re.fullmatch(r"(\d+)([KMG]?)(?::(\d+)([KMG]?):(\d+))?", text)
    if found:
        first = int(found[1]) << _UNITS[found[2]]
        last = int(found[3]) << _UNITS[found[4]] if found[3] else first
        factor = int(found[5] or 2)
        if 0 < first <= last and factor > 1:
            return [first * factor**k for k in range(64) if first * factor**k <= last]
    raise ValueError(
        f"bench comm: --sizes must be FIRST:LAST:FACTOR or one size, in bytes or with K, M or G; got {text!r}. Write "
        "for example 1K:64M:4."
    )

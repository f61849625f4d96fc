"""`shardkit bench comm data=8 --op all_reduce --sizes 1K:64M:4`: collectives as nccl-tests measures them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardkit.cli.bench.options import Output, check_output, choose_figures, describe_machine, write_records
from shardkit.cli.errors import refuse_users_error
from shardkit.cli.options import Optional, Sizes, Words

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}  # powers of two
_QUICK: dict[str, Any] = {"sizes": "1K:4K:4", "calls": 2, "rounds": 2}
_USUAL: dict[str, Any] = {"sizes": None, "calls": 20, "rounds": 20}

EXAMPLES = {
    "shardkit bench comm data=8 --op all_reduce --sizes 1K:64M:4": "one operation over eight devices",
    "shardkit bench comm data=2 model=4 --axis model --json comm.jsonl": "every operation, kept",
    "shardkit bench comm data=2 model=4 --axis model --beside data compute late": "one that is not alone",
    "shardkit bench comm data=8 --impl mine.py:kernel --op shift": "your kernel",
}


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Options of `shardkit bench comm`."""

    mesh: Sizes
    """Axes and sizes, such as data=8 or data=2 model=4. Without an accelerator, CPU devices are simulated."""
    op: Words = ()
    """Operations, by default all: all_reduce, all_gather, reduce_scatter, all_to_all, ragged_all_to_all, broadcast,
    shift, gather_to_one, prefix_scan, halo_exchange. The ragged one has rows by Zipf's law."""
    impl: Words = ()
    """Implementations, by default lax and ring: lax, ring, bidirectional, hierarchical, two_step, deterministic,
    leaves, bucketed, compressed, compressed_bfloat16, compressed_float8_e4m3fn, compressed_float8_e5m2,
    compressed_int4, compressed_mxfp8, compressed_mxfp4, compressed_nvfp4, compressed_twice, uneven,
    compressed_hierarchical, ragged. Or your kernels, as module:kernel or file.py:kernel, with the signature of the
    operation: (x, axis, **options)."""
    sizes: Optional[str] = None
    """Bytes of the whole array, FIRST:LAST:FACTOR or one size, such as 1K:64M:4; by default 1K:4M:16 on CPUs and
    1K:64M:4 elsewhere."""
    dtype: tuple[str, ...] = ("float32",)
    """Dtypes of the array: float32, bfloat16, float16, float64, int32, int8, uint8."""
    redop: tuple[str, ...] = ("sum",)
    """Reductions: sum, mean, max, min."""
    axis: Words = ()
    """The axis of the collective, or several axes together; by default all axes of the mesh."""
    beside: Words = ()
    """What runs at the same time, in rows of their own: another axis of the mesh, with the same operation over it;
    compute, a matmul that takes about as long; late, the first device comes later by about as long."""
    mode: Literal["inside", "dispatched"] = "inside"
    """Measure in a loop inside one jit, or call from Python."""
    calls: Optional[int] = None
    """Calls in each round, 20 by default; times are divided by it."""
    rounds: Optional[int] = None
    """Timed rounds, 20 by default; times are their medians and percentiles."""


def comm(options: Options) -> int:
    """Measure collectives as nccl-tests does, and check each result. The exit code is 1 if an element is wrong."""
    import shardkit as sk
    from shardkit import bench
    from shardkit.bench.comm import table
    from shardkit.cli.mesh import make_mesh

    # Every process measures, and its wrong elements count; process 0 alone prints and writes, for all of them.
    cluster = sk.runtime.initialize()
    if cluster.is_master:
        check_output("bench comm", options)
    figures = choose_figures(options, _USUAL, _QUICK)
    sizes = None  # those of `bench.sweeps`, which know the devices
    if figures["sizes"] is not None:
        sizes = read_sizes(figures["sizes"])
    mesh = make_mesh("bench comm", options.mesh, many=cluster.processes > 1)
    names, kernels = _load_implementations(options.impl)
    sweeps = bench.sweeps(
        mesh,
        ops=options.op or None,
        impls=names,
        kernels=kernels,
        sizes=sizes,
        dtypes=options.dtype,
        redops=options.redop,
        axis=options.axis or None,
        beside=options.beside,
    )
    if cluster.is_master:
        print(describe_machine(), sk.describe(mesh), sep="\n", flush=True)
    records = []
    # One table at a time, so that each is printed as soon as it is measured.
    for sweep in sweeps:
        try:
            rows = bench.comm([sweep], mode=options.mode, calls=figures["calls"], rounds=figures["rounds"])
        except Exception as error:
            refuse_users_error("bench comm", "a kernel", error)
            raise
        records += rows
        if cluster.is_master:
            print("", table(rows), sep="\n", flush=True)
    if not cluster.is_master:
        return write_records(records, Output())  # to no file, with the same exit code
    wrong = sum(record["wrong"] for record in records)
    print(f"\nwrong elements: {wrong}")
    return write_records(records, options)


def _load_implementations(words: Sequence[str]) -> tuple[list[str] | None, dict[str, Callable[..., Any]]]:
    """The names among the words of `--impl`, None where it is not passed, and the user's kernels by their words."""
    from shardkit.cli.target import load_function

    if not words:
        return None, {}
    names = []
    kernels = {}
    for word in words:
        if ":" in word:  # train.py:kernel
            kernels[word] = load_function(word)
        else:
            names.append(word)
    return names, kernels


def read_sizes(text: str) -> list[int]:
    """The sizes of "1K:64M:4", or of "4M"."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?::(\d+)([KMG]?):(\d+))?", text)
    if match:
        number, unit, last_number, last_unit, factor_text = match.groups()
        first = int(number) << _UNITS[unit]
        last = first
        factor = 2
        if last_number is not None:
            last = int(last_number) << _UNITS[last_unit]
            factor = int(factor_text)
        if 0 < first <= last and factor > 1:
            return _list_sizes(first, last, factor)
    raise ValueError(
        f"bench comm: --sizes must be FIRST:LAST:FACTOR or one size, in bytes or with K, M or G; got {text!r}. Write "
        "for example 1K:64M:4."
    )


def _list_sizes(first: int, last: int, factor: int) -> list[int]:
    """As 1024, 4096, 16384 of first 1024, last 20000 and factor 4."""
    sizes = []
    size = first
    while size <= last:
        sizes.append(size)
        size *= factor
    return sizes

"""`shardkit bench links --rate 100mbit`: all_reduce over a throttled link between two hosts made on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import tyro

from shardkit import bench
from shardkit.bench import namespaces, throttle
from shardkit.cli.bench.options import Output, header, kept
from shardkit.simulated import offer_cpu_devices

EXAMPLES = {
    "shardkit bench links --rate 100mbit 1gbit": "two rates",
    "shardkit bench links --json links.jsonl": "kept, for bench compare",
}


@dataclass(frozen=True)
class Options(Output):
    """Options of `shardkit bench links`."""

    rate: tuple[str, ...] = ("100mbit", "1gbit")
    """Rates of the link each way, one run for each, as tc writes them."""
    devices: int = 2
    """Simulated devices of each host."""
    sizes: tuple[str, ...] = ("256K", "1M", "4M")
    """Bytes of the operand on each device; K, M and G are powers of 1024."""
    rounds: int = 7
    """Timed rounds."""


def links(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Measure plain, hierarchical and compressed all_reduce over a throttled link between two network namespaces.

    It needs root and the commands ip, tc and unshare; what it makes is removed again. Times are wall clock, which the
    link determines: the one place where simulated devices show what a slow network does.
    """
    sizes = [_bytes(size) for size in options.sizes]
    for rate in options.rate:
        namespaces.bits(rate)
    offer_cpu_devices(options.devices)
    print(header().splitlines()[0])
    rates, rounds = (options.rate[:1], 2) if options.quick else (options.rate, options.rounds)
    found: list[bench.Record] = []
    for rate in rates:
        chosen = sizes[:1] if options.quick else sizes
        records = bench.throttled(rate=rate, devices=options.devices, sizes=chosen, rounds=rounds)
        print(throttle.in_words(records), flush=True)
        found += records
    return kept(found, options)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not found or not int(found[1]):
        raise ValueError(f"bench links: a size must be bytes, such as 256K, 4M or 1000; got {text!r}. Correct --sizes.")
    return int(found[1]) * 1024 ** " KMG".index(found[2] or " ")

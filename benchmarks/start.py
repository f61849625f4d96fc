"""The command line that the files of this folder share; what measures is `shardkit.bench`.

A whole benchmark file (save it as `benchmarks/example.py`, run `python -m benchmarks.example --json out.jsonl`):

    '''All-reduce: one psum against reduce_scatter and all_gather, over 4 MiB on each device.'''

    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    import shardkit as sk
    from benchmarks.start import start
    from shardkit import bench

    def case(name, mesh, kernel):
        mean = jax.shard_map(lambda x: kernel(x) / mesh.size, mesh=mesh, in_specs=P(), out_specs=P())
        x = jax.device_put(jnp.arange(2.0**20), NamedSharding(mesh, P()))
        return bench.Case(name, lambda x: (mean(x), None), x)

    def pair(x):
        return sk.all_gather(sk.reduce_scatter(sk.vary(x, "data"), "data"), "data", replicated=True)

    def main(argv=None):
        options = start(__doc__, argv, devices=8)
        mesh = sk.make_mesh(data=-1)
        psum = case("psum", mesh, lambda x: sk.all_reduce(sk.vary(x, "data"), "data"))
        for mode in ("inside", "dispatched"):
            records = bench.measure("all_reduce", "4 MiB", [psum, case("pair", mesh, pair)], mode=mode,
                                    calls=options.calls or 10, rounds=options.rounds or 20)
            bench.report(records, options.json)

    if __name__ == "__main__":
        main()
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import shardkit as sk
from shardkit.bench.environment import environment

BANNER = (
    "These devices are simulated and share the CPU's cores: read the numbers as overhead and ratios, not as bandwidth."
)


def start(
    description: str | None, argv: Sequence[str] | None = None, *, devices: int = 8, **flags: str
) -> argparse.Namespace:
    """Reads the command line, starts the devices and prints where this runs; call it before jax touches a device.

    Args:
        description: the benchmark's docstring, for `--help`.
        argv: arguments; None reads the command line.
        devices: devices to simulate unless `--simulate` says otherwise; `--simulate 0` uses the machine's own.
        **flags: further on/off options by name, each with its help.

    Returns:
        Namespace with `simulate`, `calls` and `rounds` (None unless given), `json` (Path or None), `smoke`, the flags.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, default=devices, help=f"CPU devices (default {devices}); 0: real ones")
    parser.add_argument("--calls", type=int, help="calls in each round")
    parser.add_argument("--rounds", type=int, help="rounds, in each of which every case runs once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per case and row")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that exercises everything; no numbers")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = parser.parse_args(argv)
    if options.simulate:
        sk.simulate_devices(options.simulate)
    machine = environment()
    print(
        f"jax {machine['jax']}, {machine['device_count']} x {machine['device_kind']} ({machine['platform']}), "
        f"{machine['cpu_model']}, {machine['cores']} cores, load {machine['load_average_1min']}, "
        f"Python {machine['python']}"
    )
    if machine["platform"] == "cpu":
        print(BANNER)
    return options


def choose_calls(options: argparse.Namespace, usual: int, *, smoke: int = 2) -> int:
    """The calls in each round: those of `--calls`, or few for `--smoke`, or as many as usual."""
    if options.calls:
        return options.calls
    if options.smoke:
        return smoke
    return usual


def choose_rounds(options: argparse.Namespace, usual: int, *, smoke: int = 2) -> int:
    """The rounds: those of `--rounds`, or few for `--smoke`, or as many as usual."""
    if options.rounds:
        return options.rounds
    if options.smoke:
        return smoke
    return usual

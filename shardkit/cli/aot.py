"""`shardkit aot module:function --topology v5p:8x8x8`: compiles a step with the real compiler, without the chips."""

from __future__ import annotations

import json as json_lib
from dataclasses import dataclass

from shardkit.cli.options import Json, Target, Words
from shardkit.cli.output import write_json

EXAMPLES = {
    "shardkit aot train.py:make --topology v5p:8x8x8": "does it fit 512 chips?",
    "shardkit aot train.py:make --topology h100:1x4x8 --json a.json": "keep the report",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit aot`."""

    target: Target
    """The function to compile. Without --args it takes no parameters and returns (fn, *args)."""
    topology: str
    """The chips: 'v5p:8x8x8' (a torus), 'h100:1x4x8' (slices x hosts x GPUs per host)."""
    args: Words = ()
    """Types of the function's arguments, such as 'f32[8,128]', 'bf16[4]', 'i32[]' or 'key'."""
    json: Json = None
    """Write the report to this file, or with - to standard output."""
    timeout: float = 1800.0
    """Seconds to wait for the compiler."""
    devices: int = 8
    """CPU devices to simulate without an accelerator, if your function builds its mesh from real devices."""


def aot(options: Options) -> int:
    """Compile a function for chips that are not attached: memory, collectives, overlap and predicted time.

    The exit code is 0 if the program fits the chip's memory, 1 if it does not.
    """
    from shardkit.analysis.hlo.aot import compile
    from shardkit.analysis.hlo.topology import parse_topology
    from shardkit.cli.target import load_step
    from shardkit.meshes.simulated import offer_cpu_devices

    parse_topology(options.topology)  # before the devices start: a mistake is refused at once
    offer_cpu_devices(options.devices)
    fn, args = load_step("aot", options.target, options.args)
    report = compile(fn, args, topology=options.topology, timeout=options.timeout)
    print(report)
    write_json(options.json, "aot", [json_lib.loads(report.to_json())])
    return 0 if report.fits else 1

"""`shardkit lint module:function`: finds communication that hangs, is silently wrong or is wasted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import tyro

from shardkit.analysis.jaxpr.explain import explain as explain_backward
from shardkit.analysis.jaxpr.lint import LARGE, SMALL
from shardkit.analysis.jaxpr.lint import lint as find
from shardkit.analysis.jaxpr.rules import Finding
from shardkit.cli import target as targets
from shardkit.cli.output import Json, console, write_json
from shardkit.simulated import offer_cpu_devices

T = TypeVar("T")

EXAMPLES = {
    "shardkit lint train.py:make": "make() returns the step and its arguments",
    "shardkit lint train.py:step --args 'f32[8,128]' key": "types in place of arguments",
    "shardkit lint train.py:make --explain": "also where the backward pass communicates",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit lint`."""

    target: targets.Target
    """The function to trace. Without --args it must take no parameters and return (fn, *args)."""
    args: tuple[str, ...] = ()
    """Types of the function's arguments, such as 'f32[8,128]', 'bf16[4]', 'i32[]' or 'key'."""
    devices: int = 8
    """CPU devices to simulate without an accelerator."""
    explain: bool = False
    """Also name the line of the forward pass that causes each collective of the backward pass."""
    ignore: tuple[str, ...] = ()
    """Rules to skip."""
    large: int = LARGE
    """Smallest replicated input to report, in bytes."""
    small: int = SMALL
    """Messages below this many bytes are bound by latency."""
    memory: int | None = None
    """Bytes that one device can hold, less activations: tensor parallelism of what fits there is reported."""
    json: Json = None
    """Write the results to this file, or with - to standard output."""


def lint(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Find communication that hangs, is wrong or is wasted, by tracing a function. Nothing is run.

    The exit code is 0 if there are no findings, 1 if there are.
    """
    here = console()
    offer_cpu_devices(options.devices)
    fn, args = targets.load(options.target, options.args)

    def look() -> list[Finding]:
        return find(fn, *args, large=options.large, small=options.small, memory=options.memory, ignore=options.ignore)

    findings = _traced(options.target, args, look)
    for finding in findings:
        here.print(str(finding))
    if options.explain:
        here.print(str(_traced(options.target, args, lambda: explain_backward(fn, *args))))
    here.print(f"{options.target}: {len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}")
    write_json(options.json, "lint", [each._asdict() for each in findings], target=options.target)
    return 1 if findings else 0


def _traced(target: str, args: Any, look: Callable[[], T]) -> T:
    try:
        return look()
    except Exception as error:
        if str(error).startswith("lint: "):
            raise
        raise ValueError(
            f"lint: {target} cannot be traced with {targets.describe(args)}; it raises {targets.first_line(error)}. "
            "Check the arguments, and call jax.make_jaxpr on it to see the traceback."
        ) from error

"""`shardkit lint module:function`: what in a traced program hangs, goes wrong in silence or sends bytes for nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console

from shardkit.analysis.jaxpr.explain import explain as explain_backward
from shardkit.analysis.jaxpr.lint import LARGE, SMALL
from shardkit.analysis.jaxpr.lint import lint as find
from shardkit.analysis.jaxpr.rules import Finding
from shardkit.cli import target as targets
from shardkit.simulated import offer_cpu_devices

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Find communication that hangs, gives wrong numbers or is wasted, by tracing a function. Nothing is run.

    Ends with exit code 1 if there are findings, 0 if there are none.
    """

    target: tyro.conf.Positional[str]
    """MODULE:FUNCTION or FILE.py:FUNCTION. Without --args it takes no parameters and returns (fn, *args)."""
    args: tuple[str, ...] = ()
    """Types of the function's arguments: 'f32[8,128]', 'bf16[4]', 'i32[]', 'key'."""
    devices: int = 8
    """CPU devices to simulate where there is no accelerator."""
    explain: bool = False
    """Also say for each collective of the backward pass which forward line pays for it."""
    ignore: tuple[str, ...] = ()
    """Rules to leave out."""
    large: int = LARGE
    """Bytes from which a replicated input is reported."""
    small: int = SMALL
    """Bytes below which a message costs its latency alone."""


def lint(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Find mistakes in a program's communication."""
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    offer_cpu_devices(options.devices)
    fn, args = targets.load(options.target, options.args)

    def look() -> list[Finding]:
        return find(fn, *args, large=options.large, small=options.small, ignore=options.ignore)

    findings = _traced(options.target, args, look)
    for finding in findings:
        console.print(str(finding))
    if options.explain:
        console.print(str(_traced(options.target, args, lambda: explain_backward(fn, *args))))
    console.print(f"{options.target}: {len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}")
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

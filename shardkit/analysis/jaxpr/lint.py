"""The lint: what hangs or goes wrong in silence, found in the traced program before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from shardkit._check import at_least, quoted
from shardkit._typed import typed
from shardkit.analysis.jaxpr.census import traced
from shardkit.analysis.jaxpr.dataflow import Block, follow
from shardkit.analysis.jaxpr.rules import RULES, Finding
from shardkit.analysis.jaxpr.rules.rule import Program

LARGE = 256 * 2**20
SMALL = 1024


@typed
def lint(
    fn: Callable[..., Any],
    *args: Any,
    large: int = LARGE,
    small: int = SMALL,
    ignore: Collection[str] = (),
    **kwargs: Any,
) -> list[Finding]:
    """Finds communication that hangs, gives wrong numbers or is wasted in one call of `fn`, by tracing it.

    Nothing is run and no device is needed; an AbstractMesh of any size will do. The function is traced twice, the
    second time as another process would trace it; a program that is traced already (`jax.jit(fn).trace(...)`) is not
    traced again, and cannot be compared with another process'. `RULES` lists the rules.

    What is not found: a mistake that only values at run time show, in Pallas kernels, in what the compiler adds, and in
    mutable references (`jax.new_ref`), whose contents are not followed. jax takes a draw that is the same in every
    iteration out of a scan that it differentiates: lint the loss too, where a key may be one for all layers.

    Args:
        fn: any function that jax can trace: a step, a loss, a shard_map; or what `.trace` returned, without arguments.
        *args: its arguments; `jax.ShapeDtypeStruct` will do.
        large: bytes from which a replicated input is reported (`large-replicated`).
        small: bytes below which a message costs its latency alone: waste of less is not reported, and pieces of less
            are `tiny-shards`.
        ignore: names of rules to leave out.
        **kwargs: its keyword arguments; bind those that have an option's name with `functools.partial`.

    Returns:
        The findings, in the order of the program; none if it is clean. `print` each.

    Raises:
        ValueError: a name in `ignore` that is no rule.
    """
    at_least("lint", 0, large=large, small=small)
    unknown = sorted(set(ignore) - set(RULES))
    if unknown:
        raise ValueError(f"lint: ignore must name rules, {quoted(RULES)}; got {quoted(unknown)}. Use one of them.")
    program = Program(fn, args, kwargs, traced(fn, args, kwargs), large, small)
    checks = dict.fromkeys(rule.check for rule in RULES.values())
    found: list[Finding] = []

    def visit(block: Block) -> None:
        for check in checks:
            found.extend(check(block, program))

    follow(program.closed.jaxpr, visit)
    return [each for each in dict.fromkeys(found) if each.rule not in ignore]

"""The lint: deadlocks, silent wrong numbers and waste, found in the traced program before anything runs."""

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
    memory: int | None = None,
    ignore: Collection[str] = (),
    **kwargs: Any,
) -> list[Finding]:
    """Finds communication in one call of `fn` that deadlocks, gives wrong numbers or is wasted, by tracing it.

    Nothing runs and no device is needed; an AbstractMesh of any size is enough. The function is traced twice, the
    second time as another process would trace it; a traced program (`jax.jit(fn).trace(...)`) is not traced again and
    not compared with another process. `RULES` lists the rules.

    Not found: mistakes that only run-time values show, and those in Pallas kernels, in collectives that the compiler
    adds and in mutable references (`jax.new_ref`). jax moves a draw that is the same in every iteration out of a scan
    that it differentiates: where one key may serve all layers, lint the loss too.

    Args:
        fn: any function that jax can trace, as a step or a loss; or the result of its `.trace`, without arguments.
        *args: its arguments; `jax.ShapeDtypeStruct` is enough.
        large: bytes from which a replicated input is reported (`large-replicated`).
        small: bytes below which a message costs only its latency: smaller waste is not reported, and smaller pieces are
            `tiny-shards`.
        memory: bytes that one device can hold, less those of the activations: tensor parallelism of what fits there is
            reported (`tensor-parallel-that-fits`). None reports none.
        ignore: names of rules to leave out.
        **kwargs: its keyword arguments; bind those named like an option with `functools.partial`.

    Returns:
        The findings, in program order; none if it is clean. `print` each.

    Raises:
        ValueError: a name in `ignore` that is not a rule.

    Example:
        >>> swap = lambda x: jax.lax.ppermute(x, "model", [(0, 1), (1, 0)])
        >>> f = jax.shard_map(swap, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        >>> [finding] = sk.lint(f, jnp.ones(8))
        >>> finding.message
        "ppermute over 'model' of 4 devices names no source for 2, 3, which receive zeros."
    """
    at_least("lint", 0, large=large, small=small, memory=memory)
    unknown = sorted(set(ignore) - set(RULES))
    if unknown:
        raise ValueError(f"lint: ignore must name rules, {quoted(RULES)}; got {quoted(unknown)}. Correct ignore.")
    program = Program(fn, args, kwargs, traced(fn, args, kwargs), large, small, memory)
    checks = dict.fromkeys(rule.check for rule in RULES.values())
    found: list[Finding] = []

    def visit(block: Block) -> None:
        for check in checks:
            found.extend(check(block, program))

    follow(program.closed.jaxpr, visit)
    return [each for each in dict.fromkeys(found) if each.rule not in ignore]

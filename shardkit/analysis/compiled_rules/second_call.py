"""Steps that compile again when they are called with the state that they returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.rules.rule import Finding

_COMPILED = "/jax/core/compile/backend_compile_duration"


def why_not_called(program: CompiledProgram) -> str:
    """Why the step cannot be called here; "" if it can."""
    if program.target:
        return "the chips are not here"
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(program.step.args)):
        return "the arguments hold no values"
    return ""


def second_call(program: CompiledProgram) -> Iterator[Finding]:
    """Calls the step twice, the second time with its own results where they fit, and counts compilations."""
    if why_not_called(program):
        return
    step = program.step
    first = _copied(step.args)
    before = [_kinds(each) for each in first]
    out = step.fn(*first)
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)])
    second = _next_arguments(first, step.args, out if type(out) is tuple else (out,))
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        after = [_kinds(each) for each in second]
        step.fn(*second)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if compiled:
        changed = [
            f"{name}{path} was {old} and is {new}"
            for name, *kinds in zip(step.parameters, before, after, strict=True)
            for (path, old), (_, new) in zip(*kinds, strict=True)
            if old != new
        ]
        what = f": {', '.join(changed[:3])}{' and more' if len(changed) > 3 else ''}" if changed else ""
        yield Finding(
            "second-compile",
            f"the second call, on the results of the first, compiles again{what}.",
            step.source,
            "Place and type the first state as the step returns it, or fix its results by out_shardings.",
        )


def _copied(args: Any) -> Any:
    """Copies, of which a step may take the memory."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf.copy(), leaf.sharding) if leaf.committed else leaf.copy()

    return jax.tree.map(copied, args)


def _next_arguments(first: Sequence[Any], given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The arguments of the next call: a result in place of the argument like it; else what the call left of it."""
    left, out = list(results), []
    for each, untouched in zip(first, given, strict=True):
        arrays = [leaf for leaf in jax.tree.leaves(each) if isinstance(leaf, jax.Array)]
        taken = any(array.is_deleted() for array in arrays)
        same = [n for n, result in enumerate(left) if _shapes(result) == _shapes(each)]
        if same and (taken or len(jax.tree.leaves(each)) > 1):
            out.append(left.pop(same[0]))
        else:
            out.append(_copied(untouched) if taken else each)
    return out


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)) for leaf in leaves]


def _kinds(tree: Any) -> list[tuple[str, str]]:
    """For each leaf its path, and what a compiled program depends on beside its shape: weak type and sharding."""
    out = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        weak = "weakly typed " if getattr(leaf, "weak_type", False) else ""  # keys have none
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        out.append((jax.tree_util.keystr(path), f"{weak}{dtype} on {_where(leaf)}"))
    return out


def _where(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array):
        return "the host"
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return str(sharding.spec)
    devices = len(sharding.device_set)
    return f"{devices} devices" if devices > 1 else "one device" if leaf.committed else "no device in particular"

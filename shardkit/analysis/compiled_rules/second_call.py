"""Steps that compile again when they are called with the state that they returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    first = _copy_arrays(step.args)
    kinds_before = [_list_kinds(argument) for argument in first]
    results = step.fn(*first)
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)])
    if type(results) is not tuple:
        results = (results,)
    second = _next_arguments(first, step.args, results)
    kinds_after = [_list_kinds(argument) for argument in second]
    if not _compiles_again(step.fn, second):
        return
    changed = []
    for name, old_kinds, new_kinds in zip(step.parameters, kinds_before, kinds_after, strict=True):
        for (path, old), (_, new) in zip(old_kinds, new_kinds, strict=True):
            if old != new:
                changed.append(f"{name}{path} was {old} and is {new}")
    reason = ""
    if changed:
        reason = f": {', '.join(changed[:3])}"
    if len(changed) > 3:
        reason += " and more"
    yield Finding(
        "second-compile",
        f"the second call, on the results of the first, compiles again{reason}.",
        step.source,
        "Place and type the first state as the step returns it, or fix its results by out_shardings.",
    )


def _compiles_again(fn: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call compiles anything, by jax's own events."""
    compilations = 0

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        nonlocal compilations
        if event == _COMPILED:
            compilations += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fn(*args)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return compilations > 0


def _copy_arrays(args: Any) -> Any:
    """Copies, of which a step may take the memory."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.committed:
            return jax.device_put(leaf.copy(), leaf.sharding)
        return leaf.copy()

    return jax.tree.map(copy, args)


def _next_arguments(first: Sequence[Any], originals: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The arguments of the next call.

    An argument that the call consumed, or a tree of several leaves, is the next result of the same shapes: step(state,
    batch) that returns (state, metrics) is called with its state and the batch as it was.
    """
    remaining = list(results)
    arguments = []
    for argument, original in zip(first, originals, strict=True):
        leaves = jax.tree.leaves(argument)
        consumed = any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))
        alike = [number for number, result in enumerate(remaining) if _shapes(result) == _shapes(argument)]
        if alike and (consumed or len(leaves) > 1):
            arguments.append(remaining.pop(alike[0]))
        elif consumed:
            arguments.append(_copy_arrays(original))
        else:
            arguments.append(argument)
    return arguments


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)) for leaf in leaves]


def _list_kinds(tree: Any) -> list[tuple[str, str]]:
    """For each leaf its path, and what a compiled program depends on beside its shape: weak type and sharding."""
    kinds = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        weak = "weakly typed " if getattr(leaf, "weak_type", False) else ""  # keys have none
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        kinds.append((jax.tree_util.keystr(path), f"{weak}{dtype} on {_describe_devices(leaf)}"))
    return kinds


def _describe_devices(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array):
        return "the host"
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return str(sharding.spec)
    devices = len(sharding.device_set)
    if devices > 1:
        return f"{devices} devices"
    return "one device" if leaf.committed else "no device in particular"

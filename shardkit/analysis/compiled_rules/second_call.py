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
    arrays = [leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)]
    jax.block_until_ready(arrays)
    # Not isinstance: a NamedTuple, such as a TrainState, is one result.
    if type(results) is not tuple:
        results = (results,)
    second = _choose_next_arguments(first, step.args, results)
    kinds_after = [_list_kinds(argument) for argument in second]
    if not _compiles_again(step.fn, second):
        return
    changes = []
    for name, old_kinds, new_kinds in zip(step.parameters, kinds_before, kinds_after, strict=True):
        changes += _describe_changes(name, old_kinds, new_kinds)
    message = "the second call, on the results of the first, compiles again"
    if changes:
        message += f": {', '.join(changes[:3])}"
    if len(changes) > 3:
        message += " and more"
    yield Finding(
        "second-compile",
        f"{message}.",
        step.source,
        "Give the first state the layouts and types that the step returns, or fix them with out_shardings.",
    )


_Kinds = list[tuple[str, str]]  # the path of each leaf, and its kind in words


def _describe_changes(name: str, old_kinds: _Kinds, new_kinds: _Kinds) -> list[str]:
    """The leaves of another kind, as "state['w'] was float32 on P() and is float32 on P('data')"."""
    changes = []
    for (path, old), (_, new) in zip(old_kinds, new_kinds, strict=True):
        if old != new:
            changes.append(f"{name}{path} was {old} and is {new}")
    return changes


def _compiles_again(fn: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call compiles anything, by jax's own events."""
    # A step may be any callable, perhaps with several jits inside, so that there is no cache to ask for its size.
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
    """Copies of the arrays, which a step may then donate."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        # A copy is as committed to its devices as the array was: jit compiles again for the other kind.
        if leaf.committed:
            return jax.device_put(leaf.copy(), leaf.sharding)
        return leaf.copy()

    return jax.tree.map(copy, args)


def _choose_next_arguments(first: Sequence[Any], originals: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The arguments of the next call.

    An argument that the call consumed, or a tree of several leaves, is the next result of the same shapes: step(state,
    batch) that returns (state, metrics) is called with its state and the batch as it was.
    """
    remaining = list(results)
    arguments = []
    for argument, original in zip(first, originals, strict=True):
        leaves = jax.tree.leaves(argument)
        was_consumed = False  # whether the step was passed its buffers, and has donated them
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                was_consumed = True
        if was_consumed or len(leaves) > 1:
            number = _find_alike(argument, remaining)
            if number is not None:
                argument = remaining.pop(number)
            elif was_consumed:
                argument = _copy_arrays(original)
        arguments.append(argument)
    return arguments


def _find_alike(argument: Any, results: Sequence[Any]) -> int | None:
    """The number of the first result of the same structure, shapes and dtypes; None if there is none."""
    shapes = _list_shapes(argument)
    for number, result in enumerate(results):
        if _list_shapes(result) == shapes:
            return number
    return None


def _list_shapes(tree: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    leaves, structure = jax.tree.flatten(tree)
    shapes = []
    for leaf in leaves:
        shapes.append((getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)))
    return structure, shapes


def _list_kinds(tree: Any) -> _Kinds:
    """For each leaf its path, and what a compiled program depends on beside its shape: weak type and sharding."""
    kinds = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kind = str(getattr(leaf, "dtype", type(leaf).__name__))
        if getattr(leaf, "weak_type", False):  # keys have none
            kind = f"weakly typed {kind}"
        kinds.append((jax.tree_util.keystr(path), f"{kind} on {_describe_devices(leaf)}"))
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
    if not leaf.committed:
        return "no device in particular"
    return "one device"

"""What every measurement needs: a function that can be called repeatedly, and the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Machine:
    """Where a measurement ran.

    Attributes:
        jax: its version.
        platform: "cpu", "gpu", "tpu".
        kind: the name of the devices.
        devices: their number, over all processes.
        cores: CPU cores that this process may use.
    """

    jax: str
    platform: str
    kind: str
    devices: int
    cores: int

    @property
    def simulated(self) -> bool:
        """Whether the devices are threads that share the CPU's cores."""
        return self.platform == "cpu"

    def __str__(self) -> str:
        return f"jax {self.jax}, {self.devices} x {self.kind} ({self.platform}), {self.cores} CPU cores"


def machine() -> Machine:
    """Where this process runs."""
    first = jax.devices()[0]
    # The cores that a container grants, where the system can say it.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(jax.__version__, first.platform, first.device_kind, jax.device_count(), cores)


def refuse_abstract(where: str, args: Any) -> None:
    """Refuses ShapeDtypeStructs as arguments of a program that will run."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{where}: arguments must be arrays, because the program runs; got a ShapeDtypeStruct at "
                f"args{jax.tree_util.keystr(path)}. Pass arrays, or use aot.compile, which runs nothing."
            )


def repeatable(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Callable[[], Any]]:
    """Calls `fn` once, which compiles it, and prepares further calls with equal arguments.

    The first call, on copies, shows what `fn` donates; that is copied again before every later call, so that the
    caller's arrays stay valid.

    Returns:
        `prepare() -> call`: prepare copies what `fn` donates and waits, so that only `call()` need be timed,
        which runs the program, waits for its results and returns them.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    first = [_copy(leaf) for leaf in leaves]
    jax.block_until_ready(fn(*jax.tree.unflatten(tree, jax.block_until_ready(first))))
    donated = [isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in first]

    def prepare() -> Callable[[], Any]:
        fresh = [_copy(leaf) if gone else leaf for leaf, gone in zip(leaves, donated, strict=True)]
        ready = jax.tree.unflatten(tree, jax.block_until_ready(fresh))
        return lambda: jax.block_until_ready(fn(*ready))

    return prepare


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf

"""From words to a mesh: `data=2 model=4`."""

from __future__ import annotations

import math

import jax

import shardkit as sk
from shardkit._arguments.checks import quote
from shardkit.meshes.simulated import offer_cpu_devices

# What plans call axes, and "tensor", under which the planner looks for the links of "model".
AXES = ("data", "fsdp", "expert", "context", "zero1", "zero2", "ulysses", "stage", "model", "tensor")


def read_sizes(where: str, words: tuple[str, ...]) -> dict[str, int]:
    """From `("data=8",)` to `{"data": 8}`, for the command `where`."""
    sizes: dict[str, int] = {}
    for word in words:
        axis, _, size = word.partition("=")
        try:
            count = int(size)
        except ValueError:
            raise ValueError(
                f"{where}: the mesh must be given as AXIS=SIZE; got {word!r}. Write for example data=8."
            ) from None
        if axis not in AXES:
            raise ValueError(f"{where}: the axis must be one of {quote(AXES)}; got {axis!r}. Write for example data=8.")
        if axis in sizes:
            raise ValueError(
                f"{where}: axis {axis!r} must be given once; got {' '.join(words)!r}. Remove one of the two."
            )
        sizes[axis] = count
    return sizes


def make_mesh(where: str, words: tuple[str, ...], *, many: bool) -> jax.sharding.Mesh:
    """The mesh of `("data=8",)`, of simulated devices if there are no others; `many` processes have theirs already."""
    sizes = read_sizes(where, words)
    # With a size of -1, the number of devices is known only when jax has started.
    if not many and all(size > 0 for size in sizes.values()):
        offer_cpu_devices(math.prod(sizes.values()))
    return sk.make_mesh(**sizes)

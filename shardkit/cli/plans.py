"""The words of a mesh, `data=2 model=4`, as a plan and as the axes that the reference transformer uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import shardkit as sk
from shardkit._check import quoted
from shardkit.models import transformer

_PLANS: dict[str, Callable[[str], sk.Plan]] = {
    "data": sk.dp,
    "fsdp": partial(sk.fsdp, layerwise=("layers",)),
    "zero1": sk.zero1,
    "zero2": partial(sk.zero2, layerwise=("layers",)),
    "context": sk.cp,
    "ulysses": sk.cp,
    "expert": sk.ep,
    "stage": sk.pp,
}
AXES = (*_PLANS, "model")


def mesh_words(words: tuple[str, ...]) -> dict[str, int]:
    """`("data=8",)` as `{"data": 8}`."""
    sizes: dict[str, int] = {}
    for word in words:
        axis, _, size = word.partition("=")
        try:
            count = int(size)
        except ValueError:
            raise ValueError(
                f"train: the mesh is given as words AXIS=SIZE; got {word!r}. Write for example data=8."
            ) from None
        if axis not in AXES:
            raise ValueError(f"train: the axis must be one of {quoted(AXES)}; got {axis!r}. Use one of them.")
        if axis in sizes:
            raise ValueError(f"train: axis {axis!r} is given twice in {' '.join(words)!r}. Give each axis one size.")
        sizes[axis] = count
    return sizes


def plan_of(
    sizes: Mapping[str, int], config: transformer.Config, *, sequence: bool, impl: Any
) -> tuple[sk.Plan, transformer.Axes]:
    """The plan of a mesh, and the axes for the transformer's loss.

    Args:
        sizes: the mesh's axes, each named as in `AXES`.
        config: the transformer.
        sequence: split tokens over "model" between the blocks.
        impl: form of the gathered matmuls.
    """
    if sequence and "model" not in sizes:
        raise ValueError(
            f"train: --sequence must go with an axis 'model'; the axes are {quoted(sizes)}. Add model=2, or leave it "
            "out."
        )
    plans = [_PLANS[axis](axis) for axis in sizes if axis != "model"]
    if "model" in sizes:
        rules = transformer.tensor_rules(config, "model", sizes["model"])
        plans.append(sk.tp("model", rules, sequence=sequence))
    inside: dict[str, Any] = {
        axis: axis for axis in ("model", "context", "ulysses", "expert", "stage") if axis in sizes
    }
    return sk.chain(*plans), transformer.Axes(**inside, sequence=sequence, impl=impl)

"""From mesh words, `data=2 model=4`, to a plan and the axes of the reference transformer."""

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


def mesh_words(words: tuple[str, ...], where: str = "train") -> dict[str, int]:
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
            raise ValueError(
                f"{where}: the axis must be one of {quoted(AXES)}; got {axis!r}. Write for example data=8."
            )
        if axis in sizes:
            raise ValueError(
                f"{where}: axis {axis!r} must be given once; got {' '.join(words)!r}. Remove one of the two."
            )
        sizes[axis] = count
    return sizes


def plan_of(
    sizes: Mapping[str, int], config: transformer.Config, *, sequence: bool, impl: Any
) -> tuple[sk.Plan, transformer.Axes]:
    """The plan for a mesh, and the axes of the transformer's loss.

    Args:
        sizes: axis name and size; names are from `AXES`.
        config: the transformer.
        sequence: between the blocks, split tokens over "model".
        impl: as for `all_gather_matmul`.
    """
    if sequence and "model" not in sizes:
        raise ValueError(
            f"train: --sequence needs an axis 'model'; the axes are {quoted(sizes)}. Add model=2, or leave the option "
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

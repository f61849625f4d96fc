"""A kernel of the field with one planted fault: `# fault: LINE` stands above the line that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec

from corpus.case import Case


def planted(
    kernel: Callable[..., Any], reference: Callable[..., Any], args: Any, ins: Any, outs: Any, **sizes: int
) -> Case:
    """A case, named after its kernel; `grad=0` among the sizes leaves gradients out."""
    grad = bool(sizes.pop("grad", 1))
    ins = ins if isinstance(ins, PartitionSpec) else tuple(ins)
    return Case(kernel.__name__, "", kernel, reference, (tuple(args), ins, outs), grad, sizes, "fault")

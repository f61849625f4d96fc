"""What a published bug is here: a right and a wrong kernel, which differ in the lines marked `# wrong`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

MEGATRON = "https://github.com/NVIDIA/Megatron-LM/issues/"
TITAN = "https://github.com/pytorch/torchtitan/pull/"
TORCH = "https://github.com/pytorch/pytorch/"
CHANGELOG = "CHANGELOG.md"


class Case(NamedTuple):
    """A bug that was silent where it was found."""

    name: str
    source: str
    right: Callable[..., Any]
    wrong: Callable[..., Any]
    reference: Callable[..., Any]  # what both should compute, of the global arrays
    call: tuple[tuple[Any, ...], Any, Any]  # arguments, in_specs, out_specs
    sizes: Mapping[str, int]
    grad: bool = True  # whether gradients are compared; not of a kernel that returns them

    @property
    def lines(self) -> dict[int, str]:
        """The lines marked `# wrong`, by number."""
        lines, first = inspect.getsourcelines(self.wrong)
        return {first + i: line for i, line in enumerate(lines) if line.rstrip().endswith("# wrong")}


def floats(*shape: int) -> np.ndarray:
    """An argument, the same for the same shape."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)

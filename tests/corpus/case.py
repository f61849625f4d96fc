"""What a published bug is here: a kernel, with a comment `# wrong: LINE` above each line that was another one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
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
    reference: Callable[..., Any] = len  # what both should compute, of the global arrays
    call: tuple[tuple[Any, ...], Any, Any] = ((), (), ())  # arguments, in_specs, out_specs
    grad: bool = True  # whether gradients are compared; not of a kernel that returns them
    sizes: Mapping[str, int] = {}
    mark: str = "wrong"  # of the lines that were others where the bug was

    def against(self, reference: Callable[..., Any], args: tuple[Any, ...], ins: Any, outs: Any, **more: Any) -> Case:
        """What it should compute, and of what."""
        return self._replace(reference=reference, call=(args, ins, outs), **more)

    @property
    def wrong(self) -> Callable[..., Any]:
        """The kernel with its mistake."""
        return mistaken(self.right, self.mark)[0]

    @property
    def lines(self) -> frozenset[int]:
        """The numbers of its lines there, and of those that are wrong with them: a proof may name any."""
        return mistaken(self.right, self.mark)[1]


@cache
def mistaken(kernel: Callable[..., Any], mark: str) -> tuple[Callable[..., Any], frozenset[int]]:
    """The kernel with the lines below its marks as these have them, in their place; the numbers a proof may name."""
    lines, first = inspect.getsourcelines(kernel)
    marks = [i for i, line in enumerate(lines) if line.lstrip().startswith(f"# {mark}: ")]
    for i in marks:
        lines[i + 1] = lines[i].replace(f"# {mark}: ", "")
    told = {i + 1 for i in marks} | {i for i, line in enumerate(lines) if line.endswith("# wrong with it\n")}
    module = dict(kernel.__globals__)
    exec(compile("\n" * (first - 1) + "".join(lines), inspect.getfile(kernel), "exec"), module)
    return module[kernel.__name__], frozenset(first + i for i in told)


def floats(*shape: int) -> np.ndarray:
    """An argument, the same for the same shape."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)

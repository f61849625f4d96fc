"""What a run computed, so that runs with a change compute only what follows from it.

A search runs a program hundreds of times, each time with another equation changed. What comes before that equation, or
beside it, reads the very arrays that it read in the first run, and gives what it gave.

Worked example: `y = psum(x @ w, "data"); z = tanh(y)`, run again with another psum.

    x, w, x @ w     read what they read: recalled
    psum            changed
    tanh            reads another array: computed
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


class StepMemory:
    """What steps of a run gave, by what they read: arrays are recognized by identity."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}
        self._kept: list[Any] = []
        self._is_open = True

    def close(self) -> None:
        """Ends the run that is remembered: later ones only recall."""
        self._is_open = False

    def recall(self, step: Any, place: Hashable, operands: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """What a step gave there when it read the same arrays, or what it gives now.

        `step` may be anything that stands for it, as an equation; `place` tells steps apart that share one.
        """
        key = id(step), place, tuple(map(id, operands))
        if key in self._results:
            return self._results[key]
        results = compute()
        if self._is_open:
            self._results[key] = results
            # What is kept is no other object's identity.
            self._kept += [step, *operands]
        return results

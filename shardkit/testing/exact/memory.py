"""The results of a first run, so that a run with a change computes only the equations that follow from the change.

A search runs a program hundreds of times, each time with another equation changed. The equations before it, or beside
it, read the very arrays that they read in the first run, and give the same results.

Worked example: `y = psum(x @ w, "data"); z = tanh(y)`, run again with another psum.

    x, w, x @ w     read the same arrays: recalled
    psum            changed
    tanh            reads another array: computed
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


class StepMemory:
    """The results of the steps of a run, by the arrays that the steps read, which are recognized by identity."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}
        self._kept: list[Any] = []
        self._is_open = True

    def close(self) -> None:
        """Ends the run that is remembered: later ones only recall."""
        self._is_open = False

    def recall(self, step: Any, place: Hashable, operands: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """The results that a step had there when it read the same arrays; if it never did, those that it has now.

        `step` may be anything that stands for it, as an equation; `place` tells steps apart that share one.
        """
        # By identity, because to compare arrays would take as long as to compute the step.
        key = id(step), place, tuple(map(id, operands))
        if key in self._results:
            return self._results[key]
        results = compute()
        if self._is_open:
            self._results[key] = results
            # Kept, so that no other object gets their identities.
            self._kept += [step, *operands]
        return results

"""What a compiled program needs of a device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_FIELDS = ("argument", "output", "alias", "temp", "generated_code", "host_temp")


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler laid them out, padding included.

    Attributes:
        argument: the arguments: the state and the batch.
        output: the results.
        alias: results that take the place of donated arguments.
        temp: all that lives during the step only.
        generated_code: the program itself.
        host_temp: temporaries that the program keeps in the host's memory.
        compiler_peak: the most at any time as the compiler counts it; 0 where it does not say.
    """

    argument: int
    output: int
    alias: int
    temp: int
    generated_code: int
    host_temp: int
    compiler_peak: int = 0

    @property
    def held(self) -> int:
        """What is there between steps: the arguments."""
        return self.argument

    @property
    def peak(self) -> int:
        """The most at any time: the compiler's figure, else arguments, results beside them, temporaries and code."""
        if self.compiler_peak:
            return self.compiler_peak
        return self.argument + self.output - self.alias + self.temp + self.generated_code


def memory_of(executable: Any, compiler_peak: int = 0) -> Memory:
    """The figures of an executable, as jax's runtime hands it out."""
    stats = executable.get_compiled_memory_stats()
    return Memory(**{name: getattr(stats, f"{name}_size_in_bytes") for name in _FIELDS}, compiler_peak=compiler_peak)

"""Device memory of a compiled program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_FIELDS = ("argument", "output", "alias", "temp", "generated_code", "host_temp")


@dataclass(frozen=True)
class Memory:
    """Bytes per device as the compiler allocates them, padding included."""

    argument: int  # the arguments: the state and the batch
    output: int  # the results
    alias: int  # results in the buffers of donated arguments
    temp: int  # temporaries of the step
    generated_code: int  # the program
    host_temp: int  # temporaries in host memory
    compiler_peak: int = 0  # the compiler's peak; 0 where it reports none

    @property
    def held(self) -> int:
        """Bytes held between steps: the arguments."""
        return self.argument

    @property
    def peak(self) -> int:
        """The peak: the compiler's figure, else arguments, results not in their buffers, temporaries and code."""
        if self.compiler_peak:
            return self.compiler_peak
        return self.argument + self.output - self.alias + self.temp + self.generated_code


def memory_of(executable: Any, compiler_peak: int = 0) -> Memory:
    """The memory of an executable of jax's runtime."""
    stats = executable.get_compiled_memory_stats()
    return Memory(**{name: getattr(stats, f"{name}_size_in_bytes") for name in _FIELDS}, compiler_peak=compiler_peak)

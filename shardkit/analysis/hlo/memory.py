"""Device memory of a compiled program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
        """The peak: the compiler's figure, else arguments, results not in their buffers, temporaries and code.

        For example a step of 8 GiB of state, donated, and 1 GiB of batch, with 3 GiB of temporaries and no figure of
        the compiler: 9 GiB of arguments, 8 GiB of results of which 8 GiB are in their buffers, and 3 GiB are 12 GiB.
        """
        if self.compiler_peak:
            return self.compiler_peak
        return self.argument + self.output - self.alias + self.temp + self.generated_code


def memory_of(executable: Any, compiler_peak: int = 0) -> Memory:
    """The memory of an executable of jax's runtime."""
    stats = executable.get_compiled_memory_stats()
    return Memory(
        argument=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes,
        alias=stats.alias_size_in_bytes,
        temp=stats.temp_size_in_bytes,
        generated_code=stats.generated_code_size_in_bytes,
        host_temp=stats.host_temp_size_in_bytes,
        compiler_peak=compiler_peak,
    )

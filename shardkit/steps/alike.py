"""Steps that are alike on different devices of one process, such as those of DiLoCo's workers: compiled once.

Every worker's step is traced and lowered by itself, so nothing is assumed of the function that built it. Where the
compiler would get the same text as for an earlier worker, its executable is placed on this worker's devices instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax

from shardkit._jax import compat, relocation


class AlikePrograms:
    """The programs that workers of one process have compiled, by their text."""

    def __init__(self) -> None:
        self._programs: dict[str, relocation.PackedProgram] = {}

    def compile(self, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """The compiled program for these devices."""
        text = lowered.as_text()
        program = self._programs.get(text)
        # What jax can write and read differs between versions and programs, and it is a matter of speed alone.
        if program is not None:
            with suppress(Exception):
                return relocation.place(program, devices)
        compiled = lowered.compile()
        with suppress(Exception):
            self._programs[text] = relocation.pack(compiled, devices)
        return compiled


class AlikeRun:
    """The program of one worker, in place of its jitted function `run`."""

    def __init__(self, run: Any, programs: AlikePrograms, devices: Sequence[jax.Device]):
        self._run = run
        self._programs = programs
        self._devices = devices
        self._compiled: Any = None  # for the arguments of the first call

    def __call__(self, *args: Any) -> Any:
        if compat.is_tracing():
            return self._run(*args)
        if self._compiled is None:
            self._compiled = self._programs.compile(self._run.lower(*args), self._devices)
        try:
            return self._compiled(*args)
        except (TypeError, ValueError):  # a batch of another shape, before anything has run: jit compiles for it
            return self._run(*args)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """As that of a jitted function."""
        return self._run.trace(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """As that of a jitted function."""
        return self._run.lower(*args)

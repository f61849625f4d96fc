"""What a training run says while it runs: one line that moves on a terminal, lines now and then in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import jax
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_A_SECOND = 8  # refreshes
# jax tells when it has lowered a program, which XLA compiles next, and when it has compiled one.
_LOWERED, _COMPILED = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"


class Display:
    """The moving line: what is being done and for how long, or how far the steps are.

    Args:
        console: where to; the line is on a terminal only, in a pipe phases and logged steps are lines.
        first: the index of the first step.
        steps: the index after the last one.
    """

    def __init__(self, console: Console, first: int, steps: int):
        self.console, self.first, self.steps = console, first, steps
        self.moves = console.is_terminal and not console.quiet
        self._phase, self._since, self._number, self._said = "", 0.0, first, ""
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self.line, console=console, refresh_per_second=_A_SECOND, transient=True)

    def __enter__(self) -> Display:
        if self.moves:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows what is being done, and the seconds since; in a pipe as one line."""
        before, self._phase, self._since = self._phase, text, time.monotonic()
        if not self.moves:
            self.console.print(f"{text} ...")
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def building(self, text: str) -> Iterator[None]:
        """A phase in which jax traces, XLA compiles, and what was compiled runs: which of them is shown."""
        stages = {_LOWERED: "compiling", _COMPILED: "running"}

        def heard(event: str, duration_secs: float, **more: Any) -> None:
            if event in stages and self._phase:
                self._phase = f"{text}: {stages[event]}"

        jax.monitoring.register_event_duration_secs_listener(heard)
        try:
            with self.phase(f"{text}: tracing" if self.moves else f"{text}: tracing and compiling"):
                yield
        finally:
            jax.monitoring.unregister_event_duration_listener(heard)

    def step(self, number: int, said: str) -> None:
        """Moves the line to a step: its number, counted from 1, and what to say of it."""
        self._number, self._said = number, said

    def line(self) -> RenderableType:
        """The line as it is now."""
        taken = Text(f"step {self._number}/{self.steps}")
        seconds = time.monotonic() - self._since
        said = Text(f"{self._phase}, {seconds:.0f} s" if self._phase else self._said, no_wrap=True, overflow="ellipsis")
        if self._number == self.first:
            self._spinner.update(text=said)
            return self._spinner
        row = Table.grid(padding=(0, 1))
        row.add_row(taken, ProgressBar(total=self.steps, completed=self._number, width=20), said)
        return row


def duration(seconds: float) -> str:
    """Minutes and seconds, as 1:05; with hours from one on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

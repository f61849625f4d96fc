"""The log of a training run while it runs: JSON lines, and TensorBoard's files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from shardkit.cli.output import header, plain, writing

# The numbers of a row, and what TensorBoard calls them.
_TAGS = {
    "loss": "loss/training",
    "validation_loss": "loss/validation",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}


class TrainLog:
    """Writes rows as they come: the first says what the run is, the last how it ended."""

    def __init__(self, out: TextIO | None = None, board: Any = None):
        self._out, self._board = out, board

    def begin(self, **what: Any) -> None:
        """The first row: schema, command, date, versions, device, and what the run is."""
        self._write({"row": "run"} | header("train") | what)

    def row(self, kind: str, **values: Any) -> None:
        """A row of some kind; the numbers of a step go to TensorBoard too."""
        self._write({"row": kind} | values)
        if self._board is not None and "step" in values:
            for name, tag in _TAGS.items():
                if values.get(name) is not None:
                    self._board.add_scalar(tag, values[name], values["step"])

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._out is not None:
            self._out.write(json.dumps(plain(row)) + "\n")
            self._out.flush()  # so that others can follow


@contextmanager
def train_log(file: Path | None, board: Path | None, *, writes: bool, resumes: bool) -> Iterator[TrainLog]:
    """The log of a run; on processes that do not write, one that does nothing.

    Args:
        file: of JSON lines; "-" is standard output. A run that resumes appends.
        board: TensorBoard's folder.
        writes: whether this process writes.
        resumes: whether the run resumes.
    """
    with ExitStack() as stack:
        out = stack.enter_context(writing(file, append=resumes)) if file is not None and writes else None
        writer = _board(board) if board is not None and writes else None
        if writer is not None:
            stack.callback(writer.close)
        yield TrainLog(out, writer)


def _board(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(
            "train: --tensorboard needs the package tensorboardX, which is missing. Install it with: pip install "
            "'shardkit[tensorboard]'."
        ) from None
    return SummaryWriter(str(folder))

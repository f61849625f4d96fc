"""One wrong place in the library, which some test of the default tier must notice. No jax.

Mutants come from two places: mistakes that were once made here, which are brought back (`reverts.txt`), and mistakes
that are drawn by a seed from the code itself (`drawn.py`).
"""

import runpy
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Mutant(NamedTuple):
    """A mistake: the bytes of a file from `begin` to `end`, what replaces them, and the kind of mistake."""

    name: str
    file: str
    begin: int
    end: int
    new: str
    kind: str

    def mutated(self, text: bytes) -> bytes:
        return text[: self.begin] + self.new.encode() + text[self.end :]

    def line(self, text: bytes) -> int:
        """The first line that the mistake changes, from 1."""
        old = text[self.begin : self.end]
        return text.count(b"\n", 0, self.begin + len(old) - len(old.lstrip())) + 1


def reverted(name: str, file: str, old: str, new: str) -> Mutant:
    """A mend taken back; its text must stand exactly once in the file."""
    text = (ROOT / file).read_bytes()
    if text.count(old.encode()) != 1:
        raise ValueError(
            f"reverts: the text of a row must stand once in its file; that of {name} stands "
            f"{text.count(old.encode())} times in {file}. Pass the line as it is now."
        )
    begin = text.index(old.encode())
    return Mutant(name, file, begin, begin + len(old.encode()), new, "a mend taken back")


def every_revert() -> list[Mutant]:
    return [reverted(*row) for row in runpy.run_path(str(HERE / "reverts.py"))["REVERTS"]]

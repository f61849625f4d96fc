"""One-line mistakes in the library, each of which some test of the default tier must notice. No jax.

A mutant is a mistake that somebody could make and a reviewer could miss: not a crash at import, not a change that
nobody can see. `mutants.txt` is the list, in the form of a diff:

    shardkit/collectives/permute.py
    shift-wrong-way: a wrong neighbour
    -pairs = [(i, (i + by) % count) for i in range(count)]
    +pairs = [(i, (i - by) % count) for i in range(count)]

What stands after - is found exactly once in the file, and what stands after + replaces it; without a line + the whole
line goes. A line ? says why no test can notice the mutant. `reverts.py` has mends that are taken back.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
REVERTED = "a mend taken back"


class Mutant(NamedTuple):
    """A mistake: a text in a file, what replaces it, and the kind of mistake that this is.

    `equivalent` says why no test can notice it, where none can; such a mutant may survive.
    """

    name: str
    file: str
    old: str
    new: str
    risk: str
    equivalent: str = ""


def read(text: str) -> list[Mutant]:
    """The mutants of a list such as that of the docstring above."""
    found: list[Mutant] = []
    file = ""
    for line in text.splitlines():
        mark, rest = line[:1], line[1:]
        if mark == "-":
            found[-1] = found[-1]._replace(old=rest + "\n")
        elif mark == "+":
            found[-1] = found[-1]._replace(old=found[-1].old.removesuffix("\n"), new=rest)
        elif mark == "?":
            found[-1] = found[-1]._replace(equivalent=rest.strip())
        elif ": " in line:
            name, risk = line.split(": ", 1)
            found.append(Mutant(name, file, "", "", risk))
        elif line:
            file = line
    return found


MUTANTS = (
    *read((HERE / "mutants.txt").read_text()),
    *(Mutant(*each, REVERTED) for each in runpy.run_path(str(HERE / "reverts.py"))["REVERTS"]),
)

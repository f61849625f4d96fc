"""Mistakes that were once made here, each to be brought back: `reverts.txt`, in the form of a diff. No jax.

    shift-wrong-way: shardkit/collectives/permute.py
    -pairs = [(i, (i + by) % count) for i in range(count)]
    +pairs = [(i, (i - by) % count) for i in range(count)]

What stands after - is found exactly once in the file, and what stands after + replaces it. A text that ends a line ends
with an empty line of its kind; without + it goes. A line with # is a comment.
"""

from pathlib import Path


def read(text: str) -> list[tuple[str, str, str, str]]:
    """The rows of such a list: name, file, what stands there, and what to write in its place."""
    found: list[tuple[str, str, list[str], list[str]]] = []
    for line in text.splitlines():
        mark, rest = line[:1], line[1:]
        if mark == "-":
            found[-1][2].append(rest)
        elif mark == "+":
            found[-1][3].append(rest)
        elif mark != "#":
            name, file = line.split(": ")
            found.append((name, file, [], []))
    return [(name, file, "\n".join(old), "\n".join(new)) for name, file, old, new in found]


REVERTS = read(Path(__file__).with_name("reverts.txt").read_text())

"""The words of a command line, before tyro reads them."""

from __future__ import annotations

from collections.abc import Sequence


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before `--`, and the others with it, which are those of the program that `launch` starts.

    For example of `launch -n 4 -- train.py --json` they are [launch, -n, 4] and [--, train.py, --json].
    """
    words = list(words)
    if "--" not in words:
        return words, []
    end = words.index("--")
    return words[:end], words[end:]


def fill_in_json(words: Sequence[str]) -> list[str]:
    """The words of a command with the file that a bare `--json` stands for: standard output.

    For example `audit a.py:make --json --explain` becomes `audit a.py:make --json - --explain`. What follows `--` are
    the words of another program.
    """
    options, program = split_at_dashes(words)
    following_words = [*options, "--"][1:]  # nothing follows the last
    filled = []
    for word, following_word in zip(options, following_words, strict=True):
        filled.append(word)
        if word == "--json" and following_word.startswith("--"):
            filled.append("-")
    return filled + program

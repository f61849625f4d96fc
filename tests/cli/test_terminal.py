"""The command on a real terminal of 100 columns: what is broken between words, and colors."""

import codecs
import fcntl
import os
import re
import struct
import subprocess
import termios
import time

import pytest

from support.commands import command, environment

WIDTH = 100


class Terminal:
    """A command on a pseudo-terminal; `seen` is all that it has written."""

    def __init__(self, *words):
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
        env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "NO_COLOR")}
        self.child = subprocess.Popen(
            command(*words), stdin=theirs, stdout=theirs, stderr=theirs, env=env | {"TERM": "xterm"}, process_group=0
        )
        os.close(theirs)
        self.end, self.seen = ours, ""
        self.decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end inside a character

    def until(self, pattern="(?!)", timeout=240):
        """Reads until the pattern appears, or to the end."""
        begun = time.monotonic()
        while not re.search(pattern, self.seen) and time.monotonic() - begun < timeout:
            try:
                data = os.read(self.end, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            self.seen += self.decode(data)
        return self.seen

    def text(self):
        """What stays on the screen: lines, without colors and without what was written over."""
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen).replace("\r\n", "\n").split("\n")
        return [line.rpartition("\r")[2] for line in lines]


@pytest.fixture
def terminal():
    started = []

    def start(*words):
        started.append(Terminal(*words))
        return started[-1]

    yield start
    for each in started:
        each.child.kill()
        each.child.wait()
        os.close(each.end)


def test_a_mistake_on_a_terminal_breaks_between_words_and_help_has_colors(terminal):
    """The terminal itself breaks lines in the middle of words."""
    mistake = terminal("launch", "-n", 2, "train.py", "--steps", 100)
    mistake.until()
    assert mistake.child.wait(timeout=600) == 2
    assert mistake.text()[-3:-1] == [
        "error: launch: the command and its options must come after --. Write for example -- train.py --steps",
        "100.",
    ]
    shown = terminal("launch", "--help")
    shown.until()
    assert "\x1b[" in shown.seen and max(map(len, shown.text())) <= WIDTH

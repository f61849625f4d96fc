"""Launchers of several hosts, on this one: as they are, and by hand."""

import os
import socket
import time
from typing import ClassVar

from shardkit.runtime import launch_on_hosts
from shardkit.runtime.cluster.messages import Beat, Terms, ToLauncher, arrival_message, heard, introduction, told
from shardkit.runtime.monitor.hello import TOKEN, signed
from shardkit.runtime.monitor.wire import Lines

SLACK = 20.0


def launcher(port, text, *, token="secret", hosts=3, **options):
    """One launcher; its processes run `text` in a shell."""
    options = {"min_hosts": 2, "wait": 0.6, "silence": 1.0, "patience": 1.5, "grace": 0.3, "restarts": 3} | options
    environ = dict(os.environ) | {TOKEN: token}
    return launch_on_hosts(["sh", "-c", text], meet=f"127.0.0.1:{port}", hosts=hosts, environ=environ, **options)


class Peer:
    """A launcher by hand: it says what it likes, and the test reads what it is told."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, port, terms=(3, 2, 3), token="secret"):
        until = time.monotonic() + SLACK
        while True:
            try:
                self.socket = socket.create_connection(("127.0.0.1", port), timeout=SLACK)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.02)
        Peer.opened.append(self.socket)
        self.lines, self.all = Lines(self.socket), []
        arrival = introduction("by hand", 2, Terms(*terms))
        self.lines.send(arrival_message(arrival, token))
        self.answer = self.next()
        assert token != "secret" or self.answer == signed(
            {name: value for name, value in self.answer.items() if name != "mac"}, token, arrival.nonce
        )

    def say(self, *what):
        for each in what:
            self.lines.send(told(each))

    def next(self):
        until = time.monotonic() + SLACK
        while not self.all and not self.lines.closed:
            assert time.monotonic() < until
            if self.lines.waits(0.1):
                self.all += self.lines.read()
        return self.all.pop(0) if self.all else None

    def until(self, kind):
        while (message := self.next()) is not None:
            found = heard(message, ToLauncher)
            if isinstance(found, kind):
                return found
            self.say(Beat())
        return None

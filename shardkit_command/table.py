"""The commands: what each is called, what it does in a line, and the module that runs it."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """A command: its name, what it does in a line, and the module with its `Options` and a function of its name."""

    name: str
    line: str
    module: str


COMMANDS = (
    Command("train", "train a byte-level transformer on any mesh", "shardkit.cli.train"),
    Command("evaluate", "the validation loss of a saved run", "shardkit.cli.evaluate"),
    Command("sample", "text from a saved run", "shardkit.cli.sample"),
    Command("launch", "start a job of several processes, or print a manifest", "shardkit.cli.launch"),
    Command("chaos", "faults planted in a job that restarts by itself", "shardkit.cli.chaos"),
    Command("doctor", "check this installation, its devices and every collective", "shardkit.cli.doctor"),
    Command("lint", "find communication that hangs, is wrong or is wasted", "shardkit.cli.lint"),
    Command("audit", "what a jitted step holds, sends and wastes", "shardkit.cli.audit"),
    Command("aot", "compile a step for chips that are not attached", "shardkit.cli.aot"),
    Command("report", "a step as one HTML page, to read or to mail", "shardkit.cli.report"),
    Command("draw", "a pipeline schedule as text, numbers and picture", "shardkit.cli.draw"),
)
BENCH = (
    Command("comm", "collectives, as nccl-tests measures them", "shardkit.cli.bench.comm"),
    Command("strategies", "one model under every plan that fits a mesh", "shardkit.cli.bench.strategies"),
    Command("compare", "what became slower between two files of results", "shardkit.cli.bench.compare"),
    Command("plot", "results as a picture", "shardkit.cli.bench.plot"),
    Command("trace", "a step as execution traces for network simulators", "shardkit.cli.bench.trace"),
)
GROUPS = {"bench": (BENCH, "measure communication and plans, and compare measurements")}
SHELLS = ("bash", "zsh", "fish")


def commands_of(group: str = "") -> tuple[Command, ...]:
    """The commands under `shardkit`, or under a group such as "bench"."""
    return GROUPS[group][0] if group else COMMANDS


def find(words: list[str]) -> tuple[Command, str, list[str]] | None:
    """The command that some words begin with, its full name such as "bench comm", and the words after it."""
    group = words[0] if words and words[0] in GROUPS else ""
    rest = words[1:] if group else words
    for command in commands_of(group):
        if rest[:1] == [command.name]:
            return command, f"{group} {command.name}".strip(), rest[1:]
    return None

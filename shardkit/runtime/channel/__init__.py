"""Everything that a process shares with its monitor, a small program beside it: its place, its phase, their messages.

Start with `client.py`. The monitor is no part of the runtime: the client starts it by its path, as any other program.
Both sides read their common terms here. Imports the standard library only, as the monitor does.
"""

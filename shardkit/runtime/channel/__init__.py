"""What a process of a job shares with its monitor, a small program beside it: its place, its phase, what both say.

Start with `client.py`. The monitor is no part of the runtime: the client starts it by its path, as any other program,
and what both sides must agree on is here. Imports the standard library only, as the monitor does.
"""

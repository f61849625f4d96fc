"""What a process of a job shares with its monitor, a small program beside it: its place, its phase, what both say.

The monitor is no part of the runtime: `client.py` starts it by its path, as any other program, and all that both sides
must agree on is here. The other modules use the standard library only, as the monitor does, which never imports jax.
"""

"""Whose error it is that ends a command: shardkit's refusal, the user's own function's, or nobody's that is known.

Imports no jax before an error is there.
"""

from __future__ import annotations

import dis
import traceback


def is_refusal(error: Exception) -> bool:
    """Whether shardkit refuses something by this error, in a `raise` of its own; all others are unexpected."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, ValueError | RuntimeError | TypeError | ImportError):
        return False
    frame = last.tb_frame
    package, _, _ = frame.f_globals.get("__name__", "").partition(".")
    # The last instruction tells a `raise` from a call that fails: a ValueError of int("x") in shardkit's own code is a
    # bug, and must not pass for a refusal.
    instruction = frame.f_code.co_code[last.tb_lasti]
    return package == "shardkit" and instruction == dis.opmap["RAISE_VARARGS"]


def refuse_users_error(where: str, functions: str, error: Exception) -> None:
    """Refuses what the user's `functions` raised, by its line; returns if the error is shardkit's or jax's own."""
    from shardkit._arguments.checks import describe_error
    from shardkit._jax.jaxprs import own_line

    if is_refusal(error):
        return
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        frames.append((frame.filename, frame.lineno or 0, frame.name))
    line = own_line(frames[::-1])  # the innermost first
    if line:
        raise ValueError(
            f"{where}: {functions} must run; {line} raises {describe_error(error)}. Add --debug to see the traceback."
        ) from error

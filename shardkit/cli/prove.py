"""`shardkit prove FILE.py:FUNCTION`: a kernel for all inputs, or a training step by all laws, against one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from shardkit import testing
from shardkit._arguments.checks import raised
from shardkit.cli.output import WithJson, write_json
from shardkit.cli.target import TargetError, function_of
from shardkit.meshes.simulated import offer_cpu_devices
from shardkit.testing._compare import UnequalError

EXAMPLES = {
    "shardkit prove kernels.py:softmax": "softmax() returns {'kernel': ..., 'reference': ..., ...}",
    "shardkit prove train.py:proof": "proof() returns {'step': ..., 'reference': ..., ...}",
}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit prove`."""

    make: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE.py:FUNCTION")]
    """A function without parameters, of a file or of a module. It returns a dict: the arguments of
    sk.testing.assert_equal_for_all_inputs if one is "kernel", else those of sk.testing.prove."""
    devices: int = 8
    """CPU devices to simulate without an accelerator."""


def prove(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Prove a kernel for all inputs, or a training step by laws, against one device.

    The exit code is 1 if something is not one device's.
    """
    offer_cpu_devices(options.devices)
    call, given = _asked(options.make)
    try:
        found = call(**given)
    except UnequalError as error:
        print(error)
        write_json(options.json, "prove", [], differs=list(error.differs))
        return 1
    print(found)
    proved = found.verdicts if isinstance(found, testing.Proof) else (found,)
    write_json(options.json, "prove", [each._asdict() for each in proved], differs=[])
    return 0


def _asked(text: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What to call, and its arguments."""
    function = function_of(text)
    try:
        given = function()
    except Exception as error:
        raise ValueError(
            f"prove: {text} must return the arguments of a proof; it raises {raised(error)}. Run it with python to "
            "see the traceback."
        ) from error
    if not isinstance(given, dict):
        raise TargetError(
            f"prove: {text} must return the arguments of a proof as a dict; got {type(given).__name__}. Return for "
            "example dict(step=grad_fn, reference=grad_fn, rows=rows, params=params, batches=batches)."
        )
    call: Callable[..., Any] = testing.assert_equal_for_all_inputs if "kernel" in given else testing.prove
    try:
        inspect.signature(call).bind(**given)
    except TypeError as error:
        raise TargetError(
            f"prove: {text} must return the arguments of sk.testing.{call.__name__}; {error}. Its parameters are "
            f"{', '.join(inspect.signature(call).parameters)}."
        ) from None
    return call, given

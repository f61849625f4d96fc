"""`shardkit prove FILE.py:FUNCTION`: a kernel for all inputs, or a training step by all laws, against one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from shardkit.cli.errors import refuse_users_error
from shardkit.cli.options import WithJson
from shardkit.cli.output import write_json

EXAMPLES = {
    "shardkit prove kernels.py:softmax": "softmax() returns {'kernel': ..., 'reference': ..., ...}",
    "shardkit prove train.py:proof": "proof() returns {'step': ..., 'reference': ..., ...}",
}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit prove`."""

    make: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE.py:FUNCTION")]
    """A function without parameters, in a file or a module. It returns a dict of arguments: for
    sk.testing.assert_equal_for_all_inputs if it has a "kernel", otherwise for sk.testing.prove."""
    devices: int = 8
    """CPU devices to simulate without an accelerator."""


def prove(options: Options) -> int:
    """Prove a kernel for all inputs, or a training step by laws, against one device.

    The exit code is 1 if something differs from one device.
    """
    from shardkit.meshes.simulated import offer_cpu_devices
    from shardkit.testing._compare import UnequalError
    from shardkit.testing.prove import Proof

    offer_cpu_devices(options.devices)
    function, arguments = _load_proof(options.make)
    try:
        result = function(**arguments)
    except UnequalError as error:
        print(error)
        write_json(options.json, "prove", [], differs=list(error.differs))
        return 1
    except Exception as error:
        refuse_users_error("prove", f"the functions of {options.make}", error)
        raise
    print(result)
    verdicts = result.verdicts if isinstance(result, Proof) else (result,)
    rows = [verdict._asdict() for verdict in verdicts]
    write_json(options.json, "prove", rows, differs=[])
    return 0


def _load_proof(text: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of `sk.testing` that the user's dict is for, and the dict; refuses one that it does not take."""
    from shardkit import testing
    from shardkit._arguments.checks import raised
    from shardkit.cli.target import TargetError, load_function

    make = load_function(text)
    try:
        arguments = make()
    except Exception as error:
        raise ValueError(
            f"prove: {text} must return the arguments of a proof; it raises {raised(error)}. Run it with python to "
            "see the traceback."
        ) from error
    if not isinstance(arguments, dict):
        raise TargetError(
            f"prove: {text} must return the arguments of a proof as a dict; got {type(arguments).__name__}. Return for "
            "example dict(step=grad_fn, reference=grad_fn, rows=rows, params=params, batches=batches)."
        )
    function: Callable[..., Any] = testing.prove
    if "kernel" in arguments:
        function = testing.assert_equal_for_all_inputs
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise TargetError(
            f"prove: {text} must return the arguments of sk.testing.{function.__name__}; {error}. Its parameters are "
            f"{', '.join(signature.parameters)}."
        ) from None
    return function, arguments

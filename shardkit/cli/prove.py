"""`shardkit prove FILE:NAME`: a kernel, a training step or a compiled program, for all inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import tyro

from shardkit.cli.errors import refuse_users_error
from shardkit.cli.options import WithJson
from shardkit.cli.output import write_json

EXAMPLES = {
    "shardkit prove kernels.py:softmax": "softmax() returns {'kernel': ..., 'reference': ..., ...}",
    "shardkit prove train.py:proof": "proof() returns {'step': ..., 'reference': ..., ...}",
    "shardkit prove train.py:make --compiled": "make() returns your jitted function and its arguments",
}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit prove`."""

    make: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE:NAME")]
    """A function without parameters, in a file or a module. It returns a dict of arguments: for
    sk.testing.assert_equal_for_all_inputs if it has a "kernel", otherwise for sk.testing.prove. With --compiled it
    returns (function, *args), as for audit, or a dict with these two and a "reference"."""
    devices: int = 8
    """CPU devices to simulate without an accelerator."""
    compiled: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compile a function, and prove that its optimized program equals the traced one, or a "reference"."""


def prove(options: Options) -> int:
    """Prove a kernel for all inputs, or a training step by laws, against one device; or a compiled program.

    The exit code is 1 if something differs from one device, or from the trace.
    """
    from shardkit.meshes.simulated import offer_cpu_devices
    from shardkit.testing._compare import UnequalError
    from shardkit.testing.prove import Proof

    offer_cpu_devices(options.devices)
    load_proof = _load_proof
    if options.compiled:
        load_proof = _load_compiled_proof
    prove_it = load_proof(options.make)
    try:
        result = prove_it()
    except UnequalError as error:
        print(error)
        write_json(options.json, "prove", [], differs=list(error.differs))
        return 1
    except Exception as error:
        # It returns if the error is shardkit's or jax's own, which is raised on.
        refuse_users_error("prove", f"the functions of {options.make}", error)
        raise
    print(result)
    verdicts: tuple[Any, ...] = (result,)
    if isinstance(result, Proof):
        verdicts = result.verdicts
    rows = [verdict._asdict() for verdict in verdicts]
    write_json(options.json, "prove", rows, differs=[])
    return 0


def _load_arguments(text: str) -> Any:
    """What the user's function returns."""
    from shardkit._arguments.checks import describe_error
    from shardkit.cli.target import load_function

    make = load_function(text)
    try:
        return make()
    except Exception as error:
        raise ValueError(
            f"prove: {text} must return the arguments of a proof; it raises {describe_error(error)}. Run it with "
            "python to see the traceback."
        ) from error


def _load_compiled_proof(text: str) -> Callable[[], Any]:
    """The proof of a compiled program; refuses what is no function with its arguments."""
    from shardkit.cli.target import TargetError
    from shardkit.testing.exact import assert_compiled_equal

    result = _load_arguments(text)
    options: dict[str, Any] = {}
    call = result
    if isinstance(result, dict) and result.keys() >= {"function", "args"}:
        options = dict(result)
        function = options.pop("function")
        call = (function, *options.pop("args"))
    is_call = isinstance(call, tuple) and len(call) > 0 and callable(call[0])
    if not is_call or not options.keys() <= {"reference", "points"}:
        raise TargetError(
            f"prove: with --compiled {text} must return (function, *args), or a dict of function, args, reference and "
            f"points; got {type(result).__name__}. Return for example (jax.jit(step), state, batch)."
        )
    function, *args = call
    try:
        # Before anything is traced, so that a missing argument is a sentence about the user's function, and not an
        # error of jax.
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise TargetError(
            f"prove: {text} must return a function followed by its own arguments; {error}. Return for example "
            "(jax.jit(step), state, batch)."
        ) from None
    return partial(assert_compiled_equal, function, *args, **options)


def _load_proof(text: str) -> Callable[[], Any]:
    """The function of `sk.testing` that the user's dict is for, with the dict; refuses one that it does not take."""
    from shardkit import testing
    from shardkit.cli.target import TargetError

    arguments = _load_arguments(text)
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
    return partial(function, **arguments)

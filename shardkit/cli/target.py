"""The function that a command reads, as module:function, and the arguments to trace it with."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import describe_error

_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "pred": "bool", "c64": "complex64"}
for _bits in (8, 16, 32, 64):
    _DTYPES[f"i{_bits}"] = f"int{_bits}"
    _DTYPES[f"u{_bits}"] = f"uint{_bits}"


class TargetError(ValueError):
    """A function that a command cannot get at, as opposed to what the function itself raises."""


def load(text: str, args: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Imports the function of "module:function" or "path/to/file.py:function", and makes its arguments.

    With `args`, their types ("f32[8,128]", "bf16[4]", "i32[]", "key"), they are ShapeDtypeStructs. Without, the
    function is called: it must take no parameters and return `(fn, *args)`. All else is a TargetError.
    """
    function = load_function(text)
    if args:
        return function, tuple(_read_type(arg) for arg in args)
    parameters = _list_required_parameters(function)
    if parameters:
        raise TargetError(
            f"target: without --args the function must take no parameters and return (fn, *args); {text} takes "
            f"{', '.join(parameters)}. Pass --args with a type for each, such as 'f32[8,128]'."
        )
    result = function()
    if not isinstance(result, tuple) or not result or not callable(result[0]):
        raise TargetError(
            f"target: a function without parameters must return (fn, *args); {text} returned {type(result).__name__}. "
            "Return the function to trace, followed by its arguments."
        )
    traced_function, *arguments = result
    return traced_function, tuple(arguments)


def _list_required_parameters(function: Callable[..., Any]) -> list[str]:
    """The positional parameters without a default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in positional and parameter.default is parameter.empty:
            names.append(parameter.name)
    return names


def load_step(where: str, text: str, args: Sequence[str]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `load` returns, its arguments perhaps returned as one tuple; what the function raises is one sentence."""
    try:
        step, arguments = load(text, args)
    except TargetError:
        raise
    except Exception as error:
        # Python's own exit code would be that of a finding.
        raise ValueError(
            f"{where}: {text} must return a step and its arguments; it raises {describe_error(error)}. Run it with "
            "python to see the traceback."
        ) from error
    # Not isinstance: a NamedTuple, such as a TrainState, is one argument, and not the tuple of all.
    if len(arguments) == 1 and type(arguments[0]) is tuple:
        arguments = arguments[0]
    return step, arguments


def load_function(text: str) -> Callable[..., Any]:
    """Imports the function of "module:function" or "path/to/file.py:function"; refuses one that is not there."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise TargetError(
            f"target: the function must be given as MODULE:FUNCTION or FILE.py:FUNCTION; got {text!r}. "
            "Write for example train.py:step."
        )
    module = _import(where)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            names = _list_functions(module)
            example = "step"
            if names:
                example = names[0]
            raise TargetError(
                f"target: {where} has no {name!r}; its functions are {', '.join(names) or 'none'}. Write for example "
                f"{where}:{example}."
            )
        function = getattr(function, part)
    if not callable(function):
        raise TargetError(
            f"target: {text} must be callable; got {type(function).__name__}. Name a function or another callable."
        )
    return cast(Callable[..., Any], function)


def _list_functions(module: ModuleType) -> list[str]:
    """The functions that a module defines; not those that it imports."""
    names = []
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            names.append(name)
    return names


def _import(where: str) -> ModuleType:
    """Imports a module by its name, or a file by its path; refuses what is missing, or raises."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it; the console script has its own folder there
    try:
        if where.endswith(".py"):
            return _import_file(where)
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # With another name the module is there, and one that it imports is missing.
        package, _, _ = where.partition(".")
        if error.name in (where, package):
            raise TargetError(
                f"target: module {where!r} must be importable from here; it is not found. Check the name, or pass a "
                "path that ends in .py."
            ) from None
        raise _cannot_be_imported(where, error) from error
    except TargetError:
        raise
    except Exception as error:
        raise _cannot_be_imported(where, error) from error


def _import_file(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise TargetError(f"target: the file must exist; {where} does not. Check the path.")
    # As `python FILE.py` does, so that it can import the files beside it.
    sys.path.insert(0, str(path.resolve().parent))
    # A file may share its name with an installed module: json.py must not replace json.
    name = path.stem
    file_of_namesake = getattr(sys.modules.get(name), "__file__", None)
    if file_of_namesake not in (None, str(path), str(path.resolve())):
        name = f"{path.stem} ({path.resolve()})"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    # Before the file runs, because dataclasses look up the module of a class there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _cannot_be_imported(where: str, error: Exception) -> TargetError:
    return TargetError(
        f"target: {where} cannot be imported; it raises {describe_error(error)}. Run it with python to see the "
        "traceback."
    )


def _read_type(text: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype of "f32[8,128]", or a key of "key"."""
    if text == "key":
        return jax.eval_shape(lambda: jax.random.key(0))
    # A text of another form has the name "", which is no dtype and is refused with those.
    name = ""
    sizes = None
    match = re.fullmatch(r"(\w+)(?:\[(\s*|\s*\d+\s*(?:,\s*\d+\s*)*)\])?", text)
    if match:
        name, sizes = match.groups()
    try:
        dtype = jnp.dtype(_DTYPES.get(name, name))
    except TypeError:
        raise TargetError(
            f"target: each of --args must be DTYPE[SIZES] or key; got {text!r}. Write for example 'f32[8,128]'."
        ) from None
    shape: tuple[int, ...] = ()
    if sizes and sizes.strip():
        shape = tuple(int(size) for size in sizes.split(","))
    return jax.ShapeDtypeStruct(shape, dtype)

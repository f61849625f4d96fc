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
from typing import Annotated, Any, cast

import jax
import jax.numpy as jnp
import tyro

from shardkit._arguments.checks import raised

Target = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:FUNCTION|FILE.py:FUNCTION")]

_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "pred": "bool", "c64": "complex64"}
_DTYPES |= {
    f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32)
}


class TargetError(ValueError):
    """A function that a command cannot get at, as opposed to what the function itself raises."""


def load(text: str, args: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Imports the function of "module:function" or "path/to/file.py:function", and makes its arguments.

    With `args`, their types ("f32[8,128]", "bf16[4]", "i32[]", "key"), they are ShapeDtypeStructs. Without, the
    function is called: it must take no parameters and return `(fn, *args)`. All else is a TargetError.
    """
    fn = function_of(text)
    if args:
        return fn, tuple(map(_struct, args))
    needed = [p.name for p in inspect.signature(fn).parameters.values() if p.default is p.empty and p.kind < 2]
    if needed:
        raise TargetError(
            f"target: without --args the function must take no parameters and return (fn, *args); {text} takes "
            f"{', '.join(needed)}. Pass --args with a type for each, such as 'f32[8,128]'."
        )
    made = fn()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise TargetError(
            f"target: a function without parameters must return (fn, *args); {text} returned {type(made).__name__}. "
            "Return the function to trace, followed by its arguments."
        )
    return made[0], made[1:]


def step_at(where: str, text: str, args: Sequence[str]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `load` returns, its arguments perhaps returned as one tuple; what the function raises is one sentence."""
    try:
        step, given = load(text, args)
    except TargetError:
        raise
    except Exception as error:
        # Python's own exit code would be that of a finding.
        raise ValueError(
            f"{where}: {text} must return a step and its arguments; it raises {raised(error)}. Run it with python to "
            "see the traceback."
        ) from error
    return (step, given[0]) if len(given) == 1 and type(given[0]) is tuple else (step, given)


def function_of(text: str) -> Callable[..., Any]:
    """Imports the function of "module:function" or "path/to/file.py:function"; refuses one that is not there."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise TargetError(
            f"target: the function must be given as MODULE:FUNCTION or FILE.py:FUNCTION; got {text!r}. "
            "Write for example train.py:step."
        )
    module = _import(where)
    fn: Any = module
    for part in name.split("."):
        if not hasattr(fn, part):
            there = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
            raise TargetError(
                f"target: {where} has no {name!r}; its functions are {', '.join(there) or 'none'}. Write for example "
                f"{where}:{(there or ['step'])[0]}."
            )
        fn = getattr(fn, part)
    if not callable(fn):
        raise TargetError(
            f"target: {text} must be callable; got {type(fn).__name__}. Name a function or another callable."
        )
    return cast(Callable[..., Any], fn)


def _import(where: str) -> ModuleType:
    path = Path(where)
    sys.path[:0] = [str(Path.cwd())]
    try:
        if path.suffix != ".py":
            return importlib.import_module(where)
        if not path.is_file():
            raise TargetError(f"target: the file must exist; {where} does not. Check the path.")
        sys.path[:0] = [str(path.resolve().parent)]
        there = getattr(sys.modules.get(path.stem), "__file__", None)
        # A file may share its name with an installed module: json.py must not replace json.
        name = path.stem if there in (None, str(path), str(path.resolve())) else f"{path.stem} ({path.resolve()})"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, f"{where} is a Python file"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name == where.split(".")[0] or error.name == where:
            raise TargetError(
                f"target: module {where!r} must be importable from here; it is not found. Check the name, or pass a "
                "path that ends in .py."
            ) from None
        raise _broken(where, error) from error
    except TargetError:
        raise
    except Exception as error:
        raise _broken(where, error) from error


def _broken(where: str, error: Exception) -> TargetError:
    return TargetError(
        f"target: {where} cannot be imported; it raises {raised(error)}. Run it with python to see the traceback."
    )


def _struct(text: str) -> jax.ShapeDtypeStruct:
    if text == "key":
        return jax.eval_shape(lambda: jax.random.key(0))
    found = re.fullmatch(r"(\w+)(?:\[([\d, ]*)\])?", text)
    name = found and _DTYPES.get(found[1], found[1])
    try:
        dtype = jnp.dtype(name or "")
    except TypeError:
        raise TargetError(
            f"target: each of --args must be DTYPE[SIZES] or key; got {text!r}. Write for example 'f32[8,128]'."
        ) from None
    sizes = (found[2] or "") if found else ""
    return jax.ShapeDtypeStruct(tuple(int(size) for size in sizes.split(",") if size.strip()), dtype)

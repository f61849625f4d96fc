"""Checks of arguments against the annotations of a signature, with errors of one sentence.

A `Kind` is what annotations describe: how it is tested and named in errors, and what to pass instead.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Integral, Number, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardkit._arguments.checks import either, quoted

F = TypeVar("F", bound=Callable[..., Any])
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
_EXAMPLES = {bool: "True", int: "1", float: "1.0", str: "'...'"}
_HUGE = 2**63


class Kind(NamedTuple):
    """A kind of argument."""

    words: str  # the kind in errors, after "must be"
    test: Callable[[Any], bool]  # whether a value is of this kind
    remedy: str  # what to pass instead
    told: Callable[[Any], str] = repr  # how an error shows a wrong value


def is_array(x: Any) -> bool:
    """Whether a value has a shape and a dtype of numbers; a Python number has not."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape") or getattr(dtype, "kind", "") in {"O", "U", "S", "M", "m"}:
        return False
    return getattr(dtype, "type", None) is not np.void  # bytes, or a record of fields


def is_whole(x: Any) -> bool:
    """Whether a value is a whole number; True is not."""
    return isinstance(x, Integral) and not isinstance(x, bool | np.bool_)


def _is_small(x: Any) -> bool:
    return is_whole(x) and abs(int(x)) < 2**63


def _is_key(x: Any) -> bool:
    old = is_array(x) and x.dtype == jnp.uint32 and tuple(x.shape[-1:]) in {(2,), (4,)}
    return old or (is_array(x) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key)))


def _wrong_leaf(tree: Any) -> tuple[str, Any] | None:
    """The path and value of the first leaf that is neither an array nor a number; None if there is none."""
    if tree is None:
        return "", tree
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not (is_array(leaf) or isinstance(leaf, Number)):
            return jax.tree_util.keystr(tuple(path), simple=True, separator="."), leaf
    return None


def _leaf_told(tree: Any) -> str:
    path, leaf = _wrong_leaf(tree) or ("", tree)
    return short(leaf) + (f" for leaf {path}" if path else "")


def _is_dtype(x: Any) -> bool:
    if x is None or isinstance(x, Number):
        return False
    try:
        return np.dtype(x).kind not in {"O", "U", "S", "M", "m"} and np.dtype(x).type is not np.void
    except (TypeError, ValueError):
        return False


def _items(x: Any, test: Callable[[Any], bool]) -> bool:
    listed = isinstance(x, Sequence) and not isinstance(x, str | bytes)
    return (listed or isinstance(x, np.ndarray)) and all(map(test, x))


def _is_axis(x: Any) -> bool:
    names = (x,) if isinstance(x, str) else tuple(x) if isinstance(x, Iterable) else ()
    return bool(names) and all(isinstance(name, str) and name for name in names)


def _is_spec(x: Any) -> bool:
    if not isinstance(x, PartitionSpec):
        return False
    entries = [e if isinstance(e, tuple) else (e,) for e in x if e is not None]
    return all(isinstance(name, str) for entry in entries for name in entry)


def _are_specs(x: Any) -> bool:
    if x is None:
        return False
    return all(map(_is_spec, jax.tree.leaves(x, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))))


def short(value: Any) -> str:
    """A value as an error shows it."""
    if inspect.isroutine(value):
        return f"the function {value.__name__!r}"
    if isinstance(value, jax.Array):
        return value.aval.str_short()
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"


FRACTION = Kind("a Fraction", lambda x: isinstance(x, Fraction), "Pass for example Fraction(1, 2)")
ARRAY = Kind(
    "an array", lambda x: is_array(x) and not isinstance(x, jax.ShapeDtypeStruct), "Pass an array of jax or NumPy"
)
ARRAYS = Kind(
    "an array or a pytree of arrays", lambda x: _wrong_leaf(x) is None, "Pass arrays of jax or NumPy", _leaf_told
)
KEY = Kind("a jax key", _is_key, "Pass for example jax.random.key(0)")
DTYPE = Kind("a dtype of numbers", _is_dtype, "Pass for example jnp.float32")
OPTIMIZER = Kind(
    "an optax GradientTransformation",
    lambda x: all(callable(getattr(x, name, None)) for name in ("init", "update")),
    "Pass for example optax.adamw(3e-4)",
)
AXIS = Kind("a mesh axis name or a tuple of names", _is_axis, "Pass for example axis='data' or axis=('data', 'model')")
_NO_AXIS = {type(None): None, tuple[()]: Kind("()", lambda x: isinstance(x, tuple) and not x, "Pass ()")}
FUNCTION = Kind("a function", callable, "Pass the function itself")
WHOLES = Kind("a sequence of whole numbers below 2**63", lambda x: _items(x, _is_small), "Pass for example (8, 4)")
NAMES = Kind("a tuple of names", lambda x: _items(x, lambda name: isinstance(name, str)), "Pass for example ('w',)")
DEVICES = Kind(
    "a sequence of jax devices",
    lambda x: _items(x, lambda device: hasattr(device, "id")),
    "Write make_mesh(data=8), or pass for example devices=jax.devices()[:8]",
)
SEQUENCE = Kind("a sequence", lambda x: _items(x, lambda _: True), "Pass a list or a tuple")
COLLECTION = Kind("a collection", lambda x: isinstance(x, Collection) and not isinstance(x, str | bytes), "Pass a list")
ITERABLE = Kind("an iterable", lambda x: isinstance(x, Iterable) and not isinstance(x, str | bytes), "Pass a list")
MAPPING = Kind("a mapping", lambda x: isinstance(x, Mapping), "Pass a dict")
SIZES = Kind(
    "a mapping of names to sizes of at least 1",
    lambda x: (
        isinstance(x, Mapping) and all(isinstance(k, str) and is_whole(v) and 0 < v < 2**31 for k, v in x.items())
    ),
    "Pass for example {'data': 8}",
)
PATH = Kind("a path", lambda x: isinstance(x, str | os.PathLike) and str(x) != "", "Pass a string or a pathlib.Path")
_MESH = Kind("a mesh", lambda x: isinstance(x, Mesh | AbstractMesh), "Pass for example sk.make_mesh(data=8)")
_MESH_OR_NONE = _MESH._replace(test=lambda x: x is None or _MESH.test(x))  # what to pass is a mesh
_REMEDIES = {
    "GradFn": "Pass sk.value_and_grad(loss_fn)",
    "Plan": "Pass for example sk.dp('data'), or sk.chain(...) of several",
    "Precision": "Pass for example sk.Precision(compute=jnp.bfloat16)",
    "Algorithm": "Pass for example sk.algorithms.ring()",
    "Capacity": "Pass for example sk.layers.Capacity(1.25), or sk.layers.Dropless()",
    "Schedule": "Pass for example sk.schedules.gpipe(devices=2, microbatches=4)",
}
PLAN = Kind("a Plan", lambda x: hasattr(x, "describe"), _REMEDIES["Plan"])

SPEC = Kind("a PartitionSpec of axis names", _is_spec, "Pass for example jax.sharding.PartitionSpec('data')")
SPECS = Kind("a PartitionSpec or a pytree of them", _are_specs, "Pass for example jax.sharding.PartitionSpec('data')")

# Annotations of arguments whose Python type does not determine their kind.
Arrays = Annotated[Any, ARRAYS]
Key = Annotated[jax.Array, KEY]
DType = Annotated[Any, DTYPE]
Devices = Annotated[Sequence[Any], DEVICES]  # jax.Device is unknown to pyright
Specs = Annotated[Any, SPECS]
Optimizer = Annotated[Any, OPTIMIZER]
SCALARS = (bool, int, float, str)


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """What an annotation allows: types of `SCALARS`, None, choices and Kinds; () if part of it cannot be checked."""
    if hint in SCALARS:
        return (hint,)
    if hint is type(None):
        return (None,)
    if hint is jax.Array:
        return (ARRAY,)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return tuple(each for each in args[1:] if isinstance(each, Kind))
    if origin is Literal:
        return args
    if origin in (Union, types.UnionType):
        if Mesh in args:
            return (_MESH_OR_NONE if type(None) in args else _MESH,)
        named = {str, tuple[str, ...]}
        if named <= set(args):  # an Axis, or another union with names, which the function checks
            rest = set(args) - named
            if not rest <= _NO_AXIS.keys():
                return ()
            return (AXIS, *(_NO_AXIS[each] for each in args if each in rest))
        found = [kinds_of(each) for each in args]
        return tuple(kind for each in found for kind in each) if all(found) else ()
    return _of_class(hint, origin, args)


def _of_class(hint: Any, origin: Any, args: tuple[Any, ...]) -> tuple[Kind, ...]:
    if hint is Fraction:
        return (FRACTION,)
    if origin is Callable or getattr(hint, "_is_protocol", False):
        remedy = _REMEDIES.get(getattr(hint, "__name__", ""))
        return (FUNCTION._replace(words=f"a {hint.__name__}", remedy=remedy) if remedy else FUNCTION,)
    if origin is Mapping:
        return (SIZES if args == (str, int) else MAPPING,)
    if origin is Collection:
        return (COLLECTION,)
    if origin is Sequence or (origin is tuple and args[1:] == (...,)):
        return ({int: WHOLES, str: NAMES}.get(args[0], SEQUENCE),)
    if origin is Iterable:
        return (ITERABLE,)
    if hint is os.PathLike or origin is os.PathLike or (isinstance(hint, type) and issubclass(hint, os.PathLike)):
        return (PATH,)
    if hint is Mesh:
        return (_MESH,)
    if hint is PartitionSpec:
        return (SPEC,)
    if isinstance(hint, type) and hint.__module__.startswith("shardkit."):
        words = f"{'an' if hint.__name__[0] in 'AEIO' else 'a'} {hint.__name__}"
        remedy = _REMEDIES.get(hint.__name__, f"Pass a {hint.__module__}.{hint.__name__}")
        return (Kind(words, lambda x: isinstance(x, hint), remedy),)
    return ()


def typed(fn: F, where: str = "", only: type | None = None) -> F:
    """Refuses arguments that do not match their annotations, before the function is called.

    Checks bool, int, float, str, Literal and None (a string is truthy, nan passes every comparison and True equals 1,
    so that Python would accept them silently), the kinds above (arrays, axes, meshes, plans, keys, functions,
    paths, sequences), and unions of them; any other annotation is not checked. Whole numbers must be below 2**63, which
    jax can represent; other ranges are checked by the function. `where` is the function's name in errors; `only`
    restricts the check to one kind.

    Raises:
        TypeError: from the call: "function: argument must be a whole number; got 1.5. Pass for example argument=1."
        ValueError: likewise, for nan, and for a string that is none of the choices.
    """
    signature = inspect.signature(fn)
    name = where or (fn.__qualname__.split(".")[-2] if fn.__name__ == "__init__" else fn.__name__)

    @functools.cache
    def kinds() -> Mapping[str, tuple[Any, ...]]:
        hints = get_type_hints(fn, include_extras=True)
        found = {each: kinds_of(hints.get(each, Any)) for each in signature.parameters}
        return {each: kinds for each, kinds in found.items() if kinds and only in (None, *kinds)}

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest then shows the user's line
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # raised by Python
            return fn(*args, **kwargs)
        for each, allowed in kinds().items():
            several = signature.parameters[each].kind
            if several is inspect.Parameter.VAR_KEYWORD:
                for key, value in given.get(each, {}).items():
                    check_kind(name, key, value, allowed)
            elif several is inspect.Parameter.VAR_POSITIONAL:
                for value in given.get(each, ()):
                    check_kind(name, each, value, allowed)
            elif each in given:
                check_kind(name, each, given[each], allowed)
        return fn(*args, **kwargs)

    return checked  # type: ignore[return-value]


def check_fields(options: Any) -> None:
    """Refuses fields of a dataclass, or of a NamedTuple, that do not match their annotations."""
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        if allowed := kinds_of(hint):
            check_kind(type(options).__name__, name, getattr(options, name), allowed)


def check_keys(where: str, name: str, tree: Any) -> None:
    """Refuses a tree with a dict that jax cannot flatten, because it puts leaves in the order of their keys."""
    try:
        sorted(tree if type(tree) in (dict, defaultdict) else ())
    except TypeError:
        raise TypeError(
            f"{where}: the keys of each dict in {name} must be of one type, in whose order jax puts the leaves; got "
            f"{quoted(tree)}. Make all of them strings."
        ) from None
    for each in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ():
        check_keys(where, name, each)


def check_kind(where: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuses a value that is of none of these kinds: types of `_WORDS`, Kinds, None, or choices."""
    if ARRAYS in allowed:
        check_keys(where, name, value)
    if any(_is(value, kind) for kind in allowed):
        if is_whole(value) and abs(int(value)) >= _HUGE:
            raise ValueError(f"{where}: {name} must be a whole number below 2**63; got {value}. Lower it.")
        return
    kinds = [kind for kind in allowed if isinstance(kind, Kind)]
    choices = [kind for kind in allowed if not isinstance(kind, type | Kind) and kind is not None]
    words = [_WORDS[kind] for kind in allowed if isinstance(kind, type)] + [repr(choice) for choice in choices]
    words += [kind.words for kind in kinds] + ["None"] * (None in allowed)
    rule = either(list(dict.fromkeys(words)))
    of_its_kind = (choices and isinstance(value, str)) or (isinstance(value, float) and math.isnan(value))
    error = ValueError if of_its_kind else TypeError
    remedy = kinds[0].remedy if kinds else f"Pass for example {name}={_EXAMPLES.get(allowed[0], '...')}"
    if choices:
        remedy = f"Pass for example {name}={choices[0]!r}"
    if NAMES in kinds and isinstance(value, str):
        remedy = f"Write {name}=({value!r},)"
    told = kinds[0].told(value) if kinds and kinds[0].told is not repr else ""
    raise error(f"{where}: {name} must be {rule}; got {told if 0 < len(told) <= 120 else short(value)}. {remedy}.")


def _holds_float(value: Any) -> bool:
    """Whether a real number is one as a float too."""
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def _is(value: Any, kind: Any) -> bool:
    if isinstance(kind, Kind):
        return kind.test(value)
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is int:
        return is_whole(value)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and _holds_float(value)
    if kind is str:
        return isinstance(value, str)
    return value is None if kind is None else type(value) is type(kind) and bool(value == kind)

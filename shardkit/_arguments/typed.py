"""Checks arguments by their annotations, before a function is called: `typed`.

A `Kind` is a group of values that a parameter may have, with the words for it in an error. `kinds_of` reads an
annotation as the kinds that it allows, `check_kind` refuses a value of any other.

Tried beside beartype with the shapes of jaxtyping, on 2026-11-28: those add three frames to a call and this one, a leaf
costs 1 ms and here 10 us, True passes for an int, and only one item of a tuple is looked at. Their message has eight
lines and no remedy.
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

from shardkit._arguments.checks import join_alternatives, quote

F = TypeVar("F", bound=Callable[..., Any])
_TOO_LARGE = 2**63  # for the integers of jax
_NOT_NUMERIC = {"O", "U", "S", "M", "m"}  # kinds of NumPy dtypes: objects, strings, bytes, dates


class Kind(NamedTuple):
    """A group of values that a parameter may have."""

    words: str  # in errors, after "must be"
    test: Callable[[Any], bool]  # whether a value is of this kind
    remedy: str  # what to pass instead
    show: Callable[[Any], str] | None = None  # how an error shows a wrong value; None: as `short` does


# The checks. A traceback has one frame of ours above the function: `call_checked`.


def typed(fn: F, where: str = "", only: type | None = None) -> F:
    """Refuses arguments that do not match their annotations, before the function is called.

    Checks bool, int, float, str, Literal and None (a string is truthy, nan passes every comparison and True equals 1,
    so that Python would accept them silently), the kinds below (arrays, axes, meshes, plans, keys, functions,
    paths, sequences), and unions of them; any other annotation is not checked. Whole numbers must be below 2**63, which
    jax can represent; other ranges are checked by the function. `where` is the function's name in errors; `only`
    restricts the check to one kind.

    Raises:
        TypeError: from the call: "function: argument must be a whole number; got 1.5. Pass for example argument=1."
        ValueError: likewise, for nan, and for a string that is none of the choices.
    """
    signature = inspect.signature(fn)
    name = where or _name_of(fn)

    @functools.cache
    def read_kinds() -> Mapping[str, tuple[Any, ...]]:  # at the first call: annotations may name what comes later
        hints = get_type_hints(fn, include_extras=True)
        kinds = {}
        for parameter in signature.parameters:
            allowed = kinds_of(hints.get(parameter, Any))
            if allowed and (only is None or only in allowed):
                kinds[parameter] = allowed
        return kinds

    @functools.wraps(fn)
    def call_checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest then shows the user's line
        _check_arguments(name, signature, read_kinds(), args, kwargs)
        return fn(*args, **kwargs)

    return call_checked  # type: ignore[return-value]


def _name_of(fn: Callable[..., Any]) -> str:
    """The name in errors: of a class for its `__init__`."""
    if fn.__name__ == "__init__":
        return fn.__qualname__.split(".")[-2]
    return fn.__name__


def _check_arguments(
    where: str,
    signature: inspect.Signature,
    kinds: Mapping[str, tuple[Any, ...]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call that follows raises it, in Python's words
        return
    for name, value in arguments.items():
        allowed = kinds.get(name)
        if allowed is None:
            continue
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            for item in value:
                check_kind(where, name, item, allowed)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for keyword, item in value.items():
                check_kind(where, keyword, item, allowed)
        else:
            check_kind(where, name, value, allowed)


def check_fields(options: Any) -> None:
    """Refuses fields of a dataclass, or of a NamedTuple, that do not match their annotations."""
    hints = get_type_hints(type(options), include_extras=True)
    for name, hint in hints.items():
        allowed = kinds_of(hint)
        if allowed:
            check_kind(type(options).__name__, name, getattr(options, name), allowed)


def check_keys(where: str, name: str, tree: Any) -> None:
    """Refuses a tree with a dict that jax cannot flatten, because it puts leaves in the order of their keys."""
    if type(tree) in (dict, defaultdict):
        try:
            sorted(tree)
        except TypeError:
            raise TypeError(
                f"{where}: the keys of each dict in {name} must be of one type, because jax sorts the leaves by them; "
                f"got {quote(tree)}. Make all of them strings."
            ) from None
    if isinstance(tree, Mapping):
        children: Iterable[Any] = tree.values()
    elif isinstance(tree, list | tuple):
        children = tree
    else:
        return
    for child in children:
        check_keys(where, name, child)


def check_kind(where: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuses a value of none of these kinds: types of `SCALARS`, Kinds, None, or choices."""
    if ARRAYS in allowed:
        check_keys(where, name, value)
    if not any(_is_of_kind(value, kind) for kind in allowed):
        raise _make_error(where, name, value, allowed)
    if is_whole(value) and abs(int(value)) >= _TOO_LARGE:
        raise ValueError(f"{where}: {name} must be a whole number below 2**63; got {value}. Lower it.")


def _is_of_kind(value: Any, kind: Any) -> bool:
    if kind is None:
        return value is None
    if isinstance(kind, Kind):
        return kind.test(value)
    if kind in SCALARS:
        return _SCALAR_KINDS[kind].test(value)
    return type(value) is type(kind) and bool(value == kind)  # a choice


def _make_error(where: str, name: str, value: Any, allowed: tuple[Any, ...]) -> Exception:
    """The error for a value of another kind: `all_reduce: dim must be a whole number; got 1.5. Pass ... dim=1.`"""
    scalars: list[Any] = []
    kinds: list[Kind] = []
    choices: list[Any] = []
    for kind in allowed:
        if isinstance(kind, Kind):
            kinds.append(kind)
        elif kind in SCALARS:
            scalars.append(kind)
        elif kind is not None:
            choices.append(kind)
    words = [_SCALAR_KINDS[kind].words for kind in scalars]
    words += [repr(choice) for choice in choices]
    words += [kind.words for kind in kinds]
    if None in allowed:
        words.append("None")
    rule = join_alternatives(list(dict.fromkeys(words)))
    remedy = _choose_remedy(name, value, scalars, kinds, choices)
    text = f"{where}: {name} must be {rule}; got {_show_value(value, kinds)}. {remedy}."
    is_other_choice = bool(choices) and isinstance(value, str)
    is_nan = isinstance(value, float) and math.isnan(value)
    if is_other_choice or is_nan:  # the right type, and a wrong value of it
        return ValueError(text)
    return TypeError(text)


def _choose_remedy(name: str, value: Any, scalars: Sequence[Any], kinds: Sequence[Kind], choices: Sequence[Any]) -> str:
    if NAMES in kinds and isinstance(value, str):
        return f"Write {name}=({value!r},)"
    if choices:
        return f"Pass for example {name}={choices[0]!r}"
    if kinds:
        return kinds[0].remedy
    example = "..."
    if scalars:
        example = _SCALAR_KINDS[scalars[0]].remedy
    return f"Pass for example {name}={example}"


def _show_value(value: Any, kinds: Sequence[Kind]) -> str:
    if kinds and kinds[0].show is not None:
        text = kinds[0].show(value)
        if 0 < len(text) <= 120:
            return text
    return short(value)


def short(value: Any) -> str:
    """A value as an error shows it."""
    if inspect.isroutine(value):
        return f"the function {value.__name__!r}"
    if isinstance(value, jax.Array):
        return value.aval.str_short()
    text = repr(value)
    if len(text) > 80:
        return f"a {type(value).__name__}"
    return text


# The tests of values.


def is_array(x: Any) -> bool:
    """Whether a value has a shape and a dtype of numbers; a Python number has not."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape"):
        return False
    if getattr(dtype, "kind", "") in _NOT_NUMERIC:
        return False
    return getattr(dtype, "type", None) is not np.void  # bytes, or a record of fields


def is_whole(x: Any) -> bool:
    """Whether a value is a whole number; True is not."""
    return isinstance(x, Integral) and not isinstance(x, bool | np.bool_)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_float(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and _is_not_nan(value)


def _is_not_nan(value: Any) -> bool:
    """Whether a real number is one as a float too: no nan, and not beyond the largest."""
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def _is_small(x: Any) -> bool:
    return is_whole(x) and abs(int(x)) < _TOO_LARGE


def _is_key(x: Any) -> bool:
    if not is_array(x):
        return False
    is_raw_key = x.dtype == jnp.uint32 and tuple(x.shape[-1:]) in {(2,), (4,)}
    return is_raw_key or bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _find_wrong_leaf(tree: Any) -> tuple[str, Any] | None:
    """The path and value of the first leaf that is neither an array nor a number; None if there is none."""
    if tree is None:
        return "", tree
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_array(leaf) and not isinstance(leaf, Number):
            return jax.tree_util.keystr(tuple(path), simple=True, separator="."), leaf
    return None


def _show_wrong_leaf(tree: Any) -> str:
    path, leaf = _find_wrong_leaf(tree) or ("", tree)
    if path:
        return f"{short(leaf)} for leaf {path}"
    return short(leaf)


def _is_dtype(x: Any) -> bool:
    if x is None or isinstance(x, Number):
        return False
    try:
        dtype = np.dtype(x)
    except (TypeError, ValueError):
        return False
    return dtype.kind not in _NOT_NUMERIC and dtype.type is not np.void


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Sequence | np.ndarray) and not isinstance(x, str | bytes)


def _are_wholes(x: Any) -> bool:
    return _is_sequence(x) and all(_is_small(item) for item in x)


def _are_names(x: Any) -> bool:
    return _is_sequence(x) and all(_is_text(item) for item in x)


def _are_devices(x: Any) -> bool:
    return _is_sequence(x) and all(hasattr(item, "id") for item in x)


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_axis(x: Any) -> bool:
    if isinstance(x, str):
        return bool(x)
    if not isinstance(x, Iterable):
        return False
    names = tuple(x)
    return bool(names) and all(isinstance(name, str) and name for name in names)


def _is_spec(x: Any) -> bool:
    # Axes that are `unreduced` or `reduced` say of an array of jit what a shard_map's collectives are to do.
    if not isinstance(x, PartitionSpec) or x.unreduced or x.reduced:
        return False
    for entry in x.partitions:
        if entry is None:
            continue
        names = entry if isinstance(entry, tuple) else (entry,)
        if not all(isinstance(name, str) for name in names):
            return False
    return True


def _are_specs(x: Any) -> bool:
    if x is None:
        return False
    leaves = jax.tree.leaves(x, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    return all(map(_is_spec, leaves))


def _is_optimizer(x: Any) -> bool:
    return callable(getattr(x, "init", None)) and callable(getattr(x, "update", None))


def _are_sizes(x: Any) -> bool:
    if not isinstance(x, Mapping):
        return False
    return all(isinstance(name, str) and is_whole(size) and 0 < size < 2**31 for name, size in x.items())


def _is_path(x: Any) -> bool:
    return isinstance(x, str | os.PathLike) and str(x) != ""


# The kinds of scalars: their remedy is the example of `Pass for example argument=1`.
SCALARS = (bool, int, float, str)
_SCALAR_KINDS = {
    bool: Kind("True or False", _is_bool, "True"),
    int: Kind("a whole number", is_whole, "1"),
    float: Kind("a number", _is_float, "1.0"),
    str: Kind("a string", _is_text, "'...'"),
}

# The other kinds.
FRACTION = Kind("a Fraction", lambda x: isinstance(x, Fraction), "Pass for example Fraction(1, 2)")
ARRAY = Kind(
    "an array",
    lambda x: is_array(x) and not isinstance(x, jax.ShapeDtypeStruct),
    "Pass an array of jax or NumPy",
)
ARRAYS = Kind(
    "an array or a pytree of arrays",
    lambda x: _find_wrong_leaf(x) is None,
    "Pass arrays of jax or NumPy",
    _show_wrong_leaf,
)
KEY = Kind("a jax key", _is_key, "Pass for example jax.random.key(0)")
DTYPE = Kind("a dtype of numbers", _is_dtype, "Pass for example jnp.float32")
OPTIMIZER = Kind("an optax GradientTransformation", _is_optimizer, "Pass for example optax.adamw(3e-4)")
AXIS = Kind("a mesh axis name or a tuple of names", _is_axis, "Pass for example axis='data' or axis=('data', 'model')")
NO_AXES = Kind("()", lambda x: isinstance(x, tuple) and not x, "Pass ()")
FUNCTION = Kind("a function", callable, "Pass the function itself")
WHOLES = Kind(
    "a sequence of whole numbers below 2**63",
    _are_wholes,
    "Pass for example (8, 4)",
)
NAMES = Kind("a tuple of names", _are_names, "Pass for example ('w',)")
DEVICES = Kind(
    "a sequence of jax devices",
    _are_devices,
    "Write make_mesh(data=8), or pass for example devices=jax.devices()[:8]",
)
SEQUENCE = Kind("a sequence", _is_sequence, "Pass a list or a tuple")
COLLECTION = Kind("a collection", lambda x: isinstance(x, Collection) and not isinstance(x, str | bytes), "Pass a list")
ITERABLE = Kind("an iterable", lambda x: isinstance(x, Iterable) and not isinstance(x, str | bytes), "Pass a list")
MAPPING = Kind("a mapping", lambda x: isinstance(x, Mapping), "Pass a dict")
SIZES = Kind("a mapping of names to sizes of at least 1", _are_sizes, "Pass for example {'data': 8}")
PATH = Kind("a path", _is_path, "Pass a string or a pathlib.Path")
SPEC = Kind("a PartitionSpec of axis names", _is_spec, "Pass for example jax.sharding.PartitionSpec('data')")
SPECS = Kind("a PartitionSpec or a pytree of them", _are_specs, "Pass for example jax.sharding.PartitionSpec('data')")
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

# Annotations of arguments whose Python type does not determine their kind.
Arrays = Annotated[Any, ARRAYS]
Key = Annotated[jax.Array, KEY]
DType = Annotated[Any, DTYPE]
Devices = Annotated[Sequence[Any], DEVICES]  # jax.Device is unknown to pyright
Specs = Annotated[Any, SPECS]
Optimizer = Annotated[Any, OPTIMIZER]


# From an annotation to kinds. `int | None` is (int, None), `Literal["sum", "mean"]` is ("sum", "mean"), `Arrays | None`
# is (ARRAYS, None). `int | re.Pattern` is (): a union is not checked if a part of it cannot be.


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """What an annotation allows: types of `SCALARS`, None, choices and Kinds; () if part of it cannot be checked."""
    if hint in SCALARS:
        return (hint,)
    if hint is type(None):
        return (None,)
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        return tuple(kind for kind in args[1:] if isinstance(kind, Kind))
    if origin is Literal:
        return args
    if origin in (Union, types.UnionType):
        return _kinds_of_union(args)
    kind = _kind_of_generic(origin, args) or _kind_of_class(hint, origin)
    if kind is None:
        return ()
    return (kind,)


def _kinds_of_union(members: tuple[Any, ...]) -> tuple[Any, ...]:
    if Mesh in members:
        may_be_none = type(None) in members
        return (_MESH_OR_NONE,) if may_be_none else (_MESH,)
    if str in members and tuple[str, ...] in members:
        alternatives = [member for member in members if member not in (str, tuple[str, ...])]
        return _kinds_of_axis(alternatives)
    kinds: list[Any] = []
    for member in members:
        member_kinds = kinds_of(member)
        if not member_kinds:
            return ()
        kinds += member_kinds
    return tuple(kinds)


def _kinds_of_axis(alternatives: Sequence[Any]) -> tuple[Any, ...]:
    """An Axis, also one that may be None or (); any other union with names is checked by the function."""
    kinds: list[Any] = [AXIS]
    for alternative in alternatives:
        if alternative is type(None):
            kinds.append(None)
        elif alternative == tuple[()]:
            kinds.append(NO_AXES)
        else:
            return ()
    return tuple(kinds)


def _kind_of_generic(origin: Any, args: tuple[Any, ...]) -> Kind | None:
    """The kind of `Sequence[int]`, `Mapping[str, int]` and the like."""
    if origin is Mapping:
        return SIZES if args == (str, int) else MAPPING
    is_open_tuple = origin is tuple and args[1:] == (...,)
    if origin is Sequence or is_open_tuple:
        return {int: WHOLES, str: NAMES}.get(args[0], SEQUENCE)
    return {Collection: COLLECTION, Iterable: ITERABLE}.get(origin)


def _kind_of_class(hint: Any, origin: Any) -> Kind | None:
    """The kind of a class, of a protocol or of a function."""
    if origin is Callable or getattr(hint, "_is_protocol", False):
        name = getattr(hint, "__name__", "")
        if name in _REMEDIES:
            return FUNCTION._replace(words=f"a {name}", remedy=_REMEDIES[name])
        return FUNCTION
    if origin is os.PathLike:
        return PATH
    if not isinstance(hint, type):
        return None
    if issubclass(hint, os.PathLike):
        return PATH
    if hint.__module__.startswith("shardkit."):
        name = hint.__name__
        article = "an" if name[0] in "AEIO" else "a"
        remedy = _REMEDIES.get(name, f"Pass a {hint.__module__}.{name}")
        return Kind(f"{article} {name}", lambda x: isinstance(x, hint), remedy)
    return {jax.Array: ARRAY, Fraction: FRACTION, Mesh: _MESH, PartitionSpec: SPEC}.get(hint)

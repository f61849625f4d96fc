"""Trace-time checks and the wording of errors: one sentence with the rule, the values and the remedy."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Axis = str | tuple[str, ...]


def quote(names: Iterable[object]) -> str:
    """`'data', 'model'`, or `none`."""
    return ", ".join(repr(name) for name in names) or "none"


def name_axes(axes: Sequence[str]) -> str:
    """`axis 'data'` or `axes 'data', 'model'`."""
    noun = "axis" if len(axes) == 1 else "axes"
    return f"{noun} {quote(axes)}"


def format_sizes(sizes: Iterable[tuple[str, int]]) -> str:
    """`data=2, model=4`."""
    return ", ".join(f"{name}={size}" for name, size in sizes) or "none"


def format_count(n: int, thing: str, plural: str = "s") -> str:
    """`1 device`, `2 devices`."""
    if n == 1:
        return f"{n} {thing}"
    return f"{n} {thing}{plural}"


def join_alternatives(words: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *others, last = words
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


def describe_error(error: BaseException) -> str:
    """`TypeError: no array`: an exception's type and the first line of its text, without the dot."""
    name = type(error).__name__
    for line in str(error).splitlines():
        text = line.strip()
        if text:
            return f"{name}: {text.rstrip('.')}"
    return name


def one_of(where: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Refuses what is none of the choices; the error names one to pass."""
    if value not in choices or isinstance(value, bool):  # True would be 1
        rule = join_alternatives([repr(choice) for choice in choices])
        raise ValueError(f"{where}: {name} must be {rule}; got {value!r}. Pass for example {name}={choices[0]!r}.")


def axis_names(where: str, axis: Axis) -> tuple[str, ...]:
    """The axis names as a tuple; refuses other types, an empty tuple and duplicate axes."""
    names: tuple[str, ...] = ()
    if isinstance(axis, str):
        names = (axis,)
    elif isinstance(axis, Iterable):
        names = tuple(axis)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"{where}: axis must be a mesh axis name or a tuple of names; got {axis!r}. "
            "Pass for example axis='data' or axis=('data', 'model')."
        )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: axis {name!r} is used twice in {names!r}. Name each axis once.")
    return names


def at_least(where: str, least: float, **values: float | Fraction | None) -> None:
    """Refuses numbers below `least`; None passes."""
    for name, value in values.items():
        if value is not None and not least <= value:
            raise ValueError(f"{where}: {name} must be at least {least}; got {value}. Pass {name}={least} or more.")


def finite(where: str, **values: float | None) -> None:
    """Refuses infinity."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{where}: {name} must be finite; got {value}. Pass for example {name}=1.")


def shapes(where: str, **arrays: tuple[Any, str]) -> None:
    """Refuses arrays of mismatched shapes, given with their dims as letters: `x=(x, "..D"), gain=(gain, "D")`.

    Each letter has one size, set by the first array with it; ".." means any dims. An array that is None passes. In the
    example an x of shape [2, 8, 64] sets D=64, and a gain of shape [32] is refused.
    """
    sizes: dict[str, int] = {}
    for name, (x, dims) in arrays.items():
        if x is None:
            continue
        letters = dims.replace(".", "")
        shape = tuple(getattr(x, "shape", ()))
        # The dims with letters: of "D.." the first ones, of "..D" the last ones.
        first = 0
        if dims.startswith(".."):
            first = max(len(shape) - len(letters), 0)
        lettered = shape[first : first + len(letters)]
        fits = len(shape) == len(letters)
        if ".." in dims:
            fits = len(shape) >= len(letters)
        for letter, size in zip(letters, lettered, strict=False):
            if sizes.get(letter, size) != size:
                fits = False
        if not fits:
            rule = ", ".join(re.findall(r"\.\.|\w", dims))
            known_sizes = [(letter, sizes[letter]) for letter in letters if letter in sizes]
            suffix = f", {format_sizes(known_sizes)}" if known_sizes else ""
            raise ValueError(
                f"{where}: {name} must have the shape [{rule}]{suffix}; got {shape}. Pass an array of that shape."
            )
        sizes |= zip(letters, lettered, strict=True)


def dim_of(where: str, dim: int, ndim: int, name: str = "dim") -> int:
    """`dim` as a non-negative index into `ndim` dimensions."""
    if not -ndim <= dim < ndim:
        remedy = "an array of rank 1 or more"
        if ndim:
            remedy = f"0 to {ndim - 1}"
        raise ValueError(
            f"{where}: {name} must name a dimension of the array; got {dim} for an array of rank {ndim}. "
            f"Choose {remedy}."
        )
    return dim % ndim


def member(where: str, name: str, index: int, count: int) -> None:
    """Refuses an index outside an axis of `count` devices."""
    if not 0 <= index < count:
        raise ValueError(
            f"{where}: {name} must be a device of the axis; got {index} over {count} devices. Choose 0 to {count - 1}."
        )


def divides(where: str, dim: int, size: int, axes: Sequence[str], count: int) -> None:
    """Refuses a dim that is not divisible by the number of devices of `axes`."""
    if size % count:
        raise ValueError(
            f"{where}: dim {dim} must be divisible by {name_axes(axes)}; got size {size} over {count} devices. "
            f"Pad dim {dim} or choose another dim."
        )


def integers_from_one(where: str, **values: int) -> tuple[int, ...]:
    """The values as Python integers, which do not overflow as NumPy's do; refuses all but whole numbers from 1."""
    return _check_integers(where, 1, values)


def integers_from_zero(where: str, **values: int) -> tuple[int, ...]:
    """As `integers_from_one`, from 0."""
    return _check_integers(where, 0, values)


def _check_integers(where: str, least: int, values: dict[str, int]) -> tuple[int, ...]:
    numbers = []
    for name, value in values.items():
        number = _as_number(value)
        if not least <= number < math.inf or number != int(number):
            raise ValueError(
                f"{where}: {name} must be a whole number of at least {least}; got {value!r}. "
                f"Pass {name}={least} or more."
            )
        numbers.append(int(value))
    return tuple(numbers)


def positive(where: str, *, infinite: bool = False, **values: float) -> tuple[float, ...]:
    """The values as Python numbers; refuses all but finite (or `infinite`) numbers greater than 0."""
    numbers = []
    for name, value in values.items():
        number = _as_number(value)
        if number == math.inf and not infinite:
            raise _not_finite(where, name, value)
        if not number > 0:  # nor nan
            raise ValueError(f"{where}: {name} must be greater than 0; got {value!r}. Pass for example {name}=1.")
        numbers.append(number)
    return tuple(numbers)


def at_least_zero(where: str, **values: float) -> tuple[float, ...]:
    """The values as Python numbers; refuses all but finite numbers from 0."""
    numbers = []
    for name, value in values.items():
        number = _as_number(value)
        if number == math.inf:
            raise _not_finite(where, name, value)
        if not number >= 0:  # nor nan
            raise ValueError(f"{where}: {name} must be 0 or more; got {value!r}. Pass for example {name}=1.")
        numbers.append(number)
    return tuple(numbers)


def _not_finite(where: str, name: str, value: float) -> ValueError:
    return ValueError(f"{where}: {name} must be finite; got {value!r}. Pass for example {name}=1.")


def _as_number(value: object) -> float:
    """NumPy's scalars as Python's; nan, which every check refuses, for anything but a real number."""
    if isinstance(value, bool):
        return math.nan
    if isinstance(value, Integral):
        number = int(value)
        if number > sys.float_info.max:
            return math.inf
        if number < -sys.float_info.max:
            return -math.inf
        return number
    if isinstance(value, Rational):
        return value  # type: ignore[return-value]  # a Fraction stays exact
    if isinstance(value, Real):
        return float(value)
    return math.nan


def spelled(
    where: str, name: str, value: object, choices: Sequence[str], others: Mapping[str, str] | None = None
) -> str:
    """The choice that the value spells, or another name of one, ignoring capitals, "-", "_" and spaces."""

    def simplify(text: object) -> str:
        return str(text).lower().replace("-", "").replace("_", "").replace(" ", "")

    choice_of = {simplify(choice): choice for choice in choices}
    for other, choice in (others or {}).items():
        choice_of[simplify(other)] = choice
    if simplify(value) not in choice_of:
        one_of(where, name, value, choices)
    return choice_of[simplify(value)]


def compiler_options(where: str, given: Any) -> dict[str, bool | int | float | str]:
    """The options of a compiler as a dict; refuses all but a mapping of names to plain, finite values."""
    are_options = isinstance(given, Mapping)
    if are_options:
        are_options = all(_is_compiler_option(name, value) for name, value in given.items())
    if not are_options:
        raise TypeError(
            f"{where}: options must map names of compiler options to numbers, strings or booleans; got {given!r}. "
            "Pass for example {'xla_tpu_enable_async_collective_fusion': False}."
        )
    return dict(given)


def _is_compiler_option(name: object, value: object) -> bool:
    if not isinstance(name, str):
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int | str)


def divisor(where: str, name: str, value: int, of: str, size: int) -> None:
    """Refuses a value that does not divide `size`, whose name is `of`."""
    if size % value:
        raise ValueError(f"{where}: {name} must divide {of}; got {value} and {size}. Change one of them.")


def mesh_in_context(where: str, given: Mesh | AbstractMesh | None, devices: bool = False) -> Mesh:
    """The mesh that a caller means: the given one, or that of `jax.set_mesh`. It must have `devices`, or need not.

    Raises:
        ValueError: neither, or two different meshes. jax runs nothing on another mesh than that of the context.
    """
    context = _mesh_of_context()
    if devices and isinstance(given, AbstractMesh):
        sizes = format_sizes(given.shape.items())
        raise ValueError(f"{where}: the mesh must have devices; got abstract {sizes}. Pass sk.make_mesh({sizes}).")
    if given is None:
        if context.empty:
            raise ValueError(
                f"{where}: a mesh must be given; got none. Pass mesh=sk.make_mesh(data=8), or call this inside "
                "`with jax.set_mesh(mesh):`."
            )
        return context
    inside_jit = not isinstance(context, Mesh)  # where shapes may be asked for of any mesh, and jax checks the rest
    if not isinstance(given, Mesh) or context.empty or inside_jit or context == given:
        return given  # type: ignore[return-value]  # an AbstractMesh serves whoever runs nothing
    given_text = _describe_mesh(given)
    context_text = _describe_mesh(context)
    if given_text == context_text:
        given_text += f" of {_axis_types(given)} axes"
        context_text += f" of {_axis_types(context)} axes"
    raise ValueError(
        f"{where}: mesh must be the mesh of jax.set_mesh if you set one; got mesh {given_text} in the context of "
        f"{context_text}. Leave mesh out, or call this inside `with jax.set_mesh(...):` of this mesh."
    )


def apart(mesh: Any) -> AbstractContextManager[Any]:
    """Inside it `mesh` is the mesh of `jax.set_mesh`, where there is one; nothing where there is none."""
    if _mesh_of_context().empty:
        return nullcontext()
    return jax.set_mesh(mesh)


def replicated_in_context(x: Any, mesh: Any) -> Any:
    """An array that was made on the mesh of a `jax.set_mesh`, if there is one, on `mesh`."""
    if _mesh_of_context().empty:
        return x
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def _mesh_of_context() -> Any:
    """The mesh of `jax.set_mesh`, without its devices inside jit; an empty one where there is none."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside jit
        return jax.sharding.get_abstract_mesh()


def _axis_types(mesh: Any) -> str:
    """`Auto`, or `Auto and Explicit`: what else tells two meshes apart."""
    names = [axis_type.name for axis_type in mesh.axis_types]
    return " and ".join(dict.fromkeys(names))


def _describe_mesh(mesh: Any) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh.shape.items()) or "()"

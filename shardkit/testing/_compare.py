"""Compares pytrees of arrays, and describes how they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import format_sizes, quote
from shardkit._arguments.typed import ARRAYS, check_kind, short
from shardkit.meshes.layout import path_name

# Dtypes that differ in one of these differ by more than rounding.
_KINDS = (jnp.floating, jnp.complexfloating)


class UnequalError(AssertionError):
    """A proof found that something is not one device's.

    Attributes:
        differs: what is not, a sentence each.
    """

    def __init__(self, message: str, differs: Sequence[str] = ()):
        super().__init__(message)
        self.differs = tuple(differs) or (message,)


class Gap(NamedTuple):
    """A leaf that differs from the reference by more than is allowed, at its worst element."""

    path: str
    largest: float  # the difference at the worst element
    allowed: float  # by how much that element may differ
    worst: tuple[int, ...]  # the index of the worst element
    actual: Any
    expected: Any
    factor: float | None  # by which the leaf differs everywhere, if there is one

    @property
    def where(self) -> str:
        """The path after a space; nothing where the tree is one array."""
        return "" if self.path == path_name(()) else f" {self.path}"

    @property
    def excess(self) -> float:
        """The difference by the allowed one. Where nothing is allowed, it is worse than any that exceeds a bound."""
        if not self.allowed:
            return float("inf")
        return self.largest / self.allowed

    def __str__(self) -> str:
        place = f" at {list(self.worst)}" if self.worst else ""
        text = (
            f"the largest difference is {self.largest:.3g}{place}, where it is {_format_number(self.actual)} and the "
            f"reference {_format_number(self.expected)}"
        )
        if self.factor is not None:
            text += f" (everywhere {format_factor(self.factor)} the reference)"
        return f"{text}; allowed is {self.allowed:.3g}"


def describe_mesh(mesh: Mesh) -> str:
    """`on mesh data=2, model=4`."""
    return f"on mesh {format_sizes(mesh.shape.items())}"


def is_spec_or_none(x: Any) -> bool:
    """Whether a pytree of specs ends here."""
    return x is None or isinstance(x, PartitionSpec)


def replace_none(specs: Any) -> Any:
    """Specs with P() in place of None."""

    def replace(spec: Any) -> Any:
        return PartitionSpec() if spec is None else spec

    return jax.tree.map(replace, specs, is_leaf=is_spec_or_none)


def list_leaves(tree: Any) -> list[tuple[str, np.ndarray]]:
    """Paths and values, on the host; keys as their data, and ShapeDtypeStructs as they are."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), _fetch(x)) for path, x in leaves]


def _fetch(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    # NumPy has no dtype for keys. Their data are integers, which must be equal.
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def check_relative(where: str, relative: float) -> None:
    """Refuses a relative error that allows nothing or everything."""
    if not 0 < relative < 1:
        raise ValueError(f"{where}: relative must be between 0 and 1; got {relative}. Pass for example 1e-5.")


def check_batches(where: str, batches: Sequence[Any]) -> None:
    """Refuses batches that are no pytrees of arrays, and none at all."""
    for batch in batches:
        check_kind(where, "batches", batch, (ARRAYS,))
        if not any(jnp.ndim(x) for x in jax.tree.leaves(batch)):
            raise ValueError(
                f"{where}: each batch must have an array with its examples along dim 0; got {short(batch)}. Pass a "
                "list of batches, such as [batch] for one step."
            )
    if not len(batches):
        raise ValueError(f"{where}: at least one batch is needed; got none. Pass one for each step.")


def check_conclusive(where: str, grads: Any, loss: Any = 0.0) -> None:
    """Refuses a reference that a wrong result could equal."""
    leaves = list_leaves(grads)
    not_finite = []
    for name, x in [("the loss", np.asarray(loss)), *leaves]:
        if not np.all(np.isfinite(x.astype(np.float64))):
            not_finite.append(name)
    if not_finite:
        verb = "is" if len(not_finite) == 1 else "are"
        reason = f"{quote(not_finite)} {verb} not finite"
    # Zero times any factor is zero: a sum that is missing or repeated would not show.
    elif not any(x.any() for _, x in leaves):
        reason = "all gradients are zero"
    else:
        return
    raise ValueError(
        f"{where}: the reference must be finite and have a nonzero gradient, or nothing is proved; {reason}. "
        "Pass other parameters or another batch."
    )


def is_float(x: Any) -> bool:
    """Whether an array has a derivative."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def describe_shapes(actual: Any, expected: Any) -> str:
    """How the structures or shapes differ; "" if they do not."""
    actual_structure = jax.tree.structure(actual)
    expected_structure = jax.tree.structure(expected)
    if repr(actual_structure) != repr(expected_structure):
        return f"it is {_format_structure(actual_structure)} and the reference {_format_structure(expected_structure)}"
    for (path, x), (_, y) in zip(list_leaves(actual), list_leaves(expected), strict=True):
        if x.shape != y.shape:
            return f"{path} has shape {x.shape} and the reference {y.shape}"
    return ""


def describe_kinds(actual: Any, expected: Any) -> str:
    """Which leaf is floating-point, or complex, in one tree only; "" if none is."""
    for (path, x), (_, y) in zip(list_leaves(actual), list_leaves(expected), strict=True):
        for kind in _KINDS:
            if jnp.issubdtype(x.dtype, kind) != jnp.issubdtype(y.dtype, kind):
                return f"{path} is {x.dtype} and the reference {y.dtype}"
    return ""


def find_other_bits(copies: Sequence[np.ndarray]) -> int:
    """The number of the first array whose bits differ from array 0's; 0 if all are equal."""
    # As bytes, because NaN is unequal to itself, and 0.0 equals -0.0.
    first = np.asarray(copies[0]).tobytes()
    for number, copy in enumerate(copies):
        if np.asarray(copy).tobytes() != first:
            return number
    return 0


def find_unequal_replicas(x: Any) -> tuple[int, int] | None:
    """The ids of two devices whose replicas of a shard of a global array differ in a bit; None if all are equal."""
    if not isinstance(x, jax.Array):
        return None
    # For example, float32[8] over data=2 on a mesh data=2, model=2: devices 0 and 1 have replicas of the first half,
    # devices 2 and 3 of the second.
    replicas: dict[str, list[Any]] = {}
    for shard in x.addressable_shards:
        # An index is a tuple of slices, which have no hash before Python 3.12.
        replicas.setdefault(str(shard.index), []).append(shard)
    for shards in replicas.values():
        copies = [_fetch(shard.data) for shard in shards]
        number = find_other_bits(copies)
        if number:
            return shards[0].device.id, shards[number].device.id
    return None


def find_worst_gap(actual: Any, expected: Any, allow: Callable[[int, np.ndarray, float], Any]) -> Gap | None:
    """The leaf that exceeds its allowed difference most, by their quotient; None if none does.

    Integers and booleans must be equal.

    `allow(number, leaf, overall)` is the largest difference for leaf `number` of the reference, one for all elements or
    one for each; `overall` is the largest magnitude of all leaves.
    """
    expected_leaves = list_leaves(expected)
    overall = 0.0
    for _, y in expected_leaves:
        if is_float(y):
            overall = max(overall, magnitude(y))
    worst: Gap | None = None
    pairs = zip(list_leaves(actual), expected_leaves, strict=True)
    for number, ((path, x), (_, y)) in enumerate(pairs):
        # argmax raises for an array without elements.
        if not x.size:
            continue
        bound: Any = 0.0
        if is_float(y):
            bound = allow(number, y, overall)
        gap = _find_gap(path, x, y, bound)
        if gap is None:
            continue
        if worst is None or gap.excess > worst.excess:
            worst = gap
    return worst


def _find_gap(path: str, x: np.ndarray, y: np.ndarray, bound: Any) -> Gap | None:
    """The element of a leaf that exceeds its bound most; None if no element does."""
    difference = distance(x, y)
    bound = np.broadcast_to(bound, difference.shape)
    flat_index = int(np.argmax(difference - bound))
    index = np.unravel_index(flat_index, difference.shape)
    if not difference[index] > bound[index]:
        return None
    return Gap(
        path=path,
        largest=float(difference[index]),
        allowed=float(bound[index]),
        worst=tuple(map(int, index)),
        actual=x[index],
        expected=y[index],
        factor=constant_factor(x, y),
    )


def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y| in float64; 0 where both are the same infinity or both are NaN, infinite where one of them is."""
    x = _widen(x)
    y = _widen(y)
    both_are_nan = (x != x) & (y != y)
    is_equal = (x == y) | both_are_nan
    # inf - inf is NaN, and NumPy warns of it. The next two lines replace it, whether it is a difference or not.
    with np.errstate(invalid="ignore"):
        difference = np.abs(x - y)
    difference = np.where(np.isfinite(difference), difference, np.inf)
    return np.where(is_equal, 0.0, difference)


def magnitude(x: np.ndarray) -> float:
    """The largest finite absolute value."""
    x = np.abs(_widen(x))
    return float(np.max(x, initial=0.0, where=np.isfinite(x)))


def constant_factor(x: np.ndarray, y: np.ndarray) -> float | None:
    """The factor by which x differs from y everywhere; None if there is none, or it is 1.

    It is the factor of the least squares, <y, x> / <y, y>, if x differs from factor * y by less than a hundredth.

    Worked example: a gradient that was summed over 4 devices and should be a mean. y is [1, 2], x is [4, 8], and the
    factor (1 * 4 + 2 * 8) / (1 * 1 + 2 * 2) = 4 leaves no remainder. Of x = [4, 2] the factor would be 8 / 5, which
    leaves [2.4, -1.2]: None.
    """
    x = _widen(x).ravel()
    y = _widen(y).ravel()
    size = float(np.vdot(y, y).real)
    is_finite = np.isfinite(x).all() and np.isfinite(size)
    if not size or not is_finite:
        return None
    factor = float(np.vdot(y, x).real) / size
    remainder = np.max(np.abs(x - factor * y))
    # Because of the 1e-3, a leaf that is zero except for rounding is 0 times the reference. By its own factor, perhaps
    # 1e-7, hardly any remainder would be allowed.
    allowed = 1e-2 * max(abs(factor), 1e-3)
    fits = remainder <= allowed * np.max(np.abs(y))
    if fits and abs(factor - 1) > 1e-2:
        return factor
    return None


def format_factor(factor: float) -> str:
    """`4x`, `1/4 of`, `-1x`, `0x`, `0.985x`."""
    if 0 < abs(factor) < 0.99:
        inverse = 1 / factor
        is_whole = abs(inverse - round(inverse)) < 0.02 * abs(inverse)
        if is_whole and round(inverse) not in (-1, 1):
            sign = "-" if factor < 0 else ""
            return f"{sign}1/{abs(round(inverse))} of"
    is_whole = abs(factor - round(factor)) < 0.02 * max(1, abs(factor))
    if is_whole and round(factor) != 1:  # 1x and 1/1 would say that there is no difference
        return f"{round(factor)}x"
    return f"{factor:.3g}x"


def _widen(x: Any) -> np.ndarray:
    if np.iscomplexobj(x):
        return np.asarray(x).astype(np.complex128)
    return np.asarray(x).astype(np.float64)


def _format_number(x: Any) -> str:
    if np.asarray(x).dtype == bool:
        return str(bool(x))
    return f"{_widen(x).item():.6g}"


def _format_structure(structure: Any) -> str:
    text = str(structure).removeprefix("PyTreeDef(").removesuffix(")")
    return "one array" if text == "*" else text

"""Compares pytrees of arrays, and describes how they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import quoted, sized
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
    largest: float
    allowed: float
    at: tuple[int, ...]
    got: Any
    wanted: Any
    factor: float | None

    @property
    def where(self) -> str:
        """The path after a space; nothing where the tree is one array."""
        return "" if self.path == path_name(()) else f" {self.path}"

    def __str__(self) -> str:
        place = f" at {list(self.at)}" if self.at else ""
        text = (
            f"the largest difference is {self.largest:.3g}{place}, where it is {_number(self.got)} and the reference "
            f"{_number(self.wanted)}"
        )
        if self.factor is not None:
            text += f" (everywhere {times(self.factor)} the reference)"
        return f"{text}; allowed is {self.allowed:.3g}"


def on(mesh: Mesh) -> str:
    """`on mesh data=2, model=4`."""
    return f"on mesh {sized(mesh.shape.items())}"


def is_spec_or_none(x: Any) -> bool:
    """Whether a pytree of specs ends here."""
    return x is None or isinstance(x, PartitionSpec)


def none_is_whole(specs: Any) -> Any:
    """Specs with P() in place of None."""
    return jax.tree.map(lambda s: PartitionSpec() if s is None else s, specs, is_leaf=is_spec_or_none)


def leaves_of(tree: Any) -> list[tuple[str, np.ndarray]]:
    """Paths and values, on the host; keys as their data, and ShapeDtypeStructs as they are."""
    return [(path_name(path), _on_host(x)) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _on_host(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


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


def check_telling(where: str, grads: Any, loss: Any = 0.0) -> None:
    """Refuses a reference that a wrong result could equal."""
    leaves = leaves_of(grads)
    values = [("the loss", np.asarray(loss)), *leaves]
    wrong = [name for name, x in values if not np.all(np.isfinite(x.astype(np.float64)))]
    if wrong or not any(np.any(x) for _, x in leaves):
        found = (
            f"{quoted(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite" if wrong else "all gradients are zero"
        )
        raise ValueError(
            f"{where}: the reference must be finite and have a nonzero gradient, or nothing is proved; {found}. "
            "Pass other parameters or another batch."
        )


def is_float(x: Any) -> bool:
    """Whether an array has a derivative."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def shapes_differ(got: Any, wanted: Any) -> str:
    """How the structures or shapes differ; "" if they do not."""
    ours, theirs = jax.tree.structure(got), jax.tree.structure(wanted)
    if repr(ours) != repr(theirs):
        return f"it is {_brief(ours)} and the reference {_brief(theirs)}"
    for (path, x), (_, y) in zip(leaves_of(got), leaves_of(wanted), strict=True):
        if x.shape != y.shape:
            return f"{path} has shape {x.shape} and the reference {y.shape}"
    return ""


def kinds_differ(got: Any, wanted: Any) -> str:
    """Which leaf is floating-point, or complex, in one tree only; "" if none is."""
    for (path, x), (_, y) in zip(leaves_of(got), leaves_of(wanted), strict=True):
        if any(jnp.issubdtype(x.dtype, each) != jnp.issubdtype(y.dtype, each) for each in _KINDS):
            return f"{path} is {x.dtype} and the reference {y.dtype}"
    return ""


def first_other_bits(copies: Sequence[np.ndarray]) -> int:
    """The first of several arrays whose bits differ from those of array 0; 0 if none differs."""
    bits = [np.asarray(copy).tobytes() for copy in copies]
    return next((k for k, each in enumerate(bits) if each != bits[0]), 0)


def unequal_replicas(x: Any) -> tuple[int, int] | None:
    """The ids of two devices whose replicas of one shard of a global array differ in a bit; None if there are none."""
    shards: dict[str, list[Any]] = {}
    for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
        shards.setdefault(str(shard.index), []).append(shard)
    for copies in shards.values():
        other = first_other_bits([_on_host(shard.data) for shard in copies])
        if other:
            return copies[0].device.id, copies[other].device.id
    return None


def first_gap(got: Any, wanted: Any, allowed: Callable[[int, np.ndarray, float], Any]) -> Gap | None:
    """The leaf that exceeds its allowed difference most, or None. Integers and booleans must be equal.

    `allowed(at, leaf, overall)` is the largest difference for leaf number `at` of the reference, a number or one for
    each element; `overall` is the largest magnitude of all leaves.
    """
    pairs = [(path, x, y) for (path, x), (_, y) in zip(leaves_of(got), leaves_of(wanted), strict=True)]
    overall = max((magnitude(y) for _, _, y in pairs if is_float(y)), default=0.0)
    worst: Gap | None = None
    for at_leaf, (path, x, y) in enumerate(pairs):
        if not x.size:
            continue
        difference = distance(x, y)
        bound = np.broadcast_to(allowed(at_leaf, y, overall) if is_float(y) else 0.0, difference.shape)
        at = np.unravel_index(int(np.argmax(difference - bound)), difference.shape)
        if difference[at] > bound[at] and (worst is None or _excess(difference[at], bound[at]) > _excess(*worst[1:3])):
            place = tuple(int(i) for i in at)
            factor = constant_factor(x, y)
            worst = Gap(path, float(difference[at]), float(bound[at]), place, x[at], y[at], factor)
    return worst


def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y| in float64; 0 where both are the same infinity or both are NaN, infinite where one of them is."""
    x, y = _widest(x), _widest(y)
    same = (x == y) | ((x != x) & (y != y))
    with np.errstate(invalid="ignore"):
        difference = np.abs(x - y)
    return np.where(same, 0.0, np.where(np.isfinite(difference), difference, np.inf))


def magnitude(x: np.ndarray) -> float:
    """The largest finite absolute value."""
    x = np.abs(_widest(x))
    return float(np.max(x, initial=0.0, where=np.isfinite(x)))


def constant_factor(x: np.ndarray, y: np.ndarray) -> float | None:
    """The factor by which x differs from y everywhere; None if there is none, or it is 1."""
    x, y = _widest(x).ravel(), _widest(y).ravel()
    size = float(np.vdot(y, y).real)
    if not size or not np.isfinite(x).all() or not np.isfinite(size):
        return None
    factor = float(np.vdot(y, x).real) / size
    exact = np.max(np.abs(x - factor * y)) <= 1e-2 * max(abs(factor), 1e-3) * np.max(np.abs(y))
    return factor if exact and abs(factor - 1) > 1e-2 else None


def times(factor: float) -> str:
    """`4x`, `1/4 of`, `-1x`, `0x`."""
    if 0 < abs(factor) < 0.99 and abs(1 / factor - round(1 / factor)) < 0.02 * abs(1 / factor):
        return f"{'-' if factor < 0 else ''}1/{abs(round(1 / factor))} of"
    return f"{round(factor)}x" if abs(factor - round(factor)) < 0.02 * max(1, abs(factor)) else f"{factor:.3g}x"


def _excess(difference: float, bound: float) -> float:
    return difference / bound if bound else np.inf


def _widest(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _number(x: Any) -> str:
    return str(bool(x)) if np.asarray(x).dtype == bool else f"{_widest(x).item():.6g}"


def _brief(structure: Any) -> str:
    text = str(structure).removeprefix("PyTreeDef(").removesuffix(")")
    return "one array" if text == "*" else text

"""Any step, traced and lowered: by its own methods where it has them, else as a call inside a new jit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax

from shardkit._jax import compat
from shardkit._jax.interpreter import find_called_jaxpr
from shardkit._jax.jaxprs import own_line

T = TypeVar("T")


class TracedStep(NamedTuple):
    """One call of a step, traced."""

    fn: Any
    args: tuple[Any, ...]
    # the program; of a step whose arguments only its own framework can flatten, as a call inside a jit
    traced: jax.stages.Traced
    # lowers it as the step itself would be, with its donation; None: by `traced`
    lower: Callable[[], jax.stages.Lowered] | None = None
    kwargs: Mapping[str, Any] = MappingProxyType({})

    @property
    def jaxpr(self) -> Any:
        """The jaxpr."""
        return self.traced.jaxpr.jaxpr

    @property
    def lowered(self) -> jax.stages.Lowered:
        """The program for the compiler of this process."""
        return self.lower() if self.lower else self.traced.lower()

    @property
    def name(self) -> str:
        """The name of the step's function."""
        return getattr(inspect.unwrap(self.fn), "__name__", type(self.fn).__name__)

    @property
    def source(self) -> str:
        """The line at which the step is defined."""
        code = getattr(inspect.unwrap(self.fn), "__code__", None)
        return f"{Path(code.co_filename).name}:{code.co_firstlineno} ({code.co_qualname})" if code else "unknown"

    @property
    def parameters(self) -> list[str]:
        """The names of its positional arguments."""
        names: list[str] = []
        with suppress(TypeError, ValueError):
            names = [p.name for p in inspect.signature(self.fn).parameters.values() if p.kind < 2]
        return [*names[: len(self.args)], *(f"args[{n}]" for n in range(len(names), len(self.args)))]


class StepLeaf(NamedTuple):
    """An array among the arguments."""

    argument: str  # the name of the argument that holds it
    name: str  # its own name, as "params['w']"
    aval: Any  # its shape and dtype
    sharding: Any  # that of the array that was passed; None where it has none
    source: str  # the first line that uses it; "" if none does


def trace_step(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> TracedStep:
    """Traces one call: jit, nnx.jit, eqx.filter_jit, pmap, or any function of pytrees. What is traced is left so."""
    args = tuple(args)
    if isinstance(fn, jax.stages.Traced):
        return TracedStep(fn, args, fn)
    trace, lower = getattr(fn, "trace", None), getattr(fn, "lower", None)
    if trace is not None and (traced := _inside(trace(*args, **kwargs), jax.stages.Traced)) is not None:
        return TracedStep(fn, args, traced, kwargs=kwargs)
    if lower is not None:
        with suppress(AttributeError, TypeError):  # equinox: the jit below takes the arguments in parts
            low = lower(*args, **kwargs)
            parts = low.preprocess(low.info, args, kwargs, return_static=True)
            return TracedStep(fn, args, fn._cached.trace(*parts), kwargs=kwargs)
    leaves, structure = jax.tree.flatten(args)
    if lower is None and all(_is_array(leaf) or isinstance(leaf, int | float | complex) for leaf in leaves):
        return TracedStep(fn, args, jax.jit(fn).trace(*args, **kwargs), kwargs=kwargs)
    arrays = [n for n, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*given: Any) -> list[Any]:
        put = dict(zip(arrays, given, strict=True))
        out = fn(*jax.tree.unflatten(structure, [put.get(n, leaf) for n, leaf in enumerate(leaves)]), **kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if _is_array(leaf)]

    traced = jax.jit(call).trace(*(leaves[n] for n in arrays))

    def own() -> Any:
        lowered = lower and _inside(lower(*args, **kwargs), jax.stages.Lowered)
        return lowered or traced.lower()

    return TracedStep(fn, args, traced, own, kwargs)


def leaves_of(step: TracedStep) -> list[StepLeaf]:
    """The arrays among a step's arguments, in the order of the program's arguments."""
    jaxpr = step.jaxpr
    paths = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(step.args) if _is_array(leaf)]
    shapes = [tuple(getattr(leaf, "shape", ())) for _, leaf in paths]
    if shapes != [tuple(v.aval.shape) for v in jaxpr.invars]:  # a framework that flattens in its own order
        names = jaxpr.debug_info.arg_names or [""] * len(jaxpr.invars)
        return [
            StepLeaf(re.split(r"[\[.]", name)[0], name or f"argument {n}", v.aval, None, first_use(jaxpr, v))
            for n, (name, v) in enumerate(zip(names, jaxpr.invars, strict=True))
        ]
    given = step.parameters
    out = []
    for (path, leaf), variable in zip(paths, jaxpr.invars, strict=True):
        argument = given[path[0].idx]
        name = argument + jax.tree_util.keystr(path[1:])
        out.append(StepLeaf(argument, name, variable.aval, getattr(leaf, "sharding", None), first_use(jaxpr, variable)))
    return out


def first_use(jaxpr: Any, variable: Any) -> str:
    """The first of the user's lines that reads a value."""
    for equation in jaxpr.eqns:
        for position, operand in enumerate(equation.invars):
            if operand is variable:
                inner = find_called_jaxpr(equation)
                inside = first_use(inner, inner.invars[position]) if inner is not None else ""
                if line := inside or own_line(compat.user_frames(equation)):
                    return line
    return ""


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _inside(found: Any, kind: type[T]) -> T | None:
    """An object of jax's stages, or that which flax's or equinox's object of the same stage holds."""
    inner = found if isinstance(found, kind) else getattr(found, kind.__name__.lower(), None)
    return inner if isinstance(inner, kind) else None

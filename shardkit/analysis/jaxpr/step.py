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
from shardkit._jax.interpreter import find_called_program
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
        if self.lower is None:
            return self.traced.lower()
        return self.lower()

    @property
    def name(self) -> str:
        """The name of the step's function."""
        return getattr(inspect.unwrap(self.fn), "__name__", type(self.fn).__name__)

    @property
    def source(self) -> str:
        """The line at which the step is defined; "" of an object, such as the step of a builder."""
        code = getattr(inspect.unwrap(self.fn), "__code__", None)
        if code is None:
            return ""
        return f"{Path(code.co_filename).name}:{code.co_firstlineno} ({code.co_qualname})"

    @property
    def parameters(self) -> list[str]:
        """The names of its positional arguments; args[2] where the function does not name one."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names: list[str] = []
        with suppress(TypeError, ValueError):
            for parameter in inspect.signature(self.fn).parameters.values():
                if parameter.kind in positional:
                    names.append(parameter.name)
        names = names[: len(self.args)]
        for number in range(len(names), len(self.args)):
            names.append(f"args[{number}]")
        return names


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
    traced = _trace_by_itself(fn, args, kwargs)
    if traced is not None:
        return TracedStep(fn, args, traced, kwargs=kwargs)
    is_plain_function = not hasattr(fn, "lower")
    if is_plain_function and all(map(_is_array_or_number, jax.tree.leaves(args))):
        return TracedStep(fn, args, jax.jit(fn).trace(*args, **kwargs), kwargs=kwargs)
    traced = _trace_arrays(fn, args, kwargs)

    def lower() -> Any:
        lowered = None
        if not is_plain_function:
            lowered = _unwrap_stage(fn.lower(*args, **kwargs), jax.stages.Lowered)
        if lowered is None:
            return traced.lower()
        return lowered

    return TracedStep(fn, args, traced, lower, kwargs)


def _trace_by_itself(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> jax.stages.Traced | None:
    """What a step's own `trace` gives, or what is behind it in equinox; None where it has none."""
    if hasattr(fn, "trace"):
        traced = _unwrap_stage(fn.trace(*args, **kwargs), jax.stages.Traced)
        if traced is not None:
            return traced
    if hasattr(fn, "lower"):
        # equinox has no `trace`: the jit within its function takes the arguments in parts.
        with suppress(AttributeError, TypeError):
            lowered = fn.lower(*args, **kwargs)
            parts = lowered.preprocess(lowered.info, args, kwargs, return_static=True)
            traced_by_equinox: jax.stages.Traced = fn._cached.trace(*parts)
            return traced_by_equinox
    return None


def _trace_arrays(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> jax.stages.Traced:
    """Traces a call in a jit of its own, of the arrays among the arguments, to the arrays that it returns."""
    leaves, structure = jax.tree.flatten(args)
    numbers = [number for number, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*arrays: Any) -> list[Any]:
        call_leaves = list(leaves)
        for number, array in zip(numbers, arrays, strict=True):
            call_leaves[number] = array
        call_args = jax.tree.unflatten(structure, call_leaves)
        results = fn(*call_args, **kwargs)
        return [leaf for leaf in jax.tree.leaves(results) if _is_array(leaf)]

    arrays = [leaves[number] for number in numbers]
    return jax.jit(call).trace(*arrays)


def leaves_of(step: TracedStep) -> list[StepLeaf]:
    """The arrays among a step's arguments, in the order of the program's arguments."""
    jaxpr = step.jaxpr
    paths = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(step.args):
        if _is_array(leaf):
            paths.append((path, leaf))
    shapes = [tuple(getattr(leaf, "shape", ())) for _, leaf in paths]
    if shapes != [tuple(v.aval.shape) for v in jaxpr.invars]:  # a framework that flattens in its own order
        return _leaves_of_program(jaxpr)
    parameters = step.parameters
    leaves = []
    for (path, leaf), variable in zip(paths, jaxpr.invars, strict=True):
        # A path begins with the number of the positional argument.
        argument = parameters[path[0].idx]
        name = argument + jax.tree_util.keystr(path[1:])
        sharding = getattr(leaf, "sharding", None)
        leaves.append(StepLeaf(argument, name, variable.aval, sharding, first_use(jaxpr, variable)))
    return leaves


def _leaves_of_program(jaxpr: Any) -> list[StepLeaf]:
    """The same by the names that the program has for its arguments, as "state['params']['w']"."""
    names = jaxpr.debug_info.arg_names or [""] * len(jaxpr.invars)
    leaves = []
    for number, (name, variable) in enumerate(zip(names, jaxpr.invars, strict=True)):
        argument = re.split(r"[\[.]", name)[0]
        use = first_use(jaxpr, variable)
        leaves.append(StepLeaf(argument, name or f"argument {number}", variable.aval, None, use))
    return leaves


def first_use(jaxpr: Any, variable: Any) -> str:
    """The first of the user's lines that reads a value."""
    for equation in jaxpr.eqns:
        for position, operand in enumerate(equation.invars):
            if operand is not variable:
                continue
            line = ""
            program = find_called_program(equation)
            if program is not None:
                callee = getattr(program, "jaxpr", program)
                line = first_use(callee, callee.invars[position])
            line = line or own_line(compat.user_frames(equation))
            if line:
                return line
    return ""


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_array_or_number(leaf: Any) -> bool:
    """Whether jit takes a leaf as it is."""
    return _is_array(leaf) or isinstance(leaf, int | float | complex)


def _unwrap_stage(stage: Any, kind: type[T]) -> T | None:
    """An object of jax's stages, or the one that flax's or equinox's object of the same stage holds."""
    if not isinstance(stage, kind):
        stage = getattr(stage, kind.__name__.lower(), None)
    if not isinstance(stage, kind):
        return None
    return stage

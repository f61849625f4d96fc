"""A program traced as on one device, and run by each device of a mesh on its own arrays.

Inside shard_map jax refuses a loop that begins with zeros and ends with data, and sums the gradient of a constant over
all devices. Both are right where a program communicates; the remedy is a cast, which nobody can write inside a library
of others. A program that does not communicate is traced here where there is no mesh, and becomes one equation, whose
results vary over all axes over which an operand varies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

from shardkit._jax import compat
from shardkit._jax.jaxprs import communicates, kind_of, own_line, walk


@contextmanager
def _no_mesh() -> Iterator[None]:
    # The names of the axes stay bound, so that a collective is found in the traced program, and named.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), compat.private("config._check_vma")(False):
        yield


def _lower_program(ctx: Any, *operands: Any, program: ClosedJaxpr, results: Any) -> Any:
    inner = ctx.replace(avals_in=program.in_avals, avals_out=program.out_avals)
    with _no_mesh():
        return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(inner, *operands)


_program = Primitive(compat.ONE_DEVICE)
_program.multiple_results = True
_program.def_effectful_abstract_eval(lambda *_, program, results: (results, program.effects))
_program.def_impl(lambda *operands, program, results: jaxpr_as_fun(program)(*operands))
mlir.register_lowering(_program, _lower_program)


def as_on_one_device(fn: Callable[..., Any], *args: Any, may_send: bool = False) -> Any:
    """`fn(*args)`, traced without the mesh of the shard_map around it; plainly `fn(*args)` where there is none.

    With `may_send` it shows only whether `fn` can be traced without the types of axes.

    Raises:
        ValueError: `fn` communicates, or asks where it runs, without `may_send`.

    Cost: nothing is sent. `fn` is traced once, as without this, and lowered as a function of its own.
    """
    if not compat.tracked_axes():
        return fn(*args)
    args = jax.tree.map(jnp.asarray, args)
    with _no_mesh():
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        program, structure = jax.make_jaxpr(fn, return_shape=True)(*shapes)
    collective = communicates(program.jaxpr)
    if collective and not may_send:
        raise ValueError(
            "value_and_grad: with local=True a loss is traced as on one device, and must not communicate; it calls "
            f"{collective}. Leave out local=."
        )
    leaves = jax.tree.leaves(args)
    varying: set[str] = set()
    for x in leaves:
        varying |= compat.varying_axes(x)
    axes = tuple(sorted(varying))

    # Traced for its types alone: those of the program's results, varying over these axes.
    def make_results() -> list[jax.Array]:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in program.out_avals]
        if not axes:
            return zeros
        return [compat.cast_varying(x, axes) for x in zeros]

    result_types = tuple(jax.make_jaxpr(make_results)().out_avals)
    results = _program.bind(*leaves, program=program, results=result_types)
    return jax.tree.unflatten(jax.tree.structure(structure), results)


def has_vmapped_collective(fn: Callable[..., Any], *args: Any) -> bool:
    """Whether `fn(*args)`, traced without the mesh of the shard_map around it, has a collective over a vmap's axis."""
    with _no_mesh():
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), args)
        program = jax.make_jaxpr(fn)(*shapes)
    for site in walk(program.jaxpr):
        axes = site.equation.params.get("axes", ())
        # Once it is traced, the axis of a vmap is a dim: a number, where a mesh axis is a name.
        if kind_of(site.equation) is not None and any(isinstance(axis, int) for axis in axes):
            return True
    return False


Remedy = tuple[str, Callable[[], Any]]


@contextmanager
def noting(*remedies: Remedy) -> Iterator[None]:
    """Where what stands inside cannot be traced, and what is called instead can, the error gets a note of what to do.

    A remedy is the note, with {line} for the user's line that failed and {text} for what it says, and the call; the
    first whose call can be traced.
    """
    try:
        yield
    except Exception as error:
        for note, otherwise in remedies:
            if _can_call(otherwise):
                line, text = _find_users_line(error)
                error.add_note(note.format(line=line, text=text))
                break
        raise


def _find_users_line(error: BaseException) -> tuple[str, str]:
    """The innermost line of the user's own code that led to an error, and its text."""
    for frame in reversed(extract_tb(error.__traceback__)):
        line = own_line([(frame.filename, frame.lineno or 0, frame.name)])
        if line:
            return line, frame.line or ""
    return "the line above", ""


def _can_call(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        return False
    return True

"""Traced programs: their equations and how often each runs, values followed through them, source lines.

`walk` lists every equation at any depth. `flow` follows facts from the arguments of one jaxpr to its results; the
caller's `step` says what an equation does to them, with `find_called_jaxpr`, `scan_operands`, `while_operands` and
`find_fixed_point` for the equations that hold jaxprs. `find_independent` is the part of a program that follows from its
first arguments.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import partial_eval

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit._jax.primitives import registered

T = TypeVar("T")

# Scopes, by which a traced program says what its collectives are for.
PLAN = "shardkit_plan"  # a plan gathers leaves, and reduces their gradients
PER_MICROBATCH = "per_microbatch"  # anything else that is sent for each microbatch, and is right in each
MEAN = "shardkit_mean"  # weight and total of a loss
TOTALS = "shardkit_totals"  # their sums over devices
_HERE = Path(__file__).parents[1]
_PYTHON = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
_TESTING = _HERE / "testing"  # calls a user's function, and is no part of it
_KERNELS = {_HERE / "collectives", _HERE / "_jax" / "compat.py", _HERE / "_arguments" / "typed.py"}


class Site(NamedTuple):
    """An equation, and where it is in the program."""

    equation: Any
    jaxpr: Any  # the jaxpr that holds it
    # how often it runs in one call, loops included; None inside a `while`, whose length is not in the program
    times: int | None = 1
    branch: str = ""  # "" or "branch 1 of 2" inside a `cond`
    outer: Site | None = None  # the site whose equation holds `jaxpr`; None in the outermost one

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.equation.primitive.name)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The mesh axes bound here, with their sizes."""
        if self.outer is None:
            return {}
        if self.outer.name != "shard_map":
            return self.outer.sizes
        return {**self.outer.sizes, **self.outer.equation.params["mesh"].shape}

    @property
    def backward(self) -> bool:
        """Whether differentiation made the equation, or one around it, for the backward pass."""
        return compat.in_backward(self.equation) or (self.outer is not None and self.outer.backward)

    @property
    def recomputed(self) -> bool:
        """Whether jax.checkpoint repeats the equation, or one around it, for the backward pass."""
        return compat.is_recomputed(self.equation) or (self.outer is not None and self.outer.recomputed)

    def within(self, scope: str) -> bool:
        """Whether the equation, or one around it, was traced under this `jax.named_scope`."""
        return compat.in_scope(self.equation, scope) or (self.outer is not None and self.outer.within(scope))

    @property
    def source(self) -> str:
        """The `source_line` of the equation, or of the innermost one around it that has one."""
        return source_line(self.equation, self.outer.source if self.outer else "")


def walk(jaxpr: Any, times: int | None = 1, branch: str = "", outer: Site | None = None) -> Iterator[Site]:
    """Every equation of a program in order, those of inner jaxprs directly after the equation that holds them.

    Of a scan of 3 steps whose body is `sin` and a jit of `cos`: scan (times 1), sin (3), jit (3), cos (3).
    """
    for equation in jaxpr.eqns:
        site = Site(equation, jaxpr, times, branch, outer)
        yield site
        inner = compat.inner_jaxprs(equation)
        for number, (parameter, inner_jaxpr) in enumerate(inner):
            inner_times = times
            inner_branch = branch
            if site.name == "scan":
                inner_times = None if times is None else times * equation.params["length"]
            elif site.name == "while":
                inner_times = None
            elif site.name == "cond" and parameter == "branches":
                inner_branch = f"branch {number + 1} of {len(inner)}"
                if branch:
                    inner_branch = f"{branch}, {inner_branch}"
            yield from walk(inner_jaxpr, inner_times, inner_branch, site)


def without_unused(closed: Any) -> ClosedJaxpr:
    """A program without the equations that no result needs."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def kind_of(equation: Any) -> str | None:
    """The kind of collective that an equation is, as "all_reduce"; None where it does not communicate."""
    return registered(equation.primitive.name).kind


def mesh_axes(equation: Any) -> tuple[str, ...]:
    """The mesh axes that an equation names."""
    values = [equation.params.get(key) for key in registered(equation.primitive.name).axes]
    axes: list[str] = []
    for value in values:
        names = value if isinstance(value, tuple) else (value,)
        axes += [name for name in names if isinstance(name, str)]  # vmap's axes may be numbers
    return tuple(axes)


def communicates(jaxpr: Any) -> str:
    """The first equation of a program that needs the mesh, and its axes, as errors name them; "" if there is none."""
    for site in walk(jaxpr):
        name = kind_of(site.equation)
        if name is None and registered(site.name).on_mesh:
            name = site.name
        if name is not None:
            axes = mesh_axes(site.equation)
            return f"{name} over {quoted(axes)}" if axes else name
    return ""


def flow(
    jaxpr: Any,
    given: Sequence[T],
    step: Callable[[Any, list[T]], Sequence[T]],
    literal: Callable[[Any], T],
    values: dict[Any, T] | None = None,
) -> list[T]:
    """Follows facts through a jaxpr, from its arguments to its results.

    `given` has a fact for each of its constants and arguments, in that order, `step(equation, operands)` returns those
    of an equation's results, and `literal` that of a literal; `values` is filled with those of every variable.
    """
    facts: dict[Any, T] = {} if values is None else values

    def read(atoms: Sequence[Any]) -> list[T]:
        return [literal(atom) if hasattr(atom, "val") else facts[atom] for atom in atoms]

    facts.update(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
    for equation in jaxpr.eqns:
        results = step(equation, read(equation.invars))
        facts.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def find_fixed_point(carried: list[T], turn: Callable[[list[T]], list[T]]) -> list[T]:
    """What holds of a loop's carry in every iteration: `turn` adds what one iteration does, until nothing changes."""
    while True:
        after = turn(carried)
        if after == carried:
            return carried
        carried = after


def find_called_jaxpr(equation: Any) -> Any:
    """The jaxpr that an equation calls with its operands, one to one; None where it is no plain call."""
    if equation.primitive.name not in compat.CALLS:
        return None
    jaxprs = [jaxpr for _, jaxpr in compat.inner_jaxprs(equation)]
    if len(jaxprs) != 1 or len(jaxprs[0].invars) != len(equation.invars):
        return None
    return jaxprs[0]


def scan_operands(equation: Any, operands: list[T]) -> tuple[list[T], list[T], list[T]]:
    """A scan's operands: the constants of the loop, its carry, and what it goes over."""
    consts, carry = compat.scan_parts(equation)
    return operands[:consts], operands[consts : consts + carry], operands[consts + carry :]


def while_operands(equation: Any, operands: list[T]) -> tuple[list[T], list[T], list[T]]:
    """A while loop's operands: the constants of its condition, those of its body, and its carry."""
    n = equation.params["cond_nconsts"]
    m = n + equation.params["body_nconsts"]
    return operands[:n], operands[n:m], operands[m:]


def find_independent(jaxpr: Any, given: int, last: int) -> tuple[Any, list[bool]]:
    """What of a jaxpr follows from its first `given` arguments alone, inside its loops and calls too.

    Returns:
        A jaxpr of those arguments, whose results are those of the `last` results that follow from them; and for each of
        the `last` results whether it does not.
    """
    argument_count = len(jaxpr.invars)
    first_result = len(jaxpr.outvars) - last
    other_arguments = [number >= given for number in range(argument_count)]
    reached = _find_dependents(jaxpr, other_arguments)
    depends = marks(jaxpr.outvars[first_result:], reached)
    # An equation with an effect is never dead code: those that other arguments reach are taken out first.
    equations = []
    for equation in jaxpr.eqns:
        if not all(marks(equation.outvars, reached)) or not any(marks(equation.invars, reached)):
            equations.append(equation)
    independent, _ = partial_eval.dce_jaxpr(
        jaxpr.replace(eqns=equations),
        [False] * first_result + [not marked for marked in depends],
        instantiate=[not marked for marked in other_arguments],
    )
    return independent, depends


def _find_dependents(jaxpr: Any, arguments: Sequence[bool]) -> set[Any]:
    """The variables of a jaxpr that depend on these arguments."""
    dependents = {v for v, marked in zip(jaxpr.invars, arguments, strict=True) if marked}
    for equation in jaxpr.eqns:
        operands = marks(equation.invars, dependents)
        if any(operands):
            results = _mark_results(equation, operands)
            dependents.update(v for v, marked in zip(equation.outvars, results, strict=True) if marked)
    return dependents


def marks(atoms: Sequence[Any], variables: set[Any]) -> list[bool]:
    """Which of the operands of an equation are among some variables."""
    return [not isinstance(atom, Literal) and atom in variables for atom in atoms]


def _mark_results(equation: Any, operands: list[bool]) -> list[bool]:
    """Which results of an equation depend on the marked operands."""
    name = equation.primitive.name
    inner = [jaxpr for _, jaxpr in compat.inner_jaxprs(equation)]
    if name in {*compat.CALLS, "shard_map"} and len(inner) == 1 and len(inner[0].invars) == len(operands):
        return _mark_results_of_jaxpr(inner[0], operands)
    if name == "cond":
        index, *arguments = operands
        branches = [_mark_results_of_jaxpr(jaxpr, arguments) for jaxpr in inner]
        return [index or any(marked) for marked in zip(*branches, strict=True)]
    if name == "scan":
        return _mark_results_of_scan(equation, inner[0], operands)
    return [True] * len(equation.outvars)


def _mark_results_of_jaxpr(jaxpr: Any, arguments: Sequence[bool]) -> list[bool]:
    return marks(jaxpr.outvars, _find_dependents(jaxpr, arguments))


def _mark_results_of_scan(equation: Any, body: Any, operands: list[bool]) -> list[bool]:
    """A carry that depends on the operands in one iteration does in all later ones."""
    consts, carry, xs = scan_operands(equation, operands)
    while True:
        results = _mark_results_of_jaxpr(body, [*consts, *carry, *xs])
        after = [before or marked for before, marked in zip(carry, results[: len(carry)], strict=True)]
        if after == carry:
            return [*carry, *results[len(carry) :]]
        carry = after


def source_line(equation: Any, around: str = "") -> str:
    """The innermost line that led to an equation, outside jax, the kernels and, if there is one, outside shardkit.

    Where only a kernel's line is known, as inside a function with a custom derivative, it is that of the equation
    `around` it.
    """
    return _line_behind(equation.source_info.traceback, around)


# A proof asks for the line of each comparison in each of its runs.
@lru_cache(maxsize=4096)
def _line_behind(traceback: Any, around: str) -> str:
    frames = [frame for frame in compat.frames_of(traceback) if not Path(frame[0]).is_relative_to(_TESTING)]
    above = [frame for frame in frames if not is_kernel(frame[0])]
    if not above:
        if around:
            return around
        return _format_frame(frames[0]) if frames else "unknown"
    return _user_line(traceback) or _format_frame(above[0])


def user_line(equation: Any) -> str:
    """The innermost line that led to an equation in the user's own code, else outside jax and shardkit; "" if none."""
    return _user_line(equation.source_info.traceback)


def _user_line(traceback: Any) -> str:
    outside = [frame for frame in compat.frames_of(traceback) if not _is_ours(frame[0])]
    users = [frame for frame in outside if _is_users(frame[0])]
    if users:
        return _format_frame(users[0])
    return _format_frame(outside[0]) if outside else ""


def way_of(site: Site) -> tuple[str, ...]:
    """The lines that led to an equation, outermost first, without those of jax, of Python and of argument checks."""
    lines = list(way_of(site.outer)) if site.outer else []
    for frame in reversed(compat.user_frames(site.equation)):
        path = Path(frame[0])
        if path.parent.name == "_arguments" or any(path.is_relative_to(folder) for folder in _PYTHON):
            continue
        if _is_ours(frame[0]):
            line = f"{path.relative_to(_HERE)}:{frame[1]} ({frame[2]})"
        else:
            line = _format_frame(frame)
        if line not in lines:
            lines.append(line)
    return tuple(lines)


def own_line(frames: Sequence[tuple[str, int, str]]) -> str:
    """The innermost of these lines in the user's own code: outside jax, shardkit, installed packages and Python.

    "" where there is none.
    """
    for frame in frames:
        if _is_users(frame[0]):
            return _format_frame(frame)
    return ""


@cache
def _is_users(file: str) -> bool:
    """Whether a file is the user's own, and not one of shardkit, of an installed package or of Python."""
    path = Path(file)
    if path.is_relative_to(_HERE) or file.startswith("<frozen"):
        return False
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in _PYTHON)


def _format_frame(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    return f"{file_name(file)}:{line} ({function})"


@cache  # called for every equation, and splitting a path is slow
def is_kernel(file: str) -> bool:
    """Whether a file holds kernels, which stand for the line that calls them."""
    return bool(_KERNELS & {Path(file), *Path(file).parents})


@cache
def _is_ours(file: str) -> bool:
    return _HERE in Path(file).parents


def file_name(file: str) -> str:
    """The name of a file without its folder; of a notebook's cell "cell 3", by the number before its last run."""
    # IPython's files of cells are numbers that nobody knows; a cell that runs again has another number.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    cell = shell.compile.format_code_name(file) if shell else None  # ("Cell", "In[3]")
    if cell:
        return cell[1].replace("In[", "cell ").rstrip("]")
    return _last_part(file)


@cache
def _last_part(file: str) -> str:
    return Path(file).name

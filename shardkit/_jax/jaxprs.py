"""Traced programs: their equations and how often each runs, collectives, source lines.

`walk` lists every equation at any depth. What follows values through a program is in `interpreter.py`.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.primitives import registered

# Scopes, by which a traced program says what its collectives are for.
PLAN = "shardkit_plan"  # a plan gathers leaves, and reduces their gradients
PER_MICROBATCH = "per_microbatch"  # anything else that is sent for each microbatch, and is right in each
MEAN = "shardkit_mean"  # weight and total of a loss
TOTALS = "shardkit_totals"  # their sums over devices
_SHARE = "shardkit_runs"  # `share_scope`
_SHARE_NAME = re.compile(rf"(?:^|/){_SHARE}_(\d+)_of_(\d+)(?:/cond)?$")
_HERE = Path(__file__).parents[1]
_PYTHON = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "scripts")}  # and where commands are installed
_TESTING = _HERE / "testing"  # calls a user's function, and is no part of it
_KERNELS = {_HERE / "collectives", _HERE / "_jax" / "compat.py", _HERE / "_arguments" / "typed.py"}


class RunShare(NamedTuple):
    """How often all devices take a branch of a `lax.cond` in a loop: the branch that computes, and not the empty one.

    Which rounds take it stands in a constant of the program, which no reader of jaxprs or of compiled modules follows.
    So whoever writes the cond says it in a scope, `share_scope`, and the readers count by it.
    """

    runs: int  # in so many rounds of the loop
    ticks: int  # of so many

    def count_runs(self, times: int | None) -> int | None:
        """How often the branch runs where the cond runs `times` times; None if that is not known."""
        if times is None:
            return None
        # Rounded up: of a loop that the compiler has unrolled a cond has not all rounds.
        return -(-times * self.runs // self.ticks)


def share_scope(share: RunShare) -> str:
    """The `jax.named_scope` around a `lax.cond` whose first function runs in that share of the rounds."""
    return f"{_SHARE}_{share.runs}_of_{share.ticks}"


def find_share(name: str) -> RunShare | None:
    """The share that a scope says, or the name of an operation in it, as ".../shardkit_runs_2_of_5/cond"."""
    match = _SHARE_NAME.search(name)
    if match is None:
        return None
    return RunShare(runs=int(match[1]), ticks=int(match[2]))


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
        return self._has(compat.in_backward)

    @property
    def recomputed(self) -> bool:
        """Whether jax.checkpoint repeats the equation, or one around it, for the backward pass."""
        return self._has(compat.is_recomputed)

    def within(self, scope: str) -> bool:
        """Whether the equation, or one around it, was traced under this `jax.named_scope`."""
        return self._has(lambda equation: compat.in_scope(equation, scope))

    def _has(self, test: Callable[[Any], bool]) -> bool:
        """Whether the equation, or one around it, passes a test."""
        site: Site | None = self
        while site is not None:
            if test(site.equation):
                return True
            site = site.outer
        return False

    @property
    def source(self) -> str:
        """The `source_line` of the equation, or of the innermost one around it that has one."""
        around = self.outer.source if self.outer else ""
        return source_line(self.equation, around)


def walk(jaxpr: Any, times: int | None = 1, branch: str = "", outer: Site | None = None) -> Iterator[Site]:
    """Every equation of a program in order, those of inner jaxprs directly after the equation that holds them.

    Of a scan of 3 steps whose body is `sin` and a jit of `cos`: scan (times 1), sin (3), jit (3), cos (3). Each branch
    of a cond counts as often as the cond, but for those of which a `share_scope` says how often they run.
    """
    for equation in jaxpr.eqns:
        site = Site(equation, jaxpr, times, branch, outer)
        yield site
        inner = compat.inner_jaxprs(equation)
        for number, (parameter, inner_jaxpr) in enumerate(inner):
            inner_times = times
            inner_branch = branch
            if site.name == "scan" and times is not None:
                inner_times = times * equation.params["length"]
            elif site.name == "while":
                inner_times = None
            elif site.name == "cond" and parameter == "branches":
                inner_branch = f"branch {number + 1} of {len(inner)}"
                if branch:
                    inner_branch = f"{branch}, {inner_branch}"
                share = find_share(compat.innermost_scope(equation))
                if share:
                    inner_times = share.count_runs(times)
            yield from walk(inner_jaxpr, inner_times, inner_branch, site)


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
        if name is None:
            continue
        axes = mesh_axes(site.equation)
        if not axes:
            return name
        return f"{name} over {quote(axes)}"
    return ""


def source_line(equation: Any, around: str = "") -> str:
    """The innermost line that led to an equation, outside jax, the kernels and, if there is one, outside shardkit.

    Where only a kernel's line is known, as inside a function with a custom derivative, it is that of the equation
    `around` it.
    """
    return _line_behind(equation.source_info.traceback, around)


# A proof asks for the line of each comparison in each of its runs.
@lru_cache(maxsize=4096)
def _line_behind(traceback: Any, around: str) -> str:
    frames = [frame for frame in compat.frames_of(traceback) if not _is_of_testing(frame[0])]
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


# A traceback has dozens of frames, and a program few files.
@cache
def _is_of_testing(file: str) -> bool:
    return Path(file).is_relative_to(_TESTING)


def file_name(file: str) -> str:
    """The name of a file without its folder; of a notebook's cell "cell 3", by the number before its last run."""
    # IPython's files of cells are numbers that nobody knows; a cell that runs again has another number.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None
    if get_shell is not None:
        shell = get_shell()
    if shell:
        cell = shell.compile.format_code_name(file)  # ("Cell", "In[3]"), or None
        if cell:
            return cell[1].replace("In[", "cell ").rstrip("]")
    return _last_part(file)


@cache
def _last_part(file: str) -> str:
    return Path(file).name

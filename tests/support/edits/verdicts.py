"""What an edit changes, by numbers, and what the proof says of it."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

import shardkit
from shardkit._jax import compat
from shardkit.testing._compare import is_float
from shardkit.testing._interpreter import interpret
from shardkit.testing.exact import assert_compiled_equal
from shardkit.testing.exact.evidence import UnprovableError
from shardkit.testing.exact.imported import ImportedProgram
from shardkit.testing.exact.stablehlo.module import rewrite
from support.edits import modules
from support.edits.kinds import KINDS, ROUNDED, Site, round_products
from support.edits.programs import PROGRAMS, Program

OUTCOMES = ("refuted", "not decided", "proved", "crashed")
_LIBRARY = Path(shardkit.__file__).parent
_TOLERANCE = 3e-5  # of what is no rounding


class Edit(NamedTuple):
    """An edit of a program's module: the site of this number among those of a kind."""

    program: str
    kind: str
    site: int


class Verdict(NamedTuple):
    """What became of an edit.

    Attributes:
        edit: which.
        operation: what was edited, as its name in the module.
        lines: of the source, from which the operation comes; of one without a line, from which its readers come.
        changes: whether results for drawn inputs differ.
        outcome: one of `OUTCOMES`.
        message: of the proof.
        seconds: CPU time of the proof.
    """

    edit: Edit
    operation: str
    lines: tuple[str, ...]
    changes: bool
    outcome: str
    message: str
    seconds: float

    @property
    def is_named(self) -> bool:
        """Whether the message names a line of the operation."""
        return not set(self.lines).isdisjoint(find_lines(self.message))


def find_lines(message: str) -> list[str]:
    """The lines of the source that a message names."""
    return re.findall(r"[\w./-]+\.py:\d+", message)


@cache
def build(program: str) -> tuple[Program, Any]:
    """A program and what was compiled of it."""
    built = PROGRAMS[program]()
    return built, built.function.trace(*built.args).lower().compile()


@cache
def count_sites(program: str, kind: str) -> int:
    """How many edits of a kind a program's module has."""
    _, compiled = build(program)
    module = parse(compiled)
    with module.context:
        return len(list_sites(module, kind))


def parse(compiled: Any) -> Any:
    """The optimized module of what was compiled, as StableHLO."""
    (module,) = compiled.runtime_executable().hlo_modules()
    return compat.parse_hlo(rewrite(module.as_serialized_hlo_module_proto()))


def list_sites(module: Any, kind: str) -> list[Site]:
    """The places for edits of a kind."""
    find = round_products if kind == ROUNDED else KINDS[kind]
    return list(find(modules.list_operations(module)))


@contextmanager
def plant(edit: Edit) -> Iterator[list[Any]]:
    """While it lasts, modules are read with the edit; yields a list that then has the edited operation's names."""
    names: list[Any] = []
    original = compat.parse_hlo

    def parse_and_edit(serialized: bytes) -> Any:
        module = original(serialized)
        with module.context, modules.ir.Location.unknown():
            site = list_sites(module, edit.kind)[edit.site]
            names[:] = [site.operation.name, find_source(site.operation)]
            site.apply()
            module.operation.verify()
        return module

    compat.parse_hlo = parse_and_edit
    try:
        yield names
    finally:
        compat.parse_hlo = original


def find_source(operation: Any) -> tuple[str, ...]:
    """The innermost line of an operation outside of the library, or of what is around it or reads it."""
    waiting = [operation]
    while waiting:
        lines = []
        following = []
        for other in waiting:
            frames = re.findall(r'"[^"]*"\("([^"]+)":(\d+)', str(other.location))
            frames = [(path, line) for path, line in frames if not Path(path).is_relative_to(_LIBRARY)]
            if frames:
                path, line = frames[0]
                lines.append(f"{path.rpartition('/')[2]}:{line}")
            for result in other.results:
                following += [use.owner.operation for use in result.uses]
            parent = getattr(other.parent, "operation", other.parent)
            if parent is not None and parent.name != "func.func":
                following.append(parent)
        if lines:
            return tuple(dict.fromkeys(lines))
        waiting = following
    return ()


def draw_inputs(args: Any) -> list[list[Any]]:
    """The leaves of arguments with other floats: some draws of numbers, and one with many equal ones."""
    rng = np.random.default_rng(5)
    draws = []
    for number in range(3):
        leaves = []
        for x in jax.tree.leaves(args):
            if not is_float(x):
                leaves.append(np.asarray(x) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
            elif number < 2:
                leaves.append(rng.normal(size=x.shape).astype(x.dtype))
            else:
                leaves.append(rng.integers(-1, 2, x.shape).astype(x.dtype))
        draws.append(leaves)
    return draws


def evaluate(program: str) -> list[list[np.ndarray]]:
    """The pieces of all results, of all draws, as the module computes them in floats."""
    built, compiled = build(program)
    imported = ImportedProgram.of(compiled)
    names = tuple(imported.mesh)
    sizes = tuple(imported.mesh.values())
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    results = []
    with jax.enable_x64(True):
        run = jax.jit(interpret(imported.run, mesh, print))
        for leaves in draw_inputs(built.args):
            results.append([np.asarray(x) for x in run(*leaves)])
    return results


@cache
def evaluate_as_compiled(program: str) -> list[list[np.ndarray]]:
    """The same without an edit."""
    return evaluate(program)


def changes_results(edit: Edit) -> bool:
    """Whether the edited module computes other numbers."""
    expected = evaluate_as_compiled(edit.program)
    with plant(edit):
        results = evaluate(edit.program)
    for row, expected_row in zip(results, expected, strict=True):
        for x, y in zip(row, expected_row, strict=True):
            scale = np.max(np.abs(y), initial=0, where=np.isfinite(y)) + 1e-6
            if not np.allclose(x, y, _TOLERANCE, _TOLERANCE * scale, equal_nan=True):
                return True
    return False


def judge(edit: Edit) -> Verdict:
    """Plants an edit, and asks for a proof."""
    changes = changes_results(edit)
    built, _ = build(edit.program)
    begun = time.process_time()
    with plant(edit) as names:
        try:
            message = str(assert_compiled_equal(built.function, *built.args))
            outcome = "proved"
        except AssertionError as error:
            message, outcome = str(error), "refuted"
        except UnprovableError as error:
            message, outcome = str(error), "not decided"
        except Exception as error:
            message, outcome = f"{type(error).__name__}: {error}", "crashed"
    return Verdict(edit, names[0], names[1], changes, outcome, message, time.process_time() - begun)


def draw_edits(seed: int, count: int, programs: Any = tuple(PROGRAMS)) -> Iterator[Edit]:
    """Different edits, drawn in turn from the kinds: of each the program by chance, then the site."""
    rng = np.random.default_rng(seed)
    drawn = set()
    kinds = list(rng.permutation(list(KINDS)))
    number = 0
    while len(drawn) < count:
        kind = str(kinds[number % len(kinds)])
        number += 1
        candidates = [program for program in programs if count_sites(program, kind)]
        remaining = []
        for program in candidates:
            for site in range(count_sites(program, kind)):
                if Edit(program, kind, site) not in drawn:
                    remaining.append(Edit(program, kind, site))
        if not remaining:
            continue
        names = sorted({edit.program for edit in remaining})
        program = names[rng.integers(len(names))]
        sites = [edit for edit in remaining if edit.program == program]
        edit = sites[rng.integers(len(sites))]
        drawn.add(edit)
        yield edit

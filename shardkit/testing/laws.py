"""The laws of a training step. Each reads one program, which was traced, compiled and run once for all of them.

A law is a function of a Program and of the Reference on one device. It returns None where it holds, a few words where
it does not apply, and raises AssertionError where it is broken. Your own is one more such function in
`prove(laws=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit import _compat
from shardkit._jaxprs import walk
from shardkit.analysis.hlo.differences import added_by_compiler, changes, read_compiled
from shardkit.analysis.jaxpr.census import census_of
from shardkit.analysis.jaxpr.lint import lint
from shardkit.analysis.jaxpr.rules.processes import differences_of_processes
from shardkit.layout import bytes_per_device, path_name
from shardkit.precision import precision_of
from shardkit.testing._compare import constant_factor, first_gap, leaves_of, shapes_differ
from shardkit.testing._traffic import plan_traffic
from shardkit.testing.program import SCALE, Program
from shardkit.testing.single import Reference

Law = Callable[[Program, Reference], str | None]

# Where leaves are gathered and their gradients reduced: on the way in and out of a step, and behind handles.
_PLAN = ("reshard.py:", "handles.py:", "regather.py:")
# Primitives that mix elements of an array: an optimizer with one of them looks across shards.
_MIXING = (
    "reduce_",
    "dot_general",
    "sort",
    "cum",
    "top_k",
    "argmax",
    "argmin",
    "scatter",
    "gather",
    "random_",
    "threefry",
)


def same_numbers(program: Program, reference: Reference) -> str | None:
    """Loss, metrics, gradients and parameters of every step are those of one device.

    The gradients are compared themselves, because an optimizer that clips or normalises hides a wrong factor. A GradFn
    is given a scale other than 1, divided out again, because one that ignores it fails in float16 alone. A step of
    one's own that does not use `row.optimizer` records none, and the proof says so.
    """
    for index, (taken, want) in enumerate(zip(program.ran.steps, reference.steps, strict=True)):
        where = f"step {index}"
        _compare(where, "the loss", taken.metrics["loss"], want.loss, want.loss_allowed)
        for name, value in want.metrics.items():
            allowed = want.loss_allowed * max(1.0, abs(float(value)) / max(abs(float(want.loss)), 1e-30))
            _compare(where, f"the metric {name!r}", taken.metrics.get(name), value, allowed)
        if taken.grads is not None:
            _compare(where, "the gradient of", taken.grads, want.grads, want.grads_allowed)
        _compare(where, "the updated parameter", taken.params, want.params, want.params_allowed)
    recorded = all(taken.grads is not None for taken in program.ran.steps)
    return None if recorded else "the step does not use row.optimizer: gradients are not compared"


def equal_copies(program: Program, reference: Reference) -> None:
    """Devices that hold the same piece of a leaf of the state hold the same bits."""
    state = program.ran.state
    for path, x in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state)):
        pieces: dict[str, Any] = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            first = pieces.setdefault(str(shard.index), (shard.device, bits))
            if first[1] != bits:
                kind = "parameter" if getattr(path[0], "idx", 1) == 0 else "optimizer state"
                raise AssertionError(
                    f"the copies of {kind} {path_name(path[1:])} must be equal in every bit; those on devices "
                    f"{first[0].id} and {shard.device.id} differ. Look for randomness, or a reduction that one of them "
                    "leaves out."
                )


def census_is_the_closed_form(program: Program, reference: Reference) -> str | None:
    """The collectives of the plan send what its layouts say they must, byte for byte.

    They are told from those that the loss sends by where they are written: in the builder, not in the loss.
    """
    if hasattr(program.row.grad_fn, "stages"):
        return "a pipeline gathers and sums at its own ticks"
    rows = census_of(program.traced.jaxpr.jaxpr).rows
    found = sum(row.total for row in rows if row.n > 1 and row.source.startswith(_PLAN))
    wanted = plan_traffic(program.plan, program.shapes[0].params, program.mesh, program.row)
    if found != wanted:
        raise AssertionError(
            f"the plan must send {float(wanted):,.0f} bytes a device in a step, as its layouts say; the census counts "
            f"{float(found):,.0f}. Print sk.census(step, state, batch) to see which collective is missing or too many."
        )
    return None


def compiled_as_written(program: Program, reference: Reference) -> str | None:
    """The compiler sends nothing that is not written; it may merge, and drop what it finds to be sent twice.

    What it adds for an optimizer that looks across shards is allowed, because that part is the compiler's own.
    """
    bits = jnp.finfo(precision_of(program.row.precision).compute).bits
    if bits < 32 and program.mesh.devices.flat[0].platform == "cpu":
        return "the CPU compiler sends 16-bit floats as float32"
    found = read_compiled(program.traced, program.compiled)
    more = [change.line for change in changes(found.census, found.rows) if change.more]
    if more and looks_across(program):  # what the compiler adds it merges with sums that are written
        more = [line for line in more if not line.startswith("added") and " all_reduce over " not in line]
    if more:
        raise AssertionError("the compiler must send only what is written; it changed: " + "; ".join(more))
    added = added_by_compiler(found)
    return f"the optimizer looks across shards: the compiler adds {float(added):,.0f} bytes" if added else None


def lint_is_silent(program: Program, reference: Reference) -> None:
    """`lint` finds nothing in the program."""
    found = lint(program.traced)
    if found:
        raise AssertionError("the lint must find nothing; it finds: " + "; ".join(str(each) for each in found))


def processes_agree(program: Program, reference: Reference) -> None:
    """Another process traces the same program. This law traces the step once more."""
    found = list(differences_of_processes(program.step, program.shapes, {}, program.traced.jaxpr))
    if found:
        raise AssertionError(
            "all processes must run the same program; the lint finds: " + "; ".join(str(each) for each in found)
        )


def donates_the_state(program: Program, reference: Reference) -> None:
    """Every byte of the new state is written where the old one was; leaves that the step never reads are left out."""
    used = _compat.arguments_used(program.traced.jaxpr.jaxpr)
    leaves = jax.tree.leaves(program.shapes[0]._replace(key=None))  # the key goes round the compiled program
    held = sum(bytes_per_device(x) for x, read in zip(leaves, used, strict=False) if read)
    donated = program.compiled.memory_analysis().alias_size_in_bytes
    if donated != held:
        raise AssertionError(
            f"a step must write its new state in place, {held:,} bytes a device; it reuses {donated:,}. Look for a "
            "leaf that changes dtype or layout from step to step."
        )


def compiles_once(program: Program, reference: Reference) -> None:
    """A second step compiles nothing."""
    counts = [taken.compiled for taken in program.ran.steps]
    if any(counts[1:]):
        raise AssertionError(
            f"only the first step may compile; the steps compiled {counts} programs. Look for weakly typed leaves, and "
            "layouts that differ from those of the first state."
        )


LAWS: tuple[Law, ...] = (
    same_numbers,
    equal_copies,
    census_is_the_closed_form,
    compiled_as_written,
    lint_is_silent,
    processes_agree,
    donates_the_state,
    compiles_once,
)


def looks_across(program: Program) -> bool:
    """Whether the optimizer's update mixes elements, so that it must look across shards: read from its trace."""
    import optax

    optimizer = optax.with_extra_args_support(program.row.optimizer)
    params = jax.eval_shape(lambda: program.params)
    closed = jax.make_jaxpr(
        lambda params: optimizer.update(params, optimizer.init(params), params, value=jnp.float32(1))
    )(params)
    return any(
        site.name.startswith(_MIXING) and any(math.prod(getattr(v.aval, "shape", ())) > 1 for v in site.equation.invars)
        for site in walk(closed.jaxpr)
    )


def _compare(where: str, what: str, got: Any, wanted: Any, allowed: Any) -> None:
    wrong = shapes_differ(got, wanted)
    if wrong:
        raise AssertionError(
            f"{where}: {what} must be of the same tree and shapes as on one device; {wrong}. Return the gradient of "
            "every parameter as it was seen."
        )
    bounds = dict(leaves_of(allowed))
    gap = first_gap(got, wanted, lambda path, leaf, overall: bounds[path])
    if gap:
        name = "" if gap.path == "(the whole tree)" else f" {gap.path}"
        text = str(gap).replace("the reference", "one device's")
        factors = [constant_factor(x, y) for (_, x), (_, y) in zip(leaves_of(got), leaves_of(wanted), strict=True)]
        scaled = any(all(f and math.isclose(f, s, rel_tol=0.01) for f in factors) for s in (SCALE, 1 / SCALE))
        hint = f", and at `scale`, which is {SCALE:g} in a proof and multiplies the gradients alone" if scaled else ""
        raise AssertionError(
            f"{where}: {what}{name} must be as on one device; {text}. Look at what the loss sums and over which axes "
            f"it varies{hint}."
        )

"""The laws of a training step. All read one program, which is traced, compiled and run once.

A law is a function of a Program and of the Reference on one device. It returns None if it holds, a short note if it
does not apply, and raises AssertionError if it is broken. Pass your own in `prove(laws=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.jaxprs import PLAN, TOTALS, kind_of, mesh_axes, walk
from shardkit.analysis.contracts import at_least_as_wide
from shardkit.analysis.hlo.differences import bytes_added_by_compiler, changes, read_compiled
from shardkit.analysis.jaxpr.census import row_of
from shardkit.analysis.jaxpr.step import TracedStep
from shardkit.analysis.judge import lint
from shardkit.analysis.rules.processes import differences_of_processes
from shardkit.collectives.algorithms import Sent
from shardkit.meshes.layout import bytes_per_device, path_name
from shardkit.on_device.pipelines import PipelineGradFn
from shardkit.on_device.precision import precision_of
from shardkit.plans.traffic import ValueBytes, plan_traffic
from shardkit.steps.optimizer import wrap_optimizer
from shardkit.testing._compare import (
    constant_factor,
    describe_shapes,
    find_unequal_replicas,
    find_worst_gap,
    list_leaves,
)
from shardkit.testing.exact.compiled_law import compiled
from shardkit.testing.exact.law import equal_for_all_inputs
from shardkit.testing.one_device import Reference
from shardkit.testing.program import SCALE, Program

__all__ = [
    "compiled",
    "equal_for_all_inputs",
    "same_numbers",
]  # the others are in LAWS, and nobody proves one alone

Law = Callable[[Program, Reference], str | None]

# Primitives that mix elements of an array: an optimizer that uses one reads across shards.
_MIXING = ("reduce_", "dot_general", "sort", "cum", "top_k", "argm", "scatter", "gather", "random_", "threefry")


def same_numbers(program: Program, reference: Reference) -> str | None:
    """Loss, metrics, gradients, parameters and carried state of every step equal those of one device.

    Gradients are compared before the optimizer, because one that clips or normalizes hides a wrong factor. The GradFn
    is called with a scale other than 1, which is divided out again, because ignoring it is wrong only in float16. Of
    several steps in one call, the gradients and parameters of the last one are compared. A custom step that does not
    use `row.optimizer` records no gradients, and the proof says so.

    Example:
        >>> laws = [sk.testing.laws.same_numbers]  # for `prove(..., laws=laws)`
    """
    compare = partial(_compare, refused=program.refused)
    steps = program.ran.steps
    for index, (actual, expected) in enumerate(zip(steps, reference.steps, strict=True)):
        where = f"step {index}"
        compare(where, "the loss", actual.metrics["loss"], expected.loss, expected.loss_allowed)
        # The last two come from the builder, which one device does without.
        extra = actual.metrics.keys() - expected.metrics.keys() - {"loss", "finite", "loss_scale"}
        if extra:
            raise AssertionError(
                f"{where}: the metrics must be those of one device; only the mesh returns {quote(sorted(extra))}. "
                "Return the same means from the loss and from the reference."
            )
        for name, value in expected.metrics.items():
            if name == "weight" and value == 1:  # of a scalar loss, whose weight is 1 for each shard and microbatch
                continue
            compare(where, f"the metric {name!r}", actual.metrics.get(name), value, expected.metrics_allowed[name])
        if actual.grads is not None:
            compare(
                where, "the gradient of", actual.grads, expected.grads, expected.grads_allowed, hint=_OF_GRADIENT_ALONE
            )
        if actual.params is not None:
            compare(where, "the updated parameter", actual.params, expected.params, expected.params_allowed)
            compare(where, "the carried state", actual.carried, expected.carried, expected.carried_allowed)
    for step in steps:
        if step.params is not None and step.grads is None:
            return "the step does not use row.optimizer: gradients are not compared"
    return None


def equal_copies(program: Program, reference: Reference) -> None:
    """All replicas of a shard of the state and of a metric are bitwise equal.

    Example:
        >>> laws = [sk.testing.laws.equal_copies]  # for `prove(..., laws=laws)`
    """
    state = program.ran.state
    trees = {
        "parameter": state.params,
        "optimizer state": state.opt_state,
        "residual": state.residuals,
        "metric": program.ran.metrics,
    }
    for kind, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            devices = find_unequal_replicas(x)
            if devices:
                raise AssertionError(
                    f"the replicas of {kind} {path_name(path)} must be bitwise equal; those on devices {devices[0]} "
                    f"and {devices[1]} differ. Look for randomness, a reduction that one device skips, or an "
                    "assume_replicated of a value that differs."
                )


def census_is_the_closed_form(program: Program, reference: Reference) -> str | None:
    """The plan's collectives send exactly the bytes that its layouts require.

    The scope in which the step traces them tells them from the collectives of the loss.

    For example, `dp("data")` on 4 devices with one float32 parameter of 1,000 elements: its gradient is summed, which
    sends 2 * 3/4 * 4,000 = 6,000 bytes per device over ("data",), and nothing else is in the closed form.

    Example:
        >>> laws = [sk.testing.laws.census_is_the_closed_form]  # for `prove(..., laws=laws)`
    """
    if isinstance(program.row.grad_fn, PipelineGradFn):
        return "a pipeline gathers and reduces in its own ticks"
    # The plan's collectives alone: what the loss sends, such as the sums of a layer that tp splits, no layout tells.
    rows = []
    for site in walk(program.traced.jaxpr.jaxpr):
        if kind_of(site.equation) and site.within(PLAN):
            row = row_of(site)
            if row.n > 1:  # over one device nothing is sent
                rows.append(row)
    # The trace of a call has all of its steps, and the closed form is that of one.
    steps = program.row.steps or 1
    differences = _list_differences(rows, _count_plan_traffic(program), steps)
    if not differences:
        return None
    if program.carried is not None:
        return "what is gathered of carried state is not in the closed form"
    # With `prefetch=True` a stack gathers its last layer once for both passes. The layouts do not show whether the loss
    # passes it, so that either count is right.
    if not _list_differences(rows, _count_plan_traffic(program, prefetched=True), steps):
        return None
    axes, by_layouts, counted = differences[0]
    raise AssertionError(
        f"the plan must send {float(by_layouts):,.0f} bytes per device and step over {quote(axes)}, by its "
        f"layouts; the census counts {float(counted):,.0f}. Print sk.census(step, state, batch) to find the "
        "missing or extra collective."
    )


def _count_plan_traffic(program: Program, prefetched: bool = False) -> Sent:
    row = program.row
    policy = precision_of(row.precision)
    dtypes = (policy.compute, policy.reduce, policy.param)
    sizes = [jnp.dtype(dtype or jnp.float32).itemsize for dtype in dtypes]
    value_bytes = ValueBytes(*sizes)
    traffic = plan_traffic(
        program.plan,
        program.shapes[0].params,
        program.mesh,
        accumulate=row.accumulate,
        deterministic=row.deterministic,
        value_bytes=value_bytes,
        prefetched=prefetched,
    )
    return traffic.sent


def sums_keep_their_dtype(program: Program, reference: Reference) -> None:
    """Sums over devices are in the dtype that the precision names, or in a wider one.

    Losses, metrics and weights are summed in float32; gradients, by the plan, in `reduce`; sums inside the loss, such
    as the partial sums of tensor parallelism and their gradients, in `compute`. An algorithm that sends fewer bits,
    such as `compressed`, adds in float32.

    Example:
        >>> laws = [sk.testing.laws.sums_keep_their_dtype]  # for `prove(..., laws=laws)`
    """
    policy = precision_of(program.row.precision)
    for site in walk(program.traced.jaxpr.jaxpr):
        if not kind_of(site.equation) or not mesh_axes(site.equation):
            continue
        if site.within(PLAN):
            terms = "of gradients are added in reduce"
            dtype = policy.reduce
        elif site.within(TOTALS):
            terms = "of losses, metrics and weights are added in"
            dtype = jnp.float32
        else:
            terms = "of the loss itself are added in compute"
            dtype = policy.compute
        row = row_of(site)
        if row.n > 1 and row.sums and not at_least_as_wide(row.sums, dtype):
            raise AssertionError(
                f"sums over devices must keep the dtype that was asked for: those {terms} {jnp.dtype(dtype)}; "
                f"{row.kind} over {quote(row.axes)} adds in {row.sums} at {row.source}. Cast before it, or pass a "
                "precision that says so."
            )


def _list_differences(rows: list[Any], expected: Sent, steps: int) -> list[tuple[tuple[str, ...], Any, Any]]:
    """The axes over which a census of `steps` steps does not count the expected bytes, and both numbers per step."""
    differences = []
    # The same axes may be named in another order, as ("data", "model") and ("model", "data"): they are added up.
    all_axes = set(expected)
    for row in rows:
        all_axes.add(row.axes)
    for axes in sorted(all_axes):
        counted: Any = 0
        for row in rows:
            if set(row.axes) == set(axes):
                counted += row.total
        by_layouts: Any = 0
        for expected_axes, sent in expected.items():
            if set(expected_axes) == set(axes):
                by_layouts += sent
        per_step = counted / steps
        if per_step != by_layouts:
            differences.append((axes, by_layouts, per_step))
    return differences


def compiled_as_written(program: Program, reference: Reference) -> str | None:
    """The compiler adds no communication; it may merge collectives and remove repeated ones.

    What it adds for an optimizer that reads across shards is allowed, because the compiler partitions the optimizer.

    Example:
        >>> laws = [sk.testing.laws.compiled_as_written]  # for `prove(..., laws=laws)`
    """
    bits = jnp.finfo(precision_of(program.row.precision).compute).bits
    if bits < 32 and program.mesh.devices.flat[0].platform == "cpu":
        return "the CPU compiler sends 16-bit floats as float32"
    compiled = read_compiled(program.traced, program.compiled)
    additions = [change for change in changes(compiled.census, compiled.rows) if change.more]
    # What the compiler adds for an optimizer it may also merge with written sums, which are then larger.
    if additions and _reads_across_shards(program):
        additions = [change for change in additions if not change.added and change.kind != "all_reduce"]
    if additions:
        lines = [change.line for change in additions]
        raise AssertionError(f"the compiler must not add communication; it changed: {'; '.join(lines)}")
    added = bytes_added_by_compiler(compiled)
    if added:
        return f"the optimizer reads across shards: the compiler adds {float(added):,.0f} bytes"
    return None


def lint_is_silent(program: Program, reference: Reference) -> None:
    """`lint` reports nothing, but for an axis that nothing uses: a row may have one on purpose.

    Example:
        >>> laws = [sk.testing.laws.lint_is_silent]  # for `prove(..., laws=laws)`
    """
    findings = lint(program.traced, ignore=("idle-axis",))
    if findings:
        raise AssertionError(f"lint must report nothing; it reports: {'; '.join(map(str, findings))}")


def processes_agree(program: Program, reference: Reference) -> None:
    """Another process traces the same program. This law traces the step once more.

    Example:
        >>> laws = [sk.testing.laws.processes_agree]  # for `prove(..., laws=laws)`
    """
    step = TracedStep(program.step, program.shapes, program.traced)
    findings = list(differences_of_processes(step))
    if findings:
        lines = "; ".join(map(str, findings))
        raise AssertionError(f"all processes must run the same program; lint reports: {lines}")


def donates_the_state(program: Program, reference: Reference) -> None:
    """The new state is written into the buffers of the old one, except for leaves that the step never reads.

    Example:
        >>> laws = [sk.testing.laws.donates_the_state]  # for `prove(..., laws=laws)`
    """
    is_used = compat.arguments_used(program.traced.jaxpr.jaxpr)
    leaves = jax.tree.leaves(program.shapes[0]._replace(key=None))  # the key stays outside jit
    state_bytes = 0
    for leaf, used in zip(leaves, is_used, strict=False):  # the batch's arguments follow
        if used:
            state_bytes += bytes_per_device(leaf)
    # The bytes of arguments whose memory the results are written into, as the compiler has decided it: donation that it
    # cannot use it drops without an error.
    donated = program.compiled.memory_analysis().alias_size_in_bytes
    if donated != state_bytes:
        raise AssertionError(
            f"a step must write its new state in place, {state_bytes:,} bytes per device; it reuses {donated:,}. Look "
            "for a leaf whose dtype or layout changes in the step."
        )


def compiles_once(program: Program, reference: Reference) -> None:
    """A second step compiles nothing.

    Example:
        >>> laws = [sk.testing.laws.compiles_once]  # for `prove(..., laws=laws)`
    """
    counts = [step.compiled for step in program.ran.steps]
    if any(counts[1:]):
        raise AssertionError(
            f"only the first step may compile; the steps compiled {counts} programs. Look for weakly typed leaves, and "
            "layouts that differ from those of the first state."
        )


LAWS: tuple[Law, ...] = (
    same_numbers,
    equal_for_all_inputs,
    equal_copies,
    census_is_the_closed_form,
    sums_keep_their_dtype,
    compiled_as_written,
    lint_is_silent,
    processes_agree,
    donates_the_state,
    compiles_once,
)
"""The laws that `prove` checks where none are named; `compiled` is not among them, because it takes longer."""


def _reads_across_shards(program: Program) -> bool:
    """Whether the optimizer's update mixes elements of an array, and so reads across shards, by its trace."""
    optimizer = wrap_optimizer(program.row.optimizer)

    def update(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params, value=jnp.float32(1))

    params = jax.eval_shape(lambda: program.params)
    for site in walk(jax.make_jaxpr(update)(params).jaxpr):
        if not site.name.startswith(_MIXING):
            continue
        for operand in site.equation.invars:
            # A single number, as the count of steps, has no other elements to be mixed with.
            if math.prod(getattr(operand.aval, "shape", ())) > 1:
                return True
    return False


_OF_GRADIENT_ALONE = (
    " The loss is one device's, so the gradient alone may mix a device's examples, as where a GradFn clips by them, or "
    "the backward pass of a custom_vjp; clip in the optimizer, by optax.clip_by_global_norm."
)


def _compare(
    where: str,
    what: str,
    actual: Any,
    expected: Any,
    allowed: Any,
    *,
    refused: Callable[[], str] = str,
    hint: str = "",
) -> None:
    """Refuses values that differ; `refused` says why a first call would refuse the step, or "".

    `hint` is a further sentence of what to look at.
    """
    difference = describe_shapes(actual, expected)
    if difference:
        raise AssertionError(
            f"{where}: {what} must have the structure and shapes of one device's; {difference}. Return it like one "
            "device: a gradient for each parameter, the same means as metrics."
        )
    bounds = [bound for _, bound in list_leaves(allowed)]  # by the number of the leaf
    gap = find_worst_gap(actual, expected, lambda number, leaf, overall: bounds[number])
    if not gap:
        return
    # The first call of a step refuses some mistakes by name, as a loss that does not add over its examples. That says
    # more than two numbers that differ.
    reason = refused()
    if not reason:
        reason = (
            "Check the sums in the loss and the axes over which it varies, and that random numbers come from `keys`"
        )
        if _ignores_scale(actual, expected):
            reason += f", and `scale`, which is {SCALE:g} in a proof and must multiply only the gradients."
        else:
            reason += "." + hint
    text = str(gap).replace("the reference", "one device's")
    raise AssertionError(f"{where}: {what}{gap.where} must equal one device's; {text}. {reason}")


def _ignores_scale(actual: Any, expected: Any) -> bool:
    """Whether all leaves differ by the factor of a GradFn that ignores its `scale`, or applies it twice."""
    ignored = True
    applied_twice = True
    for (_, x), (_, y) in zip(list_leaves(actual), list_leaves(expected), strict=True):
        factor = constant_factor(x, y)
        if factor is None:
            return False
        ignored = ignored and math.isclose(factor, 1 / SCALE, rel_tol=0.01)
        applied_twice = applied_twice and math.isclose(factor, SCALE, rel_tol=0.01)
    return ignored or applied_twice

"""Every law on every row, from one compiled program per row; two of them on one mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardkit._arguments.checks import apart, at_least, format_sizes, mesh_in_context, replicated_in_context
from shardkit._arguments.typed import FUNCTION, Arrays, Key, Optimizer, check_fields, check_kind, kinds_of, typed
from shardkit.meshes.layout import table
from shardkit.on_device.gradient import GradFn
from shardkit.plans.plan import Plan
from shardkit.testing import laws as builtin_laws
from shardkit.testing._compare import UnequalError, check_batches, check_relative, describe_mesh
from shardkit.testing.laws import LAWS, Law, equal_copies, same_numbers
from shardkit.testing.one_device import Reference, one_device
from shardkit.testing.program import Build, Program, make_row_mesh
from shardkit.testing.rows import Row


class Verdict(NamedTuple):
    """The result of one law on one row.

    Attributes:
        row: the row's name.
        law: the law's name.
        broken: the error; "" if the law holds or does not apply.
        note: why the law does not apply, or which difference it allowed; or "".
    """

    row: str
    law: str
    broken: str
    note: str


class Proof(NamedTuple):
    """The results of all laws; `print` it: a line for each row, a column for each law."""

    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        laws = list(dict.fromkeys(verdict.law for verdict in self.verdicts))
        number_of_note: dict[str, int] = {}
        cells_of_row: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            cell = "holds"
            if verdict.broken:
                cell = "broken"
            if verdict.note:
                note = f"{verdict.law}: {verdict.note}"
                number = number_of_note.setdefault(note, len(number_of_note) + 1)
                cell = f"({number})"
            cells_of_row.setdefault(verdict.row, []).append(cell)
        lines = [("row", *laws)]
        for row, cells in cells_of_row.items():
            lines.append((row, *cells))
        notes = [f"({number}) {note}" for note, number in number_of_note.items()]
        return "\n".join([table(lines), *notes])


@typed
def prove(
    step: GradFn | Build,
    reference: GradFn | Reference,
    *,
    rows: Sequence[Row],
    params: Arrays,
    batches: Sequence[Any],
    optimizer: Optimizer | None = None,
    laws: Sequence[Law] = LAWS,
    key: Key | None = None,
    carry: Callable[[Any, Any, Any], Any] | None = None,
    carried: Any = None,
) -> Proof:
    """Proves your training step: it checks every law on every mesh, plan and option you list.

    It traces, lowers, compiles and runs each row once, for `len(batches)` steps, and all laws read this one program.
    The reference runs on one device without a mesh.

    Args:
        step: a GradFn, from `value_and_grad` of `sk` or of a pipeline. If you build the step yourself, pass a function
            from a Row to a TrainStep; it must use `row.optimizer`, which records the gradients.
        reference: the GradFn on one device, over the whole batch, with no axis bound; or a result of `one_device`.
        rows: the meshes, plans and options; `covering` returns a list with every pair of options.
        params: the parameters, a pytree of global arrays.
        batches: one global batch for each step. Pass three: some mistakes show only in later steps.
        optimizer: an optax GradientTransformation; by default `optax.adam(1e-2)`.
        laws: functions of (Program, Reference).
        key: the key of the run; by default `jax.random.key(0)`.
        carry, carried: as for `make_train_step` and its `init`, if your loss has carried state.

    Returns:
        Proof: the result of each law on each row; print it.

    Raises:
        AssertionError: a broken law. The message lists every broken law of every row.
        ValueError: no row, no batch, no law, or a relative error outside of 0 to 1.
        TypeError, ValueError: errors of building or tracing a step.

    Example:
        >>> grad_fn = sk.value_and_grad(lambda w, x, keys: sk.Mean.of((x @ w) ** 2))
        >>> rows = [sk.testing.Row({"data": 2}, sk.dp("data")), sk.testing.Row({"fsdp": 2}, sk.fsdp("fsdp"))]
        >>> data = {"params": np.ones(4, "f"), "batches": [np.ones((8, 4), "f")] * 2}
        >>> proof = sk.testing.prove(grad_fn, grad_fn, rows=rows, optimizer=optax.sgd(0.1), **data)
        >>> str(proof).count("holds")  # ten laws on each row
        20
    """
    __tracebackhide__ = True
    verdicts: list[Verdict] = []
    for row_verdicts in prove_rows(
        step,
        reference,
        rows=rows,
        params=params,
        batches=batches,
        optimizer=optimizer,
        laws=laws,
        key=key,
        carry=carry,
        carried=carried,
    ):
        verdicts += row_verdicts
    raise_broken(verdicts, laws)
    return Proof(tuple(verdicts))


def prove_rows(
    step: GradFn | Build,
    reference: GradFn | Reference,
    *,
    rows: Sequence[Row],
    params: Any,
    batches: Sequence[Any],
    optimizer: Optimizer | None,
    laws: Sequence[Law],
    key: Any,
    carry: Callable[[Any, Any, Any], Any] | None,
    carried: Any,
) -> Iterator[list[Verdict]]:
    """The verdicts of `prove` on one row after the other, each as soon as its row has run."""
    _check_rows_and_laws(rows, laws)
    check_batches("prove", batches)
    if key is None:
        key = jax.random.key(0)
    # Adam, whose step depends on every moment: with plain SGD a state that is kept wrongly would change nothing.
    if optimizer is None:
        import optax

        optimizer = optax.adam(1e-2)
    # The run on one device depends on the optimizer and on the relative error, and on nothing else of a row: rows that
    # have both alike share it.
    references: dict[Any, Reference] = {}
    names = name_rows(rows)
    for name, row in zip(names, rows, strict=True):
        row_optimizer = row.optimizer
        if row_optimizer is None:
            row_optimizer = optimizer
        relative = row.relative
        if relative is None:
            relative = choose_relative(row.precision)
        check_relative("prove", relative)
        if isinstance(reference, Reference):
            row_reference = reference
        else:
            # By identity. The rows hold their optimizers, so that no other one gets the same id.
            settings = (id(row_optimizer), relative)
            if settings not in references:
                references[settings] = one_device(
                    reference,
                    row_optimizer,
                    params,
                    batches,
                    key=key,
                    relative=relative,
                    carry=carry,
                    carried=carried,
                )
            row_reference = references[settings]
        mesh = make_row_mesh(row)
        # Apart from a mesh that the caller has set: the row's own mesh decides.
        with apart(mesh):
            row_key = replicated_in_context(key, mesh)
            program = Program.of(row, step, optimizer, params, batches, row_key, mesh, carry, carried)
            verdicts = [_apply_law(name, law, program, row_reference) for law in laws]
        yield verdicts


def name_rows(rows: Sequence[Row]) -> list[str]:
    """The rows' names; rows with equal names are numbered."""
    texts = list(map(str, rows))
    names = []
    for number, text in enumerate(texts):
        name = text
        if texts.count(text) > 1:
            name = f"{text} ({number + 1})"
        names.append(name)
    return names


def raise_broken(verdicts: Sequence[Verdict], laws: Sequence[Law]) -> None:
    """Raises an error that lists the broken laws, and says how to run the first of them alone."""
    __tracebackhide__ = True
    broken = [verdict for verdict in verdicts if verdict.broken]
    if not broken:
        return
    differences = [f"{verdict.row}, {verdict.law}: {verdict.broken}" for verdict in broken]
    message = f"prove: {len(broken)} of {len(verdicts)} do not hold:\n- " + "\n- ".join(differences)
    if len(verdicts) > 1:
        # The verdicts stand row by row, one for each law.
        row, law = divmod(verdicts.index(broken[0]), len(laws))
        name = broken[0].law
        # By identity, because a law of the user's may have the name of one of the kit's.
        if laws[law] is getattr(builtin_laws, name, None):
            name = f"sk.testing.laws.{name}"
        message += f"\nTo run the first of these alone, pass rows=[rows[{row}]] and laws=[{name}]."
    raise UnequalError(message, differences)


def _check_rows_and_laws(rows: Sequence[Row], laws: Sequence[Law]) -> None:
    for name, values in (("row", rows), ("law", laws)):
        if not values:
            raise ValueError(f"prove: at least one {name} is needed; got none. Pass one or more.")
    for row in rows:
        check_kind("prove", "rows", row, kinds_of(Row))
        check_fields(row)
    for law in laws:
        check_kind("prove", "laws", law, (FUNCTION,))


@typed
def assert_same_training(
    grad_fn: GradFn,
    reference_grad_fn: GradFn,
    optimizer: Optimizer,
    *,
    mesh: Mesh | None = None,
    plan: Plan,
    params: Arrays,
    batches: Sequence[Any],
    key: Key | None = None,
    accumulate: int = 1,
    relative: float = 1e-5,
    steps: int | None = None,
    carry: Callable[[Any, Any, Any], Any] | None = None,
    carried: Any = None,
) -> None:
    """Proves a training step: it gives the loss, gradients and parameters of one device, step by step.

    Runs `make_train_step(grad_fn, ...)` and, without a mesh, `reference_grad_fn` with the same optimizer for
    `len(batches)` steps. It compares gradients before the optimizer, because an optimizer that clips or normalizes
    hides a wrong factor. For the tolerance it runs the same training on one device with gradients perturbed by
    `relative` (see `one_device`). Replicas of a parameter must be bitwise equal. `prove` checks these two laws and
    more, on several meshes and plans.

    Args:
        grad_fn: the computation of each device.
        reference_grad_fn: the computation on one device, over the whole batch, with no axis bound.
        optimizer: an optax GradientTransformation.
        mesh: the mesh; by default the mesh of `jax.set_mesh`.
        plan: how the step uses the mesh axes.
        params: the parameters, a pytree of global arrays.
        batches: one global batch for each step, at least one.
        key: the key of the run. Both sides derive one key for each example from it. By default `jax.random.key(0)`.
        accumulate: microbatches per step on the mesh.
        relative: the error of a gradient, relative to the largest magnitude in the leaf. The default is for float32.
        steps: steps per call, as for `make_train_step`: the batches of a call are stacked. It then compares all losses,
            and the gradients and parameters of the last step of each call.
        carry, carried: as for `make_train_step` and its `init`, if your loss has carried state.

    Raises:
        AssertionError: a difference. The message names mesh, plan, step and leaf, the difference and the tolerance.
        ValueError: no batch, a relative error that is not between 0 and 1, or steps that do not divide the batches.
        TypeError, ValueError: errors of building or tracing the step.

    Example:
        >>> grad_fn = sk.value_and_grad(lambda w, x, keys: sk.Mean.of((x @ w) ** 2))
        >>> sk.testing.assert_same_training(
        ...     grad_fn, grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.fsdp("data", min_size=1),
        ...     params=np.ones(4, "f"), batches=[np.ones((8, 4), "f")],
        ... )
    """
    __tracebackhide__ = True
    mesh = mesh_in_context("assert_same_training", mesh)
    at_least("assert_same_training", 1, accumulate=accumulate, steps=steps)
    check_batches("assert_same_training", batches)
    check_relative("assert_same_training", relative)
    if key is None:
        key = jax.random.key(0)
    reference = one_device(
        reference_grad_fn, optimizer, params, batches, key=key, relative=relative, carry=carry, carried=carried
    )
    row = Row(dict(mesh.shape), plan, accumulate=accumulate, steps=steps)
    program = Program.of(row, grad_fn, optimizer, params, batches, key, mesh=mesh, carry=carry, carried=carried)
    for law in (same_numbers, equal_copies):
        try:
            law(program, reference)
        except AssertionError as error:
            raise AssertionError(f"assert_same_training: {describe_mesh(mesh)} with plan {plan}, {error}") from None


def choose_relative(precision: Any) -> float:
    """The relative error of a gradient from another order of summation, for a precision as of `make_train_step`."""
    import jax.numpy as jnp

    from shardkit.on_device.precision import precision_of

    # float32 has an eps of 1.2e-7, so that 1e-5 holds; bfloat16 has 0.0078, of which eight are 0.06.
    eps = float(jnp.finfo(precision_of(precision).compute).eps)
    return max(1e-5, 8 * eps)


def _apply_law(row: str, law: Law, program: Program, reference: Reference) -> Verdict:
    """The verdict of one law on the program of a row: broken if it raises, with a note if it returns one."""
    name = getattr(law, "__name__", str(law))
    try:
        note = law(program, reference) or ""
    except AssertionError as error:
        where = f"on mesh {format_sizes(program.mesh.shape.items())} with plan {program.plan}"
        return Verdict(row, name, broken=f"{where}, {error}", note="")
    return Verdict(row, name, broken="", note=note)

"""One model under every plan that fits a mesh, beside one device, jit's partitioner and steps as tutorials write them.

All steps start from the same parameters, take the same global batch and update with AdamW; their losses, parameters and
moments must agree with one device's. Each is compiled once, and all are timed in the same rounds: a table is one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import shardkit as sk
from shardkit._check import at_least, quoted, sized
from shardkit.analysis.hlo.differences import Compiled, read_compiled
from shardkit.analysis.jaxpr.census import traceable
from shardkit.bench.measure import Case, disagreement, measure
from shardkit.bench.plan_cases import MICROBATCHES, Workload, cases_of
from shardkit.bench.records import Record
from shardkit.layout import table

MIB = 2**20
_OTHER_ORDER = 10  # results may differ by so many times what the order of one device's own sums changes


def strategies(
    work: Workload,
    *,
    mesh: Mesh,
    only: Sequence[str] = (),
    calls: int = 1,
    rounds: int = 100,
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
    progress: Callable[[str], None] = lambda name: None,
) -> list[Record]:
    """Measures one model under every plan that fits the mesh; the first record is of one device.

    Each device's results must agree with one device's within ten times what the order of its own sums changes: the same
    step on the same examples in the reverse order, and at least eps (4 + sqrt(n)) for n elements of the batch.

    Args:
        work: what every case computes.
        mesh: of axes "data" and "model", or one of them.
        only: names of cases to measure beside one device; none means all.
        calls: steps of each case in each round.
        rounds: how often each case takes its turn.
        compiler_options: of every program, beside one thread for each simulated device.
        progress: called with the name of each case before it is compiled.

    Returns:
        The records of `measure`, with "held_bytes" and "temp_bytes" of one device, and the bytes that it sends in a
        step as written ("written_bytes", 0 for what the partitioner writes) and as compiled ("wire_bytes").

    Raises:
        ValueError: other axes, examples that do not divide, no case of such a name, processes beside this one.

    Example:
        >>> config = sk.models.transformer.Config(vocabulary=16, layers=1, dim=16, heads=2, hidden=32)
        >>> work = sk.bench.reference(config, examples=16, tokens=2)
        >>> records = sk.bench.strategies(work, mesh=sk.make_mesh(data=8), only=["dp"], calls=1, rounds=1)
        >>> [(record["case"], record["wrong"]) for record in records]
        [('one device', 0), ('dp', 0)]
    """
    at_least("strategies", 1, calls=calls, rounds=rounds)
    _check(work, mesh)
    cases = cases_of(work, mesh)
    names = list(cases)
    for name in only:
        if name not in names:
            raise ValueError(
                f"strategies: --only must name cases that fit the mesh; got {name!r}; these fit: {quoted(names[1:])}. "
                "Pass some of them."
            )
    programs, fields = [], {}
    for name in [name for name in names if not only or name in (names[0], *only)]:
        progress(name)
        program, found = _program(cases[name](), compiler_options)
        programs.append(program)
        fields[name] = {
            "held_bytes": found.memory.held,
            "temp_bytes": found.memory.temp,
            "written_bytes": float(found.census.sent()),
            "wire_bytes": float(sum(row.total for row in found.rows)),
        }
    how: dict[str, Any] = {"mode": "dispatched", "calls": calls, "rounds": rounds, "fields": fields, "refuse": False}
    row = sized(mesh.shape.items())
    return measure("strategies", row, programs, tolerance=_tolerance(programs[0]), **how)


def text(records: Sequence[Record]) -> str:
    """The records as a table: speeds as multiples of one device's, CPU times as fractions, MiB of one device."""
    lines = [("case", "tokens/s", "CPU time", "held MiB", "temp MiB", "sent, written", "sent, compiled", "difference")]
    for r in records:
        written = f"{r['written_bytes'] / MIB:.2f}" if r["written_bytes"] else ""
        sizes = [f"{r[f'{name}_bytes'] / MIB:.2f}" for name in ("held", "temp")]
        times = [f"{1 / r['wall_ratio']:.2f}", f"{r['cpu_ratio']:.3f}"]
        wrong = f", {r['wrong']} WRONG" * bool(r["wrong"])
        sent = f"{r['wire_bytes'] / MIB:.2f}" if r["wire_bytes"] else ""
        lines.append((r["case"], *times, *sizes, written, sent, f"{r['disagreement_relative_max']:.0e}{wrong}"))
    first = records[0]
    return "\n".join(
        [
            table(lines),
            f"mesh {first['row']}; {first['calls']} steps x {first['rounds']} rounds; tokens/s and CPU time are to one "
            f"device's of {first['wall_us_median'] / 1e3:.1f} ms and {first['cpu_us_median'] / 1e3:.1f} ms a step; "
            f"results agree within {first['tolerance_relative']:.1e}",
        ]
    )


def _check(work: Workload, mesh: Mesh) -> None:
    if not set(mesh.axis_names) <= {"data", "model"}:
        raise ValueError(
            "strategies: the mesh must have the axes 'data' and 'model', or one of them; got "
            f"{sized(mesh.shape.items())}. Write for example data=4 model=2; pipelines run over 'model'."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"strategies: all cases must run in one process, beside one device; got {jax.process_count()} processes. "
            "Run the command without shardkit launch."
        )
    counts = {np.shape(x)[0] if np.ndim(x) else 0 for x in jax.tree.leaves(work.batch)}
    ways = mesh.size * MICROBATCHES
    if len(counts) != 1 or not max(counts) or max(counts) % ways:
        raise ValueError(
            "strategies: dim 0 of every array of the batch must be the example, divisible by devices x microbatches; "
            f"got {', '.join(map(str, sorted(counts)))} for {mesh.size} x {MICROBATCHES}. Pass {ways} examples."
        )


def _program(case: Case, options: Mapping[str, Any]) -> tuple[Case, Compiled]:
    """The case compiled, once for reading and timing, with one thread for each device."""
    traced = traceable(case.step).trace(case.carry, *case.args)
    program = traced.lower().compile(compiler_options={**_one_thread(), **options})
    found = read_compiled(traced, program, (case.carry, *case.args))
    carry, args = case.carry, case.args
    if isinstance(carry, sk.TrainState):  # the key of a step stays outside jit
        carry, args = carry._replace(key=None), (carry.key, *args)
    return Case(case.name, program, carry, args, _results), found


def _one_thread() -> dict[str, bool]:
    """Options of the compiler: a simulated device is one thread, because how a pool divides work is noise."""
    return {"xla_cpu_multi_thread_eigen": False} if jax.default_backend() == "cpu" else {}


def _results(carry: Any, value: Any) -> Any:
    """What must agree: parameters, loss, and the first moments, which show gradients as updated parameters do not."""
    params, opt_state = (carry.params, carry.opt_state) if isinstance(carry, sk.TrainState) else carry
    return params, opt_state[0].mu, value["loss"]


def _tolerance(one: Case) -> float:
    """Of results relative to each leaf's largest element, from what the order of sums changes on one device."""
    [batch] = one.args
    place = jax.tree.map(lambda x: x.sharding, one.carry)
    found = []
    for each in (batch, jax.tree.map(lambda x: jax.device_put(jnp.flip(x, 0), x.sharding), batch)):
        carry = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=place)(one.carry)
        found.append(jax.tree.map(np.asarray, _results(*one.step(carry, each))))
    coarsest = max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(found[0]))
    least = coarsest * (4 + max(x.size for x in jax.tree.leaves(batch)) ** 0.5)
    return float(max(least, _OTHER_ORDER * disagreement(found[1], found[0])[0]))

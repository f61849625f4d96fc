"""One model under every plan that fits a mesh, measured beside one device and jit's partitioner.

The steps are those of `workload.py`; their losses, parameters and moments must agree with one device's. Each is
compiled once, and all are timed in the same rounds: a table is one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import shardkit as sk
from shardkit._arguments.checks import at_least, format_sizes, quote
from shardkit.analysis.hlo.differences import read_compiled
from shardkit.analysis.jaxpr.census import traceable
from shardkit.bench.measure import Case, difference, make_copier, measure
from shardkit.bench.records import Record
from shardkit.bench.workload import MICROBATCHES, OptimizerName, Workload, cases_of
from shardkit.meshes.layout import table

MIB = 2**20
_OTHER_ORDER = 10  # results may differ by so many times what the order of one device's own sums changes


def _say_nothing(name: str) -> None: ...


def strategies(
    work: Workload,
    *,
    mesh: Mesh,
    optimizer: OptimizerName = "adamw",
    only: Sequence[str] = (),
    beside: Mapping[str, Callable[[], Case]] = MappingProxyType({}),
    calls: int = 1,
    rounds: int = 100,
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
    progress: Callable[[str], None] = _say_nothing,
) -> list[Record]:
    """Measures one model under every plan that fits the mesh; the first record belongs to one device.

    The results of each plan must equal the results of one device. The tolerance is ten times the effect of another
    order of sums on one device, measured with the examples reversed, and at least eps (4 + sqrt(n)) for n elements of
    the batch.

    Args:
        work: the computation of every case.
        mesh: of axes "data" and "model", or one of them.
        optimizer: "muon" is `sk.muon` under a plan, and `optax.contrib.muon` on one device and under the partitioner.
        only: names of cases to measure beside one device; empty: all.
        beside: further steps by name, as functions that build them. A step takes the same parameters, state and batch
            as under a plan, with `(params, opt_state)` as its carry and a value with an entry "loss".
        calls: steps of each case in each round.
        rounds: the number of rounds; each case has one turn in a round.
        compiler_options: options for every program, beside one thread for each simulated device.
        progress: a function of the name of a case, called before it is compiled.

    Returns:
        The records of `measure`, with "held_bytes" and "temp_bytes" of one device, and the bytes that it sends in a
            step as written ("written_bytes", 0 for collectives of the partitioner) and as compiled ("wire_bytes").

    Raises:
        ValueError: other axes, examples that do not divide, an unknown case, or more than one process.

    Example:
        >>> def loss_fn(params, batch, keys):
        ...     return jnp.mean((batch["x"] @ params["w"]) ** 2)
        >>> work = sk.bench.Workload(loss_fn, {"w": jnp.ones((16, 16))}, {"x": jnp.ones((16, 16))})
        >>> records = sk.bench.strategies(work, mesh=sk.make_mesh(data=8), only=["dp"], calls=1, rounds=1)
        >>> [(record["case"], record["wrong"]) for record in records]
        [('one device', 0), ('dp', 0)]
    """
    at_least("strategies", 1, calls=calls, rounds=rounds)
    _check(work, mesh)
    cases = {**cases_of(work, mesh, optimizer), **beside}
    programs = []
    for name in _choose_names(list(cases), only):
        progress(name)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes an integer count
            programs.append(_compile(cases[name](), compiler_options))
    return measure(
        "strategies",
        format_sizes(mesh.shape.items()),
        programs,
        mode="dispatched",
        calls=calls,
        rounds=rounds,
        tolerance=_find_tolerance(programs[0]),
        refuse=False,
    )


def _choose_names(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """The cases to measure: all, or those in `only`, and in either case one device, to which all ratios are."""
    one_device, *plans = names
    for name in only:
        if name not in names:
            raise ValueError(
                f"strategies: --only must name cases that fit the mesh; got {name!r}; these fit: {quote(plans)}. "
                "Pass some of them."
            )
    if only:
        plans = [name for name in plans if name in only]
    return [one_device, *plans]


def text(records: Sequence[Record]) -> str:
    """The records as a table: speeds as multiples of one device's, CPU times as fractions, MiB of one device."""
    lines = [("case", "tokens/s", "CPU time", "held MiB", "temp MiB", "sent, written", "sent, compiled", "difference")]
    for record in records:
        difference_text = f"{record['disagreement_relative_max']:.0e}"
        if record["wrong"]:
            difference_text += f", {record['wrong']} WRONG"
        line = (
            record["case"],
            f"{1 / record['wall_ratio']:.2f}",
            f"{record['cpu_ratio']:.3f}",
            _in_mib(record["held_bytes"]),
            _in_mib(record["temp_bytes"]),
            _sent_mib(record["written_bytes"]),
            _sent_mib(record["wire_bytes"]),
            difference_text,
        )
        lines.append(line)
    first = records[0]
    caption = (
        f"mesh {first['row']}; {first['calls']} steps x {first['rounds']} rounds; tokens/s and CPU time are to one "
        f"device's of {first['wall_us_median'] / 1e3:.1f} ms and {first['cpu_us_median'] / 1e3:.1f} ms a step; "
        f"results agree within {first['tolerance_relative']:.1e}"
    )
    return "\n".join([table(lines), caption])


def _in_mib(size: float) -> str:
    return f"{size / MIB:.2f}"


def _sent_mib(size: float) -> str:
    """Nothing, where nothing is sent."""
    if not size:
        return ""
    return _in_mib(size)


def _check(work: Workload, mesh: Mesh) -> None:
    if not set(mesh.axis_names) <= {"data", "model"}:
        raise ValueError(
            "strategies: the mesh must have the axes 'data' and 'model', or one of them; got "
            f"{format_sizes(mesh.shape.items())}. Write for example data=4 model=2; pipelines run over 'model'."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"strategies: all cases must run in one process, beside one device; got {jax.process_count()} processes. "
            "Run the command without shardkit launch."
        )
    counts = set()
    for x in jax.tree.leaves(work.batch):
        # A scalar has no examples: 0 is refused below, with its count.
        if np.ndim(x):
            counts.add(np.shape(x)[0])
        else:
            counts.add(0)
    parts = mesh.size * MICROBATCHES
    examples = max(counts, default=0)
    if len(counts) != 1 or not examples or examples % parts:
        raise ValueError(
            "strategies: dim 0 of every array of the batch must be the example, divisible by devices x microbatches; "
            f"got {', '.join(map(str, sorted(counts)))} for {mesh.size} x {MICROBATCHES}. Pass {parts} examples."
        )


def _compile(case: Case, options: Mapping[str, Any]) -> Case:
    """The case compiled, once for reading and timing, with one thread for each device."""
    traced = traceable(case.step).trace(case.carry, *case.args)
    # A simulated device is one thread, because how a pool divides work is noise.
    compiler_options: dict[str, Any] = {}
    if jax.default_backend() == "cpu":
        compiler_options["xla_cpu_multi_thread_eigen"] = False
    compiler_options |= options
    program = traced.lower().compile(compiler_options=compiler_options)
    compiled = read_compiled(traced, program, (case.carry, *case.args))
    fields = {
        "held_bytes": compiled.memory.held,
        "temp_bytes": compiled.memory.temp,
        "written_bytes": float(compiled.census.sent()),
        "wire_bytes": float(sum(row.total for row in compiled.rows)),
    }
    # What is timed is the compiled program itself, without the Python of a step around it.
    carry = case.carry
    args = case.args
    if isinstance(carry, sk.TrainState):  # the key of a step stays outside jit
        args = (carry.key, *args)
        carry = carry._replace(key=None)
    return Case(case.name, program, carry, args, checked=_select_results, fields=fields)


def _select_results(carry: Any, value: Any) -> Any:
    """The results that must agree: parameters, loss, and first moments, because moments show gradients directly."""
    if isinstance(carry, sk.TrainState):
        params = carry.params
        opt_state = carry.opt_state
    else:
        params, opt_state = carry
    moments = [mu for _, mu in optax.tree_utils.tree_get_all_with_path(opt_state, "mu")]
    return params, moments, value["loss"]


def _find_tolerance(one_device: Case) -> float:
    """Of results relative to each leaf's largest element, from what the order of sums changes on one device."""
    [batch] = one_device.args
    copy = make_copier(one_device.carry)

    def run(batch: Any) -> Any:
        carry, value = one_device.step(copy(one_device.carry), batch)
        return jax.tree.map(np.asarray, _select_results(carry, value))

    def reverse(x: jax.Array) -> jax.Array:
        return jax.device_put(jnp.flip(x, 0), x.sharding)

    # The same examples in another order: each sum over the batch is rounded otherwise, and nothing else changes.
    results = run(batch)
    changed, _, _ = difference(run(jax.tree.map(reverse, batch)), results, 0.0)
    result_dtypes = {x.dtype for x in jax.tree.leaves(results)}
    epsilon = max(float(jnp.finfo(dtype).eps) for dtype in result_dtypes)
    # The roundings of a sum of n terms have random signs, and grow as sqrt(n).
    elements = max(x.size for x in jax.tree.leaves(batch))
    least = epsilon * (4 + elements**0.5)
    return float(max(least, _OTHER_ORDER * changed))

"""One model under every plan that fits a mesh, beside one device and jit's partitioner.

All steps start from the same parameters, take the same global batch and update with AdamW, or Muon; their losses,
parameters and moments must agree with one device's. Each is compiled once, and all are timed in the same rounds: a
table is one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._arguments.checks import at_least, one_of, quoted, sized
from shardkit.analysis.hlo.differences import Compiled, read_compiled
from shardkit.analysis.jaxpr.census import traceable
from shardkit.bench.measure import Case, difference, measure
from shardkit.bench.records import Record
from shardkit.meshes.layout import table
from shardkit.models import transformer
from shardkit.models.transformer import ONE_DEVICE, Axes
from shardkit.plans.splits import map_layouts

Loss = Callable[[Any, Any, Any], Any]
OptimizerName = Literal["adamw", "muon"]
LEARNING_RATE = 1e-5  # small: AdamW makes whole steps of rounding where a gradient is nearly zero
LAYERS = ("layers",)
MICROBATCHES = 2
MIB = 2**20
_OTHER_ORDER = 10  # results may differ by so many times what the order of one device's own sums changes


class Workload(NamedTuple):
    """What every case computes.

    Attributes:
        loss_fn: `loss_fn(params, batch, keys)` for one device; it is given None for keys.
        params: its parameters, of one device.
        batch: the global batch; dim 0 of every array is the example.
        rules: specs of the parameters over "model", which the partitioner completes.
        config: of the reference transformer, which has its own layers over "model"; None for another model.
    """

    loss_fn: Loss
    params: Any
    batch: Any
    rules: Any = None
    config: transformer.Config | None = None


class PlanCase(NamedTuple):
    """A plan, and how the reference transformer communicates under it."""

    held: str
    plan: sk.Plan
    axes: Axes = ONE_DEVICE
    by_layer: bool = False
    jit: bool = True  # whether jit's step, without constraints, is another one than that of the case before
    manual: Any = None


def reference(config: transformer.Config, examples: int, tokens: int) -> Workload:
    """The reference transformer, with random tokens.

    Args:
        config: the sizes.
        examples: of the global batch.
        tokens: of each example.

    Example:
        >>> model = sk.bench.reference(sk.models.transformer.Config(layers=1, dim=16, heads=2), 8, 4)
        >>> model.batch["tokens"].shape
        (8, 4)
    """
    keys, shape = jax.random.split(jax.random.key(1)), (examples, tokens)
    pair = zip(("tokens", "targets"), keys, strict=True)
    batch = {name: jax.random.randint(key, shape, 0, config.vocabulary) for name, key in pair}
    return Workload(transformer.loss_fn(config), transformer.init(jax.random.key(0), config), batch, None, config)


def ways(sizes: Mapping[str, int], work: Workload) -> list[PlanCase]:
    """The plans that fit a mesh of axes "data" and "model", in the order of the table."""
    every = tuple(axis for axis in ("data", "model") if axis in sizes)
    model, data, config = sizes.get("model", 1), sizes.get("data", 1), work.config
    found = [PlanCase("dp", sk.dp(every)), PlanCase("zero1", sk.zero1(every)), PlanCase("fsdp", sk.fsdp(every))]
    if config is not None:
        found += [PlanCase("fsdp, by layer", sk.fsdp(every, layerwise=LAYERS), by_layer=True, jit=False)]
    if model > 1 and work.rules is not None and data > 1:
        found += [PlanCase("fsdp x rules", sk.fsdp("data"), manual="data")]
    if config is not None and _has_columns(sizes, config):
        rules = transformer.tensor_rules(config, "model", model)
        plain, split = Axes("model", impl="gather"), Axes("model", sequence=True, impl="gather")
        tp, sequence = sk.tp("model", rules), sk.tp("model", rules, sequence=True)
        if data == 1:
            return [*found, PlanCase("tp", tp, plain), PlanCase("tp, sequence", sequence, split, jit=False)]
        fsdp = sk.fsdp("data", layerwise=LAYERS)
        found += [
            PlanCase("dp x tp", sk.chain(sk.dp("data"), tp), plain),
            PlanCase("fsdp x tp", sk.chain(fsdp, tp), plain, by_layer=True),
            PlanCase("fsdp x tp, sequence", sk.chain(fsdp, sequence), split, by_layer=True, jit=False),
        ]
    return found


def left_out(sizes: Mapping[str, int], work: Workload) -> list[str]:
    """Why some cases do not fit the mesh, in a sentence each."""
    model, config, reasons = sizes.get("model", 1), work.config, []
    if model == 1:
        reasons.append("tensor parallelism and pipelines, which need an axis 'model'")
    elif config is None:
        reasons.append("pipelines, which need the reference transformer")
        if work.rules is None or sizes.get("data", 1) == 1:
            reasons.append("plans over 'model', which need rules as a fourth value, and an axis 'data'")
    else:
        if not _has_columns(sizes, config):
            reasons.append(f"tensor parallelism: {config.heads} heads of width {config.width} over model={model}")
        if not has_stages(sizes, work):
            reasons.append(f"pipelines: {config.layers} layers over model={model}")
    return reasons


def _has_columns(sizes: Mapping[str, int], config: transformer.Config) -> bool:
    model = sizes.get("model", 1)
    return model > 1 and not (config.heads % model or config.width % model or config.vocabulary % model)


def has_stages(sizes: Mapping[str, int], work: Workload) -> bool:
    """Whether "model" can be the stages of a pipeline."""
    model = sizes.get("model", 1)
    return work.config is not None and model > 1 and work.config.layers % model == 0


def cases_of(work: Workload, mesh: Mesh, optimizer: OptimizerName = "adamw") -> dict[str, Callable[[], Case]]:
    """Every case that fits, by name, one device first. A case is built when it is called; its step is not compiled."""
    each = Cases(work, mesh, optimizer)
    found: dict[str, Callable[[], Case]] = {"one device": each.one_device}
    for way in ways(mesh.shape, work):
        if way.jit:
            found[f"jit: {way.held}"] = partial(each.jit, "jit", way)
        found[way.held] = partial(each.of, way)
    for plan_of in (sk.dp, sk.zero2, sk.fsdp):  # ZeRO-2 is ZeRO-1 where there is one microbatch
        name = f"{plan_of.__name__}, {MICROBATCHES} microbatches"
        found[name] = partial(each.in_microbatches, name, plan_of)
    if has_stages(mesh.shape, work):
        found |= {"GPipe": partial(each.pipeline, "GPipe"), "1F1B": partial(each.pipeline, "1F1B")}
    return found


class Cases:
    """Builds cases over one mesh."""

    def __init__(self, work: Workload, mesh: Mesh, optimizer: OptimizerName = "adamw"):
        one_of("strategies", "optimizer", optimizer, get_args(OptimizerName))
        self.work, self.mesh, self.name = work, mesh, optimizer
        self.every = tuple(mesh.axis_names)
        self._built: dict[str, Case] = {}

    def optimizer(self, plan: sk.Plan | None = None) -> optax.GradientTransformation:
        """The optimizer of a plan's own step, or of one device and of jit's."""
        if self.name == "adamw":
            return optax.adamw(LEARNING_RATE)
        dims = None if self.work.config is None else transformer.muon_dims(self.work.config)
        if plan is None:
            return optax.contrib.muon(LEARNING_RATE, muon_weight_dimension_numbers=dims)
        return sk.muon(LEARNING_RATE, mesh=self.mesh, plan=plan, muon_weight_dimension_numbers=dims)

    def one_device(self) -> Case:
        """The whole step on the first device."""
        here = NamedSharding(Mesh(self.mesh.devices.ravel()[:1], ("one",)), P())
        carry = jax.device_put((self.work.params, self.optimizer().init(self.work.params)), here)
        update = jax.tree.map(lambda _: here, self.work.params)
        batch = jax.device_put(self.work.batch, here)
        return partitioned("one device", self.work.loss_fn, self.optimizer(), carry, batch, update)

    def of(self, way: PlanCase) -> Case:
        """A plan's own step."""
        config = self.work.config
        loss_fn = self.work.loss_fn if config is None else transformer.loss_fn(config, way.axes)
        return self.built(way.held, sk.value_and_grad(loss_fn), way.plan, manual=way.manual)

    def jit(self, kind: str, way: PlanCase, loss_fn: Loss | None = None) -> Case:
        """jit's step, held as a plan holds it; of the loss for one device, or of one with constraints."""
        case = self.of(way)
        carry, batch = held(case)
        layouts = way.plan.layouts(self.work.params, self.mesh)
        update = map_layouts(lambda layout: NamedSharding(self.mesh, layout.update), layouts)
        if way.manual:
            update = jax.tree.map(lambda x: x.sharding, carry[0])
        name = f"{kind}: {way.held}"
        return partitioned(name, loss_fn or self.work.loss_fn, self.optimizer(), carry, batch, update)

    def in_microbatches(self, name: str, plan_of: Callable[..., sk.Plan]) -> Case:
        """A plan's step in microbatches."""
        return self.built(name, sk.value_and_grad(self.work.loss_fn), plan_of(self.every), accumulate=MICROBATCHES)

    def pipeline(self, name: str) -> Case:
        """A pipeline over "model" by a schedule; the data axis splits examples."""
        config = self.work.config
        assert config is not None, "only the reference transformer has pieces"
        make = {"GPipe": sk.schedules.gpipe, "1F1B": sk.schedules.one_f_one_b}[name]
        plan = sk.chain(sk.dp("data"), sk.pp("model")) if "data" in self.every else sk.pp("model")
        axes = Axes(stage="model")
        pipe = sk.pipeline(make(self.mesh.shape["model"], self.microbatches), "model")
        grad_fn = pipe.value_and_grad(*transformer.pieces(config, axes), mode="branch", layer_numbers=True)
        return self.built(name, transformer.in_order(grad_fn, axes), plan)

    @property
    def microbatches(self) -> int:
        """Of the pipelines: two for a stage, if there are so many examples."""
        examples = len(self.work.batch["tokens"]) // self.mesh.shape.get("data", 1)
        return max(m for m in range(1, 2 * self.mesh.shape["model"] + 1) if examples % m == 0)

    def built(self, name: str, grad_fn: Any, plan: sk.Plan, *, accumulate: int = 1, manual: Any = None) -> Case:
        """A step of `make_train_step`, and its state."""
        if name not in self._built:
            params, mesh = self.work.params, self.mesh
            how: dict[str, Any] = {"mesh": mesh, "plan": plan, "accumulate": accumulate}
            if manual is not None:
                how["manual"] = manual
                params = sk.shard(params, mesh, self.work.rules)
            init, step = sk.make_train_step(grad_fn, self.optimizer(plan), **how)
            batch = jax.device_put(self.work.batch, NamedSharding(mesh, plan.batch_spec(mesh)))
            self._built[name] = Case(name, step, init(params, jax.random.key(2)), (batch,))
        return self._built[name]


def held(case: Case) -> tuple[Any, Any]:
    """Parameters with the optimizer's state, and the batch, as a plan lays them out."""
    return (case.carry.params, case.carry.opt_state), case.args[0]


def updated(optimizer: Any, carry: Any, gradients: Any, loss: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    """The carry after a step of the optimizer, as every step that is not of `make_train_step` ends."""
    params, opt_state = carry
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def mean(loss_fn: Loss) -> Callable[[Any, Any], jax.Array]:
    """A loss for `value_and_grad` as a scalar function of parameters and batch, without keys."""

    def scalar(params: Any, batch: Any) -> jax.Array:
        out = loss_fn(params, batch, None)
        out = out[0] if isinstance(out, tuple) and not isinstance(out, sk.Mean) else out
        return out.total / out.weight if isinstance(out, sk.Mean) else out

    return scalar


def partitioned(name: str, loss_fn: Loss, optimizer: Any, carry: Any, batch: Any, update: Any) -> Case:
    """The step on global arrays, as one writes it for one device, with the layouts of its arguments and results.

    `carry` (parameters and optimizer state) and `batch` are in the layouts to hold; `update` are those of gradients.
    """

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(mean(loss_fn))(carry[0], batch)
        return updated(optimizer, carry, jax.lax.with_sharding_constraint(gradients, update), loss)

    held = jax.tree.map(lambda x: x.sharding, carry)
    given = jax.tree.map(lambda x: x.sharding, batch)
    whole = NamedSharding(jax.tree.leaves(held)[0].mesh, P())
    jitted = jax.jit(step, in_shardings=(held, given), out_shardings=(held, whole), donate_argnums=0)
    return Case(name, jitted, carry, (batch,))


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
    progress: Callable[[str], None] = lambda name: None,
) -> list[Record]:
    """Measures one model under every plan that fits the mesh; the first record is of one device.

    Each device's results must agree with one device's within ten times what the order of its own sums changes: the same
    step on the same examples in the reverse order, and at least eps (4 + sqrt(n)) for n elements of the batch.

    Args:
        work: what every case computes.
        mesh: of axes "data" and "model", or one of them.
        optimizer: "muon" is `sk.muon` under a plan, and `optax.contrib.muon` on one device and under the partitioner.
        only: names of cases to measure beside one device; none means all.
        beside: further steps by name, each built when it is called: of the same parameters, state and batch as those of
            a plan, with `(params, opt_state)` as their carry and a value with an entry "loss".
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
    cases = {**cases_of(work, mesh, optimizer), **beside}
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
    # A simulated device is one thread, because how a pool divides work is noise.
    alone = {"xla_cpu_multi_thread_eigen": False} if jax.default_backend() == "cpu" else {}
    program = traced.lower().compile(compiler_options={**alone, **options})
    found = read_compiled(traced, program, (case.carry, *case.args))
    carry, args = case.carry, case.args
    if isinstance(carry, sk.TrainState):  # the key of a step stays outside jit
        carry, args = carry._replace(key=None), (carry.key, *args)
    return Case(case.name, program, carry, args, _results), found


def _results(carry: Any, value: Any) -> Any:
    """What must agree: parameters, loss, and the first moments, which show gradients as updated parameters do not."""
    params, opt_state = (carry.params, carry.opt_state) if isinstance(carry, sk.TrainState) else carry
    moments = [mu for _, mu in optax.tree_utils.tree_get_all_with_path(opt_state, "mu")]
    return params, moments, value["loss"]


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
    return float(max(least, _OTHER_ORDER * difference(found[1], found[0], 0.0)[0]))

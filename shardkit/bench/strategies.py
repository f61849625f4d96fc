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
from shardkit.models import parameters, transformer
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
    """The computation of every case.

    Attributes:
        loss_fn: `loss_fn(params, batch, keys)` for one device; keys are None.
        params: the parameters on one device.
        batch: the global batch; dim 0 of every array is the example.
        rules: specs of the parameters over "model", which the partitioner completes.
        config: the configuration of the reference transformer, which has separate layers over "model"; None for another
            model.
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
        examples: number of examples in the global batch.
        tokens: number of tokens in each example.

    Example:
        >>> from shardkit.bench.strategies import reference
        >>> model = reference(sk.models.transformer.Config(layers=1, dim=16, heads=2), 8, 4)
        >>> model.batch["tokens"].shape
        (8, 4)
    """
    token_key, target_key = jax.random.split(jax.random.key(1))
    shape = (examples, tokens)
    batch = {
        "tokens": jax.random.randint(token_key, shape, 0, config.vocabulary),
        "targets": jax.random.randint(target_key, shape, 0, config.vocabulary),
    }
    params = transformer.init(jax.random.key(0), config)
    return Workload(transformer.loss_fn(config), params, batch, None, config)


def list_plans(sizes: Mapping[str, int], work: Workload) -> list[PlanCase]:
    """The plans that fit a mesh of axes "data" and "model", in the order of the table."""
    axes = tuple(axis for axis in ("data", "model") if axis in sizes)
    model = sizes.get("model", 1)
    data = sizes.get("data", 1)
    config = work.config
    cases = [PlanCase("dp", sk.dp(axes)), PlanCase("zero1", sk.zero1(axes)), PlanCase("fsdp", sk.fsdp(axes))]
    if config is not None:
        cases.append(PlanCase("fsdp, by layer", sk.fsdp(axes, layerwise=LAYERS), by_layer=True, jit=False))
    if model > 1 and work.rules is not None and data > 1:
        cases.append(PlanCase("fsdp x rules", sk.fsdp("data"), manual="data"))
    if config is None or not _has_columns(sizes, config):
        return cases
    rules = transformer.tensor_rules(config, "model", model)
    tp = sk.tp("model", rules)
    tp_sequence = sk.tp("model", rules, sequence=True)
    tp_axes = Axes("model", impl="gather")
    sequence_axes = Axes("model", sequence=True, impl="gather")
    if data == 1:
        cases.append(PlanCase("tp", tp, tp_axes))
        cases.append(PlanCase("tp, sequence", tp_sequence, sequence_axes, jit=False))
        return cases
    fsdp = sk.fsdp("data", layerwise=LAYERS)
    cases.append(PlanCase("dp x tp", sk.chain(sk.dp("data"), tp), tp_axes))
    cases.append(PlanCase("fsdp x tp", sk.chain(fsdp, tp), tp_axes, by_layer=True))
    name = "fsdp x tp, sequence"
    cases.append(PlanCase(name, sk.chain(fsdp, tp_sequence), sequence_axes, by_layer=True, jit=False))
    return cases


def explain_left_out(sizes: Mapping[str, int], work: Workload) -> list[str]:
    """Why some cases do not fit the mesh, in a sentence each."""
    model = sizes.get("model", 1)
    config = work.config
    reasons = []
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
    divides = all(size % model == 0 for size in (config.heads, config.width, config.vocabulary))
    return model > 1 and divides


def has_stages(sizes: Mapping[str, int], work: Workload) -> bool:
    """Whether "model" can be the stages of a pipeline."""
    model = sizes.get("model", 1)
    return work.config is not None and model > 1 and work.config.layers % model == 0


def cases_of(work: Workload, mesh: Mesh, optimizer: OptimizerName = "adamw") -> dict[str, Callable[[], Case]]:
    """Every case that fits, by name, one device first. A case is built when it is called; its step is not compiled."""
    builder = CaseBuilder(work, mesh, optimizer)
    cases: dict[str, Callable[[], Case]] = {"one device": builder.one_device}
    for plan_case in list_plans(mesh.shape, work):
        if plan_case.jit:
            cases[f"jit: {plan_case.held}"] = partial(builder.jit, "jit", plan_case)
        cases[plan_case.held] = partial(builder.of, plan_case)
    for make_plan in (sk.dp, sk.zero2, sk.fsdp):  # ZeRO-2 is ZeRO-1 where there is one microbatch
        name = f"{make_plan.__name__}, {MICROBATCHES} microbatches"
        cases[name] = partial(builder.in_microbatches, name, make_plan)
    if has_stages(mesh.shape, work):
        cases["GPipe"] = partial(builder.pipeline, "GPipe")
        cases["1F1B"] = partial(builder.pipeline, "1F1B")
    return cases


class CaseBuilder:
    """Builds cases over one mesh."""

    def __init__(self, work: Workload, mesh: Mesh, optimizer: OptimizerName = "adamw"):
        one_of("strategies", "optimizer", optimizer, get_args(OptimizerName))
        self.work = work
        self.mesh = mesh
        self.name = optimizer
        self.axis_names = tuple(mesh.axis_names)
        self._built: dict[str, Case] = {}

    def optimizer(self, plan: sk.Plan | None = None) -> optax.GradientTransformation:
        """The optimizer of a plan's own step, or of one device and of jit's."""
        if self.name == "adamw":
            return optax.adamw(LEARNING_RATE)
        dims = None
        if self.work.config is not None:
            dims = parameters.muon_dims(self.work.config)
        if plan is None:
            return optax.contrib.muon(LEARNING_RATE, muon_weight_dimension_numbers=dims)
        return sk.muon(LEARNING_RATE, mesh=self.mesh, plan=plan, muon_weight_dimension_numbers=dims)

    def one_device(self) -> Case:
        """The whole step on the first device."""
        first_device = NamedSharding(Mesh(self.mesh.devices.ravel()[:1], ("one",)), P())
        params = self.work.params
        carry = jax.device_put((params, self.optimizer().init(params)), first_device)
        update = jax.tree.map(lambda _: first_device, params)
        batch = jax.device_put(self.work.batch, first_device)
        return partitioned("one device", self.work.loss_fn, self.optimizer(), carry, batch, update)

    def of(self, plan_case: PlanCase) -> Case:
        """A plan's own step."""
        loss_fn = self.work.loss_fn
        if self.work.config is not None:
            loss_fn = transformer.loss_fn(self.work.config, plan_case.axes)
        return self.build(plan_case.held, sk.value_and_grad(loss_fn), plan_case.plan, manual=plan_case.manual)

    def jit(self, kind: str, plan_case: PlanCase, loss_fn: Loss | None = None) -> Case:
        """jit's step, held as a plan holds it; of the loss for one device, or of one with constraints."""
        carry, batch = placed_arguments(self.of(plan_case))
        if plan_case.manual:
            update = jax.tree.map(lambda x: x.sharding, carry[0])
        else:
            layouts = plan_case.plan.layouts(self.work.params, self.mesh)
            update = map_layouts(lambda layout: NamedSharding(self.mesh, layout.update), layouts)
        name = f"{kind}: {plan_case.held}"
        return partitioned(name, loss_fn or self.work.loss_fn, self.optimizer(), carry, batch, update)

    def in_microbatches(self, name: str, make_plan: Callable[..., sk.Plan]) -> Case:
        """A plan's step in microbatches."""
        grad_fn = sk.value_and_grad(self.work.loss_fn)
        return self.build(name, grad_fn, make_plan(self.axis_names), accumulate=MICROBATCHES)

    def pipeline(self, name: str) -> Case:
        """A pipeline over "model" by a schedule; the data axis splits examples."""
        config = self.work.config
        assert config is not None, "only the reference transformer has pieces"
        make_schedule = {"GPipe": sk.schedules.gpipe, "1F1B": sk.schedules.one_f_one_b}[name]
        plan = sk.pp("model")
        if "data" in self.axis_names:
            plan = sk.chain(sk.dp("data"), plan)
        axes = Axes(stage="model")
        schedule = make_schedule(self.mesh.shape["model"], self.microbatches)
        embed, stage, head = transformer.pieces(config, axes)
        pipe = sk.pipeline(schedule, "model")
        grad_fn = pipe.value_and_grad(embed, stage, head, mode="branch", layer_numbers=True)
        return self.build(name, transformer.in_order(grad_fn, axes), plan)

    @property
    def microbatches(self) -> int:
        """Of the pipelines: two for a stage, if there are so many examples."""
        examples = len(self.work.batch["tokens"]) // self.mesh.shape.get("data", 1)
        divisors = [count for count in range(1, 2 * self.mesh.shape["model"] + 1) if examples % count == 0]
        return max(divisors)

    def build(self, name: str, grad_fn: Any, plan: sk.Plan, *, accumulate: int = 1, manual: Any = None) -> Case:
        """A step of `make_train_step`, and its state."""
        # A case and jit's step in the same layouts share it: its state is made once.
        if name not in self._built:
            params = self.work.params
            mesh = self.mesh
            options: dict[str, Any] = {"mesh": mesh, "plan": plan, "accumulate": accumulate}
            if manual is not None:
                options["manual"] = manual
                params = sk.shard(params, mesh, self.work.rules)
            init, step = sk.make_train_step(grad_fn, self.optimizer(plan), **options)
            batch = jax.device_put(self.work.batch, NamedSharding(mesh, plan.batch_spec(mesh)))
            self._built[name] = Case(name, step, init(params, jax.random.key(2)), (batch,))
        return self._built[name]


def placed_arguments(case: Case) -> tuple[Any, Any]:
    """Parameters with the optimizer's state, and the batch, as a plan lays them out."""
    return (case.carry.params, case.carry.opt_state), case.args[0]


def apply_optimizer(optimizer: Any, carry: Any, gradients: Any, loss: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    """The carry after a step of the optimizer, as every step that is not of `make_train_step` ends."""
    params, opt_state = carry
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def mean(loss_fn: Loss) -> Callable[[Any, Any], jax.Array]:
    """A loss for `value_and_grad` as a scalar function of parameters and batch, without keys."""

    def scalar(params: Any, batch: Any) -> jax.Array:
        loss = loss_fn(params, batch, None)
        if isinstance(loss, tuple) and not isinstance(loss, sk.Mean):  # (loss, aux)
            loss = loss[0]
        if isinstance(loss, sk.Mean):
            return loss.total / loss.weight
        return loss

    return scalar


def partitioned(name: str, loss_fn: Loss, optimizer: Any, carry: Any, batch: Any, update: Any) -> Case:
    """The step on global arrays, as one writes it for one device, with the layouts of its arguments and results.

    `carry` (parameters and optimizer state) and `batch` are already laid out; `update` are the layouts of gradients.
    """

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(mean(loss_fn))(carry[0], batch)
        gradients = jax.lax.with_sharding_constraint(gradients, update)
        return apply_optimizer(optimizer, carry, gradients, loss)

    carry_shardings = jax.tree.map(lambda x: x.sharding, carry)
    batch_shardings = jax.tree.map(lambda x: x.sharding, batch)
    replicated = NamedSharding(jax.tree.leaves(carry_shardings)[0].mesh, P())
    jitted = jax.jit(
        step,
        in_shardings=(carry_shardings, batch_shardings),
        out_shardings=(carry_shardings, replicated),
        donate_argnums=0,
    )
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
    names = list(cases)
    for name in only:
        if name not in names:
            raise ValueError(
                f"strategies: --only must name cases that fit the mesh; got {name!r}; these fit: {quoted(names[1:])}. "
                "Pass some of them."
            )
    chosen = names
    if only:
        chosen = [name for name in names if name == names[0] or name in only]
    programs = []
    for name in chosen:
        progress(name)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes an integer count
            program, compiled = _compile(cases[name](), compiler_options)
        fields = {
            "held_bytes": compiled.memory.held,
            "temp_bytes": compiled.memory.temp,
            "written_bytes": float(compiled.census.sent()),
            "wire_bytes": float(sum(row.total for row in compiled.rows)),
        }
        programs.append(program._replace(fields=fields))
    return measure(
        "strategies",
        sized(mesh.shape.items()),
        programs,
        mode="dispatched",
        calls=calls,
        rounds=rounds,
        tolerance=_find_tolerance(programs[0]),
        refuse=False,
    )


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
            f"{sized(mesh.shape.items())}. Write for example data=4 model=2; pipelines run over 'model'."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"strategies: all cases must run in one process, beside one device; got {jax.process_count()} processes. "
            "Run the command without shardkit launch."
        )
    counts = set()
    for x in jax.tree.leaves(work.batch):
        if np.ndim(x):
            counts.add(np.shape(x)[0])
        else:
            counts.add(0)
    parts = mesh.size * MICROBATCHES
    if len(counts) != 1 or not max(counts) or max(counts) % parts:
        raise ValueError(
            "strategies: dim 0 of every array of the batch must be the example, divisible by devices x microbatches; "
            f"got {', '.join(map(str, sorted(counts)))} for {mesh.size} x {MICROBATCHES}. Pass {parts} examples."
        )


def _compile(case: Case, options: Mapping[str, Any]) -> tuple[Case, Compiled]:
    """The case compiled, once for reading and timing, with one thread for each device."""
    traced = traceable(case.step).trace(case.carry, *case.args)
    # A simulated device is one thread, because how a pool divides work is noise.
    compiler_options: dict[str, Any] = {}
    if jax.default_backend() == "cpu":
        compiler_options["xla_cpu_multi_thread_eigen"] = False
    compiler_options |= options
    program = traced.lower().compile(compiler_options=compiler_options)
    compiled = read_compiled(traced, program, (case.carry, *case.args))
    # What is timed is the compiled program itself, without the Python of a step around it.
    carry = case.carry
    args = case.args
    if isinstance(carry, sk.TrainState):  # the key of a step stays outside jit
        args = (carry.key, *args)
        carry = carry._replace(key=None)
    return Case(case.name, program, carry, args, _select_results), compiled


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
    shardings = jax.tree.map(lambda x: x.sharding, one_device.carry)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)

    def run(batch: Any) -> Any:
        carry, value = one_device.step(copy(one_device.carry), batch)
        return jax.tree.map(np.asarray, _select_results(carry, value))

    # The same examples in another order: each sum over the batch is rounded otherwise, and nothing else changes.
    results = run(batch)
    reversed_batch = jax.tree.map(lambda x: jax.device_put(jnp.flip(x, 0), x.sharding), batch)
    changed, _, _ = difference(run(reversed_batch), results, 0.0)
    epsilon = max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(results))
    elements = max(x.size for x in jax.tree.leaves(batch))
    return float(max(epsilon * (4 + elements**0.5), _OTHER_ORDER * changed))

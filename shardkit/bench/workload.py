"""One model as a step under each plan that fits a mesh, on one device, and for jit's partitioner.

All steps start from the same parameters, take the same global batch, and update with AdamW, or Muon. `strategies.py`
compiles, compares and times them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._arguments.checks import one_of
from shardkit.bench.measure import Case
from shardkit.models import parameters, transformer
from shardkit.models.transformer import ONE_DEVICE, Axes
from shardkit.plans.splits import map_layouts

Loss = Callable[[Any, Any, Any], Any]
OptimizerName = Literal["adamw", "muon"]
LEARNING_RATE = 1e-5  # small: AdamW makes whole steps of rounding where a gradient is nearly zero
LAYERS = ("layers",)
MICROBATCHES = 2


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

    held: str  # the name of the case: how the plan holds parameters and moments
    plan: sk.Plan
    axes: Axes = ONE_DEVICE  # over which the transformer communicates
    by_layer: bool = False  # whether parameters are gathered layer by layer
    jit: bool = True  # whether jit's step, without constraints, is another one than that of the case before
    manual: Any = None  # the axes of shard_map, where the partitioner has another one; None: all


def reference(config: transformer.Config, examples: int, tokens: int) -> Workload:
    """The reference transformer, with random tokens.

    Args:
        config: the sizes.
        examples: number of examples in the global batch.
        tokens: number of tokens in each example.

    Example:
        >>> from shardkit.bench.workload import reference
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
    # Of data parallelism, over all devices.
    cases = [
        PlanCase("dp", sk.dp(axes)),
        PlanCase("zero1", sk.zero1(axes)),
        PlanCase("fsdp", sk.fsdp(axes)),
    ]
    if config is not None:
        by_layer = sk.fsdp(axes, layerwise=LAYERS)
        cases.append(PlanCase("fsdp, by layer", by_layer, by_layer=True, jit=False))
    # Over "model" the partitioner completes what the rules say.
    if model > 1 and work.rules is not None and data > 1:
        cases.append(PlanCase("fsdp x rules", sk.fsdp("data"), manual="data"))
    if config is None or not _has_columns(sizes, config):
        return cases
    # Of tensor parallelism over "model", alone or beside data parallelism over "data".
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
    fsdp_sequence = sk.chain(fsdp, tp_sequence)
    cases.append(PlanCase("dp x tp", sk.chain(sk.dp("data"), tp), tp_axes))
    cases.append(PlanCase("fsdp x tp", sk.chain(fsdp, tp), tp_axes, by_layer=True))
    cases.append(PlanCase("fsdp x tp, sequence", fsdp_sequence, sequence_axes, by_layer=True, jit=False))
    return cases


def explain_left_out(sizes: Mapping[str, int], work: Workload) -> list[str]:
    """Why some cases do not fit the mesh, in a sentence each."""
    model = sizes.get("model", 1)
    config = work.config
    if model == 1:
        return ["tensor parallelism and pipelines, which need an axis 'model'"]
    reasons = []
    if config is None:
        reasons.append("pipelines, which need the reference transformer")
        if work.rules is None or sizes.get("data", 1) == 1:
            reasons.append("plans over 'model', which need rules as a fourth value, and an axis 'data'")
        return reasons
    if not _has_columns(sizes, config):
        reasons.append(f"tensor parallelism: {config.heads} heads of width {config.width} over model={model}")
    if not has_stages(sizes, work):
        reasons.append(f"pipelines: {config.layers} layers over model={model}")
    return reasons


def _has_columns(sizes: Mapping[str, int], config: transformer.Config) -> bool:
    model = sizes.get("model", 1)
    # Heads, hidden units and words are all split over the axis. It divides the three if it divides their gcd.
    return model > 1 and math.gcd(config.heads, config.width, config.vocabulary) % model == 0


def has_stages(sizes: Mapping[str, int], work: Workload) -> bool:
    """Whether "model" can be the stages of a pipeline."""
    model = sizes.get("model", 1)
    return work.config is not None and model > 1 and work.config.layers % model == 0


def cases_of(work: Workload, mesh: Mesh, optimizer: OptimizerName = "adamw") -> dict[str, Callable[[], Case]]:
    """Every case that fits, by name, one device first. A case is built when it is called; its step is not compiled."""
    builder = CaseBuilder(work, mesh, optimizer)
    # The first case is the baseline of all ratios.
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
        mesh_of_one = Mesh(self.mesh.devices.ravel()[:1], ("one",))
        first_device = NamedSharding(mesh_of_one, P())
        params = self.work.params
        carry = jax.device_put((params, self.optimizer().init(params)), first_device)
        update = jax.tree.map(lambda _: first_device, params)
        batch = jax.device_put(self.work.batch, first_device)
        return make_partitioned_case("one device", self.work.loss_fn, self.optimizer(), carry, batch, update)

    def of(self, plan_case: PlanCase) -> Case:
        """A plan's own step."""
        loss_fn = self.work.loss_fn
        if self.work.config is not None:
            loss_fn = transformer.loss_fn(self.work.config, plan_case.axes)
        return self.build(plan_case.held, sk.value_and_grad(loss_fn), plan_case.plan, manual=plan_case.manual)

    def jit(self, kind: str, plan_case: PlanCase, loss_fn: Loss | None = None) -> Case:
        """jit's step, held as a plan holds it; of the loss for one device, or of one with constraints."""
        carry, batch = get_placed_arguments(self.of(plan_case))
        if plan_case.manual:
            # This plan knows the axis "data" alone. Over "model" the rules split the parameters, and their gradients in
            # the same way.
            update = jax.tree.map(lambda x: x.sharding, carry[0])
        else:
            # Gradients as the plan lays out its updates, so that the partitioner may send what the plan sends.
            layouts = plan_case.plan.layouts(self.work.params, self.mesh)
            update = map_layouts(lambda layout: NamedSharding(self.mesh, layout.update), layouts)
        if loss_fn is None:
            loss_fn = self.work.loss_fn
        return make_partitioned_case(f"{kind}: {plan_case.held}", loss_fn, self.optimizer(), carry, batch, update)

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
        """Of the pipelines: two for a stage, or if the examples do not divide by that, fewer by which they do."""
        examples = len(self.work.batch["tokens"]) // self.mesh.shape.get("data", 1)
        count = 2 * self.mesh.shape["model"]
        while examples % count:
            count -= 1
        return count

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


def get_placed_arguments(case: Case) -> tuple[Any, Any]:
    """Parameters with the optimizer's state, and the batch, as a plan lays them out."""
    return (case.carry.params, case.carry.opt_state), case.args[0]


def apply_optimizer(optimizer: Any, carry: Any, gradients: Any, loss: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    """The carry after a step of the optimizer, as every step that is not of `make_train_step` ends."""
    params, opt_state = carry
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def make_scalar(loss_fn: Loss) -> Callable[[Any, Any], jax.Array]:
    """A loss for `value_and_grad` as a scalar function of parameters and batch, without keys."""

    def scalar(params: Any, batch: Any) -> jax.Array:
        loss = loss_fn(params, batch, None)
        # A Mean is a NamedTuple itself.
        if isinstance(loss, tuple) and not isinstance(loss, sk.Mean):
            loss = loss[0]  # without metrics
        if isinstance(loss, sk.Mean):
            return loss.total / loss.weight
        return loss

    return scalar


def make_partitioned_case(name: str, loss_fn: Loss, optimizer: Any, carry: Any, batch: Any, update: Any) -> Case:
    """The step on global arrays, as one writes it for one device, with the layouts of its arguments and results.

    `carry` (parameters and optimizer state) and `batch` are already laid out; `update` are the layouts of gradients.
    """

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(make_scalar(loss_fn))(carry[0], batch)
        gradients = jax.lax.with_sharding_constraint(gradients, update)
        return apply_optimizer(optimizer, carry, gradients, loss)

    carry_shardings = jax.tree.map(lambda x: x.sharding, carry)
    batch_shardings = jax.tree.map(lambda x: x.sharding, batch)
    mesh = jax.tree.leaves(carry_shardings)[0].mesh
    replicated = NamedSharding(mesh, P())
    jitted = jax.jit(
        step,
        in_shardings=(carry_shardings, batch_shardings),
        out_shardings=(carry_shardings, replicated),
        donate_argnums=0,
    )
    return Case(name, jitted, carry, (batch,))

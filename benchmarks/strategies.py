"""Every plan beside one device, and beside the same steps as one writes them otherwise.

`shardkit bench strategies` measures plans beside `jit`. Here stand, in the same rounds, too: "jit, constraints: X", the
text for one device under jit with a `with_sharding_constraint` wherever a careful author would put one, held as plan X
holds it; and "tutorial: X", shard_map as tutorials write it: whole gathers, a reduction in every microbatch, and GPipe
as one scan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import choose_calls, choose_rounds, start
from shardkit import bench
from shardkit.bench.records import write
from shardkit.bench.strategies import text
from shardkit.bench.workload import (
    MICROBATCHES,
    CaseBuilder,
    Loss,
    PlanCase,
    apply_optimizer,
    get_placed_arguments,
    has_stages,
    list_plans,
    make_scalar,
    reference,
)
from shardkit.layers.attention import dot_attention
from shardkit.models import blocks, transformer
from shardkit.models.transformer import Axes
from shardkit.plans.splits import map_layouts


def list_handwritten_cases(work: bench.Workload, mesh: Mesh) -> dict[str, Callable[[], bench.Case]]:
    """The further cases that fit the mesh, by name."""
    builder = CaseBuilder(work, mesh)
    cases: dict[str, Callable[[], bench.Case]] = {}
    for plan_case in list_plans(mesh.shape, work):
        if plan_case.manual is None:
            cases[f"jit, constraints: {plan_case.held}"] = partial(make_constrained_case, builder, plan_case)
    for make_plan in (sk.dp, sk.fsdp):
        name = f"{make_plan.__name__}, {MICROBATCHES} microbatches"
        cases[f"tutorial: {name}"] = partial(make_tutorial_case, builder, name, make_plan)
    if has_stages(mesh.shape, work):
        cases["tutorial: GPipe scan"] = partial(make_gpipe_case, builder)
    return cases


def make_constrained_case(builder: CaseBuilder, plan_case: PlanCase) -> bench.Case:
    """jit's step of a loss with constraints: the reference transformer's, or any other's on its parameters."""
    config = builder.work.config
    mesh = builder.mesh
    plan = plan_case.plan
    layouts = plan.layouts(builder.work.params, mesh)
    in_loss = map_layouts(lambda layout: NamedSharding(mesh, layout.seen), layouts)
    if config is None:
        loss_fn = constrain_params(builder.work.loss_fn, in_loss)
    else:
        example_axes = None
        batch_spec = tuple(plan.batch_spec(mesh))
        if batch_spec:
            example_axes = batch_spec[0]
        axes = plan_case.axes
        loss_fn = make_constrained_loss(config, mesh, in_loss, example_axes, axes, by_layer=plan_case.by_layer)
    return builder.jit("jit, constraints", plan_case, loss_fn)


def constrain_params(loss_fn: Loss, layouts: Any) -> Loss:
    """Any loss with a constraint on its parameters: laid out as the plan's loss sees them, before they are used."""

    def constrained_loss(params: Any, batch: Any, keys: Any) -> Any:
        return loss_fn(jax.lax.with_sharding_constraint(params, layouts), batch, keys)

    return constrained_loss


class Constraints(NamedTuple):
    """Pins activations [B, T, ...] to the layouts in which a careful author wants them."""

    mesh: Mesh
    example_axes: Any  # split dim 0 of every activation
    axes: Axes

    def _pin(self, x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(self.example_axes, *spec)))

    def pin_tokens(self, x: jax.Array) -> jax.Array:
        """Inside a block, every device of "model" has all tokens."""
        return self._pin(x)

    def pin_between(self, x: jax.Array) -> jax.Array:
        """Between blocks, tokens are split, if they are at all."""
        if self.axes.sequence:
            return self._pin(x, self.axes.model)
        return self._pin(x, None)

    def pin_columns(self, x: jax.Array) -> jax.Array:
        """Heads, hidden columns or words are split."""
        return self._pin(x, None, self.axes.model)


def make_constrained_loss(
    config: transformer.Config, mesh: Mesh, layouts: Any, example_axes: Any, axes: Axes, *, by_layer: bool
) -> Loss:
    """The reference transformer's loss with constraints wherever a careful author would put them.

    Args:
        config: the sizes.
        mesh: the mesh.
        layouts: shardings of the parameters where the loss uses them.
        example_axes: the axes that split the examples.
        axes: those that split heads and columns, and, with `sequence`, tokens.
        by_layer: gather each layer's weights in the scan, which recomputes all but matmuls.
    """
    constraints = Constraints(mesh, example_axes, axes)
    # In the scan over layers a weight has no dim of layers.
    layer_layouts = jax.tree.map(lambda layout: NamedSharding(mesh, P(*layout.spec[1:])), layouts["layers"])

    def attend(weights: Any, x_BTD: jax.Array) -> jax.Array:
        def project(name: str) -> jax.Array:
            return constraints.pin_columns(jnp.einsum("BTD,DHK->BTHK", x_BTD, weights[name]))

        q_BTHK = project("query")
        k_BTHK = project("key")
        v_BTHK = project("value")
        positions_T = jnp.arange(x_BTD.shape[1])
        y_BTHK = dot_attention(blocks.rotate(q_BTHK, positions_T), blocks.rotate(k_BTHK, positions_T), v_BTHK)
        return jnp.einsum("BTHK,HKD->BTD", constraints.pin_columns(y_BTHK), weights["attention_out"])

    def apply_mlp(weights: Any, x_BTD: jax.Array) -> jax.Array:
        gate_BTF = constraints.pin_columns(jnp.einsum("BTD,DF->BTF", x_BTD, weights["gate"]))
        up_BTF = constraints.pin_columns(jnp.einsum("BTD,DF->BTF", x_BTD, weights["up"]))
        return jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, weights["down"])

    def apply_layer(x_BTD: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        weights = jax.lax.with_sharding_constraint(weights, layer_layouts)
        for norm, block in (("attention_norm", attend), ("mlp_norm", apply_mlp)):
            h_BTD = constraints.pin_tokens(blocks.rms_norm(x_BTD, weights[norm]))
            x_BTD = x_BTD + constraints.pin_between(block(weights, h_BTD))
        return x_BTD, None

    layer = apply_layer
    if by_layer:
        layer = jax.checkpoint(apply_layer, policy=jax.checkpoint_policies.dots_saveable)

    def gather_once(params: Any) -> Any:
        """The parameters laid out as the loss uses them, but for a stack whose layers are gathered in the scan."""
        gathered = {}
        for name, leaves in params.items():
            if by_layer and name == "layers":
                gathered[name] = leaves
            else:
                gathered[name] = jax.lax.with_sharding_constraint(leaves, layouts[name])
        return gathered

    def loss(params: Any, batch: Any, keys: None) -> sk.Mean:
        params = gather_once(params)
        x_BTD = constraints.pin_between(params["embed"][batch["tokens"]])
        x_BTD, _ = jax.lax.scan(layer, x_BTD, params["layers"])
        x_BTD = constraints.pin_tokens(blocks.rms_norm(x_BTD, params["final_norm"]))
        logits_BTV = constraints.pin_columns(jnp.einsum("BTD,DV->BTV", x_BTD, params["head"]))
        target_BT = jnp.take_along_axis(logits_BTV, batch["targets"][..., None], axis=-1)[..., 0]
        return sk.Mean.of(jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT)

    return loss


def split_in_microbatches(batch: Any, count: int) -> Any:
    """A dim of microbatches before that of examples."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)


def make_tutorial_case(builder: CaseBuilder, name: str, make_plan: Callable[..., sk.Plan]) -> bench.Case:
    """Data parallelism, or FSDP where the carry is split, in microbatches, as tutorials write it.

    Each microbatch gathers all weights, and reduces gradients. Autodiff places the reductions: of a replicated weight a
    psum, of a gathered one a reduce-scatter.
    """
    carry, batch = get_placed_arguments(builder.in_microbatches(name, make_plan))
    mesh = builder.mesh
    axes = builder.axis_names
    optimizer = builder.optimizer()
    compute_mean = make_scalar(builder.work.loss_fn)
    specs = jax.tree.map(lambda x: x.sharding.spec, carry[0])

    def gather_leaf(shard: jax.Array, spec: P) -> jax.Array:
        for dim, names in enumerate(spec):
            if names is not None:
                return lax.all_gather(shard, axes, axis=dim, tiled=True)
        return shard

    def compute_on_device(params: Any, batch: Any) -> Any:
        def loss(params: Any, microbatch: Any) -> jax.Array:
            # Here, within what is differentiated, so that autodiff makes a reduce-scatter of each gather.
            gathered = jax.tree.map(gather_leaf, params, specs)
            # Means of as many examples each: their sum over devices and microbatches is divided by the number of both.
            return compute_mean(gathered, microbatch) / (mesh.size * MICROBATCHES)

        def add_microbatch(sums: Any, microbatch: Any) -> tuple[Any, None]:
            loss_and_gradients = jax.value_and_grad(loss)(params, microbatch)
            return jax.tree.map(jnp.add, sums, loss_and_gradients), None

        zero_loss = lax.pcast(jnp.float32(0), axes, to="varying")
        zeros = (zero_loss, jax.tree.map(jnp.zeros_like, params))
        microbatches = split_in_microbatches(batch, MICROBATCHES)
        (total, gradients), _ = lax.scan(add_microbatch, zeros, microbatches)
        return lax.psum(total, axes), gradients

    compute_gradients = jax.shard_map(compute_on_device, mesh=mesh, in_specs=(specs, P(axes)), out_specs=(P(), specs))

    def step(carry: Any, batch: Any) -> Any:
        loss, gradients = compute_gradients(carry[0], batch)
        return apply_optimizer(optimizer, carry, gradients, loss)

    return bench.Case(f"tutorial: {name}", jit_step(step, carry, mesh), carry, (batch,))


def make_gpipe_case(builder: CaseBuilder) -> bench.Case:
    """GPipe as one scan, differentiated: every device computes its stage at each of m + p - 1 ticks, and all is saved.

    The stages are over "model", and the examples over the other axes of the mesh.
    """
    config = builder.work.config
    assert config is not None, "only the reference transformer has pieces"
    carry, batch = get_placed_arguments(builder.pipeline("GPipe"))
    mesh = builder.mesh
    count = builder.microbatches
    optimizer = builder.optimizer()
    specs = jax.tree.map(lambda x: x.sharding.spec, carry[0])
    embed, run_stage, compute_loss = transformer.pieces(config)
    last = mesh.shape["model"] - 1

    def compute_on_device(params: Any, batch: Any) -> jax.Array:
        device = lax.axis_index("model")
        microbatches = split_in_microbatches(batch, count)
        layers = (params["layers"], jnp.arange(config.layers // (last + 1)))

        def get_microbatch(t: jax.Array) -> Any:
            # Before the first microbatch has arrived, and after the last one, what is computed is not used.
            return jax.tree.map(lambda x: x[jnp.clip(t, 0, count - 1)], microbatches)

        def tick(state: Any, t: jax.Array) -> Any:
            x, total = state
            embedded = embed(params, get_microbatch(t), None)
            stage_input = embedded._replace(x=jnp.where(device == 0, embedded.x, x))
            y = run_stage(layers, stage_input, None)
            tick_total = compute_loss(params, y, get_microbatch(t - last))[0].total
            total = total + jnp.where((device == last) & (t >= last), tick_total, 0.0)
            # Every device hands its result on, whether it is one or not: the next tick reads what arrives.
            x = lax.ppermute(y.x, "model", [(i, i + 1) for i in range(last)])
            return (x, total), None

        shape = jax.eval_shape(lambda: embed(params, get_microbatch(jnp.int32(0)), None)).x
        zeros = (jnp.zeros(shape.shape, shape.dtype), jnp.float32(0))
        state = lax.pcast(zeros, mesh.axis_names, to="varying")
        (_, total), _ = lax.scan(tick, state, jnp.arange(count + last))
        # Of the stages the last one alone has a loss, of its examples: the sum over all axes is that of the batch.
        return lax.psum(total, mesh.axis_names)

    batch_spec = P()
    example_axes = tuple(name for name in mesh.axis_names if name != "model")
    if example_axes:
        batch_spec = P(example_axes)
    compute_total = jax.shard_map(compute_on_device, mesh=mesh, in_specs=(specs, batch_spec), out_specs=P())

    def step(carry: Any, batch: Any) -> Any:
        def compute_mean(params: Any) -> jax.Array:
            return compute_total(params, batch) / batch["tokens"].size

        loss, gradients = jax.value_and_grad(compute_mean)(carry[0])
        return apply_optimizer(optimizer, carry, gradients, loss)

    return bench.Case("tutorial: GPipe scan", jit_step(step, carry, mesh), carry, (batch,))


def jit_step(step: Any, carry: Any, mesh: Mesh) -> Any:
    """The step with its carry donated, and laid out after it as before."""
    carry_layouts = jax.tree.map(lambda x: x.sharding, carry)
    return jax.jit(step, out_shardings=(carry_layouts, NamedSharding(mesh, P())), donate_argnums=0)


def print_progress(name: str) -> None:
    """Says which case is compiled: all of them together take minutes."""
    print(f"compiling {name}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code is 1 if a result is wrong."""
    options = start(__doc__, argv, devices=8)
    dim = 128
    tokens = 64
    compiler_options = {}
    if options.smoke:
        dim = 16
        tokens = 4
        compiler_options = {"xla_backend_optimization_level": 0}  # its times tell nothing, and programs compile sooner
    work = reference(transformer.Config(layers=4, dim=dim, heads=4), examples=16, tokens=tokens)
    mesh = sk.make_mesh(data=2, model=-1)
    records = bench.strategies(
        work,
        mesh=mesh,
        beside=list_handwritten_cases(work, mesh),
        calls=choose_calls(options, 1, smoke=1),
        rounds=choose_rounds(options, 100),
        compiler_options=compiler_options,
        progress=print_progress,
    )
    print(text(records))
    if options.json:
        write(records, options.json)
    return int(any(record["wrong"] for record in records))


if __name__ == "__main__":
    raise SystemExit(main())

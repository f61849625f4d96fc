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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
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


def beside(work: bench.Workload, mesh: Mesh) -> dict[str, Callable[[], bench.Case]]:
    """The further cases that fit the mesh, by name."""
    cases = CaseBuilder(work, mesh)
    found: dict[str, Callable[[], bench.Case]] = {}
    for way in list_plans(mesh.shape, work):
        if way.manual is None:
            found[f"jit, constraints: {way.held}"] = partial(by_constraints, cases, way)
    for plan_of in (sk.dp, sk.fsdp):
        name = f"{plan_of.__name__}, {MICROBATCHES} microbatches"
        found[f"tutorial: {name}"] = partial(tutorial, cases, name, plan_of)
    if has_stages(mesh.shape, work):
        found["tutorial: GPipe scan"] = partial(scan, cases)
    return found


def by_constraints(cases: CaseBuilder, way: PlanCase) -> bench.Case:
    """jit's step of a loss with constraints: the reference transformer's, or any other's on its parameters."""
    config, mesh = cases.work.config, cases.mesh
    seen = map_layouts(lambda layout: layout.seen, way.plan.layouts(cases.work.params, mesh))
    if config is None:
        return cases.jit("jit, constraints", way, gathered_once(cases.work.loss_fn, mesh, seen))
    split = tuple(way.plan.batch_spec(mesh))[:1]
    loss_fn = constrained(config, mesh, seen, split[0] if split else None, way.axes, by_layer=way.by_layer)
    return cases.jit("jit, constraints", way, loss_fn)


def tutorial(cases: CaseBuilder, name: str, plan_of: Callable[..., sk.Plan]) -> bench.Case:
    """A step in microbatches, as tutorials write it."""
    carry, batch = get_placed_arguments(cases.in_microbatches(name, plan_of))
    how = cases.optimizer(), carry, batch, cases.mesh, cases.axis_names, MICROBATCHES
    return in_microbatches(f"tutorial: {name}", cases.work.loss_fn, *how)


def scan(cases: CaseBuilder) -> bench.Case:
    """The pipeline, as tutorials write it."""
    assert cases.work.config is not None, "only the reference transformer has pieces"
    carry, batch = get_placed_arguments(cases.pipeline("GPipe"))
    how = cases.optimizer(), carry, batch, cases.mesh, "model", cases.microbatches
    return scan_gpipe("tutorial: GPipe scan", cases.work.config, *how)


def gathered_once(loss_fn: Loss, mesh: Mesh, seen: Any) -> Loss:
    """Any loss with a constraint on its parameters: laid out as the plan's loss sees them, before they are used."""
    whole = jax.tree.map(lambda spec: NamedSharding(mesh, spec), seen)
    return lambda params, batch, keys: loss_fn(jax.lax.with_sharding_constraint(params, whole), batch, keys)


def constrained(config: transformer.Config, mesh: Mesh, seen: Any, split: Any, axes: Axes, *, by_layer: bool) -> Loss:
    """The reference transformer's loss with constraints wherever a careful author would put them.

    Args:
        config: the sizes.
        mesh: the mesh.
        seen: specs of the parameters where the loss uses them.
        split: the axes that split the examples.
        axes: those that split heads and columns, and, with `sequence`, tokens.
        by_layer: gather each layer's weights in the scan, which recomputes all but matmuls.
    """

    def at(*spec: Any) -> Callable[[Any], Any]:
        sharding = NamedSharding(mesh, P(split, *spec))
        return lambda x: jax.lax.with_sharding_constraint(x, sharding)

    between, tokens, columns = at(axes.model if axes.sequence else None), at(), at(None, axes.model)
    whole = jax.tree.map(lambda spec: NamedSharding(mesh, spec), seen)
    layer_whole = jax.tree.map(lambda spec: NamedSharding(mesh, P(*spec[1:])), seen["layers"])

    def attention(weights: Any, x_BTD: jax.Array) -> jax.Array:
        q, k, v = (columns(jnp.einsum("BTD,DHK->BTHK", x_BTD, weights[name])) for name in ("query", "key", "value"))
        positions_T = jnp.arange(x_BTD.shape[1])
        y_BTHK = columns(dot_attention(blocks.rotate(q, positions_T), blocks.rotate(k, positions_T), v))
        return jnp.einsum("BTHK,HKD->BTD", y_BTHK, weights["attention_out"])

    def mlp(weights: Any, x_BTD: jax.Array) -> jax.Array:
        gate_BTF, up_BTF = (columns(jnp.einsum("BTD,DF->BTF", x_BTD, weights[name])) for name in ("gate", "up"))
        return jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, weights["down"])

    def layer(x_BTD: jax.Array, weights: Any) -> jax.Array:
        weights = jax.lax.with_sharding_constraint(weights, layer_whole)
        for name, block in (("attention_norm", attention), ("mlp_norm", mlp)):
            h_BTD = tokens(blocks.rms_norm(x_BTD, weights[name]))
            x_BTD = x_BTD + between(block(weights, h_BTD))
        return x_BTD

    run = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable) if by_layer else layer

    def loss(params: Any, batch: Any, keys: None) -> sk.Mean:
        once = {name for name in params if not (by_layer and name == "layers")}
        held = params | {name: jax.lax.with_sharding_constraint(params[name], whole[name]) for name in once}
        x_BTD = between(held["embed"][batch["tokens"]])
        x_BTD, _ = jax.lax.scan(lambda x, weights: (run(x, weights), None), x_BTD, held["layers"])
        x_BTD = tokens(blocks.rms_norm(x_BTD, held["final_norm"]))
        logits_BTV = columns(jnp.einsum("BTD,DV->BTV", x_BTD, held["head"]))
        right_BT = jnp.take_along_axis(logits_BTV, batch["targets"][..., None], axis=-1)[..., 0]
        return sk.Mean.of(jax.nn.logsumexp(logits_BTV, axis=-1) - right_BT)

    return loss


def in_microbatches(
    name: str, loss_fn: Loss, optimizer: Any, carry: Any, batch: Any, mesh: Mesh, axes: tuple[str, ...], count: int
) -> bench.Case:
    """Data parallelism, or FSDP where the carry is split: each microbatch gathers all weights, and reduces gradients.

    Autodiff places the reductions: of a replicated weight a psum, of a gathered one a reduce-scatter.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, carry[0])
    ways = mesh.size

    def whole(shard: jax.Array, spec: P) -> jax.Array:
        dims = [dim for dim, names in enumerate(spec) if names is not None]
        return lax.all_gather(shard, axes, axis=dims[0], tiled=True) if dims else shard

    def local(params: Any, batch: Any) -> Any:
        def loss(params: Any, micro: Any) -> jax.Array:
            return make_scalar(loss_fn)(jax.tree.map(whole, params, specs), micro) / (ways * count)

        def add(total: Any, micro: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(loss)(params, micro)
            return jax.tree.map(jnp.add, total, found), None

        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        nothing = lax.pcast(jnp.float32(0), axes, to="varying"), jax.tree.map(jnp.zeros_like, params)
        (total, gradients), _ = lax.scan(add, nothing, split)
        return lax.psum(total, axes), gradients

    gradient = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(axes)), out_specs=(P(), specs))

    def step(carry: Any, batch: Any) -> Any:
        loss, gradients = gradient(carry[0], batch)
        return apply_optimizer(optimizer, carry, gradients, loss)

    return bench.Case(name, jitted(step, carry, mesh), carry, (batch,))


def scan_gpipe(
    name: str, config: transformer.Config, optimizer: Any, carry: Any, batch: Any, mesh: Mesh, axis: str, count: int
) -> bench.Case:
    """GPipe as one scan, differentiated: every device computes its stage at each of m + p - 1 ticks, and all is saved.

    The examples are split over the other axes of the mesh.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, carry[0])
    embed, stage, head = transformer.pieces(config)
    others = tuple(name for name in mesh.axis_names if name != axis)
    last = mesh.shape[axis] - 1

    def local(params: Any, batch: Any) -> jax.Array:
        device = lax.axis_index(axis)
        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        layers = (params["layers"], jnp.arange(config.layers // (last + 1)))

        def at(t: jax.Array) -> Any:
            return jax.tree.map(lambda x: x[jnp.clip(t, 0, count - 1)], split)

        def tick(state: Any, t: jax.Array) -> Any:
            before, total = state
            first = embed(params, at(t), None)
            x = first._replace(x=jnp.where(device == 0, first.x, before))
            y = stage(layers, x, None)
            nats = head(params, y, at(t - last))[0].total
            total = total + jnp.where((device == last) & (t >= last), nats, 0.0)
            return (lax.ppermute(y.x, axis, [(i, i + 1) for i in range(last)]), total), None

        shape = jax.eval_shape(lambda: embed(params, at(jnp.int32(0)), None)).x
        zero = lax.pcast((jnp.zeros(shape.shape, shape.dtype), jnp.float32(0)), mesh.axis_names, to="varying")
        (_, total), _ = lax.scan(tick, zero, jnp.arange(count + last))
        return lax.psum(total, mesh.axis_names)

    split = P(others) if others else P()
    nats = jax.shard_map(local, mesh=mesh, in_specs=(specs, split), out_specs=P())

    def step(carry: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: nats(params, batch) / batch["tokens"].size)(carry[0])
        return apply_optimizer(optimizer, carry, gradients, loss)

    return bench.Case(name, jitted(step, carry, mesh), carry, (batch,))


def jitted(step: Any, carry: Any, mesh: Mesh) -> Any:
    """The step with its carry donated, and laid out after it as before."""
    held = jax.tree.map(lambda x: x.sharding, carry)
    return jax.jit(step, out_shardings=(held, NamedSharding(mesh, P())), donate_argnums=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code is 1 if a result is wrong."""
    options = start(__doc__, argv, devices=8)
    size, examples, tokens = (16, 16, 4) if options.smoke else (128, 16, 64)
    work = reference(transformer.Config(layers=4, dim=size, heads=4), examples, tokens)
    mesh = sk.make_mesh(data=2, model=-1)
    records = bench.strategies(
        work,
        mesh=mesh,
        beside=beside(work, mesh),
        calls=options.calls or 1,
        rounds=options.rounds or (2 if options.smoke else 100),
        compiler_options={"xla_backend_optimization_level": 0} if options.smoke else {},
        progress=lambda name: print(f"compiling {name}", file=sys.stderr, flush=True),
    )
    print(text(records))
    if options.json:
        write(records, options.json)
    return int(any(record["wrong"] for record in records))


if __name__ == "__main__":
    raise SystemExit(main())

"""Beside the automatic partitioner: a step with explicit collectives, and the same as plain jit with NamedShardings.

    python -m benchmarks.partitioner

The reference transformer, AdamW, float32. Every step of a row holds its state in the same layouts, donates it, and
gives the same results. For jit the layouts are the shardings of its arguments and results.

    jit                     the layouts, and a with_sharding_constraint on the gradients, to the layout of the update
    jit, all                a constraint on the activations too, split as ours are, and on the weights, gathered once
    jit, all, by layer      the same with each layer's weights gathered in the scan, which recomputes all but matmuls
    others                  `make_train_step` with plans of these layouts; by layer they recompute as much

Bytes are what one device sends in one step, as a ring sends it: in the compiled program, by one reader for all, and for
ours also as written, by the census. Temp is the compiler's figure for one device. Times are ratios to "jit" within the
same round, steps in a loop inside one jit; `--explain` leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.analysis import compiled
from shardkit.layers.attention import dot_attention
from shardkit.models import transformer
from shardkit.models.transformer import Axes
from shardkit.partitioning.placement import map_layouts

MIB = 2**20
LEARNING_RATE = 1e-5  # small: AdamW makes whole steps of rounding where a gradient is nearly zero
CONFIG = transformer.Config(layers=6, dim=256, heads=8)
LAYERS = ("layers",)
RULES = transformer.tensor_rules(CONFIG, "model", CONFIG.heads)


class Row(NamedTuple):
    """A mesh, the plans, all of which hold the state in the same layouts, and the axes over which the model sends."""

    mesh: dict[str, int]
    plans: dict[str, sk.Plan]
    axes: Axes = transformer.ONE_DEVICE


def tensor(name: str, mesh: dict[str, int], *, sequence: bool) -> Row:
    """Tensor parallelism over "model", beside fsdp where the mesh has it."""
    plans = {name: sk.tp("model", RULES, sequence=sequence)}
    if "fsdp" in mesh:
        ways = {name: sk.fsdp("fsdp"), f"{name}, by layer": sk.fsdp("fsdp", layerwise=LAYERS)}
        plans = {key: sk.chain(fsdp, plans[name]) for key, fsdp in ways.items()}
    return Row(mesh, plans, Axes("model", sequence, impl="gather"))


ROWS = {
    "parameters and state whole": Row({"data": -1}, {"dp": sk.dp("data")}),
    "state in parts": Row(
        {"data": -1},
        {
            "zero1": sk.zero1("data"),
            "zero1, by layer": sk.zero1("data", layerwise=LAYERS),
            "zero2": sk.zero2("data"),
            "zero2, by layer": sk.zero2("data", layerwise=LAYERS),
        },
    ),
    "all in parts": Row(
        {"data": -1},
        {"fsdp": sk.fsdp("data"), "fsdp, by layer": sk.fsdp("data", layerwise=LAYERS)},
    ),
    "all in parts, two replicas": Row(
        {"data": 2, "fsdp": -1},
        {
            "hsdp": sk.chain(sk.dp("data"), sk.fsdp("fsdp")),
            "hsdp, by layer": sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=LAYERS)),
        },
    ),
    "heads and columns in 2, all in 4": tensor("fsdp x tp", {"fsdp": -1, "model": 2}, sequence=False),
    "the same, and tokens in 2": tensor("fsdp x tp, sequence", {"fsdp": -1, "model": 2}, sequence=True),
    "heads and columns in 8": tensor("tp", {"model": 8}, sequence=False),
    "the same, and tokens in 8": tensor("tp, sequence", {"model": 8}, sequence=True),
}
SMOKE = ("state in parts", "the same, and tokens in 2")  # between them every kind of variant
Pin = Callable[[Any], Any]


def batch(config: transformer.Config, examples: int, tokens: int) -> Any:
    """Random tokens and targets."""
    keys = jax.random.split(jax.random.key(1))
    shape = (examples, tokens)
    names = ("tokens", "targets")
    return {name: jax.random.randint(key, shape, 0, config.vocabulary) for name, key in zip(names, keys, strict=True)}


def variants(row: Row, mesh: Mesh, config: transformer.Config, examples: int, tokens: int) -> list[bench.Case]:
    """The steps of a row, with the same parameters, optimizer and batch; plain jit first."""
    optimizer = optax.adamw(LEARNING_RATE)
    grad_fn = sk.value_and_grad(transformer.loss_fn(config, row.axes))
    ours = {name: sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan) for name, plan in row.plans.items()}
    plan = next(iter(row.plans.values()))
    states = [each.init(transformer.init(jax.random.key(0), config), jax.random.key(2)) for each in ours.values()]
    state = states[-1]
    split = plan.batch_spec(mesh)
    data = jax.device_put(batch(config, examples, tokens), NamedSharding(mesh, split))

    layouts = plan.layouts(state.params, mesh)
    update = map_layouts(lambda layout: NamedSharding(mesh, layout.update), layouts)
    seen = map_layouts(lambda layout: layout.seen, layouts)
    theirs = partial(partitioned, optimizer, (state.params, state.opt_state), data, update)
    pinned = partial(pinned_loss, config, mesh, seen, split[0] if split else None, row.axes)
    steps = [theirs("jit", transformer.loss_fn(config)), theirs("jit, all", pinned(by_layer=False))]
    steps += [theirs("jit, all, by layer", pinned(by_layer=True))] if len(row.plans) > 1 else []
    each_own = zip(ours.items(), states, strict=True)  # whole and by layer, another dim of a leaf may be split
    steps += [bench.Case(name, each.step, own, (data,), results) for (name, each), own in each_own]
    return steps


def results(state: sk.TrainState, metrics: Any) -> Any:
    """What must agree; the first moments show the gradients, which the parameters after AdamW do not."""
    return (state.params, state.opt_state), metrics


def pin(shardings: Any) -> Pin:
    """A tree's layout as a constraint on it."""
    return lambda tree: jax.lax.with_sharding_constraint(tree, shardings)


def partitioned(optimizer: Any, carry: Any, data: Any, update: Any, name: str, loss_fn: Any) -> bench.Case:
    """The step on global arrays, as one writes it for one device, with the layouts of its arguments and results."""

    def step(carry: Any, data: Any) -> tuple[Any, Any]:
        params, opt_state = carry

        def mean(params: Any) -> tuple[jax.Array, Any]:
            loss, aux = loss_fn(params, data, None)
            means = {name: each.total / each.weight for name, each in aux.items()}
            return loss.total / loss.weight, {"weight": loss.weight, **means}

        (loss, means), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, opt_state = optimizer.update(pin(update)(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **means}

    held = jax.tree.map(lambda x: x.sharding, carry)
    given = jax.tree.map(lambda x: x.sharding, data)
    whole = NamedSharding(jax.tree.leaves(given)[0].mesh, P())
    jitted = jax.jit(step, in_shardings=(held, given), out_shardings=(held, whole), donate_argnums=0)
    return bench.Case(name, jitted, carry, (data,))


def pinned_loss(config: transformer.Config, mesh: Mesh, seen: Any, split: Any, axes: Axes, *, by_layer: bool) -> Any:
    """The transformer's loss with constraints wherever a careful author would put them."""
    at = lambda *spec: NamedSharding(mesh, P(split, *spec))  # noqa: E731
    between = pin(at(axes.model if axes.sequence else None))
    tokens, columns = pin(at()), pin(at(None, axes.model))  # of columns, heads or the vocabulary
    whole = jax.tree.map(lambda spec: NamedSharding(mesh, spec), seen)
    layer_whole = jax.tree.map(lambda spec: NamedSharding(mesh, P(*spec[1:])), seen["layers"])

    def attention(weights: Any, x_BTD: jax.Array) -> jax.Array:
        q, k, v = (columns(jnp.einsum("BTD,DHK->BTHK", x_BTD, weights[name])) for name in ("query", "key", "value"))
        positions_T = jnp.arange(x_BTD.shape[1])
        y_BTHK = columns(dot_attention(transformer.rotate(q, positions_T), transformer.rotate(k, positions_T), v))
        return jnp.einsum("BTHK,HKD->BTD", y_BTHK, weights["attention_out"])

    def mlp(weights: Any, x_BTD: jax.Array) -> jax.Array:
        gate_BTF, up_BTF = (columns(jnp.einsum("BTD,DF->BTF", x_BTD, weights[name])) for name in ("gate", "up"))
        return jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, weights["down"])

    def layer(x_BTD: jax.Array, weights: Any) -> jax.Array:
        weights = pin(layer_whole)(weights)
        for name, block in (("attention_norm", attention), ("mlp_norm", mlp)):
            h_BTD = tokens(transformer.rms_norm(x_BTD, weights[name]))
            x_BTD = x_BTD + between(block(weights, h_BTD))
        return x_BTD

    if by_layer:
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)

    def loss(params: Any, data: Any, keys: None) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        held = {
            name: each if by_layer and name == "layers" else pin(whole[name])(each) for name, each in params.items()
        }
        x_BTD = between(held["embed"][data["tokens"]])
        x_BTD, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x_BTD, held.get("layers", params["layers"]))
        x_BTD = tokens(transformer.rms_norm(x_BTD, held["final_norm"]))
        logits_BTV = columns(jnp.einsum("BTD,DV->BTV", x_BTD, held["head"]))
        right_BT = jnp.take_along_axis(logits_BTV, data["targets"][..., None], axis=-1)[..., 0]
        hits_BT = jnp.argmax(logits_BTV, axis=-1) == data["targets"]
        return sk.Mean.of(jax.nn.logsumexp(logits_BTV, axis=-1) - right_BT), {"accuracy": sk.Mean.of(hits_BT)}

    return loss


def sizes(variant: bench.Case) -> dict[str, float]:
    """Bytes that a device sends in a step, as written (0 where nothing is) and as compiled, and its temporaries."""
    found = compiled(variant.step, variant.carry, *variant.args)
    return {
        "written_bytes": float(found.census.sent()),
        "wire_bytes": float(sum(row.total for row in found.rows)),
        "temp_bytes": found.memory.temp,
    }


def line(record: bench.Record) -> str:
    """A record as a row of the table, without times where it has none."""
    written = f"{record['written_bytes'] / MIB:.1f}" if record["written_bytes"] else ""
    cells = [record["row"], record["case"], written]
    cells += [f"{record[name] / MIB:.1f}" for name in ("wire_bytes", "temp_bytes")]
    if "wall_ratio_median" in record:
        cells += [f"{record[f'{clock}_ratio_median']:.2f}" for clock in ("wall", "cpu")]
        cells += [f"{record['disagreement_relative_max']:.0e}"]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    options = start(__doc__, argv, devices=8, explain="count bytes instead of timing")
    config = transformer.Config(layers=2, dim=64, heads=8) if options.smoke else CONFIG
    calls, rounds = (1, 1) if options.smoke else (options.calls or 2, options.rounds or 15)
    head = ["held", "step", "sent, as written", "sent, MiB", "temp, MiB"]
    head += [] if options.explain else ["wall", "CPU", "difference"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row, each_row in ROWS.items():
        if options.smoke and row not in SMOKE:
            continue
        mesh = sk.make_mesh(**each_row.mesh)
        steps = variants(each_row, mesh, config, examples=mesh.size, tokens=16 if options.smoke else 128)
        records = [{"benchmark": "partitioner", "row": row, "case": each.name, **sizes(each)} for each in steps]
        if not options.explain:
            timed = bench.measure("partitioner", row, steps, calls=calls, rounds=rounds, tolerance=1e-4)
            records = [one | times for one, times in zip(records, timed, strict=True)]
        bench.report(records, options.json, line)


if __name__ == "__main__":
    main()

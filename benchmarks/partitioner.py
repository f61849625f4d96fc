"""Beside the automatic partitioner: a step with explicit collectives, and the same as plain jit with NamedShardings.

    python -m benchmarks.partitioner

The reference transformer, AdamW, float32. Every step of a row holds its state in the same layouts, donates it, and
gives the same results. For jit the layouts are the shardings of its arguments and results.

    jit                     the layouts, and a with_sharding_constraint on the gradients, to the layout of the update
    jit, all                a constraint on the activations too, split as the batch, and on the weights, whole once
    jit, all, by layer      the same with each layer's weights whole inside the scan, which recomputes all but matmuls
    others                  `make_train_step` with plans of these layouts; by layer they recompute as much

Bytes are what one device sends in one step, as a ring sends it: in the compiled program, by one reader for all, and for
ours also as written, by the census. Temp is the compiler's figure for one device. Times are ratios to "jit" within the
same round, steps in a loop inside one jit; `--explain` leaves them out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks import harness
from shardkit.analysis import compiled
from shardkit.models import transformer
from shardkit.parallel.plan import map_layouts

MIB = 2**20
LEARNING_RATE = 1e-5  # small: AdamW makes whole steps of rounding where a gradient is nearly zero
CONFIG = transformer.Config(layers=6, dim=256, heads=8)
LAYERS = ("layers",)
# For each row the mesh and the plans, all of which hold the state in the same layouts.
ROWS: dict[str, tuple[dict[str, int], dict[str, sk.Plan]]] = {
    "parameters and state whole": ({"data": -1}, {"dp": sk.dp("data")}),
    "state in parts": (
        {"data": -1},
        {
            "zero1": sk.zero1("data"),
            "zero2": sk.zero2("data"),
            "zero2, by layer": sk.zero2("data", layerwise=LAYERS),
        },
    ),
    "all in parts": (
        {"data": -1},
        {"fsdp": sk.fsdp("data"), "fsdp, by layer": sk.fsdp("data", layerwise=LAYERS)},
    ),
    "all in parts, two replicas": (
        {"data": 2, "fsdp": -1},
        {
            "hsdp": sk.chain(sk.dp("data"), sk.fsdp("fsdp")),
            "hsdp, by layer": sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=LAYERS)),
        },
    ),
}
Pin = Callable[[Any], Any]


def batch(config: transformer.Config, examples: int, tokens: int) -> Any:
    """Random tokens and targets."""
    keys = jax.random.split(jax.random.key(1))
    shape = (examples, tokens)
    names = ("tokens", "targets")
    return {name: jax.random.randint(key, shape, 0, config.vocabulary) for name, key in zip(names, keys, strict=True)}


def variants(
    plans: dict[str, sk.Plan], mesh: Mesh, config: transformer.Config, examples: int, tokens: int
) -> list[harness.Variant]:
    """The steps of a row, with the same parameters, optimizer and batch; plain jit first."""
    optimizer = optax.adamw(LEARNING_RATE)
    grad_fn = sk.value_and_grad(transformer.loss_fn(config))
    ours = {name: sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan) for name, plan in plans.items()}
    last, plan = list(ours.values())[-1], list(plans.values())[-1]
    state = last.init(transformer.init(jax.random.key(0), config), jax.random.key(2))
    split = NamedSharding(mesh, plan.batch_spec(mesh))
    data = jax.device_put(batch(config, examples, tokens), split)

    layouts = plan.layouts(state.params, mesh)
    update = map_layouts(lambda layout: NamedSharding(mesh, layout.update), layouts)
    theirs = partial(partitioned, optimizer, (state.params, state.opt_state), data, update)
    pinned = partial(pinned_loss, config, pin(split), pin(NamedSharding(mesh, P())))
    steps = [theirs("jit", transformer.loss_fn(config)), theirs("jit, all", pinned(by_layer=False))]
    steps += [theirs("jit, all, by layer", pinned(by_layer=True))] if len(plans) > 1 else []
    steps += [harness.Variant(name, each.step, state, (data,), results) for name, each in ours.items()]
    return steps


def results(state: sk.TrainState, metrics: Any) -> Any:
    """What must agree; the first moments show the gradients, which the parameters after AdamW do not."""
    return (state.params, state.opt_state), metrics


def pin(shardings: Any) -> Pin:
    """A tree's layout as a constraint on it."""
    return lambda tree: jax.lax.with_sharding_constraint(tree, shardings)


def partitioned(optimizer: Any, carry: Any, data: Any, update: Any, name: str, loss_fn: Any) -> harness.Variant:
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
    return harness.Variant(name, jitted, carry, (data,))


def pinned_loss(config: transformer.Config, activations: Pin, whole: Pin, *, by_layer: bool) -> Any:
    """The transformer's loss with constraints wherever a careful author would put them."""

    def layer(x_BTD: jax.Array, weights: Any) -> jax.Array:
        return activations(transformer.block(whole(weights), x_BTD, config, None))

    if by_layer:
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)

    def loss(params: Any, data: Any, keys: None) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        params = {name: each if by_layer and name == "layers" else whole(each) for name, each in params.items()}
        x_BTD = activations(params["embed"][data["tokens"]])
        x_BTD, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x_BTD, params["layers"])
        x_BTD = transformer.rms_norm(x_BTD, params["final_norm"])
        logits_BTV = activations(jnp.einsum("BTD,DV->BTV", x_BTD, params["head"]))
        right_BT = jnp.take_along_axis(logits_BTV, data["targets"][..., None], axis=-1)[..., 0]
        hits_BT = jnp.argmax(logits_BTV, axis=-1) == data["targets"]
        return sk.Mean.of(jax.nn.logsumexp(logits_BTV, axis=-1) - right_BT), {"accuracy": sk.Mean.of(hits_BT)}

    return loss


def sizes(variant: harness.Variant) -> dict[str, float]:
    """Bytes that a device sends in a step, as written (0 where nothing is) and as compiled, and its temporaries."""
    found = compiled(variant.step, variant.carry, *variant.args)
    memory = variant.step.lower(variant.carry, *variant.args).compile().memory_analysis()
    return {
        "written_bytes": float(found.census.sent()),
        "wire_bytes": float(sum(row.total for row in found.rows)),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def line(record: harness.Record) -> str:
    """A record as a row of the table, without times where it has none."""
    written = f"{record['written_bytes'] / MIB:.1f}" if record["written_bytes"] else ""
    cells = [record["row"], record["variant"], written]
    cells += [f"{record[name] / MIB:.1f}" for name in ("wire_bytes", "temp_bytes")]
    if "wall_ratio_median" in record:
        cells += [f"{record[f'{clock}_ratio_median']:.2f}" for clock in ("wall", "cpu")]
        cells += [f"{record['disagreement_relative_max']:.0e}"]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    options = harness.start(__doc__, argv, devices=8, explain="count bytes instead of timing")
    config = transformer.Config(layers=2, dim=64, heads=2) if options.smoke else CONFIG
    calls, rounds = (1, 1) if options.smoke else (options.calls or 2, options.rounds or 15)
    head = ["held", "step", "sent, as written", "sent, MiB", "temp, MiB"]
    head += [] if options.explain else ["wall", "CPU", "difference"]
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row, (axes, plans) in ROWS.items():
        mesh = sk.make_mesh(**axes)
        steps = variants(plans, mesh, config, examples=mesh.size, tokens=16 if options.smoke else 128)
        records = [{"benchmark": "partitioner", "row": row, "variant": each.name, **sizes(each)} for each in steps]
        if not options.explain:
            timed = harness.measure("partitioner", row, steps, calls=calls, rounds=rounds, tolerance=1e-4)
            records = [one | times for one, times in zip(records, timed, strict=True)]
        for record in records:
            print(line(record), flush=True)
            if options.json is not None:
                with options.json.open("a") as out:
                    out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

"""What the train-step builder costs, against the same step written by hand.

On a mesh the hand-written step is `jax.jit(jax.shard_map(...))`: parameters cast to varying, local value_and_grad, psum
of the gradients and of one stack of scalars (one psum a scalar costs up to a tenth of a small step), a division, optax.
On one device it is a plain `jax.jit` step with no mesh at all. The hand-written steps have no keys: the builder makes
one key per example each step, which the compiler must remove when the loss draws nothing. The last variant of each row
is the hand-written step again, under another name: its ratio is 1 but for what this machine cannot tell apart.

`--explain` counts equations and compiled instructions instead of timing. `--dispatch` times calls on one device of a
step of 10 parameters and Adam (32 leaves) that computes next to nothing: the plain jit step, the program that the
builder's step calls, and that step, which checks the state first. Everything is float32.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.bench.measure import MODES
from shardkit.models import transformer

TARGET = 1.05
LEARNING_RATE = 1e-4  # small: a hundred steps must not amplify rounding into a disagreement


class Model(NamedTuple):
    """A loss with its parameters, a global batch, and how many calls make a round of about a fifth of a second."""

    name: str
    loss_fn: Callable[[Any, Any, Any], Any]
    params: Any
    batch: Any
    calls: int


def mlp(width: int = 64, examples: int = 64) -> Model:
    """Three dense layers and a squared error: so little arithmetic that any overhead would show."""
    sizes = (32, width, width, 1)
    keys = jax.random.split(jax.random.key(0), len(sizes) + 1)
    params = [
        {"w": jax.random.normal(key, (n, m)) / np.sqrt(n), "b": jnp.zeros(m)}
        for key, n, m in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]
    x = jax.random.normal(keys[-1], (examples, sizes[0]))

    def loss_fn(params: Any, batch: Any, keys: Any) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        h = batch["x"]
        for layer in params[:-1]:
            h = jnp.tanh(h @ layer["w"] + layer["b"][None, :])
        error = (h @ params[-1]["w"] + params[-1]["b"][None, :])[:, 0] - batch["y"]
        return sk.Mean.of(error * error), {"absolute": sk.Mean.of(jnp.abs(error))}

    return Model("mlp", loss_fn, params, {"x": x, "y": jnp.sin(jnp.sum(x, axis=1))}, calls=100)


def small_transformer(dim: int = 64, examples: int = 16, tokens: int = 32) -> Model:
    """The reference transformer, two layers, no dropout."""
    config = transformer.Config(layers=2, dim=dim, heads=4)
    key = jax.random.key(1)
    batch = {
        name: jax.random.randint(jax.random.fold_in(key, i), (examples, tokens), 0, config.vocabulary)
        for i, name in enumerate(("tokens", "targets"))
    }
    return Model("transformer", transformer.loss_fn(config), transformer.init(key, config), batch, calls=10)


def built(model: Model, optimizer: Any, mesh: Mesh) -> bench.Case:
    """The step from the builder."""
    grad_fn = sk.value_and_grad(model.loss_fn)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=sk.dp("data"))
    batch = jax.device_put(model.batch, NamedSharding(mesh, P("data")))
    state = init(model.params, jax.random.key(2))
    return bench.Case("builder", step, state, (batch,), lambda s, metrics: (s.params, s.opt_state, metrics))


def by_hand(model: Model, optimizer: Any, mesh: Mesh, name: str) -> bench.Case:
    """The same step as a careful reader of jax's documentation would write it for one axis."""

    def sums(params: Any, batch: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        loss, aux = model.loss_fn(params, batch, None)
        return loss.total, (loss.weight, aux)

    def per_device(params: Any, batch: Any) -> tuple[Any, Any]:
        params = lax.pcast(params, ("data",), to="varying")
        (total, (weight, aux)), grads = jax.value_and_grad(sums, has_aux=True)(params, batch)
        scalars, structure = jax.tree.flatten((total, weight, aux))
        total, weight, aux = structure.unflatten(lax.psum(jnp.stack(scalars), "data"))
        grads = lax.psum(grads, "data")
        means = {"loss": total / weight, "weight": weight, **{k: m.total / m.weight for k, m in aux.items()}}
        return means, jax.tree.map(lambda g: g / weight, grads)

    on_mesh = jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    carry = jax.device_put((model.params, optimizer.init(model.params)), NamedSharding(mesh, P()))
    batch = jax.device_put(model.batch, NamedSharding(mesh, P("data")))
    return _variant(name, on_mesh, optimizer, carry, batch)


def on_one_device(model: Model, optimizer: Any, device: jax.Device, name: str) -> bench.Case:
    """A plain jitted step without a mesh."""

    def gradient(params: Any, batch: Any) -> tuple[Any, Any]:
        def mean(params: Any) -> tuple[jax.Array, Any]:
            loss, aux = model.loss_fn(params, batch, None)
            means = {k: m.total / m.weight for k, m in aux.items()}
            return loss.total / loss.weight, {"weight": loss.weight, **means}

        (loss, means), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return {"loss": loss, **means}, grads

    carry = jax.device_put((model.params, optimizer.init(model.params)), device)
    return _variant(name, gradient, optimizer, carry, jax.device_put(model.batch, device))


def _variant(name: str, gradient: Callable[..., Any], optimizer: Any, carry: Any, batch: Any) -> bench.Case:
    @partial(jax.jit, donate_argnums=0)
    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = carry
        metrics, grads = gradient(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    return bench.Case(name, step, carry, (batch,), lambda carry, metrics: (*carry, metrics))


def variants(model: Model, size: int) -> list[bench.Case]:
    """The hand-written step, the builder's, and the hand-written one again, on the first `size` devices."""
    devices, optimizer = jax.devices()[:size], optax.adamw(LEARNING_RATE)
    mesh = sk.make_mesh(devices, data=size)
    hand = (
        partial(by_hand, model, optimizer, mesh) if size > 1 else partial(on_one_device, model, optimizer, devices[0])
    )
    kind = "by hand" if size > 1 else "plain jit"
    return [hand(kind), built(model, optimizer, mesh), hand(f"{kind} again")]


def dispatched() -> list[bench.Case]:
    """A plain jit step, the program that the builder's step calls, and that step: what a call costs in Python."""
    params = {f"w{number}": jnp.ones(4) for number in range(10)}

    def loss_fn(params: Any, batch: Any, keys: Any) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        return sk.Mean.of(batch * sum(jnp.sum(w) for w in params.values())), {}

    model = Model("10 vectors", loss_fn, params, jnp.ones(8), calls=300)
    optimizer = optax.adam(LEARNING_RATE)
    step = built(model, optimizer, sk.make_mesh(jax.devices()[:1], data=1))
    key = step.carry.key
    batch = step.args[0]
    run = step.step._run
    program = bench.Case("program", run, step.carry._replace(key=None), (key, batch), step.checked)
    return [on_one_device(model, optimizer, jax.devices()[0], "plain jit"), program, step]


def counted(variant: bench.Case) -> tuple[Counter[str], Counter[str]]:
    """How often each primitive stands in the jaxpr of a step, and each opcode in the compiled program."""
    traced = variant.step.trace(variant.carry, *variant.args)
    module = traced.lower().compile().runtime_executable().hlo_modules()[0]
    return _equations(traced.jaxpr.jaxpr), Counter(
        i.opcode.name for c in module.computations() for i in c.instructions()
    )


def explain(hand: bench.Case, builder: bench.Case) -> str:
    """What the builder's step has more or less of than the hand-written one, before and after the compiler."""
    lines = []
    for what, a, b in zip(("equations", "instructions"), counted(hand), counted(builder), strict=True):
        more = ", ".join(f"{name} {b[name] - a[name]:+d}" for name in sorted(a | b) if a[name] != b[name])
        lines.append(f"{what}: {hand.name} {a.total()}, {builder.name} {b.total()} ({more})")
    return "\n".join(lines)


def _equations(jaxpr: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name] += 1
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                counts += _equations(inner)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows on as many of 8, 2 and 1 devices as there are; 1 if the target is missed."""
    missed = 0
    options = start(
        __doc__,
        argv,
        devices=8,
        explain="count equations and instructions instead of timing",
        dispatch="time calls of a step that computes next to nothing",
    )
    if options.dispatch:
        calls = options.calls or (2 if options.smoke else 300)
        rounds = options.rounds or (2 if options.smoke else 40)
        cases = dispatched()
        bench.report(
            bench.measure("step_overhead", "10 vectors, Adam", cases, mode="dispatched", calls=calls, rounds=rounds),
            options.json,
        )
        return 0
    models, sizes = ([mlp(16, 8)], (2, 1)) if options.smoke else ([mlp(), small_transformer()], (8, 2, 1))
    for model, size in itertools.product(models, [n for n in sizes if n <= jax.device_count()]):
        row = f"{model.name}, {f'data={size}' if size > 1 else 'one device'}"
        rows = variants(model, size)
        if options.explain:
            print(f"\n{row}\n{explain(*rows[:2])}", flush=True)
            continue
        calls = options.calls or (2 if options.smoke else model.calls)
        rounds = options.rounds or (2 if options.smoke else 30)
        for mode in MODES:
            records = bench.measure("step_overhead", row, rows, mode=mode, calls=calls, rounds=rounds, tolerance=1e-4)
            bench.report(records, options.json)
            if not options.smoke:
                wall, cpu = records[1]["wall_ratio_median"], records[1]["cpu_ratio_median"]
                late = max(wall, cpu) > TARGET
                print(
                    f"builder {wall:.3f} wall, {cpu:.3f} CPU: target {TARGET} {'missed' if late else 'met'}", flush=True
                )
                missed |= late
    return missed


if __name__ == "__main__":
    sys.exit(main())

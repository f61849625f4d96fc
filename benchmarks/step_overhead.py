"""What the train-step builder costs, against the same step written by hand.

On a mesh the hand-written step is `jax.jit(jax.shard_map(...))`: parameters cast to varying, local value_and_grad, psum
of the gradients and of one stack of scalars (one psum a scalar costs up to a tenth of a small step), a division, optax.
On one device it is a plain `jax.jit` step with no mesh at all. The hand-written steps have no keys: the builder makes
one key per example each step, which the compiler must remove when the loss draws nothing. The last case of each row is
the hand-written step again, under another name: its ratio is 1 but for what this machine cannot tell apart.

`--explain` counts equations and compiled instructions instead of timing. `--dispatch` times calls on one device of a
step of 10 parameters and Adam (32 leaves) that computes next to nothing: the plain jit step, the program that the
builder's step calls, and that step, which checks the state first. Everything is float32.
"""

from __future__ import annotations

import argparse
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
from benchmarks.start import choose_calls, choose_rounds, start
from shardkit import bench
from shardkit.bench.measure import MODES
from shardkit.bench.records import Record
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


def make_mlp(width: int = 64, examples: int = 64) -> Model:
    """Three dense layers and a squared error: so little arithmetic that any overhead would show."""
    features = 32
    *layer_keys, _, example_key = jax.random.split(jax.random.key(0), 5)
    dims = ((features, width), (width, width), (width, 1))
    params = []
    for key, (rows, columns) in zip(layer_keys, dims, strict=True):
        weights = jax.random.normal(key, (rows, columns)) / np.sqrt(rows)
        params.append({"w": weights, "b": jnp.zeros(columns)})
    x = jax.random.normal(example_key, (examples, features))

    def loss_fn(params: Any, batch: Any, keys: Any) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        *hidden_layers, last = params
        h = batch["x"]
        for layer in hidden_layers:
            h = jnp.tanh(h @ layer["w"] + layer["b"][None, :])
        error = (h @ last["w"] + last["b"][None, :])[:, 0] - batch["y"]
        return sk.Mean.of(error * error), {"absolute": sk.Mean.of(jnp.abs(error))}

    batch = {"x": x, "y": jnp.sin(jnp.sum(x, axis=1))}
    return Model("mlp", loss_fn, params, batch, calls=100)


def make_transformer(dim: int = 64, examples: int = 16, tokens: int = 32) -> Model:
    """The reference transformer, two layers, no dropout."""
    config = transformer.Config(layers=2, dim=dim, heads=4)
    key = jax.random.key(1)
    batch = {}
    for number, name in enumerate(("tokens", "targets")):
        batch_key = jax.random.fold_in(key, number)
        batch[name] = jax.random.randint(batch_key, (examples, tokens), 0, config.vocabulary)
    return Model("transformer", transformer.loss_fn(config), transformer.init(key, config), batch, calls=10)


def make_built_case(model: Model, optimizer: Any, mesh: Mesh) -> bench.Case:
    """The step from the builder."""
    grad_fn = sk.value_and_grad(model.loss_fn)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=sk.dp("data"))
    batch = jax.device_put(model.batch, NamedSharding(mesh, P("data")))
    state = init(model.params, jax.random.key(2))
    return bench.Case("builder", step, state, (batch,), _get_state_and_metrics)


def _get_state_and_metrics(state: sk.TrainState, metrics: Any) -> Any:
    return state.params, state.opt_state, metrics


def make_case_by_hand(model: Model, optimizer: Any, mesh: Mesh, name: str) -> bench.Case:
    """The same step as a careful reader of jax's documentation would write it for one axis."""

    def sum_losses(params: Any, batch: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        loss, aux = model.loss_fn(params, batch, None)
        return loss.total, (loss.weight, aux)

    def compute_on_device(params: Any, batch: Any) -> tuple[Any, Any]:
        params = lax.pcast(params, ("data",), to="varying")
        (total, (weight, aux)), grads = jax.value_and_grad(sum_losses, has_aux=True)(params, batch)
        scalars, structure = jax.tree.flatten((total, weight, aux))
        sums = lax.psum(jnp.stack(scalars), "data")
        total, weight, aux = jax.tree.unflatten(structure, sums)
        grads = lax.psum(grads, "data")
        means = {"loss": total / weight, "weight": weight}
        for key, metric in aux.items():
            means[key] = metric.total / metric.weight
        return means, jax.tree.map(lambda g: g / weight, grads)

    on_mesh = jax.shard_map(compute_on_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    carry = jax.device_put((model.params, optimizer.init(model.params)), NamedSharding(mesh, P()))
    batch = jax.device_put(model.batch, NamedSharding(mesh, P("data")))
    return _make_case(name, on_mesh, optimizer, carry, batch)


def make_case_on_one_device(model: Model, optimizer: Any, device: jax.Device, name: str) -> bench.Case:
    """A plain jitted step without a mesh."""

    def compute_mean(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        loss, aux = model.loss_fn(params, batch, None)
        means = {"weight": loss.weight}
        for key, metric in aux.items():
            means[key] = metric.total / metric.weight
        return loss.total / loss.weight, means

    def compute_gradients(params: Any, batch: Any) -> tuple[Any, Any]:
        (loss, means), grads = jax.value_and_grad(compute_mean, has_aux=True)(params, batch)
        return {"loss": loss, **means}, grads

    carry = jax.device_put((model.params, optimizer.init(model.params)), device)
    batch = jax.device_put(model.batch, device)
    return _make_case(name, compute_gradients, optimizer, carry, batch)


def _make_case(name: str, compute_gradients: Callable[..., Any], optimizer: Any, carry: Any, batch: Any) -> bench.Case:
    @partial(jax.jit, donate_argnums=0)
    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = carry
        metrics, grads = compute_gradients(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    return bench.Case(name, step, carry, (batch,), _get_carry_and_metrics)


def _get_carry_and_metrics(carry: Any, metrics: Any) -> Any:
    params, opt_state = carry
    return params, opt_state, metrics


def make_cases(model: Model, size: int) -> list[bench.Case]:
    """The hand-written step, the builder's, and the hand-written one again, on the first `size` devices."""
    devices = jax.devices()[:size]
    optimizer = optax.adamw(LEARNING_RATE)
    mesh = sk.make_mesh(devices, data=size)
    # On one device nobody writes a mesh: there the builder is compared with what one would write instead.
    if size > 1:
        kind = "by hand"
        make_by_hand = partial(make_case_by_hand, model, optimizer, mesh)
    else:
        kind = "plain jit"
        make_by_hand = partial(make_case_on_one_device, model, optimizer, devices[0])
    return [make_by_hand(kind), make_built_case(model, optimizer, mesh), make_by_hand(f"{kind} again")]


def make_dispatched_cases() -> list[bench.Case]:
    """A plain jit step, the program that the builder's step calls, and that step: what a call costs in Python."""
    params = {f"w{number}": jnp.ones(4) for number in range(10)}

    def loss_fn(params: Any, batch: Any, keys: Any) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        total = sum(jnp.sum(w) for w in params.values())
        return sk.Mean.of(batch * total), {}

    model = Model("10 vectors", loss_fn, params, jnp.ones(8), calls=300)
    optimizer = optax.adam(LEARNING_RATE)
    plain = make_case_on_one_device(model, optimizer, jax.devices()[0], "plain jit")
    built = make_built_case(model, optimizer, sk.make_mesh(jax.devices()[:1], data=1))
    step: Any = built.step
    # The step takes the key out of the state, and calls its program with the rest.
    state_without_key = built.carry._replace(key=None)
    program = bench.Case("program", step._run, state_without_key, (built.carry.key, *built.args), built.checked)
    return [plain, program, built]


def count_operations(case: bench.Case) -> tuple[Counter[str], Counter[str]]:
    """How often each primitive stands in the jaxpr of a step, and each opcode in the compiled program."""
    step: Any = case.step
    traced = step.trace(case.carry, *case.args)
    executable = traced.lower().compile().runtime_executable()
    instructions: Counter[str] = Counter()
    for computation in executable.hlo_modules()[0].computations():
        for instruction in computation.instructions():
            instructions[instruction.opcode.name] += 1
    return _count_equations(traced.jaxpr.jaxpr), instructions


def explain(hand: bench.Case, builder: bench.Case) -> str:
    """What the builder's step has more or less of than the hand-written one, before and after the compiler."""
    lines = []
    for kind, by_hand, built in zip(
        ("equations", "instructions"), count_operations(hand), count_operations(builder), strict=True
    ):
        differences = []
        for name in sorted(by_hand | built):
            more = built[name] - by_hand[name]
            if more:
                differences.append(f"{name} {more:+d}")
        totals = f"{hand.name} {by_hand.total()}, {builder.name} {built.total()}"
        lines.append(f"{kind}: {totals} ({', '.join(differences)})")
    return "\n".join(lines)


def _count_equations(jaxpr: Any) -> Counter[str]:
    """The primitives of a program, and of the programs in its equations: bodies of loops, of shard_map, of jit."""
    counts: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name] += 1
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            body = getattr(param, "jaxpr", param)  # of a closed jaxpr
            if hasattr(body, "eqns"):
                counts += _count_equations(body)
    return counts


def judge(records: Sequence[Record]) -> bool:
    """Whether the builder's step takes no longer than the target, by the clock and by the processor; prints it."""
    _, built, _ = records
    # Ratios within a round: the medians of two times would be of different moments of a loaded machine.
    wall = built["wall_ratio_median"]
    cpu = built["cpu_ratio_median"]
    met = max(wall, cpu) <= TARGET
    verdict = "missed"
    if met:
        verdict = "met"
    print(f"builder {wall:.3f} wall, {cpu:.3f} CPU: target {TARGET} {verdict}", flush=True)
    return met


def measure_dispatch(options: argparse.Namespace) -> None:
    """Times the calls of a step that computes next to nothing."""
    records = bench.measure(
        "step_overhead",
        "10 vectors, Adam",
        make_dispatched_cases(),
        mode="dispatched",
        calls=choose_calls(options, 300),
        rounds=choose_rounds(options, 40),
    )
    bench.report(records, options.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows on as many of 8, 2 and 1 devices as there are; 1 if the target is missed."""
    options = start(
        __doc__,
        argv,
        devices=8,
        explain="count equations and instructions instead of timing",
        dispatch="time calls of a step that computes next to nothing",
    )
    if options.dispatch:
        measure_dispatch(options)
        return 0
    if options.smoke:
        models = [make_mlp(16, 8)]
        sizes = [2, 1]
    else:
        models = [make_mlp(), make_transformer()]
        sizes = [8, 2, 1]
    missed = False
    for model in models:
        for size in sizes:
            if size <= jax.device_count():
                missed |= not measure_row(model, size, options)
    return int(missed)


def measure_row(model: Model, size: int, options: argparse.Namespace) -> bool:
    """Measures or explains a model on so many devices; False if the target is missed."""
    place = "one device"
    if size > 1:
        place = f"data={size}"
    row = f"{model.name}, {place}"
    cases = make_cases(model, size)
    if options.explain:
        hand, built, _ = cases
        print(f"\n{row}\n{explain(hand, built)}", flush=True)
        return True
    met = True
    for mode in MODES:
        records = bench.measure(
            "step_overhead",
            row,
            cases,
            mode=mode,
            calls=choose_calls(options, model.calls),
            rounds=choose_rounds(options, 30),
            tolerance=1e-4,
        )
        bench.report(records, options.json)
        if not options.smoke:  # the times of two calls tell nothing
            met &= judge(records)
    return met


if __name__ == "__main__":
    sys.exit(main())

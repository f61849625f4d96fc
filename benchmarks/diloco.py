"""DiLoCo beside data parallelism: loss after equal tokens, and the bytes over the slow axis.

Eight workers (simulated devices) train a small transformer on the bytes of Python's library, adamw inside, and exchange
every H steps: plain averages (sgd of rate 1 outside), or DiLoCo's Nesterov of rate 0.7 and momentum 0.9, not tuned.
`dp` takes the same batches in one step each. The loss is that of the parameters after the last exchange, on bytes that
no run has seen. Bytes are what one device sends over the axis of the workers.

`--first` measures what the first step costs in one process, CPU seconds and programs compiled, beside `dp`.

`--link` times both across two hosts instead, network namespaces whose link `tc` throttles (see links.py): a step of
`dp`, which waits for the link, and the mean of 50 steps of DiLoCo with their exchanges, in turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks import links
from benchmarks.start import start
from benchmarks.text import batch_at, standard_library, validation_batches
from shardkit.meshes.layout import table
from shardkit.models import parameters, transformer

WORKERS, EACH, TOKENS = 8, 4, 64
STEPS = 50  # of a round over the link
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def each_worker(batch: dict[str, np.ndarray], k: int) -> dict[str, np.ndarray]:
    """The examples of worker `k`."""
    return {name: x[k * EACH : (k + 1) * EACH] for name, x in batch.items()}


def across(asked: Mapping[str, Any], tx_bytes: Callable[[], int]) -> list[list[Any]]:
    """What one of two hosts measures: by form, milliseconds a step in each round, and MB that it sends a step."""
    config = transformer.Config(layers=2, dim=128, heads=4, vocabulary=256)
    params, key = parameters.init(jax.random.key(0), config), jax.random.key(1)
    grad_fn, size = sk.value_and_grad(transformer.loss_fn(config)), sum(x.nbytes for x in jax.tree.leaves(params))
    batch = batch_at(standard_library().train, seed=1, step=0, batch=2 * EACH, length=TOKENS)
    mesh = sk.make_mesh(host=2, device=1)

    def step_over(mesh: Any, axis: str) -> sk.TrainStep:
        return sk.make_train_step(grad_fn, optax.adamw(1e-3), mesh=mesh, plan=sk.dp(axis))

    whole, split = step_over(mesh, "host"), NamedSharding(mesh, P("host"))
    ours = {name: jax.make_array_from_callback(x.shape, split, x.__getitem__) for name, x in batch.items()}
    own = [each_worker(batch, k) if k == jax.process_index() else None for k in range(2)]
    run = sk.diloco(lambda part: step_over(part, "device"), NESTEROV, mesh=mesh, axis="host")

    def steps(state: Any, every: int | None) -> Any:
        for number in range(STEPS):
            if every is None:
                state, _ = whole.step(state, ours)
                continue
            state, _ = run.step(state, own)
            state = run.exchange(state) if (number + 1) % every == 0 else state
        return jax.block_until_ready(state)

    forms: dict[str, int | None] = {"dp": None} | {f"DiLoCo, H={every}": every for every in (1, 10, 50)}
    states = {name: (whole if every is None else run).init(params, key) for name, every in forms.items()}
    times: dict[str, list[float]] = {name: [] for name in forms}
    sent: dict[str, float] = {}
    for _ in range(1 + asked["rounds"]):  # the first one compiles
        for name, every in forms.items():
            begun, before = time.perf_counter(), tx_bytes()
            states[name] = steps(states[name], every)
            times[name].append(1e3 * (time.perf_counter() - begun) / STEPS)
            sent[name] = (tx_bytes() - before) / STEPS / 1e6
    theory = {name: size / (every or 1) / 1e6 for name, every in forms.items()}
    return [[name, times[name][1:], sent[name], theory[name]] for name in forms]


def over_link(rounds: int, rates: Sequence[int]) -> str:
    """The table of `--link`: a step takes as long as on the host that is later."""
    lines = [("link", "form", "ms a step [min, max]", "to dp", "MB sent a step", "theory")]
    for mbit in rates:
        both = links.on_both("diloco", mbit, 1, {"rounds": rounds})
        first = None
        for (name, times, sent, theory), (_, others, *_) in zip(*both, strict=True):
            later = np.maximum(times, others)
            first = later if first is None else first
            spread = f"{np.median(later):.1f} [{later.min():.1f}, {later.max():.1f}]"
            ratio = f"{np.median(later / first):.2f}"
            lines.append((f"{mbit} Mbit/s", name, spread, ratio, f"{sent:.3f}", f"{theory:.3f}"))
    return f"{links.LABEL}\n{table(lines)}"


def first_steps() -> str:
    """The table of `--first`: CPU seconds of the first state and of the first step, and what the step compiles."""
    config = transformer.Config(layers=2, dim=64, heads=4, vocabulary=256)
    grad_fn = sk.value_and_grad(transformer.loss_fn(config))
    params, key = parameters.init(jax.random.key(0), config), jax.random.key(1)
    tokens = np.zeros((WORKERS * EACH, TOKENS), np.int32)
    batch = {"tokens": tokens, "targets": tokens}

    def worker(mesh: Any) -> sk.TrainStep:
        return sk.make_train_step(grad_fn, optax.adamw(3e-3), mesh=mesh, plan=sk.dp("data"))

    forms = {
        "dp": (worker(sk.make_mesh(data=WORKERS)), batch),
        "DiLoCo": (
            sk.diloco(worker, NESTEROV, mesh=sk.make_mesh(pod=WORKERS, data=1), axis="pod"),
            [each_worker(batch, k) for k in range(WORKERS)],
        ),
    }
    compiled: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(seconds) if name.endswith("/backend_compile_duration") else None
    )
    lines = [("form", "state, CPU s", "first step, CPU s", "compiled")]
    for name, (run, given) in forms.items():
        begun = time.process_time()
        state = jax.block_until_ready(run.init(params, key))
        between = time.process_time()
        compiled.clear()
        jax.block_until_ready(run.step(state, given))
        ended = time.process_time()
        lines.append((name, f"{between - begun:.1f}", f"{ended - between:.1f}", str(len(compiled))))
    return table(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains each form on the same batches and prints a line for it."""
    options = start(
        __doc__,
        argv,
        devices=WORKERS,
        link="time both over a throttled link between two hosts",
        first="measure the first step of both in one process",
    )
    if options.first:
        print(first_steps())
        return
    if options.link:
        print(over_link(options.rounds or (1 if options.smoke else 5), (100,) if options.smoke else (100, 1000)))
        return
    steps = 4 if options.smoke else 1000
    config = transformer.Config(layers=2, dim=64, heads=4, vocabulary=256)
    text = standard_library()
    sizes = {"batch": WORKERS * EACH, "length": TOKENS}
    train = [batch_at(text.train, seed=1, step=number, **sizes) for number in range(steps)]
    unseen = validation_batches(text.validation, count=8, **sizes)
    loss_fn = transformer.loss_fn(config)
    grad_fn = sk.value_and_grad(loss_fn)
    params, key = parameters.init(jax.random.key(0), config), jax.random.key(1)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    mean = jax.jit(lambda params, batch: jnp.divide(*loss_fn(params, batch, None)[0]))

    def worker(mesh: Any) -> sk.TrainStep:
        return sk.make_train_step(grad_fn, optax.adamw(3e-3), mesh=mesh, plan=sk.dp("data"))

    def on_unseen(params: Any) -> float:
        return float(np.mean([mean(jax.device_get(params), batch) for batch in unseen]))

    records, lines = [], [("form", "loss", "exchanges", "MB sent over the slow axis", "theory")]
    forms = [(0, "", None), (1, "sgd(1)", optax.sgd(1.0))]
    forms += [(every, *outer) for every in (10, 50) for outer in (("sgd(1)", optax.sgd(1.0)), ("Nesterov", NESTEROV))]
    for every, by, outer in [forms[0], (2, "Nesterov", NESTEROV)] if options.smoke else forms:
        if outer is None:
            mesh, plan = sk.make_mesh(pod=WORKERS), sk.dp("pod")
            init, step = sk.make_train_step(grad_fn, optax.adamw(3e-3), mesh=mesh, plan=plan)
            state = init(params, key)
            sent = steps * sk.census(step, state, train[0]).sent(axis="pod")
            for batch in train:
                state, _ = step(state, batch)
            name, final, rounds = "dp", state.params, steps
        else:
            run = sk.diloco(worker, outer, mesh=sk.make_mesh(pod=WORKERS, data=1), axis="pod")
            ours = run.init(params, key)
            rounds = steps // every
            sent = rounds * sk.census(run.trace(ours)).sent(axis="pod")
            for number, batch in enumerate(train):
                ours, _ = run.step(ours, [each_worker(batch, k) for k in range(WORKERS)])
                if (number + 1) % every == 0:
                    ours = run.exchange(ours)
            name, final = f"DiLoCo, H={every}, {by}", ours.params
        theory = rounds * 2 * size * (WORKERS - 1) / WORKERS
        lines.append((name, f"{on_unseen(final):.3f}", str(rounds), f"{float(sent) / 1e6:.2f}", f"{theory / 1e6:.2f}"))
        records.append({"form": name, "loss": on_unseen(final), "exchanges": rounds, "sent": float(sent)})
        print(*lines[-1], flush=True)
    print(table(lines))
    if options.json:
        options.json.write_text("\n".join(map(json.dumps, records)) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        links.child(across, sys.argv[2:])
    else:
        main()

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

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks import links
from benchmarks.start import choose_rounds, start
from benchmarks.text import cut_validation_batches, draw_batch, read_standard_library
from shardkit.bench.records import write
from shardkit.meshes.layout import table
from shardkit.models import parameters, transformer

WORKERS = 8
EXAMPLES = 4  # of a worker
TOKENS = 64
LINK_STEPS = 50  # of a round over the link
AVERAGE = optax.sgd(1.0)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)

Batch = dict[str, np.ndarray]


def make_config(dim: int) -> transformer.Config:
    """A small transformer over bytes."""
    return transformer.Config(layers=2, dim=dim, heads=4, vocabulary=256)


def make_step(config: transformer.Config, mesh: Any, axis: str, rate: float) -> sk.TrainStep:
    """Data parallelism over an axis; of DiLoCo, inside of a worker."""
    grad_fn = sk.value_and_grad(transformer.loss_fn(config))
    return sk.make_train_step(grad_fn, optax.adamw(rate), mesh=mesh, plan=sk.dp(axis))


def init_params(config: transformer.Config) -> tuple[Any, jax.Array]:
    """The parameters from which every form starts, and the key of their runs."""
    return parameters.init(jax.random.key(0), config), jax.random.key(1)


def count_bytes(params: Any) -> int:
    """The bytes of the parameters, which an exchange sends."""
    return sum(x.nbytes for x in jax.tree.leaves(params))


def split_batch(batch: Batch, workers: int) -> list[Batch]:
    """The examples of each worker."""
    parts = []
    for worker in range(workers):
        examples = slice(worker * EXAMPLES, (worker + 1) * EXAMPLES)
        parts.append({name: x[examples] for name, x in batch.items()})
    return parts


# ---- loss after equal tokens


class Form(NamedTuple):
    """How workers exchange; without an optimizer outside, `dp`, which exchanges gradients in every step."""

    name: str
    every: int = 1
    outer: optax.GradientTransformation | None = None


FORMS = (
    Form("dp"),
    Form("DiLoCo, H=1, sgd(1)", 1, AVERAGE),
    Form("DiLoCo, H=10, sgd(1)", 10, AVERAGE),
    Form("DiLoCo, H=10, Nesterov", 10, NESTEROV),
    Form("DiLoCo, H=50, sgd(1)", 50, AVERAGE),
    Form("DiLoCo, H=50, Nesterov", 50, NESTEROV),
)
SMOKE_FORMS = (Form("dp"), Form("DiLoCo, H=2, Nesterov", 2, NESTEROV))


class Training(NamedTuple):
    """What a run ends with."""

    params: Any
    exchanges: int
    sent: float  # bytes, of one device over the axis of the workers


def train_dp(config: transformer.Config, params: Any, key: jax.Array, batches: Sequence[Batch]) -> Training:
    """A step for each batch."""
    init, step = make_step(config, sk.make_mesh(pod=WORKERS), "pod", 3e-3)
    state = init(params, key)
    # By the census: between simulated devices there is no link whose bytes could be counted.
    sent = len(batches) * sk.census(step, state, batches[0]).sent(axis="pod")
    for batch in batches:
        state, _ = step(state, batch)
    return Training(state.params, len(batches), float(sent))


def train_diloco(
    config: transformer.Config, form: Form, params: Any, key: jax.Array, batches: Sequence[Batch]
) -> Training:
    """A step of each worker for each batch, and an exchange every so many steps."""
    assert form.outer is not None, "dp is trained by train_dp"
    mesh = sk.make_mesh(pod=WORKERS, data=1)
    run = sk.diloco(lambda mesh: make_step(config, mesh, "data", 3e-3), form.outer, mesh=mesh, axis="pod")
    state = run.init(params, key)
    exchanges = len(batches) // form.every
    sent = exchanges * sk.census(run.trace(state)).sent(axis="pod")
    for number, batch in enumerate(batches, 1):
        state, _ = run.step(state, split_batch(batch, WORKERS))
        if number % form.every == 0:
            state = run.exchange(state)
    return Training(state.params, exchanges, float(sent))


def measure_loss(options: argparse.Namespace) -> None:
    """Trains each form on the same batches and prints a line for it."""
    steps = 1000
    forms: Sequence[Form] = FORMS
    if options.smoke:
        steps = 4
        forms = SMOKE_FORMS
    config = make_config(dim=64)
    text = read_standard_library()
    batches = []
    for step in range(steps):
        batches.append(draw_batch(text.train, seed=1, step=step, batch=WORKERS * EXAMPLES, length=TOKENS))
    unseen = cut_validation_batches(text.validation, count=8, batch=WORKERS * EXAMPLES, length=TOKENS)
    loss_fn = transformer.loss_fn(config)

    @jax.jit
    def compute_loss(params: Any, batch: Any) -> jax.Array:
        mean, _ = loss_fn(params, batch, None)
        return jnp.divide(mean.total, mean.weight)

    params, key = init_params(config)
    size = count_bytes(params)
    records = []
    rows = [("form", "loss", "exchanges", "MB sent over the slow axis", "theory")]
    for form in forms:
        if form.outer is None:
            training = train_dp(config, params, key, batches)
        else:
            training = train_diloco(config, form, params, key, batches)
        # On one device: the parameters of the forms are on different meshes.
        trained = jax.device_get(training.params)
        loss = float(np.mean([compute_loss(trained, batch) for batch in unseen]))
        # An all_reduce in a ring sends all parameters but one part, and as much of the sums.
        theory = training.exchanges * 2 * size * (WORKERS - 1) / WORKERS
        row = (
            form.name,
            f"{loss:.3f}",
            str(training.exchanges),
            f"{training.sent / 1e6:.2f}",
            f"{theory / 1e6:.2f}",
        )
        rows.append(row)
        print(*row, flush=True)
        records.append({"form": form.name, "loss": loss, "exchanges": training.exchanges, "sent": training.sent})
    print(table(rows))
    if options.json:
        write(records, options.json)


# ---- the first step


def measure_first_steps() -> str:
    """The table of `--first`: CPU seconds of the first state and of the first step, and what the step compiles."""
    config = make_config(dim=64)
    params, key = init_params(config)
    tokens = np.zeros((WORKERS * EXAMPLES, TOKENS), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    dp = make_step(config, sk.make_mesh(data=WORKERS), "data", 3e-3)
    diloco = sk.diloco(
        lambda mesh: make_step(config, mesh, "data", 3e-3),
        NESTEROV,
        mesh=sk.make_mesh(pod=WORKERS, data=1),
        axis="pod",
    )
    rows = [
        ("form", "state, CPU s", "first step, CPU s", "compiled"),
        time_first_step("dp", dp, params, key, batch),
        time_first_step("DiLoCo", diloco, params, key, split_batch(batch, WORKERS)),
    ]
    return table(rows)


def time_first_step(name: str, run: Any, params: Any, key: jax.Array, batch: Any) -> tuple[str, str, str, str]:
    """A row of the table of `--first`."""
    compiled = 0
    stepping = False

    def count(event: str, duration_secs: float, **metadata: str | int) -> None:
        nonlocal compiled
        # The state compiles programs, too, before the step does.
        if stepping and event.endswith("/backend_compile_duration"):
            compiled += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    # CPU time: on a loaded machine the clock would show the load. The compiler's threads are of this process.
    start_time = time.process_time()
    state = jax.block_until_ready(run.init(params, key))
    state_time = time.process_time()
    stepping = True
    jax.block_until_ready(run.step(state, batch))
    step_time = time.process_time()
    stepping = False
    return name, f"{state_time - start_time:.1f}", f"{step_time - state_time:.1f}", str(compiled)


# ---- over a link


LINK_FORMS: dict[str, int | None] = {"dp": None, "DiLoCo, H=1": 1, "DiLoCo, H=10": 10, "DiLoCo, H=50": 50}


def measure_on_host(request: Mapping[str, Any], read_sent: Callable[[], int]) -> list[list[Any]]:
    """What one of two hosts measures: by form, milliseconds a step in each round, and MB that it sends a step."""
    config = make_config(dim=128)
    params, key = init_params(config)
    batch = draw_batch(read_standard_library().train, seed=1, step=0, batch=2 * EXAMPLES, length=TOKENS)
    mesh = sk.make_mesh(host=2, device=1)
    dp = make_step(config, mesh, "host", 1e-3)
    diloco = sk.diloco(lambda mesh: make_step(config, mesh, "device", 1e-3), NESTEROV, mesh=mesh, axis="host")

    layout = NamedSharding(mesh, P("host"))
    global_batch = {}
    for name, x in batch.items():
        global_batch[name] = jax.make_array_from_callback(x.shape, layout, x.__getitem__)
    # A worker on another host has its batch there.
    worker_batches: list[Batch | None] = [None, None]
    worker_batches[jax.process_index()] = split_batch(batch, 2)[jax.process_index()]

    def run_steps(state: Any, every: int | None) -> Any:
        for number in range(1, LINK_STEPS + 1):
            if every is None:
                state, _ = dp.step(state, global_batch)
            else:
                state, _ = diloco.step(state, worker_batches)
                if number % every == 0:
                    state = diloco.exchange(state)
        # Once for all steps: `dp` waits for the link in each of them anyway, and DiLoCo is not to.
        return jax.block_until_ready(state)

    states = {}
    times: dict[str, list[float]] = {}
    for name, every in LINK_FORMS.items():
        run: Any = diloco
        if every is None:
            run = dp
        states[name] = run.init(params, key)
        times[name] = []
    sent = {}
    # The forms take turns, so that what slows the machine down for a while slows all of them.
    for number in range(1 + request["rounds"]):
        for name, every in LINK_FORMS.items():
            bytes_before = read_sent()
            start_time = time.perf_counter()
            states[name] = run_steps(states[name], every)
            seconds = time.perf_counter() - start_time
            sent[name] = (read_sent() - bytes_before) / LINK_STEPS / 1e6
            if number > 0:  # the first round compiled
                times[name].append(1e3 * seconds / LINK_STEPS)
    rows = []
    for name, every in LINK_FORMS.items():
        theory = count_bytes(params) / 1e6
        if every is not None:
            theory /= every
        rows.append([name, times[name], sent[name], theory])
    return rows


def measure_over_link(rounds: int, rates: Sequence[int]) -> str:
    """The table of `--link`: a step takes as long as on the host that is later."""
    lines = [("link", "form", "ms a step [min, max]", "to dp", "MB sent a step", "theory")]
    for mbit in rates:
        hosts = links.run_on_hosts("diloco", mbit, 1, {"rounds": rounds})
        dp_times = None
        for (name, times, sent, theory), (_, other_times, _, _) in zip(*hosts, strict=True):
            later = np.maximum(times, other_times)
            if dp_times is None:
                dp_times = later
            line = (
                f"{mbit} Mbit/s",
                name,
                f"{np.median(later):.1f} [{later.min():.1f}, {later.max():.1f}]",
                f"{np.median(later / dp_times):.2f}",
                f"{sent:.3f}",
                f"{theory:.3f}",
            )
            lines.append(line)
    return f"{links.LABEL}\n{table(lines)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table that is asked for."""
    options = start(
        __doc__,
        argv,
        devices=WORKERS,
        link="time both over a throttled link between two hosts",
        first="measure the first step of both in one process",
    )
    if options.first:
        print(measure_first_steps())
    elif options.link:
        rates = [100, 1000]
        if options.smoke:
            rates = [100]
        print(measure_over_link(choose_rounds(options, 5, smoke=1), rates))
    else:
        measure_loss(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        links.run_child(measure_on_host, sys.argv[2:])
    else:
        main()

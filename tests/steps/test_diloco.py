"""DiLoCo: each worker trains as one alone, and an exchange is the outer optimizer's step from what they moved."""

import signal
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.collectives.algorithms import Algorithm
from shardkit.meshes.submeshes import submeshes
from shardkit.plans.storage import leaves_by_path, replace_arrays
from shardkit.runtime.channel.wire import LOST
from shardkit.testing.exact.arguments import make_input
from shardkit.testing.exact.draws import STEP, equal
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.one_device import make_gradient, make_update
from support import jobs, rows
from support.conformance import weights
from support.counting import Compiles
from support.refusals import refused
from support.tiers import DEEP
from support.training import lenient
from support.workers import diloco as worker

KEY, WORKERS, LAYERS, D = jax.random.key(2), 2, 4, 8
RNG = np.random.default_rng(0)
PARAMS = {
    "layers": {"w": RNG.normal(size=(LAYERS, D, D)).astype("f") / 4},
    "out": RNG.normal(size=(D, 3)).astype("f"),
    "scale": np.float32(0.5),
}
LAYERWISE: Any = {"min_size": 1, "layerwise": ("layers",)}
PLANS = {
    "dp": sk.dp("data"),
    "zero1": sk.zero1("data", min_size=1),
    "layer-wise": sk.fsdp("data", **LAYERWISE),
    "padded": sk.fsdp("data", min_size=1, rules=lambda path, shape: len(shape) - 1, uneven="pad"),
}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def loss_fn(params: Any, batch: Any, keys: Any) -> Any:
    def layer(w: Any, x: jax.Array) -> jax.Array:
        return x + sk.dropout(jnp.tanh(x @ w["w"]), keys, 0.25)

    x = sk.scan_layers(layer, params["layers"], batch["x"])
    return sk.Mean.of(jnp.sum((params["scale"] * (x @ params["out"]) - batch["y"]) ** 2, -1), batch["weight"])


def make_batch(seed: int, equal: bool = False) -> Any:
    rng = np.random.default_rng(seed)
    weight = np.ones(16) if equal else rng.integers(1, 4, 16)
    return {"x": rng.normal(size=(16, D)).astype("f"), "y": np.ones((16, 3), "f"), "weight": weight.astype("f")}


def halves(batch: Any) -> list[Any]:
    return [jax.tree.map(lambda x, k=k: x[8 * k : 8 * k + 8], batch) for k in range(WORKERS)]


def step_on(plan: sk.Plan, optimizer: Any, **options: Any) -> Any:
    how = {"plan": plan, **options}
    return lambda mesh: sk.make_train_step(sk.value_and_grad(loss_fn), lenient(optimizer), mesh=mesh, **how)


def run_of(plan: sk.Plan, optimizer: Any, outer: Any = OUTER, **options: Any) -> Any:
    return sk.diloco(step_on(plan, optimizer), outer, mesh=sk.make_mesh(pod=WORKERS, data=4), axis="pod", **options)


def close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), sk.unpadded(found), wanted)


# Catches carried state that is not begun, or is one for all workers, and a state that a checkpoint cannot hold.
@pytest.mark.filterwarnings("ignore:step. the metric 'seen' must add over its examples")
def test_carried_state_and_checkpoints(tmp_path):
    def counted(params: Any, batch: Any, keys: Any, seen: Any) -> Any:
        return loss_fn(params, batch, keys), {"seen": sk.Mean(jnp.sum(batch["weight"]), 1.0)}

    def make(mesh: Any) -> Any:
        return sk.make_train_step(
            sk.value_and_grad(counted),
            lenient(optax.adam(1e-2)),
            mesh=mesh,
            plan=PLANS["padded"],
            carry=lambda seen, metrics, params: seen + metrics["seen"],
        )

    run = sk.diloco(make, OUTER, mesh=sk.make_mesh(pod=WORKERS, data=4), axis="pod")
    batches = halves(make_batch(0))
    state, metrics = run.step(run.init(PARAMS, KEY, jnp.float32(0)), batches)
    assert [float(own.carried) for own in state.workers] == [float(each["seen"]) for each in metrics]
    assert len({float(own.carried) for own in state.workers}) == 2
    with sk.runtime.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        back, _ = checkpoints.restore(run.init(PARAMS, KEY, jnp.float32(0)))
    wanted, found = (jax.tree.map(np.asarray, run.exchange(each).params) for each in (state, back))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


# Nothing of a run over several processes could be saved, and no guard took its step. Catches a worker's part that goes
# to another, and a moment, key or outer momentum that begins again.
def test_two_processes_are_killed_and_resume(tmp_path):
    run = worker.run_on(sk.make_mesh(jax.devices()[:2], pod=2, data=1))
    state = worker.begin(run)
    for index in range(4):
        state, _ = run.step(state, [worker.batch_of(index, k) for k in range(2)])
        state = run.exchange(state) if index % 2 else state
    wanted = f"digest {worker.digest(state):.5f}"
    survivor, killed = jobs.run("diloco.py", tmp_path, "--fault", "kill", processes=2)
    assert (survivor.code, killed.code) == (LOST, -signal.SIGKILL)
    assert "process 1 died without reporting an error (SIGKILL or out of memory?)" in survivor.last
    for each in jobs.run("diloco.py", tmp_path, processes=2):
        assert (each.code, each.output.split("\n")[0], each.last) == (0, "resumed at 2", wanted), each.output


@pytest.mark.deep
@pytest.mark.clock  # each phase has 5 s
def test_a_worker_that_sleeps_is_named(tmp_path):
    for each in jobs.run("diloco.py", tmp_path, "--fault", "sleep", "--deadline", 5, processes=2):
        assert "shardkit guard: process 1 holds up the others: it has been in user code after step 2 for " in each.last


# What a worker calls its step with is no other's business, once all have compared the program.
@pytest.mark.deep
def test_workers_may_take_the_same_shapes_in_another_order(tmp_path):
    for each in jobs.run("diloco.py", tmp_path, "--fault", "turns", "--steps", 8, processes=2):
        assert each.code == 0 and each.last.startswith("digest "), each.output


@cache
def step_of_one() -> Any:
    return step_on(sk.dp("data"), optax.adam(1e-2))(sk.make_mesh(jax.devices()[:1], data=1))


@jax.jit
def exchanged(meet: Any, outer: Any, workers: Any) -> Any:
    """The outer step of optax from where the workers met, on one device."""
    moved = jax.tree.map(lambda old, *new: sum(old - x for x in new) / WORKERS, meet, *workers)
    updates, outer = OUTER.update(moved, outer, meet)
    return optax.apply_updates(meet, updates), outer


# Catches a worker that sees another's examples, weights or state, and an outer step from another mean, or twice.
@pytest.mark.quick("zero1", "padded")  # the others are those of fragments and of one step a round
@pytest.mark.parametrize("plan", PLANS)
def test_workers_train_alone_and_meet_in_the_outer_optimizer(plan):
    run = run_of(PLANS[plan], optax.adam(1e-2))
    state = run.init(PARAMS, KEY)
    one = step_of_one()
    alone = [one.init(PARAMS, jax.random.fold_in(KEY, k)) for k in range(WORKERS)]
    meet, outer = PARAMS, OUTER.init(PARAMS)
    for index in range(4):
        batches = halves(make_batch(index))
        state, metrics = run.step(state, batches)
        for k in range(WORKERS):
            alone[k], own = one.step(alone[k], batches[k])
            np.testing.assert_allclose(metrics[k]["loss"], own["loss"], rtol=1e-5)
        if index % 2:
            state = run.exchange(state)
            meet, outer = exchanged(meet, outer, [each.params for each in alone])
            close(state.params, meet)
            alone = [each._replace(params=jax.tree.map(np.asarray, meet)) for each in alone]
    close(state.workers[1].params, meet)


def joined(arrays: Any) -> jax.Array:
    return jnp.concatenate([x if x.ndim else x[None] for x in arrays])


def rounds(run: Any, every: int) -> Any:
    """A run as one function of parameters and batches, for tracing: an exchange after so many steps of all workers."""

    def trained(params: Any, batches: Any) -> Any:
        workers = [each.init(params, jax.random.fold_in(KEY, k)) for k, each in enumerate(run.train_steps)]
        whole = workers[0].params
        outer = run.outer.init(leaves_by_path(whole))
        for index, both in enumerate(batches):
            workers = [each.step(*own)[0] for each, *own in zip(run.train_steps, workers, both, strict=True)]
            if (index + 1) % every == 0:
                each = [leaves_by_path(own.params) for own in workers]
                rows = {path: joined([own[path] for own in each]) for path in each[0]}
                rows, whole, outer = run._finish(rows, whole, outer, run._start(rows, whole, 0), 0.0, 0)
                for k in range(WORKERS):
                    mine = {path: x[k * len(x) // WORKERS :][: len(x) // WORKERS] for path, x in rows.items()}
                    mine = {path: x.reshape(each[k][path].shape) for path, x in mine.items()}
                    workers[k] = workers[k]._replace(params=replace_arrays(workers[k].params, mine))
        return sk.unpadded(whole)

    return trained


def alone(grad_fn: Any, optimizer: Any, outer: Any, every: int) -> Any:
    """The same with workers of one device each, and optax alone."""

    def trained(params: Any, batches: Any) -> Any:
        workers, state, meet = [(params, optimizer.init(params))] * WORKERS, outer.init(params), params
        for index, both in enumerate(batches):
            for k, (own, opt_state) in enumerate(workers):
                keys = sk.example_keys(sk.step_key(jax.random.fold_in(KEY, k), index), len(jax.tree.leaves(both)[0]))
                loss, _, grads = make_gradient(grad_fn)(own, both[k], keys)
                workers[k] = make_update(optimizer)(grads, opt_state, own, loss)
            if (index + 1) % every == 0:
                moved = [jax.tree.map(jnp.subtract, meet, own) for own, _ in workers]
                moved = jax.tree.map(lambda *each: sum(each) / WORKERS, *moved)
                updates, state = outer.update(moved, state, meet)
                meet = optax.apply_updates(meet, updates)
                workers = [(meet, opt_state) for _, opt_state in workers]
        return meet

    return trained


def assert_equal(sides: Any, *args: Any) -> None:
    """Two functions are one for all floats of their arguments."""
    traced, given = [jax.make_jaxpr(side)(*args) for side in sides], jax.tree.leaves(args)

    def run(side: int, field: Any, seen: Any) -> Any:
        symbols = [make_input(field, str(i), x) for i, x in enumerate(given)]
        return Interpreter(field, seen=seen).run(traced[side], symbols)

    names = [str(number) for number in range(len(traced[0].out_avals))]
    equal("diloco", "", names, (partial(run, 0), partial(run, 1)), 2, STEP)


def test_one_step_a_round_is_data_parallelism():
    """For all inputs, with SGD on both sides and examples that weigh the same; a worker's dropout is its own."""
    run = run_of(PLANS["layer-wise"], optax.sgd(0.01), optax.sgd(1.0))
    batches = [halves(make_batch(index, equal=True)) for index in range(3)]
    for each in jax.tree.leaves(batches, is_leaf=lambda x: isinstance(x, dict)):
        each["weight"] = each["weight"].astype(np.int32)  # known, not any

    def parallel(params: Any, batches: Any) -> Any:
        for index, both in enumerate(batches):
            keys = [sk.example_keys(sk.step_key(jax.random.fold_in(KEY, k), index), 8) for k in range(WORKERS)]
            whole = jax.tree.map(lambda *each: jnp.concatenate(each), *both), jnp.concatenate(keys)
            grads = jax.grad(lambda p, whole=whole: jnp.divide(*loss_fn(p, *whole)))(params)
            params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return params

    assert_equal((rounds(run, 1), parallel), PARAMS, batches)


CASES = rows.cases()
# Of four devices at most, since there are two workers; without a copy of the parameters in another dtype.
SMALL = [i for i, each in enumerate(CASES) if prod(each.row.mesh.values()) <= 4 and each.row.precision != rows.MASTER]


# Catches a worker that is right under the plans above alone: Muon, pipelines, microbatches, float16.
# proves N41
@pytest.mark.quick("12")
@pytest.mark.parametrize("number", SMALL)
def test_workers_of_every_kind(number, monkeypatch):
    rows.shrink(monkeypatch)
    case = rows.cases()[number]
    assert case.choice == CASES[number].choice
    given, optimizer = case.row, partial(rows.optimizer_of, case.choice["optimizer"], case.config)

    def make(mesh: Any) -> Any:
        how = {name: getattr(given, name) for name in ("plan", "accumulate", "precision", "nonfinite")}
        return sk.make_train_step(given.grad_fn, optimizer(mesh.shape, given.plan), mesh=mesh, **how)

    mesh = sk.make_mesh(jax.devices()[: WORKERS * prod(given.mesh.values())], pod=WORKERS, **given.mesh)
    run = sk.diloco(make, OUTER, mesh=mesh, axis="pod")
    steps = 2 if DEEP and not case.choice["experts"] else 1  # two nest their exps too deeply
    batches = [[rows.batch(2 * index + k) for k in range(WORKERS)] for index in range(steps)]
    sides = rounds(run, 1), alone(rows.alone(case), optimizer(), OUTER, 1)
    assert_equal(sides, weights(case.config), batches)


# Catches a fragment that sends more than its rows, or changes others, and a state whose layout changes, which would
# compile the next step or exchange again.
def test_parameters_of_a_key_are_the_same_for_all_workers():
    run = run_of(sk.dp("data"), optax.sgd(0.1))
    state = run.init(lambda key: jax.tree.map(lambda x: jax.random.normal(key, jnp.shape(x)), PARAMS), KEY)
    for own in (state.params, state.workers[1].params):
        jax.tree.map(np.testing.assert_array_equal, own, state.workers[0].params)
    drawn = {tuple(jax.random.key_data(own.key).tolist()) for own in state.workers}
    assert len(drawn) == WORKERS  # of dropout


@pytest.mark.parametrize("alike", [True, False])
def test_alike_workers_are_compiled_once(alike):
    """And get the bits that each would get by itself; workers that are not alike keep programs of their own."""
    mesh = sk.make_mesh(jax.devices()[:4], pod=2, data=2)
    rates = iter([0.1, 0.1] if alike else [0.1, 0.2])

    def make_step(worker_mesh: Any) -> Any:
        options = {"mesh": worker_mesh, "plan": PLANS["zero1"], "check": False}
        return sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(next(rates), momentum=0.9), **options)

    run = sk.diloco(make_step, OUTER, mesh=mesh, axis="pod")
    state = run.init(PARAMS, KEY)
    batches = [make_batch(number) for number in range(2)]
    rates = iter([0.1, 0.1] if alike else [0.1, 0.2])
    expected = []
    for number, worker_mesh in enumerate(submeshes(mesh, "pod")):
        alone = make_step(worker_mesh)
        worker = alone.init(PARAMS, KEY)
        worker = worker._replace(key=jax.random.fold_in(worker.key, number))
        for _ in range(2):
            worker, metrics = alone.step(worker, batches[number])
        expected.append((worker, metrics))
    with Compiles() as compiles:
        state, _ = run.step(state, batches)
        state, metrics = run.step(state, batches)
    assert compiles.count == (1 if alike else 2)
    for number, (worker, values) in enumerate(expected):
        jax.tree.map(np.testing.assert_array_equal, state.workers[number].params, worker.params)
        jax.tree.map(np.testing.assert_array_equal, metrics[number], values)
        assert jax.tree.leaves(state.workers[number].params)[0].sharding.mesh == worker.step.sharding.mesh
    shorter = [jax.tree.map(lambda x: x[:8], batch) for batch in batches]
    state, _ = run.step(state, shorter)
    assert int(state.step) == 3


def test_workers_whose_loss_calls_python_are_compiled_apart():
    """jax refuses to write a program with the address of a function, which is then no error."""
    mesh = sk.make_mesh(jax.devices()[:2], pod=2, data=1)
    calls: Any = []

    def noting_loss(params: Any, batch: Any, keys: Any) -> Any:
        jax.debug.callback(calls.append, jnp.sum(batch["y"]))
        return loss_fn(params, batch, keys)

    def make_step(worker_mesh: Any) -> Any:
        return sk.make_train_step(sk.value_and_grad(noting_loss), optax.sgd(0.1), mesh=worker_mesh, plan=PLANS["dp"])

    run = sk.diloco(make_step, OUTER, mesh=mesh, axis="pod")
    state = run.init(PARAMS, KEY)
    with Compiles() as compiles:
        jax.block_until_ready(run.step(state, [make_batch(number) for number in range(2)]))
        jax.effects_barrier()
    assert compiles.count >= 2 and len(calls) == 2


def test_fragments_send_their_rows_alone():
    fragments = lambda path, shape: [0, 1, 0, 1] if path.startswith("layers") else 1  # noqa: E731
    run = run_of(PLANS["layer-wise"], optax.adam(1e-2), fragments=fragments)
    state, _ = run.step(run.init(PARAMS, KEY), halves(make_batch(0)))
    each = 4 * np.array([2 * D * D, 2 * D * D + 3 * D]) / 4 + [0, 4]  # float32 parts of four devices, 2 (n-1)/n of them
    assert [sk.census(run.trace(state, k)).sent(axis="pod") for k in range(2)] == each.tolist()

    def stack(workers: Any) -> np.ndarray:
        return np.stack([np.asarray(own.params["layers"]["w"]) for own in workers])

    before, own = np.asarray(state.params["layers"]["w"]), stack(state.workers)
    moved = run.start(state, 0)
    state, _ = run.step(state, halves(make_batch(1)))
    later, out = stack(state.workers), np.asarray(state.workers[0].params["out"])
    state = run.finish(state, moved, keep=0.25)
    new = before[::2] - 0.7 * (1 + 0.9) * np.mean(before - own, 0)[::2]
    np.testing.assert_allclose(state.params["layers"]["w"][::2], new, rtol=1e-5, atol=1e-6)
    mixed = 0.25 * later[:, ::2] + 0.75 * new[None]
    np.testing.assert_allclose(stack(state.workers)[:, ::2], mixed, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.params["layers"]["w"][1::2], before[1::2])
    np.testing.assert_array_equal(state.workers[0].params["out"], out)
    for fragment in (1, 0, 1):
        state = run.exchange(run.step(state, halves(make_batch(2)))[0], fragment)
    assert (run._start._cache_size(), run._finish._cache_size()) == (2, 2)


def test_an_exchange_of_four_bits():  # proves N70
    found = []
    for how in ({}, {"reduce": sk.algorithms.compressed("nvfp4")}):
        run = run_of(sk.dp("data"), optax.sgd(0.1), optax.sgd(1.0), **how)
        state, _ = run.step(run.init(PARAMS, KEY), halves(make_batch(0)))
        found += [sk.census(run.trace(state)).sent(axis="pod"), np.asarray(run.exchange(state).params["out"])]
    assert found[2] < 0.6 * found[0]
    assert 0 < np.abs(found[1] - found[3]).max() < np.abs(found[1] - PARAMS["out"]).max() / 4


FEEDBACK = sk.algorithms.compressed(jnp.int8, feedback=True)


def test_what_is_refused():
    mesh, make = sk.make_mesh(pod=2, data=4), step_on(sk.dp("data"), optax.sgd(0.1))
    none = Algorithm("none of them")
    wrong = {
        "diloco: axis must be one of the mesh, pod=2, data=4; got 'slow'. Add it to make_mesh.": (make, "slow", {}),
        "diloco: make_step must build the step of one worker, with a plan that does not use 'data'; got the plan "
        "dp('data'). "
        "Pass lambda mesh: sk.make_train_step(..., mesh=mesh, plan=...) without that axis.": (make, "data", {}),
        "diloco: reduce= must be an Algorithm with all_reduce; got none of them, which has none. Pass for example "
        "sk.algorithms.ring().": (make, "pod", {"reduce": none}),
        "diloco: reduce= must be an Algorithm without error feedback, because no exchange keeps what it left out for "
        f"the next; got {FEEDBACK}. Leave out feedback=True.": (make, "pod", {"reduce": FEEDBACK}),
    }
    for sentence, (make_step, axis, options) in wrong.items():
        assert refused(lambda: sk.diloco(make_step, OUTER, mesh=mesh, axis=axis, **options)) == sentence
    run = run_of(sk.dp("data"), optax.sgd(0.1))
    state = run.init(PARAMS, KEY)
    for batches, got in ((halves(make_batch(0))[:1], 1), (make_batch(0), "dict")):
        with pytest.raises(
            ValueError, match=rf"^diloco: there must be one batch for each of 2 workers; got {got}. Pass"
        ):
            run.step(state, batches)
    with pytest.raises(TypeError, match=r"^diloco: make_step must return a TrainStep on the mesh"):
        sk.diloco(lambda mesh: None, OUTER, mesh=mesh, axis="pod")
    twice = sk.diloco(step_on(sk.dp("data"), optax.sgd(0.1), precision=rows.MASTER), OUTER, mesh=mesh, axis="pod")
    assert refused(lambda: twice.init(PARAMS, KEY)) == (
        "diloco: a worker must have one copy of its parameters, which an exchange replaces; got a precision with a "
        "master copy, from which the next step would go on. Pass make_train_step precision='bf16'."
    )
    newer = run.exchange(state)
    for call, begin in (
        (lambda: run.start(newer, 1), "the fragment must be one of 1, from 0 on; got 1"),
        (lambda: run.exchange(state), "the state must be the newest; got one that step, finish or exchange was passed"),
        (
            lambda: run.finish(newer, run.start(newer), keep=float("nan")),
            "keep must be at least 0 and below 1; got nan",
        ),
    ):
        assert refused(call).startswith(f"diloco: {begin}")
    gap, short = lambda path, shape: 2, lambda path, shape: [0]
    for fragments, begin in ((gap, "must be numbered from 0, none left out; got"), (short, "of rows must be a number")):
        with pytest.raises(ValueError, match=f"^diloco: fragments {begin}"):
            run_of(sk.dp("data"), optax.sgd(0.1), fragments=fragments).init(PARAMS, KEY)

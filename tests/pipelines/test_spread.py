"""Embedding and head spread over the devices of a pipeline: one device's numbers, each device its part of the work."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import schedules, testing
from shardkit._jax.jaxprs import walk
from shardkit.layers.vocabulary import vocab_cross_entropy_and_hits
from shardkit.testing.exact.law import equal_for_all_inputs
from shardkit.testing.one_device import Reference, Training
from shardkit.testing.program import Program
from support import pipelines
from support.pipelines import BUILDERS, RATE, make, make_batch, stage, unpipelined
from support.refusals import refused, value_error
from support.training import lenient

KEY, CLASSES = jax.random.key(3), 7


def embed(shared: Any, batch: Any, keys: Any, axis: str | None = "stage") -> jax.Array:
    return sk.dropout(sk.layers.vocab_embed(batch["tokens"], shared["embed"], axis), keys, RATE / 2)


def head(shared: Any, x: jax.Array, batch: Any, axis: str | None = "stage") -> Any:
    """Tied, after a gain that is whole, with padding in the vocabulary and means that are scalars."""
    x = x * shared["gain"][None, None]
    nats, hits = vocab_cross_entropy_and_hits(x, shared["embed"].T, batch["targets"], axis, vocabulary=CLASSES)
    aux = {"accuracy": sk.Mean.of(hits, batch["weights"]), "square": jnp.mean(jnp.square(x.astype(jnp.float32)))}
    return sk.Mean.of(nats, batch["weights"]), aux


def spread(path: str, shape: tuple[int, ...]) -> int | None:
    return 0 if path == "embed" else None


ALONE = (partial(embed, axis=None), stage, partial(head, axis=None))


@cache
def reference() -> Any:
    return sk.value_and_grad(unpipelined(ALONE))


def make_params(layers: int) -> Any:
    """The vocabulary has 7 classes in 8 rows, or what a multiple of 3 devices divides."""
    params = pipelines.make_params(layers)
    rows = np.zeros((5, params["embed"].shape[1]), np.float32)
    return params | {"embed": np.concatenate([params["embed"], rows])}


# proves S80, N49, F36: every schedule, and what each of its forms saves, for all inputs; tied, padded, with dropout
@pytest.mark.quick("one_f_one_b-True", "zero_bubble_v-True", "lockstep-False")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", BUILDERS)
def test_spread_ends_of_every_schedule_are_one_devices(name, recompute):
    p = 3 if name == "zero_bubble_v" else 2
    pipe = sk.pipeline(make(name, p, 3, 2), "stage", spread=spread)
    grad_fn = pipe.value_and_grad(embed, stage, head, layer_numbers=True, recompute=recompute)
    params, batch = make_params(p * pipe.schedule.chunks), make_batch(6)
    program = Program.of(testing.Row({"stage": p}, pipe.plan), grad_fn, optax.sgd(0.1), params, [batch], KEY)
    given = Training(reference(), optax.sgd(0.1), params, (batch,), KEY)
    assert equal_for_all_inputs(program, Reference((), given)) is None


# Catches a leaf of the ends that another plan splits as well, a plain axis, several steps, and bf16 on the way.
# proves S80, F41
@pytest.mark.quick("fsdp", "one-stage")
@pytest.mark.parametrize(
    ("sizes", "beside", "options"),
    [
        ({"data": 4, "stage": 2}, (sk.fsdp("data", min_size=1),), {}),
        ({"data": 2, "stage": 4}, (sk.fsdp("data", min_size=1),), {}),
        ({"data": 2, "stage": 2, "zero": 2}, (sk.dp("data"), sk.zero2("zero", min_size=1)), {"accumulate": 2}),
        ({"data": 8, "stage": 1}, (sk.dp("data"),), {}),
    ],
    ids=["fsdp", "fsdp-four-stages", "zero2-accumulated", "one-stage"],
)
@pytest.mark.filterwarnings("ignore:make_train_step. accumulate=2 fills and drains the pipeline")
def test_beside_other_plans(sizes, beside, options):
    p = sizes["stage"]
    each = None if p == 1 else (1, *[2] * (p - 2), 3)
    pipe = sk.pipeline(schedules.one_f_one_b(p, 4), "stage", spread=spread, layers_per_stage=each)
    grad_fn = pipe.value_and_grad(embed, stage, head, layer_numbers=True)
    mesh, plan = sk.make_mesh(**sizes), sk.chain(*beside, pipe.plan)
    params, batches = make_params(sum(each or (2,))), [make_batch(32, seed) for seed in range(2)]
    testing.assert_same_training(
        grad_fn, reference(), lenient(optax.adam(1e-2)), mesh=mesh, plan=plan, params=params, batches=batches, **options
    )
    evaluate = sk.make_eval_step(pipe.loss(embed, stage, head, layer_numbers=True), mesh=mesh, plan=plan)
    init, _ = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
    wanted, _ = jax.jit(unpipelined(ALONE))(params, batches[0], None)
    found = evaluate(init(params, KEY).params, batches[0])["loss"]
    np.testing.assert_allclose(found, wanted.total / wanted.weight, rtol=1e-6)


# Catches a part of the ends that runs, or sends, in a tick that has no microbatch for it, or on one device alone.
# proves S78
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved"])
def test_what_the_ends_compute_and_send(name):
    p, m, rows, tokens, dim = 4, 6, 2, pipelines.TOKENS, pipelines.D
    pipe = sk.pipeline(make(name, p, m, 2), "stage", spread=spread)
    grad_fn = pipe.value_and_grad(embed, stage, head, layer_numbers=True)
    init, step = sk.make_train_step(
        grad_fn, optax.sgd(0.1), mesh=sk.make_mesh(jax.devices()[:p], stage=p), plan=pipe.plan
    )
    state, batch = init(make_params(p * pipe.schedule.chunks), KEY), make_batch(rows * m)
    sums = sk.census(step, state, batch).select(kind="all_reduce", axis="stage")
    x, sent = 4 * rows * tokens * dim, sum(row.bytes_in * row.times for row in sums)
    # x, forward and again; what the last stage returned, and its gradient; that of x; and of each token the largest
    # logit and three sums; at the end of the step loss, accuracy, square, and their weights.
    assert sent == m * (5 * x + 4 * rows * tokens * (1 + 3)) + 4 * 6
    dots = [site for site in walk(step.trace(state, batch).jaxpr.jaxpr) if site.name == "dot_general"]
    heads = [site.times or 1 for site in dots if site.equation.outvars[0].aval.shape == (rows, tokens, 12 // p)]
    assert sum(heads) == m


# Once each tick with another set of ends was a loop of its own: 39 of 1F1B on 8 devices with 16 microbatches, for 4.
# proves S78
@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_h1"])
def test_spread_ends_add_no_loop_over_ticks(name):
    moves = {}  # in the body of each loop over ticks are those of its segment
    for is_spread in (True, False):
        pipe = sk.pipeline(make(name, 4, 8, 1), "stage", spread=spread if is_spread else None)
        pieces = (embed, stage, head) if is_spread else ALONE
        grad_fn = pipe.value_and_grad(*pieces, layer_numbers=True)
        mesh = sk.make_mesh(jax.devices()[:4], stage=4)
        init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=pipe.plan)
        text = step.trace(init(make_params(4), KEY), make_batch(16)).lower().as_text()
        moves[is_spread] = text.count("stablehlo.collective_permute")
    assert 4 <= moves[True] == moves[False] <= 16


# Two devices of 1F1B send outputs and cotangents in turn; in a V each move is in half of the ticks.
@pytest.mark.check
@pytest.mark.parametrize(("name", "p", "most"), [("one_f_one_b", 2, 16), ("zero_bubble_v", 4, 127)])
def test_segments_stay_short_where_long_ones_would_send_much_more(name, p, most):
    sent = {}
    for is_spread in (True, False):
        segments = make(name, p, 8, 1).table(saved=True, spread=is_spread).segments
        sent[is_spread] = sum(segment.ticks * len(segment.moves) for segment in segments)
    assert sent[True] <= most < 0.8 * sent[False]


# The plan of another pipeline, branches, a vocabulary that does not divide, and a head that forgets its collective.
def test_what_is_refused():
    pipe = sk.pipeline(schedules.lockstep(4, 4), "stage", spread=spread)
    with value_error(
        "pipeline.value_and_grad: embedding and head that are spread over 'stage' must run on all its devices; got "
        "mode='branch', in which each device runs its stage alone. Pass mode='masked', or no spread=."
    ):
        pipe.value_and_grad(embed, stage, head, mode="branch")

    def local(shared: Any, x: jax.Array, batch: Any) -> Any:
        return jnp.mean(jnp.square(x @ shared["embed"].T))

    mesh = sk.make_mesh(data=2, stage=4)
    batch = make_batch(8)

    def traced(pipe: Any, head: Any, params: Any, plan: Any = None) -> None:
        grad_fn = pipe.value_and_grad(embed, stage, head, layer_numbers=True)
        plan = sk.chain(sk.dp("data"), plan or pipe.plan)
        init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
        step.trace(init(params, KEY), batch)

    assert refused(lambda: traced(pipe, local, make_params(4))) == (
        "pipeline.value_and_grad: total and weight of a spread head's means must both be the same on all devices of "
        "axis 'stage', or both be each device's own; got a total alone that differs, of 'loss'. Sum it over axis "
        "'stage', as vocab_cross_entropy does."
    )
    own = pipe.value_and_grad(lambda shared, batch, keys: shared["embed"][batch["tokens"] // 4], stage, head)
    init, step = sk.make_train_step(own, optax.sgd(0.1), mesh=mesh, plan=sk.chain(sk.dp("data"), pipe.plan))
    assert refused(lambda: step.trace(init(make_params(4), KEY), batch)).startswith(
        "pipeline.value_and_grad: a spread embedding must return the same on all devices of axis 'stage'; got a"
    )
    with pytest.raises(
        ValueError, match=r"^pipeline: dim 0 of leaf embed must be divisible by axis 'stage'; got size 7"
    ):
        traced(pipe, head, pipelines.make_params(4))
    with pytest.raises(ValueError, match=r"the stages of its schedule, 4 devices, embedding and head spread; got the"):
        traced(pipe, head, make_params(4), sk.pipeline(pipe.schedule, "stage").plan)

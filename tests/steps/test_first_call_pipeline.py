"""What the first call of a step finds in a pipeline: heads that mix a microbatch, stages that ask for their device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.steps import first_call

RNG = np.random.default_rng(0)
LAYERS = 4
PARAMS = {
    "into": RNG.normal(size=(4, 6)).astype("f"),
    "layers": RNG.normal(size=(LAYERS, 6, 6)).astype("f"),
    "out": RNG.normal(size=(6, 1)).astype("f"),
}
BATCH = {
    "x": RNG.normal(size=(16, 4)).astype("f"),
    "y": RNG.normal(size=(16, 1)).astype("f"),
    "mask": np.float32(np.arange(16) % 3 < 2),
}
ONE_F_ONE_B = sk.schedules.one_f_one_b(2, 4)
CHUNKS = [sk.schedules.interleaved(2, 4, 2), sk.schedules.zero_bubble_v(2, 4)]


def embed(shared, batch, keys):
    return batch["x"] @ shared["into"]


def stage(layers, x, keys):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def errors(shared, x, batch):
    return ((x @ shared["out"] - batch["y"]) ** 2)[:, 0]


def head(shared, x, batch):
    return sk.Mean.of(errors(shared, x, batch), batch["mask"])


def masked_mean(shared, x, batch):
    """Each microbatch divides by its own sum of the mask."""
    return jnp.sum(errors(shared, x, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def doubled(layers, x, keys):
    """Each device multiplies by another number."""
    return stage(layers, x, keys) * (1 + sk.axis_index("stage").astype(x.dtype))


def asked(layers, x, keys):
    """The index of the device, which changes nothing."""
    return stage(layers, x, keys) + 0 * sk.axis_index("stage").astype(x.dtype)


def scaled(stack, x, keys):
    """By the number of each layer; the index of the device changes nothing."""
    layers, numbers = stack

    def run_layer(x, row):
        w, number = row
        return jnp.tanh(x @ w) * (1 + number.astype(x.dtype)), None

    return jax.lax.scan(run_layer, x, (layers, numbers))[0] + 0 * sk.axis_index("stage").astype(x.dtype)


def drawn(layers, x, keys):
    """The keys of a device's own: a layer draws otherwise on another mesh."""
    own = sk.fold_keys(keys, sk.axis_index("stage"))
    return sk.dropout(stage(layers, x, keys), own, 0.5)


def drawn_by_number(stack, x, keys):
    layers, numbers = stack

    def run_layer(x, row):
        w, number = row
        return sk.dropout(jnp.tanh(x @ w), sk.fold_keys(keys, number), 0.5), None

    return jax.lax.scan(run_layer, x, (layers, numbers))[0]


def call_first(head=head, stage=stage, schedule=ONE_F_ONE_B, layers_per_stage=None, layer_numbers=False, **options):
    """The loss of the first step."""
    pipe = sk.pipeline(schedule, "stage", layers_per_stage=layers_per_stage)
    grad_fn = pipe.value_and_grad(embed, stage, head, layer_numbers=layer_numbers)
    mesh = sk.make_mesh(jax.devices()[:4], data=2, stage=2)
    plan = sk.chain(sk.dp("data"), pipe.plan)
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan, **options)
    _, metrics = step(init(PARAMS, jax.random.key(0)), BATCH)
    return float(metrics["loss"])


def loss_alone():
    whole = {"into": PARAMS["into"], "out": PARAMS["out"]}
    mean = head(whole, stage(PARAMS["layers"], embed(whole, BATCH, None), None), BATCH)
    return float(mean.total / mean.weight)


# What alone finds the mean of a microbatch, whose examples have unequal weights.
def test_a_head_that_divides_by_the_mask_of_its_microbatch_in_full():
    with pytest.raises(ValueError) as error:
        call_first(masked_mean)
    assert re.fullmatch(
        r"step: the loss must add over its examples, because each device computes that of its own; div is applied to a "
        r"sum over the examples at test_first_call_pipeline.py:\d+ \(masked_mean\), so the loss of the examples of two "
        r"microbatches is [\d.]+, and not the mean of theirs, [\d.]+. Return sk.Mean\(total, weight\) of sums over "
        r"examples, send what other examples need, as sk.all_gather does, or pass make_train_step\(..., "
        r"examples='mixed'\) if each device's own examples are meant to meet.",
        str(error.value),
    )


def test_a_head_that_is_meant_to_mix_passes():
    call_first(masked_mean, examples="mixed")


@pytest.mark.quick("schedule0", "schedule2")
@pytest.mark.parametrize("schedule", [ONE_F_ONE_B, *CHUNKS])
def test_a_stage_that_asks_for_its_device_is_compared_with_one_device_in_full(schedule):
    with pytest.warns(UserWarning) as caught:
        loss = call_first(stage=doubled, schedule=schedule)
    [warning] = caught
    matched = re.fullmatch(
        r"step: test_first_call_pipeline.py:\d+ \(doubled\): the loss, which asks for the index of a device along "
        r"'stage' here, must be the same on every mesh; it is ([\d.]+) on this one, and ([\d.]+) where one device has "
        r"all stages. Pass value_and_grad\(..., layer_numbers=True\) for the number of a layer, and draw by "
        r"sk.fold_keys\(keys, number\).",
        str(warning.message),
    )
    np.testing.assert_allclose([float(x) for x in matched.groups()], [loss, loss_alone()], rtol=1e-4)


def test_a_stage_that_draws_by_its_device_is_told():
    with pytest.warns(UserWarning, match=r"\(drawn\): the loss, which asks for the index of a device along 'stage'"):
        call_first(stage=drawn)


# Warnings are errors: what the first call computes in sequence is the loss of the pipeline.
@pytest.mark.quick("options0", "options2", "options3")
@pytest.mark.parametrize(
    "options",
    [
        {"stage": asked},
        {"stage": asked, "schedule": CHUNKS[0]},
        {"stage": asked, "schedule": CHUNKS[1]},
        {"stage": scaled, "layer_numbers": True, "layers_per_stage": (1, 3)},
        {"stage": scaled, "layer_numbers": True, "schedule": CHUNKS[0]},
        {"stage": drawn_by_number, "layer_numbers": True},
    ],
)
def test_what_is_the_same_on_every_mesh_passes(options):
    call_first(**options)


def test_a_metric_that_mixes_a_microbatch_is_told():
    def with_metric(shared, x, batch):
        return head(shared, x, batch), {"largest": jnp.max(errors(shared, x, batch))}

    with pytest.warns(UserWarning, match="the metric 'largest' must add over its examples"):
        call_first(with_metric)


def test_what_one_device_cannot_hold_is_not_checked(monkeypatch):
    monkeypatch.setattr(first_call, "MOST_BYTES", 100)
    call_first(masked_mean)

"""Twenty bits that flip, in four plans: replay and the comparison of replicas find each, and name device and leaf."""

import itertools

import jax
import numpy as np
import pytest

import shardkit as sk
from shardkit.runtime.replay import CorruptionError, Replay
from support import jobs
from support.conformance import MODELS, PLANS, make_mesh
from support.planted.corrupted import flip_in_memory, train_step

NAMES = ("dp4", "fsdp", "zero1", "toy tp x dp")
FAULTS = ("parameter", "gradient", "flight", "optimizer", "memory")
MODEL = MODELS[0]


# Found and named by no other test: faults of real train steps, in every plan, at places that are drawn. Each is found
# at one of the first two steps, without a majority of replicas.
@pytest.mark.deep
@pytest.mark.parametrize(("name", "fault"), list(itertools.product(NAMES, FAULTS)))
def test_a_planted_flip_is_named(name, fault):
    (row,) = [row for row in PLANS if row.name == name]
    mesh, plan, loss_fn = make_mesh(row), row.plan(), MODEL.loss(row.model_axis)
    rng = np.random.default_rng([NAMES.index(name), FAULTS.index(fault)])
    device, leaf = rng.choice(list(mesh.devices.flat)), str(rng.choice(["weight", "bias"]))
    leaf = "weight" if fault == "parameter" else leaf  # the bias is 0: with most bits flipped it is still next to 0
    bit = int(rng.integers(10, 31))  # a lower one may be lost in the rounding of a sum, and is then no corruption
    build = lambda mesh: train_step(mesh, plan, loss_fn, leaf, device, fault, bit)  # noqa: E731
    init, step = build(mesh)
    step = Replay(step, lambda mesh: build(mesh).step, mesh=mesh, every=1 if fault != "memory" else 2)
    state = init(MODEL.params(), jax.random.key(0))
    batches = [sk.runtime.from_full(MODEL.batch(k), mesh, plan.batch_spec(mesh)) for k in range(2)]
    with pytest.raises(CorruptionError) as error:
        for batch in batches:
            state, _ = step(state, batch)
            if fault == "memory":
                jax.block_until_ready(step._returned[1])  # its checksums, or they would be of the changed state
                flip_in_memory(state.opt_state[0].mu[leaf], device, bit)
    found = error.value.corruptions
    print(name, fault, leaf, device.id, bit, error.value)
    assert {each.devices for each in found} == {(device.id,)}
    paths = {"memory": {f"opt_state.0.mu.{leaf}"}, "optimizer": {f"opt_state.0.mu.{leaf}"}}
    written = {f"params.{leaf}", f"opt_state.0.mu.{leaf}", f"opt_state.0.nu.{leaf}"}
    named = {each.path for each in found}
    # A parameter that is misread changes every gradient; what is written wrong, its leaf alone.
    assert named >= written if fault == "parameter" else named <= paths.get(fault, written)


# What several processes find is the same in each, and the shards that they exchange have the same bits.
@pytest.mark.deep
def test_every_process_names_the_same_device():
    ended = jobs.run("replayed.py", processes=2, devices=2, timeout=180)
    assert [each.code for each in ended] == [0, 0], [each.output[-2000:] for each in ended]
    assert ended[0].last == ended[1].last
    assert ended[0].last == (
        "right None; Replay: a step must have the same bits whichever device computes which shard; step 0 has other "
        "bits in w, which device DEVICE (process 1) gives each time. Restore the last checkpoint, and take the device "
        "out of the mesh."
    )

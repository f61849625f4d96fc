"""Your tests: one device's numbers on every mesh, the bytes of a step, a run that was cut.

python -m pytest test.py
"""

import jax
import numpy as np
import optax
import train
from model import Config, init, make_loss

import shardkit as sk
from shardkit import testing

sk.simulate_devices(8)  # before the first array

CONFIG = Config(width=32, layers=2)


def draw_batches(count):
    """Batches of 16 examples, of which three do not count."""
    examples = train.load_examples(CONFIG, 16 * count, seed=3)
    batches = []
    for start in range(0, len(examples), 16):
        rows = examples[start : start + 16]
        batch = {}
        for name in ("x", "label", "weight"):
            batch[name] = np.stack([row[name] for row in rows])
        batch["weight"][-3:] = 0  # so that the devices have unequal weights, as in a last batch
        batches.append(batch)
    return batches


def test_every_plan_has_the_numbers_of_one_device():
    grad_fn = sk.value_and_grad(make_loss(CONFIG))
    fsdp = sk.fsdp("fsdp", layerwise=("layers",), min_size=1)
    rows = [
        testing.Row({"data": 4}, sk.dp("data"), accumulate=2),
        testing.Row({"data": 2, "fsdp": 4}, sk.chain(sk.dp("data"), fsdp)),
    ]
    params = init(jax.random.key(0), CONFIG)
    testing.prove(grad_fn, grad_fn, rows=rows, params=params, batches=draw_batches(2), optimizer=optax.adam(1e-2))


def test_bytes_of_a_step():
    """A collective that somebody adds by accident fails here. Nothing runs."""
    mesh, plan = train.make_mesh_and_plan()
    step = train.make_step(CONFIG, 10, mesh, plan)
    params = jax.eval_shape(lambda: init(jax.random.key(0), CONFIG))
    state = step.init.abstract(params)
    census = sk.census(step.step, state, draw_batches(1)[0])
    layer_bytes = 0
    for leaf in jax.tree.leaves(params["layers"]):
        layer_bytes += leaf.size * leaf.dtype.itemsize
    # Each device holds 1/4 of a layer and gets the other 3/4: forward, and again in the backward pass.
    assert census.sent(kind="all_gather", axis="fsdp") == 2 * layer_bytes * 3 / 4


def test_a_run_that_was_cut_ends_with_the_same_numbers(tmp_path):
    whole = train.main(tmp_path / "whole", 4, CONFIG)
    train.main(tmp_path / "cut", 4, CONFIG, stop=2)
    resumed = train.main(tmp_path / "cut", 4, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)

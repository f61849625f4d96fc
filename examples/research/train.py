"""Your training run: plan, data, evaluation, checkpoints.

python train.py runs/a --simulate            # eight CPU devices
python train.py runs/a --simulate            # again: goes on from the last checkpoint
shardkit launch -n 2 --devices 4 -- train.py runs/b
"""

import argparse

import jax
import numpy as np
import optax
from model import Config, init, make_loss

import shardkit as sk
from shardkit import runtime

CONFIG = Config()
BATCH = 64  # examples per step, over all devices
EVERY = 20  # steps between two evaluations; a checkpoint is saved at each


def make_mesh_and_plan():
    """The one place that says which device holds what."""
    mesh = sk.make_mesh(data=2, fsdp=-1)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",)))
    return mesh, plan


def make_step(config, steps, mesh, plan):
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, max(1, steps // 10), steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    grad_fn = sk.value_and_grad(make_loss(config))
    return sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)


def load_examples(config, count, seed):
    """Replace this by your data: anything with len and [i]."""
    teacher = np.random.default_rng(0).normal(size=(config.features, config.classes))
    x = np.random.default_rng(seed).normal(size=(count, config.features)).astype(np.float32)
    labels = np.argmax(x @ teacher, axis=1).astype(np.int32)
    examples = []
    for row, label in zip(x, labels, strict=True):
        examples.append({"x": row, "label": label, "weight": np.float32(1)})
    return examples


def load_held_out(config, mesh, spec):
    """Batches of examples that training does not see, on the devices."""
    examples = load_examples(config, 250, seed=2)
    # 250 examples are four batches of 64 but for the last six rows, which must be there and count nothing.
    padding = examples[-1] | {"weight": np.float32(0)}
    missing = -len(examples) % BATCH
    examples += [padding] * missing
    return list(runtime.loader(examples, batch=BATCH, seed=None, mesh=mesh, spec=spec, epochs=1))


def evaluate_all(evaluate, params, batches):
    """The loss and accuracy over all batches, each weighted by its examples."""
    loss = 0.0
    accuracy = 0.0
    weight = 0.0
    for batch in batches:
        metrics = jax.device_get(evaluate(params, batch))
        loss += metrics["loss"] * metrics["weight"]
        accuracy += metrics["accuracy"] * metrics["weight"]
        weight += metrics["weight"]
    return loss / weight, accuracy / weight


def main(directory, steps, config=CONFIG, stop=None):
    """Trains to `steps`, or to an earlier `stop`: a later call goes on there."""
    mesh, plan = make_mesh_and_plan()
    training = make_step(config, steps, mesh, plan)
    evaluate = sk.make_eval_step(make_loss(config), mesh=mesh, plan=plan)

    def first_params(key):
        return init(key, config)

    spec = plan.batch_spec(mesh)
    held_out = load_held_out(config, mesh, spec)
    with runtime.Checkpoints(directory) as checkpoints:
        if checkpoints.latest_step() is None:
            state = training.init(first_params, jax.random.key(0))
            position = 0
        else:
            state, saved = checkpoints.restore(training.init.abstract(first_params))
            position = saved.position  # of the loader, which goes on with the batch after it
            runtime.log(f"goes on after step {state.step}")
        examples = load_examples(config, 4096, seed=1)
        batches = runtime.loader(examples, batch=BATCH, seed=0, mesh=mesh, spec=spec, position=position)
        last = steps if stop is None else stop
        for number in range(int(state.step) + 1, last + 1):
            state, metrics = training.step(state, next(batches))
            if number % EVERY == 0 or number == last:
                loss, accuracy = evaluate_all(evaluate, state.params, held_out)
                runtime.log(
                    f"step {number}: trained on {metrics['loss']:.4f}; "
                    f"held out: loss {loss:.4f}, accuracy {accuracy:.4f}"
                )
                checkpoints.save(state, position=batches.position)
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--simulate", action="store_true", help="eight CPU devices")
    options = parser.parse_args()
    if options.simulate:
        sk.simulate_devices(8)
    else:
        runtime.initialize()
    main(options.directory, options.steps)

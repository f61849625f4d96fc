"""A trainer and a rollout on devices of their own: fsdp x tp in float32 here, tp in bfloat16 there.

In each round the new weights cross to the rollout, which acts; what it did crosses back, and the trainer learns from
it. All of it is one text, in one process with eight devices or in two with four each, where every process makes every
call: `shardkit launch -n 2 --devices 4 -- examples/rollout.py`. Source: Williams, Simple statistical gradient-following
algorithms (REINFORCE, 1992)."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardkit as sk

BATCH, FEATURES, HIDDEN, ACTIONS = 64, 8, 32, 4
GOOD = np.random.default_rng(7).normal(size=(FEATURES, ACTIONS)).astype(np.float32)  # the best action: x @ GOOD
SPLIT = {"up": P(None, "tp"), "down": P("tp")}  # of the weights in the rollout
DIMS = {"up": 1, "down": 0}  # the dims that tp splits in the trainer


def init(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (FEATURES, HIDDEN)) / 3, "down": jax.random.normal(down, (HIDDEN, ACTIONS)) / 6}


def logits(params, x):
    h = jnp.tanh(sk.layers.column_linear(x, params["up"], "tp"))
    return sk.layers.row_linear(h, params["down"], "tp")


def loss_fn(params, batch, keys):
    log_probabilities = jax.nn.log_softmax(logits(params, batch["x"]))
    chosen = jnp.take_along_axis(log_probabilities, batch["action"][:, None], axis=1)[:, 0]
    return sk.Mean.of(-chosen * (batch["reward"] - 0.5)), {"reward": sk.Mean.of(batch["reward"])}


def act(params, key):
    """Observations, what the policy does, and what it gets for it: the same on all devices of the rollout."""
    keys = jax.random.split(key)
    x = jax.random.normal(keys[0], (BATCH, FEATURES))
    action = jax.random.categorical(keys[1], logits(params, x.astype(jnp.bfloat16)).astype(jnp.float32))
    return {"x": x, "action": action, "reward": jnp.float32(action == jnp.argmax(x @ GOOD, axis=1))}


def run(trainer, rollout, rounds):
    """The weights of the rollout in the last round, and the mean reward of each, where the trainer is."""
    plan = sk.chain(sk.fsdp("fsdp", min_size=1), sk.tp("tp", lambda path, shape: DIMS[path]))
    made = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(0.02), mesh=trainer, plan=plan)
    play = jax.jit(jax.shard_map(act, mesh=rollout, in_specs=(SPLIT, P()), out_specs=P()))
    state, rewards = made.init(init, jax.random.key(0)), []
    steps = sk.reshard_steps(state.params, plan, SPLIT, mesh=trainer, to=rollout, dtype=jnp.bfloat16)
    sk.runtime.log(steps)
    for number in range(rounds):
        weights = sk.reshard(state.params, plan, SPLIT, mesh=trainer, to=rollout, dtype=jnp.bfloat16)
        if number == 0:
            sk.runtime.log(steps.arrived(state.params, weights))
        batch = play(weights, jax.random.key(number))
        batch = sk.reshard(batch, P(), plan.batch_spec(trainer), mesh=rollout, to=trainer, check=True)
        state, metrics = made.step(state, batch)
        rewards.append(metrics["reward"])
    return weights, rewards


if __name__ == "__main__":
    if "JAX_NUM_PROCESSES" not in os.environ:
        sk.simulate_devices(8)
    sk.runtime.initialize()
    devices = jax.devices()
    trainer, rollout = sk.make_mesh(devices[:4], fsdp=2, tp=2), sk.make_mesh(devices[4:], tp=4)
    _, rewards = run(trainer, rollout, 40)
    if sk.runtime.is_main():
        print(" ".join(f"{reward:.2f}" for reward in map(float, rewards[::8])))

"""Mamba-2, RWKV-6 and Gated DeltaNet over a sequence split between devices, trained beside one device.

Each mixer computes what its tokens read, write, decay and erase, and `linear_recurrence` does the rest. Packed
documents do not see one another. Sources: arXiv:2405.21060 (Mamba-2), 2404.05892 (RWKV-6), 2412.06464 (Gated DeltaNet).
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import shardkit as sk

VOCABULARY, HEADS, WIDTH, TOKENS = 17, 2, 8, 32
DIM = HEADS * WIDTH


def mamba_2(w, x, segments, axis):
    q, k, v = project(w, x)
    step = jax.nn.softplus(x @ w["gate"])  # [b, t, H]: how far a token moves the state
    decay = -step * jnp.exp(w["rate"])[None]
    return sk.layers.linear_recurrence(q, k * step[..., None], v, axis, log_decay=decay, segments_bt=segments, chunk=8)


def rwkv_6(w, x, segments, axis):
    q, k, v = project(w, x)
    decay = -jax.nn.softplus((x @ w["decay"]).reshape(q.shape))  # one for each row of the state
    return sk.layers.linear_recurrence(
        q, k, v, axis, log_decay=decay, bonus_HK=w["bonus"], segments_bt=segments, chunk=8
    )


def gated_deltanet(w, x, segments, axis):
    q, k, v = project(w, x)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    decay = jax.nn.log_sigmoid(x @ w["gate"])
    strength = jax.nn.sigmoid(x @ w["strength"])[..., None]
    # What the state has for the key k is erased by as much as the new value is written.
    erase = (jnp.exp(decay)[..., None] * strength * k, k)
    return sk.layers.linear_recurrence(
        q, strength * k, v, axis, log_decay=decay, erase=erase, segments_bt=segments, chunk=8
    )


def project(w, x):
    return jnp.split((x @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, WIDTH), 3, 2)


def init(key):
    shapes = {"embed": (VOCABULARY, DIM), "qkv": (DIM, 3 * DIM), "decay": (DIM, DIM), "out": (DIM, VOCABULARY)}
    shapes |= {"gate": (DIM, HEADS), "strength": (DIM, HEADS), "rate": (1, HEADS), "bonus": (HEADS, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) / 4 for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss_fn(w, batch, keys, *, mixer, axis):
    x = w["embed"][batch["tokens"]]
    x = x + mixer(w, x, batch["segments"], axis).reshape(x.shape)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w["out"], batch["targets"])
    return sk.Mean.of(losses)


if __name__ == "__main__":
    sk.simulate_devices(8)
    tokens = jax.random.randint(jax.random.key(1), (4, TOKENS + 1), 0, VOCABULARY)
    segments = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32) // 12, (4, TOKENS))  # of 12, 12 and 8 tokens
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments}
    plan = sk.chain(sk.fsdp("data", min_size=1), sk.cp("context"))
    split, one = sk.make_mesh(data=2, context=4), sk.make_mesh(jax.devices()[:1], data=1)
    for mixer in (mamba_2, rwkv_6, gated_deltanet):
        losses = []
        for mesh, plan_of_mesh, axis in ((split, plan, "context"), (one, sk.dp("data"), None)):
            grad_fn = sk.value_and_grad(partial(loss_fn, mixer=mixer, axis=axis))
            made = sk.make_train_step(grad_fn, optax.adam(0.01), mesh=mesh, plan=plan_of_mesh)
            state = made.init(init, jax.random.key(0))
            for _ in range(4):
                state, _ = made.step(state, batch)
            losses.append(float(made.step(state, batch)[1]["loss"]))
        assert abs(losses[0] - losses[1]) < 1e-4, (mixer.__name__, losses)

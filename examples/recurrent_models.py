"""Mamba-2, RWKV-6 and Gated DeltaNet over a sequence split between devices, trained beside one device.

Each mixer computes what its tokens read, write, decay and erase; `linear_recurrence` does the rest. Packed documents do
not see one another. Sources: arXiv:2405.21060 (Mamba-2), 2404.05892 (RWKV-6), 2412.06464 (Gated DeltaNet)."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import shardkit as sk

VOCABULARY, HEADS, WIDTH, TOKENS = 17, 2, 8, 32
DIM = HEADS * WIDTH


def project(w, x):
    """Queries, keys and values, [b, t, H, K]."""
    qkv = (x @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, WIDTH)
    return jnp.split(qkv, 3, axis=2)


def mamba_2(w, x, axis, **options):
    q, k, v = project(w, x)
    step = jax.nn.softplus(x @ w["gate"])  # [b, t, H]: how far a token moves the state
    log_decay = -step * jnp.exp(w["rate"])[None]
    return sk.layers.linear_recurrence(q, k * step[..., None], v, axis, log_decay=log_decay, **options)


def rwkv_6(w, x, axis, **options):
    q, k, v = project(w, x)
    log_decay = -jax.nn.softplus((x @ w["decay"]).reshape(q.shape))  # one for each row of the state
    return sk.layers.linear_recurrence(q, k, v, axis, log_decay=log_decay, bonus_HK=w["bonus"], **options)


def gated_deltanet(w, x, axis, **options):
    q, k, v = project(w, x)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = jax.nn.log_sigmoid(x @ w["gate"])
    strength = jax.nn.sigmoid(x @ w["strength"])[..., None]
    # What the state has for the key k is erased by as much as the new value is written.
    erase = (jnp.exp(log_decay)[..., None] * strength * k, k)
    return sk.layers.linear_recurrence(q, strength * k, v, axis, log_decay=log_decay, erase=erase, **options)


def init(key):
    shapes = {"embed": (VOCABULARY, DIM), "qkv": (DIM, 3 * DIM), "decay": (DIM, DIM), "out": (DIM, VOCABULARY)}
    shapes |= {"gate": (DIM, HEADS), "strength": (DIM, HEADS), "rate": (1, HEADS), "bonus": (HEADS, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(key, shape) / 4 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss_fn(w, batch, keys, *, mixer, axis):
    x = w["embed"][batch["tokens"]]
    x = x + mixer(w, x, axis, segments_bt=batch["segments"], chunk=8).reshape(x.shape)
    return sk.Mean.of(optax.softmax_cross_entropy_with_integer_labels(x @ w["out"], batch["targets"]))


def train(mixer, axis, mesh, plan, batch):
    """The loss of the fifth step."""
    grad_fn = sk.value_and_grad(partial(loss_fn, mixer=mixer, axis=axis))
    init_state, step = sk.make_train_step(grad_fn, optax.adam(0.01), mesh=mesh, plan=plan)
    state = init_state(init, jax.random.key(0))
    for _ in range(5):
        state, metrics = step(state, batch)
    return float(metrics["loss"])


if __name__ == "__main__":
    sk.simulate_devices(8)
    tokens = jax.random.randint(jax.random.key(1), (4, TOKENS + 1), 0, VOCABULARY)
    segments = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32) // 12, (4, TOKENS))  # of 12, 12 and 8 tokens
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments}
    mesh = sk.make_mesh(data=2, context=4)
    plan = sk.chain(sk.fsdp("data", min_size=1), sk.cp("context"))
    for mixer in (mamba_2, rwkv_6, gated_deltanet):
        loss = train(mixer, "context", mesh, plan, batch)
        reference = train(mixer, None, sk.make_mesh(jax.devices()[:1], data=1), sk.dp("data"), batch)
        assert abs(loss - reference) < 1e-4, (mixer.__name__, loss, reference)

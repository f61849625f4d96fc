"""Mixtures of experts: routers, exchanges and biases."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import MEGATRON, TITAN, TORCH, Case, floats

TOKENS, EXPERTS, HIDDEN = P("expert"), P("expert"), P(None, "model")


def balance(x, gate, mask):
    count = jnp.sum(mask)
    total = sk.all_reduce(count, "expert")
    mean = sk.all_reduce(jnp.sum(jax.nn.softmax(x @ gate) * mask[:, None], 0), "expert") / total
    # wrong: return sk.all_reduce(jnp.sum(mean**2) * total, "expert") / total
    return sk.all_reduce(jnp.sum(mean**2) * count, "expert") / total


def balance_reference(x, gate, mask):
    return jnp.sum((jnp.sum(jax.nn.softmax(x @ gate) * mask[:, None], 0) / jnp.sum(mask)) ** 2)


def exchanged(x, g):
    """Of each device's tokens the first half is for expert 0."""
    return sk.all_to_all(x, "expert", split_dim=0, concat_dim=0), sk.all_to_all(g, "expert", split_dim=0, concat_dim=0)


def of_expert(x, w, g):
    x, g = exchanged(x, g / len(x))  # of the mean over a device's tokens
    g = g * (1 - jnp.tanh(x @ w[0]) ** 2)
    # wrong: return (x.T @ g)[None]
    return (x.T @ g)[None] / sk.axis_size("expert")


def of_expert_reference(x, w, g):
    def loss(w):
        y = jnp.tanh(x.reshape(2, 2, 2, 3).transpose(1, 0, 2, 3).reshape(2, 4, 3) @ w)
        return jnp.sum(y * g.reshape(2, 2, 2, 3).transpose(1, 0, 2, 3).reshape(2, 4, 3)) / 8

    return jax.grad(loss)(w)


def router(x, gate, up, g):
    score = jax.nn.sigmoid(x @ gate)
    d = jnp.sum(g * jnp.tanh(x @ up), 1)
    # wrong: return x.T @ (d * score * (1 - score))
    return sk.all_reduce(x.T @ (d * score * (1 - score)), "model")


def router_reference(x, gate, up, g):
    return jax.grad(lambda gate: jnp.sum(g * jax.nn.sigmoid(x @ gate)[:, None] * jnp.tanh(x @ up)))(gate)


def biased(x, up, down, bias):
    # wrong: return sk.all_reduce(jnp.tanh(x @ up) @ down + bias[None], "model")
    return sk.all_reduce(jnp.tanh(x @ up) @ down, "model") + bias[None]


def global_balance(x, gate, chosen):
    """The shares of the experts are those of all tokens, the probabilities those of this device's."""
    share = sk.all_reduce(jnp.mean(chosen, 0), "expert", op="mean")
    probability = jnp.sum(jax.nn.softmax(x @ gate), 0)
    # wrong: loss = jnp.sum(probability * share) / (len(x) * sk.axis_size("expert"))
    loss = jnp.sum(probability * share) / len(x)
    return sk.all_reduce(loss, "expert", op="mean")


def global_balance_reference(x, gate, chosen):
    return jnp.sum(jnp.mean(jax.nn.softmax(x @ gate), 0) * jnp.mean(chosen, 0))


def gathering(backward):
    """An all-gather over the experts with a backward pass of its own."""
    gather = jax.custom_vjp(lambda x: sk.all_gather(x, "expert"))
    gather.defvjp(lambda x: (sk.all_gather(x, "expert"), None), lambda _, g: (backward(g),))
    return gather


def every_token(x, w):
    # wrong: whole = gathering(lambda g: jax.lax.dynamic_slice_in_dim(g, sk.axis_index("expert") * 2, 2))(x)
    whole = gathering(lambda g: sk.reduce_scatter(g, "expert"))(x)
    return sk.reduce_scatter(jnp.tanh(whole @ w[0]), "expert")


CASES = [
    Case("router's count overwritten by the total", MEGATRON + "7452", balance).against(
        balance_reference, (floats(4, 3), floats(3, 2), floats(4) ** 2), (TOKENS, P(), TOKENS), P()
    ),
    Case("expert gradients are twice as large", TORCH + "issues/160285", of_expert).against(
        of_expert_reference,
        (floats(8, 3), floats(2, 3, 3), floats(8, 3) ** 2),
        (TOKENS, EXPERTS, TOKENS),
        EXPERTS,
        grad=False,
    ),
    Case("global balance loss over the tokens of all", MEGATRON + "3672", global_balance).against(
        global_balance_reference, (floats(4, 3), floats(3, 2), floats(4, 2) ** 2), (TOKENS, P(), TOKENS), P()
    ),
    Case("router's gradient of a device's hidden units", TITAN + "2416", router).against(
        router_reference,
        (floats(4, 3), floats(3), floats(3, 4), floats(4, 4)),
        (P(), P(), HIDDEN, HIDDEN),
        P(),
        grad=False,
    ),
    Case("expert's bias times the model axis", TITAN + "4245", biased).against(
        lambda x, up, down, bias: jnp.tanh(x @ up) @ down + bias[None],
        (floats(4, 3), floats(3, 4), floats(4, 3) ** 2, floats(3)),
        (P(), HIDDEN, P("model"), P()),
        P(),
    ),
    Case(
        "gathered tokens' gradients are sliced", "https://github.com/NVIDIA-NeMo/Automodel/pull/1260", every_token
    ).against(lambda x, w: jnp.sum(jnp.tanh(x @ w), 0), (floats(4, 3), floats(2, 3, 3)), (TOKENS, EXPERTS), TOKENS),
]

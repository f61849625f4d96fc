"""Arrays moved from one layout to another."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import CHANGELOG, MEGATRON, Case, floats

BOTH = P(("data", "fsdp"))


def unreduced(x, g):
    # wrong: return sk.reduce_scatter(jnp.tanh(x).T @ g, "fsdp")
    return sk.all_reduce(sk.reduce_scatter(jnp.tanh(x).T @ g, "fsdp"), "data")


def scattered(image, text):
    combined = jnp.tanh(jnp.concatenate([image, text]))
    # wrong: return lax.dynamic_slice_in_dim(combined, sk.axis_index("data") * 3, 3)
    return lax.dynamic_slice_in_dim(combined, sk.axis_index("model") * 3, 3)


def padded(x, w):
    # wrong: w = sk.all_gather(sk.all_gather(w, "fsdp")[:3], "data")
    w = sk.all_gather(sk.all_gather(w, "fsdp"), "data")[:6]
    return jnp.tanh(x @ w)


def embedded(tokens, g):
    """The rows of a table that this device has, of the tokens of all."""
    grad = sk.vary(jnp.zeros((8, 3)), "model").at[tokens].add(g)
    first = sk.axis_index("model") * 4
    # wrong: return sk.all_reduce(lax.dynamic_slice_in_dim(grad, first, 4), "model")
    return lax.dynamic_slice_in_dim(sk.all_reduce(grad, "model"), first, 4)


CASES = [
    Case(
        "missing all-reduce beside a reduce-scatter", "https://github.com/openxla/xla/issues/40034", unreduced
    ).against(lambda x, g: jnp.tanh(x).T @ g, (floats(8, 6), floats(8, 3)), (BOTH, BOTH), P("fsdp")),
    Case("embeddings scattered over another group", MEGATRON + "7452", scattered).against(
        lambda image, text: jnp.tanh(jnp.concatenate([image, text])),
        (floats(2, 3), floats(4, 3)),
        (P(), P()),
        P("model"),
        sizes={"data": 2, "model": 2},
    ),
    Case("rows are cut out before they are added", "https://github.com/openxla/xla/issues/42481", embedded).against(
        lambda tokens, g: jnp.zeros((8, 3)).at[tokens].add(g),
        (np.array([3, 7, 0, 5], np.int32), floats(4, 3)),
        (P("model"), P("model")),
        P("model"),
        grad=False,
    ),
    Case("padding of another layout dropped", CHANGELOG, padded).against(
        lambda x, w: jnp.tanh(x @ w[:6]), (floats(4, 6), floats(8, 3) / 4), (BOTH, BOTH), BOTH
    ),
]

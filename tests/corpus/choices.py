"""What is drawn, chosen or evaluated, and has no gradient."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import TORCH, Case, floats

ROWS = P("data")


def noisy(x):
    key = jax.random.key(0)
    # wrong: return x + jax.random.uniform(key, x.shape)
    return x + jax.random.uniform(jax.random.fold_in(key, sk.axis_index("data")), x.shape)


def noisy_reference(x):
    noise = [jax.random.uniform(jax.random.fold_in(jax.random.key(0), i), (2, 3)) for i in range(2)]
    return x + jnp.concatenate(noise)


def likeliest(x):
    # wrong: return sk.all_reduce(jnp.argmax(x, 1), "model", op="max")
    return jnp.argmax(sk.all_gather(x, "model", dim=1, replicated=True), 1)


def evaluated(x):
    """Of three examples; the fourth fills the last batch, and is one of them again."""
    score = jnp.tanh(x)
    # wrong: return sk.all_reduce(jnp.mean(score), "data", op="mean")
    return jnp.mean(sk.all_gather(score, "data", replicated=True)[:3])


CASES = [
    Case("noise of each shard is the same", "https://github.com/markean/aimz/issues/292", noisy).against(
        noisy_reference, (floats(4, 3),), (ROWS,), ROWS, grad=False
    ),
    Case("largest of the places in shards", TORCH + "pull/173936", likeliest).against(
        lambda x: jnp.argmax(x, 1), (floats(4, 8),), (P(None, "model"),), P(), grad=False
    ),
    Case("example that fills a batch is counted", "https://github.com/huggingface/trl/issues/7010", evaluated).against(
        lambda x: jnp.mean(jnp.tanh(x[:3])), (floats(4),), (ROWS,), P(), grad=False
    ),
]

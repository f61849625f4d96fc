"""Attention over a split sequence or split heads."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import CHANGELOG, MEGATRON, TITAN, Case, floats

CONTEXT, HEADS = P("context"), P(None, "model")
ORDER = ("outer", "inner")


def passed(q, k, v):
    """Attention whose keys and values pass by, and the logarithm of its sums."""
    total, out = 0.0, 0.0
    for _ in range(sk.axis_size("context")):
        p = jnp.exp(q @ k.T)
        total, out = total + p.sum(1, keepdims=True), out + p @ v
        k, v = sk.shift((k, v), "context")
    return out / total, jnp.log(total)


def of_block(q, k, v, out, log_total, g):
    """What a block of keys adds to the gradients of q, k and v."""
    p = jnp.exp(q @ k.T - log_total)
    d = p * (g @ v.T - jnp.sum(g * out, 1, keepdims=True))
    return d @ k, d.T @ q, p.T @ g


def ring(q, k, v, g):
    out, log_total = passed(q, k, v)
    dq, dk, dv = 0.0, 0.0, 0.0
    for _ in range(sk.axis_size("context")):
        # of a block: log_sum = jnp.log(jnp.sum(jnp.exp(q @ k.T), 1, keepdims=True))
        log_sum = log_total
        more_q, more_k, more_v = of_block(q, k, v, out, log_sum, g)
        dq, dk, dv = dq + more_q, dk + more_k, dv + more_v
        # stale: dk, dv = sk.shift((dk, dv), "context")
        k, v, dk, dv = sk.shift((k, v, dk, dv), "context")
    return dq, dk, dv


def ring_reference(q, k, v, g):
    return jax.vjp(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, q, k, v)[1](g)


def heads(q, k, v):
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k)), v)


def shared_key(q, k, k_pe, v, g):
    k = jnp.concatenate([k, jnp.broadcast_to(k_pe[:, None], (*k.shape[:2], k_pe.shape[1]))], 2)
    [dk] = jax.vjp(lambda k: heads(q, k, v), k)[1](g)
    # wrong: return dk[..., :2], jnp.sum(dk[..., 2:], 1)
    return dk[..., :2], sk.all_reduce(jnp.sum(dk[..., 2:], 1), "model")


def shared_key_reference(q, k, k_pe, v, g):
    def of_keys(k, k_pe):
        pe = jnp.broadcast_to(k_pe[:, None], (*k.shape[:2], k_pe.shape[1]))
        return heads(q, jnp.concatenate([k, pe], 2), v)

    return jax.vjp(of_keys, k, k_pe)[1](g)


def ordered(q, k, bias):
    # wrong: k = sk.all_gather(k, ("inner", "outer"))
    k = sk.all_gather(k, ("outer", "inner"))
    return jax.nn.softmax(q @ k.T + bias) @ k


def rotated(q, k, cos, sin):
    # wrong: first = 0
    first = sk.axis_index("context") * len(q)
    cos, sin = (lax.dynamic_slice_in_dim(table, first, len(q)) for table in (cos, sin))
    q, k = (x * cos + jnp.concatenate([-x[:, 2:], x[:, :2]], 1) * sin for x in (q, k))
    return jax.nn.softmax(q @ sk.all_gather(k, "context").T)


def rotated_reference(q, k, cos, sin):
    q, k = (x * cos + jnp.concatenate([-x[:, 2:], x[:, :2]], 1) * sin for x in (q, k))
    return jax.nn.softmax(q @ k.T)


QKVG = (floats(4, 3), floats(4, 3) ** 2, floats(4, 2), floats(4, 2) ** 2)
CASES = [
    Case("ring's backward pass has a block's sum", MEGATRON + "1464", ring).against(
        ring_reference, QKVG, CONTEXT, CONTEXT, grad=False, mark="of a block"
    ),
    Case("ring's backward pass has stale keys", "https://github.com/NVIDIA-NeMo/Automodel/pull/3157", ring).against(
        ring_reference, QKVG, CONTEXT, CONTEXT, grad=False, mark="stale"
    ),
    Case("key that heads share has one device's gradient", TITAN + "1373", shared_key).against(
        shared_key_reference,
        (floats(3, 4, 3), floats(3, 4, 2), floats(3, 1), floats(3, 4, 2) ** 2, floats(3, 4, 2)),
        (HEADS, HEADS, P(), HEADS, HEADS),
        (HEADS, P()),
        grad=False,
    ),
    Case("positions begin with 0 on each device", TITAN + "792", rotated).against(
        rotated_reference,
        (floats(4, 4), floats(4, 4) ** 2, floats(4, 4).T, floats(4, 4).T ** 2),
        (CONTEXT, CONTEXT, P(), P()),
        CONTEXT,
    ),
    Case("axes of a sequence in another order", CHANGELOG, ordered).against(
        lambda q, k, bias: jax.nn.softmax(q @ k.T + bias) @ k,
        (floats(4, 3), floats(4, 3) ** 2, floats(4, 4)),
        (P(ORDER), P(ORDER), P(ORDER)),
        P(ORDER),
    ),
]

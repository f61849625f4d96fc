"""Small programs that were compiled for absent chips; `record.py` wrote down what the compilers made of them.

Their line numbers are in the recordings: after a change here, record again."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit import abstract_mesh


def shape(dims, mesh, spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def fsdp_tp():
    """Four layers in a scan, recomputed: weights gathered over fsdp, a psum over tp, gradients reduce-scattered."""
    mesh = abstract_mesh(fsdp=4, tp=2)
    specs = ((P(None, "fsdp", "tp"), P(None, "tp", "fsdp")), P("fsdp"))

    def loss(w, x_btD):
        def layer(x_btD, shards):
            w_Df = lax.all_gather(shards[0], "fsdp", axis=0, tiled=True)
            w_fD = lax.all_gather(shards[1], "fsdp", axis=1, tiled=True)
            h_btf = jax.nn.gelu(jnp.einsum("btD,Df->btf", x_btD, w_Df))
            return x_btD + lax.psum(jnp.einsum("btf,fD->btD", h_btf, w_fD), "tp"), None

        x_btD, _ = lax.scan(jax.checkpoint(layer), x_btD, w)
        return jnp.sum(x_btD.astype(jnp.float32) ** 2)

    grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=specs[0])
    step = jax.jit(lambda w, x: jax.tree.map(lambda w, g: w - 0.125 * g, w, grad(w, x)), donate_argnums=0)
    weights = shape((4, 1024, 4096), mesh, specs[0][0]), shape((4, 4096, 1024), mesh, specs[0][1])
    return step, (weights, shape((8, 512, 1024), mesh, specs[1]))


def ring(*, unrolled):
    """An all-gather matmul round a ring of eight."""
    mesh = abstract_mesh(tp=8)

    def kernel(x_tD, w_Df):
        def hop(i, carry):
            x_tD, out_Tf = carry
            sent = lax.ppermute(x_tD, "tp", [(k, (k + 1) % 8) for k in range(8)])
            row = (lax.axis_index("tp") - i) % 8 * x_tD.shape[0]
            return sent, lax.dynamic_update_slice_in_dim(out_Tf, x_tD @ w_Df, row, 0)

        carry = x_tD, lax.pcast(jnp.zeros((x_tD.shape[0] * 8, w_Df.shape[1]), x_tD.dtype), ("tp",), to="varying")
        if not unrolled:
            return lax.fori_loop(0, 8, hop, carry)[1]
        for i in range(8):
            carry = hop(i, carry)
        return carry[1]

    step = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")))
    return step, (shape((8192, 4096), mesh, P("tp")), shape((4096, 16384), mesh, P(None, "tp")))


def partitioner():
    """No shard_map: every collective is the compiler's own."""
    mesh = abstract_mesh(a=2, b=2, c=2)
    step = jax.jit(lambda x, w: jnp.tanh(x @ w).astype(jnp.float32).sum())
    return step, (shape((8192, 4096), mesh, P(("a", "c"), "b")), shape((4096, 4096), mesh, P("b", None)))


def parts():
    """A reshape that the compiler serves with collectives over a part of an axis."""
    mesh = abstract_mesh(a=8)
    return jax.jit(lambda x: x.reshape(2, 128, 256).sum(1)), (shape((256, 256), mesh, P("a"), jnp.float32),)


def branches():
    """A conditional, a loop of unknown length, a loop in a loop, and sums that the compiler may merge."""
    mesh = abstract_mesh(data=4, model=2)

    def kernel(x_bD, w_D):
        x_bD = lax.cond(w_D.sum() > 0, lambda x: lax.psum(x, "model"), lambda x: 2 * lax.psum(x, "model"), x_bD)
        x_bD = lax.pcast(x_bD, ("model",), to="varying")
        x_bD = lax.while_loop(
            lambda x: lax.pmax(jnp.abs(x).max(), ("data", "model")) > 1,
            lambda x: x / lax.pcast(lax.psum(x, "model"), ("model",), to="varying"),
            x_bD,
        )
        inner = lambda j, x: lax.all_to_all(x, "data", 0, 0, tiled=True) * 2  # noqa: E731
        x_bD = lax.fori_loop(0, 3, lambda i, x: lax.fori_loop(0, 5, inner, x) + 1, x_bD)
        return lax.psum(x_bD.sum(0), ("data", "model")), lax.psum((x_bD**2).sum(0), ("data", "model"))

    step = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P(), P())))
    return step, (shape((64, 256), mesh, P("data"), jnp.float32), shape((256,), mesh, P(), jnp.float32))


PROGRAMS = {
    "fsdp_tp": fsdp_tp,
    "ring_loop": lambda: ring(unrolled=False),
    "ring_unrolled": lambda: ring(unrolled=True),
    "partitioner": partitioner,
    "parts": parts,
    "branches": branches,
}

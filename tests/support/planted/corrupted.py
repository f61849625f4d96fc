"""Steps in which a bit of one device flips each time, wherever in the mesh it works, and bits that flip in memory."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk

RIGHT = None  # no device is at fault


def flipped(x, on, bit):
    """A float32 array with one bit of its first element flipped where `on`."""
    bits = lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
    return lax.bitcast_convert_type(bits.at[0].set(bits[0] ^ (on.astype(jnp.uint32) << bit)), x.dtype).reshape(x.shape)


def on_device(mesh, device):
    """Inside shard_map over all axes: whether this is the device at fault."""
    places = list(mesh.devices.flat)
    return sk.axis_index(mesh.axis_names) == (places.index(device) if device in places else -1)


def small(mesh, device=RIGHT, where="gradient"):
    """A step by hand, quick to compile, with columns over "model" and examples over "data"."""

    def kernel(params, batch):
        on = on_device(mesh, device)
        seen = sk.vary(params["w"], "data")
        means, pull = jax.vjp(lambda w: jnp.mean((batch @ w - 1) ** 2), seen)
        (grad,) = pull(sk.vary(jnp.ones_like(means), ("data", "model")))
        grad = sk.all_reduce(flipped(grad, on & (where == "gradient"), 20), "data", op="mean")
        new = params["w"] - 0.1 * sk.collectives.assume_replicated(flipped(grad, on & (where == "flight"), 20), "data")
        return {"w": new}, {"loss": sk.all_reduce(means, ("data", "model"), op="mean")}

    specs = {"w": P(None, "model")}
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    return jax.jit(mapped, donate_argnums=0)


def train_step(mesh, plan, loss_fn, leaf, device=RIGHT, where="gradient", bit=20):
    """That of `make_train_step`, with a fault of a leaf: the first of its shard on the device.

    `where` is "parameter", as the loss reads it; "gradient", before the devices are summed; "flight", the sum as it
    arrives; or "optimizer", in Adam's first moment as it is written.
    """
    from support.training import lenient  # which starts jax: a worker joins its job first

    plain, adam = sk.value_and_grad(loss_fn), lenient(optax.adam(0.1))

    def grad_fn(params, batch, keys, *, scale=1):
        on = on_device(mesh, device)
        change = lambda tree: tree | {leaf: flipped(tree[leaf], on, bit)}  # noqa: E731
        means, aux, grads = plain(change(params) if where == "parameter" else params, batch, keys, scale=scale)
        return means, aux, change(grads) if where == "gradient" else grads

    def everywhere(tree, like):  # on global arrays: each in the layout of the update
        spec = plan.layouts(like, mesh)[leaf].update
        whole = tuple(axis for axis in mesh.axis_names if axis not in str(spec))

        def per_device(x):
            x = flipped(x, on_device(mesh, device), bit)
            return sk.collectives.assume_replicated(x, whole) if whole else x

        return tree | {leaf: jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec)(tree[leaf])}

    def update(grads, state, params):
        updates, (scaled, *rest) = adam.update(everywhere(grads, params) if where == "flight" else grads, state, params)
        if where == "optimizer":
            scaled = scaled._replace(mu=everywhere(scaled.mu, params))
        return updates, (scaled, *rest)

    optimizer = optax.GradientTransformation(adam.init, update)
    return sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)

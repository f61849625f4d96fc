"""Faults planted in plain jit programs for the audit, each beside the program without it.

The line that a finding must name ends in a comment with the rule's name.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

FLOAT, SHORT = jnp.dtype("float32"), jnp.dtype("bfloat16")


class Planted(NamedTuple):
    """A rule, functions that return a step and its arguments, and the threshold `large` of the audit."""

    rule: str
    wrong: Any
    right: Any
    large: int = 2**24


def mesh():
    return sk.make_mesh(data=4, model=2)


def pin(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(*spec)))


def like(shape, *spec, dtype=FLOAT):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), P(*spec)))


def array(shape, *spec):
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh(), P(*spec)))


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)  # summed-each-iteration


def sums_in_the_loop():
    def step(w, xs):
        total, _ = jax.lax.scan(lambda g, x: (g + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)
        return w - 0.1 * total

    return jax.jit(step), (like((64, 64)), like((4, 32, 64), None, "data"))


def sums_after_the_loop():
    def step(w, xs):
        def local(w, xs):
            w = sk.vary(w, "data")
            total, _ = jax.lax.scan(lambda g, x: (g + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)
            return jax.lax.psum(total, "data")

        specs = {"in_specs": (P(), P(None, "data")), "out_specs": P()}
        return w - 0.1 * jax.shard_map(local, mesh=mesh(), **specs)(w, xs)

    return jax.jit(step), (like((64, 64)), like((4, 32, 64), None, "data"))


def sums_written_in_the_loop():
    def step(x):
        def local(x):
            def body(total, piece):
                return total + jax.lax.psum(piece, "data"), None  # summed-each-iteration

            return jax.lax.scan(body, jnp.zeros(x.shape[1:]), x)[0]

        return jax.shard_map(local, mesh=mesh(), in_specs=P(None, "data"), out_specs=P())(x)

    return jax.jit(step), (like((4, 64, 64), None, "data"),)


def layers_that_sum():
    """Tensor parallelism: every layer needs its sum."""

    def step(x, ups, downs):
        def body(x, pair):
            return pin(x + jnp.tanh(x @ pair[0]) @ pair[1], "data"), None

        return jax.lax.scan(body, x, (ups, downs))[0]

    return jax.jit(step), (
        like((32, 64), "data"),
        like((3, 64, 64), None, None, "model"),
        like((3, 64, 64), None, "model"),
    )


def stacked_sums_in_the_loop():
    """The gradients of a stack of layers, summed over microbatches."""

    def whole(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)  # summed-each-iteration

    def step(ws, xs):
        total, _ = jax.lax.scan(lambda g, x: (g + jax.grad(whole)(ws, x), None), jnp.zeros_like(ws), xs)
        return ws - 0.1 * total

    return jax.jit(step), (like((3, 64, 64)), like((4, 32, 64), None, "data"))


def stacked_sums_of_one_batch():
    def whole(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    return jax.jit(lambda ws, x: ws - jax.grad(whole)(ws, x)), (like((3, 64, 64)), like((32, 64), "data"))


def sums_of_each_batch():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)  # summed-separately

    def step(w, xs):
        return w - 0.1 * sum(jax.grad(loss)(w, xs[n]) for n in range(3)) / 3

    return jax.jit(step), (like((64, 64)), like((3, 32, 64), None, "data"))


def sums_that_are_also_read():
    """Both products are needed, not their sum alone."""

    def step(x, up, down):
        one, other = pin(x @ up, "data"), pin(x @ down, "data")
        return one + other, one * other

    weight = like((64, 64), "model")
    return jax.jit(step), (like((32, 64), "data", "model"), weight, weight)


def gathers_in_the_loop():
    """The compiler moves a gather of the forward pass out of the loop, and not one that jax.checkpoint repeats."""

    def local(w, xs):
        @jax.checkpoint
        def loss(w, x):
            return jnp.sum(jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True)))  # gathered-each-iteration

        total, _ = jax.lax.scan(lambda g, x: (g + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)
        return total

    specs = {"in_specs": (P("data"), P(None, "data")), "out_specs": P("data")}
    return jax.jit(jax.shard_map(local, mesh=mesh(), **specs)), (
        like((64, 64), "data"),
        like((4, 32, 64), None, "data"),
    )


def gathers_each_layer():
    def local(ws, x):
        def body(x, w):
            return jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True)), None

        return jax.lax.scan(body, x, ws)[0]

    specs = {"in_specs": (P(None, "data"), P("data")), "out_specs": P("data")}
    return jax.jit(jax.shard_map(local, mesh=mesh(), **specs)), (
        like((3, 64, 64), None, "data"),
        like((32, 64), "data"),
    )


def reshards_in_one_go():
    def step(a, c):
        d = a + a  # full-rematerialization
        return c + pin(d, None, ("data", "model"))

    return jax.jit(step), (like((16, 16, 16), "model", None, "data"), like((16, 16, 16), None, ("data", "model")))


def reshards_in_two():
    def step(a, c):
        d = pin(a + a, None, "model", "data")
        return c + pin(d, None, ("model", "data"))

    return jax.jit(step), (like((16, 16, 16), "model", None, "data"), like((16, 16, 16), None, ("model", "data")))


def holds_copies():
    def step(w, x):
        return x @ w  # replicated-leaf

    return jax.jit(step), (like((512, 256), None, "model"), like((32, 512), "data"))


def holds_parts():
    return jax.jit(lambda w, x: x @ w), (like((512, 256), "data", "model"), like((32, 512), "data"))


def unplaced():
    def step(w, b, x):
        return x @ w + b[None]  # unplaced-leaf

    return jax.jit(step), (like((64, 512), None, "model"), jnp.ones(512), like((32, 64), "data"))


def placed_by_the_jit():
    placed = [NamedSharding(mesh(), P(*spec)) for spec in ((None, "model"), ("model",), ("data",))]
    step = jax.jit(lambda w, b, x: x @ w + b[None], in_shardings=placed)
    return step, (jnp.ones((64, 512)), jnp.ones(512), jnp.ones((32, 64)))


def gathers_wide():
    def step(w, x):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh(), P()))  # float32-traffic
        return x @ w.astype(jnp.bfloat16)

    return jax.jit(step), (like((256, 128), "data"), like((32, 256), "data", dtype=SHORT))


def gathers_narrow():
    def step(w, x):
        w = pin(w.astype(jnp.bfloat16), "data")
        return x @ w

    return jax.jit(step), (like((256, 128), "data"), like((32, 256), "data", dtype=SHORT))


def prints():
    def step(x):
        jax.debug.print("{}", x.sum())  # host-transfer
        return x * 2

    return jax.jit(step), (like((32, 64), "data"),)


def returns_what_it_would_print():
    return jax.jit(lambda x: (x * 2, x.sum())), (like((32, 64), "data"),)


def moves_to_the_host():
    def step(moment, x):
        there = NamedSharding(mesh(), P("data"), memory_kind="pinned_host")
        moment = 0.9 * moment + x
        return jax.device_put(moment, there)  # host-transfer

    return jax.jit(step), (like((32, 64), "data"), like((32, 64), "data"))


def stays_on_the_device():
    return jax.jit(lambda moment, x: 0.9 * moment + x), (like((32, 64), "data"), like((32, 64), "data"))


def compiles_again():
    def step(state, x):  # second-compile
        return {"w": pin(state["w"] + x.sum(), "model"), "n": state["n"] + 1}

    return jax.jit(step, donate_argnums=0), ({"w": array((64, 64), "data"), "n": array(())}, array((32, 64), "data"))


def compiles_once():
    def step(state, x):
        return {"w": pin(state["w"] + x.sum(), "data"), "n": pin(state["n"] + 1)}

    return jax.jit(step, donate_argnums=0), ({"w": array((64, 64), "data"), "n": array(())}, array((32, 64), "data"))


PLANTED = [
    Planted("summed-each-iteration", sums_in_the_loop, sums_after_the_loop),
    Planted("summed-each-iteration", sums_written_in_the_loop, layers_that_sum),
    Planted("summed-each-iteration", stacked_sums_in_the_loop, stacked_sums_of_one_batch),
    Planted("summed-separately", sums_of_each_batch, sums_that_are_also_read),
    Planted("gathered-each-iteration", gathers_in_the_loop, gathers_each_layer),
    Planted("full-rematerialization", reshards_in_one_go, reshards_in_two),
    Planted("replicated-leaf", holds_copies, holds_parts, 2**17),
    Planted("unplaced-leaf", unplaced, placed_by_the_jit),
    Planted("float32-traffic", gathers_wide, gathers_narrow),
    Planted("host-transfer", prints, returns_what_it_would_print),
    Planted("host-transfer", moves_to_the_host, stays_on_the_device),
    Planted("second-compile", compiles_again, compiles_once),
]

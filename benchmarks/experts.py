"""A mixture of experts with a capacity against the dropless path, on simulated devices, and the bytes that each sends.

The same tokens, router and SwiGLU experts in all variants; top-2. "capacity E" has room for every token in every
expert, as nothing else gives the dropless numbers; "capacity 1.25" drops what a real run would drop, so it is measured
in rows of its own. "dense loop" is every expert over every token, E/2 times the arithmetic and no routing at all.
`--explain` prints the all_to_all bytes of a forward pass and of a step, by the census, and what buffers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.analysis import census

EXPERTS, TOP_K, SEQUENCE = 8, 2, 64
SIZES = {"D=64, F=128": (64, 128, 4), "D=256, F=512": (256, 512, 4)}  # width, hidden, sequences a device
Moe = Callable[..., jax.Array]


def swiglu(w: Any, x_SD: jax.Array, dot: Any) -> jax.Array:
    """silu(x W_gate) * (x W_up), then W_down."""
    return dot(jax.nn.silu(dot(x_SD, w["gate"])) * dot(x_SD, w["up"]), w["down"])


def routed(routing: sk.Capacity | sk.Dropless) -> Moe:
    """`moe` with this routing."""
    return lambda x, router, w: sk.moe(x, router, w, swiglu, "expert", top_k=TOP_K, routing=routing)[0]


def dense_loop(x_bTD: jax.Array, router_DE: jax.Array, w: Any) -> jax.Array:
    """Every expert, gathered whole, over every token of this device."""
    w = sk.all_gather(w, "expert")
    gate_bTE = jax.nn.softmax(jnp.dot(x_bTD, router_DE, precision="highest"))
    top_bTk, index_bTk = jax.lax.top_k(gate_bTE, TOP_K)
    top_bTk = top_bTk / jnp.sum(top_bTk, axis=-1, keepdims=True)
    gate_bTE = jnp.sum(top_bTk[..., None] * jax.nn.one_hot(index_bTk, EXPERTS), axis=2)
    up_bTEF = jax.nn.silu(jnp.einsum("bTD,EDF->bTEF", x_bTD, w["gate"])) * jnp.einsum("bTD,EDF->bTEF", x_bTD, w["up"])
    return jnp.einsum("bTEF,EFD,bTE->bTD", up_bTEF, w["down"], gate_bTE)


def variant(name: str, moe: Moe, mesh: Mesh, width: int, hidden: int, sequences: int) -> bench.Case:
    """A step: the gradients of router and experts, which move them a little."""
    keys = jax.random.split(jax.random.key(0), 5)
    over = NamedSharding(mesh, P("expert"))
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    w = {
        name: jax.device_put(jax.random.normal(key, (EXPERTS, *shape)) / shape[0] ** 0.5, over)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    router = jax.device_put(jax.random.normal(keys[3], (width, EXPERTS)), NamedSharding(mesh, P()))
    x = jax.device_put(jax.random.normal(keys[4], (sequences * mesh.size, SEQUENCE, width)), over)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return sk.all_reduce(jnp.sum(moe(x, *params) ** 2), "expert")

    specs = (P(), P("expert"))
    on_mesh = jax.shard_map(loss, mesh=mesh, in_specs=(specs, P("expert")), out_specs=P())

    def step(params: Any, x: jax.Array) -> tuple[Any, None]:
        grads = jax.grad(on_mesh)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads), None

    return bench.Case(name, step, (router, w), (x,))


def explain(each: bench.Case) -> str:
    """The all_to_alls of a step, forward and backward."""
    rows = census(each.step, each.carry, *each.args).select(kind="all_to_all")
    return f"{each.name}: {len(rows)} all_to_alls, {float(sum(r.total for r in rows)) / 2**20:,.2f} MiB sent a device"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs two rows for each size: variants that drop nothing, and the capacity of a real run against dropless."""
    options = start(__doc__, argv, devices=8, explain="count all_to_alls and bytes instead of timing")
    mesh = sk.make_mesh(expert=-1)
    for label, (width, hidden, sequences) in list(SIZES.items())[: 1 if options.smoke else None]:
        make = lambda name, moe, w=width, h=hidden, s=sequences: variant(name, moe, mesh, w, h, s)  # noqa: E731
        exact = [
            make("capacity E", routed(sk.Capacity(EXPERTS))),
            make("dropless", routed(sk.Dropless())),
            make("dense loop", dense_loop),
        ]
        tight = [make("capacity 1.25", routed(sk.Capacity(1.25))), make("capacity 2", routed(sk.Capacity(2.0)))]
        calls, rounds = options.calls or (2 if options.smoke else 5), options.rounds or (2 if options.smoke else 10)
        row = f"{label}, expert={mesh.size}"
        if options.explain:
            print("\n".join(["", row, *map(explain, exact + tight)]), flush=True)
            continue
        records = bench.measure("experts", row, exact, calls=calls, rounds=rounds, tolerance=1e-4)
        # what is dropped differs, and so do the numbers
        records += bench.measure("experts", f"{row}, drops", tight, calls=calls, rounds=rounds, tolerance=float("inf"))
        bench.report(records, options.json)


if __name__ == "__main__":
    main()

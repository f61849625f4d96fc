"""What each ZeRO stage holds, measured by the TPU's own compiler: bytes a parameter on one of eight v5e chips.

    python -m benchmarks.zero_memory

A stack of 16 feed-forward layers, 268 million parameters, Adam, bfloat16 compute and reductions (`--reduce float32`
sums in float32), layers recomputed in the backward pass. DP, ZeRO-1 and ZeRO-2 hold bfloat16 parameters on every device
and a float32 master copy with the optimizer state; ZeRO-3 holds the master copy alone, in parts, and gathers in
bfloat16. Theory, in bytes a parameter over n devices: 14, 2 + 12/n, 2 + 12/n, 12/n (Rajbhandari et al., ZeRO, SC 2020,
without the gradients, which do not outlive the step).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardkit as sk

LAYERS, WIDTH, HIDDEN, TOKENS = 16, 2048, 4096, 512
WITH_MASTER = sk.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32)
IN_PARTS = sk.Precision(compute=jnp.bfloat16)
ROWS: dict[str, tuple[sk.Plan, sk.Precision, float]] = {
    "DP": (sk.dp("d"), WITH_MASTER, 14.0),
    "ZeRO-1": (sk.zero1("d"), WITH_MASTER, 2 + 12 / 8),
    "ZeRO-2": (sk.zero2("d", layerwise=("layers",)), WITH_MASTER, 2 + 12 / 8),
    "ZeRO-3": (sk.fsdp("d", layerwise=("layers",)), IN_PARTS, 12 / 8),
}


def loss_fn(params: Any, batch: Any, keys: Any) -> sk.Mean:
    """A stack of residual feed-forward layers."""

    def layer(x_bTD: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h_bTF = jax.nn.gelu(jnp.einsum("bTD,DF->bTF", x_bTD, w["up"]))
        return x_bTD + jnp.einsum("bTF,FD->bTD", h_bTF, w["down"]), None

    once = sk.gathered(layer)
    recomputed = jax.checkpoint(once, policy=jax.checkpoint_policies.nothing_saveable)
    x_bTD, _ = jax.lax.scan(recomputed, batch, params["layers"])
    return sk.Mean.of(x_bTD.astype(jnp.float32) ** 2)


def report(name: str, accumulate: int = 1, reduce: str = "bfloat16") -> tuple[Any, int]:
    """The compiled step of a row, and its number of parameters."""
    plan, precision, _ = ROWS[name]
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {"layers": {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}}
    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn),
        optax.adam(1e-4),
        mesh=sk.abstract_mesh(d=8),
        plan=plan,
        precision=precision._replace(reduce=jnp.dtype(reduce)),
        accumulate=accumulate,
    )
    state = init.abstract(params)
    batch = jax.ShapeDtypeStruct((8 * accumulate, TOKENS, WIDTH), jnp.bfloat16)
    return sk.aot.compile(step, (state, batch), topology="v5e:2x4"), sum(x.size for x in jax.tree.leaves(params))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--reduce", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", help="where to append records")
    options = parser.parse_args(argv)
    print("|  | held (theory) | temp | gathered and reduced, synchronous | exposed | compiled in |")
    print("|---|---|---|---|---|---|")
    for name in [options.only] if options.only else ROWS:
        made, parameters = report(name, options.accumulate, options.reduce)
        held = made.memory.held - options.accumulate * TOKENS * WIDTH * 2
        alone = sum(r.total for r in made.rows if not r.asynchronous)
        wire = f"{float(alone) / 2**20:,.0f} of {float(made.sent()) / 2**20:,.0f} MiB"
        print(
            f"| {name} | {held / parameters:.3f} ({ROWS[name][2]:g}) | {made.memory.temp / parameters:.3f} | {wire} "
            f"| {1e3 * made.exposed_seconds:.2f} ms | {made.compile_seconds:.0f} s |",
            flush=True,
        )
        if options.json:
            with open(options.json, "a") as out:
                record = {"benchmark": "zero_memory", "row": name, "parameters": parameters}
                out.write(json.dumps(record | {"report": json.loads(made.to_json())}) + "\n")


if __name__ == "__main__":
    main()

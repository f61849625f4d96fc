"""Large transformers, compiled for chips that are not there: memory, collectives and overlap of an FSDP x TP step.

    python -m benchmarks.large_model --model 70b --topology v5p:8x8x8 --fsdp 64 --tp 8

The step is written with the kernels: weights gathered over "fsdp" layer by layer in bfloat16 from a float32 master,
Megatron's tensor parallelism over "model" with activations split over tokens between the blocks, vocabulary-parallel
embedding and loss, every layer recomputed in the backward pass, Adam. Only shapes are made.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

import shardkit as sk
from shardkit.models import blocks, transformer
from shardkit.models.transformer import Config, rms_norm
from shardkit.plans.plan import strategy
from shardkit.plans.splits import Leaf, Split

MODELS = {
    "tiny": Config(vocabulary=512, layers=2, dim=256, heads=4, kv_heads=2, hidden=512),
    "1.5b": Config(vocabulary=32_768, layers=28, dim=2048, heads=16, kv_heads=8, hidden=5632),
    "8b": Config(vocabulary=128_256, layers=32, dim=4096, heads=32, kv_heads=8, hidden=14_336),
    "70b": Config(vocabulary=128_256, layers=80, dim=8192, heads=64, kv_heads=8, hidden=28_672),
}
# The dim of each leaf that tensor parallelism splits, and the dim that FSDP does; norm gains are too small to split.
SPLIT: dict[str, tuple[int | None, int | None]] = {
    "embed": (0, 1),
    "head": (1, 0),
    "final_norm": (None, None),
    "query": (2, 1),
    "key": (2, 1),
    "value": (2, 1),
    "attention_out": (1, 3),
    "gate": (2, 1),
    "up": (2, 1),
    "down": (1, 2),
    "attention_norm": (None, None),
    "mlp_norm": (None, None),
}


def plan() -> sk.Plan:
    """FSDP layer by layer and tensor parallelism: every leaf sharded at rest, as seen, and for the update."""

    def place(which: int) -> Callable[[Leaf], Split | None]:
        def of(leaf: Leaf) -> Split | None:
            dim = SPLIT[leaf.path.rpartition(".")[2]][which]
            return None if dim is None else Split(dim)

        return of

    return sk.chain(
        strategy("tensor", "model", rank=0, place=place(0)),
        strategy("layerwise fsdp", "fsdp", rank=1, batch_dim=0, place=place(1)),
    )


def loss_fn(config: Config, tp: int) -> Callable[[Any, Any, Any], sk.Mean]:
    """The transformer's loss on one device; T is whole, t this device's part of the tokens, V and v likewise."""
    local = replace(config, heads=config.heads // tp, kv_heads=config.groups // tp)

    def whole(name: str, shard: jax.Array, of_layer: bool = False) -> jax.Array:
        """A weight of which tensor parallelism's part is left, gathered over FSDP."""
        dim = SPLIT[name][1]
        return shard if dim is None else sk.all_gather(shard, "fsdp", dim=dim - of_layer)

    def layer(x_btD: jax.Array, shards: Any) -> tuple[jax.Array, None]:
        w = {name: whole(name, shard, of_layer=True) for name, shard in shards.items()}
        h_bTD = sk.all_gather(rms_norm(x_btD, w["attention_norm"]), "model", dim=1)
        x_btD = x_btD + sk.reduce_scatter(blocks.attention(w, h_bTD, local), "model", dim=1)
        h_bTD = sk.all_gather(rms_norm(x_btD, w["mlp_norm"]), "model", dim=1)
        return x_btD + sk.reduce_scatter(blocks.mlp(w, h_bTD), "model", dim=1), None

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        # Norm gains are the same on all of "model" but act on its own tokens: cast once, they are summed once a step.
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: sk.vary(x, "model") if SPLIT[path[-1].key][0] is None else x, params
        )
        table_vD = whole("embed", params["embed"])
        first = sk.axis_index("model") * table_vD.shape[0]
        x_bTD = _rows(table_vD, batch["tokens"] - first)
        x_btD = sk.reduce_scatter(x_bTD, "model", dim=1)
        x_btD, _ = jax.lax.scan(jax.checkpoint(layer), x_btD, params["layers"])
        h_bTD = sk.all_gather(rms_norm(x_btD, params["final_norm"]), "model", dim=1)
        logits_bTv = jnp.einsum("bTD,Dv->bTv", h_bTD, whole("head", params["head"])).astype(jnp.float32)
        top_bT = sk.all_reduce(jax.lax.stop_gradient(logits_bTv.max(-1)), "model", op="max")
        total_bT = sk.all_reduce(jnp.exp(logits_bTv - top_bT[..., None]).sum(-1), "model")
        right_bT = sk.all_reduce(_at(logits_bTv, batch["targets"] - first), "model")
        return sk.Mean.of(jnp.log(total_bT) + top_bT - right_bT, None)

    return loss


def _rows(table_vD: jax.Array, index_bT: jax.Array) -> jax.Array:
    """Rows of this device's part of a table; zeros for those that stand elsewhere."""
    here_bT = (index_bT >= 0) & (index_bT < table_vD.shape[0])
    return jnp.where(here_bT[..., None], table_vD[jnp.where(here_bT, index_bT, 0)], 0)


def _at(x_bTv: jax.Array, index_bT: jax.Array) -> jax.Array:
    """One entry of each row of this device's part; zero where it stands elsewhere."""
    here_bT = (index_bT >= 0) & (index_bT < x_bTv.shape[-1])
    found_bT = jnp.take_along_axis(x_bTv, jnp.where(here_bT, index_bT, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(here_bT, found_bT, 0)


def make(config: Config, mesh: Mesh | AbstractMesh, precision: str = "bf16") -> sk.TrainStep:
    """The train step of a model on a mesh with the axes "fsdp" and "model"."""
    grad_fn = sk.value_and_grad(loss_fn(config, mesh.shape["model"]))
    return sk.make_train_step(grad_fn, optax.adam(1e-4), mesh=mesh, plan=plan(), precision=precision)


def abstract(config: Config, *, fsdp: int, tp: int, batch: int, tokens: int) -> tuple[Any, tuple[Any, Any]]:
    """A step over a mesh without devices, and the shapes of its arguments. `batch` is that of one FSDP shard."""
    mesh = sk.abstract_mesh(fsdp=fsdp, model=tp)
    init, step = make(config, mesh)
    state = init.abstract(lambda key: transformer.init(key, config))
    data = jax.ShapeDtypeStruct((batch * fsdp, tokens), jnp.int32)
    return step, (state, {"tokens": data, "targets": data})


def main() -> None:
    """Compiles one model and prints the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="1.5b")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="examples on one FSDP shard")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", help="where to write the report")
    args = parser.parse_args()
    config = MODELS[args.model]
    started = time.monotonic()
    step, shapes = abstract(config, fsdp=args.fsdp, tp=args.tp, batch=args.batch, tokens=args.tokens)
    report = sk.aot.compile(step, shapes, topology=args.topology)
    seconds = time.monotonic() - started
    parameters = sum(x.size for x in jax.tree.leaves(shapes[0].params))
    print(f"{args.model}: {parameters / 1e9:.2f}B parameters, {args.batch * args.fsdp} x {args.tokens} tokens a step")
    print(report)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = f"{own / 2**30:.2f} GiB, the compiler's {report.compiler_rss / 2**30:.2f}"
    print(f"in all {seconds:.1f} s; this process held {held}")
    if args.json:
        with open(args.json, "w") as file:
            file.write(report.to_json())


if __name__ == "__main__":
    sys.exit(main())

"""Large transformers, compiled for chips that are not there: memory, collectives and overlap of an FSDP x TP step.

    python -m benchmarks.large_model --model 70b --topology v5p:8x8x8 --fsdp 64 --tp 8

The step is written with the kernels: weights gathered over "fsdp" layer by layer in bfloat16 from a float32 master,
Megatron's tensor parallelism over "model" with activations split over tokens between the blocks, vocabulary-parallel
embedding and loss, every layer recomputed in the backward pass, Adam. Only shapes are made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

import shardkit as sk
from benchmarks.processes import read_peak_resident_bytes
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


class Dims(NamedTuple):
    """The dims of a leaf that are split, a stack's layers counted; None: not at all."""

    tensor: int | None
    fsdp: int | None


DIMS = {
    "embed": Dims(tensor=0, fsdp=1),
    "head": Dims(tensor=1, fsdp=0),
    "query": Dims(tensor=2, fsdp=1),
    "key": Dims(tensor=2, fsdp=1),
    "value": Dims(tensor=2, fsdp=1),
    "attention_out": Dims(tensor=1, fsdp=3),
    "gate": Dims(tensor=2, fsdp=1),
    "up": Dims(tensor=2, fsdp=1),
    "down": Dims(tensor=1, fsdp=2),
    # Norm gains are too small to split.
    "attention_norm": Dims(None, None),
    "mlp_norm": Dims(None, None),
    "final_norm": Dims(None, None),
}


def make_plan() -> sk.Plan:
    """FSDP layer by layer and tensor parallelism: every leaf sharded at rest, as seen, and for the update."""

    def get_dims(leaf: Leaf) -> Dims:
        name = leaf.path.rpartition(".")[2]
        return DIMS[name]

    def split_for_tensor(leaf: Leaf) -> Split | None:
        dim = get_dims(leaf).tensor
        if dim is None:
            return None
        return Split(dim)

    def split_for_fsdp(leaf: Leaf) -> Split | None:
        dim = get_dims(leaf).fsdp
        if dim is None:
            return None
        return Split(dim)

    return sk.chain(
        strategy("tensor", "model", rank=0, place=split_for_tensor),
        strategy("layerwise fsdp", "fsdp", rank=1, batch_dim=0, place=split_for_fsdp),
    )


def loss_fn(config: Config, tp: int) -> Callable[[Any, Any, Any], sk.Mean]:
    """The transformer's loss on one device; T is whole, t this device's part of the tokens, V and v likewise."""
    # Heads are split over "model": each device computes attention with its own.
    local = replace(config, heads=config.heads // tp, kv_heads=config.groups // tp)

    def gather_weight(name: str, shard: jax.Array, leading_dims: int = 0) -> jax.Array:
        """Gathers a weight over FSDP; the part of tensor parallelism is left. In a scan it has no dim of layers."""
        dim = DIMS[name].fsdp
        if dim is None:
            return shard
        return sk.all_gather(shard, "fsdp", dim=dim - leading_dims)

    def apply_layer(x_btD: jax.Array, shards: Any) -> tuple[jax.Array, None]:
        w = {}
        for name, shard in shards.items():
            w[name] = gather_weight(name, shard, leading_dims=1)
        # Megatron with split tokens: each block gathers the tokens, and scatters its partial sums over them again.
        h_bTD = sk.all_gather(rms_norm(x_btD, w["attention_norm"]), "model", dim=1)
        x_btD = x_btD + sk.reduce_scatter(blocks.attention(w, h_bTD, local), "model", dim=1)
        h_bTD = sk.all_gather(rms_norm(x_btD, w["mlp_norm"]), "model", dim=1)
        return x_btD + sk.reduce_scatter(blocks.mlp(w, h_bTD), "model", dim=1), None

    def cast_gain(path: Any, x: jax.Array) -> jax.Array:
        # Norm gains are the same on all of "model", but act on this device's tokens: their gradients are partial sums.
        # Cast here, they are summed once in a step; cast where they are used, once in every layer.
        if DIMS[path[-1].key].tensor is None:
            return sk.vary(x, "model")
        return x

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        params = jax.tree_util.tree_map_with_path(cast_gain, params)
        table_vD = gather_weight("embed", params["embed"])
        first = sk.axis_index("model") * table_vD.shape[0]
        x_bTD = _look_up_rows(table_vD, batch["tokens"] - first)
        # Each word stands on one device: the others add zeros, and keep their part of the tokens.
        x_btD = sk.reduce_scatter(x_bTD, "model", dim=1)
        x_btD, _ = jax.lax.scan(jax.checkpoint(apply_layer), x_btD, params["layers"])
        h_bTD = sk.all_gather(rms_norm(x_btD, params["final_norm"]), "model", dim=1)
        head_Dv = gather_weight("head", params["head"])
        logits_bTv = jnp.einsum("bTD,Dv->bTv", h_bTD, head_Dv).astype(jnp.float32)
        # A device has the logits of its words alone: maximum, sum and the target's are over "model". No device ever has
        # all logits, which at 128,256 words would be the largest array of the step.
        top_bT = sk.all_reduce(jax.lax.stop_gradient(logits_bTv.max(-1)), "model", op="max")
        total_bT = sk.all_reduce(jnp.exp(logits_bTv - top_bT[..., None]).sum(-1), "model")
        target_bT = sk.all_reduce(_look_up_entries(logits_bTv, batch["targets"] - first), "model")
        return sk.Mean.of(jnp.log(total_bT) + top_bT - target_bT, None)

    return loss


def _look_up_rows(table_vD: jax.Array, index_bT: jax.Array) -> jax.Array:
    """Rows of this device's part of a table; zeros for those that stand elsewhere."""
    here_bT = (index_bT >= 0) & (index_bT < table_vD.shape[0])
    rows_bTD = table_vD[jnp.where(here_bT, index_bT, 0)]
    return jnp.where(here_bT[..., None], rows_bTD, 0)


def _look_up_entries(x_bTv: jax.Array, index_bT: jax.Array) -> jax.Array:
    """One entry of each row of this device's part; zero where it stands elsewhere."""
    here_bT = (index_bT >= 0) & (index_bT < x_bTv.shape[-1])
    local_index_bT = jnp.where(here_bT, index_bT, 0)
    entries_bT = jnp.take_along_axis(x_bTv, local_index_bT[..., None], axis=-1)[..., 0]
    return jnp.where(here_bT, entries_bT, 0)


def make_step(config: Config, mesh: Mesh | AbstractMesh, precision: str = "bf16") -> sk.TrainStep:
    """The train step of a model on a mesh with the axes "fsdp" and "model"."""
    grad_fn = sk.value_and_grad(loss_fn(config, mesh.shape["model"]))
    return sk.make_train_step(grad_fn, optax.adam(1e-4), mesh=mesh, plan=make_plan(), precision=precision)


def describe_step(config: Config, *, fsdp: int, tp: int, batch: int, tokens: int) -> tuple[Any, tuple[Any, Any]]:
    """A step over a mesh without devices, and the shapes of its arguments. `batch` is that of one FSDP shard."""
    mesh = sk.abstract_mesh(fsdp=fsdp, model=tp)
    init, step = make_step(config, mesh)
    state = init.abstract(lambda key: transformer.init(key, config))
    shape = jax.ShapeDtypeStruct((batch * fsdp, tokens), jnp.int32)
    return step, (state, {"tokens": shape, "targets": shape})


def main() -> None:
    """Compiles one model and prints the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="1.5b")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="examples on one FSDP shard")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="where to write the report")
    options = parser.parse_args()
    config = MODELS[options.model]
    start = time.monotonic()
    step, args = describe_step(config, fsdp=options.fsdp, tp=options.tp, batch=options.batch, tokens=options.tokens)
    report = sk.aot.compile(step, args, topology=options.topology)
    seconds = time.monotonic() - start
    state, _ = args
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    examples = options.batch * options.fsdp
    print(f"{options.model}: {parameters / 1e9:.2f}B parameters, {examples} x {options.tokens} tokens a step")
    print(report)
    # The compiler runs in a process of its own.
    peak = read_peak_resident_bytes() / 2**30
    compiler_peak = report.compiler_rss / 2**30
    print(f"in all {seconds:.1f} s; this process held {peak:.2f} GiB, the compiler's {compiler_peak:.2f}")
    if options.json:
        options.json.write_text(report.to_json())


if __name__ == "__main__":
    main()

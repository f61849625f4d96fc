"""A checkpoint in Hugging Face's layout of Llama: read, evaluated, trained on and given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import shardkit as sk
from shardkit.models import transformer
from shardkit.runtime import llama_names, load_params, save_params
from support.pipelines import pipelined_grad
from support.refusals import value_error

CONFIG = transformer.Config(
    vocabulary=16, layers=4, dim=16, heads=4, kv_heads=2, hidden=24, norm_epsilon=1e-2, rope_theta=500.0
)
INDEX = "model.safetensors.index.json"


def checkpoint(directory: Path) -> dict[str, np.ndarray]:
    """A Llama of CONFIG's sizes, in three files with an index, as transformers saves it."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * 0.2  # noqa: E731
    tensors = {"model.embed_tokens.weight": draw(16, 16), "model.norm.weight": 1 + draw(16)}
    for i in range(CONFIG.layers):
        of = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
        of |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16)}
        of |= {"mlp.down_proj": (16, 24), "input_layernorm": (16,), "post_attention_layernorm": (16,)}
        tensors |= {f"model.layers.{i}.{name}.weight": draw(*shape) for name, shape in of.items()}
    tensors["lm_head.weight"] = draw(16, 16)
    names, weight_map = [*tensors], {}
    directory.mkdir()
    for part in range(3):
        file = f"model-{part + 1:05d}-of-00003.safetensors"
        share = names[part::3]
        save_file({name: tensors[name] for name in share}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(share, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def llama_loss(w: dict[str, Any], tokens_bT: Any, targets_bT: Any) -> jax.Array:
    """The mean cross-entropy, written after modeling_llama.py of transformers, with its names and layouts."""
    K = CONFIG.head_size

    def norm(x: Any, gain: Any) -> Any:
        return gain * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-2)

    def rotated(x_bhtk: Any) -> Any:  # rotate_half
        rates = 1 / 500 ** (jnp.arange(0, K, 2) / K)
        angles = jnp.concatenate([jnp.outer(jnp.arange(x_bhtk.shape[2]), rates)] * 2, -1)
        half = jnp.concatenate([-x_bhtk[..., K // 2 :], x_bhtk[..., : K // 2]], -1)
        return x_bhtk * jnp.cos(angles) + half * jnp.sin(angles)

    x = w["model.embed_tokens.weight"][tokens_bT]
    b, T, D = x.shape
    for i in range(CONFIG.layers):
        of = lambda name, i=i: w[f"model.layers.{i}.{name}.weight"]  # noqa: E731
        h = norm(x, of("input_layernorm"))
        q, k, v = ((h @ of(f"self_attn.{n}_proj").T).reshape(b, T, -1, K).swapaxes(1, 2) for n in "qkv")
        k, v = (jnp.repeat(each, CONFIG.heads // CONFIG.groups, axis=1) for each in (k, v))  # repeat_kv
        scores = rotated(q) @ rotated(k).swapaxes(2, 3) / np.sqrt(K)
        scores = jnp.where(np.tril(np.ones((T, T), bool)), scores, -jnp.inf)
        y = (jax.nn.softmax(scores, -1) @ v).swapaxes(1, 2).reshape(b, T, D)
        x = x + y @ of("self_attn.o_proj").T
        h = norm(x, of("post_attention_layernorm"))
        x = x + (jax.nn.silu(h @ of("mlp.gate_proj").T) * (h @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    logits = norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets_bT[..., None], -1))


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a directory, each from the file in which the index has it."""
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    read = {file: load_file(directory / file) for file in {*weight_map.values()}}
    assert sorted(weight_map) == sorted(name for each in read.values() for name in each)
    return {name: read[file][name] for name, file in weight_map.items()}


# A q_proj that is only reshaped, or heads in another order, would come back with the right bits and a wrong loss.
def test_a_llama_is_trained_on_and_comes_back(tmp_path):
    wanted = checkpoint(tmp_path / "llama")
    mesh = sk.make_mesh(fsdp=4, model=2)
    rules = transformer.tensor_rules(CONFIG, "model", 2)
    plan = sk.chain(sk.fsdp("fsdp", min_size=1, layerwise=("layers",)), sk.tp("model", rules))
    grad_fn = sk.value_and_grad(transformer.loss_fn(CONFIG, transformer.Axes(model="model")))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.5), mesh=mesh, plan=plan)
    like = init.abstract(lambda key: transformer.init(key, CONFIG)).params
    params = load_params(tmp_path / "llama", like, names=llama_names(CONFIG))

    save_params(tmp_path / "same", params, names=llama_names(CONFIG))
    found = tensors_of(tmp_path / "same")
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert (x.dtype, x.shape, x.tobytes()) == (found[name].dtype, found[name].shape, found[name].tobytes()), name

    tokens = np.random.default_rng(1).integers(0, 16, (8, 9)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    state, metrics = step(init(params, jax.random.key(0)), batch)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        loss, grads = jax.jit(jax.value_and_grad(llama_loss))(wanted, batch["tokens"], batch["targets"])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    save_params(tmp_path / "after", state.params, names=llama_names(CONFIG))
    for name, x in tensors_of(tmp_path / "after").items():
        np.testing.assert_allclose(x, wanted[name] - 0.5 * grads[name], atol=1e-5, err_msg=name)


def test_a_pipeline_takes_a_llama_with_a_tied_head(tmp_path):
    """Its layers are stored stage by stage, two chunks a device."""
    tensors = checkpoint(tmp_path / "llama")
    config = transformer.Config(**{**vars(CONFIG), "tied": True})
    pieces, schedule = transformer.pieces(config), sk.schedules.lockstep(2, 4, 2)
    grad_fn = pipelined_grad(*pieces, schedule, "stage", layer_numbers=True)
    init, _ = sk.make_train_step(
        grad_fn, optax.sgd(0.5), mesh=sk.make_mesh(jax.devices()[:2], stage=2), plan=sk.pp("stage")
    )
    like = init.abstract(lambda key: transformer.init(key, config)).params
    params = load_params(tmp_path / "llama", like, names=llama_names(config), partial=True)
    assert params["layers"]["up"].rows == (0, 2, 1, 3)
    save_params(tmp_path / "out.safetensors", params, names=llama_names(config))
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tensors.keys() - {"lm_head.weight"}
    assert all(x.tobytes() == tensors[name].tobytes() for name, x in found.items())


@pytest.mark.check
def test_a_llama_has_no_experts():
    with value_error("llama_names: a Llama has no experts; got experts=2. Pass names of your own, of StoredAs."):
        llama_names(transformer.Config(experts=2))

"""One description of a model: against published totals, our own transformer, and whatever a file may hold."""

import json
import math
import os

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit import cost, planner
from shardkit.models import transformer
from shardkit.planner import Layout, Model
from support.refusals import refused, type_error, value_error

pytestmark = pytest.mark.check

NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_layer_freq": 1}
EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")
EXPERTS += ("first_k_dense_replace", "q_lora_rank")


def entries(kind, vocabulary, *sizes, **more):
    return {"model_type": kind, "vocab_size": vocabulary} | dict(zip(NAMES, sizes, strict=True)) | more


def experts(*sizes):
    return dict(zip(EXPERTS, sizes, strict=False))


LLAMA = entries("llama", 128256, 32, 4096, 14336, 32, 8)
MIXTRAL = entries("mixtral", 32000, 32, 4096, 14336, 32, 8, num_local_experts=8, num_experts_per_tok=2)
QWEN_MOE = experts(8, 768) | {"num_experts": 128, "mlp_only_layers": [], "head_dim": 128}
V2_LITE, V3 = LATENT | experts(6, 1408, 64, 2, 1, None), LATENT | experts(8, 2048, 256, 1, 3, 1536)
V3 = entries("deepseek_v3", 129280, 61, 7168, 18432, 128, 128, **V3)
# What the checkpoints hold.
PUBLISHED = [
    (6738415616, entries("llama", 32000, 32, 4096, 11008, 32, None)),  # Llama 2 7B
    (8030261248, LLAMA),  # Llama 3.1 8B
    (70553706496, entries("llama", 128256, 80, 8192, 28672, 64, 8)),
    (1235814400, entries("llama", 128256, 16, 2048, 8192, 32, 8, tie_word_embeddings=True, head_dim=64)),
    (7615616512, entries("qwen2", 152064, 28, 3584, 18944, 28, 4)),  # Qwen2.5 7B
    (8190735360, entries("qwen3", 151936, 36, 4096, 12288, 32, 8, head_dim=128)),
    (30532122624, entries("qwen3_moe", 151936, 48, 2048, 6144, 32, 4, **QWEN_MOE)),
    (46702792704, MIXTRAL),  # 8x7B
    (9241705984, entries("gemma2", 256000, 42, 3584, 14336, 16, 8, head_dim=256)),
    (999885952, entries("gemma3_text", 262144, 26, 1152, 6912, 4, 1, head_dim=256)),
    (15706484224, entries("deepseek_v2", 102400, 27, 2048, 10944, 16, 16, **V2_LITE)),
    (671026404352, V3),
]
REMEDY = "Pass the config.json of a model, or planner.Model(...)."
VALUES = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=3) | st.just([])
SOME = st.sampled_from([config for _, config in PUBLISHED])


@pytest.mark.parametrize(("parameters", "config"), PUBLISHED, ids=lambda each: str(each)[:40])
def test_parameters_are_those_of_the_checkpoint(parameters, config):
    assert Model.of(config).parameters() == parameters


def test_experts_and_layers_that_differ():
    mixtral, v3 = Model.of(MIXTRAL), Model.of(V3)
    assert mixtral == Model(32, 4096, 32, 32000, 8, 14336, experts=8)
    assert mixtral.layer()[1] == 8 * 3 * 4096 * 14336 and mixtral.active() == 12_879_925_248
    # the checkpoint has a layer more, which predicts a further token, its three norms, a matrix, and both embeddings
    assert v3.active() == 37_552_282_624 and v3.layer(0)[1] == v3.layer(2)[1] == 0 < v3.layer(3)[1]
    further = sum(v3.layer()) + 3 * 7168 + 2 * 7168**2 + 2 * 129280 * 7168
    assert v3.parameters() + further == 684_489_830_400
    # of a token's matmuls all active weights but the embedding and the norms; 128 heads of 192 and 128 are compared
    used = v3.active() - 129280 * 7168 - 61 * (2 * 7168 + 1536 + 512) - 7168
    assert v3.flops(0) == 2 * used and v3.flops(4096) - v3.flops(0) == 61 * 2 * 4096 * 128 * (192 + 128)


@given(data=st.data(), heads=st.sampled_from([1, 2, 4]), gated=st.booleans(), tied=st.booleans())
def test_the_old_sizes_count_as_cost_does(data, heads, gated, tied):
    size = st.integers(1, 64)
    sizes = {
        "layers": data.draw(size),
        "hidden": heads * data.draw(size),
        "heads": heads,
        "vocabulary": data.draw(size),
    }
    sizes |= {"kv_heads": data.draw(st.sampled_from([None, 1, heads])), "ffn": data.draw(st.none() | size)}
    model, sequence = Model(**sizes, gated=gated, tied=tied), data.draw(size)
    found = cost.transformer_parameters(**sizes, gated=gated, tied=tied, biases=False, final_norm=True)
    assert model.parameters() == model.active() == found
    flops = cost.transformer_flops(**sizes, gated=gated, sequence=sequence, batch=2)
    assert 3 * 2 * sequence * model.flops(sequence) == flops


@pytest.mark.parametrize("experts", [0, 4])
def test_our_own_configuration_there_and_back(experts):
    config = transformer.Config(layers=3, dim=48, heads=6, kv_heads=2, hidden=96, tied=experts > 0, experts=experts)
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    model = Model.of(config)
    assert model.parameters() == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    found = planner.estimate(model, Layout(), chip="v5e", batch=1, sequence=8)
    assert found.config() == config
    other = found._replace(model=Model.of(V3))
    assert refused(other.config).endswith(
        "got a Model with head_size=160, expert_ffn=2048, shared=1, dense=3, attention=187105280, extra=2048. Pass "
        "plan(rules) of your own model to make_train_step."
    )


@settings(max_examples=300)
@given(config=SOME, changes=st.dictionaries(st.sampled_from([*V3, *QWEN_MOE, "tie_word_embeddings"]), VALUES))
def test_any_json_is_a_model_or_a_sentence(config, changes, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    for each in (changes, config | changes):
        path.write_text(json.dumps(each))
        try:
            assert Model.of(path).parameters() >= Model.of(each).active() > 0
        except ValueError as error:
            assert str(error).startswith("Model.of: ") and str(error).endswith(REMEDY)


WHOLE = "must be a whole number from 1 to 2,147,483,647; got"
WRONG = {
    f"num_experts_per_tok {WHOLE} None.": V3 | {"num_experts_per_tok": None},
    f"hidden_size {WHOLE} 4096.0.": LLAMA | {"hidden_size": 4096.0},
    "num_attention_heads must divide hidden_size; got 32 and 4095.": LLAMA | {"hidden_size": 4095},
    "num_experts_per_tok must be at most num_local_experts; got 9 and 8.": (MIXTRAL | {"num_experts_per_tok": 9}),
    "tie_word_embeddings must be true or false; got 'no'.": LLAMA | {"tie_word_embeddings": "no"},
    "moe_layer_freq must be 1; got 2.": V3 | {"moe_layer_freq": 2},
}


@pytest.mark.parametrize(("message", "config"), WRONG.items())
def test_a_config_that_does_not_add_up_is_refused_by_its_entry(message, config):
    with value_error(f"Model.of: {message} {REMEDY}"):
        Model.of(config)


def test_a_file_that_is_no_config_is_refused(tmp_path):
    assert refused(lambda: Model.of({"model_type": "bert"})).endswith(f"; got 'bert'. {REMEDY}")
    large, link, pipe, deep = (tmp_path / name for name in ("large", "link", "pipe", "deep"))
    large.write_text(json.dumps(LLAMA) + " " * 2**20)
    link.symlink_to(large)
    os.mkfifo(pipe)
    deep.write_text("[" * 100_000)
    for path in (large, link, pipe, deep, tmp_path, tmp_path / "none", "a\0b"):
        message = refused(lambda path=path: Model.of(path))
        rule = f"Model.of: a config.json must be a file of at most 1 MB with one JSON object; got {path}"
        assert message.startswith(rule) and message.endswith(REMEDY), message
    with type_error("Model.of: source must be a path, a mapping or a Config; got 7. Pass a string or a pathlib.Path."):
        Model.of(7)
    with value_error(
        "planner: dense must be at most layers, and top_k at most experts; got 0 of 1 and 3 of 2. Lower it."
    ):
        Model(1, 8, 2, 8, experts=2, top_k=3).layer()

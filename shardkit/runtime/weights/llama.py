"""What the leaves of the reference transformer are called in Hugging Face's Llama checkpoints."""

from __future__ import annotations

from shardkit._typed import typed
from shardkit.models.transformer import Config
from shardkit.runtime.weights.names import StoredAs

_LAYER = "model.layers.{}."


@typed
def llama_names(config: Config) -> dict[str, StoredAs]:
    """Names for `load_params` and `save_params`: Hugging Face's of Llama for the parameters of `models.transformer`.

    The two are the same function if `config.norm_epsilon` is the checkpoint's rms_norm_eps and `config.rope_theta` its
    rope_theta, and it has no rope_scaling and no biases.

    Args:
        config: the sizes; no experts.

    Raises:
        ValueError: a configuration with experts.

    Example:
        >>> from shardkit.models import transformer
        >>> sk.runtime.llama_names(transformer.Config())["layers.query"]
        StoredAs(name='model.layers.{}.self_attn.q_proj.weight', dims=((2, 3), 1))

    Source: https://huggingface.co/docs/transformers/model_doc/llama
    """
    if config.experts:
        raise ValueError(
            f"llama_names: a Llama has no experts; got experts={config.experts}. Pass names of your own, of StoredAs."
        )
    projection, transposed = ((2, 3), 1), (2, 1)
    names = {
        "embed": StoredAs("model.embed_tokens.weight"),
        "layers.query": StoredAs(_LAYER + "self_attn.q_proj.weight", projection),
        "layers.key": StoredAs(_LAYER + "self_attn.k_proj.weight", projection),
        "layers.value": StoredAs(_LAYER + "self_attn.v_proj.weight", projection),
        "layers.attention_out": StoredAs(_LAYER + "self_attn.o_proj.weight", (3, (1, 2))),
        "layers.gate": StoredAs(_LAYER + "mlp.gate_proj.weight", transposed),
        "layers.up": StoredAs(_LAYER + "mlp.up_proj.weight", transposed),
        "layers.down": StoredAs(_LAYER + "mlp.down_proj.weight", transposed),
        "layers.attention_norm": StoredAs(_LAYER + "input_layernorm.weight"),
        "layers.mlp_norm": StoredAs(_LAYER + "post_attention_layernorm.weight"),
        "final_norm": StoredAs("model.norm.weight"),
    }
    return names if config.tied else names | {"head": StoredAs("lm_head.weight", (1, 0))}

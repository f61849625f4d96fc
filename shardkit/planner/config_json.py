"""The sizes of a transformer, from the config.json of a Hugging Face checkpoint.

Worked example: {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, ...} has heads
of 4096 / 32 = 128, so that `head_size` is left to its default; with "head_dim": 64 it is 64.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from shardkit._arguments import checks
from shardkit._arguments.files import read_file
from shardkit._arguments.typed import short

_LARGEST = 2**31 - 1  # an entry
_LARGEST_FILE = 2**20  # bytes; a config.json has some thousands

_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3")  # keys and values of a lower rank
_GEMMA_TYPES = ("gemma", "gemma2", "gemma3_text")
_HEAD_NORM_TYPES = ("qwen3", "qwen3_moe", "gemma3_text")  # norms of queries and keys
_FOUR_NORM_TYPES = ("gemma2", "gemma3_text")  # norms behind attention and feed-forward layer
_HEAD_SIZE_TYPES = (*_GEMMA_TYPES, "qwen3", "qwen3_moe")  # heads of another size than hidden / heads by default
_EXPERTS_ENTRY = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}
# Entries that are left out, or are this.
_ONLY = {"mlp_bias": False, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": []}


class _Entries:
    """The entries of a config.json, each checked when it is read; null stands for one that is left out."""

    def __init__(self, entries: Mapping[str, Any]):
        self.entries = entries

    def has(self, name: str) -> bool:
        """Whether there is such an entry."""
        return self.entries.get(name) is not None

    def read(self, name: str, default: Any, rule: str, holds: Callable[[Any], bool]) -> Any:
        """An entry for which the rule holds."""
        value = self.entries[name] if self.has(name) else default
        if not holds(value):
            raise _make_error(f"{name} must be {rule}", short(value))
        return value

    def read_whole(self, name: str, default: int | None = None, least: int = 1) -> Any:
        """A whole number."""
        rule = f"a whole number from {least} to {_LARGEST:,}"
        # Not isinstance: true is an int in Python.
        return self.read(name, default, rule, lambda value: type(value) is int and least <= value <= _LARGEST)

    def read_flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value: bool = self.read(name, default, "true or false", lambda value: isinstance(value, bool))
        return value

    def expect(self, name: str, only: Any) -> None:
        """Refuses every value but one."""
        self.read(name, only, json.dumps(only), lambda value: value == only)


def read_sizes(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that the entries say, by the name of the field of `Model`."""
    config = _Entries(entries)
    types = (*_TYPES, *_LATENT_TYPES)
    kind = config.read("model_type", None, f"one of {checks.quote(types)}", lambda value: value in types)
    for name, only in _ONLY.items():
        config.expect(name, only)
    if kind in _LATENT_TYPES:
        config.expect("attention_bias", False)
    tied = config.read_flag("tie_word_embeddings", kind in _GEMMA_TYPES)
    has_biases = config.read_flag("attention_bias", False)
    sizes = {
        "hidden": config.read_whole("hidden_size"),
        "heads": config.read_whole("num_attention_heads"),
        "layers": config.read_whole("num_hidden_layers"),
        "tied": tied,
    }
    sizes["kv_heads"] = config.read_whole("num_key_value_heads", sizes["heads"])
    _check_fit(
        sizes["heads"] % sizes["kv_heads"] == 0,
        "num_key_value_heads must divide num_attention_heads",
        sizes["kv_heads"],
        sizes["heads"],
    )
    sizes["vocabulary"] = config.read_whole("vocab_size")
    sizes["ffn"] = config.read_whole("intermediate_size")
    if kind in _LATENT_TYPES:
        sizes |= _read_latent_attention(config, sizes)
    else:
        sizes |= _read_heads(config, sizes, kind, has_biases)
    if kind in _EXPERTS_ENTRY:
        sizes |= _read_experts(config, kind)
    return sizes


def _read_latent_attention(config: _Entries, sizes: Mapping[str, int]) -> dict[str, int]:
    """DeepSeek's attention: keys and values are products of a narrow latent array, queries may be."""
    hidden = sizes["hidden"]
    heads = sizes["heads"]
    rank = config.read_whole("kv_lora_rank")
    rotary_size = config.read_whole("qk_rope_head_dim")
    plain_size = config.read_whole("qk_nope_head_dim")
    value_size = config.read_whole("v_head_dim")
    query_rank = config.read_whole("q_lora_rank", 0, least=0)
    both_sizes = plain_size + rotary_size + value_size
    _check_fit(both_sizes % 2 == 0, "qk_nope_head_dim + qk_rope_head_dim + v_head_dim must be even", both_sizes)
    queries = heads * (plain_size + rotary_size)
    if query_rank:
        query_weights = query_rank * (hidden + queries)
    else:
        query_weights = hidden * queries
    latent_weights = hidden * (rank + rotary_size) + rank * heads * (plain_size + value_size)
    output_weights = heads * value_size * hidden
    shared = config.read_whole("n_shared_experts", 0, least=0)
    dense = config.read_whole("first_k_dense_replace", 0, least=0)
    _check_fit(
        dense <= sizes["layers"],
        "first_k_dense_replace must be at most num_hidden_layers",
        dense,
        sizes["layers"],
    )
    return {
        "head_size": both_sizes // 2,
        "attention": query_weights + latent_weights + output_weights,
        "extra": query_rank + rank,  # norms of the latent arrays
        "shared": shared,
        "dense": dense,
    }


def _read_heads(config: _Entries, sizes: Mapping[str, int], kind: str, has_biases: bool) -> dict[str, int | None]:
    """The size of a head, and the biases and norms of one layer's attention."""
    hidden = sizes["hidden"]
    heads = sizes["heads"]
    default = None
    if kind not in _HEAD_SIZE_TYPES:
        if not config.has("head_dim"):
            _check_fit(hidden % heads == 0, "num_attention_heads must divide hidden_size", heads, hidden)
        default = hidden // heads
    size = config.read_whole("head_dim", default)
    extra = 0
    if kind == "qwen2" or has_biases:
        extra += (heads + 2 * sizes["kv_heads"]) * size  # biases of queries, keys and values
    if kind in _HEAD_NORM_TYPES:
        extra += 2 * size
    # The bias of the output, which qwen2 has not.
    if has_biases:
        extra += hidden
    if kind in _FOUR_NORM_TYPES:
        extra += 2 * hidden
    # None for a size as by default, because `models.transformer` runs no other.
    return {"head_size": None if size * heads == hidden else size, "extra": extra}


def _read_experts(config: _Entries, kind: str) -> dict[str, int | None]:
    entry = _EXPERTS_ENTRY[kind]
    experts = config.read_whole(entry)
    top_k = config.read_whole("num_experts_per_tok")
    _check_fit(top_k <= experts, f"num_experts_per_tok must be at most {entry}", top_k, experts)
    width = None
    if kind != "mixtral":
        width = config.read_whole("moe_intermediate_size")
    return {"experts": experts, "top_k": top_k, "expert_ffn": width}


def _check_fit(holds: bool, rule: str, *values: int) -> None:
    if not holds:
        raise _make_error(rule, " and ".join(str(value) for value in values))


def read_entries(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The entries of a JSON file."""
    rule = "a config.json must be a file of at most 1 MB with one JSON object"
    try:
        entries = json.loads(read_file(path, _LARGEST_FILE, links=False))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no text, or a name with a zero
        raise _make_error(rule, f"{path}: {checks.describe_error(error)}") from error
    if not isinstance(entries, dict):
        raise _make_error(rule, f"{path}, which is none")
    return entries


def _make_error(rule: str, value: str) -> ValueError:
    return ValueError(f"Model.of: {rule}; got {value}. Pass the config.json of a model, or planner.Model(...).")

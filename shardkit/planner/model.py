"""The sizes of a decoder-only transformer, what follows from them, and where they are read.

`Model.of` reads a `models.transformer.Config`, or the config.json of a Hugging Face checkpoint. As in `cost`, a
multiply-add is two FLOPs, and only matmuls are counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.files import read_file
from shardkit._arguments.typed import MAPPING, PATH, check_kind, kinds_of, short
from shardkit.layers.routing import Capacity
from shardkit.models import transformer

_LARGEST = 2**31 - 1  # an entry of a config.json
_LARGEST_FILE = 2**20  # bytes; a config.json has some thousands


class Model(NamedTuple):
    """The sizes of a decoder-only transformer.

    Attributes:
        layers: number of layers.
        hidden: model width.
        heads: attention heads.
        vocabulary: number of token values.
        kv_heads: key/value heads; None: heads.
        ffn: width of the feed-forward layers; None: 4 hidden.
        gated: a third feed-forward matrix (SwiGLU).
        tied: the embedding is the output head.
        head_size: size of a head, the mean of queries' and values' if they differ; None: hidden / heads.
        experts: experts of a layer, in place of its feed-forward layer; 0: none.
        top_k: experts per token.
        capacity: places in the experts over those that balanced tokens need, as of `layers.Capacity`; None: `Dropless`,
            whose buffers on several devices have room for the worst case.
        expert_ffn: width of an expert; None: ffn.
        shared: experts beside these, which every token uses.
        dense: the first layers that have a feed-forward layer all the same.
        attention: weights of one layer's attention; None: those of queries, keys, values and output.
        extra: further parameters of one layer, such as biases, and norms beyond two.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = True
    tied: bool = False
    head_size: int | None = None
    experts: int = 0
    top_k: int = 2
    expert_ffn: int | None = None
    shared: int = 0
    dense: int = 0
    attention: int | None = None
    extra: int = 0
    capacity: float | None = 1.25

    @classmethod
    def of(cls, source: transformer.Config | Mapping[str, Any] | str | os.PathLike[str]) -> Model:
        """The sizes that a configuration says.

        Args:
            source: a `models.transformer.Config`; or a config.json of Hugging Face, as a mapping or as the path of a
                file, which must not be a link: of Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 1 to 3 (text), or
                DeepSeek-V2 and V3, whose layers that predict further tokens are left out.

        Raises:
            TypeError: a source of another kind.
            ValueError: a file that is no JSON object of at most 1 MB; another model type; an entry that is missing, of
                another type, or does not fit the others.

        Example:
            >>> entries = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
            >>> entries |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
            >>> sk.planner.Model.of({"model_type": "llama", **entries}).parameters()
            8030261248
        """
        if isinstance(source, transformer.Config):
            c = source
            if c.group is not None and c.experts:
                raise ValueError(
                    f"Model.of: experts must have their places by sequence; got group={c.group}. Leave group out."
                )
            model = cls(c.layers, c.dim, c.heads, c.vocabulary, c.kv_heads, c.width, tied=c.tied)
            return model._replace(experts=c.experts, top_k=c.top_k, capacity=c.capacity) if c.experts else model
        check_kind("Model.of", "source", source, (PATH, MAPPING, *kinds_of(transformer.Config)))
        return _of_entries(source if isinstance(source, Mapping) else _read(source))

    @property
    def width(self) -> int:
        """The width of the feed-forward layers."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def head(self) -> int:
        """The size of a head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    def layer(self, number: int = -1) -> tuple[int, int]:
        """The parameters of a layer, by number: those that every token uses, and those of all other experts.

        Raises:
            ValueError: sizes below 1, or that do not divide; top_k above experts, or dense above layers.

        Example:
            >>> sk.planner.Model(layers=32, hidden=4096, heads=32, vocabulary=32000, ffn=14336, experts=8).layer()
            (67149824, 1409286144)
        """
        model = _checked(self)
        column, attention = (3 if model.gated else 2) * model.hidden, model.attention
        if attention is None:
            attention = 2 * model.hidden * model.head * (model.heads + (model.kv_heads or model.heads))
        used = attention + 2 * model.hidden + model.extra
        if not model.experts or number % model.layers < model.dense:
            return used + column * model.width, 0
        expert = column * (model.width if model.expert_ffn is None else model.expert_ffn)
        return used + model.hidden * model.experts + model.shared * expert, model.experts * expert  # with the router

    def parameters(self) -> int:
        """The number of parameters."""
        model = _checked(self)
        stack = model.dense * sum(model.layer(0)) + (model.layers - model.dense) * sum(model.layer())
        return stack + model.vocabulary * model.hidden * (1 if model.tied else 2) + model.hidden

    def active(self) -> int:
        """The parameters that one token uses: all but the experts to which it is not routed."""
        model = _checked(self)
        return model.parameters() - (model.layers - model.dense) * (model.layer()[1] - model._routed())

    def flops(self, sequence: int) -> int:
        """FLOPs of the forward pass for one token.

        Args:
            sequence: tokens per sequence, with all of which attention compares each; 0: without attention's scores.

        Example:
            >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
            >>> f"{model.flops(8192):.3g}"
            '1.93e+10'
        """
        model = _checked(self)
        [sequence] = checks.count("planner", sequence=sequence)
        weights = model.dense * model.layer(0)[0] + (model.layers - model.dense) * (model.layer()[0] + model._routed())
        weights -= model.layers * (2 * model.hidden + model.extra)
        scores = 2 * sequence * model.heads * model.head
        return 2 * (weights + model.layers * scores + model.hidden * model.vocabulary)

    def rows(self, tokens: int, sequence: int, ways: int = 1) -> int:
        """The rows that the experts of one device compute in a layer, places that stay empty among them.

        Args:
            tokens: tokens on a device.
            sequence: tokens there that share places, those of one sequence.
            ways: devices over which the experts are split.

        Raises:
            ValueError: a size below 1, or ways that do not divide the experts.

        Example:
            >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, vocabulary=32000, experts=8)
            >>> model.rows(8192, 4096, ways=8), model._replace(capacity=None).rows(8192, 4096, ways=8)
            (20480, 65536)
        """
        model = _checked(self)
        tokens, sequence, ways = checks.whole("planner", tokens=tokens, sequence=sequence, ways=ways)
        if not model.experts or model.experts % ways:
            raise ValueError(
                f"planner: ways must divide the experts; got {ways} for {model.experts}. Choose fewer ways."
            )
        if model.capacity is not None:
            places = Capacity(model.capacity).places(sequence, model.experts, model.top_k)
            return model.experts * places * tokens // sequence
        return tokens * (model.top_k if ways == 1 else ways * min(model.top_k, model.experts // ways))

    def _routed(self) -> int:
        """The weights of a layer's experts to which a token is routed."""
        return self.layer()[1] // self.experts * self.top_k if self.experts else 0


def _checked(model: Model) -> Model:
    """The sizes as Python integers, which do not overflow; refuses those that do not add up."""
    return _checked_of_types(model, tuple(map(type, model)))


@lru_cache(maxsize=256)  # a search asks thousands of times; 4 and 4.0 are equal, and one of them is refused
def _checked_of_types(model: Model, types: tuple[type, ...]) -> Model:
    sizes: dict[str, Any] = {}
    for name, value in model._asdict().items():
        if name == "capacity" and value is not None:
            check_kind("planner", "capacity", value, (float,))
            [sizes[name]] = checks.positive("planner", capacity=value)
        elif value is not None and name not in ("gated", "tied"):
            check = checks.count if name in ("experts", "shared", "dense", "attention", "extra") else checks.whole
            [sizes[name]] = check("planner", **{name: value})
    model = model._replace(**sizes)
    if model.head_size is None:
        checks.divisor("planner", "heads", model.heads, "hidden", model.hidden)
    checks.divisor("planner", "kv_heads", model.kv_heads or model.heads, "heads", model.heads)
    if model.dense > model.layers or (model.experts and model.top_k > model.experts):
        raise ValueError(
            "planner: dense must be at most layers, and top_k at most experts; got "
            f"{model.dense} of {model.layers} and {model.top_k} of {model.experts}. Lower it."
        )
    return model


# ---- config.json


_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
_DEEPSEEK = ("deepseek_v2", "deepseek_v3")
_EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"} | dict.fromkeys(_DEEPSEEK, "n_routed_experts")
# Entries that are left out, or are this.
_ONLY = {"mlp_bias": False, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _of_entries(entries: Mapping[str, Any]) -> Model:
    """The sizes that the entries of a config.json say."""

    def entry(name: str, default: Any, rule: str, holds: Any) -> Any:
        found = default if entries.get(name) is None else entries[name]  # null stands for what is left out
        if not holds(found):
            raise _wrong(f"{name} must be {rule}", short(found))
        return found

    def whole(name: str, default: int | None = None, least: int = 1) -> Any:
        rule = f"a whole number from {least} to {_LARGEST:,}"
        return entry(name, default, rule, lambda x: type(x) is int and least <= x <= _LARGEST)

    def fit(holds: bool, rule: str, *values: int) -> None:
        if not holds:
            raise _wrong(rule, " and ".join(map(str, values)))

    types = (*_TYPES, *_DEEPSEEK)
    kind = entry("model_type", None, f"one of {checks.quoted(types)}", lambda x: x in types)
    latent, gemma, head_norms = (
        kind in _DEEPSEEK,
        kind.startswith("gemma"),
        kind in ("qwen3", "qwen3_moe", "gemma3_text"),
    )
    for name, only in (_ONLY | ({"attention_bias": False} if latent else {})).items():
        entry(name, only, json.dumps(only), lambda x, only=only: x == only)
    tied, biased = (
        entry(name, default, "true or false", lambda x: isinstance(x, bool))
        for name, default in (("tie_word_embeddings", gemma), ("attention_bias", False))
    )
    hidden, heads, layers = whole("hidden_size"), whole("num_attention_heads"), whole("num_hidden_layers")
    kv_heads = whole("num_key_value_heads", heads)
    fit(heads % kv_heads == 0, "num_key_value_heads must divide num_attention_heads", kv_heads, heads)
    model = Model(layers, hidden, heads, whole("vocab_size"), kv_heads, whole("intermediate_size"), tied=tied)
    if latent:
        rank, rotary, plain = whole("kv_lora_rank"), whole("qk_rope_head_dim"), whole("qk_nope_head_dim")
        value, query_rank = whole("v_head_dim"), whole("q_lora_rank", 0, least=0)
        both, query = plain + rotary + value, heads * (plain + rotary)
        fit(both % 2 == 0, "qk_nope_head_dim + qk_rope_head_dim + v_head_dim must be even", both)
        attention = query_rank * (hidden + query) if query_rank else hidden * query
        attention += hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
        shared, dense = whole("n_shared_experts", 0, least=0), whole("first_k_dense_replace", 0, least=0)
        fit(dense <= layers, "first_k_dense_replace must be at most num_hidden_layers", dense, layers)
        model = model._replace(head_size=both // 2, attention=attention, extra=query_rank + rank)
        model = model._replace(shared=shared, dense=dense)
    else:
        sized = gemma or kind.startswith("qwen3")  # whose heads are of another size than hidden / heads by default
        if not sized and entries.get("head_dim") is None:
            fit(hidden % heads == 0, "num_attention_heads must divide hidden_size", heads, hidden)
        size = whole("head_dim", None if sized else hidden // heads)
        extra = (heads + 2 * kv_heads) * size if kind == "qwen2" or biased else 0  # biases of queries, keys and values
        extra += (2 * size if head_norms else 0) + (hidden if biased else 0)
        extra += 2 * hidden if kind in ("gemma2", "gemma3_text") else 0  # norms behind attention and feed-forward layer
        model = model._replace(head_size=None if size * heads == hidden else size, extra=extra)
    if kind in _EXPERTS:
        experts, top_k = whole(_EXPERTS[kind]), whole("num_experts_per_tok")
        fit(top_k <= experts, f"num_experts_per_tok must be at most {_EXPERTS[kind]}", top_k, experts)
        width = None if kind == "mixtral" else whole("moe_intermediate_size")
        model = model._replace(experts=experts, top_k=top_k, expert_ffn=width)
    return model


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The entries of a JSON file."""
    rule = "a config.json must be a file of at most 1 MB with one JSON object"
    try:
        entries = json.loads(read_file(path, _LARGEST_FILE, links=False))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no text, or a name with a zero
        raise _wrong(rule, f"{path}: {checks.raised(error)}") from error
    if not isinstance(entries, dict):
        raise _wrong(rule, f"{path}, which is none")
    return entries


def _wrong(rule: str, got: str) -> ValueError:
    return ValueError(f"Model.of: {rule}; got {got}. Pass the config.json of a model, or planner.Model(...).")

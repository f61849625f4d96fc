"""The sizes of a decoder-only transformer, and what follows from them.

`Model.of` reads a `models.transformer.Config`, or by `config_json.py` that of a Hugging Face checkpoint. As in `cost`,
a multiply-add is two FLOPs, and only matmuls are counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import MAPPING, PATH, check_kind, kinds_of
from shardkit.layers.routing import Capacity
from shardkit.models import transformer
from shardkit.planner.config_json import read_entries, read_sizes

# What `models.transformer` calls the sizes that both have.
NAMES_IN_CONFIG: Mapping[str, str] = MappingProxyType(
    {
        "layers": "layers",
        "hidden": "dim",
        "heads": "heads",
        "vocabulary": "vocabulary",
        "kv_heads": "kv_heads",
        "tied": "tied",
    }
)
_FLAGS = ("gated", "tied", "kernel")
_MAY_BE_ZERO = ("experts", "shared", "dense", "attention", "extra")


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
        capacity: places in the experts, relative to balanced tokens, as in `layers.Capacity`. None: `Dropless`, with
            buffers for the worst case if there are several devices.
        expert_ffn: width of an expert; None: ffn.
        shared: further experts used by every token.
        dense: the number of first layers that still have a feed-forward layer.
        attention: weights of one layer's attention. None: queries, keys, values and output.
        extra: further parameters of one layer, such as biases, and norms beyond two.
        kernel: attention by the kernel of the platform, as with `kernel=True` of `layers.dot_attention`; else its
            scores are written to memory.
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
    kernel: bool = False

    @classmethod
    def of(cls, source: transformer.Config | Mapping[str, Any] | str | os.PathLike[str]) -> Model:
        """Reads the sizes from a configuration.

        Args:
            source: a `models.transformer.Config`; or a config.json of Hugging Face, as a mapping or as the path of a
                file that is not a link. It reads Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 1 to 3 (text), and
                DeepSeek-V2 and V3 without the layers that predict further tokens.

        Raises:
            TypeError: a source of another kind.
            ValueError: a file that is not a JSON object of at most 1 MB; another model type; an entry that is missing,
                has another type, or does not fit the others.

        Example:
            >>> entries = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
            >>> entries |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
            >>> sk.planner.Model.of({"model_type": "llama", **entries}).parameters()
            8030261248
        """
        if isinstance(source, transformer.Config):
            return cls._of_config(source)
        check_kind("Model.of", "source", source, (PATH, MAPPING, *kinds_of(transformer.Config)))
        entries = source if isinstance(source, Mapping) else read_entries(source)
        return cls(**read_sizes(entries))

    @classmethod
    def _of_config(cls, config: transformer.Config) -> Model:
        if config.group is not None and config.experts:
            raise ValueError(
                f"Model.of: experts must have their places by sequence; got group={config.group}. Leave group out."
            )
        sizes: dict[str, Any] = {name: getattr(config, field) for name, field in NAMES_IN_CONFIG.items()}
        model = cls(**sizes, ffn=config.width)
        if config.experts:
            model = model._replace(experts=config.experts, top_k=config.top_k, capacity=config.capacity)
        return model

    @property
    def width(self) -> int:
        """The width of the feed-forward layers."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def head(self) -> int:
        """The size of a head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def key_heads(self) -> int:
        """The number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def expert_width(self) -> int:
        """The width of an expert."""
        return self.width if self.expert_ffn is None else self.expert_ffn

    def layer(self, number: int = -1) -> tuple[int, int]:
        """Two numbers of parameters of a layer: the ones that every token uses, and the ones of all other experts.

        Raises:
            ValueError: sizes below 1, or that do not divide; top_k above experts, or dense above layers.

        Example:
            >>> sk.planner.Model(layers=32, hidden=4096, heads=32, vocabulary=32000, ffn=14336, experts=8).layer()
            (67149824, 1409286144)
        """
        model = check_sizes(self)
        matrices = 3 if model.gated else 2
        attention = model.attention
        if attention is None:
            # Queries and output have `heads` heads, keys and values `key_heads`: two matrices of each.
            attention = 2 * model.hidden * model.head * (model.heads + model.key_heads)
        norms = 2 * model.hidden
        dense = attention + norms + model.extra
        # -1, the default, is the last layer, which has experts if any layer has.
        if not model.experts or number % model.layers < model.dense:
            return dense + matrices * model.hidden * model.width, 0
        expert = matrices * model.hidden * model.expert_width
        router = model.hidden * model.experts
        return dense + router + model.shared * expert, model.experts * expert

    def parameters(self) -> int:
        """The number of parameters."""
        model = check_sizes(self)
        layers_with_experts = model.layers - model.dense
        stack = model.dense * sum(model.layer(0)) + layers_with_experts * sum(model.layer())
        tables = 1 if model.tied else 2
        last_norm = model.hidden
        return stack + tables * model.vocabulary * model.hidden + last_norm

    def active(self) -> int:
        """The number of parameters one token uses: all except the experts it does not choose."""
        model = check_sizes(self)
        layers_with_experts = model.layers - model.dense
        _, experts = model.layer()
        return model.parameters() - layers_with_experts * (experts - model._count_routed())

    def flops(self, sequence: int) -> int:
        """FLOPs of the forward pass for one token.

        Args:
            sequence: tokens per sequence; attention compares each token with all of them. 0: without attention's
                scores.

        Example:
            >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
            >>> f"{model.flops(8192):.3g}"
            '1.93e+10'
        """
        model = check_sizes(self)
        [sequence] = checks.integers_from_zero("planner", sequence=sequence)
        return _count_flops(model, sequence)

    def rows(self, tokens: int, sequence: int, ways: int = 1) -> int:
        """The number of rows that the experts of one device compute in a layer, with the places that stay empty.

        Args:
            tokens: tokens on a device.
            sequence: tokens of one sequence on the device; they share places.
            ways: devices that split the experts.

        Raises:
            ValueError: a size below 1, or ways that do not divide the experts.

        Example:
            >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, vocabulary=32000, experts=8)
            >>> model.rows(8192, 4096, ways=8), model._replace(capacity=None).rows(8192, 4096, ways=8)
            (20480, 65536)
        """
        model = check_sizes(self)
        tokens, sequence, ways = checks.integers_from_one("planner", tokens=tokens, sequence=sequence, ways=ways)
        if not model.experts or model.experts % ways:
            raise ValueError(
                f"planner: ways must divide the experts; got {ways} for {model.experts}. Choose fewer ways."
            )
        if model.capacity is not None:
            places = Capacity(model.capacity).places(sequence, model.experts, model.top_k)
            return model.experts * places * tokens // sequence
        if ways == 1:
            return tokens * model.top_k
        # Without places each device has room for the tokens of all, each of which may choose any of its experts.
        experts_here = model.experts // ways
        return tokens * ways * min(model.top_k, experts_here)

    def _count_routed(self) -> int:
        """The weights of a layer's experts to which a token is routed."""
        if not self.experts:
            return 0
        _, experts = self.layer()
        return experts // self.experts * self.top_k


@lru_cache(maxsize=256)  # of each layout of a search
def _count_flops(model: Model, sequence: int) -> int:
    layers_with_experts = model.layers - model.dense
    dense_weights, _ = model.layer(0)
    weights, _ = model.layer()
    # `layer` counts norms and biases too, which no matmul multiplies with.
    norms = 2 * model.hidden + model.extra
    products = model.dense * dense_weights + layers_with_experts * (weights + model._count_routed())
    products -= model.layers * norms
    # Multiply-adds of queries with keys, and of weights with values, for all tokens of the sequence: no mask halves
    # them.
    scores = 2 * sequence * model.heads * model.head
    return 2 * (products + model.layers * scores + model.hidden * model.vocabulary)


def check_sizes(model: Model) -> Model:
    """The sizes as Python integers, which do not overflow; refuses those that do not add up."""
    return _check_sizes(model, tuple(type(size) for size in model))


@lru_cache(maxsize=256)  # a search asks thousands of times; 4 and 4.0 are equal, and one of them is refused
def _check_sizes(model: Model, types: tuple[type, ...]) -> Model:
    sizes: dict[str, Any] = {}
    for name, value in model._asdict().items():
        if value is None or name in _FLAGS:
            continue
        if name == "capacity":
            check_kind("planner", "capacity", value, (float,))
            [sizes[name]] = checks.positive("planner", capacity=value)
        elif name in _MAY_BE_ZERO:
            [sizes[name]] = checks.integers_from_zero("planner", **{name: value})
        else:
            [sizes[name]] = checks.integers_from_one("planner", **{name: value})
    model = model._replace(**sizes)
    if model.head_size is None:
        checks.divisor("planner", "heads", model.heads, "hidden", model.hidden)
    checks.divisor("planner", "kv_heads", model.key_heads, "heads", model.heads)
    has_too_few_experts = model.experts > 0 and model.top_k > model.experts
    if model.dense > model.layers or has_too_few_experts:
        raise ValueError(
            "planner: dense must be at most layers, and top_k at most experts; got "
            f"{model.dense} of {model.layers} and {model.top_k} of {model.experts}. Lower it."
        )
    return model

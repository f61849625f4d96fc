"""The sizes of a decoder-only transformer, what follows from them, and where they are read.

`Model.of` reads them from a `models.transformer.Config`, or from the config.json of a Hugging Face checkpoint, whose
families differ as `_FAMILIES` says. As in `cost`, a multiply-add is two FLOPs, and only matmuls are counted.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.checks import quoted, raised
from shardkit._arguments.typed import short
from shardkit.models import transformer
from shardkit.runtime.channel.place import open_file

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
        head_size: size of a head; the mean of queries' and values' if they differ; None: hidden / heads.
        experts: experts of a layer, of which each token uses some; 0: none.
        top_k: experts per token.
        expert_ffn: width of an expert; None: ffn.
        shared: experts of a layer that every token uses, beside the others.
        dense: the first layers that have a feed-forward layer of width ffn in place of experts.
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

    @classmethod
    def of(cls, source: transformer.Config | Mapping[str, Any] | str | os.PathLike[str]) -> Model:
        """The sizes that a configuration says.

        Args:
            source: a `models.transformer.Config`; a config.json of Hugging Face, as a mapping or as the path of a file,
                which must not be a link: of the model types llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma,
                gemma2, gemma3_text, deepseek_v2 and deepseek_v3, without layers that predict further tokens.

        Returns:
            Model.

        Raises:
            TypeError: a source of another kind.
            ValueError: a file that cannot be read, or is no JSON object of at most 1 MB; an unknown model type; an
                entry that is missing, of another type, or does not fit the others.

        Example:
            >>> entries = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
            >>> entries |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
            >>> sk.planner.Model.of({"model_type": "llama", **entries}).parameters()
            8030261248
        """
        if isinstance(source, transformer.Config):
            sizes = {name: getattr(source, name) for name in ("layers", "heads", "vocabulary", "kv_heads", "tied")}
            sizes |= {"hidden": source.dim, "ffn": source.width}
            return cls(**sizes, **({"experts": source.experts, "top_k": source.top_k} if source.experts else {}))
        if isinstance(source, str | os.PathLike):
            return _of_entries(_read(source))
        if isinstance(source, Mapping):
            return _of_entries(source)
        raise TypeError(
            f"Model.of: source must be a models.transformer.Config, a mapping or a path; got {short(source)}. Pass for "
            "example 'config.json'."
        )

    @property
    def width(self) -> int:
        """The width of the feed-forward layers."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    def layer(self, number: int = -1) -> tuple[int, int]:
        """The parameters of one layer: those that every token uses, and those of its experts.

        Args:
            number: which layer, from 0; negative: from the last one.

        Raises:
            ValueError: sizes below 1, or that do not divide, top_k above experts, or dense above layers.

        Example:
            >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, vocabulary=32000, ffn=14336, experts=8)
            >>> model.layer()
            (67149824, 1409286144)
        """
        model = self._checked()
        matrices, experts = model._matrices(number)
        return matrices + 2 * model.hidden + model.extra, experts

    def parameters(self, layers: int | None = None, vocabulary: int | None = None) -> int:
        """The number of parameters, also with another number of layers (the last ones) or another vocabulary.

        Raises:
            ValueError: as `layer`.
        """
        model = self._checked()
        [layers] = checks.whole("planner", layers=model.layers if layers is None else layers)
        [vocabulary] = checks.count("planner", vocabulary=model.vocabulary if vocabulary is None else vocabulary)
        dense = max(0, model.dense - (model.layers - layers))
        each = dense * sum(model.layer(0)) + (layers - dense) * sum(model.layer())
        return each + vocabulary * model.hidden * (1 if model.tied else 2) + model.hidden

    def active(self) -> int:
        """The parameters that one token uses: all but the experts to which it is not routed.

        Raises:
            ValueError: as `layer`.
        """
        model = self._checked()
        return model.parameters() - (model.layers - model.dense) * (model.layer()[1] - model._routed())

    def flops(self, sequence: int, vocabulary: int | None = None) -> int:
        """FLOPs of the forward pass for one token.

        Args:
            sequence: tokens per sequence, with all of which attention compares each; 0: without attention's scores.
            vocabulary: another vocabulary; 0: without the output head.

        Raises:
            ValueError: as `layer`.

        Example:
            >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
            >>> f"{model.flops(8192):.3g}"
            '1.93e+10'
        """
        model = self._checked()
        [sequence] = checks.count("planner", sequence=sequence)
        [vocabulary] = checks.count("planner", vocabulary=model.vocabulary if vocabulary is None else vocabulary)
        weights = model.dense * model._matrices(0)[0]
        weights += (model.layers - model.dense) * (model._matrices(-1)[0] + model._routed())
        scores = 2 * sequence * model.heads * model._head_size()
        return 2 * (weights + model.layers * scores + model.hidden * vocabulary)

    def _head_size(self) -> int:
        return self.hidden // self.heads if self.head_size is None else self.head_size

    def _expert(self) -> int:
        """The weights of one expert."""
        return (3 if self.gated else 2) * self.hidden * (self.width if self.expert_ffn is None else self.expert_ffn)

    def _routed(self) -> int:
        """The weights of the experts to which a token is routed in the last layer."""
        return self.top_k * self._expert() if self.experts and self.dense < self.layers else 0

    def _matrices(self, number: int) -> tuple[int, int]:
        """The weights of one layer's matrices: those that every token uses, and those of its experts."""
        attention = self.attention
        if attention is None:
            attention = 2 * self.hidden * self._head_size() * (self.heads + (self.kv_heads or self.heads))
        if not self.experts or number % self.layers < self.dense:
            return attention + (3 if self.gated else 2) * self.hidden * self.width, 0
        router = self.hidden * self.experts
        return attention + router + self.shared * self._expert(), self.experts * self._expert()

    def _checked(self) -> Model:
        """These sizes as Python integers, which do not overflow; refuses those that do not add up."""
        names = ("layers", "hidden", "heads", "vocabulary", "kv_heads", "ffn", "head_size", "top_k", "expert_ffn")
        least_one = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        least_zero = {name: getattr(self, name) or 0 for name in ("experts", "shared", "dense", "attention", "extra")}
        model = self._replace(
            **dict(zip(least_one, checks.whole("planner", **least_one), strict=True)),
            **dict(zip(least_zero, checks.count("planner", **least_zero), strict=True)),
        )
        model = model._replace(attention=None if self.attention is None else model.attention)
        if model.head_size is None:
            checks.divisor("planner", "heads", model.heads, "hidden", model.hidden)
        checks.divisor("planner", "kv_heads", model.kv_heads or model.heads, "heads", model.heads)
        for name, most in (("dense", "layers"), ("top_k", "experts")):
            value, bound = getattr(model, name), getattr(model, most)
            if value > bound and (name == "dense" or model.experts):
                raise ValueError(
                    f"planner: {name} must be at most {most}; got {value} and {bound}. Change one of them."
                )
        return model


# ---- config.json


class _Family(NamedTuple):
    """How a Hugging Face model type differs from Llama."""

    tied: bool = False  # where the file does not say it
    biases: bool = False  # of queries, keys and values
    norms: int = 2
    head_norms: bool = False  # of queries and keys
    sized: bool = False  # the size of a head is never hidden / heads
    experts: str = ""  # the entry that says how many
    expert_ffn: str = ""  # the entry of their width
    latent: bool = False  # attention through low ranks, shared experts, and dense layers before them


_DEEPSEEK = _Family(experts="n_routed_experts", expert_ffn="moe_intermediate_size", latent=True)
_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "mixtral": _Family(experts="num_local_experts"),
    "qwen2": _Family(biases=True),
    "qwen3": _Family(head_norms=True, sized=True),
    "qwen3_moe": _Family(head_norms=True, sized=True, experts="num_experts", expert_ffn="moe_intermediate_size"),
    "gemma": _Family(tied=True, sized=True),
    "gemma2": _Family(tied=True, sized=True, norms=4),
    "gemma3_text": _Family(tied=True, sized=True, norms=4, head_norms=True),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
# Entries that may be left out, and must be this where they are not.
_ONLY = {"mlp_bias": False, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _of_entries(entries: Mapping[str, Any]) -> Model:
    """The sizes that the entries of a config.json say."""
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise _wrong(
            f"model_type must be one of {quoted(_FAMILIES)}", short(kind), "Pass planner.Model(...) of its sizes"
        )
    family = _FAMILIES[kind]
    for name, only in _ONLY.items():
        if entries.get(name) not in (None, only):
            raise _wrong(
                f"{name} must be {json.dumps(only)}", short(entries[name]), "Pass planner.Model(...) of its sizes"
            )

    def whole(name: str, default: int | None = None, least: int = 1) -> int:
        found = entries.get(name)
        found = default if found is None else found  # null stands for an entry that is left out
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= _LARGEST:
            raise _wrong(
                f"{name} must be a whole number from {least} to {_LARGEST:,}", short(found), "Correct the entry"
            )
        return found

    def says(name: str, default: bool) -> bool:
        found = entries.get(name)
        found = default if found is None else found
        if not isinstance(found, bool):
            raise _wrong(f"{name} must be true or false", short(found), "Correct the entry")
        return found

    def fit(holds: bool, rule: str, *values: int) -> None:
        if not holds:
            raise _wrong(rule, " and ".join(map(str, values)), "Correct one of them")

    hidden, heads, layers = whole("hidden_size"), whole("num_attention_heads"), whole("num_hidden_layers")
    kv_heads = whole("num_key_value_heads", heads)
    fit(heads % kv_heads == 0, "num_key_value_heads must divide num_attention_heads", kv_heads, heads)
    biased = says("attention_bias", False)
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"ffn": whole("intermediate_size"), "vocabulary": whole("vocab_size")}
    if family.latent:
        if biased:
            raise _wrong(f"attention_bias of {kind} must be false", "true", "Pass planner.Model(...) of its sizes")
        rank, rotary, plain = whole("kv_lora_rank"), whole("qk_rope_head_dim"), whole("qk_nope_head_dim")
        value, query_rank = whole("v_head_dim"), whole("q_lora_rank", 0, least=0)
        query = heads * (plain + rotary)
        sizes["attention"] = query_rank * (hidden + query) if query_rank else hidden * query
        sizes["attention"] += hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
        both = plain + rotary + value
        fit(both % 2 == 0, "qk_nope_head_dim + qk_rope_head_dim + v_head_dim must be even", both)
        sizes |= {"head_size": both // 2, "extra": query_rank + rank}
        sizes |= {"shared": whole("n_shared_experts", 0, least=0), "dense": whole("first_k_dense_replace", 0, least=0)}
        fit(sizes["dense"] <= layers, "first_k_dense_replace must be at most num_hidden_layers", sizes["dense"], layers)
    else:
        if family.sized or entries.get("head_dim") is not None:
            sizes["head_size"] = whole("head_dim")
        else:
            fit(hidden % heads == 0, "num_attention_heads must divide hidden_size", heads, hidden)
        size = sizes.get("head_size", hidden // heads)
        sizes["extra"] = (family.norms - 2) * hidden + (2 * size if family.head_norms else 0)
        sizes["extra"] += (heads + 2 * kv_heads) * size if family.biases or biased else 0
        sizes["extra"] += hidden if biased else 0
    if family.experts:
        sizes |= {"experts": whole(family.experts), "top_k": whole("num_experts_per_tok")}
        sizes |= {"expert_ffn": whole(family.expert_ffn)} if family.expert_ffn else {}
        most, top_k = sizes["experts"], sizes["top_k"]
        fit(top_k <= most, f"num_experts_per_tok must be at most {family.experts}", top_k, most)
    return Model(**sizes, tied=says("tie_word_embeddings", family.tied))


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The entries of a JSON file."""
    try:
        with open(open_file(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not wait for a writer
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("it is no file")
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise OSError("it is larger than 1 MB")
        entries = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no text, or a name with a zero
        raise _wrong("a config.json must be a file with one JSON object", f"{path}: {raised(error)}") from error
    if not isinstance(entries, dict):
        raise _wrong("a config.json must be a file with one JSON object", f"{path}: {short(entries)}")
    return entries


def _wrong(rule: str, got: str, remedy: str = "Pass the config.json of a model") -> ValueError:
    return ValueError(f"Model.of: {rule}; got {got}. {remedy}.")

"""The reference transformer's configuration and parameters: initial values and logical axes.

Shapes: D model, F hidden, H heads, G key/value heads, K head size, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least, divisor, finite, positive
from shardkit._arguments.typed import Key, check_fields, typed
from shardkit.meshes.layout import specs_from_rules
from shardkit.remat.recompute import Remat, find_policy


@dataclass(frozen=True)
class Config:
    """The sizes of a transformer.

    Attributes:
        vocabulary: number of token values (256: bytes).
        layers: number of layers.
        dim: model width D; must be divisible by heads.
        heads: attention heads; dim / heads must be even, for the rotary positions.
        kv_heads: key/value heads, a divisor of heads; None means as many as heads.
        hidden: width F of the feed-forward layers; None means 8/3 D, rounded up to a multiple of 32.
        dropout: dropout rate of each block's output.
        tied: use the embedding as the output head.
        experts: experts of each feed-forward layer, each of width F; 0 for a dense layer.
        top_k: experts per token.
        capacity: expert capacity factor, relative to balanced routing; None drops no token.
        group: consecutive tokens that share an expert capacity, by default a sequence; see `moe`. It must divide the
            tokens of a device, or the mesh changes which tokens are dropped.
        balance: coefficient of the load-balance loss, summed over layers.
        router_z: coefficient of the router's z-loss, summed over layers.
        norm_epsilon: what the norms add to the mean square.
        rope_theta: base of the rates of the rotary positions.
        remat, prefetch, microbatches: as for `scan_layers`; they change memory and time, not the numbers, except for a
            router's losses, which are computed per microbatch.
    """

    vocabulary: int = 256
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int | None = None
    hidden: int | None = None
    dropout: float = 0.0
    tied: bool = False
    experts: int = 0
    top_k: int = 2
    capacity: float | None = None
    group: int | None = None
    balance: float = 0.01
    router_z: float = 0.001
    norm_epsilon: float = 1e-6
    rope_theta: float = 10_000.0
    remat: Remat = None
    prefetch: bool = False
    microbatches: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.remat is not None:
            find_policy("Config", self.remat, False)
        for name in ("vocabulary", "layers", "dim", "heads", "kv_heads", "hidden", "top_k", "group", "microbatches"):
            at_least("Config", 1, **{name: getattr(self, name)})
        for name in ("dropout", "experts", "balance", "router_z"):
            at_least("Config", 0, **{name: getattr(self, name)})
        positive("Config", norm_epsilon=self.norm_epsilon, rope_theta=self.rope_theta)
        finite("Config", capacity=self.capacity, balance=self.balance, router_z=self.router_z)
        has_no_places = self.capacity is not None and self.capacity <= 0
        if self.dropout >= 1 or has_no_places:
            raise ValueError(
                f"Config: dropout must be below 1 and capacity above 0; got {self.dropout} and {self.capacity}. "
                "Pass for example dropout=0.1, capacity=1.25."
            )
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"transformer: dim must be divisible by heads into an even head size; got dim {self.dim} over "
                f"{self.heads} heads. Change dim or heads."
            )
        divisor("transformer", "kv_heads", self.groups, "heads", self.heads)

    @property
    def head_size(self) -> int:
        """K = D / H."""
        return self.dim // self.heads

    @property
    def groups(self) -> int:
        """G, the number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """F, the width of the feed-forward layers."""
        # SwiGLU has three matrices where an MLP of width 4 D has two: with two thirds of the width they have as many
        # weights. A multiple of 32, so that devices and tiles divide it.
        # For D = 128 that is 341.3, and so 352.
        return self.hidden or 32 * math.ceil(8 * self.dim / 3 / 32)


@typed
def init(key: Key, config: Config) -> Any:
    """Draws the initial parameters, float32: the same values on every mesh.

    Args:
        key: typed or raw key.
        config: the sizes.

    Returns:
        `{"embed": [V, D], "layers": {...: [L, ...]}, "final_norm": [D], "head": [D, V]}` (no head if tied); with
        experts, their leaves are `layers.experts`, [L, E, ...], beside `layers.router`, [L, D, E].

    Example:
        >>> from shardkit.models import transformer
        >>> params = transformer.init(jax.random.key(0), transformer.Config(layers=2, dim=16, heads=2))
        >>> params["layers"]["query"].shape
        (2, 16, 2, 8)
    """
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "query": (c.layers, c.dim, c.heads, c.head_size),
        "key": (c.layers, c.dim, c.groups, c.head_size),
        "value": (c.layers, c.dim, c.groups, c.head_size),
        "attention_out": (c.layers, c.heads, c.head_size, c.dim),
    }
    feed_forward: dict[str, tuple[int, ...]] = {
        "gate": (c.dim, c.width),
        "up": (c.dim, c.width),
        "down": (c.width, c.dim),
    }
    stack: tuple[int, ...] = (c.layers,)
    if c.experts:
        stack = (c.layers, c.experts)
    for name, shape in feed_forward.items():
        shapes[name] = (*stack, *shape)
    if c.experts:
        shapes["router"] = (c.layers, c.dim, c.experts)
    # Two more for embedding and head, also if they are tied: the other leaves are then the same with and without a
    # head.
    keys = iter(jax.random.split(key, len(shapes) + 2))
    # Projections into the residual stream start smaller, so that its variance does not grow with depth.
    residual_scale = 0.02 / math.sqrt(2 * c.layers)
    layers: dict[str, Any] = {}
    for name, shape in shapes.items():
        scale = 0.02
        if name in ("attention_out", "down"):
            scale = residual_scale
        layers[name] = scale * jax.random.normal(next(keys), shape)
    for name in ("attention_norm", "mlp_norm"):
        layers[name] = jnp.ones((c.layers, c.dim))
    if c.experts:
        layers["experts"] = {name: layers.pop(name) for name in feed_forward}
    params = {
        "embed": 0.02 * jax.random.normal(next(keys), (c.vocabulary, c.dim)),
        "layers": layers,
        "final_norm": jnp.ones(c.dim),
    }
    if not c.tied:
        params["head"] = 0.02 * jax.random.normal(next(keys), (c.dim, c.vocabulary))
    return params


@typed
def logical_axes(config: Config) -> Any:
    """The logical name of every dim of every leaf of `init`, for `specs_from_rules` and the plans' rules.

    Example:
        >>> from shardkit.models import transformer
        >>> transformer.logical_axes(transformer.Config())["layers"]["query"]
        ('layers', 'embed', 'heads', 'head_size')
    """
    layers: dict[str, Any] = {
        "query": ("layers", "embed", "heads", "head_size"),
        "key": ("layers", "embed", "kv_heads", "head_size"),
        "value": ("layers", "embed", "kv_heads", "head_size"),
        "attention_out": ("layers", "heads", "head_size", "embed"),
        "attention_norm": ("layers", "embed"),
        "mlp_norm": ("layers", "embed"),
    }
    if config.experts:
        # Names of their own, so that rules split the hidden width of dense layers and leave experts whole.
        layers["experts"] = {
            "gate": ("layers", "experts", "expert_embed", "expert_hidden"),
            "up": ("layers", "experts", "expert_embed", "expert_hidden"),
            "down": ("layers", "experts", "expert_hidden", "expert_embed"),
        }
        layers["router"] = ("layers", "embed", "experts")
    else:
        layers["gate"] = ("layers", "embed", "hidden")
        layers["up"] = ("layers", "embed", "hidden")
        layers["down"] = ("layers", "hidden", "embed")
    axes: dict[str, Any] = {"embed": ("vocabulary", "embed"), "layers": layers, "final_norm": ("embed",)}
    if not config.tied:
        axes["head"] = ("embed", "vocabulary")
    return axes


@typed
def muon_dims(config: Config) -> Any:
    """Rows and columns of every matrix, for `sk.muon` and `optax.contrib.muon`; None where `adam` updates a leaf.

    All heads of a layer are one matrix. Embedding, head, router and norms are left to `adam`.

    Example:
        >>> from shardkit.models import parameters
        >>> parameters.muon_dims(parameters.Config())["layers"]["query"]
        MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2, 3))
    """
    from optax.contrib import MuonDimensionNumbers

    def choose_dims(names: tuple[str, ...]) -> Any:
        dims = [dim for dim, name in enumerate(names) if name not in ("layers", "experts")]
        if names[0] != "layers" or len(dims) < 2:
            return None
        # A matrix that reads the residual stream has its width as rows, [D | H, K]; one that writes it has it as
        # columns, [H, K | D].
        reads_residual = names[dims[0]] in ("embed", "expert_embed")
        rows = 1 if reads_residual else len(dims) - 1
        return MuonDimensionNumbers(tuple(dims[:rows]), tuple(dims[rows:]))

    return jax.tree.map(choose_dims, logical_axes(config), is_leaf=lambda names: isinstance(names, tuple))


@typed
def tensor_rules(config: Config, axis: Axis, ways: int) -> Any:
    """The specs for `tp(axis, tensor_rules(config, axis, ways))`, which split vocabulary, heads and hidden width.

    Experts stay replicated, and so do key/value heads if their number is not divisible.

    Args:
        config: the sizes.
        axis: the axis, or tuple of axes, of `Axes.model`.
        ways: the number of devices along it.

    Example:
        >>> from shardkit.models import transformer
        >>> rules = transformer.tensor_rules(transformer.Config(), "model", 4)
        >>> plan = sk.chain(sk.dp("data"), sk.tp("model", rules))
        >>> rules["head"] == P(None, "model")
        True
    """
    at_least("tensor_rules", 1, ways=ways)
    rules: dict[str, Axis | None] = {}
    for name in ("layers", "embed", "head_size", "experts", "expert_embed", "expert_hidden"):
        rules[name] = None
    for name in ("vocabulary", "heads", "hidden"):
        rules[name] = axis
    # Otherwise the key and value heads are whole on all devices, and `local_groups` takes what a device needs.
    rules["kv_heads"] = axis if config.groups % ways == 0 else None
    return specs_from_rules(logical_axes(config), rules)

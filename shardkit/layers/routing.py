"""Which experts a token goes to, which have capacity for it, and how balanced the tokens are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis, at_least, shapes
from shardkit._arguments.typed import check_fields, typed
from shardkit._jax.compat import bound, varying_axes
from shardkit._jax.jaxprs import PER_MICROBATCH
from shardkit.collectives import all_reduce
from shardkit.on_device.means import Mean


@dataclass(frozen=True)
class Capacity:
    """Routing with a capacity: each group of tokens has a fixed number of places in each expert.

    It drops all further choices, the same ones on every mesh that splits no group.

    Attributes:
        factor: the number of places, relative to balanced tokens: 1 is just enough for them.
        group: consecutive tokens that share the places; None: a sequence, the second to last dim of x[b, T, D].
    """

    factor: float = 1.25
    group: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        at_least("Capacity", 1, group=self.group)
        if not 0 < self.factor < math.inf:
            raise ValueError(
                f"Capacity: factor must be positive and finite; got {self.factor}. Pass 1 for balanced tokens, or "
                "Dropless() to drop none."
            )

    def places(self, tokens: int, experts: int, top_k: int) -> int:
        """The places of a group: ceil(factor * tokens * top_k / experts), at most one per token."""
        balanced = self.factor * tokens * top_k / experts
        return min(tokens, math.ceil(round(balanced, 6)))  # 1.1 * 10 exceeds 11 in floating point


Exchange = Callable[..., jax.Array]
"""`exchange(x_ND, routing, run, axis, count) -> y_ND`, as `Dropless` takes one."""


@dataclass(frozen=True)
class Dropless:
    """Routing that drops no choice.

    Attributes:
        dense: another way to say impl="dense" (True) or "ragged" (False).
        impl: how tokens meet their experts; `moe` has the Cost of each. "ragged": a ragged all_to_all sends each choice
            to the device of its expert. "dense": an all_to_all of worst-case blocks does. "gather": each device gets
            all tokens, and a reduce_scatter sums the experts' parts. "ring": the same in hops, with partial sums beside
            the tokens. None: "ragged", but "dense" on CPUs, which have no ragged all_to_all. You can also pass a
            function, for example around a foreign kernel: `exchange(x_ND, routing, run, axis, count) -> y_ND`, the sum
            of each token's experts times its gates. It is called if experts are on several devices. `run(rows_SD,
            counts_e)` returns the outputs of this device's `count` experts. Sort the rows by expert, `counts_e` of
            each; any values may follow them.
    """

    dense: bool | None = None
    impl: Literal["ragged", "dense", "gather", "ring"] | Exchange | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dense is not None and self.impl is not None:
            raise ValueError(
                f"Dropless: only one of impl and dense may be given; got impl={self.impl!r}, dense={self.dense}. "
                "Leave out dense."
            )

    @property
    def blocks(self) -> bool | None:
        """Whether the all_to_all sends worst-case blocks. None: only if there is no ragged all_to_all."""
        if self.impl is None:
            return self.dense
        return self.impl == "dense"


class Routing(NamedTuple):
    """The experts of each of N tokens. All fields are [N, top_k], the expert of the highest (biased) score first.

    Attributes:
        expert: int32, the expert; E for a token of weight 0, which is not routed.
        gate: float32, the weight of that expert's output.
        position: int32, how many choices of the token's group take a place in this expert before it.
        kept: whether the expert has a place for it.
    """

    expert: jax.Array
    gate: jax.Array
    position: jax.Array
    kept: jax.Array


class RoutingStats(NamedTuple):
    """How balanced the experts are over the tokens of all devices.

    Attributes:
        balance_loss: float32 scalar, E sum_e load_e p_e with p_e the mean probability of expert e; 1 when balanced.
        z_loss: float32 scalar, the mean of the squared logsumexp of the logits.
        load: float32 [E], each expert's share of all choices, before any is dropped; the sum is 1.
        dropped: this device's dropped choices, and all its choices: a Mean, for the metrics of a step.
        choices: int32 [E], this device's choices of each expert, before any is dropped and whatever their tokens weigh,
            and all of them: a Mean, for the metrics of a step. The metric is each expert's share of the choices of the
            whole batch; counts are exact, and the bits the same on every mesh, up to 2^24 choices.
    """

    balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array
    dropped: Mean
    choices: Mean


@typed
def route(
    logits_NE: jax.Array,
    *,
    top_k: int,
    capacity: int | None = None,
    group: int | None = None,
    normalize_gates: bool | None = None,
    weights_N: jax.Array | None = None,
    bias_E: jax.Array | None = None,
) -> Routing:
    """Assigns each token to its `top_k` most probable experts, within their capacity.

    Each group of tokens has `capacity` places in each expert. First choices take places first, in the order of the
    tokens, then second choices, and so on; a choice without a place is dropped. Groups are independent, so the result
    is the same on every mesh that splits no group.

    Layout: `logits[N_a, E] -> expert, gate, position, kept[N_a, k]`
    Args:
        logits_NE: the router's logits, any floating dtype; the softmax is in float32.
        top_k: experts per token.
        capacity: places of a group in each expert; None: unlimited.
        group: consecutive tokens that share a capacity; None: all N.
        normalize_gates: divide a token's gates by their sum. By default where top_k > 1; a single gate would always be
            1, and have no gradient.
        weights_N: the weight of each token; a token of weight 0 goes nowhere and takes no place.
        bias_E: added to the probabilities when tokens choose experts, not in the gates; the same on all devices,
            without a gradient. See `balance_bias`. None: no bias.

    Returns:
        The Routing of this device's tokens.

    Raises:
        ValueError: top_k outside 1 to E, a capacity below 1, a group that does not divide N, or a bias of another
            shape.
        TypeError: a bias that is not floating-point.

    Cost: nothing is sent.

    Example:
        >>> routing = sk.layers.route(jnp.asarray([[0.0, 1.0], [0.0, 2.0], [3.0, 0.0]]), top_k=1, capacity=1)
        >>> routing.expert.ravel().tolist(), routing.kept.ravel().tolist()
        ([1, 1, 0], [True, False, True])

    Source: Shazeer et al., Outrageously Large Neural Networks (2017), for top-k gates; Lepikhin et al., GShard
    (arXiv:2006.16668), algorithm 1, for groups and capacity; Wang et al. (arXiv:2408.15664), section 3, for the bias.
    """
    shapes("route", logits_NE=(logits_NE, "NE"), weights_N=(weights_N, "N"), bias_E=(bias_E, "E"))
    _check_floating("route", bias_E)
    N, E = logits_NE.shape
    group = N if group is None else group
    if not 1 <= top_k <= E:
        raise ValueError(
            f"route: top_k must be between 1 and the number of experts; got {top_k} for {E} experts. Lower top_k."
        )
    if capacity is not None and capacity < 1:
        raise ValueError(f"route: capacity must be at least 1; got {capacity}. Pass None to drop nothing.")
    if capacity is not None and capacity >= 2**31:
        raise ValueError(f"route: capacity must be below 2**31; got {capacity}. Pass None to drop nothing.")
    if weights_N is not None:
        _check_numbers("route", "weights_N", weights_N)
    if group < 1 or N % group:
        raise ValueError(
            f"route: group must divide the tokens of a device; got groups of {group} for {N} tokens. Choose a divisor."
        )
    if normalize_gates is None:
        normalize_gates = top_k > 1
    gate_Nk, expert_Nk = _choose_experts(logits_NE, top_k, normalize_gates, bias_E)
    if weights_N is not None:
        expert_Nk = jnp.where(weights_N[:, None] > 0, expert_Nk, E)
    position_Nk = _take_positions(expert_Nk, group, E)
    kept_Nk = expert_Nk < E
    if capacity is not None:
        kept_Nk = kept_Nk & (position_Nk < capacity)
    return Routing(expert_Nk, gate_Nk, position_Nk, kept_Nk)


def _choose_experts(
    logits_NE: jax.Array, top_k: int, normalize: bool, bias_E: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The gates and the experts of each token's `top_k` choices, [N, k]."""
    logits_NE = logits_NE.astype(jnp.float32)
    score_NE = jax.nn.softmax(logits_NE)
    if bias_E is None:
        gate_Nk, expert_Nk = lax.top_k(score_NE, top_k)
        if normalize:
            gate_Nk = gate_Nk / jnp.sum(gate_Nk, axis=1, keepdims=True)
        return gate_Nk, expert_Nk
    biased_NE = lax.stop_gradient(score_NE + bias_E.astype(jnp.float32)[None, :])
    _, expert_Nk = lax.top_k(biased_NE, top_k)
    if not normalize:
        return jnp.take_along_axis(score_NE, expert_Nk, axis=1), expert_Nk
    # Normalized from the logits: a bias may choose only experts whose probabilities are rounded to zero, and their
    # quotients would be NaN.
    gate_Nk = jnp.take_along_axis(logits_NE, expert_Nk, axis=1)
    return jax.nn.softmax(gate_Nk), expert_Nk


def _take_positions(expert_Nk: jax.Array, group: int, experts: int) -> jax.Array:
    """How many choices of a token's group take a place in its expert before it, [N, k].

    For example, one group of three tokens whose choices are (1, 0), (1, 2) and (0, 1). In the order in which they take
    places, first choices before second ones, A = 6:

        expert_GA                                       1 1 0   0 2 1
        ranks: the place in the sequence by expert      2 3 0   1 5 4
        choices of smaller experts, 0 2 5 for 0 1 2     2 2 0   0 5 2
        the difference, the position in the expert      0 1 0   1 0 2
    """
    N, top_k = expert_Nk.shape
    expert_GA = expert_Nk.reshape(-1, group, top_k).swapaxes(1, 2).reshape(-1, top_k * group)
    counts_GE = count_choices(expert_GA, experts)
    smaller_GE = jnp.cumsum(counts_GE, axis=-1) - counts_GE
    # Tokens of weight 0 have the number E, which no array of E has; their positions are not used.
    smaller_GA = jnp.take_along_axis(smaller_GE, jnp.minimum(expert_GA, experts - 1), axis=1)
    position_GA = ranks(expert_GA) - smaller_GA
    return position_GA.reshape(-1, top_k, group).swapaxes(1, 2).reshape(N, top_k)


@typed
def routing_stats(
    logits_NE: jax.Array, routing: Routing, weights_N: jax.Array | None = None, stage: Axis | None = None
) -> RoutingStats:
    """Measures the balance of the experts over the tokens of all devices, and computes the losses that balance them.

    It sums over all axes of the tokens, so the losses are the same on every mesh; with accumulation and in a pipeline
    they are per microbatch. Add a term `coefficient * stats.balance_loss` to a mean as `Mean(mean.total + coefficient *
    stats.balance_loss * mean.weight, mean.weight)`.

    Layout: `logits[N_a, E] -> losses[], load[E]`
    Args:
        logits_NE: the router's logits.
        routing: the result of `route` for them.
        weights_N: the weight of each token; None: 1.
        stage: the axis of the pipeline, inside a stage. Its devices run different microbatches, so nothing is summed
            over it.

    Returns:
        The RoutingStats over all devices.

    Raises:
        ValueError: an unbound axis.

    Cost: one all_reduce of 8 (E + 1) bytes, and one in the backward pass.

    Example:
        >>> logits = jnp.asarray([[9.0, 0.0], [9.0, 0.0]])  # both tokens choose expert 0
        >>> stats = sk.layers.routing_stats(logits, sk.layers.route(logits, top_k=1))
        >>> stats.load.tolist(), f"{stats.balance_loss:.2f}"
        ([1.0, 0.0], '2.00')

    Source: Fedus et al., Switch Transformer (arXiv:2101.03961), equations 4 to 6, over all top_k choices; Zoph et al.,
    ST-MoE (arXiv:2202.08906), equation 5.
    """
    shapes("routing_stats", logits_NE=(logits_NE, "NE"), weights_N=(weights_N, "N"))
    if weights_N is not None:
        _check_numbers("routing_stats", "weights_N", weights_N)
    N, E = logits_NE.shape
    if routing.expert.shape[0] != N:
        raise ValueError(
            f"routing_stats: routing must be of these tokens; got one of {routing.expert.shape[0]} for {N}. Pass the "
            "result of route for these logits."
        )
    top_k = routing.expert.shape[1]
    logits_NE = logits_NE.astype(jnp.float32)
    if weights_N is None:
        weights_N = jnp.ones(N)
    else:
        weights_N = weights_N.astype(jnp.float32)
    chosen_NE = jnp.sum(routing.expert[:, :, None] == jnp.arange(E)[None, None, :], axis=1)
    per_token = [
        lax.stop_gradient(chosen_NE.astype(jnp.float32)),
        jax.nn.softmax(logits_NE),
        jax.nn.logsumexp(logits_NE, axis=1, keepdims=True) ** 2,
        jnp.ones((N, 1)),
    ]
    sums = jnp.sum(jnp.concatenate(per_token, axis=1) * weights_N[:, None], axis=0)
    axes = varying_axes(sums)
    if stage is not None:
        axes = axes.difference(bound("routing_stats", stage))
    # The balance loss is a product of two means over all tokens: the sums are added here, before the product. The
    # product of each device's own means would be another loss. For example, two devices are balanced together if one
    # sends all its tokens to expert 0 and the other all to expert 1, but each alone would be punished. The four sums
    # stand in one array, for one message instead of four.
    if axes:
        with jax.named_scope(PER_MICROBATCH):
            sums = all_reduce(sums, tuple(sorted(axes)))
    # If there is no token, the means are 0 instead of NaN.
    means = sums / jnp.maximum(sums[-1], jnp.finfo(jnp.float32).tiny)
    load_E = means[:E] / top_k
    probability_E = means[E : 2 * E]
    z_loss = means[2 * E]
    choices = jnp.sum(chosen_NE).astype(jnp.float32)
    dropped = choices - jnp.sum(routing.kept).astype(jnp.float32)
    choices_E = jnp.sum(chosen_NE, axis=0)
    return RoutingStats(
        balance_loss=E * jnp.sum(load_E * probability_E),
        z_loss=z_loss,
        load=load_E,
        dropped=Mean(dropped, choices),
        choices=Mean(choices_E, choices),
    )


@typed
def balance_bias(bias_E: jax.Array, choices_E: jax.Array, *, rate: float = 0.001) -> jax.Array:
    """The bias for the next step: lower by `rate` for experts with more tokens than the mean, higher for the others.

    It balances experts without a loss term, so no second gradient disturbs your model. The bias is carried state: in
    your loss, pass it as `bias_E=carried` to `moe`, and return `stats.choices` beside the mean as "choices". Then pass
    `make_train_step(..., carry=lambda bias, metrics, _: balance_bias(bias, metrics["choices"]))`. It updates the bias
    once a step, from the choices of the whole batch, with the same result on every mesh and for every accumulation. The
    loss of a pipeline cannot read carried state.

    Layout: `bias[E], choices[E] -> bias[E]`
    Args:
        bias_E: the bias of the step before, shape [E], or [.., E] for several layers; zeros at first.
        choices_E: array of the same shape: the number of choices, or the share of the whole batch, that each expert
            got.
        rate: the step, in units of the router's probabilities. DeepSeek-V3 adds 0.001 to sigmoids; the softmax of many
            experts is smaller.

    Returns:
        The new bias, in the shape and dtype of the old. An expert that got the mean, to 6 digits, keeps its bias.

    Raises:
        ValueError: choices of another shape, or a rate that is negative or infinite.
        TypeError: a bias that is not floating-point.

    Cost: nothing is sent: the step already sums the choices with its other metrics, at 8 (E + 1) bytes at most.

    Example:
        >>> print(sk.layers.balance_bias(jnp.zeros(4), jnp.array([9, 4, 3, 0]), rate=0.5))
        [-0.5  0.   0.5  0.5]

    Source: Wang et al., Auxiliary-Loss-Free Load Balancing (arXiv:2408.15664), algorithm 1; DeepSeek-V3
        (arXiv:2412.19437), section 2.1.2.
    """
    if not jnp.ndim(bias_E) or jnp.shape(bias_E) != jnp.shape(choices_E):
        raise ValueError(
            f"balance_bias: bias_E and choices_E must have one shape, [.., E]; got {jnp.shape(bias_E)} and "
            f"{jnp.shape(choices_E)}. Pass the choices of each expert that has a bias."
        )
    _check_floating("balance_bias", bias_E)
    if not 0 <= rate < math.inf:
        raise ValueError(f"balance_bias: rate must be finite and at least 0; got {rate}. Pass for example rate=0.001.")
    choices_E = choices_E.astype(jnp.float32)
    mean = jnp.mean(choices_E, axis=-1, keepdims=True)
    # Shares are rounded: without a margin, rounding would move the bias of experts that are balanced.
    is_balanced_E = jnp.abs(choices_E - mean) <= 1e-6 * mean
    direction_E = jnp.where(is_balanced_E, 0.0, jnp.sign(choices_E - mean))
    return bias_E - (rate * direction_E).astype(bias_E.dtype)


def _check_floating(where: str, bias_E: jax.Array | None) -> None:
    if bias_E is not None and not jnp.issubdtype(bias_E.dtype, jnp.floating):
        raise TypeError(
            f"{where}: bias_E must be floating-point; got {bias_E.dtype}. Pass for example jnp.zeros({bias_E.shape})."
        )


def ranks(keys: jax.Array) -> jax.Array:
    """The rank of each element along the last dim, stable; int32, a permutation.

    For example, 5 3 5 1 has the ranks 2 1 3 0.
    """
    index = jnp.broadcast_to(jnp.arange(keys.shape[-1], dtype=jnp.int32), keys.shape)
    index = index + 0 * keys  # varies as the keys do
    _, order = lax.sort((keys, index), num_keys=1)
    # `order` names the element at each rank; sorted by it, the index names the rank of each element.
    _, rank = lax.sort((order, index), num_keys=1)
    return rank


def count_choices(expert: jax.Array, experts: int) -> jax.Array:
    """How many choices along the last dim are of each expert, int32 [.., E].

    Of a group the last dim has the choices of all its tokens: two of each token, if a token has two experts.
    """
    choices = expert[..., None]
    numbers = jnp.expand_dims(jnp.arange(experts), range(expert.ndim))
    return jnp.sum(choices == numbers, axis=-2, dtype=jnp.int32)


def _check_numbers(where: str, name: str, x: jax.Array) -> None:
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        raise TypeError(f"{where}: {name} must be numbers; got {x.dtype}. Pass for example jnp.ones(N).")

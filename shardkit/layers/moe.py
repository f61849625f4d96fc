"""A mixture of experts: tokens are sent to the devices that hold their experts, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, named, shapes
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import bound
from shardkit._jax.jaxprs import PER_MICROBATCH
from shardkit.collectives import all_to_all, axis_size
from shardkit.collectives._sums import dot_dtype
from shardkit.layers.experts import ExpertFn, around_the_ring, by_choice, gathered, grouped_dot, spread, weighed
from shardkit.layers.routing import Capacity, Dropless, Exchange, RoutingStats, route, routing_stats
from shardkit.on_device.means import kind


@typed
@jax.named_scope(PER_MICROBATCH)
def moe(
    x: jax.Array,
    router_DE: jax.Array,
    experts: Arrays,
    expert_fn: ExpertFn,
    axis: Axis | None,
    *,
    top_k: int = 2,
    routing: Capacity | Dropless = Capacity(1.25),  # noqa: B008  it is frozen
    normalize_gates: bool | None = None,
    weights: jax.Array | None = None,
    stage: Axis | None = None,
    bias_E: jax.Array | None = None,
) -> tuple[jax.Array, RoutingStats]:
    """A mixture of experts: each token goes to its `top_k` experts, whose outputs are summed with weights.

    With `Capacity(factor)`, each group of tokens has C = ceil(factor * group * top_k / E) places in each expert;
    choices beyond are dropped. They are the same on every mesh that splits no group, so the default group is a
    sequence. Buffers hold E C rows per group.

    With `Dropless()`, tokens are sorted by expert: a device sends its N top_k rows without padding, where the hardware
    has a ragged all_to_all (all but CPUs). A buffer holds the worst case, n N min(top_k, E/n) rows; experts compute
    only rows that arrived, where `lax.ragged_dot` is native. Both give the same numbers while nothing is dropped.

    `Dropless(impl="gather")` or `"ring"` sends whole tokens instead of choices, and sums of a token's experts instead
    of their outputs, rounded to the dtype of x on each device with some of them. It sends less than "dense" where
    min(top_k, E/n) > 1, than "ragged" where top_k > n. Buffers hold the worst case too: "gather" all n N tokens and
    n N min(top_k, E/n) rows, "ring" N tokens and N min(top_k, E/n) rows, but those of each hop for a backward pass.

    Layout: `x[N_a, D], router[D, E], experts[E_a, ..] -> y[N_a, D]`; in between `[E, C_a, D] -> [E_a, C, D]` and back
    Args:
        x: this device's tokens, shape [.., D].
        router_DE: its logits are computed in float32.
        experts: pytree of this device's experts, each leaf with dim 0 of E/n; device j holds the j-th part.
        expert_fn: `expert_fn(experts, x_SD, dot) -> y_SD`: the experts' outputs for rows sorted by expert, finite for
            rows of zeros, with gradients: places that no token takes are zeros.
            `dot(x_SD, w_eDF)` multiplies each row by its expert's matrix, accumulating in float32; `dot(jnp.ones((S,
            1)), b_eF[:, None])` gives each row its expert's bias. Rows must be independent.
        axis: axis name or tuple of names, over which the experts are split; None: one device.
        top_k: experts per token.
        routing: `Capacity(factor, group)` drops what its places do not hold; `Dropless()` drops nothing.
        normalize_gates: see `route`.
        weights: the weight of each token in the losses, shape x.shape[:-1]; tokens of weight 0 go nowhere.
        stage: in a stage of a pipeline, its axis: see `routing_stats`.
        bias_E: see `route`, and `balance_bias`, which makes it: balance without a loss.

    Returns:
        y of the shape and dtype of x, and RoutingStats with the losses.

    Raises:
        ValueError: an unbound axis, top_k outside 1 to E, a group that does not divide the tokens, experts not
            divisible by the axis, a leaf with another number of experts, or a bias of another shape.
        TypeError: tokens or a bias that are not floating-point, or an exchange that returns something else.

    Cost: two all_to_alls forward and two backward of E C D G values for G groups: `cost.expert_volume`. Dropless: at
        most N top_k D values each, and an all_gather of E int32; dense: (n-1) N min(top_k, E/n) D values each. "gather"
        and "ring": (n-1) N (2 D s + 8 top_k) bytes forward and (n-1) N (2 D s + 4 top_k) backward, at s bytes a value,
        by an all_gather and a reduce_scatter each way, or in n hops. And the all_reduce of `routing_stats`.

    Example:
        >>> x, router, experts = jnp.ones((1, 4, 8)), jnp.zeros((8, 2)), jnp.ones((2, 8, 8))
        >>> y, stats = sk.layers.moe(x, router, experts, lambda w, x, dot: dot(x, w), None)
        >>> y.shape, float(stats.balance_loss)
        ((1, 4, 8), 1.0)

    Source: Lepikhin et al., GShard (arXiv:2006.16668), algorithm 1; Gale et al., MegaBlocks (arXiv:2211.15841), for the
        dropless path.
    """
    names = () if axis is None else bound("moe", axis)
    n = axis_size(names) if names else 1
    shapes("moe", x=(x, "..D"), router_DE=(router_DE, "DE"))
    if weights is not None and weights.shape != x.shape[:-1]:
        raise ValueError(
            f"moe: weights must have shape {x.shape[:-1]}, one per token; got shape {weights.shape}. "
            "Pass one weight per token."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"moe: x must be floating-point, as the experts' outputs are; got {x.dtype}. Pass x.astype(...)."
        )
    expert_fn = partial(_in_rows, expert_fn)
    E = router_DE.shape[1]
    _check_experts(experts, E, names, n)
    x_ND = jnp.asarray(x).reshape(-1, x.shape[-1])
    N = x_ND.shape[0]
    weights_N = None if weights is None else weights.reshape(-1)
    logits_NE = jnp.dot(x_ND.astype(jnp.float32), router_DE.astype(jnp.float32), precision="highest")
    choose = partial(route, logits_NE, top_k=top_k, normalize_gates=normalize_gates, weights_N=weights_N, bias_E=bias_E)
    if isinstance(routing, Dropless):
        chosen = choose()
        exchange = _exchange(routing) if n > 1 else by_choice
        y_ND = exchange(
            x_ND, chosen, lambda x_SD, counts_e: expert_fn(experts, x_SD, grouped_dot(counts_e)), names, E // n
        )
        return y_ND.reshape(x.shape), routing_stats(logits_NE, chosen, weights_N, stage)
    group = (routing.group or x.shape[-2]) if x.ndim > 1 else 1
    C = routing.places(group, E, top_k)
    chosen = choose(capacity=C, group=group)
    G = N // group
    group_N = jnp.arange(N, dtype=jnp.int32)[:, None] // group
    slot_Nk = (chosen.expert * G + group_N) * C + chosen.position
    slot_Nk = jnp.where(chosen.kept, slot_Nk, E * G * C)
    rows_SD = spread(x_ND, slot_Nk, E * G * C)
    y_ND = weighed(_with_capacity(rows_SD, experts, expert_fn, names, E), slot_Nk, chosen.gate)
    return y_ND.astype(x.dtype).reshape(x.shape), routing_stats(logits_NE, chosen, weights_N, stage)


def _exchange(routing: Dropless) -> Exchange:
    """How tokens of several devices meet their experts."""
    if callable(routing.impl):
        return partial(_of_others, routing.impl)
    if routing.impl == "gather":
        return gathered
    if routing.impl == "ring":
        return around_the_ring
    return partial(by_choice, dense=routing.blocks)


def _of_others(exchange: Exchange, x_ND: jax.Array, *rest: Any) -> jax.Array:
    """An exchange whose result is checked."""
    y_ND = exchange(x_ND, *rest)
    if kind(y_ND) != kind(x_ND):
        raise TypeError(
            f"moe: an exchange must return the sum of each token's experts, {kind(x_ND)}; got {kind(y_ND)}. Return it "
            "in the shape and dtype of its tokens."
        )
    return y_ND


def _check_experts(experts: Any, count: int, names: tuple[str, ...], n: int) -> None:
    if count % n:
        raise ValueError(
            f"moe: the number of experts must be divisible by {named(names)}; got {count} experts over {n} devices. "
            "Choose another number of experts or a smaller axis."
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(experts)[0]:
        if jnp.shape(leaf)[:1] != (count // n,):
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "experts"
            raise ValueError(
                f"moe: dim 0 of every leaf must count this device's experts, {count // n} of {count}; got shape "
                f"{jnp.shape(leaf)} for {name}. Shard the experts over the axis, with ep or P(axis)."
            )


def _in_rows(expert_fn: ExpertFn, experts: Any, x_SD: jax.Array, dot: Any) -> jax.Array:
    """What the experts return; refuses all but a row for each of theirs."""
    y_SD = expert_fn(experts, x_SD, dot)
    if jnp.ndim(y_SD) != 2 or not hasattr(y_SD, "dtype") or y_SD.shape[0] != x_SD.shape[0]:
        raise TypeError(
            f"moe: expert_fn(experts, x, dot) must return a row for each of x, [{x_SD.shape[0]}, D]; got "
            f"{kind(y_SD)}. Return for example dot(x, experts['w'])."
        )
    return y_SD


def _with_capacity(rows_SD: jax.Array, experts: Any, expert_fn: ExpertFn, names: tuple[str, ...], E: int) -> jax.Array:
    """The experts' outputs for buffers of equal size, [E C, D]."""
    rows_ECD = rows_SD.reshape(E, -1, rows_SD.shape[1])
    moved = names and axis_size(names) > 1
    if moved:  # by expert, each to the device that has it; and back below, into the places from which the rows came
        rows_ECD = all_to_all(rows_ECD, names, split_dim=0, concat_dim=1)

    def dot(x_SD: jax.Array, w_eDF: jax.Array) -> jax.Array:
        x_eCD = x_SD.reshape(w_eDF.shape[0], -1, x_SD.shape[1])
        y_eCF = jnp.einsum("eCD,eDF->eCF", x_eCD, w_eDF, preferred_element_type=dot_dtype(x_eCD, w_eDF))
        return y_eCF.reshape(x_SD.shape[0], -1).astype(x_SD.dtype)

    outputs_SD = expert_fn(experts, rows_ECD.reshape(-1, rows_SD.shape[1]), dot)
    outputs_ECD = outputs_SD.reshape(*rows_ECD.shape[:2], -1)
    if moved:
        outputs_ECD = all_to_all(outputs_ECD, names, split_dim=1, concat_dim=0)
    return outputs_ECD.reshape(rows_SD.shape[0], -1)

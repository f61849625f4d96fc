"""A mixture of experts: tokens are sent to the devices that hold their experts, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, name_axes, shapes
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import bound
from shardkit._jax.jaxprs import PER_MICROBATCH
from shardkit.collectives import all_to_all
from shardkit.collectives._sums import dot_dtype
from shardkit.layers.experts import (
    ExpertFn,
    combine,
    exchange_by_gather,
    exchange_by_ring,
    exchange_choices,
    grouped_dot,
    spread,
)
from shardkit.layers.matmul import count_devices
from shardkit.layers.routing import Capacity, Dropless, Exchange, Routing, RoutingStats, route, routing_stats
from shardkit.on_device.means import describe_type


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
    """A mixture of experts: it sends each token to `top_k` experts, and adds up their outputs with weights.

    With `Capacity(factor)`, each group of tokens has C = ceil(factor * group * top_k / E) places in each expert; it
    drops all further choices. It drops the same choices on every mesh that splits no group, so the default group is a
    sequence. Buffers hold E C rows per group.

    With `Dropless()`, tokens are sorted by expert. A device sends its N top_k rows without padding, if the hardware has
    a ragged all_to_all (all but CPUs). A buffer holds the worst case, n N min(top_k, E/n) rows. If `lax.ragged_dot` is
    native, experts compute only the rows they got. Both give the same numbers as long as nothing is dropped.

    `Dropless(impl="gather")` or `"ring"` sends whole tokens instead of choices, and sums over a token's experts instead
    of their outputs. Each device with some of the experts rounds its sum to the dtype of x. You send less than with
    "dense" if min(top_k, E/n) > 1, and less than with "ragged" if top_k > n. Buffers hold the worst case too: "gather"
    all n N tokens and n N min(top_k, E/n) rows, "ring" N tokens and N min(top_k, E/n) rows, and for a backward pass the
    rows of each hop.

    Layout: `x[N_a, D], router[D, E], experts[E_a, ..] -> y[N_a, D]`; in between `[E, C_a, D] -> [E_a, C, D]` and back
    Args:
        x: this device's tokens, shape [.., D].
        router_DE: the router's weights; logits are computed in float32.
        experts: pytree of this device's experts, each leaf with dim 0 of E/n; device j holds the j-th part.
        expert_fn: `expert_fn(experts, x_SD, dot) -> y_SD`: the experts' outputs for rows sorted by expert, finite for
            rows of zeros, with gradients: places no token takes are zeros.
            `dot(x_SD, w_eDF)` multiplies each row by its expert's matrix, accumulating in float32; `dot(jnp.ones((S,
            1)), b_eF[:, None])` gives each row its expert's bias. Rows must be independent.
        axis: axis name or tuple of names that splits the experts; None: one device.
        top_k: experts per token.
        routing: `Capacity(factor, group)` drops choices without a place; `Dropless()` drops nothing.
        normalize_gates: see `route`.
        weights: the weight of each token in the losses, shape x.shape[:-1]; tokens of weight 0 go nowhere.
        stage: the axis of the pipeline, inside a stage: see `routing_stats`.
        bias_E: see `route`. `balance_bias` makes it, for balance without a loss term.

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
    n = count_devices(names)
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
    E = router_DE.shape[1]
    _check_experts(experts, E, names, n)
    x_ND = jnp.asarray(x).reshape(-1, x.shape[-1])
    weights_N = None if weights is None else weights.reshape(-1)
    logits_NE = jnp.dot(x_ND.astype(jnp.float32), router_DE.astype(jnp.float32), precision="highest")
    choose = partial(route, logits_NE, top_k=top_k, normalize_gates=normalize_gates, weights_N=weights_N, bias_E=bias_E)
    run_experts = partial(_run_experts, expert_fn, experts)
    if isinstance(routing, Dropless):
        choices = choose()
        y_ND = _exchange_all(x_ND, choices, routing, run_experts, names, E)
    else:
        group = 1
        if x.ndim > 1:
            group = routing.group or x.shape[-2]
        places = routing.places(group, E, top_k)
        choices = choose(capacity=places, group=group)
        y_ND = _exchange_places(x_ND, choices, group, places, run_experts, names, E)
    return y_ND.reshape(x.shape), routing_stats(logits_NE, choices, weights_N, stage)


def _exchange_all(
    x_ND: jax.Array, choices: Routing, routing: Dropless, run_experts: Any, names: tuple[str, ...], experts: int
) -> jax.Array:
    """The sum of each token's experts, where no choice is dropped."""
    n = count_devices(names)
    exchange = _choose_exchange(routing) if n > 1 else exchange_choices

    def run(rows_SD: jax.Array, counts_e: jax.Array) -> jax.Array:
        return run_experts(rows_SD, grouped_dot(counts_e))

    return exchange(x_ND, choices, run, names, experts // n)


def _exchange_places(
    x_ND: jax.Array,
    choices: Routing,
    group: int,
    places: int,
    run_experts: Any,
    names: tuple[str, ...],
    experts: int,
) -> jax.Array:
    """The sum of each token's experts, where each group of tokens has `places` in each expert."""
    # One token through its experts: 2 devices, E = 4 experts of which device 0 has 0 and 1, groups of one sequence of 8
    # tokens, two sequences on each device (N = 16, G = 2), top_k = 2, C = 4 places. Token 13 of device 0 is in group 1
    # and chose expert 2, where two choices of its group stand before it, and expert 0, where four do.
    #
    #     slot     expert 2: (2 * 2 + 1) * 4 + 2 = 22 of E G C = 32 rows; expert 0 is full for its group, so that the
    #              second choice gets slot 32, which is none
    #     spread   row 22 of [32, D] is a copy of the token
    #     out      as [E, G C, D] it is row [2, 6]. Experts 2 and 3 go to device 1: all_to_all splits dim 0 and appends
    #              along dim 1, [4, 8, D] -> [2, 16, D]. There the row is [0, 6], before rows 8 to 15 of device 1
    #     experts  expert 2 sees its 16 rows of both devices in one matmul
    #     back     the transposed all_to_all: [2, 16, D] -> [4, 8, D], and the output is at row 22 again
    #     combine  gate of expert 2 times row 22, and nothing for the second choice
    #
    # Every expert has equally many slots, also if no token came. So shapes are static, and one all_to_all is enough,
    # without counts.
    N = x_ND.shape[0]
    groups = N // group
    slots = experts * groups * places
    group_N1 = jnp.arange(N, dtype=jnp.int32)[:, None] // group
    slot_Nk = (choices.expert * groups + group_N1) * places + choices.position
    slot_Nk = jnp.where(choices.kept, slot_Nk, slots)
    rows_SD = spread(x_ND, slot_Nk, slots)
    outputs_SD = _exchange_rows(rows_SD, run_experts, names, experts)
    return combine(outputs_SD, slot_Nk, choices.gate).astype(x_ND.dtype)


def _choose_exchange(routing: Dropless) -> Exchange:
    """How tokens of several devices meet their experts."""
    if callable(routing.impl):
        return partial(_exchange_and_check, routing.impl)
    if routing.impl == "gather":
        return exchange_by_gather
    if routing.impl == "ring":
        return exchange_by_ring
    return partial(exchange_choices, dense=routing.blocks)


def _exchange_and_check(exchange: Exchange, x_ND: jax.Array, *arguments: Any) -> jax.Array:
    """Calls a user's exchange, and refuses results of another shape or dtype than the tokens."""
    y_ND = exchange(x_ND, *arguments)
    if describe_type(y_ND) != describe_type(x_ND):
        raise TypeError(
            f"moe: an exchange must return the sum of each token's experts, {describe_type(x_ND)}; got "
            f"{describe_type(y_ND)}. Return it in the shape and dtype of its tokens."
        )
    return y_ND


def _check_experts(experts: Any, count: int, names: tuple[str, ...], n: int) -> None:
    if count % n:
        raise ValueError(
            f"moe: the number of experts must be divisible by {name_axes(names)}; got {count} experts over {n} "
            "devices. Choose another number of experts or a smaller axis."
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(experts)[0]:
        if jnp.shape(leaf)[:1] != (count // n,):
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "experts"
            raise ValueError(
                f"moe: dim 0 of every leaf must count this device's experts, {count // n} of {count}; got shape "
                f"{jnp.shape(leaf)} for {name}. Shard the experts over the axis, with ep or P(axis)."
            )


def _run_experts(expert_fn: ExpertFn, experts: Any, x_SD: jax.Array, dot: Any) -> jax.Array:
    """Calls the user's `expert_fn`, and refuses results that do not have a row for each row of x."""
    y_SD = expert_fn(experts, x_SD, dot)
    if jnp.ndim(y_SD) != 2 or not hasattr(y_SD, "dtype") or y_SD.shape[0] != x_SD.shape[0]:
        raise TypeError(
            f"moe: expert_fn(experts, x, dot) must return a row for each of x, [{x_SD.shape[0]}, D]; got "
            f"{describe_type(y_SD)}. Return for example dot(x, experts['w'])."
        )
    return y_SD


def _exchange_rows(rows_SD: jax.Array, run_experts: Any, names: tuple[str, ...], experts: int) -> jax.Array:
    """Sends rows to their experts and the outputs back, [E C, D], where each expert has an equal number C of rows."""
    rows_ECD = rows_SD.reshape(experts, -1, rows_SD.shape[1])
    is_split = count_devices(names) > 1
    # Each row is sent to the device of its expert. The exchange stands after the routing, which needs only this
    # device's tokens, and before the experts. The rows are sent, because the experts are larger: to gather the experts
    # to the tokens would send every expert to every device.
    if is_split:
        rows_ECD = all_to_all(rows_ECD, names, split_dim=0, concat_dim=1)

    def dot(x_SD: jax.Array, w_eDF: jax.Array) -> jax.Array:
        x_eCD = x_SD.reshape(w_eDF.shape[0], -1, x_SD.shape[1])
        y_eCF = jnp.einsum("eCD,eDF->eCF", x_eCD, w_eDF, preferred_element_type=dot_dtype(x_eCD, w_eDF))
        return y_eCF.reshape(x_SD.shape[0], -1).astype(x_SD.dtype)

    outputs_SD = run_experts(rows_ECD.reshape(-1, rows_SD.shape[1]), dot)
    experts_here, rows_each, _ = rows_ECD.shape
    outputs_ECD = outputs_SD.reshape(experts_here, rows_each, -1)
    # The outputs go back into the places of their rows, before the gates and the sum over a token's experts: only the
    # token's own device has the outputs of all its experts.
    if is_split:
        outputs_ECD = all_to_all(outputs_ECD, names, split_dim=1, concat_dim=0)
    return outputs_ECD.reshape(rows_SD.shape[0], -1)

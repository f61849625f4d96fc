"""How tokens meet experts that have room for all of them: sent by choice, gathered, or round the ring.

An exchange is a function of this device's tokens, their routing, the experts here, the axes, and the number of experts
on each device. An all_to_all sends a row for each choice. The gather and the ring send whole tokens instead: a token
and its result are sent once, for any top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit.collectives import all_gather, axis_index, axis_size, reduce_scatter, shift
from shardkit.collectives._sums import dot_dtype, typed_zeros
from shardkit.collectives.ragged import ragged_all_to_all, segments
from shardkit.layers.matmul import count_devices
from shardkit.layers.routing import Routing, count_choices, ranks

Dot = Callable[[jax.Array, jax.Array], jax.Array]
ExpertFn = Callable[[Any, jax.Array, Dot], jax.Array]
# `run(rows_SD, counts_e) -> outputs_SD`, the outputs of this device's experts for rows sorted by expert.
Run = Callable[[jax.Array, jax.Array], jax.Array]


def exchange_choices(
    x_ND: jax.Array, routing: Routing, run: Run, names: tuple[str, ...], count: int, dense: bool | None = None
) -> jax.Array:
    """The sum of each token's experts, with a row for each choice; experts get n N min(top_k, E/n) rows."""
    N, top_k = routing.expert.shape
    n = count_devices(names)
    slot_Nk = jnp.where(routing.kept, ranks(routing.expert.reshape(-1)).reshape(N, top_k), N * top_k)
    rows_SD = spread(x_ND, slot_Nk, N * top_k)
    counts_E = count_choices(routing.expert.reshape(-1), n * count)
    if n == 1:
        return combine(run(rows_SD, counts_E), slot_Nk, routing.gate).astype(x_ND.dtype)
    # The counts go first, to all devices. A sender writes its rows into the receiver's buffer behind the rows of
    # earlier senders, and must know how many these are. A receiver must know which of its experts each row is for, and
    # where the rows end.
    counts_nne = all_gather(counts_E[None], names).reshape(n, n, count)  # sender, receiver, its expert
    counts_nn = jnp.sum(counts_nne, axis=2)
    limit = N * min(top_k, count)
    # Rows are sent without gates. Their outputs come back by the transposed counts, into the places that the rows left,
    # and the token's own device applies the gates and sums over the experts. Summed on the devices of the experts, a
    # token with experts on two devices would have two partial sums, which an all_to_all does not add.
    arrived_SD = ragged_all_to_all(rows_SD, counts_nn, names, rows=n * limit, limit=limit, dense=dense)
    outputs_SD = _run_sorted(arrived_SD, counts_nne[:, axis_index(names)], run)
    rows_SD = ragged_all_to_all(outputs_SD, counts_nn.T, names, rows=N * top_k, limit=limit, dense=dense)
    return combine(rows_SD, slot_Nk, routing.gate).astype(x_ND.dtype)


def _run_sorted(arrived_SD: jax.Array, counts_ne: jax.Array, run: Run) -> jax.Array:
    """The experts' outputs for rows in the order in which they arrived: by sender, and of each sender by expert.

    For example, two senders and two experts here, with counts 2 1 and 1 1:

        arrived, as sender and expert    0,0 0,0 0,1 1,0 1,1 and unused rows
        for `run`, by expert             0,0 0,0 1,0 0,1 1,1 and unused rows, with counts 3 2
    """
    n, count = counts_ne.shape
    rows = arrived_SD.shape[0]
    segment_S = segments(counts_ne.reshape(-1), rows)
    expert_S = jnp.where(segment_S < n * count, segment_S % count, count)  # unused rows come last
    slot_S = ranks(expert_S)
    outputs_SD = run(spread(arrived_SD, slot_S[:, None], rows), jnp.sum(counts_ne, axis=0))
    return outputs_SD[slot_S]


class Routed(NamedTuple):
    """Tokens beside their choices, as they are sent to devices with experts."""

    x_ND: jax.Array
    expert_Nk: jax.Array
    gate_Nk: jax.Array


def exchange_by_gather(x_ND: jax.Array, routing: Routing, run: Run, names: tuple[str, ...], count: int) -> jax.Array:
    """The sum of each token's experts, from a gather of all tokens; experts get n N min(top_k, E/n) rows."""
    # Choices and gates go with the tokens, so that the device of an expert can multiply its outputs by their gates
    # before the sum over devices. Without the gates, each choice would need a row of its own in this sum.
    tokens = all_gather(Routed(x_ND, routing.expert, routing.gate), names)
    sum_ND = _run_here(tokens, run, names, count)
    # Each device has a part of the sum of every token, from its own experts. The parts are added here, after the
    # experts, and sent in the dtype of the tokens. A reduce_scatter sends each sum only to the device of its token; an
    # all_reduce would send all sums to all devices.
    return reduce_scatter(sum_ND.astype(x_ND.dtype), names)


def exchange_by_ring(x_ND: jax.Array, routing: Routing, run: Run, names: tuple[str, ...], count: int) -> jax.Array:
    """The sum of each token's experts, by a ring on which tokens and sums travel; N min(top_k, E/n) rows a hop."""
    tokens = Routed(x_ND, routing.expert, routing.gate)
    own_sum_ND = _run_here(tokens, run, names, count)  # needs no hop, and is added at home

    def add_sums_here(sum_ND: jax.Array, tokens: Routed) -> jax.Array:
        here_ND = _run_here(tokens, run, names, count)
        return (sum_ND.astype(jnp.float32) + here_ND).astype(x_ND.dtype)

    def hop(_: Any, state: tuple[Routed, jax.Array]) -> tuple[Routed, jax.Array]:
        # The tokens leave before this device's experts have run, so that the next device's experts can begin meanwhile.
        # The sum follows with the outputs of this device's experts; it is complete only at the token's own device.
        tokens, sum_ND = state
        next_tokens = shift(tokens, names)
        return next_tokens, shift(add_sums_here(sum_ND, tokens), names)

    # The first hop sends no sums, and the last no tokens, which have been everywhere. So tokens and sums make n-1 hops
    # each, and the ring sends as many bytes as a gather and a reduce_scatter. Worked example, of three devices: the
    # tokens of device 0 go to 1 and 2, and their sum goes from 1 to 2 and from 2 home to 0.
    tokens = shift(tokens, names)
    no_sum_ND = typed_zeros(own_sum_ND, dtype=x_ND.dtype)
    tokens, sum_ND = lax.fori_loop(0, axis_size(names) - 2, hop, (tokens, no_sum_ND))
    home_sum_ND = shift(add_sums_here(sum_ND, tokens), names)
    return (own_sum_ND + home_sum_ND.astype(jnp.float32)).astype(x_ND.dtype)


def _run_here(tokens: Routed, run: Run, names: tuple[str, ...], count: int) -> jax.Array:
    """The outputs of this device's `count` experts times the gates, summed over each token's choices; float32."""
    N, top_k = tokens.expert_Nk.shape
    local_Nk = tokens.expert_Nk - axis_index(names) * count
    is_here_Nk = (local_Nk >= 0) & (local_Nk < count)
    local_Nk = jnp.where(is_here_Nk, local_Nk, count)  # the choices of other devices' experts come last
    # A token chooses an expert at most once, so it has at most min(top_k, count) choices here.
    rows = N * min(top_k, count)
    slot_Nk = jnp.where(local_Nk < count, ranks(local_Nk.reshape(-1)).reshape(N, top_k), rows)
    counts_e = count_choices(local_Nk.reshape(-1), count)
    rows_SD = run(spread(tokens.x_ND, slot_Nk, rows), counts_e)
    return combine(rows_SD, slot_Nk, tokens.gate_Nk)


def combine(rows_SD: jax.Array, slot_Nk: jax.Array, gate_Nk: jax.Array) -> jax.Array:
    """The sum of each token's rows times its gates, float32; nothing for a choice without a slot."""
    outputs_NkD = rows_SD.at[slot_Nk].get(mode="fill", fill_value=0).astype(jnp.float32)
    return jnp.sum(outputs_NkD * gate_Nk[:, :, None], axis=1)


def spread(x_ND: jax.Array, slot_Nk: jax.Array, slots: int) -> jax.Array:
    """Copies each token into its slots, and zeros into the other slots, [slots, D].

    It is a gather by the token of each slot. Worked example: two tokens with slots (0, 3) and (2, 9), of four slots.
    Slots 0 and 3 get token 0, slot 2 gets token 1; slot 1 gets the number 2, which is no token and reads zeros. There
    is no slot 9. So token_S = 0 2 1 0.
    """
    N, top_k = slot_Nk.shape
    token_Nk = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[:, None], (N, top_k))
    token_S = jnp.full(slots, N, jnp.int32).at[slot_Nk.reshape(-1)].set(token_Nk.reshape(-1), mode="drop")
    return x_ND.at[token_S].get(mode="fill", fill_value=0)


def grouped_dot(counts_e: jax.Array) -> Dot:
    """Products of rows that are sorted by expert; rows after the last group give zeros."""

    def dot(x_SD: jax.Array, w_eDF: jax.Array) -> jax.Array:
        is_used_S1 = jnp.arange(x_SD.shape[0])[:, None] < jnp.sum(counts_e)
        # lax.ragged_dot leaves rows outside the groups, and their gradients, undefined.
        x_SD = jnp.where(is_used_S1, x_SD, jnp.zeros_like(x_SD))
        y_SF = lax.ragged_dot(x_SD, w_eDF, counts_e, preferred_element_type=dot_dtype(x_SD, w_eDF))
        y_SF = jnp.where(is_used_S1, y_SF, jnp.zeros_like(y_SF))
        return y_SF.astype(x_SD.dtype)

    return dot

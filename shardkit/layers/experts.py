"""How tokens meet experts of which none is full: sent by choice, gathered, or round the ring.

An exchange is a function of this device's tokens, their routing, the experts here, the axes, and their number here. An
all_to_all sends a row for each choice; where whole tokens are sent instead, a token and its result are sent once,
whatever top_k is.
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
from shardkit.layers.routing import Routing, ranks

Dot = Callable[[jax.Array, jax.Array], jax.Array]
ExpertFn = Callable[[Any, jax.Array, Dot], jax.Array]
# `run(rows_SD, counts_e) -> outputs_SD`, the outputs of this device's experts for rows sorted by expert.
Run = Callable[[jax.Array, jax.Array], jax.Array]


def by_choice(
    x_ND: jax.Array, routing: Routing, run: Run, names: tuple[str, ...], count: int, dense: bool | None = None
) -> jax.Array:
    """The sum of each token's experts, with a row for each choice; experts get n N min(top_k, E/n) rows."""
    N, top_k = routing.expert.shape
    slot_Nk = jnp.where(routing.kept, ranks(routing.expert.reshape(-1)).reshape(N, top_k), N * top_k)
    rows_SD = spread(x_ND, slot_Nk, N * top_k)
    n = axis_size(names) if names else 1
    counts_E = _counted(routing.expert, n * count)
    if n == 1:
        return weighed(run(rows_SD, counts_E), slot_Nk, routing.gate).astype(x_ND.dtype)
    # The counts go first, to all: a device writes its rows into the receiver's buffer behind those of the devices
    # before it, and so must know what they send. The rows go out without their gates, and come back by the counts
    # transposed, into the places that they left; gates, and the sum over a token's experts, are applied where the token
    # is. Summed where the experts are, a token whose experts are on two devices would have two partial sums, which an
    # exchange does not add.
    counts_nne = all_gather(counts_E[None], names).reshape(n, n, count)  # sender, receiver, its expert
    counts_nn = jnp.sum(counts_nne, axis=2)
    limit = N * min(top_k, count)
    arrived_SD = ragged_all_to_all(rows_SD, counts_nn, names, rows=n * limit, limit=limit, dense=dense)
    here_ne = counts_nne[:, axis_index(names)]
    segment_S = segments(here_ne.reshape(-1), n * limit)
    expert_S = jnp.where(segment_S < n * count, segment_S % count, count)  # unused rows come last
    slot_S = ranks(expert_S)
    outputs_SD = run(spread(arrived_SD, slot_S[:, None], n * limit), jnp.sum(here_ne, axis=0))
    rows_SD = ragged_all_to_all(outputs_SD[slot_S], counts_nn.T, names, rows=N * top_k, limit=limit, dense=dense)
    return weighed(rows_SD, slot_Nk, routing.gate).astype(x_ND.dtype)


class Routed(NamedTuple):
    """Tokens beside their choices, as they are sent to devices with experts."""

    x_ND: jax.Array
    expert_Nk: jax.Array
    gate_Nk: jax.Array


def gathered(x_ND: jax.Array, routing: Routing, run: Run, names: tuple[str, ...], count: int) -> jax.Array:
    """The sum of each token's experts, from a gather of all tokens; experts get n N min(top_k, E/n) rows."""
    # Choices and gates go with the tokens: only the device with an expert can weigh its answers before the sum over
    # devices, and without the gates each choice would need a row of its own in that sum.
    everyone = all_gather(Routed(x_ND, routing.expert, routing.gate), names)
    sum_ND = _answers(everyone, run, names, count)
    # Each device has a part of the sum of every token, that of its own experts. The parts are added here, after the
    # experts, and sent in the dtype of the tokens, so that a token's sum comes back alone to where the token is.
    return reduce_scatter(sum_ND.astype(x_ND.dtype), names)


def around_the_ring(x_ND: jax.Array, routing: Routing, run: Run, names: tuple[str, ...], count: int) -> jax.Array:
    """The same with tokens that travel, and their sums with them; experts get N min(top_k, E/n) rows a hop."""
    tokens = Routed(x_ND, routing.expert, routing.gate)
    own_ND = _answers(tokens, run, names, count)  # needs no hop, and is added at home

    def added(sum_ND: jax.Array, tokens: Routed) -> jax.Array:
        answers_ND = _answers(tokens, run, names, count)
        return (sum_ND.astype(jnp.float32) + answers_ND).astype(x_ND.dtype)

    def hop(_: Any, state: tuple[Routed, jax.Array]) -> tuple[Routed, jax.Array]:
        # The tokens leave before this device's experts have answered: the next device's can begin beside them. The sum
        # follows when it has the answers, for no device but the token's own will see all of it.
        tokens, sum_ND = state
        return shift(tokens, names), shift(added(sum_ND, tokens), names)

    # The first hop has no sum yet, and the last sends no tokens, which have been everywhere: n-1 hops of both, so that
    # the ring sends what `gathered` sends.
    tokens = shift(tokens, names)
    state = tokens, typed_zeros(own_ND, dtype=x_ND.dtype)
    tokens, sum_ND = lax.fori_loop(0, axis_size(names) - 2, hop, state)
    home_ND = shift(added(sum_ND, tokens), names)
    return (own_ND + home_ND.astype(jnp.float32)).astype(x_ND.dtype)


def _answers(tokens: Routed, run: Run, names: tuple[str, ...], count: int) -> jax.Array:
    """What this device's `count` experts say of tokens, times the gates, summed over each token's choices; float32."""
    N, top_k = tokens.expert_Nk.shape
    local_Nk = tokens.expert_Nk - axis_index(names) * count
    local_Nk = jnp.where((local_Nk >= 0) & (local_Nk < count), local_Nk, count)  # those of other devices come last
    # A token's choices differ, so that it has at most one for each expert here: this many rows hold them always.
    rows = N * min(top_k, count)
    slot_Nk = jnp.where(local_Nk < count, ranks(local_Nk.reshape(-1)).reshape(N, top_k), rows)
    rows_SD = run(spread(tokens.x_ND, slot_Nk, rows), _counted(local_Nk, count))
    return weighed(rows_SD, slot_Nk, tokens.gate_Nk)


def _counted(expert_Nk: jax.Array, count: int) -> jax.Array:
    """How many choices each of `count` experts has."""
    return jnp.sum(expert_Nk.reshape(-1)[:, None] == jnp.arange(count)[None, :], axis=0, dtype=jnp.int32)


def weighed(rows_SD: jax.Array, slot_Nk: jax.Array, gate_Nk: jax.Array) -> jax.Array:
    """The sum of each token's rows times its gates, float32; nothing for a choice without a slot."""
    outputs_NkD = rows_SD.at[slot_Nk].get(mode="fill", fill_value=0).astype(jnp.float32)
    return jnp.sum(outputs_NkD * gate_Nk[:, :, None], axis=1)


def spread(x_ND: jax.Array, slot_Nk: jax.Array, slots: int) -> jax.Array:
    """Each token in its slots, zeros in the others, as a gather by the token of each slot."""
    N, top_k = slot_Nk.shape
    token_Nk = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[:, None], (N, top_k))
    token_S = jnp.full(slots, N, jnp.int32).at[slot_Nk.reshape(-1)].set(token_Nk.reshape(-1), mode="drop")
    return x_ND.at[token_S].get(mode="fill", fill_value=0)


def grouped_dot(counts_e: jax.Array) -> Dot:
    """Products of rows that are sorted by expert; rows after the last group give zeros."""

    def dot(x_SD: jax.Array, w_eDF: jax.Array) -> jax.Array:
        used_S1 = jnp.arange(x_SD.shape[0])[:, None] < jnp.sum(counts_e)
        # lax.ragged_dot leaves rows outside the groups, and their gradients, undefined
        x_SD = jnp.where(used_S1, x_SD, jnp.zeros_like(x_SD))
        y_SF = lax.ragged_dot(x_SD, w_eDF, counts_e, preferred_element_type=dot_dtype(x_SD, w_eDF))
        return jnp.where(used_S1, y_SF, jnp.zeros_like(y_SF)).astype(x_SD.dtype)

    return dot

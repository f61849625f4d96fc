"""Experts that meet whole tokens instead of their choices: all tokens gathered, or sent round the ring.

A token and its result are then sent once, whatever top_k is, where an all_to_all sends a row for each choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit.collectives import all_gather, axis_index, axis_size, reduce_scatter, shift
from shardkit.collectives._sums import dot_dtype, typed_zeros
from shardkit.layers.routing import Routing, ranks

Dot = Callable[[jax.Array, jax.Array], jax.Array]
ExpertFn = Callable[[Any, jax.Array, Dot], jax.Array]


class Routed(NamedTuple):
    """Tokens beside their choices, as they are sent to devices with experts."""

    x_ND: jax.Array
    expert_Nk: jax.Array
    gate_Nk: jax.Array


def gathered(
    x_ND: jax.Array, routing: Routing, experts: Any, expert_fn: ExpertFn, names: tuple[str, ...], count: int
) -> jax.Array:
    """The sum of each token's experts, from a gather of all tokens; experts get n N min(top_k, E/n) rows."""
    # Choices and gates go with the tokens: only the device with an expert can weigh its answers before the sum over
    # devices, and without the gates each choice would need a row of its own in that sum.
    everyone = all_gather(Routed(x_ND, routing.expert, routing.gate), names)
    sum_ND = _answers(everyone, experts, expert_fn, names, count)
    # Each device has a part of the sum of every token, that of its own experts. The parts are added here, after the
    # experts, and sent in the dtype of the tokens, so that a token's sum comes back alone to where the token is.
    return reduce_scatter(sum_ND.astype(x_ND.dtype), names)


def around_the_ring(
    x_ND: jax.Array, routing: Routing, experts: Any, expert_fn: ExpertFn, names: tuple[str, ...], count: int
) -> jax.Array:
    """The same with tokens that travel, and their sums with them; experts get N min(top_k, E/n) rows a hop."""
    tokens = Routed(x_ND, routing.expert, routing.gate)
    own_ND = _answers(tokens, experts, expert_fn, names, count)  # needs no hop, and is added at home

    def added(sum_ND: jax.Array, tokens: Routed) -> jax.Array:
        answers_ND = _answers(tokens, experts, expert_fn, names, count)
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


def _answers(tokens: Routed, experts: Any, expert_fn: ExpertFn, names: tuple[str, ...], count: int) -> jax.Array:
    """What this device's `count` experts say of tokens, times the gates, summed over each token's choices; float32."""
    N, top_k = tokens.expert_Nk.shape
    local_Nk = tokens.expert_Nk - axis_index(names) * count
    local_Nk = jnp.where((local_Nk >= 0) & (local_Nk < count), local_Nk, count)  # those of other devices come last
    # A token's choices differ, so that it has at most one for each expert here: this many rows hold them always.
    rows = N * min(top_k, count)
    slot_Nk = jnp.where(local_Nk < count, ranks(local_Nk.reshape(-1)).reshape(N, top_k), rows)
    counts_e = jnp.sum(local_Nk.reshape(-1)[:, None] == jnp.arange(count)[None, :], axis=0, dtype=jnp.int32)
    rows_SD = expert_fn(experts, spread(tokens.x_ND, slot_Nk, rows), grouped_dot(counts_e))
    answers_NkD = rows_SD.at[slot_Nk].get(mode="fill", fill_value=0).astype(jnp.float32)
    return jnp.sum(answers_NkD * tokens.gate_Nk[:, :, None], axis=1)


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

"""A user's own dispatch to experts by lax.ragged_all_to_all, right and with mistakes: `Dispatch`.

Each device has some tokens and two experts. A token goes to the expert with its largest score, as a slice of rows for
each expert, and back. On the expert's device the rows of an expert lie together, those of all senders one behind the
other, as `lax.ragged_dot` reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

EXPERTS = 2  # of a device


def shift(sizes, axis=0):
    """The exclusive cumulative sum: where each of some slices begins, one behind the other."""
    return jnp.cumsum(sizes, axis) - sizes


def same(offsets, axis):
    """No mistake."""
    return offsets


@dataclass(frozen=True)
class Dispatch:
    """The dispatch, with a mistake perhaps.

    Attributes:
        axis: the axis of the experts.
        sizes_over: the axis along which the sizes are gathered, which should be that of the experts.
        change: what becomes of the arguments of the way there, a dict of them.
        back: likewise of the way back.
        layout: how the rows of an expert's device are said to lie: "expert" as they do, or "sender".
        starts: where each of the slices of an operand begins, from their sizes.
        room: the rows of the buffer; None for those of all devices.
        buffer: makes the buffer for the rows that arrive.
        norm: what is done with the rows that arrived.
    """

    axis: str = "expert"
    sizes_over: str = "expert"
    change: Callable[[dict[str, Any], str], dict[str, Any]] = same
    back: Callable[[dict[str, Any], str], dict[str, Any]] = same
    layout: str = "expert"
    starts: Callable[[Any], Any] = shift
    room: int | None = None
    buffer: Callable[[Any, int], Any] = lambda x, rows: jnp.zeros_like(x, shape=(rows, *x.shape[1:]))
    norm: Callable[[Any, Any], Any] = lambda rows, gain: rows * gain[None]

    def __call__(self, x_tD, router_DE, gain_D, w_eDF):
        n = lax.axis_size(self.axis)
        me = lax.axis_index(self.axis)
        score_tE = x_tD @ router_DE
        expert_t = jnp.argmax(score_tE, -1)
        gate_t = jax.nn.sigmoid(jnp.max(score_tE, -1))
        order_t = jnp.argsort(expert_t, stable=True)
        rows_tD = x_tD[order_t]
        sent_E = jnp.sum(expert_t[:, None] == jnp.arange(n * EXPERTS)[None], 0)
        # [sender, receiver, expert of the receiver]: what every device sends
        sizes_nne = lax.all_gather(sent_E, self.sizes_over).reshape(-1, n, EXPERTS)
        received_ne = sizes_nne[:, me]
        # On each receiver the rows of an expert lie together, by sender: [receiver, expert, sender] is their order.
        places_nen = shift(sizes_nne.transpose(1, 2, 0).reshape(n, -1), 1).reshape(n, EXPERTS, n)
        there = {
            "input_offsets": self.starts(sent_E),
            "send_sizes": sent_E,
            "output_offsets": places_nen[:, :, me].reshape(-1),
            "recv_sizes": received_ne.reshape(-1),
        }
        if self.layout == "sender":
            places = shift(sizes_nne.sum(2), 0)[me]
            there["output_offsets"] = (places[:, None] + shift(sizes_nne[me], 1)).reshape(-1)
        there = self.change(there, self.axis)
        room = self.room or n * len(x_tD)
        arrived_SD = lax.ragged_all_to_all(rows_tD, self.buffer(x_tD, room), *there.values(), axis_name=self.axis)
        hidden_SF = lax.ragged_dot(self.norm(arrived_SD, gain_D), w_eDF, received_ne.sum(0).astype(jnp.int32))
        # Back, every slice has the way of its rows the other way round: what was sent is received.
        exchange = lambda offsets: lax.all_to_all(offsets, self.axis, 0, 0, tiled=True)  # noqa: E731
        back = {
            "input_offsets": exchange(there["output_offsets"]),
            "send_sizes": there["recv_sizes"],
            "output_offsets": exchange(there["input_offsets"]),
            "recv_sizes": there["send_sizes"],
        }
        back = self.back(back, self.axis)
        answers_tF = lax.ragged_all_to_all(
            hidden_SF,
            jnp.zeros_like(hidden_SF, shape=(len(x_tD), hidden_SF.shape[1])),
            *back.values(),
            axis_name=self.axis,
        )
        y_tF = jnp.zeros_like(answers_tF).at[order_t].set(answers_tF)
        return y_tF * gate_t[:, None]


def dense(x_TD, router_DE, gain_D, w_EDF, norm=lambda rows, gain: rows * gain[None]):
    """The same on one device, where each token meets all experts."""
    score_TE = x_TD @ router_DE
    chosen_TE = jnp.argmax(score_TE, -1)[:, None] == jnp.arange(score_TE.shape[1])[None]
    y_TEF = jnp.einsum("td,edf->tef", norm(x_TD, gain_D), w_EDF)
    gate_T = jax.nn.sigmoid(jnp.max(score_TE, -1))
    return jnp.where(chosen_TE[:, :, None], y_TEF, 0).sum(1) * gate_T[:, None]

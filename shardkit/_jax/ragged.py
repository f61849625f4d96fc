"""`lax.ragged_all_to_all` for machines that have none: what its documentation says, and what it forbids.

Each device cuts its operand into slices, as many for every receiver, and says where a slice goes in the receiver's
output. Rows that no slice covers stay what the output was. Worked example, on two devices with a slice for each, as in
the documentation of jax:

                      device 0        device 1
    operand           [1, 2, 2]       [3, 4, 0]
    input_offsets     [0, 1]          [0, 1]      the slices [1] and [2, 2], and [3] and [4]
    send_sizes        [1, 2]          [1, 1]
    output_offsets    [0, 0]          [1, 2]      rows of the receiver: [2, 2] goes to row 0 of device 1
    recv_sizes        [1, 1]          [2, 1]      what arrives, by sender: a column of send_sizes
    result            [1, 3, 0, 0]    [2, 2, 4, 0]

The compiler takes all that on trust. Where two slices have a row in common, or one ends behind the array, a chip gives
what its timing makes of it, or nothing at all: such calls are found here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import quote
from shardkit._jax import compat


class Slices(NamedTuple):
    """Where the slices of ragged_all_to_all lie: integers [slices] of one device, or [devices, slices] of all.

    Attributes:
        input_offsets: the first row of each slice in the operand of its sender.
        send_sizes: the rows of each slice.
        output_offsets: its first row in the output of its receiver.
        recv_sizes: the rows of each slice that arrives, in the order of the senders.
    """

    input_offsets: Any
    send_sizes: Any
    output_offsets: Any
    recv_sizes: Any


@dataclass(frozen=True)
class Exchange:
    """One call of ragged_all_to_all: its devices, and the sizes of its arrays.

    Attributes:
        axes: the mesh axes, the major one first.
        groups: [groups, devices], which devices exchange with each other, by their number along the axes.
        slices: how many slices a device sends to each one of its group.
        rows: the rows of the operand.
        room: the rows of the output.
        is_gradient: whether jax made it of another call, to send the gradients back.
    """

    axes: tuple[str, ...]
    groups: np.ndarray
    slices: int
    rows: int
    room: int
    is_gradient: bool = False

    @property
    def group_of(self) -> np.ndarray:
        """[devices, devices of a group]: for each device those of its group, in their order."""
        members = np.zeros((self.groups.size, self.groups.shape[1]), int)
        for group in self.groups:
            members[group] = group
        return members

    @property
    def position(self) -> np.ndarray:
        """[devices]: the place of each device in its group."""
        places = np.zeros(self.groups.size, int)
        for group in self.groups:
            places[group] = np.arange(len(group))
        return places


def refuse_gradient(avals: Sequence[Any], axes: Sequence[str], devices: int, groups: Any) -> None:
    """Refuses the gradient of an exchange for which jax's own is another one.

    Worked example: the output `jnp.zeros(rows)` on data=2. It does not vary over "data" by its type, nor does the
    result, though the devices receive other rows. Where the result meets what varies, jax casts it; the gradient of the
    cast is a psum over "data": each device gets the sum of the gradients of both.

    Raises:
        ValueError: the gradient that is sent back was summed over the devices, or goes to devices of other groups.
    """
    is_whole = groups is None or [list(group) for group in groups] == [list(range(devices))]
    if not is_whole:
        raise ValueError(
            "must run over whole axes if it is differentiated, because jax's gradient exchanges the offsets between "
            "all devices, and not in their groups. Make the groups an axis of the mesh."
        )
    # The operand is the gradient of the result, and the output zeros that stand for the operand. With check_vma off no
    # type varies, and nothing is summed.
    operand, output = (compat.varying_axes(x) for x in avals[:2])
    missing = [axis for axis in axes if axis in output and axis not in operand]
    if missing:
        raise ValueError(
            f"must have an output that varies over {quote(missing)} by its type if it is differentiated, because the "
            "result has the type of the output, and of what is the same on all devices jax sums the gradients. Pass "
            f"sk.vary(output, {_write_axes(missing)})."
        )


def describe_exchange(
    avals: Sequence[Any], axes: tuple[str, ...], devices: int, groups: Any, is_gradient: bool = False
) -> Exchange:
    """The exchange of operands of these types between so many devices along the axes.

    Raises:
        ValueError: numbers of offsets and sizes that are not the same, or no multiple of the devices.
    """
    operand, output, *offsets = avals
    if groups is None:
        groups = [range(devices)]
    groups = np.asarray([list(group) for group in groups])
    members = groups.shape[1]
    lengths = [x.shape[0] for x in offsets]
    if len(set(lengths)) > 1 or lengths[0] % members:
        raise ValueError(
            "must have input_offsets, send_sizes, output_offsets and recv_sizes of one length, a multiple of the "
            f"{members} devices along {quote(axes)}; got lengths {lengths}. Pass an entry for each slice, by receiver, "
            "and in recv_sizes by sender."
        )
    return Exchange(axes, groups, lengths[0] // members, operand.shape[0], output.shape[0], is_gradient)


def exchange_rows(operands: Sequence[jax.Array], exchange: Exchange) -> jax.Array:
    """The result on a device, under `jax.vmap` over the named axes; invalid everywhere if what arrives is wrong.

    It has no derivative of its own: jax's derivative of ragged_all_to_all is another call of it.
    """
    operand, output, *offsets = operands
    if not exchange.rows or not exchange.room:  # no row can be sent
        return output
    axes = exchange.axes
    me = lax.axis_index(axes)
    sources = _gather(operand, axes)  # [devices, rows, ...]
    all_slices = Slices(*[_gather(x.astype(jnp.int32), axes) for x in offsets])
    members = jnp.asarray(exchange.group_of)[me]
    # Of each sender the slices to this device: those at its place in the group. All in a row, by sender.
    first = jnp.asarray(exchange.position)[me] * exchange.slices
    arriving = []
    for x in all_slices[:3]:
        to_me = lax.dynamic_slice_in_dim(x[members], first, exchange.slices, 1)
        arriving.append(to_me.reshape(-1))
    starts, sizes, targets = arriving
    senders = jnp.repeat(members, exchange.slices)
    # [room, slices]: the output [a, b, c] with a slice of one row at 1 is covered as [[no], [yes], [no]].
    row = jnp.arange(exchange.room)
    is_behind_start = row[:, None] >= targets[None]
    is_before_end = row[:, None] < (targets + sizes)[None]
    covers = is_behind_start & is_before_end
    which = jnp.argmax(covers, 1)
    place = senders[which] * exchange.rows + starts[which] + row - targets[which]
    rows = sources.reshape(-1, *operand.shape[1:])
    received = rows.at[place].get(mode="fill", fill_value=0)
    is_written = _widen(covers.any(1), output.ndim)
    result = jnp.where(is_written, received, output)
    expected = offsets[3].astype(jnp.int32)
    is_empty = sizes == 0
    is_inside = (starts >= 0) & (starts + sizes <= exchange.rows) & (targets >= 0) & (targets + sizes <= exchange.room)
    is_wrong = (sizes < 0).any() | (sizes != expected).any() | ~(is_empty | is_inside).all() | (covers.sum(1) > 1).any()
    return jnp.where(is_wrong, invalid_value(output.dtype), result)


def _gather(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """[devices, ...]: the arrays of all devices, numbered by all axes together. vmap gathers over one at a time."""
    x = x[None]
    for name in reversed(axes):
        x = lax.all_gather(x, name, tiled=True)
    return x


def _widen(mask: jax.Array, ndim: int) -> jax.Array:
    """A mask of rows, for an array of `ndim` dims."""
    return mask.reshape(mask.shape + (1,) * (ndim - 1))


def invalid_value(dtype: Any) -> jax.Array:
    """The value of a result that is invalid, as jax fills out-of-bounds reads."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"ragged_all_to_all: rows must be numbers; got {dtype}. Pass jax.random.key_data(keys).")
    info = jnp.iinfo(dtype)
    if info.min == 0:
        return jnp.asarray(info.max, dtype)
    return jnp.asarray(info.min, dtype)


class Slice(NamedTuple):
    """One slice, with the numbers of its devices along the axes, and the size that its receiver expects."""

    sender: int
    receiver: int
    start: int
    size: int
    target: int
    expected: int


def list_slices(exchange: Exchange, slices: Slices) -> list[Slice]:
    """Every slice that is sent, by sender and receiver, of arrays [devices, slices]."""
    result = []
    for group in exchange.groups:
        for place, sender in enumerate(group):
            for number in range(len(group) * exchange.slices):
                receiver_place, which = divmod(number, exchange.slices)
                receiver = group[receiver_place]
                # The receiver has what it expects at the place of the sender.
                expected = slices.recv_sizes[receiver, place * exchange.slices + which]
                start = slices.input_offsets[sender, number]
                size = slices.send_sizes[sender, number]
                target = slices.output_offsets[sender, number]
                result.append(Slice(int(sender), int(receiver), int(start), int(size), int(target), int(expected)))
    return result


class _Fault(NamedTuple):
    """What is wrong, as a sentence that begins with "must", and what to pass."""

    words: str
    remedy: str


def find_fault(exchange: Exchange, slices: Slices, where: str = "") -> str:
    """What the documentation of ragged_all_to_all forbids in the slices of all devices; "" if nothing.

    Args:
        exchange: the call.
        slices: arrays [devices, slices].
        where: which devices of the mesh these are, as ", where 'data' is 1".

    Returns:
        A sentence that begins with "must", and one that says what to pass.
    """
    fault = _find_first_fault(exchange, slices)
    if fault is None:
        return ""
    remedy = _find_remedy(exchange, slices) or fault.remedy
    return f"{fault.words}{where}. {remedy}"


def _find_first_fault(exchange: Exchange, slices: Slices) -> _Fault | None:
    every_slice = list_slices(exchange, slices)
    return (
        _find_wrong_size(exchange, every_slice)
        or _find_outside(exchange, every_slice)
        or _find_overlap(exchange, every_slice)
    )


def _find_wrong_size(exchange: Exchange, every_slice: Sequence[Slice]) -> _Fault | None:
    """A size that is negative, or that sender and receiver do not agree on: one of them would wait for ever."""
    along = quote(exchange.axes)
    for x in every_slice:
        if x.size < 0:
            return _Fault(
                f"must have sizes of 0 or more; device {x.sender} along {along} sends {x.size} rows to device "
                f"{x.receiver}",
                "Pass 0 for a slice without rows.",
            )
    for x in every_slice:
        if x.size != x.expected:
            return _Fault(
                f"must have as recv_sizes what the senders send; device {x.sender} along {along} sends {x.size} rows "
                f"to device {x.receiver}, whose recv_sizes say {x.expected}",
                f"Pass {_write_exchange('send_sizes', exchange)} as recv_sizes.",
            )
    return None


def _find_outside(exchange: Exchange, every_slice: Sequence[Slice]) -> _Fault | None:
    """A slice that begins or ends outside of the array of its sender or of its receiver."""
    along = quote(exchange.axes)
    filled_slices = [x for x in every_slice if x.size]
    for x in filled_slices:
        if not 0 <= x.start <= exchange.rows - x.size:
            return _Fault(
                f"must read rows of the operand; device {x.sender} along {along} sends device {x.receiver} the rows "
                f"{x.start} to {x.start + x.size - 1}, and its operand has {exchange.rows}",
                "Pass the first row of each slice as input_offsets: of slices one behind the other "
                "jnp.cumsum(send_sizes) - send_sizes.",
            )
    for x in filled_slices:
        if not 0 <= x.target <= exchange.room - x.size:
            return _Fault(
                f"must write rows of the receiver's output; device {x.sender} along {along} writes the rows {x.target} "
                f"to {x.target + x.size - 1} of device {x.receiver}, whose output has {exchange.room}",
                "Pass an output with room for all rows that a device may receive, and as output_offsets the first row "
                "of each slice on its receiver.",
            )
    return None


def _find_overlap(exchange: Exchange, every_slice: Sequence[Slice]) -> _Fault | None:
    """Two slices that write a row of the same device: which of them it holds then depends on timing."""
    filled_slices = [x for x in every_slice if x.size]
    in_order = sorted(filled_slices, key=lambda x: (x.receiver, x.target))
    for first, second in itertools.pairwise(in_order):
        # As long as no two have met, the one before it is the one that ends last.
        if first.receiver != second.receiver or first.target + first.size <= second.target:
            continue
        who = f"two slices of device {first.sender}"
        if first.sender != second.sender:
            who = f"devices {min(first.sender, second.sender)} and {max(first.sender, second.sender)}"
        who += f" along {quote(exchange.axes)}"
        row = f"row {second.target} of device {first.receiver}"
        if exchange.is_gradient:
            return _Fault(
                "must send a row once if it is differentiated, because jax's gradient of it writes rows where it "
                f"should add them; {who} write the gradient of {row}",
                "Send copies of the row, as operand[index] has them.",
            )
        return _Fault(
            f"must write a row of the output once; {who} write {row}, with the rows {_write_rows(first)} and "
            f"{_write_rows(second)}",
            "Pass as output_offsets the first row of each slice on its receiver: of slices one behind the other "
            f"{_write_exchange('jnp.cumsum(recv_sizes) - recv_sizes', exchange)}.",
        )
    return None


def _write_rows(x: Slice) -> str:
    return f"{x.target} to {x.target + x.size - 1}"


def _find_remedy(exchange: Exchange, slices: Slices) -> str:
    """The one argument that makes the call right if it is exchanged between the devices; "" if there is none."""
    if exchange.is_gradient:
        return ""
    for name in ("output_offsets", "recv_sizes", "send_sizes", "input_offsets"):
        changed = slices._replace(**{name: _exchange(exchange, getattr(slices, name))})
        if _find_first_fault(exchange, changed) is None:
            return f"These {name} would fit on the other side: pass {_write_exchange(name, exchange)}."
    return ""


def _exchange(exchange: Exchange, x: np.ndarray) -> np.ndarray:
    """A tiled all_to_all of [devices, slices] along dim 1."""
    result = x.copy()
    for group in exchange.groups:
        # [sender, receiver, slices] becomes [receiver, sender, slices].
        rows = x[group].reshape(len(group), len(group), -1)
        result[group] = rows.swapaxes(0, 1).reshape(len(group), -1)
    return result


def _write_exchange(what: str, exchange: Exchange) -> str:
    """The call of jax that exchanges an array between the devices, as text."""
    axis = _write_axes(exchange.axes)
    groups = ""
    if len(exchange.groups) > 1:
        groups = f", axis_index_groups={exchange.groups.tolist()}"
    return f"lax.all_to_all({what}, {axis}, 0, 0, tiled=True{groups})"


def _write_axes(axes: Sequence[str]) -> str:
    """An argument of jax that names axes, as text."""
    if len(axes) == 1:
        return repr(axes[0])
    return repr(tuple(axes))


def find_fault_on_mesh(exchange: Exchange, slices: np.ndarray, sizes: Mapping[str, int]) -> str:
    """The first fault of the slices on a whole mesh, as `find_fault` says it.

    Args:
        exchange: the call.
        slices: integers [*sizes, 4, slices], the fields of `Slices` on each device.
        sizes: the axes of the mesh, in the order of the dims.
    """
    for place, slices_of_place in split_mesh(exchange, slices, sizes):
        where = ""
        for name, number in place.items():
            where += f", where {name!r} is {number}"
        sentence = find_fault(exchange, slices_of_place, where)
        if sentence:
            return sentence
    return ""


def split_mesh(
    exchange: Exchange, slices: np.ndarray, sizes: Mapping[str, int]
) -> Iterator[tuple[dict[str, int], Slices]]:
    """The slices of the devices that a call reaches together: one item for each place along the other mesh axes.

    Args:
        exchange: the call.
        slices: integers [*sizes, 4, slices].
        sizes: the axes of the mesh, in the order of the dims.

    Yields:
        The place, a number for each other axis, and the slices there, arrays [devices, slices].
    """
    names = list(sizes)
    others = [name for name in names if name not in exchange.axes]
    order = [names.index(name) for name in (*others, *exchange.axes)]
    rest = len(names)
    # Of a call over "b" on a=2, b=3: [2, 3, 4, slices], for each place along "a" the devices along "b".
    slices = np.asarray(slices).transpose(*order, rest, rest + 1)
    for place in np.ndindex(*slices.shape[: len(others)]):
        of_place = slices[place].reshape(-1, *slices.shape[rest:])
        yield dict(zip(others, place, strict=True)), Slices(*of_place.swapaxes(0, 1))

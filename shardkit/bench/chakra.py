"""Execution traces in the format of Chakra, which simulators of networks read: protocol buffers, a file per device."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from shardkit.cost import Chip

_VERSION = "1.0.0"  # of et_def.proto
# Its NodeType and CollectiveCommType.
_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7
_TYPES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7}


class Node(NamedTuple):
    """A piece of the work of every device.

    Attributes:
        id: its number, in the order of the program.
        name: "compute", or the collective and its axes, as "all_reduce over data".
        deps: the nodes that end before it begins.
        flops: of its matrix products and convolutions.
        bytes: that those, gathers and scatters read and write; what is elementwise is taken as fused into them. Of a
            collective, the bytes of a device's operand.
        kind: of a collective, as in the census; "" for compute.
        axes: of a collective.
        pairs: of a ppermute, the pairs of places along its axes.
    """

    id: int
    name: str
    deps: tuple[int, ...]
    flops: int = 0
    bytes: int = 0
    kind: str = ""
    axes: tuple[str, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


class ExecutionTrace(NamedTuple):
    """What every device does; `write` it.

    Attributes:
        nodes: in order.
        sizes: the axes of the mesh.
        chip: whose peaks give compute nodes their duration; None: no duration.
    """

    nodes: tuple[Node, ...]
    sizes: dict[str, int]
    chip: Chip | None = None

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The groups of devices, by number in row-major order of the mesh, that communicate over some axes."""
        places = list(product(*map(range, self.sizes.values())))
        order = {axis: number for number, axis in enumerate(self.sizes)}
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(tuple(place[order[axis]] for axis in self.sizes if axis not in axes), []).append(rank)
        # In a group, devices are in the order of the axes as the collective names them.
        return [sorted(group, key=lambda rank: [places[rank][order[a]] for a in axes]) for group in found.values()]

    def write(self, directory: Path | str) -> list[Path]:
        """Writes `trace.RANK.et` for every device, and `groups.json`, the devices of each process group.

        Args:
            directory: where to; it need not exist.

        Returns:
            The files, the groups last.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        by_axes = {axes: self.groups(axes) for axes in dict.fromkeys(node.axes for node in self.nodes if node.axes)}
        named: dict[tuple[int, ...], str] = {}
        for each in by_axes.values():
            for group in each:
                named.setdefault(tuple(group), str(len(named)))
        files = []
        for rank in range(math.prod(self.sizes.values())):
            mine = {axes: next(g for g in groups if rank in g) for axes, groups in by_axes.items()}
            file = folder / f"trace.{rank}.et"
            messages = [_text(1, _VERSION), *self._messages(rank, mine, named)]
            file.write_bytes(b"".join(_varint(len(message)) + message for message in messages))
            files.append(file)
        groups = folder / "groups.json"
        groups.write_text(json.dumps({name: list(group) for group, name in named.items()}, indent=1) + "\n")
        return [*files, groups]

    def _messages(
        self, rank: int, mine: dict[tuple[str, ...], list[int]], named: dict[tuple[int, ...], str]
    ) -> Iterator[bytes]:
        """The nodes of one device. A node has an even number, the send of a ppermute the odd one after it."""
        there: set[int] = set()
        for node in self.nodes:
            deps = [2 * dep for dep in node.deps if dep in there]  # who receives nothing waits for nothing
            if not node.kind:
                there.add(node.id)
                sizes = _attribute("num_ops", 9, node.flops) + _attribute("tensor_size", 13, node.bytes)
                yield _node(2 * node.id, node.name, _COMPUTE, deps, sizes, self._microseconds(node))
                continue
            group = mine[node.axes]
            if node.kind != "ppermute":
                there.add(node.id)
                what = _attribute("comm_type", 9, _TYPES[node.kind]) + _attribute("comm_size", 9, node.bytes)
                what += _attribute("pg_name", 29, named[tuple(group)])
                yield _node(2 * node.id, node.name, _COLLECTIVE, deps, what)
                continue
            for source, target in node.pairs:
                ends = _attribute("comm_src", 7, group[source]) + _attribute("comm_dst", 7, group[target])
                ends += _attribute("comm_size", 9, node.bytes) + _attribute("comm_tag", 7, node.id)
                if group[source] == rank:
                    yield _node(2 * node.id + 1, f"send, {node.name}", _SEND, deps, ends)
                if group[target] == rank:
                    there.add(node.id)
                    yield _node(2 * node.id, f"receive, {node.name}", _RECEIVE, [], ends)

    def _microseconds(self, node: Node) -> int:
        if self.chip is None:
            return 0
        return max(1, round(1e6 * max(node.flops / self.chip.flops, node.bytes / self.chip.hbm_bandwidth)))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _attribute(name: str, field: int, value: int | str) -> bytes:
    """An AttributeProto of a node; the field says the type: int32 7, int64 9, uint64 13, bool 27, string 29."""
    content = _text(field, value) if isinstance(value, str) else _number(field, value)
    return _message(10, _text(1, name) + content)


def _node(number: int, name: str, kind: int, deps: list[int], attributes: bytes, microseconds: int = 0) -> bytes:
    waits = _message(5, b"".join(map(_varint, deps))) if deps else b""
    lasts = _number(7, microseconds) if microseconds else b""
    head = _number(1, number) + _text(2, name) + _number(3, kind)
    return head + waits + lasts + _attribute("is_cpu_op", 27, 0) + attributes

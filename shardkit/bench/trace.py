"""A step as execution traces for simulators of networks, such as ASTRA-sim: a file per device, in Chakra's format.

The nodes are those of the traced program, loops unrolled: compute nodes, which a device runs in the program's order,
and collectives, each after the values that it sends. Compute waits for a collective where its result is first used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.files import open_file
from shardkit._arguments.typed import typed
from shardkit._jax import compat
from shardkit._jax.jaxprs import called, flow, kind_of, mesh_axes, scan_operands, while_operands
from shardkit.analysis.hlo.protobuf import varint, written
from shardkit.analysis.jaxpr.census import size_of
from shardkit.analysis.jaxpr.counts import flops, flops_of
from shardkit.analysis.jaxpr.step import trace_step
from shardkit.analysis.rules.program import in_one_sentence
from shardkit.cost import Chip
from shardkit.cost import chip as chip_of

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
            messages = [written(1, _VERSION), *self._messages(rank, mine, named)]
            with open(file, "wb", opener=open_file) as out:
                out.writelines(varint(len(message)) + message for message in messages)
            files.append(file)
        groups = folder / "groups.json"
        with open(groups, "w", opener=open_file) as text:
            text.write(json.dumps({name: list(group) for group, name in named.items()}, indent=1) + "\n")
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
                seconds = max(node.flops / c.flops, node.bytes / c.hbm_bandwidth) if (c := self.chip) else 0.0
                lasts = max(1, round(1e6 * seconds)) if self.chip else 0
                yield _node(2 * node.id, node.name, _COMPUTE, deps, sizes, lasts)
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


def _attribute(name: str, field: int, value: int | str) -> bytes:
    """An AttributeProto of a node; the field says the type: int32 7, int64 9, uint64 13, bool 27, string 29."""
    return written(10, written(1, name) + written(field, value))


def _node(number: int, name: str, kind: int, deps: list[int], attributes: bytes, microseconds: int = 0) -> bytes:
    head = written(1, number) + written(2, name) + written(3, kind)
    waits = written(5, b"".join(map(varint, deps))) if deps else b""
    lasts = written(7, microseconds) if microseconds else b""
    return head + waits + lasts + _attribute("is_cpu_op", 27, 0) + attributes


_MOST = 10**6  # nodes
_MEMORY = {"gather", "scatter", "scatter-add", "scatter_add"}
Ids = frozenset[int]


@typed
def execution_trace(fn: Callable[..., Any], *args: Any, chip: str | Chip | None = None) -> ExecutionTrace:
    """The nodes of one call of a step, by tracing it; nothing runs, and an AbstractMesh is enough.

    A `while` counts once and of a `cond` the branch with the most FLOPs, because their choice is not in the program.
    What stands outside of `shard_map`, as the optimizer, is taken as split over all devices without communication.

    Args:
        fn: any function that jax can trace, with a shard_map in it.
        *args: its arguments; `jax.ShapeDtypeStruct` is enough.
        chip: gives compute nodes a duration: the longer of FLOPs and bytes at its peaks.

    Raises:
        ValueError: no shard_map, shard_maps over different meshes, groups within an axis, or over a million nodes.

    Example:
        >>> product = lambda x: sk.all_reduce(x @ x.T, "model")
        >>> f = jax.shard_map(product, mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> [(node.name, node.bytes, node.deps) for node in sk.bench.execution_trace(f, jnp.ones((8, 4))).nodes]
        [('compute', 320, ()), ('all_reduce over model', 256, (0,))]

    Source: Sridharan et al., Chakra: Advancing Performance Benchmarking and Co-design using Standardized Execution
        Traces (arXiv:2305.14516); et_def.proto of mlcommons/chakra, version 1.0.0.
    """
    found = _Recorder()
    with in_one_sentence("trace", "traced"):
        jaxpr = trace_step(fn, args).jaxpr
    found.run(jaxpr, [frozenset() for _ in (*jaxpr.constvars, *jaxpr.invars)])
    found.close()
    if found.sizes is None:
        raise ValueError(
            "trace: the step must have a shard_map, whose mesh has the devices; it has none. Pass a step of "
            "make_train_step, or a function that calls jax.shard_map."
        )
    chosen = None if chip is None else chip_of(chip)
    return ExecutionTrace(tuple(sorted(found.nodes)), found.sizes, chosen)


class _Recorder:
    """Follows a program, with the nodes that each value comes from."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.sizes: dict[str, int] | None = None
        self.inside = False
        self.count = 0
        self.last: int | None = None  # the compute node before the open one
        self.open: tuple[int, set[int], list[int]] | None = None  # number, dependencies, FLOPs and bytes
        self.waited: set[int] = set()  # what the open compute node need not wait for again
        self.computes: set[int] = set()

    def run(self, jaxpr: Any, given: list[Ids]) -> list[Ids]:
        """What the results of a jaxpr come from."""
        return flow(jaxpr, given, self.step, lambda _: frozenset())

    def step(self, equation: Any, operands: list[Ids]) -> Sequence[Ids]:
        name, inner = equation.primitive.name, [sub for _, sub in compat.inner_jaxprs(equation)]
        everything = frozenset[int]().union(*operands)
        if kind_of(equation) is not None:
            return [self.collective(equation, everything)] * len(equation.outvars)
        if name == "shard_map":
            return self.sharded(equation, inner[0], operands)
        if name == "scan":
            return self.scanned(equation, inner[0], operands)
        if name == "while":
            _, constants, carry = while_operands(equation, operands)
            return self.inner(equation.params["body_jaxpr"].jaxpr, [*constants, *carry])
        if name == "cond":
            return self.inner(max(inner, key=partial(flops, iterations=1)), operands[1:])
        body = called(equation)
        if body is not None:
            return self.inner(body, operands)
        work, size = flops_of(equation), _bytes(equation)
        return [self.compute(work, size, everything) if size else everything] * len(equation.outvars)

    def inner(self, jaxpr: Any, operands: list[Ids]) -> list[Ids]:
        return self.run(jaxpr, [frozenset()] * len(jaxpr.constvars) + operands)

    def sharded(self, equation: Any, jaxpr: Any, operands: list[Ids]) -> list[Ids]:
        sizes = dict(equation.params["mesh"].shape)
        if self.sizes not in (None, sizes):
            there = " and ".join(checks.sized(each.items()) for each in (self.sizes or {}, sizes))
            raise ValueError(f"trace: a step must use one mesh; it uses {there}. Trace the parts by themselves.")
        self.sizes, before, self.inside = sizes, self.inside, True
        out = self.inner(jaxpr, operands)
        self.inside = before
        return out

    def scanned(self, equation: Any, jaxpr: Any, operands: list[Ids]) -> list[Ids]:
        constants, carry, over = scan_operands(equation, operands)
        stacked: list[Ids] = [frozenset()] * (len(equation.outvars) - len(carry))
        for _ in range(equation.params["length"]):
            out = self.inner(jaxpr, [*constants, *carry, *over])
            carry = [self.shortened(each) for each in out[: len(carry)]]
            stacked = [self.shortened(a | b) for a, b in zip(stacked, out[len(carry) :], strict=True)]
        return [*carry, *stacked]

    def shortened(self, ids: Ids) -> Ids:
        """Without the compute nodes before the last of them, which it implies."""
        compute = ids & self.computes
        return ids - compute | {max(compute)} if compute else ids

    def collective(self, equation: Any, deps: Ids) -> Ids:
        kind, axes, params = kind_of(equation), mesh_axes(equation), equation.params
        assert kind is not None
        if params.get("axis_index_groups"):
            raise ValueError(
                f"trace: a collective must use whole axes; {kind} over {', '.join(axes)} has axis_index_groups. Make "
                "the groups an axis of the mesh."
            )
        if self.open is not None and self.open[0] in deps:
            self.close()
        size = sum(map(size_of, equation.invars))
        pairs = tuple(tuple(pair) for pair in params.get("perm", ()))
        name = f"{kind} over {', '.join(axes)}"
        return self.add(Node(self.number(), name, tuple(sorted(deps)), 0, size, kind, axes, pairs))

    def compute(self, flops: int, size: int, deps: Ids) -> Ids:
        ways = 1 if self.inside or self.sizes is None else math.prod(self.sizes.values())
        own = self.open[0] if self.open else None
        new = {i for i in deps if i != own and i != self.last} - self.waited
        if self.open is None or new:
            self.close()
            begun = set(new) | ({self.last} if self.last is not None else set())
            self.open = (self.number(), begun, [0, 0])
            self.waited |= new
            self.computes.add(self.open[0])
        self.open[2][0] += flops // ways
        self.open[2][1] += size // ways
        return frozenset({self.open[0]})

    def close(self) -> None:
        """Ends the open compute node."""
        if self.open is not None:
            number, deps, (flops, size) = self.open
            self.add(Node(number, "compute", tuple(sorted(deps)), flops, size))
            self.waited.add(number)
            self.last, self.open = number, None

    def add(self, node: Node) -> Ids:
        self.nodes.append(node)
        return frozenset({node.id})

    def number(self) -> int:
        if self.count == _MOST:
            raise ValueError(
                f"trace: a step must have at most {_MOST:,} nodes, with its loops unrolled; it has more. Trace fewer "
                "layers or microbatches."
            )
        self.count += 1
        return self.count - 1


def _bytes(equation: Any) -> int:
    """What an equation reads and writes, if it is one of those that read and write memory."""
    if not flops_of(equation) and equation.primitive.name not in _MEMORY:
        return 0
    return sum(size_of(v) for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "shape"))

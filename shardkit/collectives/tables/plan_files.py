"""Tables as the JSON plans that MSCCL++ executes on NVIDIA and AMD GPUs, and back.

A plan is a program for each device: it puts chunks into the memory of others, signals, waits, and adds or copies what
has arrived. What is added, or may still be needed, arrives in a place of its own in the scratch buffer.

Source: the format of microsoft/mscclpp, src/core/executor/execution_plan.cc, as it was in August 2026. Plans written
here were run by the interpreter below, not on GPUs.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from shardkit._arguments.typed import typed
from shardkit.collectives.tables.messages import Send
from shardkit.collectives.tables.table import Op, SendTable

_COLLECTIVES = {"all_gather": "allgather", "reduce_scatter": "reducescatter", "all_reduce": "allreduce"}
_OPS, _BLOCKS, _PEERS, _REFS = 64, 16, 16, 8  # of a thread block, a device, a device, an op: limits of the executor
_LARGEST = 2**26  # characters of a text

Json = dict[str, Any]


@typed
def to_mscclpp(table: SendTable) -> str:
    """A table as a JSON plan of MSCCL++, in place, for GPUs that are all linked.

    Raises:
        ValueError: as `SendTable.check`, or more peers or steps than its executor has room for.
    """
    table.check()
    kind, each = ("o" if table.op == "all_gather" else "i"), table.chunks // table.devices
    gpus = []
    for device in range(table.devices):
        peers = _peers(table, device)
        steps = [_ready(peers), *_program(table, device, kind, peers)]
        scratch = 0 if kind == "o" else sum(s.target == device for s in table.sends)
        if len(peers) > _PEERS or max(map(len, steps)) > _OPS - 4:
            raise ValueError(
                f"{table.name}: a device of an MSCCL++ plan has {_PEERS} peers and {_OPS} ops at most; got "
                f"{len(peers)} and {max(map(len, steps))} in a step. Write a table of fewer devices or chunks."
            )
        own = {"channel_type": "memory", "channel_ids": list(range(len(peers)))}
        refs = {"access_channel_type": "memory", "remote_buffer_ids": list(range(len(peers)))}
        blocks = [
            {
                "id": number,
                "ops": ops,
                "channels": [own] if peers else [],
                "remote_buffer_refs": [refs] if peers else [],
            }
            for number, ops in enumerate(_blocks(table, steps))
        ]
        reached = "o" if kind == "o" else "s"
        gpus.append(
            {
                "id": device,
                "input_chunks": each if table.op == "all_gather" else table.chunks,
                "output_chunks": each if table.op == "reduce_scatter" else table.chunks,
                "scratch_chunks": scratch,
                "threadblocks": blocks,
                "channels": [{"channel_type": "memory", "connected_to": peers}] if peers else [],
                "remote_buffers": [{"rank": p, "type": reached, "access_channel_types": ["memory"]} for p in peers],
                "semaphores": [],
            }
        )
    plan = {"name": table.name, "collective": _COLLECTIVES[table.op], "protocol": "Simple", "inplace": True}
    return json.dumps(plan | {"reuse_resources": False, "gpus": gpus}, indent=1)


def _peers(table: SendTable, device: int) -> list[int]:
    return sorted({s.source + s.target - device for s in table.sends if device in (s.source, s.target)})


def _ready(peers: Sequence[int]) -> list[Json]:
    """Nobody writes into the memory of a device that has not begun."""
    both = [_signal("rlxsignal", range(len(peers))), _NOP, _signal("rlxwait", range(len(peers)))]
    return [_NOP, *both, _NOP] if peers else [_NOP]


_NOP: Json = {"name": "nop"}


def _signal(name: str, channels: Sequence[int]) -> Json:
    return {"name": name, "channel_ids": list(channels), "channel_type": "memory"}


def _program(table: SendTable, device: int, kind: str, peers: Sequence[int]) -> Iterator[list[Json]]:
    """The ops of a device, step by step."""
    arrived: defaultdict[int, int] = defaultdict(int)  # scratch places taken, by device
    channel = {peer: number for number, peer in enumerate(peers)}
    for step in table.by_step:
        ops: list[Json] = []
        takes: list[Json] = []
        targets, sources = [], []
        for message in step:
            for source, target in message.pairs:
                for at, chunk in enumerate(message.taken[source]):
                    place = int(chunk) if kind == "o" else arrived[target] + at
                    mine = {"type": kind, "index": int(chunk), "size": 1}
                    if source == device:
                        there = {"buffer_id": channel[target], "index": place, "size": 1}
                        ops.append({"name": "put", "src_buff": [mine], "dst_buff": [there], "channel_type": "memory"})
                    elif target == device and kind != "o":
                        here = {"type": "s", "index": place, "size": 1}
                        given = [mine, here] if message.reduce else [here]
                        takes.append(
                            {"name": "re" if message.reduce else "copy", "src_buff": given, "dst_buff": [mine]}
                        )
                arrived[target] += message.each
                if source == device:
                    targets.append(channel[target])
                if target == device:
                    sources.append(channel[source])
        if targets:
            ops = [*_joined(ops), _NOP, _signal("signal", list(dict.fromkeys(targets)))]
        if sources:
            ops += [_signal("wait", list(dict.fromkeys(sources))), _NOP, *takes, *[_NOP][: len(takes)]]
        yield ops


def _joined(puts: Sequence[Json]) -> list[Json]:
    """Puts of up to eight chunks each."""
    joined = []
    for first in range(0, len(puts), _REFS):
        some = puts[first : first + _REFS]
        ends = {end: [ref for put in some for ref in put[end]] for end in ("src_buff", "dst_buff")}
        joined.append(some[0] | ends)
    return joined


def _blocks(table: SendTable, steps: Sequence[list[Json]]) -> list[list[Json]]:
    """Steps in thread blocks of at most 64 ops, each of which begins when the one before has ended."""
    blocks: list[list[Json]] = [[]]
    for ops in steps:
        if len(blocks[-1]) + len(ops) > _OPS - 4:
            turn = {"name": "barrier", "barrier_id": len(blocks) - 1, "num_threadblocks": 2}
            blocks[-1] += [_NOP, turn]
            blocks.append([turn, _NOP])
        blocks[-1] += ops
    if len(blocks) > _BLOCKS:
        raise ValueError(
            f"{table.name}: an MSCCL++ plan has {_BLOCKS} thread blocks on a device at most, of {_OPS} ops each; got "
            f"{len(blocks)}. Write a table of fewer steps."
        )
    return blocks


@typed
def from_mscclpp(text: str) -> SendTable:
    """The table of a JSON plan of MSCCL++ that puts, signals, waits, and copies or adds what has arrived.

    Args:
        text: a plan as `to_mscclpp` writes it.

    Returns:
        A checked table of the plan's messages; a step is as early as the plan's signals let it be.

    Raises:
        ValueError: another operation, a wait that no signal ends, a place that is written twice, messages that no order
            of steps has, or as `SendTable.check`. Races within a device, of thread blocks without `nop`, are not seen.

    Example:
        >>> table = sk.tables.halving("all_reduce", 4)
        >>> sk.tables.from_mscclpp(sk.tables.to_mscclpp(table)) == table
        True
    """
    if len(text) > _LARGEST:
        raise ValueError(
            f"from_mscclpp: text must have at most {_LARGEST:,} characters; got {len(text):,}. Pass a smaller plan."
        )
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"from_mscclpp: text must be JSON; got {error}. Pass what to_mscclpp returned.") from None
    try:
        return _Interpreter(plan).table()
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"from_mscclpp: a plan must have the keys and types of MSCCL++; got none at {error}. Pass a plan that its "
            "executor reads."
        ) from None


class _Put(NamedTuple):
    """A chunk on its way: to which place of the scratch buffer, when, and after how many messages about it."""

    source: int
    chunk: int
    place: int | None
    clock: int
    version: int


class _Interpreter:
    """Runs the programs of all devices, and notes which chunk came from where when it is taken."""

    def __init__(self, plan: Json):
        self.name, self.gpus = str(plan["name"]), plan["gpus"]
        ops = [op for op, name in _COLLECTIVES.items() if name == plan["collective"]]
        if not ops:
            self.refuse("an allgather, reducescatter or allreduce", f"{plan['collective']!r}")
        if plan["inplace"] is not True or plan["protocol"] != "Simple":
            self.refuse("inplace true and protocol Simple", f"{plan['inplace']!r} and {plan['protocol']!r}")
        self.op = ops[0]
        whole = "input_chunks" if self.op == "reduce_scatter" else "output_chunks"
        other = "output_chunks" if whole == "input_chunks" else "input_chunks"
        parts = 1 if self.op == "all_reduce" else len(self.gpus)
        chunks = {_count(gpu[whole]) for gpu in self.gpus} | {_count(gpu[other]) * parts for gpu in self.gpus}
        if len(chunks) != 1 or [gpu["id"] for gpu in self.gpus] != list(range(len(self.gpus))):
            self.refuse("devices in their order, with equally many chunks", f"chunks {sorted(chunks)}")
        kinds = {each["channel_type"] for gpu in self.gpus for each in gpu["channels"]}
        if kinds - {"memory"}:
            self.refuse("memory channels alone", f"{sorted(kinds)}")
        self.chunks = chunks.pop()
        self.clock = [0] * len(self.gpus)
        # From a device to another: chunks put since the last signal, and signals that nobody has waited for.
        self.puts: defaultdict[tuple[int, int], list[_Put]] = defaultdict(list)
        self.signals: defaultdict[tuple[int, int], list[tuple[int, list[_Put]]]] = defaultdict(list)
        self.barriers: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.used: set[tuple[int, int]] = set()  # places of the scratch buffers
        self.slots: dict[tuple[int, int], _Put] = {}  # what has arrived in them
        self.changes: Counter[tuple[int, int]] = Counter()  # messages that a device has taken, by chunk
        self.sends: list[tuple[Send, int]] = []  # and what the source had taken when it was put

    def refuse(self, rule: str, got: str) -> NoReturn:
        raise ValueError(f"from_mscclpp: the plan must have {rule}; got {got}. Pass a plan in which all do.")

    def table(self) -> SendTable:
        """The table of the messages, checked."""
        blocks = [(gpu["id"], list(block["ops"]), block) for gpu in self.gpus for block in gpu["threadblocks"]]
        places = [0] * len(blocks)
        going = True
        while going:
            going = False
            for number, (device, ops, block) in enumerate(blocks):
                while places[number] < len(ops) and self.ran(device, number, block, ops[places[number]]):
                    places[number] += 1
                    going = True
        for number, (device, ops, _) in enumerate(blocks):
            if places[number] < len(ops):
                self.refuse("a signal for every wait", f"none for {ops[places[number]]['name']!r} on device {device}")
        taken: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for send, _ in self.sends:
            taken[send.target, send.chunk].append(send.step)
        for send, version in self.sends:
            if sum(step < send.step for step in taken[send.source, send.chunk]) != version:
                self.refuse("messages that are those of steps", f"an older chunk {send.chunk} of device {send.source}")
        numbers = {step: number for number, step in enumerate(sorted({send.step for send, _ in self.sends}))}
        sends = sorted(send._replace(step=numbers[send.step]) for send, _ in self.sends)
        table = SendTable(cast(Op, self.op), len(self.gpus), self.chunks, tuple(sends), self.name)
        table.check()
        return table

    def ran(self, device: int, number: int, block: Json, op: Json) -> bool:
        """Whether an op could run, and has."""
        name, peers = op["name"], [peer for each in self.gpus[device]["channels"] for peer in each["connected_to"]]
        if name in ("signal", "rlxsignal", "wait", "rlxwait"):
            ids = [_count(block["channels"][0]["channel_ids"][_count(at)]) for at in op["channel_ids"]]
            if name.endswith("signal"):
                for at in ids:  # a relaxed one orders nothing
                    puts = self.puts.pop((device, peers[at]), []) if name == "signal" else []
                    self.signals[device, peers[at]].append((self.clock[device], puts))
            elif any(len(self.signals[peers[at], device]) < ids.count(at) for at in ids):
                return False
            else:
                self.wait(device, [peers[at] for at in ids], begins=name == "rlxwait")
        elif name == "barrier":
            return self.passed(device, number, op)
        elif name == "put":
            for mine, there in zip(op["src_buff"], op["dst_buff"], strict=True):
                self.put(device, block, mine, there)
        elif name in ("re", "copy"):
            self.take(device, op)
        elif name != "nop":
            self.refuse("ops nop, signal, wait, barrier, put, copy and re alone", repr(name))
        return True

    def passed(self, device: int, number: int, op: Json) -> bool:
        """Whether all thread blocks have come to a barrier; each of them asks again until they have."""
        key = (device, _count(op["barrier_id"]))
        self.barriers[key] |= 1 << number
        return self.barriers[key].bit_count() >= max(1, _count(op["num_threadblocks"]))

    def put(self, device: int, block: Json, mine: Json, there: Json) -> None:
        """One chunk on its way; it is there when its target has waited for a later signal."""
        number = block["remote_buffer_refs"][0]["remote_buffer_ids"][_count(there["buffer_id"])]
        buffer = self.gpus[device]["remote_buffers"][_count(number)]
        own, at = _count(mine["index"]), _count(there["index"])
        if mine["size"] != 1 or there["size"] != 1 or mine["type"] not in ("i", "o"):
            self.refuse("puts of single chunks of the array", f"{mine} to {there}")
        if buffer["type"] != "s" and own != at:
            self.refuse("every chunk at its place", f"chunk {own} put in place {at}")
        target = _count(buffer["rank"])
        if buffer["type"] == "s":
            if (target, at) in self.used or at >= _count(self.gpus[target]["scratch_chunks"]):
                self.refuse("a place of the scratch buffer for each put", f"place {at} of device {target} for two")
            self.used.add((target, at))
        place = at if buffer["type"] == "s" else None
        self.puts[device, target].append(_Put(device, own, place, self.clock[device], self.changes[device, own]))

    def wait(self, device: int, sources: Sequence[int], begins: bool) -> None:
        """What was put before the signals is there; `begins` for those by which devices say that they have begun."""
        last = self.clock[device]
        for source in sources:
            clock, puts = self.signals[source, device].pop(0)
            last = max(last, clock)
            for put in puts:
                if put.place is None:
                    self.note(put, put.clock, device, False)
                else:
                    self.slots[device, put.place] = put
        self.clock[device] = last if begins else last + 1

    def take(self, device: int, op: Json) -> None:
        """A chunk that has arrived is added or copied."""
        *others, scratch = op["src_buff"]
        [own] = op["dst_buff"]
        key = device, _count(scratch["index"])
        alone = own["size"] == scratch["size"] == 1 and others == ([own] if op["name"] == "re" else [])
        if scratch["type"] != "s" or own["type"] not in ("i", "o") or key not in self.slots or not alone:
            self.refuse("a chunk of the scratch buffer that is copied or added in place", f"{op}")
        put = self.slots.pop(key)
        if put.chunk != own["index"]:
            self.refuse("every chunk at its place", f"chunk {put.chunk} taken in place {own['index']}")
        self.note(put, self.clock[device] - 1, device, op["name"] == "re")

    def note(self, put: _Put, step: int, target: int, reduce: bool) -> None:
        """A message of the table."""
        self.sends.append((Send(step, put.source, target, put.chunk, reduce), put.version))
        self.changes[target, put.chunk] += 1


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise TypeError(f"{value!r}, which is no count")
    return value

"""Tables as the JSON plans that MSCCL++ executes on NVIDIA and AMD GPUs, and back.

A plan is a program for each device: it puts chunks into the memory of others, signals, waits, and adds or copies the
chunks that have arrived.

Source: the format of microsoft/mscclpp, src/core/executor/execution_plan.cc, as it was in August 2026. Plans written
here were run by the interpreter below, not on GPUs.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from shardkit._arguments.typed import typed
from shardkit.collectives.tables.messages import Send
from shardkit.collectives.tables.table import Op, SendTable

_COLLECTIVES: dict[Op, str] = {
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
}
# Limits of the executor.
_MOST_OPS = 64  # of a thread block
_MOST_BLOCKS = 16  # of a device
_MOST_PEERS = 16  # of a device
_MOST_REFS = 8  # chunks of an op
_RESERVED_OPS = 4  # of a thread block, for its barriers
_MOST_CHARACTERS = 2**26

Json = dict[str, Any]
_Pair = tuple[int, int]  # of two devices, or of a device and a chunk, place or barrier
_NOP: Json = {"name": "nop"}  # ends when all threads of the block have come to it


@typed
def to_mscclpp(table: SendTable) -> str:
    """Writes a table as a JSON plan of MSCCL++, in place, for GPUs with links between all of them.

    Raises:
        ValueError: as `SendTable.check`, or more peers or steps than its executor has room for.
    """
    table.check()
    gpus = [_describe_gpu(table, device) for device in range(table.devices)]
    plan = {
        "name": table.name,
        "collective": _COLLECTIVES[table.op],
        "protocol": "Simple",
        "inplace": True,
        "reuse_resources": False,
        "gpus": gpus,
    }
    return json.dumps(plan, indent=1)


# An all_gather puts chunks into the output buffer of the target, where they stay. A reduce_scatter and an all_reduce
# put them into the scratch buffer of the target, each at a place of its own, because the target may still need its
# older chunk. The target adds or copies them from there. Device 0 of an all_reduce over two devices, in its first step:
#
#     put     input chunk 1 -> place 0 of the scratch buffer of device 1
#     nop     all threads have put
#     signal  device 1
#     wait    for device 1
#     nop
#     re      input chunk 0 + place 0 of the scratch buffer -> input chunk 0
#     nop


def _name_buffer(table: SendTable) -> str:
    """The buffer that the table's chunks are in, in place: "o" for the output, "i" for the input."""
    if table.op == "all_gather":
        return "o"
    return "i"


def _describe_gpu(table: SendTable, device: int) -> Json:
    """The program of one device, with the buffers and channels that it needs."""
    peers = _list_peers(table, device)
    steps = [_list_first_ops(peers), *_list_steps(table, device, peers)]
    longest = max(map(len, steps))
    if len(peers) > _MOST_PEERS or longest > _MOST_OPS - _RESERVED_OPS:
        raise ValueError(
            f"{table.name}: a device of an MSCCL++ plan has {_MOST_PEERS} peers and {_MOST_OPS} ops at most; got "
            f"{len(peers)} and {longest} in a step. Write a table of fewer devices or chunks."
        )

    input_chunks = table.chunks
    output_chunks = table.chunks
    if table.op == "all_gather":
        input_chunks = table.chunks // table.devices
    if table.op == "reduce_scatter":
        output_chunks = table.chunks // table.devices
    target_buffer = "o"
    scratch_chunks = 0
    if table.op != "all_gather":  # a place for each chunk that arrives
        target_buffer = "s"
        for send in table.sends:
            scratch_chunks += send.target == device

    block_channels = []
    block_buffers = []
    channels = []
    if peers:
        numbers = list(range(len(peers)))
        block_channels = [{"channel_type": "memory", "channel_ids": numbers}]
        block_buffers = [{"access_channel_type": "memory", "remote_buffer_ids": numbers}]
        channels = [{"channel_type": "memory", "connected_to": peers}]
    blocks = []
    for number, ops in enumerate(_fill_blocks(table, steps)):
        block = {"id": number, "ops": ops, "channels": block_channels, "remote_buffer_refs": block_buffers}
        blocks.append(block)
    remote_buffers = []
    for peer in peers:
        remote_buffers.append({"rank": peer, "type": target_buffer, "access_channel_types": ["memory"]})

    return {
        "id": device,
        "input_chunks": input_chunks,
        "output_chunks": output_chunks,
        "scratch_chunks": scratch_chunks,
        "threadblocks": blocks,
        "channels": channels,
        "remote_buffers": remote_buffers,
        "semaphores": [],
    }


def _list_peers(table: SendTable, device: int) -> list[int]:
    peers = set()
    for send in table.sends:
        if send.source == device:
            peers.add(send.target)
        if send.target == device:
            peers.add(send.source)
    return sorted(peers)


def _list_first_ops(peers: Sequence[int]) -> list[Json]:
    """The first ops: nobody writes into the memory of a device that has not begun."""
    if not peers:
        return [_NOP]
    channels = range(len(peers))
    return [_NOP, _signal("rlxsignal", channels), _NOP, _signal("rlxwait", channels), _NOP]


def _signal(name: str, channels: Iterable[int]) -> Json:
    return {"name": name, "channel_ids": list(channels), "channel_type": "memory"}


def _list_steps(table: SendTable, device: int, peers: Sequence[int]) -> Iterator[list[Json]]:
    """The ops of a device, step by step."""
    used_places: defaultdict[int, int] = defaultdict(int)  # of the scratch buffers, by device
    channels = {peer: number for number, peer in enumerate(peers)}
    for messages in table.by_step:
        puts: list[Json] = []
        takes: list[Json] = []
        targets: list[int] = []  # channels
        sources: list[int] = []
        for message in messages:
            for source, target in message.pairs:
                place = used_places[target]
                chunks = message.sent_rows[source].tolist()
                if source == device:
                    targets.append(channels[target])
                    puts += _put_chunks(table, chunks, channels[target], place)
                if target == device:
                    sources.append(channels[source])
                    takes += _take_chunks(table, chunks, place, message.reduce)
                used_places[target] += message.chunks
        ops = []
        if targets:
            ops += [*_merge_puts(puts), _NOP, _signal("signal", dict.fromkeys(targets))]
        if sources:
            ops += [_signal("wait", dict.fromkeys(sources)), _NOP, *takes]
            if takes:
                ops.append(_NOP)
        yield ops


def _put_chunks(table: SendTable, chunks: Sequence[int], channel: int, place: int) -> Iterator[Json]:
    buffer = _name_buffer(table)
    for number, chunk in enumerate(chunks):
        target_index = place + number
        if table.op == "all_gather":
            target_index = chunk
        source_chunk = {"type": buffer, "index": chunk, "size": 1}
        target_chunk = {"buffer_id": channel, "index": target_index, "size": 1}
        yield {"name": "put", "src_buff": [source_chunk], "dst_buff": [target_chunk], "channel_type": "memory"}


def _take_chunks(table: SendTable, chunks: Sequence[int], place: int, reduce: bool) -> Iterator[Json]:
    if table.op == "all_gather":  # they are in their places
        return
    for number, chunk in enumerate(chunks):
        target = {"type": _name_buffer(table), "index": chunk, "size": 1}
        arrival = {"type": "s", "index": place + number, "size": 1}
        if reduce:
            yield {"name": "re", "src_buff": [target, arrival], "dst_buff": [target]}
        else:
            yield {"name": "copy", "src_buff": [arrival], "dst_buff": [target]}


def _merge_puts(puts: Sequence[Json]) -> list[Json]:
    """Puts of up to eight chunks each."""
    merged = []
    for first in range(0, len(puts), _MOST_REFS):
        group = puts[first : first + _MOST_REFS]
        sources = [put["src_buff"][0] for put in group]
        targets = [put["dst_buff"][0] for put in group]
        merged.append(group[0] | {"src_buff": sources, "dst_buff": targets})
    return merged


def _fill_blocks(table: SendTable, steps: Sequence[list[Json]]) -> list[list[Json]]:
    """Steps in thread blocks of at most 64 ops, each of which begins when the one before has ended."""
    blocks: list[list[Json]] = [[]]
    for ops in steps:
        if len(blocks[-1]) + len(ops) > _MOST_OPS - _RESERVED_OPS:
            # Two blocks meet at the barrier. The nop before it waits for all threads of the first, and the nop behind
            # it holds those of the second, so that no op begins before all earlier ones have ended.
            barrier = {"name": "barrier", "barrier_id": len(blocks) - 1, "num_threadblocks": 2}
            blocks[-1] += [_NOP, barrier]
            blocks.append([barrier, _NOP])
        blocks[-1] += ops
    if len(blocks) > _MOST_BLOCKS:
        raise ValueError(
            f"{table.name}: an MSCCL++ plan has {_MOST_BLOCKS} thread blocks on a device at most, of {_MOST_OPS} ops "
            f"each; got {len(blocks)}. Write a table of fewer steps."
        )
    return blocks


@typed
def from_mscclpp(text: str) -> SendTable:
    """Reads the table of a JSON plan of MSCCL++ with puts, signals, waits, copies and additions.

    Args:
        text: a plan as `to_mscclpp` writes it.

    Returns:
        A checked table of the plan's messages; a step is as early as the signals allow.

    Raises:
        ValueError: another operation, a wait that no signal ends, a place that is written twice, messages without any
            order of steps, or as `SendTable.check`. It does not see races within a device, between thread blocks
            without `nop`.

    Example:
        >>> table = sk.tables.halving("all_reduce", 4)
        >>> sk.tables.from_mscclpp(sk.tables.to_mscclpp(table)) == table
        True
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"from_mscclpp: text must have at most {_MOST_CHARACTERS:,} characters; got {len(text):,}. Pass a smaller "
            "plan."
        )
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"from_mscclpp: text must be JSON; got {error}. Pass the result of to_mscclpp.") from None
    try:
        plan_reader = _PlanReader(plan)
        plan_reader.run_blocks()
        return plan_reader.build_table()
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"from_mscclpp: a plan must have the keys and types of MSCCL++; got none at {error}. Pass a plan that its "
            "executor reads."
        ) from None


class _Put(NamedTuple):
    """A chunk on its way."""

    source: int
    chunk: int
    place: int | None  # in the scratch buffer; None if it goes to its own place in the array
    clock: int  # of the source when it was put
    version: int  # how many messages the source had taken into this chunk by then


class _Block(NamedTuple):
    """A thread block."""

    device: int
    number: int  # among those of all devices
    program: Json


class _PlanReader:
    """Runs the programs of all devices, and notes the source of each chunk when its target takes it.

    A device's clock counts its waits. A chunk that is put straight into the array belongs to the step that its source's
    clock shows when it is put; a chunk from the scratch buffer belongs to the step that its target's clock shows when
    it is taken. After all programs have run, the steps that occur are numbered.
    """

    def __init__(self, plan: Json):
        self.name = str(plan["name"])
        self.gpus = plan["gpus"]
        self.op = self._read_op(plan)
        self.chunks = self._read_chunks()
        self.clock = [0] * len(self.gpus)
        # From a device to another: chunks put since the last signal, and signals that nobody has waited for.
        self.puts: defaultdict[_Pair, list[_Put]] = defaultdict(list)
        self.signals: defaultdict[_Pair, list[tuple[int, list[_Put]]]] = defaultdict(list)
        # By device and barrier, a bit for each block that has come to it.
        self.barriers: defaultdict[_Pair, int] = defaultdict(int)
        # By device, places of the scratch buffers that a put has used, and what is in them.
        self.used_places: set[_Pair] = set()
        self.arrivals: dict[_Pair, _Put] = {}
        # By device and chunk, how many messages the device has taken.
        self.versions: Counter[_Pair] = Counter()
        # Each with the version of its chunk.
        self.sends: list[tuple[Send, int]] = []

    def _read_op(self, plan: Json) -> Op:
        ops = [op for op, name in _COLLECTIVES.items() if name == plan["collective"]]
        if not ops:
            self._refuse("an allgather, reducescatter or allreduce", f"{plan['collective']!r}")
        if plan["inplace"] is not True or plan["protocol"] != "Simple":
            self._refuse("inplace true and protocol Simple", f"{plan['inplace']!r} and {plan['protocol']!r}")
        return ops[0]

    def _read_chunks(self) -> int:
        """The chunks of the whole array, on which all devices must agree."""
        n = len(self.gpus)
        input_pieces = n if self.op == "all_gather" else 1
        output_pieces = n if self.op == "reduce_scatter" else 1
        chunks = set()
        for gpu in self.gpus:
            chunks.add(_check_count(gpu["output_chunks"]) * output_pieces)
            chunks.add(_check_count(gpu["input_chunks"]) * input_pieces)
        ids = [gpu["id"] for gpu in self.gpus]
        if len(chunks) != 1 or ids != list(range(n)):
            self._refuse("devices in their order, with equally many chunks", f"chunks {sorted(chunks)}")
        channel_types = set()
        for gpu in self.gpus:
            for channel in gpu["channels"]:
                channel_types.add(channel["channel_type"])
        if channel_types - {"memory"}:
            self._refuse("memory channels alone", f"{sorted(channel_types)}")
        return chunks.pop()

    def _refuse(self, rule: str, got: str) -> NoReturn:
        raise ValueError(f"from_mscclpp: the plan must have {rule}; got {got}. Pass a plan in which all do.")

    def run_blocks(self) -> None:
        """Runs all thread blocks until each has ended, each as far as it can go before it waits for another."""
        blocks: list[_Block] = []
        for gpu in self.gpus:
            for program in gpu["threadblocks"]:
                blocks.append(_Block(gpu["id"], len(blocks), program))
        waiting = [list(block.program["ops"]) for block in blocks]
        is_running = True
        while is_running:
            is_running = False
            for block, ops in zip(blocks, waiting, strict=True):
                while ops and self._run_op(block, ops[0]):
                    del ops[0]
                    is_running = True
        for block, ops in zip(blocks, waiting, strict=True):
            if ops:
                self._refuse("a signal for every wait", f"none for {ops[0]['name']!r} on device {block.device}")

    def build_table(self) -> SendTable:
        """The table of the messages, checked."""
        steps_of: defaultdict[_Pair, list[int]] = defaultdict(list)  # by target and chunk
        for send, _ in self.sends:
            steps_of[send.target, send.chunk].append(send.step)
        # A message of a table carries what its source had before the step: the sum of all earlier arrivals.
        for send, version in self.sends:
            earlier_arrivals = 0
            for step in steps_of[send.source, send.chunk]:
                if step < send.step:
                    earlier_arrivals += 1
            if earlier_arrivals != version:
                self._refuse("messages that are those of steps", f"an older chunk {send.chunk} of device {send.source}")
        clocks = sorted({send.step for send, _ in self.sends})
        step_of_clock = {clock: step for step, clock in enumerate(clocks)}
        sends = []
        for send, _ in self.sends:
            sends.append(send._replace(step=step_of_clock[send.step]))
        table = SendTable(self.op, len(self.gpus), self.chunks, tuple(sorted(sends)), self.name)
        table.check()
        return table

    def _run_op(self, block: _Block, op: Json) -> bool:
        """Runs an op if it can run, and says whether it did."""
        name = op["name"]
        if name in ("signal", "rlxsignal"):
            peers = self._read_peers(block, op)
            self._signal_peers(block.device, peers, is_relaxed=name == "rlxsignal")
        elif name in ("wait", "rlxwait"):
            peers = self._read_peers(block, op)
            for peer in peers:
                if len(self.signals[peer, block.device]) < peers.count(peer):
                    return False
            self._wait(block.device, peers, is_start=name == "rlxwait")
        elif name == "barrier":
            return self._pass_barrier(block, op)
        elif name == "put":
            for source_chunk, target_chunk in zip(op["src_buff"], op["dst_buff"], strict=True):
                self._put(block, source_chunk, target_chunk)
        elif name in ("re", "copy"):
            self._take(block.device, op)
        elif name != "nop":
            self._refuse("ops nop, signal, wait, barrier, put, copy and re alone", repr(name))
        return True

    def _read_peers(self, block: _Block, op: Json) -> list[int]:
        """The devices that a signal goes to, or that a wait waits for."""
        peers = []
        for channel in self.gpus[block.device]["channels"]:
            peers += channel["connected_to"]
        # An op names a channel by its place in the block's list, which names it by its place in the device's list.
        channel_ids = block.program["channels"][0]["channel_ids"]
        named_peers = []
        for index in op["channel_ids"]:
            channel_id = channel_ids[_check_count(index)]
            named_peers.append(peers[_check_count(channel_id)])
        return named_peers

    def _signal_peers(self, device: int, peers: Sequence[int], is_relaxed: bool) -> None:
        for peer in peers:
            puts: list[_Put] = []
            if not is_relaxed:  # a relaxed signal orders nothing: puts before it may still be on their way
                puts = self.puts.pop((device, peer), [])
            self.signals[device, peer].append((self.clock[device], puts))

    def _pass_barrier(self, block: _Block, op: Json) -> bool:
        """Whether all thread blocks have come to a barrier; each of them asks again until they have."""
        key = (block.device, _check_count(op["barrier_id"]))
        self.barriers[key] |= 1 << block.number
        blocks = _check_count(op["num_threadblocks"])
        return self.barriers[key].bit_count() >= max(1, blocks)

    def _put(self, block: _Block, source_chunk: Json, target_chunk: Json) -> None:
        """Puts one chunk on its way; it is there when its target has waited for a later signal."""
        device = block.device
        buffer_ids = block.program["remote_buffer_refs"][0]["remote_buffer_ids"]
        number = buffer_ids[_check_count(target_chunk["buffer_id"])]
        buffer = self.gpus[device]["remote_buffers"][_check_count(number)]
        chunk = _check_count(source_chunk["index"])
        index = _check_count(target_chunk["index"])
        is_single = source_chunk["size"] == target_chunk["size"] == 1
        if not is_single or source_chunk["type"] not in ("i", "o"):
            self._refuse("puts of single chunks of the array", f"{source_chunk} to {target_chunk}")
        to_scratch = buffer["type"] == "s"
        if not to_scratch and chunk != index:
            self._refuse("every chunk at its place", f"chunk {chunk} put in place {index}")
        target = _check_count(buffer["rank"])
        place = None
        if to_scratch:
            place = index
            places = _check_count(self.gpus[target]["scratch_chunks"])
            if (target, index) in self.used_places or index >= places:
                self._refuse("a place of the scratch buffer for each put", f"place {index} of device {target} for two")
            self.used_places.add((target, index))
        version = self.versions[device, chunk]
        put = _Put(device, chunk, place, self.clock[device], version)
        self.puts[device, target].append(put)

    def _wait(self, device: int, sources: Sequence[int], is_start: bool) -> None:
        """Ends a wait: chunks put before the signals have arrived; `is_start` if the signals only say "begun"."""
        latest = self.clock[device]
        for source in sources:
            clock, puts = self.signals[source, device].pop(0)
            latest = max(latest, clock)
            for put in puts:
                if put.place is None:
                    self._note_send(put, put.clock, device, reduce=False)
                else:
                    self.arrivals[device, put.place] = put
        if not is_start:
            latest += 1
        self.clock[device] = latest

    def _take(self, device: int, op: Json) -> None:
        """Adds or copies a chunk that has arrived."""
        *addends, arrival = op["src_buff"]
        [result] = op["dst_buff"]
        adds = op["name"] == "re"
        key = device, _check_count(arrival["index"])
        is_single = result["size"] == arrival["size"] == 1
        is_in_place = not addends
        if adds:
            is_in_place = addends == [result]
        from_scratch = arrival["type"] == "s" and key in self.arrivals
        if result["type"] not in ("i", "o") or not from_scratch or not is_single or not is_in_place:
            self._refuse("a chunk of the scratch buffer that is copied or added in place", f"{op}")
        put = self.arrivals.pop(key)
        if put.chunk != result["index"]:
            self._refuse("every chunk at its place", f"chunk {put.chunk} taken in place {result['index']}")
        self._note_send(put, self.clock[device] - 1, device, reduce=adds)

    def _note_send(self, put: _Put, step: int, target: int, reduce: bool) -> None:
        send = Send(step, put.source, target, put.chunk, reduce)
        self.sends.append((send, put.version))
        self.versions[target, put.chunk] += 1


def _check_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_CHARACTERS:
        raise TypeError(f"{value!r}, which is no count")
    return value

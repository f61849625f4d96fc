"""The newest step that the hosts together have whole, and a state from it on another mesh."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._check import counted
from shardkit.partitioning.storage import is_padded
from shardkit.runtime.checkpoint.portable import from_portable, leaf_record, leaves_of, to_read
from shardkit.runtime.checkpoint.record import Run, parse_record
from shardkit.runtime.checkpoint.residuals import Residuals, compared
from shardkit.runtime.snapshots.folder import Place, Stored, intact, steps_of
from shardkit.runtime.snapshots.moving import exchange, to_all
from shardkit.runtime.snapshots.pieces import Grid, Region, filled, moves
from shardkit.runtime.snapshots.planned import firsts
from shardkit.state import TrainState


class Found(NamedTuple):
    """A step that the hosts together have whole.

    Attributes:
        name: of its folder.
        run: the run that saved it.
        records: of the leaves, as in a checkpoint.
        grids: how each array is cut.
        have: bool [hosts, pieces]: which host has which piece.
        places: where this host has its pieces.
    """

    name: str
    run: Run
    records: dict[str, Any]
    grids: dict[str, Grid]
    have: np.ndarray
    places: dict[int, Place]


def numbered(hosts: Sequence[str]) -> list[int]:
    """The host of each process as a number."""
    names = sorted(set(hosts))
    return [names.index(host) for host in hosts]


def find(folder: Path, hosts: Sequence[str]) -> Found | None:
    """The newest whole step, on which all processes agree; None without one. A step that is not whole is a warning."""
    stored = steps_of(folder)
    names = {name for message in exchange(json.dumps(list(stored)).encode()) for name in json.loads(message)}
    for name in sorted(names, reverse=True):
        found = _whole(name, stored.get(name), hosts)
        if found is not None:
            return found
    return None


def _whole(name: str, stored: Stored | None, hosts: Sequence[str]) -> Found | None:
    """A step, if the hosts together have all of its pieces; each process checks a part of its host's."""
    process = jax.process_index()
    together = [other for other, host in enumerate(hosts) if host == hosts[process]]
    places = stored.places if stored else {}
    part = {number: places[number] for number in sorted(places)[together.index(process) :: len(together)]}
    right = intact(part)
    messages = exchange(json.dumps([stored is not None, sorted(right)]).encode())
    reports = [json.loads(message) for message in messages]
    document = _from_first(stored, [has for has, _ in reports])
    run, records = parse_record(document["run"])
    grids = {path: Grid.of_json(*grid) for path, grid in zip(records, document["grids"], strict=True)}
    have = np.zeros((len(set(hosts)), firsts(grids)[""]), bool)
    for host, (_, numbers) in zip(numbered(hosts), reports, strict=True):
        have[host, numbers] = True
    lost = int((~have.any(axis=0)).sum())
    if lost or len(right) < len(part):
        damaged = f"{counted(len(part) - len(right), 'piece')} on this host damaged" if len(right) < len(part) else ""
        without = f"{counted(lost, 'piece')} of {have.shape[1]} lost" if lost else ""
        then = "It is left out." if lost else "Other hosts have the same pieces."
        what = " and ".join(filter(None, [damaged, without]))
        warnings.warn(f"restore: step {run.step} in memory has {what}. {then}", RuntimeWarning, stacklevel=5)
    return None if lost else Found(name, run, records, grids, have, places)


def _from_first(stored: Stored | None, has: Sequence[bool]) -> dict[str, Any]:
    """The record of the first process that has one."""
    first = has.index(True)
    text = json.dumps(stored.document).encode() if stored else b""
    sizes = [int(size) for size in exchange(str(len(text)).encode())]
    own = {0: lambda: np.frombuffer(text, np.uint8)} if jax.process_index() == first else {}
    found: dict[str, Any] = json.loads(to_all(sizes[first : first + 1], own, {0})[0].tobytes())
    return found


def restored(found: Found, target: TrainState, hosts: Sequence[str], residuals: Residuals) -> TrainState:
    """The state of a step with the shardings of a target.

    Raises:
        ValueError: its leaves, shapes or dtypes differ from the target's.
    """
    leaves = leaves_of("restore", target)
    where = f"restore: step {found.run.step} in memory"
    records = compared(where, found.records, {path: leaf_record(x) for path, x in leaves.items()}, residuals)
    wanted = to_read(leaves, records)
    pieces = _pieces(found, wanted, hosts)
    arrays = {path: _array(x, found.grids[path], pieces[path]) for path, x in wanted.items()}
    treedef = jax.tree.structure(target, is_leaf=is_padded)
    return jax.tree.unflatten(treedef, from_portable(arrays, leaves, records).values())


def _pieces(
    found: Found, wanted: Mapping[str, jax.ShapeDtypeStruct], hosts: Sequence[str]
) -> dict[str, dict[int, np.ndarray]]:
    """For each array the pieces that this process needs: its host's, and from others what that lacks."""
    begins, have = firsts(found.grids), found.have
    total = begins.pop("")
    needs = np.zeros(total, bool)
    for path, x in wanted.items():
        for index in x.sharding.addressable_devices_indices_map(x.shape).values():
            needs[[begins[path] + number for number in found.grids[path].touching(_region(index, x.shape))]] = True
    every = [np.frombuffer(bits, np.uint8) for bits in exchange(np.packbits(needs).tobytes())]
    all_needs = np.stack([np.unpackbits(bits, count=total) for bits in every]).astype(bool)
    process, numbers = jax.process_index(), numbered(hosts)
    moved = moves(have, numbers, all_needs)
    of = {begins[path] + number: (path, number) for path, grid in found.grids.items() for number in range(grid.total)}
    sizes = [found.grids[of[piece][0]].nbytes for piece, _ in moved]
    mine = {index: found.places[piece].read for index, (piece, sender) in enumerate(moved) if sender == process}
    here = have[numbers[process]]
    lacks = {index for index, (piece, _) in enumerate(moved) if needs[piece] and not here[piece]}
    received = to_all(sizes, mine, lacks)
    data = {moved[index][0]: bits for index, bits in received.items()}
    data |= {piece: found.places[piece].read() for piece in np.flatnonzero(needs & here).tolist()}
    pieces: dict[str, dict[int, np.ndarray]] = {path: {} for path in wanted}
    for piece, bits in data.items():
        path, number = of[piece]
        grid = found.grids[path]
        pieces[path][number] = bits.view(jnp.dtype(grid.dtype)).reshape(grid.piece)
    return pieces


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _array(x: jax.ShapeDtypeStruct, grid: Grid, pieces: dict[int, np.ndarray]) -> jax.Array:
    def shard(index: Any) -> np.ndarray:
        return filled(_region(index, x.shape), x.dtype, grid, pieces)

    return jax.make_array_from_callback(x.shape, x.sharding, shard, dtype=x.dtype)

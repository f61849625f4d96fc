"""Detects silent corruption: repeats a step on exchanged devices, and compares the bits of every shard.

A shard depends on its place in the mesh, not on the device that is there. So the same step over the same mesh with its
devices in another order gives the same bits in each place; a difference is a fault of some device, or a program whose
bits depend on the order of devices. Faults of memory while a state waits are found by checksums before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import apart, at_least, counted, either, mesh_in_context, sized
from shardkit._arguments.typed import typed
from shardkit.collectives.permute import permuted
from shardkit.runtime.data.checksums import shard_checksums
from shardkit.runtime.data.reading import on_mesh
from shardkit.steps.step import NonFiniteError

Order = tuple[int, ...]  # for each place in the mesh, row by row, the place whose device works there
Cause = Literal["stored", "permanent", "step", "replay", "order", "unrepeatable"]
_LISTED = 8


class Corruption(NamedTuple):
    """A leaf with wrong bits.

    Attributes:
        path: the leaf of the state after the step, or `metrics.NAME`.
        coordinates: where it is wrong, by mesh axis, without axes along which that is several places.
        devices: the ids of those that may have caused it, mostly one; () if it may be any.
        processes: their processes.
        cause: "stored", it changed between two steps; "permanent", the device gives other bits whenever it runs;
            "step", once, in the step; "replay", once, in its replay, so that the state is right; "order", the bits
            change with the devices, whichever are exchanged; "unrepeatable", they differ on the same devices too.
    """

    path: str
    coordinates: dict[str, int]
    devices: tuple[int, ...]
    processes: tuple[int, ...]
    cause: Cause

    def __str__(self) -> str:
        return f"{self.place}{f', {self.suspects}' if self.devices else ''}"

    @property
    def place(self) -> str:
        """The leaf, and where it is wrong."""
        return f"{self.path} at {sized(self.coordinates.items())}" if self.coordinates else self.path

    @property
    def suspects(self) -> str:
        """The devices that may have caused it, in words."""
        pairs = zip(self.devices, self.processes, strict=True)
        named = [f"device {device} (process {process})" for device, process in pairs]
        return either(named or ["a device that cannot be told"])


class CorruptionError(RuntimeError):
    """A state changed, or a step gave other bits when it was repeated; `corruptions` lists the leaves."""

    def __init__(self, message: str, corruptions: list[Corruption]):
        super().__init__(message)
        self.corruptions = corruptions


class Replay:
    """A training step that is repeated on exchanged devices after every n-th call, and whose state is watched.

    A call takes the step. When it is due, the step is repeated from a copy of the state, on the mesh with its devices
    rotated by one, and the checksums of all shards are compared, place by place. If one differs, further repetitions
    tell whether the fault is permanent, and which device has it. Besides, every call compares the state with what the
    call before returned; the differences are read when a step is due. Every process of the mesh must call it.

    It cannot find a fault that all devices share; nor, on one device, a permanent one. Of two devices it names both. A
    fault that occurs once is named with its device only where it has not spread, as a gradient does in its reduction.
    The bits must not depend on the order of devices: sums over links that a library orders itself may, such as those of
    NCCL (then pass `rotate=False`, which repeats the step on the same devices, or build it with `deterministic`), as do
    GPU kernels without `XLA_FLAGS=--xla_gpu_deterministic_ops=true`.

    Args:
        step: `(state, batch) -> (state, metrics)`, from `make_train_step`; it may donate the state, and be watched by a
            guard.
        build: a function of a mesh that returns the same step over it. It must not close over arrays on the mesh.
        mesh: the mesh of the step; by default that of `jax.set_mesh`.
        every: repeat every so many steps: those whose number, counted from 1, it divides.
        rotate: exchange the devices; False: repeat on the same ones, which finds faults that occur once.
        stored: compare the state with what the step before returned.
        first_step: the number of the next step, counted from 0, where a run resumes.

    Raises:
        ValueError: every is below 1, or first_step below 0.
        TypeError: from a call, a leaf of the state or the metrics that is not an array over the mesh.
        CorruptionError: from a call, or from `check`: on every process, with the step, the devices and the leaves.

    Cost: every call, two checksums of the state: reading it twice, and an all_gather of 4 bytes per leaf for each. A
        due call, another step, two more states and another batch in memory, and 4 messages of a shard for each leaf;
        the first one compiles the step for the other order. A fault, up to log2(n) + 4 steps, and as many compilations.

    Example:
        >>> grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean(params["w"] * batch))
        >>> build = lambda mesh: sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
        >>> init, step = build(mesh)
        >>> step = sk.runtime.Replay(step, lambda mesh: build(mesh).step, mesh=mesh, every=2)
        >>> state = init({"w": jnp.float32(1)}, jax.random.key(0))
        >>> for _ in range(2):
        ...     state, metrics = step(state, np.float32([1, 2, 3, 4]))
        >>> step.check()
    """

    @typed
    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        build: Callable[[Mesh], Callable[[Any, Any], tuple[Any, Any]]],
        *,
        mesh: Mesh | None = None,
        every: int = 100,
        rotate: bool = True,
        stored: bool = True,
        first_step: int = 0,
    ):
        mesh = mesh_in_context("Replay", mesh)
        at_least("Replay", 1, every=every)
        at_least("Replay", 0, first_step=first_step)
        self._step, self._build, self._mesh, self._every = step, build, mesh, every
        self._rotated = tuple((place + rotate) % mesh.size for place in range(mesh.size))
        self._steps: dict[Order, Callable[[Any, Any], tuple[Any, Any]]] = {}
        self._stored = stored
        self._number = first_step  # of the next step
        self._returned: tuple[Any, Any, list[str]] | None = None  # leaves of the last state, their checksums and paths
        self._unread: list[tuple[int, list[str], Any, Any]] = []  # step, paths, checksums before and after

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Takes the step; repeats it if that is due."""
        self._compare(state)
        due = (self._number + 1) % self._every == 0
        if not due:
            taken = self._step(state, batch)
        else:
            self.check()
            kept = sent(state, tuple(range(self._mesh.size)))
            taken = self._step(state, batch)
            self._raise(self._number, self._search(kept, batch, _bits(taken)))
        if self._stored:
            paths, sums = _checksums(taken[0])
            self._returned = jax.tree.leaves(taken[0]), sums, paths
        self._number += 1
        return taken

    def check(self) -> None:
        """Reads the comparisons of the states since the last due step; for use before a state is saved.

        Raises:
            CorruptionError: a state changed between two calls.
        """
        unread, self._unread = self._unread, []
        for step, paths, after, before in unread:
            wrong = _on_host(after) != _on_host(before)
            self._raise(step, list(self._found(paths, wrong, tuple(range(self._mesh.size)), "stored")))

    def _compare(self, state: Any) -> None:
        """Takes the checksums of a state again, if it is the one that the last call returned."""
        if self._returned is None:
            return
        leaves, after, paths = self._returned
        given = jax.tree.leaves(state)
        # Another array is another state, which was restored or changed on purpose. The same has the same bits for ever.
        if len(leaves) == len(given) and all(a is b for a, b in zip(leaves, given, strict=True)):
            self._unread.append((self._number, paths, after, _checksums(state)[1]))

    def _search(self, kept: Any, batch: Any, first: tuple[list[str], np.ndarray]) -> list[Corruption]:
        """What is wrong with a step that was taken from the state `kept` and gave the bits `first`."""
        paths, taken = first
        same = tuple(range(self._mesh.size))

        def repeated(order: Order) -> np.ndarray:
            return _bits(self._taken(order, kept, batch))[1]

        replayed = repeated(self._rotated)
        if np.array_equal(taken, replayed):
            return []
        again = repeated(same)
        if np.array_equal(again, replayed):
            return list(self._found(paths, taken != again, same, "step"))
        if not np.array_equal(again, taken):
            return list(self._found(paths, taken != again, same, "unrepeatable", ()))
        replayed_again = repeated(self._rotated)
        if np.array_equal(replayed_again, taken):
            return list(self._found(paths, taken != replayed, self._rotated, "replay"))
        if not np.array_equal(replayed_again, replayed) or self._rotated == same:
            return list(self._found(paths, taken != replayed, self._rotated, "unrepeatable", ()))
        suspects = _permanent(self._mesh.size, lambda order: not np.array_equal(repeated(order), taken))
        return list(self._found(paths, taken != replayed, same, "permanent" if suspects else "order", suspects))

    def _taken(self, order: Order, kept: Any, batch: Any) -> tuple[Any, Any]:
        """The step from a copy of a state, in another order of devices."""
        mesh = exchanged(self._mesh, order)
        state, batch = sent(kept, order), sent(batch, order)
        with apart(mesh):
            step = self._steps.get(order) or self._build(mesh)
            if order == self._rotated:  # the others are of use once
                self._steps[order] = step
            try:
                return step(state, batch)
            except NonFiniteError as error:
                return error.state, error.metrics

    def _found(
        self, paths: list[str], wrong: np.ndarray, order: Order, cause: Cause, suspects: tuple[int, ...] | None = None
    ) -> Iterator[Corruption]:
        """A Corruption for each leaf with a shard that is wrong, uint32 [devices, leaves].

        `suspects` are places whose devices may have caused it; None: those of the shards, unless it is all of them.
        """
        mesh = exchanged(self._mesh, order)
        for path, places in zip(paths, wrong.T, strict=True):
            if not places.any():
                continue
            at = tuple(np.flatnonzero(places).tolist())
            by = (at if len(at) < mesh.size or mesh.size == 1 else ()) if suspects is None else suspects
            own = by if len(by) == 1 and by[0] in at and len(at) <= 2 else at  # it was in two places
            where = np.transpose(np.unravel_index(own, mesh.devices.shape))
            coordinates = {
                axis: int(indices[0])
                for axis, indices in zip(mesh.axis_names, where.T, strict=True)
                if (indices == indices[0]).all() and mesh.shape[axis] > 1
            }
            devices = [mesh.devices.flat[place] for place in by]
            ids, processes = tuple(each.id for each in devices), tuple(each.process_index for each in devices)
            yield Corruption(path, coordinates, ids, processes, cause)

    def _raise(self, step: int, found: list[Corruption]) -> None:
        if not found:
            return
        self._returned = None
        before, by, after = _SAID[found[0].cause]
        one = len({each.devices for each in found}) == 1
        leaves = "; ".join(each.place if one else str(each) for each in found[:_LISTED])
        more = f"; and {counted(len(found) - _LISTED, 'more', '')}" if len(found) > _LISTED else ""
        suspects = by.format(found[0].suspects) if one else ""
        raise CorruptionError(f"Replay: {before.format(step)} in {leaves}{more}{suspects}. {after}", found)


_ONCE = "a step must have the same bits whichever device computes which shard; "
_OUT = "Restore the last checkpoint, and take the device out of the mesh."
_AGAIN = "Restore the last checkpoint; if it happens again, take the device out of the mesh."
_GPU = "On GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true"
# For each cause: what was found in which step, the devices, the remedy.
_SAID: dict[Cause, tuple[str, str, str]] = {
    "stored": ("a state must keep its bits between two steps; before step {} they changed", ", on {}", _AGAIN),
    "permanent": (_ONCE + "step {} has other bits", ", which {} gives each time", _OUT),
    "step": (_ONCE + "step {} had other bits once", ", by a fault of {}", _AGAIN),
    "replay": (_ONCE + "the replay of step {} had other bits once", ", by a fault of {}; the step was right", _AGAIN),
    "order": (
        _ONCE + "step {} has other bits whichever devices are exchanged,",
        "",
        f"{_GPU}; pass rotate=False where sums depend on the order of devices, or build the step with deterministic.",
    ),
    "unrepeatable": (
        "a step must have the same bits each time; step {} has other bits on the same devices too,",
        "",
        f"{_GPU}; else restore the last checkpoint, and test the devices one by one.",
    ),
}


def _bits(taken: tuple[Any, Any]) -> tuple[list[str], np.ndarray]:
    """The paths of a step's results, and the checksums of their shards, uint32 [devices, leaves]."""
    state, metrics = taken
    paths, sums = _checksums([state, metrics])
    names = {"0": "", "1": "metrics."}
    return [names[path[:1]] + (path[2:] or "(the whole tree)") for path in paths], _on_host(sums)


def _permanent(count: int, differs: Callable[[Order], bool]) -> tuple[int, ...]:
    """The place whose device is at fault, given whether the bits differ in some order of the devices.

    They differ if the device at fault is among those that are rotated, so each question halves the suspects. Of two
    devices it may be either. () if the bits differ also without it: it is several, or the order itself.
    """
    places = tuple(range(count))
    if count < 3:
        return places

    def rotated(group: Sequence[int]) -> Order:
        after = dict(zip(group, (*group[1:], group[0]), strict=True))
        return tuple(after.get(place, place) for place in places)

    suspects = places
    while len(suspects) > 1:
        half = suspects[: (len(suspects) + 1) // 2]
        trusted = [place for place in places if place not in suspects]
        suspects = (
            half if differs(rotated([*half, *trusted[:1]] if len(half) == 1 else half)) else suspects[len(half) :]
        )
    others = [place for place in places if place not in suspects]
    return () if differs(rotated(others)) else suspects


def exchanged(mesh: Mesh, order: Order) -> Mesh:
    """The mesh with its devices in another order."""
    devices = mesh.devices.reshape(-1)[list(order)].reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def sent(tree: Any, order: Order) -> Any:
    """A copy of the arrays over a mesh on the mesh in this order: each place of it has the same bits as before.

    What is not an array over a mesh, such as a batch in NumPy, is returned as it is.

    Cost: each device sends its shards to another, in one permutation per leaf.
    """
    leaves, structure = jax.tree.flatten(tree)
    over = [k for k, x in enumerate(leaves) if isinstance(getattr(x, "sharding", None), NamedSharding)]
    if not over:
        return tree
    arrays = [leaves[k] for k in over]
    mesh, specs = arrays[0].sharding.mesh, tuple(x.sharding.spec for x in arrays)
    for k, x, pieces in zip(over, arrays, _sent(arrays, mesh=mesh, specs=specs, order=order), strict=True):
        there = NamedSharding(exchanged(mesh, order), x.sharding.spec)
        by_device = {
            piece.device: piece.data.reshape(there.shard_shape(x.shape)) for piece in pieces.addressable_shards
        }
        # In the order of the mesh: for keys, jax does not put them in order itself.
        shards = [by_device[device] for device in there.addressable_devices_indices_map(x.shape)]
        leaves[k] = jax.make_array_from_single_device_arrays(x.shape, there, shards, dtype=x.dtype)
    return jax.tree.unflatten(structure, leaves)


@partial(jax.jit, static_argnames=("mesh", "specs", "order"))
def _sent(arrays: list[jax.Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...], order: Order) -> list[jax.Array]:
    """The shards after they were sent, one after the other along dim 0, also those that are equal."""

    def per_device(arrays: list[jax.Array]) -> list[jax.Array]:
        return permuted([jnp.atleast_1d(x) for x in arrays], mesh.axis_names, list(enumerate(order)))

    every = PartitionSpec(mesh.axis_names)
    return jax.shard_map(per_device, mesh=mesh, in_specs=(list(specs),), out_specs=every)(arrays)


def _checksums(tree: Any) -> tuple[list[str], jax.Array | None]:
    """The paths of the leaves, and the checksum of each shard, uint32 [devices, leaves], on all devices."""
    mesh, leaves = on_mesh("Replay", tree, None)
    if mesh is None:
        return [], None
    specs = tuple(x.sharding.spec for _, x in leaves)
    return [path for path, _ in leaves], shard_checksums([x for _, x in leaves], mesh=mesh, specs=specs)


def _on_host(sums: jax.Array | None) -> np.ndarray:
    """Checksums in NumPy; none on a process that is not in the mesh."""
    return np.asarray(sums) if sums is not None and sums.addressable_shards else np.zeros((0, 0), np.uint32)

"""The wire: known integers through each collective of a step, on its own mesh, while the machine is busy.

A law compares a step with one device on small arrays and a quiet machine. What carries the collectives may be wrong
only at the step's own sizes, or only under load, and then on all replicas alike, which drift detection does not see.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import counted, quoted
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import backends, compat
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, walk
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.step import trace_step

# Those whose operands this check cannot make: offsets that come from data, and values that jax types as unreduced.
_LEFT_OUT = ("ragged_all_to_all", "all_gather_reduced", "unreduced_psum", "unreduced_reduce_scatter")
_PRIMES = (7, 13, 113, 251, 2039, 16381)
_TIMEOUT = 300.0
_CALLS = itertools.count()  # every process makes the same calls, so that the number names one call on all


@dataclass(frozen=True)
class Delivery:
    """What arrived right.

    Attributes:
        collectives: each as "reduce_scatter over 'd', float32[1024]".
        unchecked: those that this check cannot feed.
        devices: how many devices took part.
        rounds: how often each ran, every time with other integers.
        seconds: how long the rounds took, without compilation.
    """

    collectives: tuple[str, ...]
    unchecked: tuple[str, ...]
    devices: int
    rounds: int
    seconds: float

    def __str__(self) -> str:
        if not self.collectives:
            return "wire: this step sends nothing that can be checked" + self._rest()
        lines = [
            f"wire: every element of {counted(len(self.collectives), 'collective')} was right on {self.devices} "
            f"devices, in {counted(self.rounds, 'round')} of {self.seconds:.1f} s beside busy processes" + self._rest()
        ]
        return "\n    ".join([*lines, *self.collectives])

    def _rest(self) -> str:
        return "; unchecked: " + ", ".join(self.unchecked) if self.unchecked else ""


@typed
def wire(step: Callable[..., Any], state: Arrays, batch: Arrays, *, seconds: float = 5.0) -> Delivery:
    """Sends known integers through each collective of a step, and compares every element on every device.

    The step is traced and does not run. Each of its collectives runs as it stands in the program (primitive, axes,
    groups, dims, dtype, shape) on the step's mesh, with integers whose result is exact in that dtype and which each
    device computes for itself, again and again with others. In turn each process comes late and is slow: it shares one
    processor with two busy ones, which it starts and ends. In a job every process calls it, and all end with the same
    verdict. A fault that comes by chance may need more seconds than the default.

    Args:
        step: the step, of shardkit or any function of arrays with `jax.shard_map`.
        state: its first argument.
        batch: its second argument.
        seconds: how long to go on, after compilation; two rounds at the least.

    Returns:
        What was sent, and how often; `print` it.

    Raises:
        AssertionError: an element is wrong; names collective, device and element.
        ValueError: a mesh without devices, or `seconds` that is no positive number.
        RuntimeError: another process of the job did not call it.

    Cost: the step's own bytes in each round.

    Example:
        >>> total = jax.jit(jax.shard_map(lambda s, x: s + jax.lax.psum(x, "model"), mesh=mesh, in_specs=P("model"),
        ...                               out_specs=P("model")))
        >>> print(sk.testing.wire(total, jnp.ones(8), jnp.ones(8), seconds=0.1).collectives[0])
        all_reduce over 'model', float32[2]
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"wire: seconds must be a positive number; got {seconds}. Pass for example seconds=5.0.")
    cases, unchecked = _collectives(trace_step(step, (state, batch)).jaxpr)
    programs = [_Program(mesh, tuple(group)) for mesh, group in _by_mesh(cases).items()]
    names = tuple(str(case) for case in cases)
    devices = max((program.mesh.size for program in programs), default=0)
    if not programs:
        return Delivery(names, unchecked, devices, 0, 0.0)
    call, began = next(_CALLS), time.monotonic()
    for number in itertools.count():
        # Load that delays all alike hides what goes wrong when one is slower than the others, so one process after the
        # other is; then none.
        with _starved(number % (jax.process_count() + 1) == jax.process_index()):
            fault = next((fault for program in programs if (fault := program.fault(number))), "")
        passed = time.monotonic() - began
        verdict, last = _agreed(call, number, fault, number > 0 and passed >= seconds)
        if verdict:
            raise AssertionError(verdict)
        if last:
            return Delivery(names, unchecked, devices, number + 1, passed)
    raise AssertionError


class _Case(NamedTuple):
    """One collective of the step, as it stands in the program."""

    primitive: Any
    params: dict[str, Any]
    aval: Any  # of its operand
    mesh: Mesh
    checked: bool  # whether its shard_map tracks what varies

    @property
    def row(self) -> Any:
        """What is known of the primitive."""
        return registered(self.primitive.name)

    @property
    def axes(self) -> tuple[str, ...]:
        """Its mesh axes in the order in which it counts devices: ppermute in that of the mesh, all others as named."""
        named = tuple(a for key in self.row.axes for a in _names(self.params.get(key)))
        return tuple(a for a in self.mesh.axis_names if a in named) if self.row.kind == "ppermute" else named

    @property
    def groups(self) -> np.ndarray:
        """The places along its axes that exchange with each other, a row each."""
        groups = self.params.get("axis_index_groups")
        places = math.prod(self.mesh.shape[a] for a in self.axes)
        return np.arange(places)[None] if groups is None else np.asarray(groups)

    def __str__(self) -> str:
        return f"{self.row.kind} over {quoted(self.axes)}, {self.aval.dtype}[{','.join(map(str, self.aval.shape))}]"

    def send(self, x: jax.Array) -> jax.Array:
        """The collective itself."""
        out = self.primitive.bind(x, **self.primitive.get_bind_params(self.params))
        return out[0] if self.primitive.multiple_results else out


def _names(axes: Any) -> tuple[str, ...]:
    return tuple(a for a in (axes if isinstance(axes, tuple | list) else (axes,)) if isinstance(a, str))


def _collectives(jaxpr: Any) -> tuple[list[_Case], tuple[str, ...]]:
    """The different collectives of a program that reach another device, and those that cannot be checked."""
    cases: dict[Any, _Case] = {}
    unchecked: dict[str, None] = {}
    for site in walk(jaxpr):
        equation = site.equation
        if compat.reaches_others(equation):
            unchecked[f"a kernel of {site.name}"] = None
        if not kind_of(equation):
            continue
        if site.name.removesuffix("_p") in _LEFT_OUT:
            unchecked[f"{site.name} over {quoted(mesh_axes(equation))}"] = None
            continue
        mesh, checked = _around(site)
        for operand in equation.invars:
            case = _Case(equation.primitive, equation.params, operand.aval, mesh, checked)
            if not _exact(case.aval.dtype):
                unchecked[str(case)] = None
            elif case.groups.shape[1] > 1 and case.aval.size:
                key = (site.name, str(sorted(equation.params.items(), key=str)), operand.aval.str_short(), mesh)
                cases.setdefault(key, case)
    return list(cases.values()), tuple(unchecked)


def _around(site: Site) -> tuple[Mesh, bool]:
    """The mesh of the shard_map around an equation, and whether it checks what varies."""
    while site.name != "shard_map" and site.outer is not None:
        site = site.outer
    mesh = site.equation.params.get("mesh")
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"wire: a step needs a mesh of devices to send anything; got {type(mesh).__name__}. Pass the step that "
            "runs, whose jax.shard_map has a jax.sharding.Mesh."
        )
    return mesh, bool(site.equation.params["check_vma"])


def _by_mesh(cases: Sequence[_Case]) -> dict[Mesh, list[_Case]]:
    groups: dict[Mesh, list[_Case]] = {}
    for case in cases:
        groups.setdefault(case.mesh, []).append(case)
    return groups


def _exact(dtype: Any) -> int:
    """The largest integer up to which a dtype has all, at most that of float32; 0 if there is no way to fill it."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    if jnp.issubdtype(dtype, jnp.bool_):
        return 1
    if jnp.issubdtype(dtype, jnp.integer):
        limit = int(jnp.iinfo(dtype).max)
    else:
        limit = 2 ** (int(jnp.finfo(dtype).nmant) + 1)
    return min(limit, 2**24) if limit >= _PRIMES[0] else 0


class _Integers(NamedTuple):
    """The integers of one collective: what each device sends in a round."""

    case: _Case
    prime: int
    senders: int  # how many of a group send more than 0 at each element, so that a sum stays exact

    @classmethod
    def of(cls, case: _Case) -> _Integers:
        limit, devices = _exact(case.aval.dtype), case.groups.shape[1]
        sums = case.row.kind == "reduce_scatter" or case.row.reduces == "sum"
        addends = devices if sums else 1
        prime = max((p for p in _PRIMES if p * addends <= limit), default=_PRIMES[0])
        return cls(case, prime, min(devices, limit // prime) if sums else devices)

    def __call__(self, device: Any, number: Any) -> jax.Array:
        """int32 of the operand's shape: neighbours, devices and rounds differ at every element, none is 0."""
        place = lax.iota(jnp.uint32, self.case.aval.size).reshape(self.case.aval.shape)
        mixed = place * np.uint32(2654435761)
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
        device, number = device.astype(jnp.uint32), number.astype(jnp.uint32)
        # The mesh's devices are counted, those of a group are consecutive multiples of one step among them.
        values = (mixed % np.uint32(self.prime) + device * np.uint32(5) + number * np.uint32(3)) % np.uint32(self.prime)
        values = values.astype(jnp.int32) + 1
        if self.case.aval.dtype == bool:
            return values % 2
        count = np.uint32(self.case.groups.shape[1])
        return jnp.where((place + device) % count < np.uint32(self.senders), values, 0)

    def typed(self, values: jax.Array) -> jax.Array:
        """In the dtype of the operand; a complex number has its real part as imaginary part too."""
        dtype = self.case.aval.dtype
        if jnp.issubdtype(dtype, jnp.complexfloating):
            part = values.astype(jnp.finfo(dtype).dtype)
            return lax.complex(part, part).astype(dtype)
        return values.astype(dtype)


def _arrives(case: _Case, integers: _Integers, me: jax.Array, number: jax.Array) -> jax.Array:
    """The integers that device `me` must get, computed by itself from those that its group sends."""
    sizes = case.mesh.shape
    strides, stride = {}, 1
    for name in reversed(case.mesh.axis_names):
        strides[name], stride = stride, stride * sizes[name]
    place, offsets, at = jnp.zeros_like(me), np.zeros(1, np.int32), me
    for name in case.axes:
        mine = (me // strides[name]) % sizes[name]
        place, at = place * sizes[name] + mine, at - mine * strides[name]
        offsets = (offsets[:, None] + np.arange(sizes[name], dtype=np.int32) * strides[name]).reshape(-1)
    groups = case.groups
    group, rank = np.zeros(groups.size, np.int32), np.zeros(groups.size, np.int32)
    for index, members in enumerate(groups):
        group[members], rank[members] = index, np.arange(len(members))
    senders = at + jnp.asarray(offsets)[jnp.asarray(groups)[jnp.asarray(group)[place]]]
    mine, count, params = jnp.asarray(rank)[place], groups.shape[1], case.params

    def sent(device: jax.Array) -> jax.Array:
        return integers(device, number)

    def reduced(combine: Callable[..., jax.Array]) -> jax.Array:
        return lax.fori_loop(1, count, lambda j, total: combine(total, sent(senders[j])), sent(senders[0]))

    match case.row.kind:
        case "all_reduce":
            combine = {"sum": jnp.add, "maximum": jnp.maximum, "minimum": jnp.minimum}[case.row.reduces]
            return reduced(combine)
        case "reduce_scatter":
            return _piece(reduced(jnp.add), params["scatter_dimension"], mine, count, params["tiled"])
        case "all_gather":
            return _joined(jax.vmap(sent)(senders), params["all_gather_dimension"], params["tiled"])
        case "all_to_all":  # its primitive is tiled; what is not has dims of size 1 there
            pieces = jax.vmap(lambda device: _piece(sent(device), params["split_axis"], mine, count, True))
            return _joined(pieces(senders), params["concat_axis"], True)
        case "broadcast":
            return sent(senders[params["source"]])
    sources = np.full(count, -1)
    for source, target in params["perm"]:
        sources[target] = source
    source = jnp.asarray(sources)[place]
    return jnp.where(source < 0, 0, sent(senders[source]))


def _piece(x: jax.Array, dim: int, index: jax.Array, count: int, tiled: bool) -> jax.Array:
    if not tiled:
        return lax.dynamic_index_in_dim(x, index, dim, keepdims=False)
    size = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(x, index * size, size, dim)


def _joined(pieces: jax.Array, dim: int, tiled: bool) -> jax.Array:
    """Pieces along dim 0, stacked along `dim` or concatenated."""
    stacked = jnp.moveaxis(pieces, 0, dim)
    if not tiled:
        return stacked
    shape = [*stacked.shape[:dim], stacked.shape[dim] * stacked.shape[dim + 1], *stacked.shape[dim + 2 :]]
    return stacked.reshape(shape)


class _Program:
    """All collectives of one mesh in one program, one after the other, compiled once."""

    def __init__(self, mesh: Mesh, cases: tuple[_Case, ...]):
        self.mesh, self.cases = mesh, cases
        everywhere = PartitionSpec(mesh.axis_names)
        self.layout = NamedSharding(mesh, everywhere)
        checked = all(case.checked for case in cases)
        kernel = jax.shard_map(self._on_device, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=checked)
        self.run = (
            jax.jit(kernel).lower(self._spread(np.arange(mesh.size)), self._spread(np.zeros(mesh.size))).compile()
        )

    def _spread(self, values: np.ndarray) -> jax.Array:
        values = values.astype(np.int32)
        return jax.make_array_from_callback(values.shape, self.layout, lambda index: values[index])

    def _on_device(self, device: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        me, now = device[0], number[0]
        places, numbers = [], []
        for case in self.cases:
            integers = _Integers.of(case)
            got = case.send(integers.typed(integers(me, now)))
            want = integers.typed(_arrives(case, integers, me, now))
            assert got.shape == want.shape
            wrong = (got != want).reshape(-1)
            first = jnp.argmax(wrong).astype(jnp.int32)
            place = jnp.stack([wrong.sum(dtype=jnp.int32), first])
            pair = jnp.stack([got.reshape(-1)[first], want.reshape(-1)[first]])
            pair = (pair.real if jnp.iscomplexobj(pair) else pair).astype(jnp.float32)
            # The next collective waits for this verdict: one after the other, with the memory of one.
            now, place, pair = lax.optimization_barrier((now, place, pair))
            places.append(place)
            numbers.append(pair)
        return jnp.stack(places)[None], jnp.stack(numbers)[None]

    def fault(self, number: int) -> str:
        """What is wrong in one round on this process's devices, as a sentence; "" if nothing is."""
        everybody = self._spread(np.arange(self.mesh.size)), self._spread(np.full(self.mesh.size, number))
        places, numbers = self.run(*everybody)
        values = {shard.device: np.asarray(shard.data)[0] for shard in numbers.addressable_shards}
        for shard in places.addressable_shards:
            for case, (wrong, first), pair in zip(
                self.cases, np.asarray(shard.data)[0], values[shard.device], strict=True
            ):
                if wrong:
                    return self._sentence(case, shard.device, int(wrong), int(first), pair, number)
        return ""

    def _sentence(self, case: _Case, device: Any, wrong: int, first: int, pair: np.ndarray, number: int) -> str:
        size = case.aval.size if case.row.kind != "all_gather" else case.aval.size * case.groups.shape[1]
        size //= case.groups.shape[1] if case.row.kind == "reduce_scatter" else 1
        return (
            f"wire: {case}: device {device.id} of process {device.process_index} must get {pair[1]:g} at element "
            f"{first}; got {pair[0]:g}, and {wrong} of its {size} elements are wrong, in round {number}. The step is "
            "as it was written, what carries this collective is not right: update jaxlib or the network's library, or "
            "use another algorithm for it."
        )


@contextmanager
def _starved(now: bool) -> Iterator[None]:
    """Makes this process late, and share one processor with two busy ones, where threads can be bound to one.

    The busy processes end here, or by themselves should this one be killed. Its threads go back to where they were.
    """
    if not now:
        yield
        return
    code = f"import os, time\nend = time.monotonic() + {_TIMEOUT}\n"
    code += f"while time.monotonic() < end and os.getppid() == {os.getpid()}: pass"
    busy: list[subprocess.Popen[bytes]] = []
    before: dict[int, set[int]] = {}
    try:
        for _ in range(2):
            busy.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.DEVNULL))
        if sys.platform == "linux":
            allowed = sorted(os.sched_getaffinity(0))
            processor = allowed[jax.process_index() % len(allowed)]
            for process in busy:
                os.sched_setaffinity(process.pid, {processor})
            for thread in map(int, os.listdir("/proc/self/task")):
                with suppress(OSError):  # it has ended
                    before[thread] = os.sched_getaffinity(thread)
                    os.sched_setaffinity(thread, {processor})
        time.sleep(0.01)
        yield
    finally:
        for thread, processors in before.items():
            with suppress(OSError):
                os.sched_setaffinity(thread, processors)
        for process in busy:
            process.kill()
            process.wait()


def _agreed(call: int, number: int, fault: str, last: bool) -> tuple[str, bool]:
    """The first fault that a process saw, and whether process 0 ends it: the same answer in every process.

    By jax's coordination service, since a collective would trust what is on trial.
    """
    count = jax.process_count()
    if count == 1:
        return fault, last
    here = f"shardkit/wire/{call}/{number}"
    backends.tell_processes(f"{here}/{jax.process_index()}", f"{int(last)}{fault}")
    messages = []
    for process in range(count):
        message = backends.told(f"{here}/{process}", _TIMEOUT)
        if message is None:
            raise RuntimeError(
                f"wire: every process of a job must call it; process {process} did not come to round {number} in "
                f"{_TIMEOUT:g} s. Call wire in each process, with the same step."
            )
        messages.append(message)
    return next((message[1:] for message in messages if message[1:]), ""), messages[0][0] == "1"

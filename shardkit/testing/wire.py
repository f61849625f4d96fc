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
        unchecked = ""
        if self.unchecked:
            unchecked = "; unchecked: " + ", ".join(self.unchecked)
        if not self.collectives:
            return "wire: this step sends nothing that can be checked" + unchecked
        title = (
            f"wire: every element of {counted(len(self.collectives), 'collective')} was right on {self.devices} "
            f"devices, in {counted(self.rounds, 'round')} of {self.seconds:.1f} s beside busy processes{unchecked}"
        )
        return "\n    ".join([title, *self.collectives])


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
    __tracebackhide__ = True
    if not 0 < seconds < math.inf:
        raise ValueError(f"wire: seconds must be a positive number; got {seconds}. Pass for example seconds=5.0.")
    cases, unchecked = _list_collectives(trace_step(step, (state, batch)).jaxpr)
    programs = [_Program(mesh, tuple(group)) for mesh, group in _group_by_mesh(cases).items()]
    names = tuple(str(case) for case in cases)
    devices = max((program.mesh.size for program in programs), default=0)
    if not programs:
        return Delivery(names, unchecked, devices, 0, 0.0)
    call = next(_CALLS)
    start = time.monotonic()
    number = 0
    while True:
        # A load that delays all processes alike hides what goes wrong when one is slower than the others. Therefore one
        # process after the other is slow; then none.
        is_slow = number % (jax.process_count() + 1) == jax.process_index()
        with _starve(is_slow):
            fault = _find_fault(programs, number)
        elapsed = time.monotonic() - start
        verdict, is_last = _agree(call, number, fault, number > 0 and elapsed >= seconds)
        if verdict:
            raise AssertionError(verdict)
        number += 1
        if is_last:
            return Delivery(names, unchecked, devices, number, elapsed)


def _find_fault(programs: Sequence[_Program], number: int) -> str:
    """The first fault of a round, as a sentence; "" if there is none."""
    for program in programs:
        fault = program.find_fault(number)
        if fault:
            return fault
    return ""


class _Case(NamedTuple):
    """One collective of the step, as it stands in the program."""

    primitive: Any
    params: dict[str, Any]
    aval: Any  # of its operand
    mesh: Mesh
    check_vma: bool  # as of its shard_map

    @property
    def row(self) -> Any:
        """What is known of the primitive."""
        return registered(self.primitive.name)

    @property
    def axes(self) -> tuple[str, ...]:
        """Its mesh axes in the order in which it counts devices: ppermute in that of the mesh, all others as named."""
        named: list[str] = []
        for parameter in self.row.axes:
            named += _axis_names(self.params.get(parameter))
        if self.row.kind == "ppermute":
            return tuple(axis for axis in self.mesh.axis_names if axis in named)
        return tuple(named)

    @property
    def groups(self) -> np.ndarray:
        """The indices along its axes that exchange with each other, a row for each group."""
        groups = self.params.get("axis_index_groups")
        if groups is not None:
            return np.asarray(groups)
        devices = math.prod(self.mesh.shape[axis] for axis in self.axes)
        return np.arange(devices)[None]

    def __str__(self) -> str:
        shape = ",".join(map(str, self.aval.shape))
        return f"{self.row.kind} over {quoted(self.axes)}, {self.aval.dtype}[{shape}]"

    def send(self, x: jax.Array) -> jax.Array:
        """The collective itself."""
        out = self.primitive.bind(x, **self.primitive.get_bind_params(self.params))
        return out[0] if self.primitive.multiple_results else out


def _axis_names(axes: Any) -> list[str]:
    """The names in a parameter of a primitive, which may also hold numbers of vmapped dims."""
    if not isinstance(axes, tuple | list):
        axes = (axes,)
    return [axis for axis in axes if isinstance(axis, str)]


def _list_collectives(jaxpr: Any) -> tuple[list[_Case], tuple[str, ...]]:
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
        mesh, check_vma = _find_mesh(site)
        for operand in equation.invars:
            case = _Case(equation.primitive, equation.params, operand.aval, mesh, check_vma)
            if not _largest_integer(case.aval.dtype):
                unchecked[str(case)] = None
            elif case.groups.shape[1] > 1 and case.aval.size:
                key = (site.name, str(sorted(equation.params.items(), key=str)), operand.aval.str_short(), mesh)
                cases.setdefault(key, case)
    return list(cases.values()), tuple(unchecked)


def _find_mesh(site: Site) -> tuple[Mesh, bool]:
    """The mesh of the shard_map around an equation, and whether it checks which values vary."""
    while site.name != "shard_map" and site.outer is not None:
        site = site.outer
    mesh = site.equation.params.get("mesh")
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"wire: a step needs a mesh of devices to send anything; got {type(mesh).__name__}. Pass the step that "
            "runs, whose jax.shard_map has a jax.sharding.Mesh."
        )
    return mesh, bool(site.equation.params["check_vma"])


def _group_by_mesh(cases: Sequence[_Case]) -> dict[Mesh, list[_Case]]:
    groups: dict[Mesh, list[_Case]] = {}
    for case in cases:
        groups.setdefault(case.mesh, []).append(case)
    return groups


def _largest_integer(dtype: Any) -> int:
    """The largest integer up to which a dtype has all, at most that of float32; 0 if there is no way to fill it."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    if jnp.issubdtype(dtype, jnp.bool_):
        return 1
    if jnp.issubdtype(dtype, jnp.integer):
        limit = int(jnp.iinfo(dtype).max)
    else:
        limit = 2 ** (int(jnp.finfo(dtype).nmant) + 1)
    if limit < _PRIMES[0]:
        return 0
    return min(limit, 2**24)


class _Integers(NamedTuple):
    """The integers of one collective that each device sends in a round.

    They lie from 1 to a prime, the largest with which a sum over the group is exact in the operand's dtype. For example
    bfloat16 has all integers up to 256. A sum over 8 devices takes the prime 13, since 8 x 13 = 104 is below 256 and
    8 x 113 is not. Over 64 devices even 7 is too large: then only 256 // 7 = 36 devices send more than 0 at an element,
    others at the next one.
    """

    case: _Case
    prime: int
    senders: int  # how many of a group send more than 0 at each element, so that a sum stays exact

    @classmethod
    def of(cls, case: _Case) -> _Integers:
        """The integers that a collective's dtype can add exactly."""
        limit = _largest_integer(case.aval.dtype)
        devices = case.groups.shape[1]
        adds = case.row.kind == "reduce_scatter" or case.row.reduces == "sum"
        addends = devices if adds else 1
        prime = max((p for p in _PRIMES if p * addends <= limit), default=_PRIMES[0])
        senders = min(devices, limit // prime) if adds else devices
        return cls(case, prime, senders)

    def make(self, device: Any, number: Any) -> jax.Array:
        """int32 of the operand's shape: neighbours, devices and rounds differ at every element, none is 0."""
        element = lax.iota(jnp.uint32, self.case.aval.size).reshape(self.case.aval.shape)
        mixed = element * np.uint32(2654435761)  # multiplications and a shift that spread neighbours apart
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
        device = device.astype(jnp.uint32)
        number = number.astype(jnp.uint32)
        # The mesh's devices are counted, those of a group are consecutive multiples of one step among them.
        prime = np.uint32(self.prime)
        values = (mixed % prime + device * np.uint32(5) + number * np.uint32(3)) % prime
        values = values.astype(jnp.int32) + 1
        if self.case.aval.dtype == bool:
            return values % 2
        devices = np.uint32(self.case.groups.shape[1])
        sends_more_than_zero = (element + device) % devices < np.uint32(self.senders)
        return jnp.where(sends_more_than_zero, values, 0)

    def cast(self, values: jax.Array) -> jax.Array:
        """In the dtype of the operand; a complex number has its real part as imaginary part too."""
        dtype = self.case.aval.dtype
        if jnp.issubdtype(dtype, jnp.complexfloating):
            part = values.astype(jnp.finfo(dtype).dtype)
            return lax.complex(part, part).astype(dtype)
        return values.astype(dtype)


def _compute_result(case: _Case, integers: _Integers, device: jax.Array, number: jax.Array) -> jax.Array:
    """The integers that a device must get, computed by itself from those that its group sends."""
    members, rank = _find_group(case, device)
    params = case.params
    count = case.groups.shape[1]

    def send(member: jax.Array) -> jax.Array:
        return integers.make(member, number)

    def reduce(combine: Callable[..., jax.Array]) -> jax.Array:
        return lax.fori_loop(1, count, lambda j, total: combine(total, send(members[j])), send(members[0]))

    match case.row.kind:
        case "all_reduce":
            combine = {"sum": jnp.add, "maximum": jnp.maximum, "minimum": jnp.minimum}[case.row.reduces]
            return reduce(combine)
        case "reduce_scatter":
            return _take_piece(reduce(jnp.add), params["scatter_dimension"], rank, count, params["tiled"])
        case "all_gather":
            return _join(jax.vmap(send)(members), params["all_gather_dimension"], params["tiled"])
        case "all_to_all":  # its primitive is tiled; without tiles its dims have size 1 there
            pieces = jax.vmap(lambda member: _take_piece(send(member), params["split_axis"], rank, count, True))
            return _join(pieces(members), params["concat_axis"], True)
        case "broadcast":
            return send(members[params["source"]])
    # A ppermute, of which the pairs name devices by their index along the axes: it has no groups, and rank is that.
    sources = np.full(count, -1)
    for source, target in params["perm"]:
        sources[target] = source
    source = jnp.asarray(sources)[rank]
    return jnp.where(source < 0, 0, send(members[source]))


def _find_group(case: _Case, device: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers in the mesh of the devices that exchange with `device`, and its rank among them.

    For example, on a mesh data=2, model=4 along "model": device 6 is at data 1, model 2. Its index along the axes is 2,
    the first device of its row is 4, the offsets along "model" are 0 1 2 3, and the members 4 5 6 7.
    """
    sizes = case.mesh.shape
    strides: dict[str, int] = {}
    stride = 1
    for name in reversed(case.mesh.axis_names):
        strides[name] = stride
        stride = stride * sizes[name]
    index = jnp.zeros_like(device)
    first = device
    offsets = np.zeros(1, np.int32)
    for name in case.axes:
        coordinate = (device // strides[name]) % sizes[name]
        index = index * sizes[name] + coordinate
        first = first - coordinate * strides[name]
        offsets = (offsets[:, None] + np.arange(sizes[name], dtype=np.int32) * strides[name]).reshape(-1)
    group_of_index = np.zeros(case.groups.size, np.int32)
    rank_of_index = np.zeros(case.groups.size, np.int32)
    for group, indices in enumerate(case.groups):
        group_of_index[indices] = group
        rank_of_index[indices] = np.arange(len(indices))
    indices_of_group = jnp.asarray(case.groups)[jnp.asarray(group_of_index)[index]]
    members = first + jnp.asarray(offsets)[indices_of_group]
    return members, jnp.asarray(rank_of_index)[index]


def _take_piece(x: jax.Array, dim: int, index: jax.Array, count: int, tiled: bool) -> jax.Array:
    if not tiled:
        return lax.dynamic_index_in_dim(x, index, dim, keepdims=False)
    size = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(x, index * size, size, dim)


def _join(pieces: jax.Array, dim: int, tiled: bool) -> jax.Array:
    """Pieces along dim 0, stacked along `dim` or concatenated."""
    stacked = jnp.moveaxis(pieces, 0, dim)
    if not tiled:
        return stacked
    shape = [*stacked.shape[:dim], stacked.shape[dim] * stacked.shape[dim + 1], *stacked.shape[dim + 2 :]]
    return stacked.reshape(shape)


class _Program:
    """All collectives of one mesh in one program, one after the other, compiled once."""

    def __init__(self, mesh: Mesh, cases: tuple[_Case, ...]):
        self.mesh = mesh
        self.cases = cases
        spec = PartitionSpec(mesh.axis_names)
        self.layout = NamedSharding(mesh, spec)
        check_vma = all(case.check_vma for case in cases)
        kernel = jax.shard_map(self._run_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        devices = self._spread(np.arange(mesh.size))
        numbers = self._spread(np.zeros(mesh.size))
        self.run = jax.jit(kernel).lower(devices, numbers).compile()

    def _spread(self, values: np.ndarray) -> jax.Array:
        values = values.astype(np.int32)
        return jax.make_array_from_callback(values.shape, self.layout, lambda index: values[index])

    def _run_device(self, devices: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For each collective: how many elements are wrong and the first of them; what it is and should be."""
        device = devices[0]
        number = numbers[0]
        positions = []
        values = []
        for case in self.cases:
            integers = _Integers.of(case)
            actual = case.send(integers.cast(integers.make(device, number)))
            expected = integers.cast(_compute_result(case, integers, device, number))
            assert actual.shape == expected.shape
            is_wrong = (actual != expected).reshape(-1)
            first = jnp.argmax(is_wrong).astype(jnp.int32)
            position = jnp.stack([is_wrong.sum(dtype=jnp.int32), first])
            pair = jnp.stack([actual.reshape(-1)[first], expected.reshape(-1)[first]])
            if jnp.iscomplexobj(pair):
                pair = pair.real
            pair = pair.astype(jnp.float32)
            # The next collective waits for this verdict: one after the other, with the memory of one.
            number, position, pair = lax.optimization_barrier((number, position, pair))
            positions.append(position)
            values.append(pair)
        return jnp.stack(positions)[None], jnp.stack(values)[None]

    def find_fault(self, number: int) -> str:
        """What is wrong in one round on this process's devices, as a sentence; "" if nothing is."""
        devices = self._spread(np.arange(self.mesh.size))
        numbers = self._spread(np.full(self.mesh.size, number))
        positions, values = self.run(devices, numbers)
        values_of_device = {shard.device: np.asarray(shard.data)[0] for shard in values.addressable_shards}
        for shard in positions.addressable_shards:
            positions_here = np.asarray(shard.data)[0]
            values_here = values_of_device[shard.device]
            for case, (wrong, first), pair in zip(self.cases, positions_here, values_here, strict=True):
                if wrong:
                    return self._describe_fault(case, shard.device, int(wrong), int(first), pair, number)
        return ""

    def _describe_fault(self, case: _Case, device: Any, wrong: int, first: int, pair: np.ndarray, number: int) -> str:
        size = case.aval.size
        if case.row.kind == "all_gather":
            size *= case.groups.shape[1]
        if case.row.kind == "reduce_scatter":
            size //= case.groups.shape[1]
        actual, expected = pair
        return (
            f"wire: {case}: device {device.id} of process {device.process_index} must get {expected:g} at element "
            f"{first}; got {actual:g}, and {wrong} of its {size} elements are wrong, in round {number}. The step is "
            "as it was written, what carries this collective is not right: update jaxlib or the network's library, or "
            "use another algorithm for it."
        )


@contextmanager
def _starve(is_slow: bool) -> Iterator[None]:
    """Makes this process late, and share one processor with two busy ones, where threads can be bound to one.

    The busy processes end here, or by themselves should this one be killed. Its threads go back to where they were.
    """
    if not is_slow:
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


def _agree(call: int, number: int, fault: str, is_last: bool) -> tuple[str, bool]:
    """The first fault that a process saw, and whether process 0 ends it: the same answer in every process.

    By jax's coordination service, since a collective would trust what is on trial.
    """
    count = jax.process_count()
    if count == 1:
        return fault, is_last
    key = f"shardkit/wire/{call}/{number}"
    backends.tell_processes(f"{key}/{jax.process_index()}", f"{int(is_last)}{fault}")
    messages = []
    for process in range(count):
        message = backends.told(f"{key}/{process}", _TIMEOUT)
        if message is None:
            raise RuntimeError(
                f"wire: every process of a job must call it; process {process} did not come to round {number} in "
                f"{_TIMEOUT:g} s. Call wire in each process, with the same step."
            )
        messages.append(message)
    ends = messages[0][0] == "1"
    for message in messages:
        if message[1:]:
            return message[1:], ends
    return "", ends

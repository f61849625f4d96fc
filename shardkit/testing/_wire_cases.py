"""Collectives of known integers: the integers that each device sends, and those that it must get.

Worked example, a psum of float32[2] over data=2. The integers lie from 1 to the prime 16381; here from 1 to 7:

    device 0 sends       [3, 6]     made from its number, the element and the round
    device 1 sends       [1, 4]
    the psum gives       [4, 10]    on both
    each device expects  [4, 10]    it makes the integers of both devices itself, and adds them, without sending

A wrong element differs, because all sums are exact in the dtype of the operand. In the next round all integers are
different, so that an element left over from an old round is wrong too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, walk
from shardkit._jax.primitives import registered
from shardkit.meshes.layout import count_devices

# Collectives for which this check cannot make operands: offsets that come from data, values typed as unreduced.
_LEFT_OUT = ("ragged_all_to_all", "all_gather_reduced", "unreduced_psum", "unreduced_reduce_scatter")
_PRIMES = (7, 13, 113, 251, 2039, 16381)
_COMBINE = {"sum": jnp.add, "maximum": jnp.maximum, "minimum": jnp.minimum}


class WireCase(NamedTuple):
    """One collective of the step, as it stands in the program."""

    primitive: Any
    params: dict[str, Any]
    aval: Any  # of its operand
    mesh: Mesh
    check_vma: bool  # as of its shard_map

    @property
    def row(self) -> Any:
        """The row of the primitive in `_jax/primitives.py`."""
        return registered(self.primitive.name)

    @property
    def axes(self) -> tuple[str, ...]:
        """Its mesh axes in the order in which it numbers devices: in a ppermute the mesh's order, else as named."""
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
        devices = count_devices(self.mesh, self.axes)
        return np.arange(devices)[None]

    def __str__(self) -> str:
        shape = ",".join(map(str, self.aval.shape))
        return f"{self.row.kind} over {quote(self.axes)}, {self.aval.dtype}[{shape}]"

    def send(self, x: jax.Array) -> jax.Array:
        """The collective itself."""
        out = self.primitive.bind(x, **self.primitive.get_bind_params(self.params))
        if self.primitive.multiple_results:
            (out,) = out
        return out


def _axis_names(axes: Any) -> list[str]:
    """The names in a parameter of a primitive, which may also hold numbers of vmapped dims."""
    if not isinstance(axes, tuple | list):
        axes = (axes,)
    return [axis for axis in axes if isinstance(axis, str)]


def list_collectives(jaxpr: Any) -> tuple[list[WireCase], tuple[str, ...]]:
    """The collectives of a program that reach another device, each once; and names of collectives without a check."""
    cases: dict[Any, WireCase] = {}
    unchecked: dict[str, None] = {}
    for site in walk(jaxpr):
        equation = site.equation
        if compat.reaches_others(equation):
            unchecked[f"a kernel of {site.name}"] = None
        if not kind_of(equation):
            continue
        if site.name.removesuffix("_p") in _LEFT_OUT:
            unchecked[f"{site.name} over {quote(mesh_axes(equation))}"] = None
            continue
        mesh, check_vma = _find_mesh(site)
        # A psum of several arrays at once is checked array by array.
        for operand in equation.invars:
            aval = operand.aval
            case = WireCase(equation.primitive, equation.params, aval, mesh, check_vma)
            members = case.groups.shape[1]
            if not _find_largest_integer(aval.dtype):
                unchecked[str(case)] = None
            elif members > 1 and aval.size > 0:
                # As text, because a parameter may be a list or another value without a hash.
                params = str(sorted(equation.params.items(), key=str))
                cases.setdefault((site.name, params, aval.str_short(), mesh), case)
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


def group_by_mesh(cases: Sequence[WireCase]) -> dict[Mesh, list[WireCase]]:
    """The collectives of each mesh, which run in one program."""
    groups: dict[Mesh, list[WireCase]] = {}
    for case in cases:
        groups.setdefault(case.mesh, []).append(case)
    return groups


def _find_largest_integer(dtype: Any) -> int:
    """The largest n such that a dtype has all integers up to n, at most 2**24 as in float32; 0 of an unusable dtype."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    if jnp.issubdtype(dtype, jnp.bool_):
        return 1
    if jnp.issubdtype(dtype, jnp.integer):
        limit = int(jnp.iinfo(dtype).max)
    else:
        # The first bit of a mantissa is not stored: float32 stores 23 bits, and has all integers up to 2**24.
        limit = 2 ** (int(jnp.finfo(dtype).nmant) + 1)
    if limit < _PRIMES[0]:
        return 0
    return min(limit, 2**24)


def _find_prime(limit: int) -> int:
    """The largest of the primes up to a limit; the smallest prime if the limit is below it."""
    prime = _PRIMES[0]
    for candidate in _PRIMES:  # they ascend
        if candidate <= limit:
            prime = candidate
    return prime


class WireIntegers(NamedTuple):
    """The integers of one collective that each device sends in a round.

    They lie from 1 to a prime, the largest with which a sum over the group is exact in the operand's dtype. For example
    bfloat16 has all integers up to 256. A sum over 8 devices takes the prime 13, since 8 x 13 = 104 is below 256 and
    8 x 113 is not. Over 64 devices even 7 is too large: then only 256 // 7 = 36 devices send more than 0 at an element,
    others at the next one.
    """

    case: WireCase
    prime: int
    senders: int  # how many of a group send more than 0 at each element, so that a sum stays exact

    @classmethod
    def of(cls, case: WireCase) -> WireIntegers:
        """The integers that a collective's dtype can add exactly."""
        limit = _find_largest_integer(case.aval.dtype)
        devices = case.groups.shape[1]
        adds = case.row.kind == "reduce_scatter" or case.row.reduces == "sum"
        if not adds:
            return cls(case, _find_prime(limit), devices)
        prime = _find_prime(limit // devices)  # a sum of all devices' integers must be exact too
        return cls(case, prime, min(devices, limit // prime))

    def make(self, device: Any, number: Any) -> jax.Array:
        """int32 of the operand's shape: neighbours, devices and rounds differ at every element, none is 0."""
        element = lax.iota(jnp.uint32, self.case.aval.size).reshape(self.case.aval.shape)
        mixed = element * np.uint32(2654435761)  # multiplications and a shift that spread neighbours apart
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
        device = device.astype(jnp.uint32)
        number = number.astype(jnp.uint32)
        prime = np.uint32(self.prime)
        # 5 and 3 divide none of the primes: the next device, and the next round, have another integer at each element.
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


def _compute_result(case: WireCase, integers: WireIntegers, device: jax.Array, number: jax.Array) -> jax.Array:
    """The integers that a device must get. The device computes them alone, from the integers that its group sends."""
    members, rank = _find_group(case, device)
    params = case.params
    count = case.groups.shape[1]

    def send(member: jax.Array) -> jax.Array:
        return integers.make(member, number)

    def reduce(combine: Callable[..., jax.Array]) -> jax.Array:
        # One member after the other: the integers of all at once would need the memory of `count` operands.
        def combine_with_next(j: Any, total: jax.Array) -> jax.Array:
            return combine(total, send(members[j]))

        return lax.fori_loop(1, count, combine_with_next, send(members[0]))

    match case.row.kind:
        case "all_reduce":
            return reduce(_COMBINE[case.row.reduces])
        case "reduce_scatter":
            total = reduce(jnp.add)
            return _take_piece(total, params["scatter_dimension"], rank, count, params["tiled"])
        case "all_gather":
            pieces = jax.vmap(send)(members)
            return _join(pieces, params["all_gather_dimension"], params["tiled"])
        case "all_to_all":  # its primitive is tiled; without tiles its dims have size 1 there

            def send_piece(member: jax.Array) -> jax.Array:
                return _take_piece(send(member), params["split_axis"], rank, count, True)

            return _join(jax.vmap(send_piece)(members), params["concat_axis"], True)
        case "broadcast":
            return send(members[params["source"]])
    # A ppermute: its pairs name devices by their index along the axes. It has no groups, so that rank is this index.
    # -1 stays where no device sends to: jax gives zeros there. For example, the pairs (0, 1) and (1, 2) of 3 devices
    # give the sources -1 0 1.
    sources = np.full(count, -1)
    for source, target in params["perm"]:
        sources[target] = source
    source = jnp.asarray(sources)[rank]
    return jnp.where(source < 0, 0, send(members[source]))


def _find_group(case: WireCase, device: jax.Array) -> tuple[jax.Array, jax.Array]:
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
        # As the digits of a number: data 1 and model 2, of sizes 2 and 4, are 1 * 4 + 2 = 6.
        index = index * sizes[name] + coordinate
        first = first - coordinate * strides[name]
        offsets_along_axis = np.arange(sizes[name], dtype=np.int32) * strides[name]
        offsets = (offsets[:, None] + offsets_along_axis).reshape(-1)
    # Of axis_index_groups [[0, 2], [1, 3]], index 2 is in group 0 and has the rank 1 there.
    group_of_index = np.zeros(case.groups.size, np.int32)
    rank_of_index = np.zeros(case.groups.size, np.int32)
    for group, indices in enumerate(case.groups):
        group_of_index[indices] = group
        rank_of_index[indices] = np.arange(len(indices))
    indices_of_group = jnp.asarray(case.groups)[jnp.asarray(group_of_index)[index]]
    members = first + jnp.asarray(offsets)[indices_of_group]
    return members, jnp.asarray(rank_of_index)[index]


def _take_piece(x: jax.Array, dim: int, index: jax.Array, count: int, tiled: bool) -> jax.Array:
    """Piece `index` of `count` along a dim; without tiles a piece is one element, and has no such dim."""
    if not tiled:
        return lax.dynamic_index_in_dim(x, index, dim, keepdims=False)
    size = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(x, index * size, size, dim)


def _join(pieces: jax.Array, dim: int, tiled: bool) -> jax.Array:
    """Pieces along dim 0, stacked along `dim` or, with tiles, concatenated."""
    stacked = jnp.moveaxis(pieces, 0, dim)
    if not tiled:
        return stacked
    # The number of the piece stands directly before its rows, so that a reshape joins them.
    shape = list(stacked.shape)
    count = shape.pop(dim)
    shape[dim] *= count
    return stacked.reshape(shape)


class WireProgram:
    """All collectives of one mesh in one program, one after the other, compiled once."""

    def __init__(self, mesh: Mesh, cases: tuple[WireCase, ...]):
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
        """A number for each device of the mesh, in the order of the mesh."""
        values = values.astype(np.int32)
        return jax.make_array_from_callback(values.shape, self.layout, lambda index: values[index])

    def _run_device(self, devices: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs each collective, and compares the integers that this device gets with those that it must get.

        Returns:
            int32 [1, collectives, 2]: the number of wrong elements, and the place of the first; float32
            [1, collectives, 2]: the value of this element, and the right value.
        """
        device = devices[0]
        number = numbers[0]
        positions = []
        values = []
        for case in self.cases:
            integers = WireIntegers.of(case)
            actual = case.send(integers.cast(integers.make(device, number)))
            expected = integers.cast(_compute_result(case, integers, device, number))
            assert actual.shape == expected.shape
            is_wrong = (actual != expected).reshape(-1)
            # argmax gives the first True. It is 0 where nothing is wrong, which the count beside it tells apart.
            first = jnp.argmax(is_wrong).astype(jnp.int32)
            position = jnp.stack([is_wrong.sum(dtype=jnp.int32), first])
            pair = jnp.stack([actual.reshape(-1)[first], expected.reshape(-1)[first]])
            if jnp.iscomplexobj(pair):
                pair = pair.real
            pair = pair.astype(jnp.float32)
            # The next collective waits for this verdict. So all collectives run in this order on each device, and
            # none needs memory beside another.
            number, position, pair = lax.optimization_barrier((number, position, pair))
            positions.append(position)
            values.append(pair)
        return jnp.stack(positions)[None], jnp.stack(values)[None]

    def find_fault(self, number: int) -> str:
        """The first wrong element of one round on this process's devices, in a sentence; "" if all are right."""
        devices = self._spread(np.arange(self.mesh.size))
        numbers = self._spread(np.full(self.mesh.size, number))
        positions, values = self.run(devices, numbers)
        values_of_device = {}
        for shard in values.addressable_shards:
            values_of_device[shard.device] = np.asarray(shard.data)[0]
        for shard in positions.addressable_shards:
            device_positions = np.asarray(shard.data)[0]  # [collectives, 2]
            device_values = values_of_device[shard.device]
            for case, position, pair in zip(self.cases, device_positions, device_values, strict=True):
                wrong, first = map(int, position)
                if wrong:
                    return self._describe_fault(case, shard.device, wrong, first, pair, number)
        return ""

    def _describe_fault(
        self, case: WireCase, device: Any, wrong: int, first: int, pair: np.ndarray, number: int
    ) -> str:
        size = case.aval.size  # of the operand; a result of another size is below
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

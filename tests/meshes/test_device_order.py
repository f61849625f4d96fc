"""network.py and device_order.py: what collectives put on links, and the order of devices that puts least there."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis.hlo.topology import absent_devices, parse_topology
from shardkit.meshes.device_order import (
    _choose_factors,
    _factorize,
    _list_groups,
    _list_steps,
    _reflect_digits,
    assume_equal_gathers,
    order_devices,
)
from shardkit.meshes.network import Load, find_network, time_busiest_link, time_load
from support.compilers import tpu
from support.refusals import value_error

GATHERS = [Load("all_gather", ("a",), 3.0), Load("all_gather", ("b",), 2.0)]


def devices_of(topology):
    return absent_devices(parse_topology(topology))


def travelling(network, groups):
    """Seconds of the busiest link where the pieces of an all_gather travel one by one; all must arrive.

    A piece leaves its source in both directions as far as the line goes; halves of it go round a ring.
    """
    loads = [{} for _ in network.dims]
    for group in groups:
        members = [tuple(map(int, member)) for member in group]
        levels = [[i for i, dim in enumerate(network.dims) if dim.level == level] for level in range(3)]
        used = [[i for i in level if len({member[i] for member in members}) > 1] for level in levels]
        ways = [[level[first:] + level[:first] for first in range(len(level))] or [[]] for level in used]
        for way in product(*ways):  # each carries an equal part of every piece
            part = Fraction(1, math.prod(map(len, ways)) * (len(members) - 1))
            held = {member: {member} for member in members}
            for dim in (dim for level in way for dim in level):
                held = passed(network, loads[dim], members, dim, held, part)
            assert all(pieces == set(members) for pieces in held.values())
    return max(
        float(load) / dim.bandwidth for dim, of_dim in zip(network.dims, loads, strict=True) for load in of_dim.values()
    )


def passed(network, loads, members, dim, held, part):
    """What each member holds once all on its line in a dimension have passed theirs on."""
    it, after = network.dims[dim], {}
    for member in members:
        line = sorted(m for m in members if m[:dim] + m[dim + 1 :] == member[:dim] + member[dim + 1 :])
        after[member] = set().union(*(held[each] for each in line))
        sent, own = len(held[member]) * part, [each[dim] for each in line]
        chip = member[:-1] if network.shared and dim < len(network.dims) - 1 else member
        if it.level != 1:
            loads[chip] = loads.get(chip, 0) + sent * (len(line) - 1)
            continue
        gaps = [(b - a) % it.size for a, b in zip(own, own[1:] + own[:1], strict=True)]
        links, half = [], 1
        if it.wrap and len(set(gaps)) == 1:
            half, round_ = Fraction(1, 2), it.size - gaps[0]
            links = [(sign, (member[dim] + sign * step) % it.size) for sign in (1, -1) for step in range(round_)]
        else:
            first = (gaps.index(max(gaps)) + 1) % len(own) if it.wrap else 0
            offsets = [(place - own[first]) % it.size for place in own]
            here, end = (member[dim] - own[first]) % it.size, max(offsets)
            links = [(1, own[first] + step) for step in range(here, end)]
            links += [(-1, own[first] + step) for step in range(here, 0, -1)]
        for sign, at in links:
            key = (sign, chip[:dim], at % it.size, chip[dim + 1 :])
            loads[key] = loads.get(key, 0) + sent * half
    return after


@pytest.mark.parametrize(
    "topology", ["v5e:2x4", "v5p:2x2x3", "v5p:4x4x4", "tpu7x:2x2x1", "h100:2x2x4", "v5e:1x16", "v5e:2x16"]
)
def test_a_gather_loads_links_as_its_pieces_do_that_travel(topology):
    """Catches a direction that is forgotten, a group counted twice, and cores of a chip with links of their own."""
    network, _ = find_network(devices_of(topology))
    slots = _factorize(network)[0]
    total, tried = math.prod(network.shape), 0
    for size in {n for n in (2, 3, 4, 8, 16) if total % n == 0}:
        for those in list(_choose_factors(slots, size))[:12]:
            groups = _list_groups(network, _reflect_digits(those) @ _list_steps(network, those), those)
            assert len(groups) * size == total == len({tuple(place) for group in groups for place in group.tolist()})
            expected = travelling(network, groups)
            for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                assert time_busiest_link(network, kind, groups) == pytest.approx(expected, rel=1e-12)
            assert time_busiest_link(network, "all_gather", groups, alike=True) == pytest.approx(expected, rel=1e-12)
            tried += 1
    assert tried > 3


@pytest.mark.parametrize(
    ("topology", "axes", "kind", "sent", "seconds"),
    [
        ("v5e:1x16", {"a": 16}, "all_to_all", 15, 16 * 16 / 8 / 45e9),  # the mean way is 4, in two directions
        ("v5e:1x8", {"a": 8}, "all_to_all", 7, 4 * 4 / 45e9),  # no ring: all of one half send to the other
        ("v5e:1x8", {"a": 8}, "ppermute", 1, 1 / 45e9),  # back from the last on the other direction
        ("v5e:1x8", {"a": 2, "b": 4}, "ppermute", 1, 4 / 45e9),  # four pairs, each over the middle
        ("v5e:2x4", {"b": 2, "a": 4}, "ppermute", 1, 1 / 45e9),
        ("v5p:4x4x4", {"b": 16, "a": 4}, "all_gather", 3, 3 / 2 / 90e9),
        ("v5p:4x4x4", {"a": 4, "b": 16}, "all_gather", 3, 3 / 2 / 90e9),
        ("v5p:4x4x8", {"b": 32, "a": 4}, "all_gather", 3, 3 / 90e9),  # half a ring is a line
        ("tpu7x:2x2x1", {"b": 2, "a": 4}, "all_gather", 3, 2 / 100e9),  # the core last: half of the data on the links
        ("tpu7x:2x2x1", {"b": 4, "a": 2}, "all_gather", 1, 1 / 600e9),
        ("h100:1x4x8", {"b": 4, "a": 8}, "all_gather", 7, 7 / 450e9),
        ("h100:1x4x8", {"a": 4, "b": 8}, "all_gather", 3, 3 / 50e9),
        ("h100:1x4x8", {"a": 32}, "all_gather", 31, 28 / 450e9 if 28 / 450e9 > 3 / 50e9 else 3 / 50e9),
        ("h100:1x4x8", {"a": 32}, "all_to_all", 31, 24 / 50e9),
    ],
)
def test_the_busiest_link(topology, axes, kind, sent, seconds):
    devices = devices_of(topology)
    network, places = find_network(devices)
    order = tuple(sorted(places))
    assert time_load(network, axes, order, Load(kind, ("a",), sent)) == pytest.approx(seconds, rel=1e-12)


def test_the_slow_slab_of_a_tpu7x_is_left():  # proves N37
    """jax#39340: jax 0.10 leaves the link between the two devices of a chip to the axis that sends nothing."""
    loads = [Load("all_gather", ("fsdp",), 31e6)]
    found = order_devices(devices_of("tpu7x:2x4x4"), {"data": 2, "fsdp": 32}, loads)
    groups = np.array(found.places).reshape(2, 32, 4)
    assert {len(set(group[:, 3])) for group in groups} == {2}, "each group has both devices of its chips"
    slab = tuple((x, y, z, core) for core in range(2) for x in range(2) for y in range(4) for z in range(4))
    slow = time_load(found.network, found.axes, slab, loads[0])
    assert found.seconds == found.bound and slow / found.seconds > 1.8
    assert found.usual == pytest.approx(slow if jax.__version_info__ < (0, 11) else found.usual)


@pytest.mark.parametrize(
    ("topology", "axes"),
    [("v5e:2x3", {"a": 3, "b": 2}), ("v5e:2x2", {"a": 2, "b": 2}), ("tpu7x:1x1x3", {"a": 2, "b": 3})],
)
def test_no_order_at_all_of_few_devices_is_better(topology, axes):
    """All permutations, also those that split no dimension."""
    devices = devices_of(topology)
    loads = [*GATHERS, Load("ppermute", ("a",), 1.0), Load("all_to_all", ("a", "b"), 0.5)]
    found = order_devices(devices, axes, loads)
    network, places = find_network(devices)
    least = min(
        sum(time_load(network, axes, order, each) for each in loads)
        for order in permutations(places)
        if order[0] == places[0] or network.dims[0].size * len(network.dims) > 4
    )
    assert found.bound <= least * (1 + 1e-12) and found.seconds == pytest.approx(least, rel=1e-9)


def test_every_kind_of_traffic_is_weighed_and_jaxs_order_stays_where_none_is_better():
    found = order_devices(devices_of("v5p:8x8x8"), {"fsdp": 128, "context": 2, "model": 2}, [
        Load("all_gather", ("fsdp",), 1e9),
        Load("ppermute", ("context",), 1e9),
        Load("all_reduce", ("fsdp", "context"), 1e8),
    ])  # fmt: skip
    assert found.bound <= found.seconds < 0.7 * found.usual
    assert sorted(found.places) == sorted(np.ndindex(8, 8, 8))
    for row in found.rows:
        assert row.seconds == time_load(found.network, found.axes, found.places, row.load) >= row.bound
    pod = devices_of("v5e:16x16")
    same = order_devices(pod, {"data": 16, "model": 16}, assume_equal_gathers({"data": 16, "model": 16}))
    assert same.seconds == same.usual == same.bound
    grid = jax.experimental.mesh_utils.create_device_mesh((16, 16), pod)
    assert (same.grid(pod) == grid).all()


def test_slices_get_the_axis_that_sends_least():
    """Two slices of 2x4 with a network between them, in which one link is the slowest by far."""
    eight = devices_of("v5e:2x4")
    every = [replace(each, id=each.id + 8 * number, slice_index=number) for number, each in product((0, 1), eight)]
    loads = [Load("all_gather", ("fsdp",), 7e6), Load("all_reduce", ("data",), 1e5)]
    found = order_devices(every, {"fsdp": 8, "data": 2}, loads)
    grid = found.grid(every)
    assert [len({device.slice_index for device in row}) for row in grid.T] == [1, 1]
    assert str(found).startswith("mesh fsdp=8, data=2 on v5e slice=2 x x=2 x y=4, ms of the busiest link\n")


def messages(network, groups, pairs):
    """Seconds of the busiest link of messages of a byte between members of each group, one after the other."""
    loads = [{} for _ in network.dims]
    for group, (source, target) in product(groups.tolist(), pairs):
        at, end = list(group[source]), group[target]
        for i, dim in enumerate(network.dims):
            back, ahead = (at[i] - end[i]) % dim.size, (end[i] - at[i]) % dim.size
            ways = [(1, ahead)] if end[i] > at[i] else [(-1, back)] if back else []
            if dim.wrap and back:
                ways = [(sign, steps) for sign, steps in ((1, ahead), (-1, back)) if steps == min(ahead, back)]
            for sign, steps in ways:
                for step in range(steps if dim.level == 1 else 1):
                    place = (*at[:i], (at[i] + sign * step) % dim.size, *at[i + 1 :])
                    key = (sign if dim.level == 1 else 0, place[:-1] if network.shared and i < len(at) - 1 else place)
                    loads[i][key] = loads[i].get(key, 0) + 1 / len(ways)
            at[i] = end[i]
    return max(load / dim.bandwidth for dim, of in zip(network.dims, loads, strict=True) for load in of.values())


@pytest.mark.parametrize(
    ("topology", "axes"),
    [("v5e:4x4", {"a": 16}), ("v5p:4x4x4", {"b": 4, "a": 16}), ("tpu7x:2x2x1", {"a": 4, "b": 2}),
     ("h100:1x3x8", {"b": 2, "a": 12}), ("v5e:1x6", {"a": 2, "b": 3})],
)  # fmt: skip
def test_messages_take_the_shortest_ways(topology, axes):
    """Any shift, any pairs, and all pairs, also of groups that are no box: catches a ring in the place of another."""
    network, places = find_network(devices_of(topology))
    order, n = tuple(sorted(places)), axes["a"]
    grid = np.array(order).reshape(*axes.values(), -1)
    groups = np.moveaxis(grid, list(axes).index("a"), -2).reshape(-1, n, grid.shape[-1])
    for moves in (1, 2 % n, n - 1, ((0, n - 1), (1, 0))):
        pairs = [(i, (i + moves) % n) for i in range(n)] if isinstance(moves, int) else moves
        found = time_load(network, axes, order, Load("ppermute", ("a",), 1, moves))
        assert found == pytest.approx(messages(network, groups, pairs) if moves != 0 else 0, rel=1e-12)
    found = time_load(network, axes, order, Load("all_to_all", ("a",), n - 1))
    assert found == pytest.approx(messages(network, groups, list(permutations(range(n), 2))), rel=1e-9)


def test_machines_that_jaxs_rule_or_a_long_search_would_end():
    """jax 0.10 fails to split dimensions of 5 and 7; 2048 hosts have eleven equal factors, in one order."""
    found = order_devices(
        devices_of("v5p:16x20x28"), {"data": 80, "fsdp": 28, "tp": 4}, [Load("all_gather", ("fsdp",), 1e9)]
    )
    assert found.seconds == found.bound <= found.usual
    assert (
        order_devices(
            devices_of("h100:1x512x8"), {"data": 512, "model": 8}, assume_equal_gathers({"data": 512, "model": 8})
        )
        is not None
    )


def gathering(**sizes):
    """A step that gathers over "model", and its argument."""
    axes = sk.abstract_mesh(**sizes)
    gather = jax.shard_map(lambda x: sk.all_gather(x, "model"), mesh=axes, in_specs=P("model"), out_specs=P("model"))
    return jax.jit(gather), (jax.ShapeDtypeStruct((2**20, 8), jnp.bfloat16),)


def test_a_step_is_placed_by_its_census():
    step, args = gathering(data=4, model=4)
    found = sk.aot.place(step, args, topology="v5e:4x4")
    assert [row.load for row in found.rows] == [Load("all_gather", ("model",), 12 * 2**20)]
    assert found.usual == 2 * found.seconds == 2 * found.bound, "a block of 2x2 has twice the links of a line"


def test_refusals():
    step, args = gathering(data=4, model=4)
    found = sk.aot.place(step, args, topology="v5e:4x4")
    halves = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "model", axis_index_groups=[[0, 2], [1, 3]]),
        mesh=sk.abstract_mesh(data=4, model=4), in_specs=P("model"), out_specs=P("model"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"aot.place: collectives must be over whole axes; got groups of 2 along axis"):
        sk.aot.place(halves, args, topology="v5e:4x4")
    with pytest.raises(ValueError, match=r"for a program over data=4, model=4 and the 16 of 'v5e:4x4'. Pass another"):
        sk.aot.place(step, args, topology="v5e:4x4", mesh=sk.abstract_mesh(data=2, model=8))
    with pytest.raises(TypeError, match=r"aot.place: mesh must be a Mesh or an AbstractMesh; got dict. Pass"):
        sk.aot.place(step, args, topology="v5e:4x4", mesh={"data": 4, "model": 4})
    with pytest.raises(ValueError, match=r"must have one place in the mesh; got 1 of them in data=4, model=4. Make"):
        found._replace(places=found.places[:1] * 16).grid(devices_of("v5e:4x4"))
    pod = devices_of("v5e:4x4")
    with value_error(
        "aot.place: the mesh must be that of the program, with as many devices as the topology; got data=4, "
        "model=4 for a program over data=4, model=4 and the 8 of 'v5e:2x4'. Pass another topology or mesh."
    ):
        sk.aot.place(step, args, topology="v5e:2x4")
    with value_error(
        "make_mesh: placement must be one for the same mesh; got one of data=4, model=4 for data=2, model=4. Leave "
        "the sizes out, or make another with aot.place."
    ):
        sk.make_mesh(data=2, model=4, placement=found)
    with value_error(
        "placement: the devices must be those of v5e x=4 x y=4; got v5e x=8 x y=8. Make another with aot.place."
    ):
        found.grid(devices_of("v5e:8x8"))
    with value_error(
        "placement: the devices must be those of v5e x=4 x y=4; got 1 of kind 'cpu'. Make another with aot.place."
    ):
        found.grid(jax.devices()[:1])
    with value_error(
        "make_mesh: placement needs devices that fill a box; got 2 in one of slice=1, x=2, y=2, core=1. Pass all "
        "devices of a slice, or leave placement out."
    ):
        find_network([pod[0], pod[5]])
    with value_error(
        "make_mesh: placement must be 'auto', a DeviceOrder or None; got 'best'. Pass for example placement='auto'."
    ):
        sk.make_mesh(data=8, placement="best")


def test_devices_without_links_keep_their_order():
    assert sk.make_mesh(data=2, model=4, placement="auto") == sk.make_mesh(data=2, model=4)


@tpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x4", "tpu7x:2x2x2", "v6e:4x4", "v4:2x2x1"])
def test_devices_are_described_as_the_compiler_does(topology):
    def described(devices):
        return sorted((device.device_kind, tuple(device.coords), device.core_on_chip) for device in devices)

    assert described(devices_of(topology)) == described(sk.aot.topology_devices(topology))


@tpu
def test_a_mesh_and_a_compiled_step_have_the_order_that_was_found():
    step, args = gathering(data=4, model=4)
    found = sk.aot.place(step, args, topology="v5e:4x4")
    devices = sk.aot.topology_devices("v5e:4x4")
    mesh = sk.make_mesh(devices, placement=found)
    assert [tuple(device.coords[:2]) for device in mesh.devices.flat] == list(found.places)
    assert dict(mesh.shape) == {"data": 4, "model": 4}
    usual, better = (
        sk.aot.compile(step, args, topology="v5e:4x4", placement=order).wire_seconds for order in (None, found)
    )
    assert usual == 2 * better, "a block has links in two dimensions, a line in one"
    with pytest.raises(ValueError, match="placement must be one for the program's mesh; got one of data=4, model=4"):
        sk.aot.compile(*gathering(data=2, model=8), topology="v5e:4x4", placement=found)
    with pytest.raises(ValueError, match="the devices must be those of v5e x=4 x y=4; got v5e x=8 x y=8"):
        sk.aot.compile(step, args, topology="v5e:8x8", placement=found)

"""A compiled program as a function of global arrays, which is traced, proved and counted as any other.

Worked example: `jit(lambda x: x.sum())` of x [8] that is split over "data" of four devices. The compiled module takes
the piece [2] of one device, adds it up and sums over the groups {0, 1, 2, 3}. Here it is a function of the whole x:

    shard_map   over the mesh of the arguments, x by its own spec; each device runs the module on its piece [2]
    result      [4]: the sum, of each device

Where no argument or result names a mesh, all devices are one axis, and a piece is cut out of x by its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardkit._jax import compat
from shardkit._jax.dependence import without_unused
from shardkit.analysis.hlo.protobuf import message
from shardkit.analysis.hlo.report import Built
from shardkit.collectives.basic import vary
from shardkit.testing.exact.stablehlo.attributes import UnreadableError
from shardkit.testing.exact.stablehlo.block_reader import BlockReader, is_unreadable
from shardkit.testing.exact.stablehlo.module import ImportedModule
from shardkit.testing.exact.stablehlo.operation_rules import OPERATION_RULES


class DevicePieces(NamedTuple):
    """Where the pieces of a global array are.

    Worked example: [8, 3] that is split by rows over four devices has the starts [[0, 0], [2, 0], [4, 0], [6, 0]], and
    pieces of the shape (2, 3).

    Attributes:
        starts: [devices, dims], the first place of each device's piece.
        shape: of a piece.
        spec: the axes of the program's mesh that split it; None if they do not say it.
    """

    starts: np.ndarray
    shape: tuple[int, ...]
    spec: PartitionSpec | None = None

    @classmethod
    def of(cls, slices_of_devices: Sequence[tuple[slice, ...]], shape: tuple[int, ...]) -> DevicePieces:
        """The pieces of an array of this shape, from a slice along each dim for each device."""
        # All devices have pieces of one shape, as jax demands of arguments and results.
        starts = np.zeros((len(slices_of_devices), len(shape)), np.int32)
        piece = list(shape)
        for device, slices in enumerate(slices_of_devices):
            for dim, (rows, size) in enumerate(zip(slices, shape, strict=True)):
                start, stop, _ = rows.indices(size)
                starts[device, dim] = start
                piece[dim] = stop - start
        return cls(starts, tuple(piece))

    def cut(self, x: Any) -> Any:
        """[devices, ...]: the pieces of an array."""
        stops = self.starts + np.asarray(self.shape, np.int32)
        pieces = []
        for start, stop in zip(self.starts.tolist(), stops.tolist(), strict=True):
            pieces.append(lax.slice(x, start, stop))
        return jnp.stack(pieces)


class ImportedProgram(NamedTuple):
    """A compiled program, in terms of global arrays.

    Attributes:
        module: the program of one device.
        kept: the numbers of the arguments that the module takes; it leaves out those that it does not need.
        inputs: the layouts of these.
        outputs: the layouts of the results.
        mesh: the names and sizes of the axes of all devices.
        compiler: the platform or chips for which it was compiled, and the versions of the compiler.
    """

    module: ImportedModule
    kept: tuple[int, ...]
    inputs: tuple[DevicePieces, ...]
    outputs: tuple[DevicePieces, ...]
    mesh: dict[str, int]
    compiler: str

    @classmethod
    def of(cls, compiled: Any) -> ImportedProgram:
        """Reads a `jax.stages.Compiled`."""
        (module,) = compiled.runtime_executable().hlo_modules()
        avals = jax.tree.leaves(compiled.in_avals)
        arguments: Any = jax.tree.structure(compiled.in_avals)
        shardings = arguments.flatten_up_to(compiled.input_shardings)
        output_avals = jax.tree.leaves(compiled.out_info)
        output_shardings = jax.tree.leaves(compiled.output_shardings)
        all_shardings = [*shardings, *output_shardings]
        devices = compat.device_assignment(all_shardings)
        mesh = find_mesh(all_shardings, devices)
        if mesh is None:
            # All devices are one axis. No sharding names it, so that its name is none that users gave.
            mesh = {"device": len(devices)}
        kept = []
        inputs = []
        for number, (sharding, aval) in enumerate(zip(shardings, avals, strict=True)):
            # An argument that no result needs has None as its sharding, and is none of the module.
            if sharding is not None:
                kept.append(number)
                inputs.append(make_layout(sharding, aval, devices, mesh))
        outputs = []
        for sharding, aval in zip(output_shardings, output_avals, strict=True):
            outputs.append(make_layout(sharding, aval, devices, mesh))
        return cls(
            module=ImportedModule(module.as_serialized_hlo_module_proto(), mesh),
            kept=tuple(kept),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            mesh=mesh,
            compiler=f"{devices[0].platform}, jax {jax.__version__}, jaxlib {jaxlib.__version__}",
        )

    @classmethod
    def of_absent(cls, built: Built, topology: str) -> ImportedProgram:
        """Reads a program that was compiled for chips which need not be present."""
        if built.module is None:
            raise RuntimeError(f"the compiler of {topology} made no program: {built.answer.get('message', '')}")
        jaxpr = built.traced.jaxpr
        mesh = built.sizes or {"device": 1}
        module = ImportedModule(built.module, mesh)
        if len(module.find_function("main").arguments) == len(jaxpr.in_avals):
            is_used = [True] * len(jaxpr.in_avals)  # or kept by `keep_unused=True`
        else:
            is_used = compat.arguments_used(jaxpr.jaxpr)
        kept = []
        avals = []
        for number, aval in enumerate(jaxpr.in_avals):
            if is_used[number]:
                kept.append(number)
                avals.append(aval)
        shardings = read_shardings(built.module)
        versions = []
        for name, version in built.answer["versions"].items():
            versions.append(f"{name} {version}")
        return cls(
            module=module,
            kept=tuple(kept),
            inputs=_read_layouts(shardings.inputs, avals, mesh),
            outputs=_read_layouts(shardings.outputs, jaxpr.out_avals, mesh),
            mesh=mesh,
            compiler=f"{topology}, {', '.join(versions)}",
        )

    def describe_compiler(self) -> str:
        """Devices, and the platform or chips with the versions of their compiler."""
        count = math.prod(self.mesh.values())
        noun = "device" if count == 1 else "devices"
        return f"{count} {noun} ({self.compiler})"

    def trace(self, shapes: Sequence[Any]) -> Any:
        """The program as a ClosedJaxpr of the leaves of all arguments, without what no result needs."""
        # A module counts places in 64 bits, as those of random numbers.
        with jax.enable_x64(True):
            return without_unused(jax.make_jaxpr(self.run)(*shapes))

    def run(self, *arguments: Any) -> list[Any]:
        """[devices, ...]: the pieces of the results, from all global arguments."""
        rows = PartitionSpec(tuple(self.mesh))
        in_specs = []
        operands = []
        for number, layout in zip(self.kept, self.inputs, strict=True):
            x = to_data(arguments[number])
            if layout.spec is not None:
                in_specs.append(layout.spec)
                operands.append(x)
            else:
                # No axes say where its pieces are: they are cut here, and each device gets its row of [devices, ...].
                in_specs.append(rows)
                operands.append(layout.cut(x))

        def run_device(*pieces: Any) -> list[Any]:
            results = self._run_device(pieces)
            # [1, ...]: this device's row of the result.
            return [lax.expand_dims(x, (0,)) for x in results]

        # Each result is stacked along a new dim 0, one row for each device: so replicas that differ are seen.
        types = (AxisType.Auto,) * len(self.mesh)
        mesh = AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh), axis_types=types)
        run = jax.shard_map(run_device, mesh=mesh, in_specs=tuple(in_specs), out_specs=rows)
        return run(*operands)

    def _run_device(self, pieces: Sequence[Any]) -> list[Any]:
        """The results of one device, from its pieces of the arguments."""
        inputs = []
        for piece, layout in zip(pieces, self.inputs, strict=True):
            if layout.spec is None:
                inputs.append(lax.squeeze(piece, (0,)))
            else:
                # A module does not say which values are the same on several devices, so that all vary over all axes.
                inputs.append(vary(piece, tuple(self.mesh)))
        reader = BlockReader(self.module, OPERATION_RULES)
        results = reader.run(self.module.find_function("main"), inputs)
        if any(map(is_unreadable, results)):
            raise UnreadableError("a result that no operation has finished")
        return results

    def cut_results(self, results: Sequence[Any]) -> list[Any]:
        """[devices, ...]: the pieces of global results, as the compiled program has them."""
        pieces = []
        for layout, x in zip(self.outputs, results, strict=True):
            pieces.append(layout.cut(to_data(x)))
        return pieces


def find_mesh(shardings: Sequence[Any], devices: Sequence[Any]) -> dict[str, int] | None:
    """The axes of the first mesh that has the devices in the order in which a module numbers them; None if none has."""
    for sharding in shardings:
        if not isinstance(sharding, NamedSharding):
            continue
        if list(sharding.mesh.devices.flat) == list(devices):
            return dict(sharding.mesh.shape)
    return None


def make_layout(sharding: Any, aval: Any, devices: Sequence[Any], mesh: dict[str, int]) -> DevicePieces:
    """The layout of an argument or result over the axes of a mesh; of keys, that of their data."""
    shape = tuple(aval.shape)
    slices = sharding.devices_indices_map(shape)
    layout = DevicePieces.of([slices[device] for device in devices], shape)
    spec = None
    if isinstance(sharding, NamedSharding) and find_mesh([sharding], devices) == mesh:
        spec = sharding.spec
    data_dims = _find_data_dims(aval)
    starts = np.pad(layout.starts, [(0, 0), (0, len(data_dims))])  # data are whole: they start at 0
    return DevicePieces(starts, (*layout.shape, *data_dims), spec)


def _find_data_dims(aval: Any) -> tuple[int, ...]:
    """The dims that the data of keys have behind those of the array: (2,) of a key<fry>; none if it has no keys."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return ()
    key = jax.ShapeDtypeStruct((), aval.dtype)
    return tuple(jax.eval_shape(jax.random.key_data, key).shape)


def _read_layouts(shardings: Sequence[bytes], avals: Sequence[Any], mesh: dict[str, int]) -> tuple[DevicePieces, ...]:
    """The layouts of arguments or results by their shardings; without shardings, as on one device, all are whole."""
    if not shardings:
        shardings = [b""] * len(avals)
    layouts = []
    for sharding, aval in zip(shardings, avals, strict=True):
        layouts.append(read_layout(sharding, aval, mesh))
    return tuple(layouts)


def read_layout(sharding: bytes, aval: Any, mesh: dict[str, int]) -> DevicePieces:
    """The layout of an argument or result by a serialized OpSharding; of keys, that of their data."""
    shape = (*aval.shape, *_find_data_dims(aval))
    slices = compat.places_of_pieces(sharding, shape, math.prod(mesh.values()))
    layout = DevicePieces.of(slices, shape)
    return layout._replace(spec=find_spec(layout, shape, mesh))


def find_spec(layout: DevicePieces, shape: Sequence[int], mesh: dict[str, int]) -> PartitionSpec | None:
    """The mesh axes that split each dim of an array as a layout does; None if there are none.

    For example starts 0, 4, 0, 4 of four devices, x=2, y=2: pieces of 4 of the 8 rows, which are split over y.
    """
    entries: list[Any] = []
    for dim, (size, piece) in enumerate(zip(shape, layout.shape, strict=True)):
        axes = None  # the dim is whole on each device
        if size != piece:
            numbers = layout.starts[:, dim] // piece
            axes = _find_split(numbers, size // piece, mesh)
            if axes is None or size % piece:
                return None
        entries.append(axes)
    return PartitionSpec(*entries)


def _find_split(numbers: np.ndarray, count: int, mesh: dict[str, int]) -> tuple[str, ...] | None:
    """The axes along which devices have the pieces of these numbers, of so many in all; None if there are none.

    Worked example: the four devices of x=2, y=2 have the pieces 0, 2, 1, 3 of four: they count along y first, and
    within it along x. So the axes are ("y", "x").
    """
    # The fewest axes first, in every order: P(("y", "x")) and P(("x", "y")) give a device other pieces.
    for length in range(1, len(mesh) + 1):
        for axes in itertools.permutations(mesh, length):
            sizes = [mesh[axis] for axis in axes]
            if math.prod(sizes) != count:
                continue
            if np.array_equal(_number_devices(axes, mesh), numbers):
                return axes
    return None


def _number_devices(axes: Sequence[str], mesh: dict[str, int]) -> np.ndarray:
    """int [devices]: the index of each device along some axes, the major one first."""
    sizes = tuple(mesh.values())
    coordinates = dict(zip(mesh, np.indices(sizes), strict=True))  # of each axis
    index = np.zeros(sizes, np.int64)
    for axis in axes:
        index = index * mesh[axis] + coordinates[axis]
    return index.ravel()


class _Shardings(NamedTuple):
    """The serialized shardings of a compiled module; empty lists of a module without any, as one of one device."""

    inputs: list[bytes]
    outputs: list[bytes]


# The fields of a module with the shardings of its results and parameters, and of a sharding that is one of a tuple.
_OUTPUT_SHARDING = 12
_INPUT_SHARDINGS = 14
_TUPLE_SHARDINGS = 5


def read_shardings(serialized: bytes) -> _Shardings:
    """The shardings of parameters and results that are written in a serialized HloModuleProto."""
    fields = message(serialized)
    inputs = list(fields.get(_INPUT_SHARDINGS, ()))
    outputs = []
    for sharding in fields.get(_OUTPUT_SHARDING, ()):
        # Of several results it is a tuple; a sharding of one result has no parts.
        parts = message(sharding).get(_TUPLE_SHARDINGS, [sharding])
        outputs += parts
    return _Shardings(inputs, outputs)


def to_data(x: Any) -> Any:
    """Keys as their data; other arrays as they are."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x

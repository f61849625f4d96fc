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
    def of(cls, sharding: Any, shape: tuple[int, ...], devices: Sequence[Any]) -> DevicePieces:
        """The layout of an array of this shape under a sharding."""
        indices = sharding.devices_indices_map(shape)
        starts = []
        for device in devices:
            starts.append([part.indices(size)[0] for part, size in zip(indices[device], shape, strict=True)])
        return cls(np.asarray(starts, np.int32).reshape(len(devices), len(shape)), sharding.shard_shape(shape))

    def cut(self, x: Any) -> Any:
        """[devices, ...]: the pieces of an array."""
        pieces = []
        for starts_of_device in self.starts:
            starts = starts_of_device.tolist()
            stops = [start + size for start, size in zip(starts, self.shape, strict=True)]
            pieces.append(lax.slice(x, starts, stops))
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
        serialized = module.as_serialized_hlo_module_proto()
        avals = jax.tree.leaves(compiled.in_avals)
        arguments: Any = jax.tree.structure(compiled.in_avals)
        # An argument that no result needs has None as its sharding, and is none of the module.
        shardings = arguments.flatten_up_to(compiled.input_shardings)
        kept = tuple(number for number, sharding in enumerate(shardings) if sharding is not None)
        output_shardings = jax.tree.leaves(compiled.output_shardings)
        devices = compat.device_assignment([*shardings, *output_shardings])
        # Without a mesh all devices are one axis. No sharding names it, so that its name is none that users gave.
        mesh = find_mesh([*shardings, *output_shardings], devices) or {"device": len(devices)}
        inputs = [make_layout(shardings[number], avals[number], devices, mesh) for number in kept]
        outputs = []
        for sharding, aval in zip(output_shardings, jax.tree.leaves(compiled.out_info), strict=True):
            outputs.append(make_layout(sharding, aval, devices, mesh))
        compiler = f"{devices[0].platform}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
        return cls(ImportedModule(serialized, mesh), kept, tuple(inputs), tuple(outputs), mesh, compiler)

    @classmethod
    def of_absent(cls, built: Built, topology: str) -> ImportedProgram:
        """Reads a program that was compiled for chips which need not be present."""
        if built.module is None:
            raise RuntimeError(f"the compiler of {topology} made no program: {built.answer.get('message', '')}")
        jaxpr = built.traced.jaxpr
        mesh = built.sizes or {"device": 1}
        shardings = read_shardings(built.module)
        module = ImportedModule(built.module, mesh)
        kept = tuple(range(len(jaxpr.in_avals)))
        if len(module.find_function("main").arguments) != len(kept):  # else `keep_unused=True` keeps all
            kept = tuple(number for number, used in enumerate(compat.arguments_used(jaxpr.jaxpr)) if used)
        inputs = _read_layouts(shardings.inputs, [jaxpr.in_avals[number] for number in kept], mesh)
        outputs = _read_layouts(shardings.outputs, jaxpr.out_avals, mesh)
        versions = ", ".join(f"{name} {version}" for name, version in built.answer["versions"].items())
        return cls(module, kept, inputs, outputs, mesh, f"{topology}, {versions}")

    def describe_compiler(self) -> str:
        """Devices, and the platform or chips with the versions of their compiler."""
        count = math.prod(self.mesh.values())
        devices = "1 device" if count == 1 else f"{count} devices"
        return f"{devices} ({self.compiler})"

    def trace(self, shapes: Sequence[Any]) -> Any:
        """The program as a ClosedJaxpr of the leaves of all arguments, without what no result needs."""
        # A module counts places in 64 bits, as those of random numbers.
        with jax.enable_x64(True):
            return without_unused(jax.make_jaxpr(self.run)(*shapes))

    def run(self, *arguments: Any) -> list[Any]:
        """[devices, ...]: the pieces of the results, from all global arguments."""
        # An argument whose spec is known goes into the shard_map as it is. Any other is cut here to [devices, ...], of
        # which each device gets its row.
        rows = PartitionSpec(tuple(self.mesh))
        in_specs = []
        operands = []
        for number, layout in zip(self.kept, self.inputs, strict=True):
            x = to_data(arguments[number])
            is_cut = layout.spec is None
            operands.append(layout.cut(x) if is_cut else x)
            in_specs.append(rows if is_cut else layout.spec)

        def run_device(*pieces: Any) -> list[Any]:
            # A module does not say which values are the same on several devices, so that all vary over all axes.
            inputs = []
            for piece, layout in zip(pieces, self.inputs, strict=True):
                inputs.append(lax.squeeze(piece, (0,)) if layout.spec is None else vary(piece, tuple(self.mesh)))
            reader = BlockReader(self.module, OPERATION_RULES)
            results = reader.run(self.module.find_function("main"), inputs)
            if any(is_unreadable(x) for x in results):
                raise UnreadableError("a result that no operation has finished")
            # [1, ...]: this device's row of the result.
            return [lax.expand_dims(x, (0,)) for x in results]

        types = (AxisType.Auto,) * len(self.mesh)
        mesh = AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh), axis_types=types)
        run = jax.shard_map(run_device, mesh=mesh, in_specs=tuple(in_specs), out_specs=rows)
        return run(*operands)

    def cut_results(self, results: Sequence[Any]) -> list[Any]:
        """[devices, ...]: the pieces of global results, as the compiled program has them."""
        pieces = []
        for layout, x in zip(self.outputs, results, strict=True):
            pieces.append(layout.cut(to_data(x)))
        return pieces


def find_mesh(shardings: Sequence[Any], devices: Sequence[Any]) -> dict[str, int] | None:
    """The axes of the first mesh that has the devices in the order in which a module numbers them; None if none has."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and list(sharding.mesh.devices.flat) == list(devices):
            return dict(sharding.mesh.shape)
    return None


def make_layout(sharding: Any, aval: Any, devices: Sequence[Any], mesh: dict[str, int]) -> DevicePieces:
    """The layout of an argument or result over the axes of a mesh; of keys, that of their data."""
    shape = tuple(aval.shape)
    layout = DevicePieces.of(sharding, shape, devices)
    if isinstance(sharding, NamedSharding) and find_mesh([sharding], devices) == mesh:
        layout = layout._replace(spec=sharding.spec)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype)).shape
        starts = np.concatenate([layout.starts, np.zeros((len(devices), len(data)), np.int32)], 1)
        return layout._replace(starts=starts, shape=(*layout.shape, *data))
    return layout


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
    shape = tuple(aval.shape)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        shape = (*shape, *jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype)).shape)
    devices = math.prod(mesh.values())
    starts = np.zeros((devices, len(shape)), np.int32)
    piece = list(shape)
    for device, indices in enumerate(compat.places_of_pieces(sharding, shape, devices)):
        for dim, (part, size) in enumerate(zip(indices, shape, strict=True)):
            start, stop, _ = part.indices(size)
            starts[device, dim] = start
            piece[dim] = stop - start
    layout = DevicePieces(starts, tuple(piece))
    return layout._replace(spec=find_spec(layout, shape, mesh))


def find_spec(layout: DevicePieces, shape: Sequence[int], mesh: dict[str, int]) -> PartitionSpec | None:
    """The mesh axes that split each dim of an array as a layout does; None if there are none.

    For example starts 0, 4, 0, 4 of four devices, x=2, y=2: pieces of 4 of the 8 rows, which are split over y.
    """
    coordinates = dict(zip(mesh, np.indices(tuple(mesh.values())).reshape(len(mesh), -1), strict=True))
    entries: list[Any] = []
    for dim, (size, piece) in enumerate(zip(shape, layout.shape, strict=True)):
        if size == piece:
            entries.append(None)
            continue
        axes = _find_split(layout.starts[:, dim] // piece, size // piece, mesh, coordinates)
        if axes is None or size % piece:
            return None
        entries.append(axes)
    return PartitionSpec(*entries)


def _find_split(
    numbers: np.ndarray, count: int, mesh: dict[str, int], coordinates: dict[str, np.ndarray]
) -> tuple[str, ...] | None:
    """The axes along which devices have the pieces of these numbers, of so many in all; None if there are none.

    Worked example: the four devices of x=2, y=2 have the pieces 0, 2, 1, 3 of four: they count along y first, and
    within it along x. So the axes are ("y", "x").
    """
    # The fewest axes first, in every order: P(("y", "x")) and P(("x", "y")) give a device other pieces.
    for length in range(1, len(mesh) + 1):
        for axes in itertools.permutations(mesh, length):
            is_of_count = math.prod(mesh[axis] for axis in axes) == count
            if is_of_count and np.array_equal(_number_devices(axes, mesh, coordinates), numbers):
                return axes
    return None


def _number_devices(axes: Sequence[str], mesh: dict[str, int], coordinates: dict[str, np.ndarray]) -> np.ndarray:
    """int [devices]: the index of each device along some axes, the major one first."""
    index = np.zeros(math.prod(mesh.values()), np.int64)
    for axis in axes:
        index = index * mesh[axis] + coordinates[axis]
    return index


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
    outputs = []
    for sharding in fields.get(_OUTPUT_SHARDING, ()):
        inner = message(sharding)
        outputs += inner.get(_TUPLE_SHARDINGS, [sharding])
    return _Shardings(list(fields.get(_INPUT_SHARDINGS, ())), outputs)


def to_data(x: Any) -> Any:
    """Keys as their data; other arrays as they are."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x

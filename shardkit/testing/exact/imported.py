"""A compiled program as a function of global arrays, which is traced, proved and counted as any other.

Worked example: `jit(lambda x: x.sum())` of x [8] that is split over "data" of four devices. The compiled module takes
the piece [2] of one device, adds it up and sums over the groups {0, 1, 2, 3}. Here it is a function of the whole x:

    shard_map   over the mesh of the arguments, x by its own spec; each device runs the module on its piece [2]
    result      [4]: the sum, of each device

Where no argument or result names a mesh, all devices are one axis, and a piece is cut out of x by its place.
"""

from __future__ import annotations

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
from shardkit.collectives.basic import vary
from shardkit.testing.exact.stablehlo.block_reader import BlockReader
from shardkit.testing.exact.stablehlo.module import ImportedModule
from shardkit.testing.exact.stablehlo.operation_rules import OPERATION_RULES


class DevicePieces(NamedTuple):
    """Where the pieces of a global array are.

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
        for start in self.starts:
            stop = [first + size for first, size in zip(start, self.shape, strict=True)]
            pieces.append(lax.slice(x, [int(n) for n in start], [int(n) for n in stop]))
        return jnp.stack(pieces)


class ImportedProgram(NamedTuple):
    """A compiled program, in terms of global arrays.

    Attributes:
        module: what one device runs.
        kept: the numbers of the arguments that the module takes; it leaves out those that it does not need.
        inputs: the layouts of these.
        outputs: the layouts of the results.
        mesh: the names and sizes of the axes of all devices.
        platform: on which it runs.
    """

    module: ImportedModule
    kept: tuple[int, ...]
    inputs: tuple[DevicePieces, ...]
    outputs: tuple[DevicePieces, ...]
    mesh: dict[str, int]
    platform: str

    @classmethod
    def of(cls, compiled: Any) -> ImportedProgram:
        """That of a `jax.stages.Compiled`."""
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
        return cls(ImportedModule(serialized, mesh), kept, tuple(inputs), tuple(outputs), mesh, devices[0].platform)

    def describe_compiler(self) -> str:
        """Devices, platform, and the versions of jax and jaxlib, which hold the compiler."""
        count = math.prod(self.mesh.values())
        devices = "1 device" if count == 1 else f"{count} devices"
        return f"{devices} ({self.platform}, jax {jax.__version__}, jaxlib {jaxlib.__version__})"

    def trace(self, shapes: Sequence[Any]) -> Any:
        """The program as a ClosedJaxpr of the leaves of all arguments, without what no result needs."""
        # A module counts places in 64 bits, as those of random numbers.
        with jax.enable_x64(True):
            return without_unused(jax.make_jaxpr(self.run)(*shapes))

    def run(self, *arguments: Any) -> list[Any]:
        """[devices, ...]: the pieces of the results, of all global arguments."""
        rows = PartitionSpec(tuple(self.mesh))
        in_specs = []
        operands = []
        for number, layout in zip(self.kept, self.inputs, strict=True):
            x = to_data(arguments[number])
            is_cut = layout.spec is None
            operands.append(layout.cut(x) if is_cut else x)
            in_specs.append(rows if is_cut else layout.spec)

        def run_device(*pieces: Any) -> list[Any]:
            inputs = []
            for piece, layout in zip(pieces, self.inputs, strict=True):
                inputs.append(lax.squeeze(piece, (0,)) if layout.spec is None else vary(piece, tuple(self.mesh)))
            results = BlockReader(self.module, OPERATION_RULES).run(self.module.find_function("main"), inputs)
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


def to_data(x: Any) -> Any:
    """Keys as their data; other arrays as they are."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x

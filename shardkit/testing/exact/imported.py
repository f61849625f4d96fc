"""A compiled program as a function of the pieces of all devices, which is traced, proved and counted as any other.

Worked example: `jit(lambda x: x.sum())` of x [8] that is split over four devices. The compiled module takes the piece
[2] of one device, adds it up and sums over the groups {0, 1, 2, 3}. Here it is a function of the whole x:

    cut         x [8] -> [4, 2], a row for each device
    shard_map   over a flat axis of four devices; each runs the module on its row
    result      [4]: the sum, of each device
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardkit._jax import compat
from shardkit._jax.dependence import without_unused
from shardkit.testing.exact.stablehlo.block_reader import BlockReader
from shardkit.testing.exact.stablehlo.module import ImportedModule
from shardkit.testing.exact.stablehlo.operation_rules import OPERATION_RULES

AXIS = "device"


class DevicePieces(NamedTuple):
    """Where the pieces of a global array are.

    Attributes:
        starts: [devices, dims], the first place of each device's piece.
        shape: of a piece.
    """

    starts: np.ndarray
    shape: tuple[int, ...]

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
        platform: on which it runs.
    """

    module: ImportedModule
    kept: tuple[int, ...]
    inputs: tuple[DevicePieces, ...]
    outputs: tuple[DevicePieces, ...]
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
        inputs = [make_layout(shardings[number], avals[number], devices) for number in kept]
        outputs = []
        for sharding, aval in zip(output_shardings, jax.tree.leaves(compiled.out_info), strict=True):
            outputs.append(make_layout(sharding, aval, devices))
        return cls(
            ImportedModule(serialized, AXIS, len(devices)), kept, tuple(inputs), tuple(outputs), devices[0].platform
        )

    def describe_compiler(self) -> str:
        """Devices, platform, and the versions of jax and jaxlib, which hold the compiler."""
        count = self.module.devices
        devices = "1 device" if count == 1 else f"{count} devices"
        return f"{devices} ({self.platform}, jax {jax.__version__}, jaxlib {jaxlib.__version__})"

    def trace(self, shapes: Sequence[Any]) -> Any:
        """The program as a ClosedJaxpr of the leaves of all arguments, without what no result needs."""
        # A module counts places in 64 bits, as those of random numbers.
        with jax.enable_x64(True):
            return without_unused(jax.make_jaxpr(self.run)(*shapes))

    def run(self, *arguments: Any) -> list[Any]:
        """[devices, ...]: the pieces of the results, of all global arguments."""
        pieces = []
        for number, layout in zip(self.kept, self.inputs, strict=True):
            pieces.append(layout.cut(to_data(arguments[number])))
        spec = PartitionSpec(AXIS)
        mesh = AbstractMesh((self.module.devices,), (AXIS,), axis_types=(AxisType.Auto,))

        def run_device(*rows: Any) -> list[Any]:
            arguments = [lax.squeeze(row, (0,)) for row in rows]
            results = BlockReader(self.module, OPERATION_RULES).run(self.module.find_function("main"), arguments)
            return [lax.expand_dims(x, (0,)) for x in results]

        run = jax.shard_map(run_device, mesh=mesh, in_specs=spec, out_specs=spec)
        return run(*pieces)

    def cut_results(self, results: Sequence[Any]) -> list[Any]:
        """[devices, ...]: the pieces of global results, as the compiled program has them."""
        pieces = []
        for layout, x in zip(self.outputs, results, strict=True):
            pieces.append(layout.cut(to_data(x)))
        return pieces


def make_layout(sharding: Any, aval: Any, devices: Sequence[Any]) -> DevicePieces:
    """The layout of an argument or result; of keys, that of their data."""
    shape = tuple(aval.shape)
    layout = DevicePieces.of(sharding, shape, devices)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype)).shape
        starts = np.concatenate([layout.starts, np.zeros((len(devices), len(data)), np.int32)], 1)
        return DevicePieces(starts, (*layout.shape, *data))
    return layout


def to_data(x: Any) -> Any:
    """Keys as their data; other arrays as they are."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x

"""A compiled program, placed on other devices of the same process.

jax compiles a program anew for every set of devices, also where the text that the compiler gets is the same. On
simulated devices that is most of the time of a test whose workers are alike. The executable of one is loaded for the
others here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import serialize_executable

from shardkit._jax.compat import private


class PackedProgram(NamedTuple):
    """A compiled program as bytes, and the devices that it was compiled for, in the order of its mesh."""

    code: bytes
    in_tree: Any
    out_tree: Any
    devices: Sequence[jax.Device]


def pack(compiled: jax.stages.Compiled, devices: Sequence[jax.Device]) -> PackedProgram:
    """The program as bytes.

    Raises:
        Exception: jax cannot write it, as one that calls a function of Python, or has constants as arguments.
    """
    code, in_tree, out_tree = serialize_executable.serialize(compiled)
    return PackedProgram(code, in_tree, out_tree, devices)


def place(program: PackedProgram, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """The program on as many other devices: nothing is compiled, and it gives the same bits.

    Raises:
        Exception: the runtime refuses the program there.
    """
    unpickler = _Unpickler(program, devices)
    unloaded, args_info, no_kwargs = unpickler.load()
    args = program.in_tree.unflatten(args_info)
    return jax.stages.Compiled(unloaded.load(), [], args, program.out_tree, no_kwargs=no_kwargs)


class _Unpickler(pickle.Unpickler):
    """Reads what jax wrote, with each device replaced by the one at the same place of the other mesh."""

    def __init__(self, program: PackedProgram, devices: Sequence[jax.Device]):
        super().__init__(io.BytesIO(program.code))
        self._devices = devices
        self._new_device = {}
        for old, new in zip(program.devices, devices, strict=True):
            self._new_device[old.id] = new

    def persistent_load(self, reference: Any) -> Any:
        """What stands outside of the pickle: the devices, their client, and the machine code."""
        kind, *content = reference
        client = self._devices[0].client
        if kind == "client":
            return client
        if kind == "device":
            return self._new_device[content[0]]
        # jax's own reader leaves the options out. The code would then run on the devices that it was compiled for.
        options = private("compiler.get_compile_options")(
            num_replicas=1,
            num_partitions=len(self._devices),
            device_assignment=np.array([[device.id for device in self._devices]]),
            backend=client,
        )
        devices = private("lib.xla_client").DeviceList(tuple(self._devices))
        return client.deserialize_executable(content[0], devices, options)

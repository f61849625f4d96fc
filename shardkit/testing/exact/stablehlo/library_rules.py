"""Calls of libraries whose contract is known, one row each in `LIBRARY`.

A call is refused where its contract does not say which numbers it returns, and by its name where it is in no row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.testing.exact.stablehlo.attributes import (
    UnreadableError,
    find_dtype,
    is_float,
    name_combiner,
    read_dtype,
    read_shape,
)
from shardkit.testing.exact.stablehlo.block_reader import Arriving, BlockReader, is_unreadable
from shardkit.testing.exact.stablehlo.tilings import READ_PLACES
from shardkit.testing.exact.stablehlo.undefined import undefined


def _call_library(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    target = _read_target(operation)
    function = LIBRARY.get(target)
    if function is None:
        raise UnreadableError(f"custom_call to {target}")
    if target != _END and any(is_unreadable(x) for x in operands):
        raise _refuse(operation, "a library's workspace")
    return [function(reader, operation, *operands)]


def _read_target(operation: Any) -> str:
    target: str = operation.attributes["call_target_name"].value
    return target


def _refuse(operation: Any, what: str) -> UnreadableError:
    return UnreadableError(f"custom_call to {_read_target(operation)} with {what}")


def _take_top(reader: BlockReader, operation: Any, x: Any) -> Any:
    # The call does not say how many it takes: the last dim of its result does.
    count = operation.results[0].type.get_type(0).shape[-1]
    return tuple(lax.top_k(x, count))


def _multiply_matrices(reader: BlockReader, operation: Any, x: Any, y: Any, *others: Any) -> Any:
    """A matrix product of cuBLAS: epilogue(alpha x y + beta c), and a workspace that nothing may read.

    Which dims are contracted is said as of a dot, by GemmBackendConfig of xla's `backend_configs.proto`. An epilogue
    with a bias is refused: along which dim a bias is added depends on the layout of the result, which StableHLO does
    not have.

    Worked example: x [4, 3], y [3, 5] and c [4, 5] with alpha_real 0.5, beta 1, epilogue RELU and the contracted dims
    1 and 0 is max(0.5 x y + c, 0), [4, 5].
    """
    config = json.loads(operation.attributes["backend_config"].value)["gemm_backend_config"]
    result = operation.results[0].type
    is_tuple = hasattr(result, "num_types")
    if is_tuple:
        result = result.get_type(0)
    _check_settings(operation, config)
    epilogue = config.get("epilogue", "DEFAULT")
    if epilogue not in _EPILOGUES:
        raise _refuse(operation, f"the epilogue {epilogue}")
    activation = _EPILOGUES[epilogue]
    beta = config.get("beta", 0)
    if len(others) != int(beta != 0):
        raise _refuse(operation, f"{2 + len(others)} operands")
    dtype = find_dtype(result)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise _refuse(operation, "a result of integers")
    # cuBLAS scales and adds before it rounds to the dtype of the result.
    compute_dtype = np.float64 if dtype == np.float64 else np.float32
    x = lax.convert_element_type(x, compute_dtype)
    y = lax.convert_element_type(y, compute_dtype)
    product = lax.dot_general(x, y, _read_dimension_numbers(config))
    if np.shape(product) != tuple(result.shape):
        raise _refuse(operation, "a result of another shape than that of its product")
    # The factors are numbers of the program, as 1 or 0.125.
    total = product * np.asarray(config.get("alpha_real", 1), compute_dtype)
    if beta:
        total = total + lax.convert_element_type(others[0], compute_dtype) * np.asarray(beta, compute_dtype)
    if activation is not None:
        total = activation(total)
    total = lax.convert_element_type(total, dtype)
    if not is_tuple:
        return total
    # Behind the product stands the workspace: None, which no operation may read.
    return (total, *[None] * (operation.results[0].type.num_types - 1))


def _check_settings(operation: Any, config: dict[str, Any]) -> None:
    """Refuses a product with settings that may change its numbers.

    A stride is the number of elements from a matrix of a batch to the next one. Any other than that of matrices side by
    side reads other numbers.
    """
    for operand, side in zip(operation.operands, ("lhs", "rhs"), strict=False):
        shape = operand.type.shape
        batch = _read_dims(config["dot_dimension_numbers"], f"{side}_batch")
        size = math.prod(size for dim, size in enumerate(shape) if dim not in batch)
        if int(config.get(f"{side}_stride", size)) != size:
            raise _refuse(operation, f"{side}_stride {config[f'{side}_stride']}")
    for name in config:
        if name not in _PLAIN_MATMUL and name not in _READ_OF_MATMUL:
            raise _refuse(operation, f"the setting {name}")
    for name, value in _PLAIN_MATMUL.items():
        if config.get(name, value) != value:
            raise _refuse(operation, f"{name} {config[name]}")


def _read_dimension_numbers(config: dict[str, Any]) -> Any:
    """The dims of a product that are contracted and those that both operands have, as `lax.dot_general` takes them."""
    numbers = config["dot_dimension_numbers"]
    contracted = (_read_dims(numbers, "lhs_contracting"), _read_dims(numbers, "rhs_contracting"))
    shared = (_read_dims(numbers, "lhs_batch"), _read_dims(numbers, "rhs_batch"))
    return contracted, shared


def _read_dims(numbers: Any, name: str) -> tuple[int, ...]:
    return tuple(int(dim) for dim in numbers.get(f"{name}_dimensions", ()))


def _rectify(x: Any) -> Any:
    return lax.max(x, jnp.zeros((), x.dtype))


# What an epilogue applies.
_EPILOGUES: dict[str, Callable[[Any], Any] | None] = {"DEFAULT": None, "RELU": _rectify}
# Settings that are read above, and those that say by which algorithm and how exactly a product is computed.
_READ_OF_MATMUL = {
    *("alpha_real", "beta", "dot_dimension_numbers", "epilogue"),
    *("selected_algorithm", "precision_config", "lhs_stride", "rhs_stride", "autotune_workspace_size"),
}
# Settings that must have these values, those of a plain product of real numbers; one that is absent has its value.
_PLAIN_MATMUL = {"alpha_imag": 0, "grad_x": False, "grad_y": False, "damax_output": False, "scale_mode": 0}


def _allocate(reader: BlockReader, operation: Any) -> Any:
    """Memory to which nothing was written: unknowns, so that a result that depends on them differs from every other.

    Each run of the operation finds other numbers there (`undefined.py`). Integers are no unknowns in a field, so memory
    of integers is refused.
    """
    value = operation.results[0]
    if not is_float(value):
        raise _refuse(operation, "memory of integers or booleans")
    return undefined.bind(reader.vary(np.zeros(read_shape(operation), read_dtype(operation))))


def _assume_in_bounds(reader: BlockReader, operation: Any, indices: Any) -> Any:
    """Indices, and the compiler's promise that they are in bounds for the gathers that read them.

    What a gather returns if the promise is broken is not said: there it returns unknowns (`undefined.py`). Where
    another operation reads the indices, the call has no meaning.
    """
    waiting = [operation.results[0]]
    while waiting:
        for use in waiting.pop().uses:
            reading = use.owner.operation
            if reading.name == "stablehlo.gather" and use.operand_number == 1 and is_float(reading.results[0]):
                reader.promised.add(reading.results[0])
            elif reading.name in _MOVES_OF_INDICES:
                waiting.append(reading.results[0])
            else:
                raise _refuse(operation, f"indices that {reading.name} reads")
    return indices


_MOVES_OF_INDICES = (
    "stablehlo.slice",
    "stablehlo.reshape",
    "stablehlo.transpose",
    "stablehlo.broadcast_in_dim",
    "mhlo.copy",
    "mhlo.bitcast",
)


def _read_places(reader: BlockReader, operation: Any, x: Any) -> Any:
    """A bitcast between layouts of other tiles: see `tilings.py`."""
    elements = np.asarray(json.loads(operation.attributes["backend_config"].value), np.int32)
    return lax.reshape(jnp.take(lax.reshape(x, (x.size,)), elements, mode="clip"), read_shape(operation))


def _start_collective(reader: BlockReader, operation: Any, result: Any) -> Any:
    """A collective beside which a TPU runs other operations: what it sends, what arrives, and the state of its engines.

    Worked example: `AsyncCollectiveStart(all_gather(x))` is a tuple (x, the gathered array, s32[2], u32[], ...). The
    operations that run beside it are fusions that hand the tuple on, each with an all_gather of its own that nothing
    reads. `AsyncCollectiveDone(x, the gathered array, all_gather(x), s32[2], u32[], ...)` is the gathered array.
    """
    collective = operation.operands[0].owner
    if not _is_collective(collective):
        raise _refuse(operation, "an operand that is no collective of one array")
    sent = reader.values[collective.operands[0]]
    types = operation.results[0].type
    count = getattr(types, "num_types", 0)
    if count < 2 or types.get_type(0) != collective.operands[0].type or types.get_type(1) != operation.operands[0].type:
        raise _refuse(operation, "a result of other types than those of its collective")
    # By the operation that started it, what arrives and the state of the engines are known to be of one start.
    arriving = Arriving(operation, sent, result, _describe_collective(collective), count)
    return (sent, *[arriving] * (count - 1))


def _end_collective(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """The array that has arrived; refused if the end is written as one of another collective than was started."""
    if len(operands) < _FEWEST_OF_END:
        raise _refuse(operation, f"{len(operands)} operands")
    sent, arriving, _, *state = operands
    is_started = isinstance(arriving, Arriving) and sent is arriving.sent and len(state) == arriving.parts - 2
    if not is_started or any(x is not arriving for x in state):
        raise _refuse(operation, "operands that no start has returned")
    collective = operation.operands[2].owner
    if not _is_collective(collective) or _describe_collective(collective) != arriving.collective:
        raise _refuse(operation, "another collective than was started")
    return arriving.result


def _is_collective(operation: Any) -> bool:
    name = getattr(operation, "name", "")  # an argument of a block has none
    return name in _COLLECTIVES and len(operation.operands) == 1


def _describe_collective(operation: Any) -> str:
    """Which collective it is, of which types, and over which groups of devices."""
    described = [operation.name, str(operation.operands[0].type), str(operation.results[0].type)]
    for name in _COLLECTIVES[operation.name]:
        described.append(f"{name} = {operation.attributes[name]}")
    for region in operation.regions:
        described.append(str(name_combiner(region.blocks[0])))
    return ", ".join(described)


# The collectives that are started so, with the attributes that say which numbers they return.
_COLLECTIVES = {
    "stablehlo.all_gather": ("replica_groups", "all_gather_dim"),
    "stablehlo.all_reduce": ("replica_groups",),
    "stablehlo.reduce_scatter": ("replica_groups", "scatter_dimension"),
}
_END = "AsyncCollectiveDone"
_FEWEST_OF_END = 3  # operands: what was sent, what arrives, and the collective once more


LIBRARY: dict[str, Callable[..., Any]] = {
    "TopK": _take_top,
    "__cublas$gemm": _multiply_matrices,
    "__cublas$lt$matmul": _multiply_matrices,
    "AllocateBuffer": _allocate,
    READ_PLACES: _read_places,
    "AssumeGatherIndicesInBound": _assume_in_bounds,
    "AsyncCollectiveStart": _start_collective,
    _END: _end_collective,
}


LIBRARY_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.custom_call": _call_library,
}

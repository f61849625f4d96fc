"""Calls of libraries whose contract is known, one row each in `LIBRARY`.

A call is refused where its contract does not say which numbers it returns, and by its name where it is in no row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    """The one result of a call, which may be a tuple."""
    target = _read_target(operation)
    function = LIBRARY.get(target)
    if function is None:
        raise UnreadableError(f"custom_call to {target}")
    if target != _END and any(map(is_unreadable, operands)):
        raise _refuse(operation, "a library's workspace")
    return [function(reader, operation, *operands)]


def _read_target(operation: Any) -> str:
    target: str = operation.attributes["call_target_name"].value
    return target


def _refuse(operation: Any, what: str) -> UnreadableError:
    return UnreadableError(f"custom_call to {_read_target(operation)} with {what}")


def _take_top(reader: BlockReader, operation: Any, x: Any) -> Any:
    """The largest numbers of each row, and their places: a tuple of two arrays."""
    # The call does not say how many it takes: the last dim of its result does.
    largest = operation.results[0].type.get_type(0)
    return tuple(lax.top_k(x, largest.shape[-1]))


def _multiply_matrices(reader: BlockReader, operation: Any, x: Any, y: Any, *addends: Any) -> Any:
    """A matrix product of cuBLAS: epilogue(alpha x y + beta c), and a workspace that nothing may read.

    Which dims are contracted is said as of a dot, by GemmBackendConfig of xla's `backend_configs.proto`. An epilogue
    with a bias is refused: along which dim a bias is added depends on the layout of the result, which StableHLO does
    not have.

    Worked example: x [4, 3], y [3, 5] and c [4, 5] with alpha_real 0.5, beta 1, epilogue RELU and the contracted dims
    1 and 0 is max(0.5 x y + c, 0), [4, 5].
    """
    settings = _read_config(operation)["gemm_backend_config"]
    _check_settings(operation, settings)
    epilogue = settings.get("epilogue", "DEFAULT")
    if epilogue not in _EPILOGUES:
        raise _refuse(operation, f"the epilogue {epilogue}")
    activation = _EPILOGUES[epilogue]
    beta = settings.get("beta", 0)
    addends_of_call = 1 if beta else 0
    if len(addends) != addends_of_call:
        raise _refuse(operation, f"{2 + len(addends)} operands")
    # The result is the product alone, or a tuple of it and the workspace.
    result = operation.results[0].type
    parts = getattr(result, "num_types", 0)
    matrix = result.get_type(0) if parts else result
    dtype = find_dtype(matrix)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise _refuse(operation, "a result of integers")
    # cuBLAS scales and adds before it rounds to the dtype of the result.
    compute_dtype = np.float64 if dtype == np.float64 else np.float32
    x = lax.convert_element_type(x, compute_dtype)
    y = lax.convert_element_type(y, compute_dtype)
    product = lax.dot_general(x, y, _read_dimension_numbers(settings))
    if np.shape(product) != tuple(matrix.shape):
        raise _refuse(operation, "a result of another shape than that of its product")
    # The factors are numbers of the program, as 1 or 0.125.
    total = product * np.asarray(settings.get("alpha_real", 1), compute_dtype)
    if beta:
        (c,) = addends
        c = lax.convert_element_type(c, compute_dtype)
        total = total + c * np.asarray(beta, compute_dtype)
    if activation is not None:
        total = activation(total)
    total = lax.convert_element_type(total, dtype)
    if not parts:
        return total
    # Behind the product stands the workspace: None, which no operation may read.
    workspace = [None] * (parts - 1)
    return (total, *workspace)


def _read_config(operation: Any) -> Any:
    """The settings of a call, which are written as JSON."""
    return json.loads(operation.attributes["backend_config"].value)


def _check_settings(operation: Any, settings: dict[str, Any]) -> None:
    """Refuses a product with settings that may change its numbers.

    A stride is the number of elements from a matrix of a batch to the next one. Any other than that of matrices side by
    side reads other numbers. Worked example: an operand [8, 4, 3] with the batch dim 0 must have the stride 12.
    """
    for operand, side in zip(operation.operands, ("lhs", "rhs"), strict=False):
        batch_dims = _read_dims(settings, f"{side}_batch")
        size = 1
        for dim, rows in enumerate(operand.type.shape):
            if dim not in batch_dims:
                size *= rows
        name = f"{side}_stride"
        stride = settings.get(name, size)
        if int(stride) != size:
            raise _refuse(operation, f"{name} {stride}")
    for name in settings:
        if name not in _PLAIN_MATMUL and name not in _READ_OF_MATMUL:
            raise _refuse(operation, f"the setting {name}")
    for name, plain_value in _PLAIN_MATMUL.items():
        value = settings.get(name, plain_value)
        if value != plain_value:
            raise _refuse(operation, f"{name} {value}")


def _read_dimension_numbers(settings: dict[str, Any]) -> Any:
    """The contracting dims of a product and its batch dims, of both operands, as `lax.dot_general` takes them."""
    contracting = (_read_dims(settings, "lhs_contracting"), _read_dims(settings, "rhs_contracting"))
    batch = (_read_dims(settings, "lhs_batch"), _read_dims(settings, "rhs_batch"))
    return contracting, batch


def _read_dims(settings: dict[str, Any], name: str) -> tuple[int, ...]:
    """Some dims of a product. JSON has numbers of 64 bits as text: ["0", "2"]."""
    dims = settings["dot_dimension_numbers"].get(f"{name}_dimensions", ())
    return tuple(map(int, dims))


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
    if not is_float(operation.results[0]):
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
            user = use.owner.operation
            if _gathers_floats(use):
                reader.promised.add(user.results[0])
            elif user.name in _MOVES_OF_INDICES:
                waiting.append(user.results[0])
            else:
                raise _refuse(operation, f"indices that {user.name} reads")
    return indices


def _gathers_floats(use: Any) -> bool:
    """Whether a use of indices is by a gather of floats, which has its indices as operand 1."""
    gather = use.owner.operation
    return gather.name == "stablehlo.gather" and use.operand_number == 1 and is_float(gather.results[0])


# Operations that give the same indices in another shape.
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
    numbers = np.asarray(_read_config(operation), np.int32)
    elements = lax.reshape(x, (x.size,))
    return lax.reshape(jnp.take(elements, numbers, mode="clip"), read_shape(operation))


def _start_collective(reader: BlockReader, operation: Any, result: Any) -> Any:
    """A collective beside which a TPU runs other operations: what it sends, what arrives, and the state of its engines.

    Worked example: `AsyncCollectiveStart(all_gather(x))` is a tuple (x, the gathered array, s32[2], u32[], ...). The
    operations that run beside it are fusions that hand the tuple on, each with an all_gather of its own that nothing
    reads. `AsyncCollectiveDone(x, the gathered array, all_gather(x), s32[2], u32[], ...)` is the gathered array.
    """
    collective = operation.operands[0].owner
    if not _is_collective(collective):
        raise _refuse(operation, "an operand that is no collective of one array")
    sent = collective.operands[0]
    received = operation.operands[0]
    types = operation.results[0].type
    count = getattr(types, "num_types", 0)
    if count < 2 or types.get_type(0) != sent.type or types.get_type(1) != received.type:
        raise _refuse(operation, "a result of other types than those of its collective")
    # By the operation that started it, what arrives and the state of the engines are known to be of one start.
    x = reader.values[sent]
    arriving = Arriving(operation, x, result, _describe_collective(collective), count)
    state = [arriving] * (count - 2)
    return (x, arriving, *state)


def _end_collective(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """The array that has arrived; refused if the end is written as one of another collective than was started."""
    if len(operands) < _FEWEST_OF_END:
        raise _refuse(operation, f"{len(operands)} operands")
    sent, arriving, _, *state = operands
    if not _are_of_one_start(sent, arriving, state):
        raise _refuse(operation, "operands that no start has returned")
    collective = operation.operands[2].owner
    if not _is_collective(collective) or _describe_collective(collective) != arriving.collective:
        raise _refuse(operation, "another collective than was started")
    return arriving.result


def _are_of_one_start(sent: Any, arriving: Any, state: Sequence[Any]) -> bool:
    """Whether an end is passed what one start has returned, all of it."""
    if not isinstance(arriving, Arriving) or sent is not arriving.sent:
        return False
    if len(state) != arriving.parts - 2:
        return False
    return all(x is arriving for x in state)


def _is_collective(operation: Any) -> bool:
    """Whether an operation is a collective of one array that may be started; an argument of a block is none."""
    name = getattr(operation, "name", "")
    return name in _COLLECTIVES and len(operation.operands) == 1


def _describe_collective(operation: Any) -> str:
    """Which collective it is, of which types, and over which groups of devices."""
    words = [operation.name, str(operation.operands[0].type), str(operation.results[0].type)]
    for name in _COLLECTIVES[operation.name]:
        words.append(f"{name} = {operation.attributes[name]}")
    for region in operation.regions:
        words.append(str(name_combiner(region.blocks[0])))
    return ", ".join(words)


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

"""Parameters from a run's checkpoints, onto any mesh and plan."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.typed import Arrays, typed
from shardkit.plans.storage import is_padded
from shardkit.runtime.checkpoint.directory import quote_path, resolve_directory
from shardkit.runtime.checkpoint.portable import describe_stored, flatten_state, from_portable
from shardkit.runtime.checkpoint.reading import find_step, read_arrays
from shardkit.runtime.checkpoint.record import list_some
from shardkit.steps.state import TrainState

_WHERE = "load_params"
_PARAMS = "params."


@typed
def load_params(
    path: str | os.PathLike[str], like: Arrays, *, step: int | None = None, partial: bool = False, cast: bool = False
) -> Any:
    """Loads the parameters of a run, without its optimizer, onto any mesh and plan. Call it in every process.

    Args:
        path: a run's directory of checkpoints.
        like: shapes, dtypes and shardings of the parameters: `init.abstract(params).params` of `make_train_step`,
            `evaluate.abstract(params)` of `make_eval_step`, or parameters themselves.
        step: by default the newest finished one.
        partial: leave out parameters of the run `like` does not have.
        cast: convert floating-point numbers to the dtype of `like`.

    Returns:
        Parameters as `like`. A step compiled for it accepts them without recompiling.

    Raises:
        ValueError: no such step; missing parameters, or, without `partial`, parameters left over; another shape or
            dtype.
        DamagedError: the step is damaged.
        ImportError: orbax-checkpoint is not installed.

    Cost: as `Checkpoints.restore`, for the parameters alone.

    Example:
        In a script that evaluates a run:

            like = evaluate.abstract(lambda key: model.init(key))
            params = sk.runtime.load_params("runs/a", like, cast=True)
    """
    if isinstance(like, TrainState):
        raise ValueError(
            "load_params: like must be the parameters; got a TrainState. Pass like.params, or restore all of it with "
            "Checkpoints."
        )
    leaves = flatten_state(_WHERE, like)
    directory = resolve_directory(_WHERE, path)
    step, _, records = find_step(_WHERE, directory, step)
    param_records = {}
    for leaf_path, record in records.items():
        if leaf_path.startswith(_PARAMS):
            param_records[leaf_path.removeprefix(_PARAMS)] = record
    where = f"load_params: {quote_path(directory / str(step))}"
    _check_names(where, list(param_records), list(leaves), partial)
    stored = {}  # the leaves of `like` in the dtype that the run has, by the run's paths
    for name, x in leaves.items():
        record = param_records[name]
        _check_leaf(where, name, record, x, cast)
        stored[_PARAMS + name] = _with_dtype(x, record["dtype"])
    arrays = read_arrays(_WHERE, directory, step, describe_stored(stored, records), records)
    params = from_portable(arrays, stored, records)
    # Converted last: the files, and the checksums that were compared, are of the run's dtype.
    loaded = []
    for name, x in leaves.items():
        loaded.append(_cast(params[_PARAMS + name], x))
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_padded), loaded)


def _with_dtype(x: Any, dtype: str) -> Any:
    """A leaf's shape and sharding with another dtype; of a padded leaf too, which is a pytree of its array."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding), x)


def _check_names(where: str, stored: list[str], wanted: list[str], partial: bool) -> None:
    """Refuses parameters that the run lacks, or has beyond those that are wanted."""
    missing = [name for name in wanted if name not in stored]
    unexpected = [name for name in stored if name not in wanted]
    if missing:
        more = ""
        if unexpected:
            more = f" and has {list_some(unexpected)} that like lacks"
        raise ValueError(f"{where} lacks {list_some(missing)}{more}. Build the parameters as the run did.")
    if unexpected and not partial:
        raise ValueError(f"{where} has {list_some(unexpected)} that like lacks. Pass partial=True to leave them out.")


def _check_leaf(where: str, name: str, stored: Any, x: Any, cast: bool) -> None:
    """Refuses another shape, or another dtype that is not to be converted, or cannot be."""
    if tuple(stored["shape"]) != tuple(x.shape):
        raise ValueError(
            f"{where} has leaf {name!r} of shape {stored['shape']}; like has {list(x.shape)}. Build the parameters "
            "with the sizes of the run."
        )
    if stored["dtype"] == str(x.dtype):
        return
    remedy = "Load it in its own dtype, and convert it."
    if _is_floating(stored["dtype"]) and _is_floating(x.dtype):
        if cast:
            return
        remedy = "Pass cast=True to convert it."
    raise ValueError(f"{where} has leaf {name!r} of dtype {stored['dtype']}; like has {x.dtype}. {remedy}")


def _is_floating(dtype: Any) -> bool:
    if dtype == "key":
        return False
    return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))


def _cast(loaded: Any, x: Any) -> Any:
    if loaded.dtype == x.dtype:
        return loaded
    return jax.tree.map(lambda array: array.astype(x.dtype), loaded)

"""Parameters from a run's checkpoints, onto any mesh and plan."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.typed import Arrays, typed
from shardkit.plans.storage import is_padded
from shardkit.runtime.checkpoint.directory import directory_of, named
from shardkit.runtime.checkpoint.portable import from_portable, leaves_of, to_read
from shardkit.runtime.checkpoint.reading import find_step, read_arrays
from shardkit.runtime.checkpoint.record import some
from shardkit.steps.state import TrainState

_WHERE = "load_params"
_PARAMS = "params."


@typed
def load_params(
    path: str | os.PathLike[str], like: Arrays, *, step: int | None = None, partial: bool = False, cast: bool = False
) -> Any:
    """Loads the parameters of a run, without its optimizer, onto any mesh and plan; every process must call it.

    Args:
        path: a run's directory of checkpoints.
        like: shapes, dtypes and shardings of the parameters: `init.abstract(params).params` of `make_train_step`,
            `evaluate.abstract(params)` of `make_eval_step`, or parameters themselves.
        step: by default the newest finished one.
        partial: leave out what the run has beyond the parameters of `like`.
        cast: convert numbers of another floating dtype to that of `like`.

    Returns:
        Parameters as `like`. A step compiled for it accepts them without recompiling.

    Raises:
        ValueError: no such step; parameters that are missing, or left over without `partial`; another shape or dtype.
        DamagedError: the step is damaged.
        ImportError: orbax-checkpoint is not installed.

    Cost: that of `Checkpoints.restore`, for the parameters alone.

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
    leaves = leaves_of(_WHERE, like)
    directory = directory_of(_WHERE, path)
    step, _, records = find_step(_WHERE, directory, step)
    records = {path: record for path, record in records.items() if path.startswith(_PARAMS)}
    stored = {path.removeprefix(_PARAMS): record for path, record in records.items()}
    where = f"load_params: {named(directory / str(step))}"
    _check_names(where, [*stored], [*leaves], partial)
    for name, x in leaves.items():
        _check_leaf(where, name, stored[name], x, cast)

    def in_dtype(x: Any, dtype: str) -> Any:
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding), x)

    wanted = {_PARAMS + name: in_dtype(x, stored[name]["dtype"]) for name, x in leaves.items()}
    arrays = read_arrays(_WHERE, directory, step, to_read(wanted, records), records)
    found = from_portable(arrays, wanted, records)
    loaded = [_cast(found[_PARAMS + name], x) for name, x in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_padded), loaded)


def _check_names(where: str, stored: list[str], wanted: list[str], partial: bool) -> None:
    missing, others = [n for n in wanted if n not in stored], [n for n in stored if n not in wanted]
    if missing:
        has = f" and has {some(others)} that like lacks" if others else ""
        raise ValueError(f"{where} lacks {some(missing)}{has}. Build the parameters as the run did.")
    if others and not partial:
        raise ValueError(f"{where} has {some(others)} that like lacks. Pass partial=True to leave them out.")


def _check_leaf(where: str, name: str, stored: Any, x: Any, cast: bool) -> None:
    if tuple(stored["shape"]) != tuple(x.shape):
        raise ValueError(
            f"{where} has leaf {name!r} of shape {stored['shape']}; like has {list(x.shape)}. Build the parameters "
            "with the sizes of the run."
        )
    if stored["dtype"] != str(x.dtype):
        convertible = _floating(stored["dtype"]) and _floating(x.dtype)
        if not (convertible and cast):
            remedy = "Pass cast=True to convert it." if convertible else "Load it in its own dtype, and convert it."
            raise ValueError(f"{where} has leaf {name!r} of dtype {stored['dtype']}; like has {x.dtype}. {remedy}")


def _floating(dtype: Any) -> bool:
    return dtype != "key" and bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))


def _cast(found: Any, x: Any) -> Any:
    return found if found.dtype == x.dtype else jax.tree.map(lambda array: array.astype(x.dtype), found)

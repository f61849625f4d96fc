"""A kernel and its reference, as an assertion calls them: specs, arguments and results that do not fit are refused.

`jax.shard_map` refuses them too, at more length, after it has traced the kernel, and in terms of its own arguments.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.tree_util import keystr

from shardkit._arguments.checks import divides, format_count, format_sizes, name_axes, quote
from shardkit._jax import compat
from shardkit.meshes.layout import all_axes, broadcast_specs, check_spec, count_devices, split_dims
from shardkit.on_device.means import describe_type
from shardkit.testing._compare import is_spec_or_none, replace_none


def check_axes_of_specs(where: str, mesh: Mesh | AbstractMesh, *specs: Any) -> None:
    """Refuses axes that the mesh does not have, before anything is looked at that a kernel computes."""
    for spec in jax.tree.leaves(specs, is_leaf=is_spec_or_none):
        if isinstance(spec, PartitionSpec):
            check_spec(where, spec, mesh, len(spec))


def check_args(
    where: str, mesh: Mesh | AbstractMesh, in_specs: Any, args: Sequence[Any], symbolic: bool = False
) -> None:
    """Refuses arguments that are no arrays, and specs that do not fit their structure, ranks or sizes.

    Shapes without values are taken where `symbolic`.
    """
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"{where}: args must be a tuple of the arguments; got {describe_type(args)}. Pass args=(x,) for one "
            "argument."
        )
    args = tuple(args)
    for path, x in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(x, jax.ShapeDtypeStruct) and not symbolic:
            raise TypeError(
                f"{where}: args must be arrays, because both functions run with their values; args{keystr(path)} is a "
                "ShapeDtypeStruct. Pass an array of that shape."
            )
        if not _is_array(x):
            raise TypeError(
                f"{where}: the leaves of args must be arrays or numbers; args{keystr(path)} is {_describe(x)}. "
                "Close over it instead, or pass an array."
            )
    if in_specs is None:  # jax takes them from the arguments
        return
    specs = _broadcast(in_specs, args)
    if specs is None:
        raise ValueError(
            f"{where}: in_specs must be one spec for all arguments, or a tuple with one for each of them; got "
            f"{_entries(in_specs)} for {format_count(len(args), 'argument')}. Pass for example in_specs=(P(), "
            "P('data'))."
        )
    for (path, x), spec in zip(jax.tree_util.tree_leaves_with_path(args), specs, strict=True):
        _check_sizes(f"{where}, args{keystr(path)}", mesh, spec, np.shape(x))


def check_arity(where: str, role: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Refuses a function that cannot be called with this number of arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(
            f"{where}: the {role} must take the arguments in args, of which there {_are(len(args))}; it is "
            f"called as {getattr(function, '__name__', role)}{signature}. Pass as many as it takes."
        ) from error


def wrap_kernel(
    where: str, kernel: Callable[..., Any], mesh: Mesh | AbstractMesh, out_specs: Any, check_vma: bool
) -> Callable[..., Any]:
    """The kernel, which refuses results that `out_specs` do not fit; its errors show the arguments of a device."""

    @wraps(kernel)
    def call(*shards: Any) -> Any:
        try:
            results = kernel(*shards)
        except Exception as error:
            # jax's assertion without a message would pass for a difference that is found.
            explained = explain_error(where, error, mesh)
            explained.add_note(
                f"{where}: raised by the kernel, which was called on mesh {format_sizes(mesh.shape.items())} with the "
                f"shards of one device: {_shapes(shards)}."
            )
            # `raise explained from error` would make this error its own cause.
            if explained is error:
                raise
            raise explained from error
        _check_arrays(where, "kernel", results)
        specs = _broadcast(out_specs, results)
        if specs is None:
            raise ValueError(
                f"{where}: out_specs must be one spec for all results of the kernel, or have their structure; got "
                f"{_entries(out_specs)} for {_entries(results)}. Pass a spec for each result."
            )
        for (path, y), spec in zip(jax.tree_util.tree_leaves_with_path(results), specs, strict=True):
            label = f"{where}, the kernel's result{keystr(path)}"
            _check_sizes(label, mesh, spec, np.shape(y), divided=False)
            # Without check_vma no value has varying axes, and jax takes out_specs at their word.
            if check_vma:
                _check_replicated(label, spec, y)
        return results

    return call


def explain_error(where: str, error: Exception, mesh: Mesh | AbstractMesh) -> Exception:
    """An error that jax raises without a message, with a message; any other unchanged."""
    jax_folder = Path(jax.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost frame outside of jax is the line of the kernel that calls it.
    outside_jax = [frame for frame in frames if jax_folder not in Path(frame.filename).parents]
    caller = outside_jax[-1]
    if str(error) or caller is frames[-1]:  # it has a message, or jax did not raise it
        return error
    line = f"{Path(caller.filename).name}:{caller.lineno}"
    return ValueError(
        f"{where}: jax.shard_map must support what the kernel calls at {line}; it raises {type(error).__name__} "
        "without a message, as for a psum with axis_index_groups or over an unknown axis. Use the mesh's axes, "
        f"{quote(mesh.axis_names)}, and make groups an axis of the mesh."
    )


def wrap_reference(where: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference, which refuses results that are no arrays; its errors show its arguments."""

    @wraps(reference)
    def call(*args: Any) -> Any:
        try:
            results = reference(*args)
        except Exception as error:
            error.add_note(
                f"{where}: raised by the reference, which was called with the global arrays: {_shapes(args)}. It runs "
                "without a mesh, so it must not send anything."
            )
            raise
        _check_arrays(where, "reference", results)
        return results

    return call


def _check_arrays(where: str, role: str, results: Any) -> None:
    for path, y in jax.tree_util.tree_leaves_with_path(results):
        if not _is_array(y):
            raise TypeError(
                f"{where}: the {role} must return arrays; its result{keystr(path)} is {_describe(y)}. Return only the "
                "arrays to compare."
            )


def _check_sizes(
    where: str, mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: Sequence[int], divided: bool = True
) -> None:
    """Refuses a spec that does not fit the mesh, or a `divided` dim whose axes do not divide its size."""
    check_spec(where, spec, mesh, len(shape))
    if not divided:  # a result is a device's piece, of any size
        return
    for dim, axes in split_dims(spec).items():
        divides(where, dim, shape[dim], axes, count_devices(mesh, axes))


def _check_replicated(where: str, spec: PartitionSpec, y: Any) -> None:
    varies = compat.varying_axes(y)
    hidden = sorted(varies - all_axes(spec))
    if hidden:
        raise ValueError(
            f"{where}: a result must be the same on all devices along an axis that out_specs does not name; it varies "
            f"along {quote(hidden)}, and its spec is {spec}. Reduce or gather it over {name_axes(hidden)}, or name "
            "the axis in out_specs."
        )


def _broadcast(specs: Any, tree: Any) -> list[PartitionSpec] | None:
    """The spec of each leaf; None if the specs do not have the structure of the tree."""
    try:
        spec_tree = broadcast_specs(replace_none(specs), tree)
    except ValueError:
        return None
    return jax.tree.leaves(spec_tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _is_array(x: Any) -> bool:
    """Whether jax takes it as an array: of numbers, booleans, a dtype of ml_dtypes (kind V), or keys."""
    try:
        if not hasattr(x, "dtype"):
            x = np.asarray(x)
        return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended)) or x.dtype.kind in "biufcV"
    except (TypeError, ValueError):  # ragged lists, and dtypes of other libraries
        return False


def _describe(x: Any) -> str:
    if isinstance(x, str):
        return repr(x)
    return f"a {type(x).__name__}"


def _shapes(args: Any) -> str:
    shapes = map(describe_type, jax.tree.leaves(args))
    return ", ".join(shapes) or "nothing"


def _entries(specs: Any) -> str:
    if is_spec_or_none(specs):
        return str(specs)
    if isinstance(specs, tuple | list):
        return f"a {type(specs).__name__} of {len(specs)}"
    return f"a {type(specs).__name__}"


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"

"""Muon by owners: every matrix is whole on one device, which orthogonalizes it for all.

Where matrices are split, or on many devices alike, the partitioner gathers each of them on every device, and all
compute the same. Here the matrices of one shape are dealt to the devices by an all_to_all; each orthogonalizes its own,
and another all_to_all brings the updates back to the layout of the parameters.

Worked example: a leaf [4, 8, 6], the matrices A, B, C, D of four layers. `fsdp` splits their rows over 4 devices.

    device                              0             1             2             3
    holds, [4, 2, 6]                    A B C D       A B C D       A B C D       A B C D
                                        rows 0, 1     rows 2, 3     rows 4, 5     rows 6, 7
    sends its two rows of A to device 0, of B to device 1, of C to device 2, of D to device 3: an all_to_all
    owns, [1, 8, 6]                     A             B             C             D
    orthogonalizes the matrix that it owns
    sends rows 0, 1 of it to device 0, rows 2, 3 to device 1, and so on: the second all_to_all
    holds, [4, 2, 6]                    the same rows of the four results

What dims are called: optax's *dimension numbers* of a leaf, which users pass, name the dims of its rows and columns.
`_MatrixDims` are the same counted from the front, with the *batch* dims, here that of the layers. A *stack* is an array
[matrices, rows..., columns...], to which a device brings its shard of each leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import at_least_zero, dim_of, whole
from shardkit._arguments.typed import Optimizer, short, typed
from shardkit.collectives import all_gather, axis_index
from shardkit.meshes.layout import canonical, path_name, spec_axes
from shardkit.plans.axis_types import auto_mesh
from shardkit.plans.dim_rules import is_function
from shardkit.plans.plan import Plan
from shardkit.plans.storage import collect_arrays, pad_to, padded_shape

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]


@typed
def muon(
    learning_rate: float | jax.Array | Callable[[Any], Any],
    *,
    mesh: Mesh,
    plan: Plan,
    ns_coeffs: Any = (3.4445, -4.7750, 2.0315),
    ns_steps: int | jax.Array = 5,
    beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_decay: float | jax.Array = 0.0,
    nesterov: bool = True,
    preconditioning: Preconditioning = "frobenius",
    consistent_rms: float | None = None,
    muon_weight_dimension_numbers: Any = None,
    adam: Optimizer | None = None,
) -> optax.GradientTransformation:
    """`optax.contrib.muon` with the work shared: one device orthogonalizes each matrix, for all devices.

    It deals the matrices of one shape and layout to all devices that hold parts or copies of them. State and results
    are the same as with optax, so you can change from one to the other within a run.

    Args:
        learning_rate: a number or an optax schedule.
        mesh, plan: the same as for `make_train_step`; in a worker of `diloco`, the mesh `make_step` gets.
        ns_coeffs, ns_steps, beta, eps, weight_decay, nesterov, preconditioning, consistent_rms: as for
            `optax.contrib.muon`, with coefficients as numbers.
        muon_weight_dimension_numbers: as for `optax.contrib.muon`: the dims of each leaf that are rows and columns of a
            matrix. A leaf has one matrix for each entry of its other dims (layers, heads). Pass a tree of
            `optax.contrib.MuonDimensionNumbers`, with None for the leaves of `adam`, or a function of the
            parameters. None: all leaves of two dims.
        adam: the optimizer of all other leaves. None: as in optax, adamw without decay.

    Returns:
        An optimizer for `make_train_step` with this mesh and plan.

    Raises:
        TypeError, ValueError: an argument out of range; at trace time no parameters, or dims a leaf does not have.

    Cost: the cost of the plan, and for B bytes of matrices on each device: if they are split over n devices (fsdp,
        zero1, tp), two all_to_alls, 2 B (n-1)/n; if they are whole on n devices (dp), an all_gather of the updates,
        B (n-1)/n; if layers or heads are split (pp), nothing. The number of matrices is padded to a multiple of n.
        Iterations take 1/n of the FLOPs of one device.

    Example:
        >>> plan = sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1))
        >>> optimizer = sk.muon(0.02, mesh=mesh, plan=plan)
        >>> loss_fn = lambda params, batch, keys: jnp.mean((batch @ params["w"]) ** 2)
        >>> init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optimizer, mesh=mesh, plan=plan)
        >>> state, _ = step(init({"w": jnp.eye(8)}, jax.random.key(0)), jnp.ones((16, 8)))
        >>> print(sk.census(step, state, jnp.ones((16, 8))).count(kind="all_to_all"))
        2

    Source: Jordan, Muon (https://kellerjordan.github.io/posts/muon/); Liu et al. (arXiv:2502.16982), section 3.
    """
    hyperparameters = {"beta": beta, "eps": eps, "weight_decay": weight_decay, "learning_rate": learning_rate}
    _check_hyperparameters(hyperparameters, ns_steps, consistent_rms)
    ns_coeffs = _check_coefficients(ns_coeffs, ns_steps)
    dimension_numbers = muon_weight_dimension_numbers
    _check_dimension_numbers(dimension_numbers)
    iterations = {"ns_coeffs": ns_coeffs, "ns_steps": ns_steps, "eps": eps, "preconditioning": preconditioning}
    if adam is None:
        adam = optax.adamw(learning_rate, eps=eps, weight_decay=0.0, nesterov=nesterov)

    def label_leaves(params: Any) -> Any:
        def label(numbers: Any) -> str:
            return "adam" if numbers is None else "muon"

        return jax.tree.map(label, _spread_numbers(dimension_numbers, params), is_leaf=_is_numbers)

    def make_optimizer(specs: dict[str, PartitionSpec], dims: dict[str, _MatrixDims]) -> optax.GradientTransformation:
        owners = _Owners(auto_mesh(mesh), plan.axes, specs, dims)
        matrices = optax.chain(
            _scale_by_owners(owners, beta, nesterov, iterations),
            _scale_by_shape(dims, consistent_rms),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )
        return optax.partition({"muon": matrices, "adam": adam}, label_leaves)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise TypeError("muon: update must be passed the parameters, for their layout; got None. Pass them third.")
        specs = collect_arrays(plan.placement(params, mesh).update)
        dims = _find_dims(dimension_numbers, params)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes an integer count
            return make_optimizer(specs, dims).update(updates, state, params)

    # The state is that of optax's transformations, which neither specs nor dims change.
    return optax.GradientTransformation(make_optimizer({}, {}).init, update)


def _check_hyperparameters(hyperparameters: dict[str, Any], ns_steps: Any, consistent_rms: float | None) -> None:
    """Refuses hyperparameters out of range; arrays and schedules cannot be read here."""
    numbers = {}
    for name, value in hyperparameters.items():
        if isinstance(value, float | int | np.number):
            numbers[name] = float(value)
    at_least_zero("muon", consistent_rms=consistent_rms or 0.0, **numbers)
    if not isinstance(ns_steps, jax.Array):
        whole("muon", ns_steps=ns_steps)
    if numbers.get("beta", 0) >= 1:
        raise ValueError(
            "muon: beta must be below 1, the share of the momentum that is kept; got "
            f"{hyperparameters['beta']}. Pass 0.95."
        )


def _check_dimension_numbers(tree: Any) -> None:
    """Refuses a tree of anything but optax's dimension numbers and None; what a function returns is not known yet."""
    if is_function(tree):
        return
    for numbers in jax.tree.leaves(tree, is_leaf=_is_numbers):
        if not _is_numbers(numbers):
            raise TypeError(
                "muon: muon_weight_dimension_numbers must be a tree of optax.contrib.MuonDimensionNumbers and None, or "
                f"a function that returns one; got {short(tree)}. Pass None for all leaves of two dims."
            )


def _is_numbers(x: Any) -> bool:
    """Whether a node of a tree is the dimension numbers of a leaf; None stands for a leaf that `adam` updates."""
    return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)


def _spread_numbers(tree: Any, params: Any) -> Any:
    """A tree like the parameters, with the dimension numbers of each leaf, or None.

    Worked example: {"layers": numbers, "embed": None} of the user says the same of all leaves under "layers".
    """
    if tree is None:
        return jax.tree.map(_choose_numbers, params)
    if is_function(tree):
        tree = tree(params)

    def spread(numbers: Any, subtree: Any) -> Any:
        return jax.tree.map(lambda _: numbers, subtree)

    return jax.tree.map(spread, tree, params, is_leaf=_is_numbers)


def _choose_numbers(x: Any) -> Any:
    """As optax chooses: leaves of two dims are matrices."""
    if jnp.ndim(x) == 2:
        return optax.contrib.MuonDimensionNumbers()
    return None


def _check_coefficients(coefficients: Any, steps: Any) -> Any:
    """Coefficients of the iterations as floats; refuses all but three finite ones, or three for each of the steps."""
    if isinstance(coefficients, jax.core.Tracer):
        return coefficients
    try:
        numbers = np.asarray(coefficients, np.float64)
    except (TypeError, ValueError):  # words, or rows of unequal length
        numbers = np.zeros(())
    if numbers.shape[-1:] != (3,) or numbers.ndim > 2 or not np.isfinite(numbers).all():
        raise ValueError(
            f"muon: ns_coeffs must be three finite numbers, or three for each step; got {short(coefficients)}. Pass "
            "for example (3.4445, -4.7750, 2.0315)."
        )
    if numbers.ndim == 2 and not isinstance(steps, jax.Array):
        rows = len(numbers)
        if not 0 < rows <= steps:
            raise ValueError(
                f"muon: ns_coeffs with one row for each step must have 1 to ns_steps={steps} rows; got {rows}. Pass "
                f"ns_steps={max(rows, 1)}."
            )
    if np.asarray(coefficients).dtype.kind == "f":
        return coefficients
    return np.asarray(coefficients, np.float32)


class _MatrixDims(NamedTuple):
    """Which dims of a leaf are what, counted from the front.

    Of a stack of projections into heads [layers, model, heads, head size], whose matrices map the model to all heads:
    batch (0,), rows (1,), columns (2, 3).
    """

    batch: tuple[int, ...]  # one matrix for each entry
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def matrix(self) -> tuple[int, ...]:
        """The dims of one matrix."""
        return self.rows + self.columns

    @property
    def stack_order(self) -> tuple[int, ...]:
        """The order in which all dims stand in a stack."""
        return self.batch + self.matrix


def _find_dims(dimension_numbers: Any, params: Any) -> dict[str, _MatrixDims]:
    """The dims of each leaf that has matrices, by path."""
    ndims = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        ndims[path_name(path)] = jnp.ndim(x)
    tree = _spread_numbers(dimension_numbers, params)
    dims = {}
    for path, numbers in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_numbers):
        if numbers is not None:
            name = path_name(path)
            dims[name] = _read_numbers(name, ndims[name], numbers)
    return dims


def _read_numbers(path: str, ndim: int, numbers: Any) -> _MatrixDims:
    """The dims of a leaf that optax's dimension numbers name; all others are batch dims."""
    rows = _count_from_front(path, ndim, numbers.reduction_axis)
    columns = _count_from_front(path, ndim, numbers.output_axis)
    if not rows or not columns or set(rows) & set(columns):
        raise ValueError(
            f"muon: rows and columns of leaf {path} must be different dims; got {rows} and {columns}. Name others, or "
            "None for adam."
        )
    batch = tuple(dim for dim in range(ndim) if dim not in rows + columns)
    return _MatrixDims(batch, rows, columns)


def _count_from_front(path: str, ndim: int, dims: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(dim_of(f"muon: leaf {path}", dim, ndim) for dim in dims)


def _scale_by_shape(dims: dict[str, _MatrixDims], consistent_rms: float | None) -> optax.GradientTransformation:
    """Multiplies each update by the factor that optax has for the shape of its matrix."""

    def scale(path: Any, x: jax.Array) -> jax.Array:
        leaf_dims = dims[path_name(path)]
        fan_in = math.prod(x.shape[dim] for dim in leaf_dims.rows)
        fan_out = math.prod(x.shape[dim] for dim in leaf_dims.columns)
        if consistent_rms is None:
            return jnp.sqrt(jnp.maximum(1, fan_out / fan_in)) * x
        return jnp.sqrt(jnp.maximum(fan_in, fan_out)) * consistent_rms * x

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


def _scale_by_owners(
    owners: _Owners, beta: Any, nesterov: bool, iterations: dict[str, Any]
) -> optax.GradientTransformation:
    """optax's `scale_by_muon`: its momentum on each device's parts, its iterations by the owner of each matrix."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree_utils.tree_update_moment(updates, state.mu, beta, 1)
        if nesterov:  # the momentum of the next step, as if it had the same gradient
            momentum = optax.tree_utils.tree_bias_correction(mu, beta, optax.safe_increment(count))
            grads = optax.tree_utils.tree_bias_correction(updates, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, grads)
        else:
            momentum = optax.tree_utils.tree_bias_correction(mu, beta, count)
        return owners.orthogonalize(momentum, iterations), state._replace(count=count, mu=mu)

    optax_muon = optax.contrib.scale_by_muon(beta=beta, nesterov=nesterov, **iterations)
    return optax.GradientTransformation(optax_muon.init, update)


class _Member(NamedTuple):
    """A leaf in a group."""

    path: str
    shape: tuple[int, ...]  # its global shape
    dims: _MatrixDims
    spec: tuple[tuple[str, ...], ...]  # the mesh axes of each dim

    def group_key(self, dtype: Any) -> Any:
        """What leaves have in common whose matrices are stacked: their shape, how they are split, and their dtype."""
        matrix = tuple((self.shape[dim], self.spec[dim]) for dim in self.dims.matrix)
        # Devices along the axes that split layers or heads hold other matrices, so along these no replicas take turns.
        layer_axes: frozenset[str] = frozenset()
        for dim in self.dims.batch:
            layer_axes |= set(self.spec[dim])
        return matrix, len(self.dims.rows), layer_axes, dtype


class _Owners(NamedTuple):
    """Which device orthogonalizes which matrix."""

    mesh: Mesh
    axes: tuple[str, ...]  # those of the plan: along others stand workers of another step
    specs: dict[str, PartitionSpec]  # how the leaves are split, by path
    dims: dict[str, _MatrixDims]  # their dims, by path

    def orthogonalize(self, tree: Any, iterations: dict[str, Any]) -> Any:
        """The Newton-Schulz iterations of each matrix of a tree of global arrays, which stay as they are split."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        members = []
        specs = []
        padded = []
        positions_by_group: dict[Any, list[int]] = {}
        for position, (path, x) in enumerate(leaves):
            member = self._make_member(path_name(path), x.shape)
            spec = canonical(PartitionSpec(*member.spec))
            members.append(member)
            specs.append(spec)
            padded.append(_pad(x, spec, self.mesh))
            positions_by_group.setdefault(member.group_key(x.dtype), []).append(position)

        def orthogonalize_shards(shards: list[jax.Array]) -> list[jax.Array]:
            # The groups are independent of each other: while a device computes one, the next may be on its way.
            for positions in positions_by_group.values():
                group = self._make_group([members[position] for position in positions])
                results = group.orthogonalize([shards[position] for position in positions], iterations)
                for position, result in zip(positions, results, strict=True):
                    shards[position] = result
            return shards

        on_mesh = jax.shard_map(orthogonalize_shards, mesh=self.mesh, in_specs=(specs,), out_specs=specs)
        results = []
        for x, member in zip(on_mesh(padded), members, strict=True):
            results.append(_cut(x, member.shape))
        return jax.tree.unflatten(structure, results)

    def _make_member(self, path: str, shape: tuple[int, ...]) -> _Member:
        spec: list[tuple[str, ...]] = [()] * len(shape)
        for dim, axes in enumerate(spec_axes(self.specs[path])):
            spec[dim] = tuple(axis for axis in axes if self.mesh.shape[axis] > 1)
        return _Member(path, shape, self.dims[path], tuple(spec))

    def _make_group(self, members: Sequence[_Member]) -> _Group:
        first = members[0]
        split_dims = {}
        # In a stack the dims of a matrix are 1, 2, ...: dim 0 counts the matrices.
        for stack_dim, dim in enumerate(first.dims.matrix, 1):
            if first.spec[dim]:
                split_dims[stack_dim] = first.spec[dim]
        split_axes: set[str] = set().union(*first.spec)
        replicated_axes = []
        for axis in self.axes:
            if axis not in split_axes and self.mesh.shape[axis] > 1:
                replicated_axes.append(axis)
        return _Group(tuple(members), self.mesh.shape, split_dims, tuple(replicated_axes))


class _Group(NamedTuple):
    """Leaves whose matrices have one shape and dtype, and are split alike: they are stacked, and sent together.

    Worked example, with padding: ten 8x6 matrices in float32, rows over "fsdp" of 4 devices. Shapes on one device, and
    what it sends:

    | step | shape | bytes sent |
    |---|---|--:|
    | a piece of each matrix, stacked | [10, 2, 6] | |
    | padded to a multiple of 4 owners | [12, 2, 6] | |
    | all_to_all: three whole matrices | [3, 8, 6] | 3/4 of 576 = 432 |
    | orthogonalized, each by one device | [3, 8, 6] | |
    | all_to_all: its piece of each matrix | [12, 2, 6] | 432 |
    | without the padding | [10, 2, 6] | |

    With "dp" of 2 devices beside it there are 8 owners, and the stack is padded to 16. Both devices of "dp" hold the
    same pieces: the first keeps the first 8, the second the last 8, and an all_gather over "dp" at the end brings them
    together.
    """

    members: tuple[_Member, ...]
    sizes: Mapping[str, int]  # of the mesh axes
    split_dims: dict[int, tuple[str, ...]]  # the mesh axes that split a dim of the stack
    replicated_axes: tuple[str, ...]  # along which devices hold the same pieces

    def orthogonalize(self, shards: Sequence[jax.Array], iterations: dict[str, Any]) -> list[jax.Array]:
        """The results for the shards of the leaves, in their layout."""
        stacks = []
        for shard, member in zip(shards, self.members, strict=True):
            stacks.append(_stack(shard, member.dims))
        x = jnp.concatenate(stacks)
        count = x.shape[0]
        x = self._send_to_owners(x)
        shape_of_shards = x.shape
        # A padded matrix may be taller than wide where the matrix itself is not, which optax would transpose.
        first = self.members[0]
        x = _cut(x, (x.shape[0], *(first.shape[dim] for dim in first.dims.matrix)))
        x = _iterate(x, len(first.dims.rows), iterations)
        x = pad_to(x, shape_of_shards)
        x = self._send_back(x)

        ends = np.cumsum([stack.shape[0] for stack in stacks])[:-1]
        pieces = jnp.split(x[:count], ends)
        results = []
        for piece, shard, member in zip(pieces, shards, self.members, strict=True):
            results.append(_unstack(piece, shard.shape, member.dims))
        return results

    def _send_to_owners(self, x: jax.Array) -> jax.Array:
        """Of a piece of each matrix, some whole matrices: those of this device."""
        replicas = self._count_devices(self.replicated_axes)
        owners = replicas
        for axes in self.split_dims.values():
            owners *= self._count_devices(axes)
        x = jnp.pad(x, [(0, -x.shape[0] % owners), *[(0, 0)] * (x.ndim - 1)])
        if self.replicated_axes:
            # Devices that have the same pieces take different matrices. Nothing is sent: each has all of them.
            size = x.shape[0] // replicas
            x = lax.dynamic_slice_in_dim(x, axis_index(self.replicated_axes) * size, size)
        # Whole matrices come together here, and only here: a device gives away its piece of each matrix that is not its
        # own, and gets the other pieces of its own, over one split dim after the other. An all_gather would bring every
        # matrix to every device, n times the bytes, and all of them would compute the same. Dealing gradients, before
        # the momentum, would cost the same bytes, but an owner would then hold the momentum of whole matrices, and the
        # state would no longer be optax's. lax is called directly: all axes are bound and have several devices, pieces
        # vary over them, and all dims divide.
        for dim, axes in self.split_dims.items():
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=dim, tiled=True)
        return x

    def _send_back(self, x: jax.Array) -> jax.Array:
        """The inverse of `_send_to_owners`, but for its padding."""
        # The last dim that was put together is the first that is taken apart.
        for dim, axes in reversed(self.split_dims.items()):
            x = lax.all_to_all(x, axes, split_axis=dim, concat_axis=0, tiled=True)
        if self.replicated_axes:
            # Replicated, because the update is added to parameters that are the same along these axes: a result that
            # varied could leave shard_map only as split.
            x = all_gather(x, self.replicated_axes, replicated=True)
        return x

    def _count_devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def _iterate(x: jax.Array, row_dims: int, iterations: dict[str, Any]) -> jax.Array:
    """optax's Newton-Schulz iterations of stacked matrices [matrices, rows..., columns...]."""
    rows = tuple(range(1, 1 + row_dims))
    columns = tuple(range(1 + row_dims, x.ndim))
    dimension_numbers = optax.contrib.MuonDimensionNumbers(rows, columns)
    # Without momentum optax's transformation is the iterations alone.
    transformation = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=dimension_numbers, **iterations
    )
    x, _ = transformation.update(x, transformation.init(x))
    return x


def _pad(x: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """With zeros where a dim does not divide: rows and columns of zeros change nothing in the others."""
    return pad_to(x, padded_shape(x.shape, spec, mesh))


def _cut(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x[tuple(slice(size) for size in shape)]


def _stack(x: jax.Array, dims: _MatrixDims) -> jax.Array:
    """All matrices of a leaf, one behind the other: [matrices, rows..., columns...]."""
    # Of the projections into heads above, [6, 8, 4, 2]: [6, 8, 4, 2] again, six matrices. If each head has a matrix of
    # its own, the batch dims are (0, 2): [6, 4, 8, 2], and then [24, 8, 2].
    x = x.transpose(dims.stack_order)
    batch_shape = x.shape[: len(dims.batch)]
    matrix_shape = x.shape[len(dims.batch) :]
    return x.reshape(math.prod(batch_shape), *matrix_shape)


def _unstack(x: jax.Array, shape: Sequence[int], dims: _MatrixDims) -> jax.Array:
    """The inverse of `_stack`, for a leaf of this shape."""
    x = x.reshape([shape[dim] for dim in dims.stack_order])
    inverse = [dims.stack_order.index(dim) for dim in range(len(shape))]
    return x.transpose(inverse)

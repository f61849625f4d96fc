"""Muon with the work shared: the momentum on each device's parts, each matrix orthogonalized by one device.

Where matrices are split, or on many devices alike, the partitioner gathers each of them on every device, and all
compute the same. Here every matrix has an owner (`owners.py`), and `matrix_dims.py` says which dims of a leaf are a
matrix. Everything else is optax's: the state, the momentum, the factor for the shape of a matrix, decay, and the
optimizer of all other leaves.

Worked example: ten 8x6 matrices in float32, rows over "fsdp" of 4 devices. A device holds two rows of each, 480 bytes.

| | a device sends | and orthogonalizes |
|---|--:|--:|
| the partitioner: an all_gather, its rows to 3 others | 1440 bytes | 10 matrices |
| here: padded to 12, an all_to_all and another back, 3/4 of 576 bytes each | 864 bytes | 3 matrices |

`_Group` of `owners.py` follows the shapes from one to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import at_least_zero, integers_from_one
from shardkit._arguments.typed import Optimizer, short, typed
from shardkit.meshes.layout import path_name
from shardkit.optimizers.matrix_dims import (
    MatrixDims,
    broadcast_numbers,
    check_dimension_numbers,
    find_dims,
    is_dimension_numbers,
)
from shardkit.optimizers.owners import Owners
from shardkit.plans.axis_types import auto_mesh
from shardkit.plans.plan import Plan
from shardkit.plans.storage import leaves_by_path

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
    are the same as with optax, so you can change from one to the other within a run. What optax takes besides is not
    here: `weight_decay_mask`, `mu_dtype`, `adaptive`, and coefficients by name; for its `adam_` arguments pass `adam`.

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
    hyperparameters = {
        "beta": beta,
        "eps": eps,
        "weight_decay": weight_decay,
        "learning_rate": learning_rate,
    }
    _check_hyperparameters(hyperparameters, ns_steps, consistent_rms)
    dimension_numbers = muon_weight_dimension_numbers
    check_dimension_numbers(dimension_numbers)
    iterations = {
        "ns_coeffs": _check_coefficients(ns_coeffs, ns_steps),
        "ns_steps": ns_steps,
        "eps": eps,
        "preconditioning": preconditioning,
    }
    if adam is None:
        adam = optax.adamw(learning_rate, eps=eps, weight_decay=0.0, nesterov=nesterov)

    # `optax.partition` gives each of the two the leaves with its label, and masks all others.
    def label_leaves(params: Any) -> Any:
        numbers = broadcast_numbers(dimension_numbers, params)
        return jax.tree.map(_choose_label, numbers, is_leaf=is_dimension_numbers)

    def make_optimizer(specs: dict[str, PartitionSpec], dims: dict[str, MatrixDims]) -> optax.GradientTransformation:
        # The optimizer runs outside of the step's shard_map, on global arrays, which XLA's partitioner splits: the axes
        # of its mesh are Auto.
        owners = Owners(auto_mesh(mesh), plan.axes, specs, dims)
        muon_transformation = optax.chain(
            _scale_by_owners(owners, beta, nesterov, iterations),
            _scale_by_shape(dims, consistent_rms),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )
        return optax.partition({"muon": muon_transformation, "adam": adam}, label_leaves)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise TypeError("muon: update must be passed the parameters, for their layout; got None. Pass them third.")
        # In the layout of gradients and of the state.
        specs = leaves_by_path(plan.placement(params, mesh).update)
        dims = find_dims(dimension_numbers, params)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes an integer count
            return make_optimizer(specs, dims).update(updates, state, params)

    # The state is that of optax's transformations, which neither specs nor dims change.
    return optax.GradientTransformation(make_optimizer({}, {}).init, update)


def _choose_label(numbers: Any) -> str:
    if numbers is None:
        return "adam"
    return "muon"


def _check_hyperparameters(hyperparameters: dict[str, Any], ns_steps: Any, consistent_rms: float | None) -> None:
    """Refuses hyperparameters out of range; arrays and schedules cannot be read here."""
    numbers = {}
    for name, value in hyperparameters.items():
        if isinstance(value, float | int | np.number):
            numbers[name] = float(value)
    at_least_zero("muon", consistent_rms=consistent_rms or 0.0, **numbers)
    if not isinstance(ns_steps, jax.Array):
        integers_from_one("muon", ns_steps=ns_steps)
    if numbers.get("beta", 0) >= 1:
        raise ValueError(
            "muon: beta must be below 1, the share of the momentum that is kept; got "
            f"{hyperparameters['beta']}. Pass 0.95."
        )


def _check_coefficients(coefficients: Any, steps: Any) -> Any:
    """Coefficients of the iterations as floats; refuses all but three finite ones, or three for each of the steps."""
    if isinstance(coefficients, jax.core.Tracer):
        return coefficients
    numbers = _read_floats(coefficients)
    if numbers is None or numbers.shape[-1:] != (3,) or numbers.ndim > 2 or not np.isfinite(numbers).all():
        raise ValueError(
            f"muon: ns_coeffs must be three finite numbers, or three for each step; got {short(coefficients)}. Pass "
            "for example (3.4445, -4.7750, 2.0315)."
        )
    if numbers.ndim == 2 and not isinstance(steps, jax.Array):
        _check_rows(len(numbers), steps)
    if np.asarray(coefficients).dtype.kind == "f":  # the dtype of an array of floats stays
        return coefficients
    return np.asarray(coefficients, np.float32)


def _read_floats(coefficients: Any) -> np.ndarray | None:
    """Numbers as float64; None for words, or rows of unequal length."""
    try:
        return np.asarray(coefficients, np.float64)
    except (TypeError, ValueError):
        return None


def _check_rows(rows: int, steps: int) -> None:
    if not 0 < rows <= steps:
        raise ValueError(
            f"muon: ns_coeffs with one row for each step must have 1 to ns_steps={steps} rows; got {rows}. Pass "
            f"ns_steps={max(rows, 1)}."
        )


def _scale_by_shape(dims: dict[str, MatrixDims], consistent_rms: float | None) -> optax.GradientTransformation:
    """Multiplies each update by the factor that optax has for the shape of its matrix."""

    def scale(path: Any, x: jax.Array) -> jax.Array:
        leaf_dims = dims[path_name(path)]
        # optax's `reduction_axis` and `output_axis`.
        fan_in = math.prod(x.shape[dim] for dim in leaf_dims.rows)
        fan_out = math.prod(x.shape[dim] for dim in leaf_dims.columns)
        if consistent_rms is None:
            return jnp.sqrt(jnp.maximum(1, fan_out / fan_in)) * x
        return jnp.sqrt(jnp.maximum(fan_in, fan_out)) * consistent_rms * x

    def update(updates: Any, params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(scale, updates)

    return optax.stateless(update)


def _scale_by_owners(
    owners: Owners, beta: Any, nesterov: bool, iterations: dict[str, Any]
) -> optax.GradientTransformation:
    """optax's `scale_by_muon`: its momentum on each device's parts, its iterations by the owner of each matrix."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree_utils.tree_update_moment(updates, state.mu, beta, 1)
        if nesterov:  # the momentum of the next step, as if it had the same gradient
            next_count = optax.safe_increment(count)
            momentum = optax.tree_utils.tree_bias_correction(mu, beta, next_count)
            grads = optax.tree_utils.tree_bias_correction(updates, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, grads)
        else:
            momentum = optax.tree_utils.tree_bias_correction(mu, beta, count)
        results = owners.orthogonalize(momentum, iterations)
        return results, state._replace(count=count, mu=mu)

    # Of optax's transformation only the state is needed.
    optax_muon = optax.contrib.scale_by_muon(beta=beta, nesterov=nesterov, **iterations)
    return optax.GradientTransformation(optax_muon.init, update)

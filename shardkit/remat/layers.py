"""Functions that open the handles among their arguments: one layer, or a stack of layers one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._check import named
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.collectives.axes import vary_like
from shardkit.partitioning.batch import split_microbatches
from shardkit.partitioning.handles import is_handle, opened, parts, unsealed
from shardkit.remat.recompute import POLICIES, Mask, Remat, policy_of
from shardkit.remat.regather import regathered, regathered_stack

LayerFn = Callable[[Any, Any], Any]


@typed
def gathered(
    layer_fn: Callable[..., Any], *, keep: bool = False, remat: Remat = None, offload: bool = False
) -> Callable[..., Any]:
    """A function that gathers its weights when it is called, and again for its backward pass.

    On plain arrays, without handles among its arguments, it is `layer_fn` itself, under the same `remat`: one text of a
    loss runs on one device and under every plan.

    Args:
        layer_fn: any function; handles anywhere in its arguments are opened before it sees them.
        keep: hold the gathered weights for the backward pass instead of gathering again; one gather less, and all
            layers' weights in memory.
        remat: what the backward pass finds saved, as for `scan_layers`. None is "dots" where weights are gathered
            again, and otherwise what jax keeps.
        offload: save into the host's memory, as for `scan_layers`.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: an unknown policy, or one that cannot be offloaded.

    Cost: an all_gather of each handle's part, twice unless `keep`, and a reduce_scatter of its gradient. The CPU
        compiler, for simulated devices, merges the two gathers and keeps the weights; those of TPU and GPU do not.

    Example:
        >>> project = sk.gathered(lambda w, x: x @ w)
        >>> grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean(project(params["layers"], batch)))
        >>> plan = sk.fsdp("model", layerwise=("layers",), min_size=1)
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
        >>> state, metrics = step(init({"layers": jnp.ones((8, 8))}, jax.random.key(0)), jnp.ones((4, 8)))

    Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3: reshard after forward.
    """
    policy = None if remat is None and not offload else policy_of("gathered", remat, offload)

    @wraps(layer_fn)
    def layer(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(unsealed((args, kwargs)), is_leaf=is_handle)
        if keep or not any(is_handle(leaf) for leaf in leaves):
            args, kwargs = jax.tree.unflatten(tree, opened(leaves))
            return (jax.checkpoint(layer_fn, policy=policy) if policy else layer_fn)(*args, **kwargs)

        handles = Mask([is_handle(leaf) for leaf in leaves])

        def again(weights: list[Any], others: list[Any]) -> Any:
            args, kwargs = jax.tree.unflatten(tree, handles.join(weights, others))
            return layer_fn(*args, **kwargs)

        return regathered(again, *handles.split(leaves), policy=policy or POLICIES["dots"])

    return layer


@typed
def scan_layers(
    layer_fn: LayerFn,
    stacked: Arrays,
    x: Arrays,
    *,
    prefetch: bool = False,
    remat: Remat = None,
    offload: bool = False,
    microbatches: int = 1,
) -> Any:
    """Runs a stack of layers, `x = layer_fn(weights, x)` from the first to the last.

    One text of a loss runs on one device and under every plan: plain arrays are scanned as they are, handles are opened
    layer by layer. To treat some layers otherwise than others, run two stacks: `scan_layers` with `remat="dots"` over
    `jax.tree.map(lambda leaf: leaf[:4], stacked)`, then with `remat="full"` over `leaf[4:]`.

    Args:
        layer_fn: a layer: its weights (one slice of `stacked`) and the activations to the next activations, of the
            same shapes and dtypes.
        stacked: pytree whose arrays and handles have the layer as dim 0; integers, such as layer numbers, are allowed.
        x: pytree of activations; integers and keys, such as one key for each example, are allowed.
        prefetch: gather the next layer's weights while this one computes, forward and backward. Not worth it with
            `microbatches`, whose loop hides no gather: the v5e compiler then gathers again inside of it.
        remat: what the backward pass finds saved: "full" recomputes all from the layer's input, "dots" all but the
            results of matmuls, which matmul_reduce_scatter has summed, and of attention along an axis,
            "dots_without_batch" all but those of matmuls without batch dims; a tuple saves what
            `jax.ad_checkpoint.checkpoint_name` gave one of these names; or a policy of `jax.checkpoint_policies`. None
            keeps what jax keeps of plain arrays in one microbatch, and otherwise is "dots". Whatever it is, weights
            that were gathered, and all that follows from weights alone, are never saved.
        offload: save into the host's memory what "dots_without_batch" or a tuple of names would save.
        microbatches: cut dim 0 of every activation into so many parts, and run them all through a layer, one after
            the other, before the next layer: its weights are gathered and its gradient is scattered once for all. The
            parts' gradients are summed in float32. Every layer's input is kept for all of them; what a layer holds
            while it computes is that of one.

    Returns:
        The activations after the last layer.

    Raises:
        TypeError: a list of layers where a stack is meant.
        ValueError: an unknown policy, one that cannot be offloaded, leaves with different numbers of layers or whose
            layers a plan splits, or activations that do not divide into the microbatches.

    Cost: two all_gathers and one reduce_scatter of each layer's weights, with `prefetch` as without it, whatever
        `microbatches`: 3 (n-1)/n of the bytes of parameters that fsdp shards. On a device or under a plan that gathers
        nothing, nothing.

    Example:
        >>> stack, x = jnp.full((3, 8, 8), 0.5), jnp.ones((2, 8))
        >>> y = sk.scan_layers(lambda w, x: x @ w, stack, x, remat="full")
        >>> float(y[0, 0])  # 4 * 4 * 4
        64.0

    Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3.3: forward and backward prefetching; Lamy-Poirier,
        Layered gradient accumulation (arXiv:2106.02679): a layer at a time over all microbatches.
    """
    policy = None if remat is None and not offload else policy_of("scan_layers", remat, offload)
    stacked = unsealed(stacked)
    _check_stack(stacked)
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(parts(stacked))}
    if len(counts) != 1:
        raise ValueError(
            f"scan_layers: all leaves must have the same number of layers along dim 0; got {sorted(counts)}. Stack "
            "them, and pass what the layers share through layer_fn."
        )
    (layers,) = counts
    first = jax.tree.map(lambda leaf: leaf[0], stacked)
    try:
        after = jax.eval_shape(lambda w, x: layer_fn(opened(w), x), first, x)
    except Exception as error:
        if not _layers_in_a_list(stacked):
            raise
        raise TypeError(
            f"scan_layers: the layers must be one stack, a pytree whose leaves have the layer as dim 0; got a list of "
            f"{len(stacked)}. Stack them once, before init, with jax.tree.map(lambda *leaves: jnp.stack(leaves), "
            "*layers), or call gathered(layer_fn)(weights, x) for one after the other."
        ) from error
    x = jax.tree.map(vary_like, x, after)  # as the layers will type it
    _check_microbatches(x, microbatches)
    x = split_microbatches(x, microbatches) if microbatches > 1 else x
    if microbatches > 1 or any(is_handle(leaf) for leaf in jax.tree.leaves(stacked, is_leaf=is_handle)):
        options: dict[str, Any] = {"policy": policy or POLICIES["dots"], "microbatches": microbatches}
        if prefetch:
            x = regathered_stack(layer_fn, stacked, x, layers=layers, **options)
        else:
            x, _ = jax.lax.scan(lambda x, w: (regathered(layer_fn, w, x, **options), None), x, stacked)
    else:
        layer = jax.checkpoint(layer_fn, policy=policy) if policy else layer_fn
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, stacked)
    return x if microbatches == 1 else jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x)


def _check_stack(stacked: Any) -> None:
    """Refuses handles of which a device holds some of the layers: it would run no others."""
    for leaf in jax.tree.leaves(stacked, is_leaf=is_handle):
        splits = (*leaf.gathers, *leaf.scatters) if is_handle(leaf) else ()
        axes = [axis for dim, axes in splits if dim == -leaf.part.ndim for axis in axes]
        if axes:
            raise ValueError(
                f"scan_layers: dim 0 of a stack, the layers, must be whole; {leaf.path or 'a leaf'} is split there "
                f"over {named(axes)}, as a layer of a list may be. Stack the layers of a list, or choose another dim "
                "by the plan's rules=."
            )


def _layers_in_a_list(stacked: Any) -> bool:
    """Whether this is a list of pytrees that are all alike: layers that nobody has stacked."""
    if not isinstance(stacked, list) or len(stacked) < 2:
        return False
    return len({str(jax.tree.map(jnp.shape, parts(layer))) for layer in stacked}) == 1


def _check_microbatches(x: Any, microbatches: int) -> None:
    """Refuses activations that do not divide into microbatches."""
    sizes = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(x)})
    if microbatches < 1 or (microbatches > 1 and any(not size or size % microbatches for size in sizes)):
        raise ValueError(
            f"scan_layers: dim 0 of every activation must be divisible by microbatches, at least 1; got sizes {sizes} "
            f"and microbatches={microbatches}. Choose a divisor of the examples on a device, and pass anything that is "
            "not of an example through layer_fn."
        )

"""Functions that gather the weights among their arguments: one layer, or a stack of layers in sequence.

Worked example: one layer `y = tanh(x @ w)` of a loss, with w f32[8, 8] whose rows fsdp splits over 4 devices, and
`remat="dots"`. The loss gets w as a handle around this device's part, f32[2, 8].

    forward:   all_gather of the part        w  [8, 8]
               h = x @ w, y = tanh(h)        x, h and y  [4, 8]
               saved for the backward pass: x, which is an input, and h, which is the result of a matmul. w is not
               saved: it can be gathered again from the part, which is an argument
    backward:  dy arrives                    dy [4, 8]
               all_gather of the part        w  [8, 8], a second time
               dh = dy * (1 - tanh(h)**2)    dh [4, 8]
               dx = dh @ w.T                 dx [4, 8]
               dw = x.T @ dh                 dw [8, 8], of this device's examples
               reduce_scatter of dw          [2, 8], summed over devices: the gradient of the part

With `remat="full"` h is not saved, and the backward pass computes it again from x and w. The second all_gather is a
custom derivative, in `regather.py`; `recompute.py` decides which values are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from shardkit._arguments.checks import name_axes
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import eval_shape
from shardkit.meshes.layout import path_name
from shardkit.on_device.batch import split_microbatches
from shardkit.on_device.carries import widen_carry
from shardkit.on_device.handles import is_handle, open_handles, strip_handles, unseal_handles
from shardkit.on_device.means import describe_type
from shardkit.remat.recompute import POLICIES, LeafPartition, Remat, checkpoint_if_asked, find_policy_if_asked
from shardkit.remat.regather import regather_layer, regather_stack

LayerFn = Callable[[Any, Any], Any]
Args = ParamSpec("Args")
Out = TypeVar("Out")


@typed
def gathered(
    layer_fn: Callable[Args, Out], *, keep: bool = False, remat: Remat = None, offload: bool = False
) -> Callable[Args, Out]:
    """Wraps a layer so that it gathers its weights when you call it, and again for its backward pass.

    On plain arrays it is `layer_fn` under the same `remat`. So you write one loss, and it runs on one device and under
    every plan.

    Args:
        layer_fn: any function of the weights. It gets the gathered weight in place of every handle in its arguments:
            a module that holds its weights, as `gathered(block)(x)`, is no argument. Write
            `gathered(lambda block, x: block(x))(block, x)`.
        keep: save the gathered weights for the backward pass, instead of gathering them again. You send one all_gather
            less, and hold the weights of all layers in memory.
        remat: the values to save for the backward pass, as for `scan_layers`. None is "dots" if weights are gathered
            again, otherwise jax's own choice.
        offload: save them to host memory, as for `scan_layers`.

    Returns:
        A function with the same arguments.

    Raises:
        ValueError: an unknown policy, or one that cannot be offloaded.

    Cost: an all_gather of each handle's part, twice unless `keep`, and a reduce_scatter of its gradient. The CPU
        compiler drops the barrier that keeps the two gathers apart (`regather.py`), merges them and keeps the weights;
        the compilers for TPU and GPU do not.

    Example:
        >>> project = sk.gathered(lambda w, x: x @ w)
        >>> grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean(project(params["layers"], batch)))
        >>> plan = sk.fsdp(("data", "model"), layerwise=("layers",), min_size=1)
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
        >>> state, metrics = step(init({"layers": jnp.ones((8, 8))}, jax.random.key(0)), jnp.ones((8, 8)))

    Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3: reshard after forward.
    """
    policy = find_policy_if_asked("gathered", remat, offload)

    @wraps(layer_fn)
    def layer(*args: Any, **kwargs: Any) -> Any:
        # In the caller's function the arrays of handles are sealed: they have a dtype with which nothing can compute
        # (`_jax/sealed.py`). Here they get their own back.
        leaves, tree = jax.tree.flatten(unseal_handles((args, kwargs)), is_leaf=is_handle)
        # Strings, booleans and Python's numbers are no arguments of what is traced: a layer may branch by them.
        traced_leaves = LeafPartition([is_handle(leaf) or _is_array(leaf) for leaf in leaves])
        traced, static = traced_leaves.partition(leaves)
        handle_leaves = LeafPartition([is_handle(leaf) for leaf in traced])
        handles, arrays = handle_leaves.partition(traced)

        def call(weights: list[Any], arrays: list[Any]) -> Any:
            traced = handle_leaves.combine(weights, arrays)
            args, kwargs = jax.tree.unflatten(tree, traced_leaves.combine(traced, static))
            return layer_fn(*args, **kwargs)

        if not handles:
            return checkpoint_if_asked(call, policy)([], arrays)
        if keep:
            # Opened outside of the checkpoint: the gathered weights are its arguments, which jax saves under any
            # policy.
            return checkpoint_if_asked(call, policy)(open_handles(handles), arrays)
        # A function with a derivative of its own gathers again (`regather.py`): of a jax.checkpoint around the gather
        # and the layer, a policy could save the gathered weights.
        return regather_layer(call, handles, arrays, policy=policy or POLICIES["dots"])

    return layer


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


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

    You write one loss, and it runs on one device and under every plan: plain arrays are scanned, and handles are
    gathered layer by layer. To treat some layers differently, run two stacks: `scan_layers` with `remat="dots"` over
    `jax.tree.map(lambda leaf: leaf[:4], stacked)`, then with `remat="full"` over `leaf[4:]`.

    Args:
        layer_fn: one layer. It takes its weights (a slice of `stacked`) and the activations, and returns activations
            with the same shapes and dtypes.
        stacked: pytree of arrays and handles with the layer as dim 0. Integers, such as layer numbers, are allowed.
        x: pytree of activations; integers and keys, such as one key per example, are allowed.
        prefetch: gather the next layer's weights while this layer computes, forward and backward. Of plain arrays,
            which nothing gathers, it sends nothing earlier. It does not help together with `microbatches`: their loop
            hides no gather, and the v5e compiler then gathers again inside it.
        remat: the values to save for the backward pass. "full" saves only the layer's input. "dots" also saves the
            results of matmuls (of matmul_reduce_scatter after its sum) and of attention along an axis.
            "dots_without_batch" saves the results of matmuls without batch dims. A tuple of names saves the values with
            these names (`jax.ad_checkpoint.checkpoint_name`). You can also pass a policy of `jax.checkpoint_policies`.
            None is jax's own choice for plain arrays in one microbatch, and otherwise "dots". Gathered weights, and
            values computed from weights alone, are never saved. The one exception is the last layer with `prefetch`,
            because the backward pass uses its weights first.
        offload: save the values of "dots_without_batch" or of a tuple of names to host memory.
        microbatches: split dim 0 of every activation into this many parts, and run all parts through a layer before the
            next layer. Each layer then gathers its weights and scatters its gradient once for all parts. Gradients are
            summed in float32. Memory holds the layers' inputs for all microbatches, and temporary values for one.

    Returns:
        The activations after the last layer.

    Raises:
        TypeError: a list of layers instead of a stack.
        ValueError: an unknown policy, a policy that cannot be offloaded, leaves with different numbers of layers, a
            plan that splits the layer dim, a layer that sets variables of its weights, as BatchNorm of nnx does, or
            activations not divisible by `microbatches`.

    Cost: two all_gathers and one reduce_scatter of each layer's weights, with any number of `microbatches`: 3 (n-1)/n
        of the bytes of parameters sharded by fsdp; with `prefetch` one all_gather of the last layer. Nothing for plain
        arrays.

    Example:
        >>> stack, x = jnp.full((3, 8, 8), 0.5), jnp.ones((2, 8))
        >>> y = sk.scan_layers(lambda w, x: x @ w, stack, x, remat="full")
        >>> float(y[0, 0])  # 4 * 4 * 4
        64.0

    Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3.3: forward and backward prefetching; Lamy-Poirier,
        Layered gradient accumulation (arXiv:2106.02679): one layer at a time over all microbatches.
    """
    policy = find_policy_if_asked("scan_layers", remat, offload)
    stacked = unseal_handles(stacked)
    _check_stack(stacked)
    layers = _count_layers(stacked)
    # The first trace shows too whether the layers are a stack, and whether a layer returns what the next one takes.
    x = widen_carry(partial(_eval_first_layer, layer_fn, stacked), x)
    _check_microbatches(x, microbatches)
    has_handles = any(is_handle(leaf) for leaf in jax.tree.leaves(stacked, is_leaf=is_handle))
    if microbatches == 1 and not has_handles:
        # Nothing is gathered, so there is nothing to gather again: a scan as jax has it, where no policy means jax's
        # own choice.
        x, _ = jax.lax.scan(_make_body(checkpoint_if_asked(layer_fn, policy)), x, stacked)
        return x
    if policy is None:
        policy = POLICIES["dots"]
    if microbatches > 1:
        # Split once, around the whole stack: each layer then runs all microbatches between one gather and one scatter.
        x = split_microbatches(x, microbatches)
    if prefetch:
        x = regather_stack(layer_fn, stacked, x, layers=layers, policy=policy, microbatches=microbatches)
    else:
        layer = partial(regather_layer, layer_fn, policy=policy, microbatches=microbatches)
        # `scan` slices the arrays in a handle as any others.
        x, _ = jax.lax.scan(_make_body(layer), x, stacked)
    if microbatches > 1:
        # From [microbatches, examples, ...] back to one dim of all examples.
        x = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), x)
    return x


def _make_body(layer: LayerFn) -> Callable[[Any, Any], tuple[Any, None]]:
    """The body of a scan over layers: the activations are its carry, and it stacks nothing."""

    def run_layer(x: Any, weights: Any) -> tuple[Any, None]:
        return layer(weights, x), None

    return run_layer


def _check_stack(stacked: Any) -> None:
    """Refuses a stack whose layer dim is sharded: a device would run only its own layers."""
    for leaf in jax.tree.leaves(stacked, is_leaf=is_handle):
        if not is_handle(leaf):
            continue
        axes: list[str] = []
        for cut in (*leaf.gathers, *leaf.scatters):
            if cut.dim == -leaf.part.ndim:  # dims of cuts are counted from the end
                axes += cut.axes
        if axes:
            raise ValueError(
                f"scan_layers: dim 0 of a stack, the layers, must not be sharded; {leaf.path or 'a leaf'} is sharded "
                f"there over {name_axes(axes)}. Stack the layers if they are a list, or choose another dim with the "
                "plan's rules=."
            )


def _count_layers(stacked: Any) -> int:
    """The number of layers of a stack."""
    counts = set()
    for leaf in jax.tree.leaves(strip_handles(stacked)):
        shape = jnp.shape(leaf)
        counts.add(shape[0] if shape else 0)
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"scan_layers: all leaves must have the same number of layers along dim 0; got {sorted(counts)}. Stack "
            "them, and close over shared values in layer_fn."
        )
    return counts.pop()


def _eval_first_layer(layer_fn: LayerFn, stacked: Any, x: Any) -> Any:
    """Shapes and types of the activations after the first layer, which the next layer takes."""
    changes: list[str] = []

    def run_layer(weights: Any, x: Any) -> Any:
        weights = open_handles(weights)
        nodes = _list_nodes(weights)
        y = layer_fn(weights, x)
        # Collected beside the result: `eval_shape` returns shapes, from which a change cannot be read.
        for node in nodes:
            changes.extend(_find_changes(node))
        return y

    # Handles are nodes of the tree, so this takes layer 0 of their parts. Their cuts count dims from the end, and stay
    # right.
    first = jax.tree.map(lambda leaf: leaf[0], stacked)
    try:
        after = eval_shape(run_layer, first, x)
    except Exception as error:
        if not is_list_of_layers(stacked):
            raise
        raise TypeError(
            "scan_layers: the layers must be one stack, a pytree of leaves with the layer as dim 0; got a list of "
            f"{len(stacked)}. Stack them once, before init, with jax.tree.map(lambda *leaves: jnp.stack(leaves), "
            "*layers), or call gathered(layer_fn)(weights, x) layer by layer."
        ) from error
    if changes:
        raise ValueError(
            "scan_layers: a layer must not change its weights, such as statistics of BatchNorm, because the change is "
            f"lost; it changed {changes[0]}. Pass use_running_average=True to BatchNorm, or use LayerNorm."
        )
    _check_carried(x, after)
    return after


class _Node(NamedTuple):
    """A module of flax nnx among the weights of a layer, or an array, and the variables that it had."""

    path: Any
    node: Any
    variables: list[Any]


def _list_nodes(weights: Any) -> list[_Node]:
    """The nodes of the weights that are no dict, list or tuple.

    Dicts, lists and tuples are made anew for each call, and a layer may change them: only a module keeps a change.
    Worked example: of `{"norm": BatchNorm, "w": array}` the module, and the array, which has no variables of its own.
    """

    def is_module(node: Any) -> bool:
        return not isinstance(node, dict | list | tuple)

    nodes = []
    for path, node in tree_leaves_with_path(weights, is_leaf=is_module):
        nodes.append(_Node(path, node, jax.tree.leaves(node)))
    return nodes


def _find_changes(node: _Node) -> list[str]:
    """The paths of variables that a layer has set in a module."""
    changes = []
    # A module may have gained leaves: strict=False.
    for (path, leaf), old in zip(tree_leaves_with_path(node.node), node.variables, strict=False):
        if leaf is not old:
            changes.append(path_name((*node.path, *path)))
    return changes


def is_list_of_layers(stacked: Any) -> bool:
    """Whether this is a list of layers: pytrees of the same structure and shapes."""
    if not isinstance(stacked, list) or len(stacked) < 2:
        return False
    shapes = set()  # of a layer, with its structure, as text
    for layer in stacked:
        shapes.add(str(jax.tree.map(jnp.shape, strip_handles(layer))))
    return len(shapes) == 1


def _check_carried(x: Any, after: Any) -> None:
    """Refuses a layer whose result has another tree, shapes or dtypes than its input: the next layer gets it."""
    structure: Any = jax.tree.structure(x)
    if structure == jax.tree.structure(after):
        are_carried = jax.tree.map(_is_carried, x, after)
        if all(jax.tree.leaves(are_carried)):
            return
    taken = _describe_leaves(x)
    returned = _describe_leaves(after)
    if taken == returned:  # as a tuple and a list of the same arrays
        taken = str(structure)
        returned = str(jax.tree.structure(after))
    raise TypeError(
        "scan_layers: layer_fn(weights, x) must return an x of the same tree, shapes and dtypes, which the next "
        f"layer gets; it gets {taken} and returns {returned}. Cast or reshape it in the layer."
    )


def _is_carried(leaf: Any, result: Any) -> bool:
    """Whether a result has the shape and dtype of what the layer took."""
    if jnp.shape(leaf) != result.shape:
        return False
    return _takes_any_dtype(leaf) or leaf.dtype == result.dtype


def _takes_any_dtype(leaf: Any) -> bool:
    """Whether this is a Python number, or an array that was made of one: its dtype becomes that of the layers."""
    if not hasattr(leaf, "dtype"):
        return True
    return bool(getattr(leaf, "weak_type", False))


def _describe_leaves(tree: Any) -> str:
    """The leaves of activations as an error names them."""
    descriptions = []
    for path, leaf in tree_leaves_with_path(tree):
        text = describe_type(leaf)
        if path:  # one array alone has no path, and no name
            text = f"{path_name(path)}: {text}"
        descriptions.append(text)
    return ", ".join(descriptions)


def _check_microbatches(x: Any, microbatches: int) -> None:
    """Refuses activations that do not divide into microbatches."""
    if microbatches == 1:
        return
    example_counts = set()
    for leaf in jax.tree.leaves(x):
        shape = jnp.shape(leaf)  # a leaf may be a Python number, which has no examples
        example_counts.add(shape[0] if shape else 0)
    sizes = sorted(example_counts)
    if microbatches < 1 or any(not size or size % microbatches for size in sizes):
        raise ValueError(
            f"scan_layers: dim 0 of every activation must be divisible by microbatches, at least 1; got sizes {sizes} "
            f"and microbatches={microbatches}. Choose a divisor of the examples on a device, and let layer_fn "
            "close over anything that is not per example."
        )

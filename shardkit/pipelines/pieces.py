"""The three pieces of a pipelined model, embedding, stage and head, each traced once, with its derivative.

Activations are flat lists of leaves here: x is the input of a stage, y its output; dx and dy are the gradients of the
leaves that can have one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import name_axes
from shardkit._jax.compat import eval_shape, varying_axes
from shardkit.collectives import axis_index, broadcast, vary
from shardkit.collectives.axes import vary_like
from shardkit.on_device.carries import widen_carry
from shardkit.on_device.gradient import cotangent_of
from shardkit.on_device.handles import call_sealed, is_handle, replace_parts, strip_handles
from shardkit.on_device.loss_results import loss_and_aux, refuse_rounded_totals
from shardkit.on_device.means import Mean, describe_type, means_by_path
from shardkit.pipelines.divergent import find_collectives
from shardkit.pipelines.split_backward import TwoHalves
from shardkit.remat.layers import is_list_of_layers
from shardkit.remat.recompute import LayerPasses, LeafPartition, Traced, WantedGradients, is_differentiable
from shardkit.remat.regather import flag_differentiable

_PARAMETERS = {"embed": "shared, batch, keys", "stage": "layers, x, keys", "head": "shared, x, batch"}


class StagedModel(NamedTuple):
    """What the user passes."""

    embed: Callable[[Any, Any, Any], Any]  # `embed(shared, batch, keys) -> x`
    stage: Callable[[Any, Any, Any], Any]  # `stage(layers, x, keys) -> x`
    # `head(shared, x, batch) -> Mean`, a scalar, or either with a dict of auxiliary means
    head: Callable[[Any, Any, Any], Any]
    layer_numbers: bool  # the stage is passed `(layers, numbers)`
    where: str  # the function that errors name
    stack: str = "layers"  # the entry of the parameters that has the layers

    def check(self) -> None:
        """Refuses a piece that takes other arguments."""
        for name, parameters in _PARAMETERS.items():
            try:
                signature = inspect.signature(getattr(self, name))
            except (TypeError, ValueError):
                continue  # a callable without a signature, such as a builtin
            try:
                signature.bind(None, None, None)
            except TypeError:
                raise TypeError(
                    f"{self.where}: {name} must take ({parameters}); got {signature}. Take these three: a pipeline "
                    "passes no carried state, and batch statistics need a step without one."
                ) from None


class PieceArguments(NamedTuple):
    """The arguments of a piece for one stage and one microbatch."""

    layers: Any  # the layers of the stage, arrays and handles whose dim 0 counts layers
    number: Any  # index of its first layer, int32
    count: Any  # its number of layers, int32; those beyond are padding
    batch: Any  # the microbatch
    keys: Any  # a key for each of its examples, or None


class Piece(Traced):
    """A piece traced once."""

    @cached_property
    def silent(self) -> bool:
        """Whether it sends nothing, so that a device may leave it out."""
        return next(find_collectives(self.jaxpr), None) is None


class Pieces:
    """The pieces of a model at given shapes.

    Args:
        model: what the user passes.
        shared: the parameters beside the layers.
        args: an example of the arguments of a piece.
        axes: the pipe axis. Everything here varies over it, except a spread embedding and head.
        least: the fewest layers of any stage. Further layers run one by one; a device whose stage lacks such a layer
            discards its result.
        common: if embedding and head are spread, an example of their arguments: one microbatch on all devices.
        owner: if embedding and head are spread, the device of the last stage; else None.

    Attributes:
        x: shapes and types of the activations.
        differentiable: which of them can have a gradient.
        embed: `(shared, args) -> x`.
        stage: `(args, x) -> y`.
    """

    def __init__(
        self,
        model: StagedModel,
        shared: Any,
        args: PieceArguments,
        axes: tuple[str, ...],
        least: int,
        common: PieceArguments | None = None,
        owner: int | None = None,
    ):
        self._model = model
        self._shared = shared
        self._args = args
        self._common = args if common is None else common
        self._axes = axes
        self._owner = owner
        self._least = least
        embedded = eval_shape(self._call_embed, shared, self._common)
        varying = eval_shape(lambda x: vary(x, axes), embedded)
        if owner is not None:
            self._check_spread_embedding(embedded)
        # The output of a stage may vary over more axes than its input, as in a stage with experts. It is the input of
        # the next stage, and all stages are one program: so the activations vary over these axes from the first on.
        activations = eval_shape(partial(widen_carry, self._eval_stage), varying)
        self.x, self._structure = jax.tree.flatten(activations)
        self.differentiable = LeafPartition([is_differentiable(x) for x in self.x])
        self.embed = Piece(self._embed, shared, self._common)
        self.stage = Piece(self._run_stage, args, self.x)

    def _check_spread_embedding(self, embedded: Any) -> None:
        for leaf in jax.tree.leaves(embedded):
            if varying_axes(leaf) & set(self._axes):
                raise ValueError(
                    f"{self._model.where}: a spread embedding must return the same on all devices of "
                    f"{name_axes(self._axes)}; got a different value on each device. Look tokens up with vocab_embed, "
                    "or sum the parts."
                )

    def _eval_stage(self, activations: Any) -> Any:
        """Shapes and types of what a stage returns, which the next stage takes."""
        try:
            out = eval_shape(self._call_stage, self._args, activations)
        except Exception as error:
            layers = self._args.layers
            if not is_list_of_layers(layers):
                raise
            raise TypeError(
                f"{self._model.where}: the layers must be one stack, a pytree of leaves with the layer as dim 0; got "
                f"a list of {len(layers)}. Stack them once, before init, with jax.tree.map(lambda *leaves: "
                "jnp.stack(leaves), *layers)."
            ) from error
        self._check_kinds(activations, out)
        return out

    def _check_kinds(self, x: Any, y: Any) -> None:
        """Refuses a stage whose output has other shapes or dtypes than the input of the next stage."""
        taken = _find_kinds(x)
        returned = _find_kinds(y)
        if taken != returned:
            raise ValueError(
                f"{self._model.where}: a stage must return the shapes and dtypes of its input; it was passed "
                f"{', '.join(taken.values())} and returned {', '.join(returned.values())}. Pad to a common width, or "
                "change them in embed or head."
            )

    # ---- the stage and its backward pass

    @cached_property
    def _stage_passes(self) -> tuple[list[Any], LayerPasses]:
        """The arrays that the stage closes over, and its passes: a layer whose weights are the arguments of a piece."""
        layer = Traced(self.stage, self._args, self.x)
        flags = jax.tree.map(lambda _: False, self._args)
        flags = flags._replace(layers=jax.tree.map(flag_differentiable, self._args.layers, is_leaf=is_handle))
        gradients = WantedGradients(
            weights=jax.tree.leaves(flags), shared=[False] * len(layer.constants), x=self.differentiable.flags
        )
        examples = (jax.tree.leaves(self._args), layer.constants, self.x)
        passes = LayerPasses(layer, None, 1, examples, gradients)
        return layer.constants, passes

    @cached_property
    def forward(self) -> Piece:
        """`(args, x) -> (y, residuals)`: the stage, and the residuals of its backward pass."""
        constants, passes = self._stage_passes

        def run(args: PieceArguments, x: list[Any]) -> Any:
            return passes.forward(jax.tree.leaves(args), constants, x)

        return Piece(run, self._args, self.x)

    @cached_property
    def backward(self) -> Piece:
        """`(args, residuals, dy) -> (gradients of the layers' parts, dx)`."""
        constants, passes = self._stage_passes

        def run(args: PieceArguments, residuals: list[Any], dy: list[Any]) -> Any:
            return passes.backward(jax.tree.leaves(args), constants, residuals, dy)

        _, residuals = self.forward.out
        dy, _ = self.differentiable.partition(self.x)
        return Piece(run, self._args, residuals, dy)

    @cached_property
    def halves(self) -> TwoHalves:
        """The backward pass in two halves: `dx`, and the gradients of the layers' parts."""
        _, residuals = self.forward.out
        dy, _ = self.differentiable.partition(self.x)
        leaves, tree = jax.tree.flatten((self._args, residuals, dy))

        def run(*leaves: Any) -> list[Any]:
            args, residuals, dy = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(self.backward(args, residuals, dy))

        grads, dx = self.backward.out
        # The first half returns dx. Both halves are passed the arguments of a piece, as weights and keys.
        first = [False] * len(grads) + [True] * len(dx)
        count = len(jax.tree.leaves(self._args))
        lasting = [True] * count + [False] * (len(leaves) - count)
        return TwoHalves(run, leaves, first, lasting)

    def _run_stage(self, args: PieceArguments, x: list[Any]) -> list[Any]:
        return self._flatten(self._call_stage(args, self._unflatten(x)))

    def _call_stage(self, args: PieceArguments, x: Any) -> Any:
        """The layers of a stage.

        Worked example: stages of 3 and of 2 layers. Each device stores 3 rows, and all run one program: rows 0 and 1 as
        a stage of two layers, then row 2 as a stage of one layer. A device whose stage has 2 layers runs row 2 with the
        weights of its row 0, and goes on with the activations from before.
        """
        rows = _count_rows(args.layers)
        numbers = args.number + jnp.arange(rows, dtype=jnp.int32)
        stack = (args.layers, numbers)
        least = self._least
        x = self._call_layers(jax.tree.map(lambda leaf: leaf[:least], stack), x, args.keys)
        if least == rows:
            return x
        has_row = jnp.arange(least, rows) < args.count

        def select_rows(leaf: jax.Array) -> jax.Array:
            # A stage without a row runs its first layer there: on zeros a layer may have no finite derivative.
            mask = has_row.reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(mask, leaf[least:], leaf[:1])[:, None]  # stages of one layer

        def run_row(x: Any, row: Any) -> tuple[Any, None]:
            is_layer, stack_of_one = row
            y = self._call_layers(stack_of_one, x, args.keys)
            return jax.tree.map(partial(jnp.where, is_layer), y, x), None

        # A scan, so that the layer is compiled once for any number of rows.
        extra_rows = (has_row, jax.tree.map(select_rows, stack))
        first_row = jax.tree.map(lambda leaf: leaf[0], extra_rows)
        y, _ = eval_shape(run_row, x, first_row)
        x, _ = lax.scan(run_row, jax.tree.map(vary_like, x, y), extra_rows)
        return x

    def _call_layers(self, stack: tuple[Any, jax.Array], x: Any, keys: Any) -> Any:
        """What the user's stage returns for these layers and their numbers."""
        layers, numbers = stack

        def call(layers: Any) -> Any:
            if self._model.layer_numbers:
                layers = (layers, numbers)
            return self._model.stage(layers, x, keys)

        return call_sealed(call, layers, at=(self._model.stack,))

    # ---- the embedding and its backward pass

    @cached_property
    def embed_backward(self) -> Piece:
        """`(shared, args, dx) -> gradients of the shared parts`."""

        def run(shared: Any, args: PieceArguments, dx: list[Any]) -> Any:
            def embed(leaves: Any) -> list[Any]:
                # The same draws as in the forward pass, as intended.
                cloned = args._replace(keys=jax.tree.map(jax.random.clone, args.keys))
                x, _ = self.differentiable.partition(self._embed(replace_parts(shared, leaves), cloned))
                return x

            _, pullback = jax.vjp(embed, strip_handles(shared))
            (grads,) = pullback(dx)
            return grads

        dx, _ = self.differentiable.partition(self.x)
        return Piece(run, self._shared, self._common, dx)

    def _embed(self, shared: Any, args: PieceArguments) -> list[Any]:
        return self._flatten(self._call_embed(shared, args))

    def _call_embed(self, shared: Any, args: PieceArguments) -> Any:
        return call_sealed(self._model.embed, shared, args.batch, args.keys)

    # ---- the head and its backward pass

    @cached_property
    def head(self) -> Piece:
        """`(shared, args, y) -> means`: the loss, under "loss", and the auxiliary means."""

        def run(shared: Any, args: PieceArguments, y: list[Any]) -> Any:
            return self._finish_means(self._compute_means(shared, args, y))

        return Piece(run, self._shared, self._common, self.x)

    @cached_property
    def head_backward(self) -> Piece:
        """`(shared, args, y, scale) -> (means, gradients of the shared parts, dy)`."""

        def run(shared: Any, args: PieceArguments, y: list[Any], scale: Any) -> Any:
            floats, integers = self.differentiable.partition(y)

            def compute_total(leaves: Any, floats: list[Any]) -> Any:
                y = self.differentiable.combine(floats, integers)
                means = self._compute_means(replace_parts(shared, leaves), args, y)
                return means["loss"].total, means

            loss, pullback, means = jax.vjp(compute_total, strip_handles(shared), floats, has_aux=True)
            shared_grads, dy = pullback(cotangent_of(loss, scale))
            return self._finish_means(means), shared_grads, dy

        return Piece(run, self._shared, self._common, self.x, jax.ShapeDtypeStruct((), jnp.float32))

    def _compute_means(self, shared: Any, args: PieceArguments, y: list[Any]) -> dict[str, Mean]:
        if self._owner is not None:
            # Every device has a part of the head, so all devices get the output of the last stage. This broadcast
            # stands inside the differentiated function: its transpose sums the cotangents from all parts of the head,
            # and gives the sum to the last stage alone. A spread embedding needs no such line: its cotangent is zero on
            # all devices but the first, and the transpose of casting its result to a varying type sums the cotangent,
            # so that all devices get the first one's.
            y = broadcast(y, self._axes, source=self._owner)
        result = call_sealed(self._model.head, shared, self._unflatten(y), args.batch)
        refuse_rounded_totals(result)
        loss, aux = loss_and_aux(result)
        for name, mean in means_by_path(aux):
            if name not in aux or jnp.ndim(mean.total):
                raise ValueError(
                    f"{self._model.where}: the auxiliary means of a pipeline must be scalars by name; got "
                    f"{describe_type(mean.total)} for {name}. Return scalars, or train without a pipeline."
                )
        means = {}
        for name, mean in {"loss": loss, **aux}.items():
            means[name] = self._match_types(name, mean)
        return means

    def _match_types(self, name: str, mean: Mean) -> Mean:
        """A mean whose total and weight vary over the same axes."""
        # Without an owner there is nothing to match: `_cast_to_sum` marks all totals and weights as varying.
        axes = () if self._owner is None else self._axes
        total_axes = varying_axes(mean.total) & set(axes)
        weight_axes = varying_axes(mean.weight) & set(axes)
        if total_axes != weight_axes:
            alone = "total" if total_axes else "weight"
            raise ValueError(
                f"{self._model.where}: total and weight of a spread head's means must both be the same on all devices "
                f"of {name_axes(self._axes)}, or both be each device's own; got a {alone} "
                f"alone that differs, of {name!r}. Sum it over {name_axes(self._axes)}, as vocab_cross_entropy does."
            )
        return _vary_plain_weight(mean, axes)

    def _finish_means(self, means: Mapping[str, Mean]) -> Any:
        """The means of this device, float32 and varying over the pipe axis."""
        sums = {}
        for name, mean in means.items():
            total = self._cast_to_sum(self._count_once(mean.total))
            weight = self._cast_to_sum(self._count_once(mean.weight))
            sums[name] = Mean(total, weight)
        return sums

    def _count_once(self, x: Any) -> Any:
        """A total or weight; if it is the same on all devices, it counts on the device of the last stage only."""
        if self._owner is None or varying_axes(x) & set(self._axes):
            return x
        return jnp.where(axis_index(self._axes) == self._owner, x, jnp.zeros_like(x))

    def _cast_to_sum(self, x: Any) -> Any:
        return vary(x.astype(jnp.float32), self._axes)

    # ---- activations

    def _unflatten(self, x: list[Any]) -> Any:
        return jax.tree.unflatten(self._structure, x)

    def _flatten(self, x: Any) -> list[Any]:
        """The leaves, typed as the activations between stages."""
        return jax.tree.map(vary_like, jax.tree.leaves(x), self.x)


def _vary_plain_weight(mean: Mean, except_axes: tuple[str, ...]) -> Mean:
    """A mean whose weight, if it is a plain number, is typed as varying like its total: the pipeline masks both."""
    if varying_axes(mean.weight):
        return mean
    axes = varying_axes(mean.total) - set(except_axes)
    return Mean(mean.total, vary(mean.weight, tuple(axes)))


def _find_kinds(tree: Any) -> dict[Any, str]:
    """Dtype and shape of each leaf, by its path."""
    kinds = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kinds[path] = describe_type(leaf)
    return kinds


def _count_rows(layers: Any) -> int:
    """The number of layers of a stack."""
    return int(jax.tree.leaves(layers)[0].shape[0])

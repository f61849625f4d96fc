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

from shardkit._arguments.checks import named
from shardkit._jax.compat import eval_shape, varying_axes
from shardkit.collectives import axis_index, broadcast, vary
from shardkit.collectives.axes import vary_like
from shardkit.on_device.gradient import cotangent_of
from shardkit.on_device.handles import call_sealed, is_handle, parts, with_parts
from shardkit.on_device.loss_results import loss_and_aux
from shardkit.on_device.means import Mean, kind, means_by_path
from shardkit.pipelines.divergent import collectives
from shardkit.pipelines.split_backward import TwoHalves
from shardkit.remat.layers import layers_in_a_list
from shardkit.remat.recompute import Halves, Mask, Traced, halves, learnable
from shardkit.remat.regather import learned


class StagedModel(NamedTuple):
    """What the user passes."""

    embed: Callable[[Any, Any, Any], Any]  # `embed(shared, batch, keys) -> x`
    stage: Callable[[Any, Any, Any], Any]  # `stage(layers, x, keys) -> x`
    # `head(shared, x, batch) -> Mean`, a scalar, or either with a dict of auxiliary means
    head: Callable[[Any, Any, Any], Any]
    layer_numbers: bool  # the stage is passed `(layers, numbers)`
    where: str  # the function that errors name

    def check(self) -> None:
        """Refuses a piece that takes other arguments."""
        for name, takes in {
            "embed": "shared, batch, keys",
            "stage": "layers, x, keys",
            "head": "shared, x, batch",
        }.items():
            try:
                signature = inspect.signature(getattr(self, name))
            except (TypeError, ValueError):
                continue
            try:
                signature.bind(None, None, None)
            except TypeError:
                raise TypeError(
                    f"{self.where}: {name} must take ({takes}); got {signature}. Take these three: a pipeline passes "
                    "no carried state, and batch statistics need a step without one."
                ) from None


class Given(NamedTuple):
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
        return next(collectives(self.jaxpr), None) is None


class Pieces:
    """The pieces of a model at given shapes.

    Args:
        model: what the user passes.
        shared: the parameters beside the layers.
        given: an example of the arguments of a piece.
        axes: the pipe axis, over which everything here varies but embedding and head where they are spread.
        least: the fewest layers of a stage; the others run one by one, and are discarded where a stage lacks them.
        common: an example of the arguments of embed and head where these are spread: one microbatch on all devices.
        owner: the device of the last stage, where embedding and head are spread; None elsewhere.

    Attributes:
        x: shapes and types of the activations.
        moving: which of them can have a gradient.
        embed: `(shared, given) -> x`.
        stage: `(given, x) -> y`.
    """

    def __init__(
        self,
        model: StagedModel,
        shared: Any,
        given: Given,
        axes: tuple[str, ...],
        least: int,
        common: Given | None = None,
        owner: int | None = None,
    ):
        common = given if common is None else common
        self._model, self._shared, self._given, self._common = model, shared, given, common
        self._axes, self._owner, self._least = axes, owner, least
        whole = eval_shape(lambda s, g: call_sealed(model.embed, s, g.batch, g.keys), shared, common)
        tree = eval_shape(lambda x: vary(x, axes), whole)
        if owner is not None and any(varying_axes(x) & set(axes) for x in jax.tree.leaves(whole)):
            raise ValueError(
                f"{model.where}: a spread embedding must return the same on all devices of {named(axes)}; got each "
                "device's own. Look tokens up with vocab_embed, or sum what the parts give."
            )
        self.x, self._structure = jax.tree.flatten(self._find_activations(tree))
        self.moving = Mask([learnable(x) for x in self.x])
        self.embed = Piece(self._embedded, shared, common)
        self.stage = Piece(lambda given, x: self._flat(self._through(given, self._tree(x))), given, self.x)

    def _find_activations(self, embedded: Any) -> Any:
        """Shapes and types that a stage takes and gives, from those of the embedding.

        What a stage gives may vary over more axes than what it took, as over that of experts; the next one takes that.
        Worked example: embedded varies over "pipe"; a stage makes it vary over "pipe" and "expert"; what varies over
        both is given back as it is, so that is the type of all.
        """
        activations = embedded
        while True:
            out = self._eval_stage(activations)
            self._check(activations, out)
            widened = eval_shape(lambda x, y: jax.tree.map(vary_like, x, y), activations, out)
            if jax.tree.map(varying_axes, widened) == jax.tree.map(varying_axes, activations):
                return widened
            activations = widened

    def _eval_stage(self, activations: Any) -> Any:
        try:
            return eval_shape(self._through, self._given, activations)
        except Exception as error:
            where, layers = self._model.where, self._given.layers
            if not layers_in_a_list(layers):
                raise
            raise TypeError(
                f"{where}: the layers must be one stack, a pytree whose leaves have the layer as dim 0; got a list of "
                f"{len(layers)}. Stack them once, before init, with "
                "jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)."
            ) from error

    @cached_property
    def _halves(self) -> tuple[list[Any], Halves]:
        layer = Traced(self.stage, self._given, self.x)
        flags = jax.tree.map(lambda _: False, self._given)
        flags = flags._replace(layers=jax.tree.map(learned, self._given.layers, is_leaf=is_handle))
        wanted = [jax.tree.leaves(flags), [False] * len(layer.constants), self.moving.chosen]
        examples = (jax.tree.leaves(self._given), layer.constants, self.x)
        return layer.constants, halves(layer, None, 1, examples, wanted)

    @cached_property
    def forward(self) -> Piece:
        """`(given, x) -> (y, residuals)`: the stage, and the residuals of its backward pass."""
        shared, passes = self._halves
        return Piece(lambda g, x: passes.forward(jax.tree.leaves(g), shared, x), self._given, self.x)

    @cached_property
    def backward(self) -> Piece:
        """`(given, residuals, dy) -> (gradients of the layers' parts, dx)`."""
        shared, passes = self._halves

        def backward(g: Given, residuals: list[Any], dy: list[Any]) -> Any:
            return passes.backward(jax.tree.leaves(g), shared, residuals, dy)

        return Piece(backward, self._given, self.forward.out[1], self.moving.split(self.x)[0])

    @cached_property
    def split(self) -> TwoHalves:
        """The backward pass in two: `dx`, and the gradients of the layers' parts."""
        residuals, dy = self.forward.out[1], self.moving.split(self.x)[0]
        leaves, tree = jax.tree.flatten((self._given, residuals, dy))
        grads, dx = self.backward.out
        lasting = len(jax.tree.leaves(self._given))
        return TwoHalves(
            lambda *leaves: jax.tree.leaves(self.backward(*jax.tree.unflatten(tree, leaves))),
            leaves,
            first=[False] * len(grads) + [True] * len(dx),
            lasting=[True] * lasting + [False] * (len(leaves) - lasting),
        )

    @cached_property
    def embed_backward(self) -> Piece:
        """`(shared, given, dx) -> gradients of the shared parts`."""

        def backward(shared: Any, given: Given, dx: list[Any]) -> Any:
            def embed(leaves: Any) -> list[Any]:
                again = given._replace(keys=jax.tree.map(jax.random.clone, given.keys))  # the same draws, as intended
                return self.moving.split(self._embedded(with_parts(shared, leaves), again))[0]

            return jax.vjp(embed, parts(shared))[1](dx)[0]

        return Piece(backward, self._shared, self._common, self.moving.split(self.x)[0])

    @cached_property
    def head(self) -> Piece:
        """`(shared, given, y) -> means`: the loss, under "loss", and the auxiliary means."""
        return Piece(lambda s, g, y: self._summed(self._means(s, g, y)), self._shared, self._common, self.x)

    @cached_property
    def head_backward(self) -> Piece:
        """`(shared, given, y, scale) -> (means, gradients of the shared parts, dy)`."""

        def backward(shared: Any, given: Given, y: list[Any], scale: Any) -> Any:
            moving, others = self.moving.split(y)

            def total(leaves: Any, moving: list[Any]) -> Any:
                means = self._means(with_parts(shared, leaves), given, self.moving.join(moving, others))
                return means["loss"].total, means

            loss, pullback, means = jax.vjp(total, parts(shared), moving, has_aux=True)
            shared_grads, dy = pullback(cotangent_of(loss, scale))
            return self._summed(means), shared_grads, dy

        return Piece(backward, self._shared, self._common, self.x, jax.ShapeDtypeStruct((), jnp.float32))

    def _embedded(self, shared: Any, given: Given) -> list[Any]:
        return self._flat(call_sealed(self._model.embed, shared, given.batch, given.keys))

    def _through(self, given: Given, x: Any) -> Any:
        """The layers of a stage; rows beyond the fewest are discarded by stages that lack them."""
        rows, least = _rows(given.layers), self._least
        numbers = given.number + jnp.arange(rows, dtype=jnp.int32)

        def run(some: Any, x: Any) -> Any:
            layers, numbers = some

            def stage(layers: Any) -> Any:
                return self._model.stage((layers, numbers) if self._model.layer_numbers else layers, x, given.keys)

            return call_sealed(stage, layers, at="layers")

        x = run(jax.tree.map(lambda leaf: leaf[:least], (given.layers, numbers)), x)
        if least == rows:
            return x
        has = jnp.arange(least, rows) < given.count

        def own(leaf: jax.Array) -> jax.Array:
            # A stage without a row runs its first layer there: on zeros a layer may have no finite derivative.
            here = has.reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(here, leaf[least:], leaf[:1])[:, None]  # stages of one layer

        def one(x: Any, each: Any) -> tuple[Any, None]:
            has, some = each
            return jax.tree.map(partial(jnp.where, has), run(some, x), x), None

        each = has, jax.tree.map(own, (given.layers, numbers))
        after, _ = eval_shape(one, x, jax.tree.map(lambda leaf: leaf[0], each))
        # One body, for any number of rows: one after the other they would be compiled one by one.
        return lax.scan(one, jax.tree.map(vary_like, x, after), each)[0]

    def _means(self, shared: Any, given: Given, y: list[Any]) -> dict[str, Mean]:
        if self._owner is not None:
            # All devices see what the last stage returned, because each has a part of the head. It stands inside what
            # is differentiated: its transpose sums what the parts of the head send back, and gives it to the last
            # stage alone. Of the embedding it is the other way round: its gradient is zero on all devices but the
            # first, and the cast of its result to a varying one sums it, which is a broadcast too.
            y = broadcast(y, self._axes, source=self._owner)
        loss, aux = loss_and_aux(call_sealed(self._model.head, shared, self._tree(y), given.batch))
        for name, mean in means_by_path(aux):
            if name not in aux or jnp.ndim(mean.total):
                raise ValueError(
                    f"{self._model.where}: the auxiliary means of a pipeline must be scalars by name; got "
                    f"{kind(mean.total)} for {name}. Return scalars, or train without a pipeline."
                )
        return {name: self._alike(name, mean) for name, mean in {"loss": loss, **aux}.items()}

    def _alike(self, name: str, mean: Mean) -> Mean:
        """A mean whose total and weight vary over the same axes."""
        mine = () if self._owner is None else self._axes
        total, weight = (varying_axes(x) & set(mine) for x in mean)
        if total != weight:
            raise ValueError(
                f"{self._model.where}: total and weight of a spread head's means must both be the same on all devices "
                f"of {named(self._axes)}, or both be each device's own; got a {'total' if total else 'weight'} "
                f"alone that differs, of {name!r}. Sum it over {named(self._axes)}, as vocab_cross_entropy does."
            )
        return _alike_in_mask(mean, mine)

    def _summed(self, means: Mapping[str, Mean]) -> Any:
        """The means of this device: what is the same on all of them counts on the last stage's."""
        mine = {name: Mean(*map(self._counted, mean)) for name, mean in means.items()}
        return {name: Mean(*(vary(x.astype(jnp.float32), self._axes) for x in mean)) for name, mean in mine.items()}

    def _counted(self, x: Any) -> Any:
        if self._owner is None or varying_axes(x) & set(self._axes):
            return x
        return jnp.where(axis_index(self._axes) == self._owner, x, jnp.zeros_like(x))

    def _tree(self, x: list[Any]) -> Any:
        return jax.tree.unflatten(self._structure, x)

    def _flat(self, x: Any) -> list[Any]:
        """The leaves, typed as the activations between stages."""
        return jax.tree.map(vary_like, jax.tree.leaves(x), self.x)

    def _check(self, x: Any, y: Any) -> None:
        was, became = (
            {path: kind(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)} for tree in (x, y)
        )
        if was != became:
            kinds = [", ".join(each.values()) for each in (was, became)]
            raise ValueError(
                f"{self._model.where}: a stage must return the shapes and dtypes of its input; it was passed "
                f"{kinds[0]} and returned {kinds[1]}. Pad to a common width, or change them in embed or head."
            )


def _alike_in_mask(mean: Mean, but: tuple[str, ...]) -> Mean:
    """A mean whose weight is a plain number, typed as its total: the pipeline masks both, which makes it vary."""
    if varying_axes(mean.weight):
        return mean
    return Mean(mean.total, vary(mean.weight, tuple(varying_axes(mean.total) - set(but))))


def _rows(layers: Any) -> int:
    return int(jax.tree.leaves(layers)[0].shape[0])

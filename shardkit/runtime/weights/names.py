"""What the leaves of parameters are called in a file, and how one is made of the tensors there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardkit._arguments.typed import typed
from shardkit.models.transformer import Config
from shardkit.runtime.checkpoint.record import some

Ranges = tuple[tuple[int, int], ...]
Read = Callable[[str, Ranges], np.ndarray]


class StoredAs(NamedTuple):
    """How a leaf is stored in a file of another library.

    Attributes:
        name: the tensor's name. With "{}" in it, there is a tensor for each index along the first dim of the leaf, as
            of layers in a stack; a second "{}" is for the second dim, and so on.
        dims: for each dim of a tensor the dim of the leaf, or the dims that it merges, major first. By default those
            that the name leaves, in order. `StoredAs("layers.{}.q_proj.weight", ((2, 3), 1))` stores a leaf [L, D, H,
            K] as L tensors [H K, D].
    """

    name: str
    dims: Sequence[int | tuple[int, ...]] | None = None


Names = Mapping[str, str | StoredAs] | Callable[[str], str | StoredAs]


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf by its path, its original shape, and how it is stored.

    Attributes:
        path: its path in the parameters, `layers.query`.
        shape: its original shape.
        name: the tensor's name, with "{}" for the index along each of the first dims that are stored apart.
        dims: for each dim of a tensor the dims of the leaf that it merges.
        apart: how many of the first dims are stored apart.
    """

    path: str
    shape: tuple[int, ...]
    name: str
    dims: tuple[tuple[int, ...], ...]
    apart: int

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return tuple(math.prod(self.shape[dim] for dim in group) for group in self.dims)

    @property
    def _order(self) -> tuple[int, ...]:
        """The dims of the leaf in the order of a tensor's."""
        return tuple(dim for group in self.dims for dim in group)

    def tensors(self, ranges: Ranges | None = None) -> Iterator[tuple[tuple[int, ...], str]]:
        """The indices along the first dims, in these ranges or all, and the name of their tensor."""
        whole = ranges or tuple((0, size) for size in self.shape)
        for at in itertools.product(*(range(*each) for each in whole[: self.apart])):
            name = self.name
            for index in at:
                name = name.replace("{}", str(index), 1)
            yield at, name

    def part(self, read: Read, ranges: Ranges, dtype: Any) -> np.ndarray:
        """A part of the leaf, from no more of each tensor than the rows that hold it."""
        sizes = [last - first for first, last in ranges]
        out = np.empty(sizes, dtype)
        if not out.size:
            return out
        spans = []
        for major, *minor in self.dims:
            below = math.prod(self.shape[dim] for dim in minor)
            spans.append((ranges[major][0] * below, ranges[major][1] * below))
        majors = {group[0] for group in self.dims}
        held = [ranges[dim] if dim in majors else (0, self.shape[dim]) for dim in self._order]
        cut = tuple(slice(None) if dim in majors else slice(*ranges[dim]) for dim in self._order)
        back = np.argsort(self._order, kind="stable")
        for at, name in self.tensors(ranges):
            tensor = read(name, tuple(spans)).reshape([last - first for first, last in held])
            out[tuple(i - ranges[dim][0] for dim, i in enumerate(at))] = tensor[cut].transpose(back)
        return out

    def tensor(self, part: np.ndarray) -> np.ndarray:
        """A tensor as it is stored, from the leaf at an index along the first dims."""
        first = self.apart
        return np.ascontiguousarray(part.transpose([dim - first for dim in self._order])).reshape(self.tensor_shape)


def named_leaves(where: str, shapes: Mapping[str, tuple[int, ...]], names: Names | None) -> list[StoredLeaf]:
    """How each leaf is stored.

    Raises:
        ValueError: names for leaves that there are not, dims that are not those of the leaf, or two tensors of one
            name.
        TypeError: a name of another type.
    """
    if isinstance(names, Mapping):
        unknown = [path for path in names if path not in shapes]
        if unknown:
            raise ValueError(
                f"{where}: names must be for leaves of the parameters, {some([*shapes])}; got {some(unknown)} besides. "
                "Leave them out."
            )
    found = [_leaf(where, path, shape, names) for path, shape in shapes.items()]
    owners: dict[str, str] = {}
    for leaf in found:
        for _, name in leaf.tensors():
            if name in owners:
                raise ValueError(
                    f"{where}: each tensor must have one name; leaves {owners[name]!r} and {leaf.path!r} are both "
                    f"called {name!r}. Give one of them another."
                )
            owners[name] = leaf.path
    return found


def _leaf(where: str, path: str, shape: tuple[int, ...], names: Names | None) -> StoredLeaf:
    given = path if names is None else names.get(path, path) if isinstance(names, Mapping) else names(path)
    if given == path:
        return StoredLeaf(path, shape, path, tuple((dim,) for dim in range(len(shape))), 0)
    given = StoredAs(given) if isinstance(given, str) else given
    if not isinstance(given, StoredAs) or not isinstance(given.name, str):
        raise TypeError(
            f"{where}: names must give a string or a StoredAs for each leaf; got {given!r} for {path!r}. Return the "
            "path itself to keep it."
        )
    apart = given.name.count("{}")
    left = list(range(apart, len(shape)))
    try:
        dims = tuple((dim,) if isinstance(dim, int) else tuple(dim) for dim in given.dims or left)
        right = all(dims) and sorted(dim for group in dims for dim in group) == left and apart <= len(shape)
    except TypeError:
        right = False
    if not right:
        raise ValueError(
            f"{where}: a StoredAs must count some of the first dims of its leaf in its name, and have the others once "
            f"in dims; got {given.name!r} and dims={given.dims} for leaf {path!r} of shape {list(shape)}. Write "
            f"at most {len(shape)} {{}} in the name, and leave dims out."
        )
    return StoredLeaf(path, shape, given.name, dims, apart)


_LAYER = "model.layers.{}."


@typed
def llama_names(config: Config) -> dict[str, StoredAs]:
    """Names for `load_params` and `save_params`: Hugging Face's of Llama for the parameters of `models.transformer`.

    The two are the same function if `config.norm_epsilon` is the checkpoint's rms_norm_eps and `config.rope_theta` its
    rope_theta, and it has no rope_scaling and no biases.

    Args:
        config: the sizes; no experts.

    Raises:
        ValueError: a configuration with experts.

    Example:
        >>> from shardkit.models import transformer
        >>> sk.runtime.llama_names(transformer.Config())["layers.query"]
        StoredAs(name='model.layers.{}.self_attn.q_proj.weight', dims=((2, 3), 1))

    Source: https://huggingface.co/docs/transformers/model_doc/llama
    """
    if config.experts:
        raise ValueError(
            f"llama_names: a Llama has no experts; got experts={config.experts}. Pass names of your own, of StoredAs."
        )
    projection, transposed = ((2, 3), 1), (2, 1)
    names = {
        "embed": StoredAs("model.embed_tokens.weight"),
        "layers.query": StoredAs(_LAYER + "self_attn.q_proj.weight", projection),
        "layers.key": StoredAs(_LAYER + "self_attn.k_proj.weight", projection),
        "layers.value": StoredAs(_LAYER + "self_attn.v_proj.weight", projection),
        "layers.attention_out": StoredAs(_LAYER + "self_attn.o_proj.weight", (3, (1, 2))),
        "layers.gate": StoredAs(_LAYER + "mlp.gate_proj.weight", transposed),
        "layers.up": StoredAs(_LAYER + "mlp.up_proj.weight", transposed),
        "layers.down": StoredAs(_LAYER + "mlp.down_proj.weight", transposed),
        "layers.attention_norm": StoredAs(_LAYER + "input_layernorm.weight"),
        "layers.mlp_norm": StoredAs(_LAYER + "post_attention_layernorm.weight"),
        "final_norm": StoredAs("model.norm.weight"),
    }
    return names if config.tied else names | {"head": StoredAs("lm_head.weight", (1, 0))}

"""Rules for convolutions, pooling and its gradients in the field.

All of them read windows of an array. The places of all windows in the flat array, [windows, elements of a window], are
integers. After reading them, only a matmul, a sum or a maximum over the last dim remains. Padding, and gaps between
dilated elements, are read from one more element after the array.

Worked example: windows of 3 over [a, b, c, d] with stride 2 and a zero on each side are the places [[4, 0, 1],
[1, 2, 3]] of [a, b, c, d, 0].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import add, matmul, multiply, sum_dims
from shardkit.testing.exact.numbers.assembly import join_exact, take_elements, where
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import exp, log, to_number
from shardkit.testing.exact.numbers.orders import find_keys
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.rules.scope import Scope

# The value of padding for each reduction: it changes no result.
_NEUTRAL = {"add": 0.0, "mul": 1.0, "max": -math.inf, "min": math.inf}


class WindowDim(NamedTuple):
    """Windows along one dim.

    Attributes:
        size: the number of elements of the array.
        windows: the number of windows.
        reads: the number of elements of a window.
        stride: the distance from a window to the next.
        padding: before the first element and after the last one, negative where elements are cut off.
        spread: how far the array's elements are apart, with nothing between them.
        step: from one element of a window to the next.
    """

    size: int
    windows: int
    reads: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    spread: int = 1
    step: int = 1


def _list_window_dims(
    *,
    sizes: Sequence[int],
    windows: Sequence[int],
    reads: Sequence[int],
    strides: Sequence[int],
    paddings: Sequence[tuple[int, int]],
    spreads: Sequence[int],
    steps: Sequence[int],
) -> list[WindowDim]:
    """The windows along each dim, from the parameters of an equation, which list a number for every dim."""
    columns = zip(sizes, windows, reads, strides, paddings, spreads, steps, strict=True)
    return [WindowDim(*column) for column in columns]


def find_places(dims: Sequence[WindowDim]) -> np.ndarray:
    """int64 [windows, elements of a window]: places in the flat array; its size for padding and gaps."""
    places = np.zeros((1, 1), np.int64)
    is_inside = np.ones((1, 1), bool)
    for dim in dims:
        # Positions count from the first element, in steps of one; elements stand `spread` apart. In the example above
        # the windows begin at -1 and 1, and read the positions [[-1, 0, 1], [1, 2, 3]].
        starts = np.arange(dim.windows) * dim.stride - dim.padding[0]
        offsets = np.arange(dim.reads) * dim.step
        positions = starts[:, None] + offsets
        place, between = np.divmod(positions, dim.spread)
        is_element = (place >= 0) & (place < dim.size) & (between == 0)
        # Each window of the dims before is combined with each of this dim, and so are the elements of one: of
        # [3 windows, 4 elements] and [5, 2] there are [3, 5, 4, 2], which are [15, 8].
        windows = len(places) * dim.windows
        reads = places.shape[1] * dim.reads
        places = places[:, None, :, None] * dim.size + place[None, :, None, :]
        places = places.reshape(windows, reads)
        is_inside = is_inside[:, None, :, None] & is_element[None, :, None, :]
        is_inside = is_inside.reshape(windows, reads)
    size = math.prod(dim.size for dim in dims)
    return np.where(is_inside, places, size)


# Shapes, without the dims of the mesh


def _reshape(x: Exact, lead: int, shape: Sequence[int]) -> Exact:
    """Another shape of the dims after the first `lead`."""

    def reshape(part: np.ndarray) -> np.ndarray:
        return part.reshape(*part.shape[: 1 + lead], *shape)

    return x.move(reshape)


def _flatten(x: Exact, lead: int) -> Exact:
    """The dims after the first `lead` as one."""
    return _reshape(x, lead, [math.prod(x.shape[lead:])])


def _transpose(x: Exact, lead: int, order: Sequence[int]) -> Exact:
    """The dims after the first `lead` in another order."""
    first = 1 + lead  # after the components and the mesh
    dims = [*range(first), *(first + dim for dim in order)]
    return x.move(lambda part: part.transpose(dims))


def _append(field: Field, x: Exact, filling: float) -> Exact:
    """One element more along the last dim."""
    dims = len(x.shape)
    last = field.lift(np.full((1,) * dims, filling, np.float32))
    return join_exact([x, last], dims - 1, new=False)


def _read_windows(field: Field, x: Exact, places: np.ndarray, filling: float) -> Exact:
    """The elements that windows over the last dim read: [..., windows, elements of a window]."""
    return _take_places(_append(field, x, filling), places)


def _take_places(x: Exact, places: np.ndarray) -> Exact:
    """The elements at places along the last dim, the same on all devices."""
    return x.move(lambda part: np.take(part, places, -1))


def _take_on_devices(scope: Scope, x: Exact, places: np.ndarray) -> Exact:
    """The elements at places along the last dim, other ones on each device."""
    return x.move(partial(take_elements, places=places, rank=scope.rank))


# Convolutions


def convolve(scope: Scope, equation: Any, x: Operand, kernel: Operand) -> Exact:
    """conv_general_dilated: a matmul of windows with the kernel, for each group of features and of examples.

    Worked example: images [N, C, 6, 6] and a kernel [F, C, 3, 3] have 16 windows of 9 elements. The elements that the
    windows read are [N * 16, C * 9], the kernel is [C * 9, F], and the product [N * 16, F] becomes [N, F, 4, 4].
    """
    field = scope.field
    rank = scope.rank
    params = equation.params
    numbers = params["dimension_numbers"]
    x, kernel = scope.lift(x, kernel)
    # The equation names the dims; from here on they are [N, C, *sizes], [F, C, *window] and [N, F, *windows].
    images = _transpose(to_number(field, x), rank, numbers.lhs_spec)
    kernel = _transpose(to_number(field, kernel), rank, numbers.rhs_spec)
    shape = equation.outvars[0].aval.shape
    result_shape = [shape[dim] for dim in numbers.out_spec]
    examples, all_features, *windows = result_shape
    sizes = images.shape[rank + 2 :]
    reads = kernel.shape[rank + 2 :]
    places = _find_convolved_places(params, sizes, windows, reads)
    example_groups = params["batch_group_count"]
    feature_groups = params["feature_group_count"]
    groups = example_groups * feature_groups
    features = all_features // groups  # of one group

    # [groups, examples * windows, contracted] @ [groups, contracted, features of one group]
    patches = _read_patches(scope, images, places, example_groups, feature_groups)
    weights = _reshape(kernel, rank, (groups, features, patches.shape[-1]))
    weights = _transpose(weights, rank, (0, 2, 1))
    product = matmul(field, patches, weights)
    # Back: [groups, N, windows, features of one group] becomes [N, groups, features of one group, windows], which is
    # [N, F, *windows].
    product = _reshape(product, rank, (groups, examples, len(places), features))
    product = _transpose(product, rank, (1, 0, 3, 2))
    product = _reshape(product, rank, result_shape)
    return _transpose(product, rank, np.argsort(numbers.out_spec).tolist())


def _read_patches(scope: Scope, images: Exact, places: np.ndarray, example_groups: int, feature_groups: int) -> Exact:
    """The elements that the windows of images [N, C, *sizes] read.

    They are [groups, examples * windows, channels * elements of a window]. A group has a part of the examples or a part
    of the channels: one of the two numbers of groups is 1.
    """
    rank = scope.rank
    windows, reads = places.shape
    examples = images.shape[rank] // example_groups
    channels = images.shape[rank + 1] // feature_groups
    groups = example_groups * feature_groups
    # [*mesh, N, C, windows, elements of a window]
    elements = _read_windows(scope.field, _flatten(images, rank + 2), places, 0.0)
    elements = _reshape(elements, rank, (example_groups, examples, feature_groups, channels, windows, reads))
    # Groups first, then examples and windows, then what a product sums over: channels and elements.
    elements = _transpose(elements, rank, (0, 2, 1, 4, 3, 5))
    return _reshape(elements, rank, (groups, examples * windows, channels * reads))


def _find_convolved_places(
    params: Any, sizes: Sequence[int], windows: Sequence[int], reads: Sequence[int]
) -> np.ndarray:
    """The places of a convolution's windows in the dims that it runs over."""
    dims = _list_window_dims(
        sizes=sizes,
        windows=windows,
        reads=reads,
        strides=params["window_strides"],
        paddings=params["padding"],
        spreads=params["lhs_dilation"],
        steps=params["rhs_dilation"],
    )
    return find_places(dims)


# Pooling


def _find_pooled_places(equation: Any, array: Any, windows: Any) -> np.ndarray:
    """The places of the windows of a pooling, by the variables of the array and of a value for each window."""
    params = equation.params
    sizes = array.aval.shape
    ones = (1,) * len(sizes)  # select_and_scatter_add has no dilation
    dims = _list_window_dims(
        sizes=sizes,
        windows=windows.aval.shape,
        reads=params["window_dimensions"],
        strides=params["window_strides"],
        paddings=params["padding"],
        spreads=params.get("base_dilation", ones),
        steps=params.get("window_dilation", ones),
    )
    return find_places(dims)


def _shape_as_result(scope: Scope, equation: Any, x: Exact) -> Exact:
    """The shape of an equation's result."""
    return _reshape(x, scope.rank, equation.outvars[0].aval.shape)


def _read_pooled(scope: Scope, equation: Any, x: Exact, by: str) -> Exact:
    """The elements that a pooling reads, [*mesh, windows, elements of a window]."""
    places = _find_pooled_places(equation, equation.invars[0], equation.outvars[0])
    return _take_places(_list_elements(scope, x, _NEUTRAL[by]), places)


def _list_elements(scope: Scope, x: Exact, filling: float) -> Exact:
    """The elements of an array in a row, and one more that stands for padding: [*mesh, elements + 1]."""
    return _append(scope.field, _flatten(x, scope.rank), filling)


def add_windows(scope: Scope, equation: Any, x: Exact) -> Exact:
    """reduce_window_sum."""
    elements = _read_pooled(scope, equation, x, "add")
    sums = sum_dims(scope.field, elements, [scope.rank + 1])
    return _shape_as_result(scope, equation, sums)


def _multiply_windows(scope: Scope, equation: Any, x: Exact) -> Exact:
    """The product of the elements of each window, factor by factor."""
    elements = _read_pooled(scope, equation, x, "mul")
    dim = scope.rank + 1
    # One element of all windows is a factor at a time.
    product = elements.row(dim, 0)
    for i in range(1, elements.shape[dim]):
        product = multiply(scope.field, product, elements.row(dim, i))
    return _shape_as_result(scope, equation, product)


def take_extremes(scope: Scope, equation: Any, x: Exact) -> Exact:
    """reduce_window_max and reduce_window_min."""
    by = equation.primitive.name.removeprefix("reduce_window_")
    return _take_extremes(scope, equation, x, by)


def _take_extremes(scope: Scope, equation: Any, x: Exact, by: str) -> Exact:
    """The largest element of each window, or the smallest: `by` is "max" or "min".

    Keys say which element it is; the element itself, with its residues, is taken from its place.
    """
    filling = _NEUTRAL[by]
    places = _find_pooled_places(equation, equation.invars[0], equation.outvars[0])
    keys = _read_keys(scope, x, places, filling)
    largest = by == "max"
    if largest:
        chosen = keys.argmax(-1)
    else:
        chosen = keys.argmin(-1)
    source = _list_elements(scope, to_number(scope.field, x), filling)
    if scope.field.coverage is not None:
        elements = _take_places(source, places)
        scope.choose_extremes(equation, elements, keys, [keys.ndim - 1], largest)
    extremes = _take_on_devices(scope, source, _choose_places(places, chosen))
    return _shape_as_result(scope, equation, extremes)


def _read_keys(scope: Scope, x: Operand, places: np.ndarray, filling: float) -> np.ndarray:
    """float64 [..., windows, elements of a window]: the keys of the elements that windows read."""
    if isinstance(x, Exact):
        keys = find_keys(scope.field, x)
    else:
        keys = np.asarray(x, np.float64)
    # [*mesh, elements], with the key of the padding after them.
    keys = keys.reshape(*keys.shape[: scope.rank], -1)
    key_of_padding = np.full((*keys.shape[:-1], 1), filling)
    keys = np.concatenate([keys, key_of_padding], -1)
    return keys[..., places]


def _choose_places(places: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The place of one element [..., windows] of each window."""
    places = np.broadcast_to(places, (*chosen.shape, places.shape[1]))
    return np.take_along_axis(places, chosen[..., None], -1)[..., 0]


def reduce_windows(scope: Scope, equation: Any, *operands: Operand) -> Exact:
    """reduce_window by a sum, product, maximum or minimum of a window and the number that it begins with."""
    field = scope.field
    by = _find_reducer(equation.params["jaxpr"])
    if len(operands) != 2 or by not in _NEUTRAL:
        raise UnsupportedError(f"reduce_window by {by}")
    array, start = operands
    x = scope.lift_one(array)
    ones = (1,) * len(equation.outvars[0].aval.shape)
    first = to_number(field, _reshape(scope.lift_one(start), scope.rank, ones))
    if by == "add":
        return add(field, add_windows(scope, equation, x), first)
    if by == "mul":
        return multiply(field, _multiply_windows(scope, equation, x), first)
    extremes = _take_extremes(scope, equation, x, by)
    keys = find_keys(field, extremes)
    key_of_first = find_keys(field, first)
    if by == "max":
        stays = keys >= key_of_first
    else:
        stays = keys <= key_of_first
    # jax pads with the number it begins with; a window may be padding alone.
    mask = scope.decide(equation, stays, extremes, first)
    return where(mask | np.isnan(keys), extremes, first)


def _find_reducer(body: Any) -> str:
    """The primitive that joins two numbers: both arguments of the body are operands of its only equation."""
    if len(body.eqns) == 1:
        [equation] = body.eqns
        if all(variable in equation.invars for variable in body.invars):
            return equation.primitive.name
    return "another function"


# Gradients of pooling


def scatter_to_extremes(scope: Scope, equation: Any, source: Operand, x: Operand) -> Exact:
    """select_and_scatter_add: each window gives its value to its extreme element, which sums the values that it gets.

    For each j, an element is the j-th element of at most one window. So the sum has a term for each element of a
    window: term j is the value of the window in which the element is the j-th, if it is the extreme there, and else
    zero.

    Worked example: the array [a, b, c, d], with a < b, b > c and c < d, windows of 2 with stride 1, and their values
    [u, v, w]. The places are [[0, 1], [1, 2], [2, 3]], and the extremes b, b and d have the places [1, 1, 3].

        windows by j      [[0, 1, 2, none], [none, 0, 1, 2]]    element 1 is the 0-th of window 1, the 1st of window 0
        is the extreme    [[no, yes, no, no], [no, yes, no, yes]]
        terms             [[0, v, 0, 0], [0, u, 0, w]]
        sum               [0, u + v, 0, w]
    """
    # The first operand has a value for each window, the second one is the array that was pooled.
    of_windows, array = equation.invars
    places = _find_pooled_places(equation, array, of_windows)
    extremes = _find_first_extremes(scope, equation, x, places)
    size = math.prod(array.aval.shape)
    # Windows are numbered from 0. `no_window` is one more, whose value is 0, and whose extreme is no element.
    no_window = len(places)
    windows = _number_windows(places, size, no_window)
    no_element = np.full((*extremes.shape[:-1], 1), size)
    extremes = np.concatenate([extremes, no_element], -1)
    # [*mesh, j, element]: whether the element is the extreme of the window in which it is the j-th.
    is_extreme = extremes[..., windows] == np.arange(size)
    values = _list_elements(scope, scope.lift_one(source), 0.0)
    terms = _take_on_devices(scope, values, np.where(is_extreme, windows, no_window))
    sums = sum_dims(scope.field, terms, [scope.rank])
    return _shape_as_result(scope, equation, sums)


def _number_windows(places: np.ndarray, size: int, no_window: int) -> np.ndarray:
    """int64 [j, element]: the window of which the element is the j-th; `no_window` if there is none."""
    # One more element is the padding, which is dropped.
    windows = np.full((places.shape[1], size + 1), no_window)
    for j, places_of_j in enumerate(places.T):
        windows[j, places_of_j] = np.arange(len(places))
    return windows[:, :size]


def gather_from_extremes(scope: Scope, equation: Any, tangents: Operand, x: Operand) -> Exact:
    """select_and_gather_add: the tangent of each window's largest, or smallest, element; the first of equal elements.

    A compiler may choose any of equal elements: a proof about gradients holds for inputs without equal elements.
    """
    places = _find_pooled_places(equation, equation.invars[1], equation.outvars[0])
    extremes = _find_first_extremes(scope, equation, x, places)
    source = _list_elements(scope, scope.lift_one(tangents), 0.0)
    tangents_of_extremes = _take_on_devices(scope, source, extremes)
    return _shape_as_result(scope, equation, tangents_of_extremes)


def _find_first_extremes(scope: Scope, equation: Any, x: Operand, places: np.ndarray) -> np.ndarray:
    """int64 [..., windows]: the place of each window's largest, or smallest, element; the first of equal elements.

    It is noted as a comparison of all elements of a window with the chosen one, as in the gradient of `reduce_max`.
    """
    largest = equation.params["select_prim"].name == "ge"
    if largest:
        filling = _NEUTRAL["max"]
    else:
        filling = _NEUTRAL["min"]
    keys = _read_keys(scope, x, places, filling)
    chosen = np.zeros(keys.shape[:-1], int)
    best = keys[..., 0]
    for j in range(1, keys.shape[-1]):
        key = keys[..., j]
        # The first of equal keys stays.
        if largest:
            stays = best >= key
        else:
            stays = best <= key
        chosen = np.where(stays, chosen, j)
        best = np.where(stays, best, key)
    extremes = _choose_places(places, chosen)
    if isinstance(x, Exact) and scope.field.coverage is not None:
        source = _list_elements(scope, to_number(scope.field, x), filling)
        elements = _take_places(source, places)
        extreme_elements = _take_on_devices(scope, source, extremes[..., None])
        is_chosen = chosen[..., None] == np.arange(places.shape[1])
        scope.decide(equation, is_chosen, elements, extreme_elements)
    return extremes


# Sums of exps


def cumulate_logs(scope: Scope, equation: Any, x: Exact) -> Exact:
    """cumlogsumexp: logarithms of sums of exps, by windows that end, or begin, at each element."""
    field = scope.field
    dim = scope.rank + equation.params["axis"]
    size = x.shape[dim]
    # Window i reads elements 0 to i, and padding before them; a reverse one i to the end. Worked example, of three
    # elements: the places [[3, 3, 0], [3, 0, 1], [0, 1, 2]], where 3 is the padding, whose exp is 0.
    padding = (size - 1, 0)
    if equation.params["reverse"]:
        padding = (0, size)
    places = find_places([WindowDim(size, size, size, padding=padding)])
    dim_of_part = 1 + dim  # behind the components
    exps = exp(field, x).move(lambda part: np.moveaxis(part, dim_of_part, -1))
    terms = _read_windows(field, exps, places, 0.0)
    sums = sum_dims(field, terms, [len(x.shape)])
    return log(field, sums).move(lambda part: np.moveaxis(part, -1, dim_of_part))

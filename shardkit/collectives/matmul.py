"""Matmuls that overlap the all_gather before them, or the reduce_scatter after them, hop by hop.

They are the two ends of a tensor-parallel block with sequence parallelism: `all_gather_matmul` enters the block,
`matmul_reduce_scatter` leaves it. Backward passes are rings too. Their residuals are the operands; the backward pass
of `all_gather_matmul` gathers the tokens again, that of `matmul_reduce_scatter` gathers the cotangents. Sums are
accumulated in float32 and sent in the dtype of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis, divides
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import backends, compat
from shardkit._jax.compat import bound
from shardkit.collectives._parts import merge_parts, separate_parts
from shardkit.collectives._sums import save_as_dot, wide, wide_zeros
from shardkit.collectives.axes import axis_index, axis_size, vary, vary_like
from shardkit.collectives.basic import gather_array, scatter_array
from shardkit.collectives.permute import shift_array
from shardkit.cost import Links, matmul_forms
from shardkit.cost.crossovers import ring_from
from shardkit.cost.hardware import Chip, chip_of
from shardkit.cost.matmul_forms import Forms, Matmul

Impl = Literal["gather", "ring", "bidirectional", "auto"] | Links
_Names = tuple[str, ...]
_Arrays = tuple[jax.Array, ...]


@typed
def all_gather_matmul(x_tD: jax.Array, w_Df: Arrays, axis: Axis, *, impl: Impl = "auto") -> Any:
    """Multiplies the tokens of all devices with this device's columns; sends some tokens while it multiplies others.

    Layout: `X[T_a, D] . W[D, F_a] -> Y[T, F_a]`
    Args:
        x_tD: floating-point array [..., t, D], this device's tokens.
        w_Df: array [D, ...] of the same dtype, with any number of column dims. For a pytree of such arrays (gate and
            up; query, key and value) the tokens are gathered once.
        axis: axis name or tuple of names.
        impl: "gather": one all_gather, then one matmul. "ring": tokens go one way, in n-1 hops. "bidirectional": half
            of the tokens go each way (over two devices: as "ring"). The backward pass of both sends tokens up and sums
            down. "auto" takes what is fastest on the chip that you trace for, of the kernel alone, by the closed forms
            of `cost/matmul_forms.py`, in the forward and in the backward pass each; `aot.compile` and `audit(target=)`
            trace for their topology. It takes "gather" for a chip that `cost.chips` does not have, such as CPUs, and
            for meshes without devices. A `cost.Links` chooses by links that you measured: "ring" if a hop takes no
            longer than the matmul of its tokens with all columns (`ring_from`); else "bidirectional" if a hop takes no
            longer than two matmuls, over 3 devices or more; else "gather".

    Returns:
        Array [..., T, ...] in the dtype of the operands, or a pytree of them like `w_Df`: a weight's column dims
            replace D. It varies over `axis` and over all axes of x and w.

    Raises:
        ValueError: an unbound axis, another `impl`, or operands with other dims.
        TypeError: operands that are not floating-point, or of two dtypes.

    Cost: B (n-1) bytes in n-1 hops, B being x_tD, for every `impl`; the backward pass 2 B (n-1) bytes, in n-1 hops both
    ways at once, or in 2 (n-1) for "gather".

    Example:
        >>> up = lambda x_tD, w_Df: sk.all_gather_matmul(x_tD, w_Df, "model", impl="ring")
        >>> specs = {"in_specs": (P("model"), P(None, "model")), "out_specs": P(None, "model")}
        >>> jax.shard_map(up, mesh=mesh, **specs)(jnp.ones((8, 2)), jnp.ones((2, 16))).shape
        (8, 16)

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition (ASPLOS 2023).
    """
    where = "all_gather_matmul"
    names = bound(where, axis)
    weights, tree = jax.tree.flatten(w_Df)
    for w in weights:
        if jnp.ndim(x_tD) < 2 or jnp.ndim(w) < 1 or x_tD.shape[-1] != w.shape[0]:
            raise ValueError(
                f"{where}: the last dim of x [..., t, D] must be dim 0 of w [D, ...]; "
                f"got shapes {jnp.shape(x_tD)} and {jnp.shape(w)}. Reshape or transpose one of them."
            )
    x, *weights = _check_operands(where, names, x_tD, *weights)
    columns = 0
    for w in weights:
        columns += math.prod(w.shape[1:])
    width = x.shape[-1]
    tokens = x.size // max(1, width)
    matmul = Matmul(axis_size(names), tokens, width, columns, x.dtype.itemsize)
    forms = _choose_forms(impl, names, matmul, matmul_forms.all_gather_matmul_seconds)
    products = _all_gather_matmul(x, tuple(weights), names, forms)
    return jax.tree.unflatten(tree, products)


@typed
def matmul_reduce_scatter(h_Tf: jax.Array, w_fD: jax.Array, axis: Axis, *, impl: Impl = "auto") -> jax.Array:
    """Multiplies all tokens with this device's rows and sums over devices; sends some sums while computing others.

    Layout: `H[T, F_a] . W[F_a, D] -> Y[T, D] {U_a} -> Y[T_a, D]`
    Args:
        h_Tf: floating-point array [..., T, f], or with as many dims for f as `w_fD` has before D.
        w_fD: array [f, D] or [..., D] of the same dtype.
        axis: axis name or tuple of names.
        impl: "gather": one matmul, then one reduce_scatter; its backward pass is one all_gather and two matmuls.
            "ring": sums are sent one way, in n-1 hops. "bidirectional": half of them each way (over two devices: as
            "ring"). The backward pass of both sends the gradient one way, beside two matmuls per hop. "auto" or a
            `cost.Links`: as for all_gather_matmul, with f for the columns and the result for the tokens.

    Returns:
        Array [..., t, D] in the dtype of the operands, to which each hop rounds. It varies over `axis` and over the
        axes over which h or w vary.

    Raises:
        ValueError: an unbound axis, another `impl`, operands with other dims, or T that does not divide.
        TypeError: operands that are not floating-point, or of two dtypes.

    Cost: B (n-1) bytes in n-1 hops, B being the result, for every `impl`; the backward pass the same.

    Example:
        >>> down = lambda h_Tf, w_fD: sk.matmul_reduce_scatter(h_Tf, w_fD, "model")
        >>> specs = {"in_specs": (P(None, "model"), P("model")), "out_specs": P("model")}
        >>> print(jax.shard_map(down, mesh=mesh, **specs)(jnp.ones((8, 16)), jnp.ones((16, 2)))[0])
        [16. 16.]

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition (ASPLOS 2023).
    """
    where = "matmul_reduce_scatter"
    names = bound(where, axis)
    token_dim = jnp.ndim(h_Tf) - jnp.ndim(w_fD)
    if token_dim < 0 or jnp.ndim(w_fD) < 2 or h_Tf.shape[token_dim + 1 :] != w_fD.shape[:-1]:
        raise ValueError(
            f"{where}: the dims of h [..., T, f] after T must be those of w [f, D] before D; "
            f"got shapes {jnp.shape(h_Tf)} and {jnp.shape(w_fD)}. Reshape or transpose one of them."
        )
    divides(where, token_dim, h_Tf.shape[token_dim], names, axis_size(names))
    h, w = _check_operands(where, names, h_Tf, w_fD)
    n = axis_size(names)
    tokens = math.prod(h.shape[: token_dim + 1]) // n
    rows = math.prod(w.shape[:-1])
    matmul = Matmul(n, tokens, w.shape[-1], rows, h.dtype.itemsize)
    forms = _choose_forms(impl, names, matmul, matmul_forms.matmul_reduce_scatter_seconds)
    return _matmul_reduce_scatter(h, w, names, forms)


def _check_operands(where: str, names: _Names, *arrays: jax.Array) -> list[jax.Array]:
    """The operands, varying over the same axes, so that their gradients need no reduction inside."""
    dtypes = [jnp.result_type(x) for x in arrays]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(dtypes[0], jnp.floating):
        raise TypeError(
            f"{where}: operands must be floating-point and of one dtype; got {', '.join(map(str, dtypes))}. "
            "Cast them to one dtype first."
        )
    axes = set(names)
    for x in arrays:
        axes |= compat.varying_axes(x)
    return vary(list(arrays), tuple(sorted(axes)))


def _choose_forms(
    impl: Impl, names: _Names, matmul: Matmul, find_seconds: Callable[[Matmul, Chip], matmul_forms.Seconds]
) -> Forms:
    """The forms of the forward and the backward pass: `impl`, or those that are the fastest for this matmul."""
    gather = Forms("gather", "gather")
    if matmul.n == 1:
        return gather  # nothing is sent
    if isinstance(impl, str) and impl != "auto":
        return Forms(impl, impl)
    if not matmul.tokens * matmul.width * matmul.columns:
        return gather
    if isinstance(impl, Links):
        form = _choose_by_links(impl, names, matmul)
        return Forms(form, form)
    chip = chip_of(backends.device_kind())
    if chip is None or matmul_forms.is_mostly_latency(matmul, chip):
        return gather
    return find_seconds(matmul, chip).fastest()


def _choose_by_links(links: Links, names: _Names, matmul: Matmul) -> str:
    """The form for measured links: by whether the matmul of a message hides the next one."""
    if not links.flops:
        return "gather"
    find_least_message = partial(
        ring_from, links.of(names), matmul.columns, flops=links.flops, value_bytes=matmul.value_bytes
    )
    message = matmul.tokens * matmul.width * matmul.value_bytes
    if message >= find_least_message():
        return "ring"
    if matmul.n > 2 and message >= find_least_message(ways=2):
        return "bidirectional"
    return "gather"


# The matmuls after their arguments are checked. Operands vary over the same axes. The forms are an argument that jax
# does not differentiate: the forward pass reads `forms.forward`, the backward pass `forms.backward`.
#
# The ring of all_gather_matmul over three devices, with tokens x0, x1, x2 and this device's columns w. Device 0:
#
#   send x0 up     | y[0] = x0 @ w      from device 2 arrives x2
#   send x2 up     | y[2] = x2 @ w      from device 2 arrives x1, which device 1 had sent to device 2
#                  | y[1] = x1 @ w
#
# The matmul of a line needs only the tokens that the line above has brought, so the message of the line is under way
# while the matmul runs. The last matmul stands after the loop, since nothing is left to send. matmul_reduce_scatter is
# the transpose: sums travel. To each sum a device adds its product for the tokens of the device that the sum goes to.


def _all_gather_matmul_primal(x: jax.Array, ws: _Arrays, names: _Names, forms: Forms) -> _Arrays:
    token_dim = x.ndim - 2
    n = axis_size(names)
    me = axis_index(names)
    if forms.forward == "gather":
        x_TD = gather_array(x, names, token_dim)
        return tuple(_dot(x_TD, w, 1) for w in ws)
    directions = _choose_directions(forms.forward, x.shape[token_dim], n)

    def multiply(k: Any, messages: Sequence[jax.Array], products: Sequence[jax.Array]) -> list[jax.Array]:
        products = list(products)
        for direction, rows in zip(directions, messages, strict=True):
            source = me - direction.by * k
            for number, w in enumerate(ws):
                product_rows = _dot(rows, w, 1)
                products[number] = _store_rows(products[number], product_rows, token_dim, source, direction.first)
        return products

    def hop(k: Any, carry: Any) -> Any:
        messages, products = carry
        arrivals = _send_on(messages, names, directions)
        return arrivals, multiply(k, messages, products)

    messages = [_slice_rows(x, token_dim, direction) for direction in directions]
    # Rows by device, [..., n, t, f]: every row is written once, so that nothing must be zeroed.
    products = []
    for w in ws:
        shape = (*x.shape[:token_dim], n, x.shape[token_dim], *w.shape[1:])
        products.append(vary_like(lax.empty(shape, x.dtype), x))
    messages, products = lax.fori_loop(0, n - 1, hop, (messages, products))
    products = multiply(n - 1, messages, products)
    return tuple(merge_parts(product, token_dim) for product in products)


def _all_gather_matmul_forward(x: jax.Array, ws: _Arrays, names: _Names, forms: Forms) -> Any:
    # Calling the custom_vjp function here would hide its matmuls from the policies of jax.checkpoint.
    return _all_gather_matmul_primal(x, ws, names, forms), (x, ws)


def _all_gather_matmul_backward(names: _Names, forms: Forms, residuals: Any, dys: _Arrays) -> Any:
    x, ws = residuals
    token_dim = x.ndim - 2
    n = axis_size(names)
    me = axis_index(names)

    def multiply_term(dy: jax.Array, w: jax.Array) -> jax.Array:
        return _dot(dy, jnp.moveaxis(w, 0, -1), w.ndim - 1, partial_sum=True)

    def multiply_dx(dys: Sequence[jax.Array]) -> jax.Array:
        """dy @ w.T, summed over the weights, in float32."""
        dx = multiply_term(dys[0], ws[0])
        for dy, w in zip(dys[1:], ws[1:], strict=True):
            dx = dx + multiply_term(dy, w)
        return dx

    if forms.backward == "gather":
        x_TD = gather_array(x, names, token_dim)
        gathered_dws = tuple(_outer(x_TD, dy, token_dim + 1) for dy in dys)
        dx = scatter_array(multiply_dx(dys).astype(x.dtype), names, token_dim)
        return dx, gathered_dws
    dys = tuple(separate_parts(dy, token_dim, n) for dy in dys)

    def take_dys(source: Any) -> list[jax.Array]:
        return [_take_rows(dy, token_dim, source) for dy in dys]

    def add_to_dws(dws: _Arrays, rows: jax.Array, source: Any) -> _Arrays:
        sums = []
        for dw, dy in zip(dws, take_dys(source), strict=True):
            sums.append(dw + _outer(rows, dy, token_dim + 1, partial_sum=True))
        return tuple(sums)

    # Shards of x are sent up, for the weight gradients; sums of dx are sent down, each to the owner of its rows. Both
    # directions of a link are busy, and neither message waits for this hop's matmuls.
    #
    # Worked example: device 0 of 4, and the device whose rows it multiplies.
    #
    #                                      before the loop   hop 0   hop 1   hop 2   after the loop
    #     dw: the rows that it has now                       0       3       2       1
    #     dx: the sum that it has now      1                 2       3       0
    def hop(k: Any, carry: Any) -> Any:
        rows, dx, dws = carry
        arriving_rows = shift_array(rows, names)
        arriving_dx = shift_array(dx, names, by=-1)
        # From the device above comes the sum that it had: one place further on than this device's last one.
        dx = _add_to_arrival(arriving_dx, multiply_dx(take_dys(me + 2 + k)))
        return arriving_rows, dx, add_to_dws(dws, rows, me - k)

    first_dx = multiply_dx(take_dys(me + 1)).astype(x.dtype)
    zero_dws = tuple(map(wide_zeros, ws))
    rows, dx, dws = lax.fori_loop(0, n - 1, hop, (x, first_dx, zero_dws))
    dws = add_to_dws(dws, rows, me + 1)
    return dx, tuple(dw.astype(x.dtype) for dw in dws)


def _matmul_reduce_scatter_primal(h: jax.Array, w: jax.Array, names: _Names, forms: Forms) -> jax.Array:
    token_dim = h.ndim - w.ndim
    n = axis_size(names)
    me = axis_index(names)
    if forms.forward == "gather":
        partial_sums = _dot(h, w, w.ndim - 1)
        return save_as_dot(scatter_array(partial_sums, names, token_dim))
    h = separate_parts(h, token_dim, n)
    directions = _choose_directions(forms.forward, h.shape[token_dim + 1], n)

    def multiply(k: Any, direction: _Direction) -> jax.Array:
        device_rows = _take_rows(h, token_dim, me - direction.by * (k + 1))
        rows = _slice_rows(device_rows, token_dim, direction)
        return _dot(rows, w, w.ndim - 1, partial_sum=True)

    def hop(k: Any, sums: Sequence[jax.Array]) -> list[jax.Array]:
        arrivals = _send_on(sums, names, directions)
        new_sums = []
        for arrival, direction in zip(arrivals, directions, strict=True):
            new_sums.append(_add_to_arrival(arrival, multiply(k, direction)))
        return new_sums

    # Of four devices, device 0 begins the sum of device 3's rows. It goes up through 1 and 2, which add theirs, and
    # device 3 adds the last term.
    first_sums = [multiply(0, direction).astype(h.dtype) for direction in directions]
    sums = lax.fori_loop(1, n, hop, first_sums)
    return save_as_dot(jnp.concatenate(sums, token_dim))


def _matmul_reduce_scatter_forward(h: jax.Array, w: jax.Array, names: _Names, forms: Forms) -> Any:
    return _matmul_reduce_scatter_primal(h, w, names, forms), (h, w)


def _matmul_reduce_scatter_backward(names: _Names, forms: Forms, residuals: Any, dy: jax.Array) -> Any:
    h, w = residuals
    token_dim = h.ndim - w.ndim
    n = axis_size(names)
    me = axis_index(names)
    w_transposed = jnp.moveaxis(w, -1, 0)
    if forms.backward == "gather":
        dy_TD = gather_array(dy, names, token_dim)
        dh = _dot(dy_TD, w_transposed, 1)
        dw = _outer(h, dy_TD, token_dim + 1)
        return dh, dw
    h = separate_parts(h, token_dim, n)

    # The rows of the gradient that travel serve both results: dh is these rows times w.T, and dw needs them beside the
    # rows of h.
    def multiply(k: Any, dy_rows: jax.Array, dh: jax.Array, dw: jax.Array) -> tuple[jax.Array, jax.Array]:
        dh_rows = _dot(dy_rows, w_transposed, 1)
        dh = _store_rows(dh, dh_rows, token_dim, me - k)
        h_rows = _take_rows(h, token_dim, me - k)
        dw = dw + _outer(h_rows, dy_rows, token_dim + 1, partial_sum=True)
        return dh, dw

    def hop(k: Any, carry: Any) -> Any:
        dy_rows, dh, dw = carry
        arrival = shift_array(dy_rows, names)
        dh, dw = multiply(k, dy_rows, dh, dw)
        return arrival, dh, dw

    empty_dh = vary_like(lax.empty(h.shape, h.dtype), h)
    zero_dw = wide_zeros(w)
    dy_rows, dh, dw = lax.fori_loop(0, n - 1, hop, (dy, empty_dh, zero_dw))
    dh, dw = multiply(n - 1, dy_rows, dh, dw)
    return merge_parts(dh, token_dim), dw.astype(h.dtype)


_all_gather_matmul = jax.custom_vjp(_all_gather_matmul_primal, nondiff_argnums=(2, 3))
_all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)
_matmul_reduce_scatter = jax.custom_vjp(_matmul_reduce_scatter_primal, nondiff_argnums=(2, 3))
_matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


class _Direction(NamedTuple):
    """The rows that travel in one direction: `size` rows of every shard, from row `first`, by `by` devices per hop."""

    by: int
    first: int
    size: int


def _choose_directions(form: str, rows: int, n: int) -> list[_Direction]:
    half = rows // 2
    if form == "ring" or n == 2 or not half:
        return [_Direction(by=1, first=0, size=rows)]
    up = _Direction(by=1, first=0, size=half)
    down = _Direction(by=-1, first=half, size=rows - half)
    return [up, down]


def _slice_rows(x: jax.Array, dim: int, direction: _Direction) -> jax.Array:
    """The rows of a shard that travel in a direction."""
    end = direction.first + direction.size
    return lax.slice_in_dim(x, direction.first, end, axis=dim)


def _send_on(messages: Sequence[jax.Array], names: _Names, directions: Sequence[_Direction]) -> list[jax.Array]:
    """Sends a message in each direction; returns what arrives."""
    arrivals = []
    for message, direction in zip(messages, directions, strict=True):
        arrivals.append(shift_array(message, names, by=direction.by))
    return arrivals


def _dot(x: jax.Array, y: jax.Array, dims: int, *, partial_sum: bool = False) -> jax.Array:
    """Contracts the last `dims` dims of x with the first of y; a term of a longer sum in float32."""
    return jnp.tensordot(x, y, dims, preferred_element_type=_choose_dtype(x, partial_sum))


def _outer(x: jax.Array, y: jax.Array, dims: int, *, partial_sum: bool = False) -> jax.Array:
    """Contracts the first `dims` dims of both, batch and tokens, for a weight gradient."""
    shared_dims = tuple(range(dims))
    dtype = _choose_dtype(x, partial_sum)
    return jnp.tensordot(x, y, (shared_dims, shared_dims), preferred_element_type=dtype)


def _choose_dtype(x: jax.Array, partial_sum: bool) -> Any:
    if partial_sum:
        return wide(x.dtype)
    return x.dtype


def _add_to_arrival(arrival: jax.Array, product: jax.Array) -> jax.Array:
    # Fused with the matmul that computes the product, the addition would make that matmul wait for the message.
    product = lax.optimization_barrier(product)
    return (arrival.astype(product.dtype) + product).astype(arrival.dtype)


# Rows are indexed by device, not by row number, so that the compiler sees whole tiles and fuses the access with the
# matmul: [..., T, D] is [..., n, t, D], and device d's rows are index d of that dim.


def _take_rows(x: jax.Array, dim: int, device: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, device % x.shape[dim], dim, keepdims=False)


def _store_rows(
    out: jax.Array,
    rows: jax.Array,
    dim: int,
    device: Any,
    first: int = 0,
) -> jax.Array:
    start = [0] * out.ndim
    start[dim] = device % out.shape[dim]
    start[dim + 1] = first
    rows = jnp.expand_dims(rows.astype(out.dtype), dim)
    return lax.dynamic_update_slice(out, rows, start)

"""Products with sums over dims: dot_general and ragged_dot, as batched products of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import add, matmul
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.grams import find_product
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Known, Operand, join_operands, require_known
from shardkit.testing.exact.rules.scope import Scope


def dot_general(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """dot_general."""
    return _contract(scope, scope.lift_one(x), scope.lift_one(y), equation.params["dimension_numbers"])


def _contract(scope: Scope, x: Exact, y: Exact, dimension_numbers: Any) -> Exact:
    """A product with the dimension numbers of a dot_general.

    x becomes [*mesh, batch, free, contracted] and y [*mesh, batch, contracted, free], with the dims of a kind as one.
    Worked example: 'bqhd,bkhd->bhqk' has the batch dims b, h and the contracted dim d: it is [b h, q, d] @ [b h, d, k].
    """
    (x_contracted, y_contracted), (x_batch, y_batch) = dimension_numbers
    rank = scope.rank
    x_free = _list_free_dims(len(x.shape) - rank, x_contracted, x_batch)
    y_free = _list_free_dims(len(y.shape) - rank, y_contracted, y_batch)
    left = _group_dims(x, rank, (x_batch, x_free, x_contracted))
    right = _group_dims(y, rank, (y_batch, y_contracted, y_free))
    # The field remembers some products that do not follow from residues, as L L^T of a Cholesky factor.
    product = find_product(scope.field, left, right)
    if product is None:
        product = matmul(scope.field, left, right)
    # dot_general gives the batch dims first, then the free dims of x, then the free dims of y.
    shape = [x.shape[rank + dim] for dim in (*x_batch, *x_free)]
    shape += [y.shape[rank + dim] for dim in y_free]

    def reshape(part: np.ndarray) -> np.ndarray:
        return part.reshape(*part.shape[: 1 + rank], *shape)

    return product.move(reshape)


def _list_free_dims(dims: int, contracted: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The dims of one operand alone, which are neither summed over nor shared."""
    shared_dims = (*contracted, *batch)
    return [dim for dim in range(dims) if dim not in shared_dims]


def _group_dims(x: Exact, rank: int, groups: Sequence[Sequence[int]]) -> Exact:
    """An array with one dim for each group of its dims, after the dims of the mesh."""
    lead = 1 + rank
    order = []
    shape = []
    for group in groups:
        order += [lead + dim for dim in group]
        shape.append(math.prod(x.shape[rank + dim] for dim in group))

    def move(part: np.ndarray) -> np.ndarray:
        part = part.transpose(*range(lead), *order)
        return part.reshape(*part.shape[:lead], *shape)

    return x.move(move)


def ragged_dot(scope: Scope, equation: Any, x: Operand, w: Operand, sizes: Known) -> Exact:
    """ragged_dot: the rows of x, sorted by group, times the matrix of their group; or the sums over rows by group.

    Worked example: with group sizes [2, 1], rows 0 and 1 of x meet w[0], and row 2 meets w[1]. For each group the other
    rows are masked with zeros, all of x is multiplied, and the products are added.
    """
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (x_contracted, w_contracted), (x_batch, w_batch) = numbers.dot_dimension_numbers
    # jax.lax.ragged_dot has none; ragged_dot_general may.
    if x_batch or w_batch:
        raise UnsupportedError("ragged_dot_general with batch dims")
    sizes = require_known(sizes, "ragged_dot_general")
    x = scope.lift_one(x)
    w = scope.lift_one(w)
    [ragged_dim] = numbers.lhs_ragged_dimensions
    # A zero row adds nothing.
    zero = scope.constant(0, like=x)
    groups = [where(mask, x, zero) for mask in _mask_groups(scope, x, ragged_dim, sizes)]
    if not numbers.rhs_group_dimensions:
        # The gradient of w: w has no dim of groups, and each group has a sum of its own over its rows.
        dimension_numbers = ((x_contracted, w_contracted), ((), ()))
        products = [_contract(scope, rows, w, dimension_numbers) for rows in groups]
        return join_operands(scope.field, products, scope.rank, new=True)
    [group_dim] = numbers.rhs_group_dimensions
    return _multiply_by_group(scope, groups, w, group_dim, (x_contracted, w_contracted))


def _multiply_by_group(
    scope: Scope, groups: Sequence[Exact], w: Exact, group_dim: int, contracted: tuple[Sequence[int], Sequence[int]]
) -> Exact:
    """The rows of each group times the matrix of the group, a row of w along `group_dim`."""
    x_contracted, w_contracted = contracted
    # Of w [groups, D, F] the matrix of one group is [D, F]: dim 1 of w is dim 0 of the matrix.
    matrix_contracted = []
    for dim in w_contracted:
        if dim > group_dim:
            dim = dim - 1
        matrix_contracted.append(dim)
    dimension_numbers = ((x_contracted, matrix_contracted), ((), ()))
    products = []
    for group, rows in enumerate(groups):
        matrix = w.row(scope.rank + group_dim, group)
        products.append(_contract(scope, rows, matrix, dimension_numbers))
    # Rows of other groups are zero in each product: the sum has every row once.
    total = products[0]
    for product in products[1:]:
        total = add(scope.field, total, product)
    return total


def _mask_groups(scope: Scope, x: Exact, ragged_dim: int, sizes: Known) -> list[np.ndarray]:
    """For each group bool [..., row, ...]: which rows of x it has, in a shape that broadcasts against x.

    Worked example: of the sizes [2, 1] the ends are [2, 3] and the starts [0, 2]. Group 0 has the rows 0 and 1, and
    group 1 has row 2.
    """
    rank = scope.rank
    rows = np.arange(x.shape[rank + ragged_dim])
    sizes = np.asarray(sizes)[..., None]  # [*mesh, group, 1]
    ends = np.cumsum(sizes, -2)
    starts = ends - sizes
    is_member = (rows >= starts) & (rows < ends)  # [*mesh, group, row]
    shape = [1] * (len(x.shape) - rank)
    shape[ragged_dim] = len(rows)
    masks = []
    for group in range(is_member.shape[rank]):
        mask = np.take(is_member, group, rank)
        masks.append(mask.reshape(*mask.shape[:rank], *shape))
    return masks

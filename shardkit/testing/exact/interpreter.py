"""Runs a traced program in the field: every device at once, its calls, loops, branches and collectives.

A value has one dim in front for each mesh axis that is bound where it stands, of size 1 where all devices along the
axis have the same. So a collective is a sum over a dim, a roll of it or its exchange with another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from shardkit._jax import compat
from shardkit._jax.jaxprs import flow, mesh_axes, scan_operands, source_line, walk, while_operands
from shardkit._jax.primitives import ASSUMED, registered
from shardkit.meshes.layout import all_axes
from shardkit.testing._interpreter import join_shards, split_shards
from shardkit.testing.exact.field import Field, UnsupportedError
from shardkit.testing.exact.operands import Operand, deciding, stacked
from shardkit.testing.exact.rules import Rules, held, known
from shardkit.testing.exact.values import Exact

Move = Callable[[Any, int], Any]
# Called with each equation, its operands, its results, the bound axes and the line of the call around it; returns other
# results for it, or None.
Seen = Callable[[Any, Sequence[Operand], Sequence[Operand], Mapping[str, int], str], Sequence[Operand] | None]
# Neither rounding nor places on devices are modelled.
_AS_THEY_ARE = {
    *("seal", "unseal", "stop_gradient", "reduce_precision"),
    *("device_put", "sharding_constraint", "reshard", "mesh_cast"),
}
_QUIET = ("debug_callback", "debug_print")
_MOST_ROUNDS = 1000  # of a loop that a float ends
# What integers that are not negative give, none that is.
_NATURAL = {
    *("add", "mul", "max", "min", "rem", "reduce_sum", "reduce_max", "cumsum", "convert_element_type", "select_n"),
    *("reshape", "broadcast_in_dim", "squeeze", "transpose", "concatenate", "slice", "dynamic_slice", "sort"),
    "lu_pivots_to_permutation",
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_SOLVE = "custom_linear_solve"
_HOLDING = ("shard_map", "scan", "while", "cond")


@dataclass(frozen=True, eq=False)
class Interpreter:
    """Runs jaxprs in a field.

    Attributes:
        field: the arithmetic.
        axes: the bound mesh axes with their sizes, in the order of the dims in front.
        seen: what watches.
        around: the line of the call whose equations these are, for those that know none.
    """

    field: Field
    axes: Mapping[str, int] = attribute(default_factory=dict)
    seen: Seen | None = None
    around: str = ""

    @property
    def rank(self) -> int:
        """The number of dims in front."""
        return len(self.axes)

    def run(self, closed: Any, operands: Sequence[Operand]) -> list[Operand]:
        """The results of a closed jaxpr."""
        consts = [self._constant(x) for x in closed.consts]
        return flow(closed.jaxpr, [*consts, *operands], self.step, lambda atom: self._constant(atom.val))

    def _constant(self, x: Any) -> Operand:
        x = held(x)
        return x.reshape((1,) * self.rank + x.shape)

    def step(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """The results of an equation."""
        try:
            results = self._results(equation, operands)
        except UnsupportedError as error:
            if error.line in ("", "unknown"):
                error.line = source_line(equation)
            raise
        if equation.primitive.name in _HOLDING:
            return results
        results = self._followed(equation, operands, results)
        return self._tell(equation, operands, results) or results

    def _followed(self, equation: Any, operands: Sequence[Operand], results: Sequence[Operand]) -> Sequence[Operand]:
        """The results, of which what is known follows from floats where an operand does."""
        following = [x for x in operands if self.field.follows(x)]
        if not following or self._is_forced(equation, operands):
            return results
        natural = equation.primitive.name in _NATURAL and self._are_natural(operands)
        joins = equation.primitive.name not in _COMPARISONS and all(self.field.is_decision(x) for x in following)
        followed: list[Operand] = []
        for y in results:
            if not isinstance(y, Exact) and not self.field.follows(y):
                y = np.asarray(y)
                self.field.follow(y, decision=joins and y.dtype == bool, natural=natural)
            followed.append(y)
        return followed

    def _are_natural(self, operands: Sequence[Operand]) -> bool:
        return all(not isinstance(x, Exact) and self.field.is_natural(np.asarray(x)) for x in operands)

    def _is_forced(self, equation: Any, operands: Sequence[Operand]) -> bool:
        """Whether what is not negative is asked whether it is less than zero."""
        if equation.primitive.name not in ("lt", "ge") or any(isinstance(x, Exact) for x in operands):
            return False
        x, y = operands
        return not self.field.follows(y) and bool((np.asarray(y) <= 0).all()) and self.field.is_natural(x)

    def _tell(self, equation: Any, operands: Sequence[Operand], results: Sequence[Operand]) -> Sequence[Operand] | None:
        return None if self.seen is None else self.seen(equation, operands, results, self.axes, self.around)

    def _results(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        name = equation.primitive.name
        row = registered(name)
        if name == ASSUMED:
            return [self._replicated(equation, operands[0])]
        if row.cast or row.same or name in _AS_THEY_ARE:
            return operands
        if name == "axis_index":
            return [self._index(mesh_axes(equation))]
        if row.kind is not None:
            return self._collective(equation, operands)
        if name in _QUIET:
            return []
        if name == compat.HIGH_LEVEL:
            return replace(self, around=source_line(equation, self.around)).run(compat.expanded(equation), operands)
        if name not in _HOLDING and name not in compat.CALLS and name != _SOLVE:
            if not any(isinstance(x, Exact) for x in operands):
                return self._known(equation, operands)
            return Rules(self.field, self.rank, self.around)(equation, operands)
        inner = [
            ClosedJaxpr(sub, list(constants))
            for (_, sub), constants in zip(compat.inner_jaxprs(equation), compat.inner_constants(equation), strict=True)
        ]
        if name == "shard_map":
            return self._on_devices(equation, inner[0], operands)
        if name == "scan":
            return self._scan(equation, inner[0], operands)
        if name == "while":
            return self._while(equation, operands)
        if name == "cond":
            return self._cond(equation, inner, operands)
        within = replace(self, around=source_line(equation, self.around))
        if name == _SOLVE:  # what it reads stands between what the functions read that say what its derivatives are
            lengths = equation.params["const_lengths"]
            start = lengths.matvec + lengths.vecmat
            right = operands[sum(lengths) :]
            return within.run(inner[0], [*operands[start : start + lengths.solve], *right])
        return within.run(inner[0], operands[len(operands) - len(inner[0].jaxpr.invars) :])

    def _known(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """Results of what is known; what follows from comparisons of floats is followed, and compared with care."""
        results = known(equation, operands, self.rank)
        if not any(self.field.follows(x) for x in operands) or self._is_forced(equation, operands):
            return results
        name, coverage = equation.primitive.name, self.field.coverage
        if coverage is None:
            return results
        if name in _COMPARISONS:
            line = source_line(equation, self.around)
            coverage.note_integers(self.field, equation, line, results[0], operands)
        if name in ("and", "or") and all(self.field.is_decision(x) for x in operands):
            coverage.note_joined(self.field, equation, source_line(equation, self.around), results[0])
        return results

    # Devices

    def _on_devices(self, equation: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        sizes = {name: equation.params["mesh"].shape[name] for name in compat.manual_axes(equation)}
        inside = Interpreter(self.field, {**self.axes, **sizes}, self.seen)
        specs = equation.params["in_specs"]
        pieces = [self._pieces(x, spec, sizes) for x, spec in zip(operands, specs, strict=True)]
        for x, piece in zip(operands, pieces, strict=True):
            inside._tell(equation, [x], [piece])
        results = inside.run(body, pieces)
        whole = [self._joined(x, spec, sizes) for x, spec in zip(results, equation.params["out_specs"], strict=True)]
        for x, result in zip(results, whole, strict=True):
            self._tell(equation, [x], [result])
        return whole

    def _pieces(self, x: Operand, spec: Any, sizes: dict[str, int]) -> Operand:
        split = all_axes(spec)
        ways = [n if name in split else 1 for name, n in sizes.items()]

        def move(part: Any, lead: int) -> Any:
            part = split_shards(part, _behind(spec, lead), sizes)
            front = len(split)
            part = np.moveaxis(part, range(front), range(lead, lead + front))
            return part.reshape(*part.shape[:lead], *ways, *part.shape[lead + front :])

        return moved(x, self.rank, move)

    def _joined(self, x: Operand, spec: Any, sizes: dict[str, int]) -> Operand:
        split = all_axes(spec)
        for number, name in enumerate(sizes):
            if name not in split:
                x = self._first(x, self.rank + number, f"a result that is replicated along {name!r}")

        def move(part: Any, lead: int) -> Any:
            part = np.moveaxis(part, range(lead, lead + len(sizes)), range(len(sizes)))
            ways = [n if name in split else 1 for name, n in sizes.items()]
            return join_shards(np.broadcast_to(part, (*ways, *part.shape[len(sizes) :])), _behind(spec, lead), sizes)

        return moved(x, self.rank, move)

    def _first(self, x: Operand, dim: int, what: str) -> Operand:
        """Of values that are equal along a dim in front, one."""
        if x.shape[dim] == 1:
            return x
        first = moved(x, 0, lambda part, lead: part[(slice(None),) * (lead + dim) + (slice(0, 1),)])
        if isinstance(x, Exact):
            equal = self.field.same(x, first)
        else:
            equal = (x == first) | ((x != x) & (first != first))
        if not equal.all():
            raise DiffersError(what, x)
        return first

    def _replicated(self, equation: Any, x: Operand) -> Operand:
        for name in mesh_axes(equation):
            x = self._first(x, list(self.axes).index(name), f"an assume_replicated over {name!r}")
        return x

    def _index(self, names: tuple[str, ...]) -> Operand:
        result = np.zeros((1,) * self.rank, np.int32)
        for name in names:
            own = np.arange(self.axes[name], dtype=np.int32)
            own = own.reshape([self.axes[name] if axis == name else 1 for axis in self.axes])
            result = result * self.axes[name] + own
        return result

    # Control flow

    def _scan(self, equation: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        fixed, held, each = scan_operands(equation, operands)
        length, rows = equation.params["length"], []
        order = range(length - 1, -1, -1) if equation.params["reverse"] else range(length)
        for i in order:
            now = [self._row(x, i) for x in each]
            for x, row in zip(each, now, strict=True):
                self._tell(equation, [x], [row])
            results = self.run(body, [*fixed, *held, *now])
            held = results[: len(held)]
            rows.append(results[len(held) :])
        if equation.params["reverse"]:
            rows.reverse()
        if rows:
            columns = list(zip(*rows, strict=True))
            stacks = [stacked(self.field, column, self.rank, new=True) for column in columns]
            for column, stack in zip(columns, stacks, strict=True):
                self._tell(equation, column, [stack])
                if any(self.field.follows(x) for x in column):
                    self.field.follow(stack)
            return [*held, *stacks]
        empty = [np.zeros((1,) * self.rank + v.aval.shape, v.aval.dtype) for v in equation.outvars[len(held) :]]
        return [*held, *empty]

    def _row(self, x: Operand, i: int) -> Operand:
        """The piece of an operand that one round of a scan gets."""
        if isinstance(x, Exact):
            return x.row(self.rank, i)
        row = np.asarray(np.take(x, i, self.rank))
        return self.field.follow(row) if self.field.follows(x) else row

    def _while(self, equation: Any, operands: list[Operand]) -> list[Operand]:
        test, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
        of_test, of_body, held = while_operands(equation, operands)
        rounds = 0
        while True:
            [going] = self.run(test, [*of_test, *held])
            rounds += 1
            if self.field.follows(going) and (self.field.order is not None or rounds > _MOST_ROUNDS):
                # An order that no input has may never end it.
                raise UnsupportedError(f"a while loop that a float ends, after more than {_MOST_ROUNDS} rounds,")
            if not going.any():
                return held
            self._refuse_waiting(equation, going, [body])
            after = self.run(body, [*of_body, *held])
            held = after if going.all() else self._either(equation, going, after, held)

    def _cond(self, equation: Any, branches: list[Any], operands: list[Operand]) -> list[Operand]:
        which, *operands = operands
        which = np.clip(np.asarray(deciding(which, "cond"), np.int64), 0, len(branches) - 1)
        taken = sorted(set(which.reshape(-1).tolist()))
        if len(taken) > 1:
            self._refuse_waiting(equation, which, branches)
        results = self.run(branches[taken[0]], operands)
        for number in taken[1:]:
            results = self._either(equation, which == number, self.run(branches[number], operands), results)
        return results

    def _refuse_waiting(self, equation: Any, which: np.ndarray, bodies: Sequence[Any]) -> None:
        """Refuses a collective that some of its devices do not come to: the others would wait for them."""
        for body in bodies:
            for site in walk(body.jaxpr):
                row = registered(site.name)
                if row.kind is None or row.cast or row.same:
                    continue
                for name in set(mesh_axes(site.equation)) & set(self.axes):
                    first = np.take(which, [0], list(self.axes).index(name))
                    if (which != first).any():
                        raise HangsError(site.name, name, source_line(equation, self.around))

    def _either(self, equation: Any, mask: Any, xs: Sequence[Operand], ys: Sequence[Operand]) -> list[Operand]:
        """Those of xs on the devices where the mask holds, else those of ys."""
        merged = [self._where(mask, x, y) for x, y in zip(xs, ys, strict=True)]
        for x, y, either in zip(xs, ys, merged, strict=True):
            self._tell(equation, [x, y], [either])
        return merged

    def _where(self, mask: np.ndarray, x: Operand, y: Operand) -> Operand:
        """x on the devices where the mask holds, else y."""
        mask = mask.reshape(mask.shape + (1,) * (len(x.shape) - self.rank))
        if isinstance(x, Exact) or isinstance(y, Exact):
            return self.field.where(mask, *Rules(self.field, self.rank).exact(x, y))
        return np.where(mask, x, y)

    # Collectives

    def _collective(self, equation: Any, operands: list[Operand]) -> list[Operand]:
        params, names = equation.params, mesh_axes(equation)
        row = registered(equation.primitive.name)
        if params.get("axis_index_groups") is not None:
            raise UnsupportedError(f"{equation.primitive.name} with axis_index_groups")
        dims = [list(self.axes).index(name) for name in names]
        if row.kind == "all_reduce":
            return [self._reduced(x, dims, row.reduces or "sum") for x in operands]
        if row.kind == "all_gather":
            return [self._gathered(x, dims, params["all_gather_dimension"], params["tiled"]) for x in operands]
        if row.kind == "reduce_scatter":
            return [self._scattered(x, dims, params["scatter_dimension"], params["tiled"]) for x in operands]
        if row.kind == "ppermute":
            return [self._permuted(x, sorted(dims), params["perm"]) for x in operands]  # in the mesh's order
        if row.kind == "all_to_all" and "split_axis" in params:
            split, to, tiled = params["split_axis"], params["concat_axis"], params["tiled"]
            return [self._exchanged(x, dims, split, to, tiled) for x in operands]
        raise UnsupportedError(equation.primitive.name)

    def _reduced(self, x: Operand, dims: Sequence[int], by: str) -> Operand:
        for dim in dims:
            n = list(self.axes.values())[dim]
            if by != "sum":
                x = self._extreme(x, dim, by == "maximum")
            elif not isinstance(x, Exact):
                x = x.sum(dim, x.dtype, keepdims=True) if x.shape[dim] > 1 else np.asarray(x * n, x.dtype)
            elif x.shape[dim] > 1:
                x = self.field.total(x, [dim], keep=True)
            elif n > 1:
                x = self.field.mul(x, self.field.lifted(np.full((1,) * len(x.shape), n)))
        return x

    def _extreme(self, x: Operand, dim: int, largest: bool) -> Operand:
        if not isinstance(x, Exact):
            return x.max(dim, keepdims=True) if largest else x.min(dim, keepdims=True)
        key = self.field.key(x)
        at = np.expand_dims(key.argmax(dim) if largest else key.argmin(dim), dim)
        return self.field.plain(x).moved(
            lambda part: np.take_along_axis(part, np.broadcast_to(at, (len(part), *at.shape)), dim + 1)
        )

    def _gathered(self, x: Operand, dims: Sequence[int], to: int, tiled: bool) -> Operand:
        def move(part: Any, lead: int) -> Any:
            first = lead - self.rank
            if not tiled:
                part = part.reshape(*part.shape[: lead + to], 1, *part.shape[lead + to :])
            for dim in reversed(dims):  # the minor axis first
                part = self._full(part, first, dim)
                part = np.moveaxis(part, first + dim, lead + to - 1)
                shape = part.shape
                part = part.reshape(
                    *shape[: lead + to - 1], shape[lead + to - 1] * shape[lead + to], *shape[lead + to + 1 :]
                )
                part = np.expand_dims(part, first + dim)
            return part

        return moved(x, self.rank, move)

    def _full(self, part: Any, first: int, dim: int) -> Any:
        """With a row for each device along an axis."""
        n = list(self.axes.values())[dim]
        shape = (*part.shape[: first + dim], n, *part.shape[first + dim + 1 :])
        return np.broadcast_to(part, shape)

    def _scattered(self, x: Operand, dims: Sequence[int], to: int, tiled: bool) -> Operand:
        x = self._reduced(x, dims, "sum")

        def move(part: Any, lead: int) -> Any:
            first = lead - self.rank
            for dim in dims:  # the major axis first
                n = list(self.axes.values())[dim]
                shape = part.shape
                part = part.reshape(*shape[: lead + to], n, shape[lead + to] // n, *shape[lead + to + 1 :])
                part = np.squeeze(np.moveaxis(part, lead + to, first + dim), first + dim + 1)
            return part if tiled else np.squeeze(part, lead + to)

        return moved(x, self.rank, move)

    def _permuted(self, x: Operand, dims: Sequence[int], pairs: Any) -> Operand:
        n = math.prod(list(self.axes.values())[dim] for dim in dims)
        source = np.full(n, n)
        for start, end in pairs:
            source[end] = start

        def move(part: Any, lead: int) -> Any:
            first = lead - self.rank
            part, back = self._together(part, first, dims)
            part = np.concatenate([part, np.zeros_like(part[:1])])
            return back(part[source])

        result = moved(x, self.rank, move)
        if isinstance(result, Exact) and result.factor is not None:  # zero is no logarithm: its factor is 1
            factor = np.where((result.factor == 0).all(0), np.uint64(1), result.factor)
            result = replace(result, factor=factor)
        return result

    def _together(self, part: Any, first: int, dims: Sequence[int]) -> tuple[Any, Callable[[Any], Any]]:
        """The devices along some axes as dim 0, and the way back."""
        for dim in dims:
            part = self._full(part, first, dim)
        front = [first + dim for dim in dims]
        part = np.moveaxis(part, front, range(len(dims)))
        sizes = part.shape[: len(dims)]

        def back(result: Any) -> Any:
            return np.moveaxis(result.reshape(*sizes, *result.shape[1:]), range(len(dims)), front)

        return part.reshape(math.prod(sizes), *part.shape[len(dims) :]), back

    def _exchanged(self, x: Operand, dims: Sequence[int], split: int, to: int, tiled: bool) -> Operand:
        def move(part: Any, lead: int) -> Any:
            first = lead - self.rank
            part, back = self._together(part, first, dims)
            n, own = part.shape[0], 1 + lead - len(dims)
            shape = part.shape
            part = part.reshape(*shape[: own + split], n, shape[own + split] // n, *shape[own + split + 1 :])
            part = np.swapaxes(part, 0, own + split)  # dim 0 is the receiver now, and that of the piece the sender
            if not tiled:
                part = np.squeeze(part, own + split + 1)
                return back(np.moveaxis(part, own + split, own + to))
            part = np.moveaxis(part, own + split, own + to)
            shape = part.shape
            return back(part.reshape(*shape[: own + to], n * shape[own + to + 1], *shape[own + to + 2 :]))

        return moved(x, self.rank, move)


def _behind(spec: PartitionSpec, lead: int) -> PartitionSpec:
    """A spec for the dims behind others."""
    return PartitionSpec(*[None] * lead, *spec)


class HangsError(Exception):
    """A collective that not all of its devices come to."""

    def __init__(self, name: str, axis: str, line: str):
        super().__init__(f"the branch at {line} must be the same along {axis!r}: its {name} waits for all devices")


class DiffersError(Exception):
    """A value that must be equal on all devices is not."""

    def __init__(self, what: str, value: Operand):
        super().__init__(what)
        self.value = value


def moved(x: Operand, lead: int, move: Move) -> Operand:
    """With its elements at other places: `move(part, lead)` acts behind that many dims in front."""
    if isinstance(x, Exact):
        return x.moved(lambda part: move(part, 1 + lead))
    return move(x, lead)

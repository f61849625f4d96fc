"""A repair: other results for one equation of a wrong program, in place of the results that the equation gave.

A repair is tried by one more run of the program, in which that equation has the other results. `proposals.py` lists the
repairs of an equation. They are made with the tools of this file, in

- `exchange_repairs.py`: of collectives;
- `index_repairs.py`: of the integers by which a device finds its part of an array;
- `local_repairs.py`: of one device's arithmetic;
- `operand_repairs.py`: of what an equation reads;
- `order_repairs.py`: of two equations.

Worked example: a kernel over data=2 that ends with `psum(x.sum(), "model")`, and should sum over "data".

    the equation        psum of x.sum(), [2, 2] devices
    a repair            cost 0.0, "psum over 'data' in place of 'model'"
    its change          from the operand [2, 2] + [] to another result, [1, 2] + []
    the message         The mistake is at kernel.py:12: with psum over 'data' in place of 'model', it is right
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

from shardkit._jax.jaxprs import source_line
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.arithmetic import multiply
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.exchanges import Devices
from shardkit.testing.exact.rules.operands import Operand

# The operands of an equation, or its results.
Operands = Sequence[Operand]
# The value that each variable of the program had last.
Values = Mapping[Any, Operand]


class Cost:
    """How unlikely mistakes of some kinds are. A collective is mistaken more often than arithmetic, and costs less."""

    COLLECTIVE = 0.0
    SLICE_OF_SUM = 0.5
    INDEX = 1.0
    INDEX_TOO_MANY = 1.25
    SUM = 1.0
    UNREAD = 1.0
    TRAVEL = 1.0
    UNREAD_FACTOR = 1.5
    OPERATOR = 1.5
    SIZE = 1.5
    LAYOUT = 2.0  # `i * n + places` and `i + places * n`: of the places of a device, two factors are exchanged
    OPERAND = 2.0
    PARENTHESES = 2.0
    DIM = 2.0
    FACTOR = 2.5
    RARE = 3.0


class Call(NamedTuple):
    """An equation where it is called, with the operands and results of its first run.

    Attributes:
        equation: the equation of a jaxpr.
        around: the line of the call around the equation; "" if there is none.
        axes: the bound mesh axes, with their sizes.
        operands: the values that the equation read.
        results: the values that the equation gave.
    """

    equation: Any
    around: str
    axes: Mapping[str, int]
    operands: Operands
    results: Operands

    @property
    def key(self) -> tuple[int, str]:
        """By which another run of the program recognizes the call."""
        return id(self.equation), self.around

    @property
    def name(self) -> str:
        """The name of the primitive, or of the function that is called."""
        return str(self.equation.params.get("name") or self.equation.primitive.name)

    @property
    def primitive(self) -> str:
        """The name of the primitive."""
        return str(self.equation.primitive.name)

    @property
    def line(self) -> str:
        """The line of the equation, as "kernel.py:12"."""
        return source_line(self.equation, self.around)

    def __str__(self) -> str:
        return f"{self.name} at {self.line}"


class EquationChange:
    """Computes other results for an equation, in a run of the program.

    Attributes:
        has_more_rows: whether a result is larger than the one that it replaces, until a later equation sums its rows.
    """

    has_more_rows = False

    def __call__(self, operands: Operands, results: Operands, values: Values) -> Operands:
        """The other results, from the operands and results of the equation, and from the values of variables."""
        raise NotImplementedError

    def in_round(self, round_number: int) -> EquationChange:
        """The change so many rounds later in a loop: the same one, but for operands that travel."""
        return self


@dataclass(frozen=True)
class FunctionChange(EquationChange):
    """A change by a function, for which it is a decorator."""

    function: Callable[[Operands, Operands, Values], Operands]

    def __call__(self, operands: Operands, results: Operands, values: Values) -> Operands:
        """What the function computes."""
        return self.function(operands, results, values)


class Repair(NamedTuple):
    """Other results for an equation.

    Attributes:
        cost: how unlikely it is that this was the mistake.
        words: what the repair does, for the message: "with ..., it is right".
        change: computes the other results.
        behind: whether the repair changes the result of the equation, so that the mistake is behind the equation.
        exchange: "sum" if the repair reduces the result over devices, "shift" if it sends the result to another device;
            else "". `Remedy` has two more, of a loop.
    """

    cost: float
    words: str
    change: EquationChange
    behind: bool = False
    exchange: str = ""


def change_result(
    cost: float, words: str, function: Callable[..., Operand], *arguments: Any, exchange: str = ""
) -> Repair:
    """A repair that replaces the result x by `function(x, *arguments)`."""

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        return [function(results[0], *arguments)]

    return Repair(cost, words, change, behind=True, exchange=exchange)


def change_operands(cost: float, words: str, function: Callable[..., Operands], *arguments: Any) -> Repair:
    """A repair that replaces the results by `function(operands, *arguments)`.

    Worked example: `change_operands(Cost.COLLECTIVE, "without psum", keep_operands)`. The psum is given x, [2] + [3],
    and the equations behind it read x in place of the sum.
    """

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        return function(operands, *arguments)

    return Repair(cost, words, change)


def keep_operands(operands: Operands) -> Operands:
    """The operands as results: a program without the equation."""
    return operands


class Variables(NamedTuple):
    """The variables of the program, as an equation sees them.

    Attributes:
        readable: the variables that the equation could read.
        unread: the variables that no equation reads, and that one should perhaps read.
        definitions: the equation that gives each variable.
        rounds: for each variable the variables of all rounds of its unrolled loop.
    """

    readable: Sequence[Any]
    unread: Set[Any]
    definitions: Mapping[Any, Any]
    rounds: Mapping[Any, Sequence[Any]]


class Bench:
    """The tools with which repairs of one equation are made: the equation again, and exchanges between devices.

    Attributes:
        field: the arithmetic.
        call: the equation, with its operands and results.
        equation: the equation of a jaxpr.
        name: the name of its primitive, or of the function that is called.
        operands: its operands.
        sizes: the sizes of dims in the program. By such a factor a result may be too large or too small.
        variables: the variables of the program, as the equation sees them.
        axes: the bound mesh axes, with their sizes.
        rank: the number of dims in front of a value, one for each bound axis.
        interpreter: runs an equation with the axes bound.
        devices: the collectives.
    """

    def __init__(self, field: Field, call: Call, sizes: Sequence[int], variables: Variables):
        self.field = field
        self.call = call
        self.equation = call.equation
        self.name = call.name
        self.operands = call.operands
        self.sizes = sizes
        self.variables = variables
        self.axes = call.axes
        self.rank = len(call.axes)
        self.interpreter = Interpreter(field, call.axes)
        self.devices = Devices(field, call.axes)

    @property
    def result(self) -> Operand:
        """The result of the equation, which has one result alone."""
        [result] = self.call.results
        return result

    @property
    def aval(self) -> Any:
        """The type of the result, as a device sees it."""
        return self.equation.outvars[0].aval

    # Shapes, sizes and devices

    def shape(self, x: Operand) -> tuple[int, ...]:
        """The shape that a device sees, without the dims in front."""
        return x.shape[self.rank :]

    def find_varying_axes(self, x: Operand) -> list[str]:
        """The axes along which devices may have different values: those whose dim in front is larger than 1."""
        # Not strict: behind the dims of the axes x has those of the array.
        return [name for name, size in zip(self.axes, x.shape, strict=False) if size > 1]

    def count_devices(self, names: Iterable[str]) -> int:
        """The number of devices along some axes; an axis that is not bound here has one."""
        return math.prod(self.axes.get(name, 1) for name in names)

    def number_devices(self, name: str, like: np.ndarray) -> np.ndarray:
        """The index of each device along an axis, as an array that broadcasts against another."""
        index = self.devices.number((name,)).astype(like.dtype)
        # [*axes] becomes [*axes, 1, ...], with as many dims as the other array.
        return index.reshape(index.shape + (1,) * (like.ndim - index.ndim))

    # The equation again

    def rerun(self, operands: Operands, primitive: Any = None, **params: Any) -> Operands:
        """The results of the equation with other operands or parameters, or of another primitive with the same ones."""
        equation = self.equation.replace(params={**self.equation.params, **params})
        # `add a b` becomes `sub a b`, with the parameters of the add.
        if primitive is not None:
            equation = equation.replace(primitive=primitive)
        return self.interpreter.step(equation, list(operands))

    def rerun_with_operand(self, operands: Operands, number: int, x: Operand) -> Operands:
        """The results of the equation with another value as operand `number`."""
        return self.rerun(replace_item(operands, number, x))

    def rerun_with_param(self, operands: Operands, param: str, value: Any) -> Operands:
        """The results of the equation with another value of one parameter."""
        return self.rerun(operands, **{param: value})

    # Exchanges and arithmetic

    def reduce(self, x: Operand, names: Sequence[str], operator: str = "sum") -> Operand:
        """A value reduced over the devices of some axes."""
        return self.devices.reduce(x, names, operator)

    def average(self, x: Operand, names: Sequence[str]) -> Operand:
        """The mean of a value over the devices of some axes."""
        return self.scale(self.reduce(x, names), Fraction(1, self.count_devices(names)))

    def permute(self, x: Operand, pairs: Any, names: Sequence[str]) -> Operand:
        """A value sent between devices, as by ppermute."""
        return self.devices.permute(x, names, pairs)

    def choose_by_device(self, name: str, pieces: Sequence[Operand]) -> Operand:
        """The value that is `pieces[i]` on device i along an axis."""
        # The first piece for all devices, which one device after the other replaces by its own.
        result = pieces[0]
        index = self.devices.number((name,))
        for i, piece in enumerate(pieces[1:], 1):
            result = self.devices.choose(index == i, piece, result)
        return result

    def scale(self, x: Operand, ratio: Fraction) -> Operand:
        """A value times a rational number."""
        if not isinstance(x, Exact):
            return np.asarray(x * x.dtype.type(float(ratio)), x.dtype)
        # The field takes a float for the simplest rational that rounds to it: 0.333... is 1/3.
        constant = np.full((1,) * len(x.shape), float(ratio))
        return multiply(self.field, x, self.field.lift(constant))


def trace_equation(function: Callable[..., Any], aval: Any, count: int) -> Any:
    """The first equation of a jax function of `count` operands that all have the type `aval`."""
    return _trace_equation(function, tuple(aval.shape), aval.dtype, count)


# Repairs ask for a few functions of a few types, hundreds of times.
@functools.cache
def _trace_equation(function: Callable[..., Any], shape: tuple[int, ...], dtype: Any, count: int) -> Any:
    arguments = [jax.ShapeDtypeStruct(shape, dtype)] * count
    return jax.make_jaxpr(function)(*arguments).eqns[0]


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a number that is written in the program, and no variable."""
    return hasattr(atom, "val")


def is_integer(x: Operand) -> bool:
    """Whether a value is an array of integers."""
    return not isinstance(x, Exact) and x.dtype.kind in "iu"


def is_mask(x: Operand) -> bool:
    """Whether a value is an array of booleans."""
    return not isinstance(x, Exact) and x.dtype.kind == "b"


def select_sizes(sizes: Iterable[int], x: np.ndarray) -> list[int]:
    """The sizes that a number of the type of x can be: int8 ends at 127."""
    if not is_integer(x):
        return list(sizes)
    most = np.iinfo(x.dtype).max
    return [size for size in sizes if size <= most]


def list_subsets(names: Iterable[str]) -> list[tuple[str, ...]]:
    """All sets of some axes but the empty one, small sets first: of a, b the sets (a,), (b,), (a, b)."""
    names = list(names)
    subsets: list[tuple[str, ...]] = []
    for size in range(1, len(names) + 1):
        subsets += itertools.combinations(names, size)
    return subsets


def replace_item(values: Sequence[Any], index: int, value: Any) -> Any:
    """A sequence with another value at one index."""
    items = [*values[:index], value, *values[index + 1 :]]
    return items if isinstance(values, list) else tuple(items)

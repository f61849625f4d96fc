"""Whether results that are other numbers of the field have the same real values: then nothing is decided.

Such results may be equal by a law that the field does not know, or because a side computed constants in floats. They
may differ, too, by less than floats tell. So they are neither proved nor refuted.

Worked example: `exp(x)**0.5` and `exp(x / 2)`. Where no law of roots applies, the two are other numbers of the field.
Their real values at x = 1.7 are 2.3396468519 and 2.3396468519: not decided. A kernel that returns `exp(x / 2) * 1.0001`
has another real value: it is refuted.
"""

from __future__ import annotations

import numpy as np

from shardkit.testing.exact.coverage import ALONE, ON_MESH
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import OUTSIDE, Exact
from shardkit.testing.exact.rules.linear_algebra import FACTORS

# By how large a share real values may differ by rounding alone.
_IN_FLOAT64 = 1e-13
_BEHIND_FACTORS = 1e-9  # factors of matrices magnify the rounding of float64
_IN_FLOAT32 = 1e-6  # where functions of constants were computed in float32
# A compiler folds a chain of constants in float32, which rounds in each step: 1.1 sixty times gives 1.3e-6.
_BEHIND_CHAINS = 1e-5


def agree(field: Field, x: Exact, y: Exact) -> bool:
    """Whether two results have the same real values, but for rounding."""
    if field.compiled and _have_other_constants(field):
        return _are_close(field, x, y, _BEHIND_CHAINS)
    if rounds_in_float32(field):
        return _are_close(field, x, y, _IN_FLOAT32)
    if field.notes.uninterpreted & FACTORS:
        return _are_close(field, x, y, _BEHIND_FACTORS)
    return _are_close(field, x, y, _IN_FLOAT64)


def agree_in_float32(field: Field, x: Exact, y: Exact) -> bool:
    """Whether two results have the same real values, but for rounding of float32."""
    return _are_close(field, x, y, _IN_FLOAT32)


def rounds_in_float32(field: Field) -> bool:
    """Whether the sides may have computed constants in float32 in other ways.

    A compiler does. In traced programs the sides may have other functions of constants: log(2) + log(3) is not log(6)
    in float32.
    """
    return field.compiled or field.notes.rounded_values.get(ON_MESH) != field.notes.rounded_values.get(ALONE)


def describe_missing_law(field: Field) -> str:
    """The end of the message that nothing is decided: the functions whose laws a proof does not know, and a remedy."""
    names = {*field.notes.uninterpreted, *field.notes.rounded}
    if field.notes.logs:
        names.add("log")
    *first_names, last_name = sorted(names) or ["constants"]
    words = last_name
    if first_names:
        words = f"{', '.join(first_names)} or {last_name}"
    return (
        f". An identity of {words} is missing: write that part alike on both sides, or compare floats with "
        "assert_matches_reference."
    )


def _have_other_constants(field: Field) -> bool:
    """Whether the sides have other float constants, as products that a compiler computed."""
    on_mesh = field.notes.constants.get(ON_MESH, set())
    alone = field.notes.constants.get(ALONE, set())
    return any(np.dtype(dtype).kind == "f" for _, dtype in on_mesh ^ alone)


def _are_close(field: Field, x: Exact, y: Exact, share: float) -> bool:
    """Whether real values differ by no more than such a share of the element, or of the largest one."""
    # An order has no real values.
    if field.settings.order is not None:
        return False
    is_compared = (x.poison != OUTSIDE) & (y.poison != OUTSIDE)
    a = x.real[0][is_compared]
    b = y.real[0][is_compared]
    # The logarithm of a zero of a mask is infinite on both sides, and says nothing of the other elements.
    is_infinite_on_both = (a == b) & np.isinf(a)
    a = a[~is_infinite_on_both]
    b = b[~is_infinite_on_both]
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        return False
    # Of (1000.0, 1e-11) and (1000.0, 0.0) the second elements are close too: 1e-11 may be the rounding of a sum that
    # had numbers of 1000 in it.
    largest = np.abs(b).max(initial=0.0)
    return bool((np.abs(a - b) <= share * np.maximum(np.abs(b), largest)).all())

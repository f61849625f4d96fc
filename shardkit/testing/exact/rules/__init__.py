"""What each primitive means in the field: a function of its operands, which knows of no mesh.

Start with `primitive_rules.py`, the table. A rule is a function of a `Scope` (where the equation stands), the equation,
and its operands. At least one operand is an `Exact`; the others may be known arrays, of integers, booleans or
constants. If all operands of an equation are known, numpy or jax computes it, in `known.py`.

The dims of a mesh come first in every operand, `rank` of them, of size 1 where all devices have the same; those of the
array come after them. So one call of a rule computes the equation of all devices. In comments the two are apart: [1, 4]
+ [3] is an array [3] on a mesh of two axes, which differs along the second one.

Worked example, on a mesh of 2 by 4 devices: a bias [1, 4] + [3], and an x [2, 1] + [5, 3]. One addition, in which numpy
broadcasts, gives their sum [2, 4] + [5, 3] for all eight devices.

The families, a file each: `elementwise.py`, `comparisons.py`, `rounding.py`, `reduce_dims.py`, `sorting.py`,
`contractions.py`, `movement.py` (whatever only moves elements), `scatters.py`, `windows.py` (convolutions and pooling),
`linear_algebra.py`, `random_keys.py`, and `exchanges.py`, the collectives.

Imports `numbers/`, and the readers of equations in `_jax/`.
"""

"""Numbers of which nothing is known, as a primitive: each run of its equation finds others.

Such are those in memory to which nothing was written, and those beyond an array to which a compiler promised that no
index leads.

Worked example: a loop of two rounds allocates f32[2], and adds what it finds there. Its equation runs twice, and draws
the unknowns "memory 1" and "memory 2" on each device. So what it found in one round does not cancel in the next, and a
result that depends on it differs from every other.
"""

from __future__ import annotations

from jax.extend.core import Primitive

UNDEFINED = "undefined_memory"

# Its operand says shape and dtype, and along which axes the numbers differ.
undefined = Primitive(UNDEFINED)
undefined.def_abstract_eval(lambda like: like)

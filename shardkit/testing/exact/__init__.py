"""Proof for all inputs: programs run with numbers of a finite field in place of floats.

Start with `equality.py`, what users call; `law.py` says the same of a training step. `field.py` is the arithmetic over
the primes of `tower.py`, `rules.py` what each primitive means in it, `interpreter.py` a whole program over all devices,
`difference.py` the way from a wrong result to its line. Imports of `testing/` what knows no laws, because `laws.py`
imports it.
"""

from shardkit.testing.exact.equality import Equality, assert_equal_for_all_inputs
from shardkit.testing.exact.small import small

__all__ = ["Equality", "assert_equal_for_all_inputs", "small"]

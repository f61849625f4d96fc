"""Proof for all inputs: programs run with numbers of a finite field in place of floats.

`field.py` is the arithmetic, `rules.py` what each primitive means in it, `interpreter.py` a whole program over all
devices, `equality.py` what users call, `difference.py` the way from a wrong result to its line.
"""

from shardkit.testing.exact.equality import Equality, assert_equal_for_all_inputs

__all__ = ["Equality", "assert_equal_for_all_inputs"]

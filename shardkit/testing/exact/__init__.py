"""Proof for all inputs: programs run with numbers of a finite field in place of floats.

Start with `equality.py`, what users call: `derivatives.py` traces both programs with their gradients, and `size.py`
says how long they take. `law.py` is the same for a training step, `compiled.py` for a compiled program, which
`stablehlo/` reads back as a function and `imported.py` puts on all its devices. `numbers/` is the arithmetic, with
one number through the tower of primes as an example; `rules/` has the meaning of each primitive; `interpreter.py` runs
a program over all devices. `draws.py` says how often both programs run until they are proved equal, by what
`coverage.py` has seen of their comparisons. `difference.py` is the way from a wrong result to its line: of a run that
`record.py` keeps, `search.py` tries what `proposals.py` lists, the mistakes that could have been made, at the places
of `suspects.py` and by a run each (`changed_run.py`); and `known_values.py` says which values the reference has.
`small.py` makes large arguments small. Of `testing/` it imports nothing that knows laws, because `laws.py` imports it.
"""

from shardkit.testing.exact.compiled import assert_compiled_equal
from shardkit.testing.exact.equality import Equality, assert_equal_for_all_inputs
from shardkit.testing.exact.small import small

__all__ = ["Equality", "assert_compiled_equal", "assert_equal_for_all_inputs", "small"]

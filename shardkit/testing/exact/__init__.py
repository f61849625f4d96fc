"""Proof for all inputs: programs run with numbers of a finite field in place of floats.

Start with `equality.py`, which users call. In the order of a proof:

- `derivatives.py` traces both programs with their gradients, and `size.py` estimates the time. `arguments.py` makes
  floats unknowns. `law.py` does the same for a training step, and `compiled.py` for a compiled program, which
  `stablehlo/` reads back as a function and `imported.py` puts on all its devices.
- `draws.py` runs both programs (`program_pair.py`) in field after field, until `coverage.py` has seen enough of their
  comparisons. `interpreter.py` runs one program over all devices (`pieces.py`: into a shard_map and out of it;
  `following.py`: integers that follow from floats), `rules/` has the meaning of each primitive, and `numbers/` is the
  arithmetic, with one number through the tower of primes as an example.
- `certificate.py` says what was proved.
- Where a result is wrong, `difference.py` finds the line. Of a run that `record.py` keeps, `search.py` tries the
  repairs of `proposals.py` at the equations of `suspects.py`, each by one more run (`changed_run.py`), and
  `remedies.py` chooses one. `first_value.py` is for results that no repair makes right, and `known_values.py` says
  which values the reference has.

`small.py` makes large arguments small. Of `testing/` the room imports nothing that knows laws, because `laws.py`
imports this room.
"""

from shardkit.testing.exact.certificate import Equality
from shardkit.testing.exact.compiled import assert_compiled_equal
from shardkit.testing.exact.equality import assert_equal_for_all_inputs
from shardkit.testing.exact.small import small

__all__ = ["Equality", "assert_compiled_equal", "assert_equal_for_all_inputs", "small"]

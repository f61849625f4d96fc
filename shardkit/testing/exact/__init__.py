"""Proof for all inputs: programs run with numbers of a finite field in place of floats.

Start with `equality.py`, which has a proof modulo 7 as an example; `numbers/` has one with a tower of primes, for exps.
What a reader may look for:

- the whole of a proof, from the call to the verdict: `equality.py`, which users call, with `derivatives.py`, which
  traces both programs with their gradients; then `draws.py`, which runs them in one field after the other, and
  `program_pair.py`, one run of both;
- what a primitive means in a field: `rules/primitive_rules.py`. How devices, loops and branches are run:
  `interpreter.py`, with `pieces.py` for what goes into a shard_map and comes out of it;
- why a proof believes that it has seen all branches: `decision.py`, one comparison, and `coverage.py`, all of them;
  `crossings.py` and `chosen_inputs.py`, which go to the inputs at a branch, and `hidden.py`. `following.py` knows which
  integers follow from floats;
- what a proof assumes, and how the certificate says it: `certificate.py`;
- how a message finds the wrong line: `difference.py`. Of a run that `record.py` keeps, `search.py` tries the repairs of
  `proposals.py` at the equations of `suspects.py`, each by one more run (`changed_run.py`), and `remedies.py` chooses
  one. Without a repair it names the first value that the reference does not have (`first_value.py`, `known_values.py`);
- how a training step is proved: `law.py`. How a compiled program is: `compiled.py`, with `stablehlo/`, which reads its
  module as a function, and `imported.py`, which runs that on all devices;
- what is refused before a proof begins: `arguments.py` and, for its time, `size.py`. `small.py` makes arguments small.

Of `testing/` the room imports nothing that knows laws, because `laws.py` imports this room.
"""

from shardkit.testing.exact.certificate import Equality
from shardkit.testing.exact.compiled import assert_compiled_equal
from shardkit.testing.exact.equality import assert_equal_for_all_inputs
from shardkit.testing.exact.small import small

__all__ = ["Equality", "assert_compiled_equal", "assert_equal_for_all_inputs", "small"]

"""What XLA is told for the tests. It is read before jax is imported."""

import os

# Nearly all of the suite's time is compiling, and LLVM's optimizations double it. XLA's own passes still run, so that a
# compiled program has the same collectives and buffers. The deep profile compiles as users do.
QUICK = "" if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else "--xla_backend_optimization_level=0"

"""What XLA is told for the tests. It is read before jax is imported."""

import os

# Nearly all of the suite's time is compiling; without LLVM's optimizations and MLIR's fusion emitters a step compiles
# in a quarter of the time. XLA's own passes still run, so a compiled program has the same collectives and buffers. The
# deep profile compiles as users do.
_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
QUICK = "" if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else " ".join(_FLAGS)

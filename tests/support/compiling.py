"""What XLA is told for the tests. It is read before jax is imported."""

import os
from importlib.metadata import version

# Most of a test's time is compiling; without LLVM's optimizations and MLIR's fusion emitters a step compiles in a
# quarter of the time. XLA's own passes still run, so a compiled program has the same collectives and buffers. The deep
# profile compiles as users do.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):  # a flag that XLA does not know ends the process
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
QUICK = "" if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else " ".join(_FLAGS)

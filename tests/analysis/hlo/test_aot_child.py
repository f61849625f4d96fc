"""The process in which the compiler of an absent accelerator runs."""

import subprocess
import sys

READ_PEAK = "from shardkit.analysis.hlo import aot_child; print(aot_child._read_peak_memory())"


# Catches a peak that begins with that of the process that asked: `ru_maxrss` does on Linux. A trainer that holds much
# memory would be told that the compiler needs as much.
def test_the_compilers_memory_is_not_its_parents():
    script = f"""
import subprocess, sys
held = bytearray(b"1") * (1 << 29)
print(subprocess.run([sys.executable, "-c", {READ_PEAK!r}], check=True, capture_output=True, text=True).stdout)
"""
    answer = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert 2**20 < int(answer.stdout) < 2**29

"""What Linux says of a process: its CPU time and its memory. Without jax: monitors.py is not to import it."""

from __future__ import annotations

import os
from pathlib import Path


def read_cpu_seconds(process_id: int) -> float:
    """CPU time that a process has used, in its own code and in the system's."""
    text = Path(f"/proc/{process_id}/stat").read_text()
    # The second field is the name, in parentheses; it may have blanks.
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def read_private_bytes(process_id: int) -> int:
    """Memory that a process holds and shares with no other one: what one more such process costs."""
    total = 0
    for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines():
        fields = line.split()
        if fields[0] in ("Private_Clean:", "Private_Dirty:"):
            total += int(fields[1]) * 1024
    return total


def read_resident_bytes() -> int:
    """Memory of this process now."""
    return _read_status("VmRSS:")


def read_peak_resident_bytes() -> int:
    """The most memory that this process has had.

    `getrusage` would not do: its `ru_maxrss` begins with the peak of the process that started this one.
    """
    return _read_status("VmHWM:")


def _read_status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}")

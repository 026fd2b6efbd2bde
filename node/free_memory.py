"""Main memory that a node may take: the machine's, or its container's where that is less."""

from __future__ import annotations

import os
from pathlib import Path

KIB = 1024


def free_memory(
    proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float]:
    """Return the bytes of main memory available now, and in all."""
    try:
        values = _numbers(proc / "meminfo", KIB)
        free = values["MemAvailable:"]
        total = values["MemTotal:"]
    except (OSError, ValueError, KeyError):
        free = total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # Of a container, as it sees it; a word in place of a number: no limit.
    try:
        limit = float((group / "memory.max").read_text(encoding="ascii"))
        current = float((group / "memory.current").read_text(encoding="ascii"))
        used = current - _numbers(group / "memory.stat", 1)["inactive_file"]
    except (OSError, ValueError, KeyError):
        return free, total
    return max(min(free, limit - used), 0.0), min(total, limit)


def _numbers(path: Path, unit: int) -> dict[str, float]:
    """Return the first number of each line by the line's first word, times ``unit``."""
    numbers: dict[str, float] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        words = line.split()
        if len(words) > 1:
            numbers[words[0]] = unit * float(words[1])
    return numbers

"""Figures of processes from Linux's /proc; None or empty elsewhere."""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")


def resident_mb(pid: int) -> float | None:
    """Return the resident megabytes (10**6 bytes) of a process; None if it is gone.

    Mapped files, such as libraries, do not count: the kernel may evict and reload their pages at
    any time.
    """
    with contextlib.suppress(OSError, ValueError):
        status = (PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace")
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "RssAnon" in fields:  # a process that has ended and was not waited for has none
            return (
                (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0]))
                * 1024
                / 1e6
            )
    return None


def descriptors(pid: int) -> int | None:
    """Count the open file descriptors of a process; None if it is gone, or of another user."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in (PROC / str(pid) / "fd").iterdir())
    return None


def _numbers() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]
    return []


def _stat(pid: int) -> list[str]:
    """Return the fields after the name (which may hold anything): state, parent and so on."""
    with contextlib.suppress(OSError):
        return (
            (PROC / str(pid) / "stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    return []


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on, the nearest first."""
    children: dict[int, list[int]] = {}
    for each in _numbers():
        if len(found := _stat(each)) > 1:
            children.setdefault(int(found[1]), []).append(each)
    line = [pid]
    for each in line:
        line += children.get(each, [])
    return line[1:]


def daemon_of(pid: int) -> int | None:
    """Return the process of a node's network daemon, which its guard runs."""
    line = descendants(pid)
    return line[-1] if len(line) > 1 else None


def marked(mark: str) -> list[int]:
    """Return the living processes whose environment holds ``mark`` (NAME=VALUE), which descendants
    inherit.
    """
    found = []
    for pid in _numbers():
        with contextlib.suppress(OSError):
            environment = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if mark.encode() in environment and _stat(pid)[:1] not in ([], ["Z"]):
                found.append(pid)
    return found

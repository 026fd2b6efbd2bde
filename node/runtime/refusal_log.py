"""The refusals of this node: written to its metrics while it runs, and read from there by ``shoal status --folder``.

They are in no record for other peers: this node may be wrong, and no peer should learn exactly what another refuses.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.swarm.errors import ShoalError
from shoal.swarm.exchange.robust import RejectedUpdate
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.messages import Member

RECENT_S = 600.0  # "recently"
LOG_S = 60.0  # between two log lines about it


class RefusalsError(ShoalError):
    """The folder holds no metrics of a node."""


class RefusalLog:
    """The refusals of one run.

    ``count`` returns the number so far for each reason, ``write`` writes to the metrics, ``log`` shows the user a line.
    """

    _clock = staticmethod(time.monotonic)

    def __init__(self, count: Callable[[], dict[str, int]], write: Callable[..., None], log: Callable[[str], None]) -> None:
        self._count, self._write, self._log = count, write, log
        self._written: dict[str, int] = {}
        self._logged: dict[str, int] = {}
        self._next = float("-inf")

    def look(self) -> None:
        """Write what was refused since the last look, and log it at most once a minute; after each round."""
        now = self.now()
        if now != self._written:
            self._written = now
            self._write("refused", **now)
        since = Counter(now) - Counter(self._logged)
        if since and self._clock() >= self._next:
            self._next, self._logged = self._clock() + LOG_S, now
            self._log(f"refused of others since the last such line: {listed(since)}")

    def now(self) -> dict[str, int]:
        return {reason: count for reason, count in self._count().items() if count}


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def read_refusals(path: Path, now: float | None = None) -> dict[str, Any]:
    """Return what the newest run in the metrics file ``path`` refused: in all, and in the ten minutes before ``now`` (Unix).

    RefusalsError if there is no such file.
    """
    now = time.time() if now is None else now
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            total, before = _counted(lines, now - RECENT_S)
    except OSError as error:
        raise RefusalsError(
            f"Cannot read {str(path)!r} ({error.strerror}): name the folder of a node on this machine, such as runs/NAME."
        ) from error
    return {"recent_s": RECENT_S, "recent": dict(Counter(total) - Counter(before)), "total": total}


def _counted(lines: Iterable[str], since: float) -> tuple[dict[str, int], dict[str, int]]:
    """Return the newest counts of the last run, and those that it had at ``since``."""
    total: dict[str, int] = {}
    before: dict[str, int] = {}
    for line in lines:
        if '"event": "start"' not in line and '"event": "refused"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:  # the node was killed while it wrote this line, or is writing it now
            continue
        total = {name: count for name, count in event.items() if event["event"] == "refused" and name not in ("event", "time")}
        if event["event"] != "refused" or event["time"] < since:
            before = total
    return total, before


def sentence(found: Mapping[str, Any]) -> str:
    """Describe the result of `read_refusals` for people."""
    if not found["total"]:
        return "This node has refused nothing of others since it started."
    recent = listed(found["recent"]) or "nothing"
    minutes = found["recent_s"] / 60
    return f"This node refused, in the last {minutes:.0f} minutes: {recent}; since it started: {listed(found['total'])}."


def rejections(rejected: Sequence[RejectedUpdate], members: Mapping[str, Member]) -> list[str]:
    """Return a sentence about each contribution that was refused because it lay too far away, or for its loss."""
    found = []
    for update in rejected:
        name = members[update.peer].name if update.peer in members else short(update.peer)
        found.append(f"refused what {name} sent in round {update.key.round}: {update}; if you trust all peers, set {update.unless}")
    return found

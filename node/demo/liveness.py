"""Whether the nodes of a demo still move: by what they write, and by what they say that they do
meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.node.exit_code import ExitCode
from shoal.node.runtime.display import ACTIVITY
from shoal.node.runtime.run_options import METRICS
from shoal.swarm.errors import ShoalError

QUIET_S = 120.0
"""In which no node writes anything, or says that it moves, after which the demo is given up."""
NODES_PER_PROCESSOR = 8
"""More of them have as many times as long, for each gets less of it than tells that it moves."""
LONG_S = 3600.0
"""For which a node may compute without a step or anything else that it writes: an endless loop
computes too.
"""
REMEDY = "run again with --verbose --keep FOLDER and read its logs."


class DemoError(ShoalError):
    """A node of the demo failed.

    ``trace``: the traceback of the user's own code in it, if that was the cause.
    """

    exit_code = ExitCode.SWARM_FAILED
    trace = ""


class EventReader:
    """Reader of the events that a node writes. Each call of `read` parses only what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.events: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return all events that the node has written so far, oldest first."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                # The last line may be half written.
                whole, end, _ = file.read().rpartition(b"\n")
            self._at += len(whole + end)
            self.events += [json.loads(line) for line in whole.splitlines()]
        return self.events


class Liveness:
    """Watcher of the nodes with these ``folders``, which need not exist yet.

    ``clock``: seconds; ``processors``: of this machine, by default all.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
        processors: int | None = None,
    ) -> None:
        usual = NODES_PER_PROCESSOR * (processors or os.cpu_count() or 1)
        self._quiet_s = QUIET_S * max(len(folders) / usual, 1.0)
        self._names = [folder.name for folder in folders]
        self._readers = [EventReader(folder / METRICS) for folder in folders]
        self._clock = clock
        self._moved = (0, 0, 0)
        self._alive = 0
        self._moved_at = clock()
        self._alive_at = self._moved_at

    def look(self, ended: int = 0) -> list[list[dict[str, Any]]]:
        """Return all events of each node so far.

        ``ended``: the number of nodes that have ended well.

        Raises DemoError: nothing moved for `QUIET_S`, or nodes only computed, without an end, for
        `LONG_S`.
        """
        events = [reader.read() for reader in self._readers]
        now = self._clock()
        written = 0
        alive = 0
        steps = 0
        for node in events:
            said = [event for event in node if event["event"] == ACTIVITY]
            written += len(node) - len(said)
            alive += sum(bool(event["alive"]) for event in said)
            steps += max((event["step"] for event in said), default=0)
        moved = (written, steps, ended)
        if moved != self._moved:
            self._moved = moved
            self._moved_at = now
            self._alive_at = now
        if alive != self._alive:
            self._alive = alive
            self._alive_at = now
        if now - self._alive_at > self._quiet_s:
            raise DemoError(
                f"No node made progress for {self._quiet_s:g} s{self._doing(events)}: {REMEDY}"
            )
        if now - self._moved_at > LONG_S:
            raise DemoError(
                f"No node finished anything in {LONG_S / 60:g} minutes{self._doing(events)}: "
                f"{REMEDY}"
            )
        return events

    def _doing(self, events: Sequence[Sequence[dict[str, Any]]]) -> str:
        found: list[str] = []
        for name, node in zip(self._names, events, strict=True):
            if node and node[-1]["event"] == ACTIVITY:
                found.append(f"{name} was {node[-1]['doing']} for {node[-1]['seconds']:.0f} s")
        return f" ({', '.join(found)})" if found else ""

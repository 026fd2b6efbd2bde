"""Run of a swarm of real nodes, with or without the faults of a plan, and its observations."""

from __future__ import annotations

import heapq
import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.chaos import processes
from bench.chaos.figures import Life
from bench.chaos.plan import Hit
from bench.chaos.processes_under_test import LINK_S, ChaosError, ProcessesUnderTest, Running
from shoal.node.checkpoint import store as checkpoint
from shoal.node.config.settings import Settings
from shoal.node.data.task_options import local_flags
from shoal.node.demo.run_nodes import settings_toml
from shoal.node.runtime.display import Display
from shoal.node.runtime.join import for_new_swarm
from shoal.node.runtime.result import write_json
from shoal.node.runtime.run_options import METRICS
from shoal.node.task import Shard
from shoal.node.tasks.loader import load_task
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.errors import ShoalError

SEEN = "seen.json"
READY_S, READY_EACH_S = 60.0, 10.0  # seconds for all nodes to begin to train, and more for each
SAMPLE_S = 2.0
TICK_S = 0.05
BACK_S = 45.0  # seconds after its start in which a node must have begun to train
PUT_OFF_S = 0.5
AGAIN_S = 2.0  # seconds from an end by itself to the restart


@dataclass(frozen=True)
class ProcessSample:
    """Sample of one node's process."""

    at: float
    node_mb: float
    daemon_mb: float | None
    descriptors: float


@dataclass
class RunObservations:
    """Observations of one run. Times are Unix seconds."""

    begin: float = 0.0
    """Time at which all nodes had done their first step."""
    until: float = 0.0
    """Time at which the nodes were asked to end."""
    lives: list[Life] = field(default_factory=list)
    kills: list[tuple[int, float]] = field(default_factory=list)
    """Node and time of each kill."""
    stops: int = 0
    failed_starts: list[str] = field(default_factory=list)
    """Ends of processes before their first step; they were started again."""
    samples: dict[int, list[ProcessSample]] = field(default_factory=dict)
    """Samples by the life's place in ``lives``."""
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Events in the metrics by node."""
    losses: dict[int, float] = field(default_factory=dict)
    """Held-out loss by node, of the weights saved in the end."""
    orphans: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


class _Run:
    def __init__(
        self,
        fleet: ProcessesUnderTest,
        settings: Settings,
        display: Display,
        node_flags: Sequence[str],
    ) -> None:
        self.fleet, self.settings, self.display = fleet, settings, display
        self.peers = settings.swarm.start_when
        self.flags = list(node_flags)
        self.seen = RunObservations()
        self._agenda: list[
            tuple[float, int, str, int, Hit | None]
        ] = []  # when, a number, what, who
        self._numbers = 0

    def _later(self, at: float, what: str, peer: int, hit: Hit | None = None) -> None:
        self._numbers += 1
        heapq.heappush(self._agenda, (at, self._numbers, what, peer, hit))

    def begin(self) -> None:
        """Start all nodes and wait until each has done a step. ChaosError."""
        file = self.fleet.folder / "swarm.toml"
        file.write_text(settings_toml(self.settings), encoding="utf-8")
        first = self.fleet.spawn(0, ["up", str(file), *self._own(0)])
        self.link = self.fleet.first_line(first, LINK_S)
        if not self.link:
            with suppress(
                subprocess.TimeoutExpired
            ):  # it closes its output a moment before it has ended
                first.process.wait(1.0)
                raise self.fleet.failure(0, first.process.returncode)
            raise ChaosError(
                f"The first node printed no link within {LINK_S:g} s: {self.fleet.last_log_line(0)}"
            )
        for peer in range(1, self.peers):
            self._join(peer)
        until, tick = time.monotonic() + READY_S + READY_EACH_S * self.peers, threading.Event()
        while not all(running.life.steps for running in self.fleet.running):
            for ended in self.fleet.ended():
                peer = ended.life.peer
                raise self.fleet.failure(peer, ended.process.returncode, "ended before it trained,")
            if time.monotonic() > until:
                raise ChaosError(
                    "Not all nodes began to train in time: try fewer --peers, or look at the logs "
                    "with --keep."
                )
            tick.wait(TICK_S)
            self.fleet.read_steps()
        self.seen.begin = time.time()

    def _own(self, peer: int) -> list[str]:
        task = self.settings.task
        return [
            "--shard",
            f"{peer}/{self.peers}",
            *local_flags(task.hooks, task.options),
            *self.flags,
        ]

    def _join(self, peer: int) -> Running:
        resumed = self.fleet.saved(peer)
        more = ["--resume"] if resumed else []
        return self.fleet.spawn(
            peer,
            ["join", self.link, "--task", self.settings.task.hooks, *self._own(peer), *more],
            resumed=resumed,
        )

    def live(self, plan: Sequence[Hit], seconds: float) -> None:
        """Train for ``seconds`` while the plan is carried out."""
        begin = time.monotonic()
        for each in plan:
            self._later(begin + each.at_s, "hit", each.peer, each)
        sample, tick = begin, threading.Event()
        while (now := time.monotonic()) < begin + seconds:
            while self._agenda and self._agenda[0][0] <= now:
                _, _, what, peer, hit = heapq.heappop(self._agenda)
                self._do(what, peer, hit)
            if now >= sample:
                self.fleet.read_steps()
                self._sample()
                sample = max(sample + SAMPLE_S, now)
            for ended in self.fleet.ended():
                self._ended_by_itself(ended)
            tick.wait(TICK_S)

    def _do(self, what: str, peer: int, hit: Hit | None) -> None:
        if what == "restart":
            self._join(peer)
        elif what == "wake":
            self.fleet.wake(peer)
        elif hit is not None:
            self._hit(hit)

    def _hit(self, hit: Hit) -> None:
        name = f"peer-{hit.peer}"
        if not self._may_be_hit(hit.peer):
            self._later(time.monotonic() + PUT_OFF_S, "hit", hit.peer, hit)
            return
        again = time.monotonic() + hit.seconds
        if hit.kind == "kill":
            self.fleet.wake(hit.peer)
            self.seen.kills.append((hit.peer, self.fleet.shoot(hit.peer)))
            if not hit.keeps:
                self.fleet.forget(hit.peer)
            self._later(again, "restart", hit.peer)
            self.display.message(
                f"{hit.at_s:.0f} s: killed {name}, back in {hit.seconds:.1f} "
                f"s{'' if hit.keeps else ' as new'}"
            )
        else:
            self.fleet.pause(hit.peer, daemon=hit.kind == "sleep")
            self.seen.stops += 1
            self._later(again, "wake", hit.peer)
            what = "sleeps" if hit.kind == "sleep" else "stands"
            self.display.message(f"{hit.at_s:.0f} s: {name} {what} for {hit.seconds:.1f} s")

    def _may_be_hit(self, peer: int) -> bool:
        """Return whether the node trains, and at least half of all would be left. (The plan cannot
        know how soon one is back.)
        """
        self.fleet.read_steps()
        here = {
            each
            for each in range(self.peers)
            if (now := self.fleet.now(each)).alive and now.life.steps
        }
        return (
            peer in here - self.fleet.stopped and len(here - self.fleet.stopped) > self.peers // 2
        )

    def _ended_by_itself(self, ended: Running) -> None:
        peer = ended.life.peer
        said = (
            f"peer-{peer} ended by itself with code {ended.process.returncode}: "
            f"{self.fleet.last_log_line(peer)}"
        )
        self.display.message(said)
        if (error := self.fleet.failure(peer, ended.process.returncode)).trace:
            raise error  # the task fails, and would fail again
        self.fleet.read_steps()
        if not ended.life.steps:
            self.seen.failed_starts.append(said)
        elif peer not in self.fleet.lies:  # hostile nodes may ruin themselves
            self.seen.troubles.append(said)
        self._later(time.monotonic() + AGAIN_S, "restart", peer)

    def _sample(self) -> None:
        for place, running in enumerate(self.fleet.running):
            pid = running.process.pid
            if not running.alive or (node_mb := processes.resident_mb(pid)) is None:
                continue
            if running.daemon is None or processes.resident_mb(running.daemon) is None:
                running.daemon = processes.daemon_of(pid)
            sample = ProcessSample(
                time.time(),
                node_mb,
                None if running.daemon is None else processes.resident_mb(running.daemon),
                float(processes.descriptors(pid) or 0),
            )
            self.seen.samples.setdefault(place, []).append(sample)

    def end(self) -> RunObservations:
        """End all nodes, look for leftovers, and read the nodes' files."""
        seen, fleet = self.seen, self.fleet
        seen.until = time.time()
        seen.troubles += fleet.end()
        seen.orphans = fleet.left_behind()
        seen.troubles += [f"{orphan} was left behind" for orphan in seen.orphans]
        fleet.read_steps()
        seen.lives = [running.life for running in fleet.running]
        seen.events = {
            peer: read_events(fleet.folder / f"peer-{peer}" / METRICS) for peer in range(self.peers)
        }
        for place, life in enumerate(seen.lives):
            later = [other.spawned for other in seen.lives[place + 1 :] if other.peer == life.peer]
            life.joined = first_accepted(
                seen.events[life.peer], life.spawned, min(later, default=float("inf"))
            )
        for peer in range(self.peers):
            newest = fleet.now(peer).life
            if not newest.steps and newest.ended is None and seen.until - newest.spawned > BACK_S:
                waited = seen.until - newest.spawned
                seen.troubles.append(
                    f"peer-{peer} did not train again within {waited:.0f} s of its restart"
                )
        return seen


def first_accepted(events: Sequence[Mapping[str, Any]], since: float, until: float) -> float | None:
    """Return the time, in [since, until), of the first round in which a peer accepted this node's
    contribution.
    """
    return next(
        (
            e["time"]
            for e in events
            if e["event"] == "round" and e["partner"] and since <= e["time"] < until
        ),
        None,
    )


def run_swarm(
    settings: Settings,
    folder: Path,
    display: Display,
    *,
    seconds: float,
    plan: Sequence[Hit],
    lies: dict[int, str],
    step_s: float,
    device: str,
    checkpoint_every: int,
    verbose: bool = False,
) -> RunObservations:
    """Train with as many nodes as ``settings.swarm.start_when`` for ``seconds``, while ``plan`` is
    carried out.

    The observations are in ``seen.json`` too, with more detail than the report.

    Raises ChaosError: the run did not begin. All processes are ended then, and also at a
    KeyboardInterrupt.
    """
    folder.mkdir()
    flags = [
        "--device",
        device,
        "--set",
        f"node.checkpoint_every_rounds={checkpoint_every}",
        *(["--verbose"] if verbose else []),
    ]
    with ProcessesUnderTest(
        folder, peers=settings.swarm.start_when, step_s=step_s, lies=lies
    ) as fleet:
        run = _Run(fleet, settings, display, flags)
        run.begin()
        run.live(plan, seconds)
        seen = run.end()
    write_json(
        folder / SEEN, {name: value for name, value in asdict(seen).items() if name != "events"}
    )
    seen.losses = held_out(
        settings, folder, [peer for peer in range(settings.swarm.start_when) if peer not in lies]
    )
    return seen


def held_out(settings: Settings, folder: Path, peers: Sequence[int]) -> dict[int, float]:
    """Return the held-out loss of each node's last checkpoint, without nodes that saved nothing
    usable.
    """
    settings, found = for_new_swarm(settings), {}  # with the optimizer of the checkpoints
    task = load_task(settings.task.hooks, settings.task.options)
    for peer in peers:
        try:
            _, state = checkpoint.load(folder / f"peer-{peer}")
            trainer = Trainer(task, settings.outer, settings.train)
            trainer.connect(Alone(), state["swarm"], Shard(*state["trainer"]["shard"]))
            trainer.resume(state["trainer"])
            if (loss := trainer.evaluate()) is not None:
                found[peer] = loss
        except ShoalError:
            continue
    return found


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a node in all its lives, without lines that a kill cut off."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found

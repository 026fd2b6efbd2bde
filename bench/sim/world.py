"""All peers of ``python -m bench.sim`` on one virtual clock, and the counts of their exchanges."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from bench.sim.peer import SimPeer
from bench.sim.plan import SimPlan
from bench.sim.toy_task import ToyModel, make_toy
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.manifest import Manifest, swarm_id
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.wire.envelope import seal
from tests.sim.clock import VirtualLoop
from tests.sim.directory import EPOCH, Board
from tests.sim.isolation import isolated
from tests.sim.memory_stream import NOTHING
from tests.sim.network import SimNetwork, Trace

SAMPLES = 10  # looks at all weights, besides that at the beginning
# virtual seconds between two collections of garbage: at fixed times, because finalizers act too
SWEEP_S = 30.0
STOPPED_S = (1.0, 8.0)  # virtual seconds of a nap
MESSAGE = 0x93  # first byte of every message: msgpack of a list of three, the first of them a text


@dataclass(frozen=True)
class WeightsSample:
    """The slow weights of all peers at a virtual time.

    ``loss``: of their mean; ``own``: the mean of each one's; ``spread``: root-mean-square distance
    from the mean over root-mean-square norm.
    """

    at: float
    loss: float
    own: float
    spread: float
    rounds: float
    """Median of the peers."""


@dataclass
class Counts:
    """The counts of all peers together, the dead included."""

    waits: list[float] = field(default_factory=list)
    """Virtual seconds that training stood still, for each exchange."""
    alone: int = 0
    killed: int = 0
    napped: int = 0
    messages: int = 0
    message_bytes: int = 0
    payload_bytes: int = 0
    directory_bytes: int = 0
    directory_calls: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """By kind, among the last 64 exchanges of each living peer."""


@dataclass(frozen=True)
class SimResult:
    """The result of a simulation."""

    counts: Counts
    samples: list[WeightsSample]
    virtual_s: float
    wall_s: float
    cpu_s: float
    trace: str
    """Hash of every event: equal for equal simulations."""
    events: int
    kept: float
    """Inner steps of all peers, of those for which they had time while they trained."""
    newcomers: int
    """Peers that came later, and were there at the end with an exchange behind them that others
    were in.
    """


def is_message(data: bytes) -> bool:
    """Return True if bytes sent at once are a message, a list of three that begins with a text, and
    not values.
    """
    return (
        len(data) > 4
        and data[0] == MESSAGE
        and (data[1] & 0xE0 == 0xA0 or data[1] == 0xD9)
        and data[3:5].isalnum()
    )


class World:
    """The world of one simulation, for one ``run``."""

    def __init__(self, plan: SimPlan) -> None:
        self.plan, self.toy = plan, make_toy(plan.parameters, plan.seed)
        self.loop = VirtualLoop()
        self.network = SimNetwork(self.loop, plan.seed, plan.links, Trace())
        self.counts = counts = Counts()
        self.live: list[SimPeer] = []
        self._dead: list[SimPeer] = []
        self._born = self._ended = 0
        self._dead_s = 0.0
        """Virtual seconds for which those that were killed had trained."""
        self._chance = random.Random(f"churn {plan.seed}")
        self._samples: list[WeightsSample] = []
        self._uncounted = (0, 0, 0)
        """Bytes sent, and the directories' bytes and keys, before costs counted."""
        creator = self.network.identity(f"{plan.seed} p0")
        model = model_digest(AveragedParameters.of(ToyModel(plan.parameters)))
        self.manifest = Manifest(
            name="sim",
            created=EPOCH,
            creator=creator.peer_id,
            task="toy",
            outer=plan.outer,
            train=TrainSettings(seed=plan.seed),
            model=model,
            start_when=plan.peers,
            bucket=plan.bucket,
            epoch_s=plan.epoch_s,
        )
        self.swarm = swarm_id(seal(self.manifest, creator))
        self.board = Board(self.network, self.swarm)

        class Counted(Stream):
            """A stream that counts messages apart from values."""

            async def send(self, data: bytes, timeout: float) -> None:
                if is_message(data):
                    counts.messages += 1
                    counts.message_bytes += len(data) + 4
                await super().send(data, timeout)

        self.network.stream = Counted

    # -- called by peers ---------------------------------------------------------------------------

    def on_round(self, waited: float, together: bool) -> None:
        """Count an exchange of a peer."""
        self.counts.waits.append(waited)
        self.counts.alone += not together

    def ended(self) -> None:
        """Note that a peer has done all its steps."""
        self._ended += 1
        if self._ended >= len(self.live):
            self.loop.call_later(1.0, self.loop.stop, context=NOTHING)

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> SimResult:
        """Run the simulation.

        Any exception that a protocol did not expect is raised: a bug in shoal.
        """
        began, plan, loop = (time.monotonic(), time.process_time()), self.plan, self.loop
        try:
            with isolated(loop) as errors, torch.random.fork_rng(devices=[]):
                torch.manual_seed(plan.seed)
                for _ in range(plan.peers):
                    self._bear(newcomer=False)
                gc.freeze()  # what is alive now is no garbage, so the collector need not scan it
                end = 60 * plan.minutes
                for number in range(1, SAMPLES):
                    loop.call_at(end * number / SAMPLES, self._sample, context=NOTHING)
                loop.call_later(SWEEP_S, self._sweep, context=NOTHING)
                self._plan_kill()
                self._plan_nap()
                if plan.warm_up:
                    loop.call_at(60 * plan.warm_up, self._begin_counting, context=NOTHING)
                loop.call_at(end, loop.stop, context=NOTHING)
                self._sample()
                try:
                    loop.run_forever()
                    result = self._result(began)
                    problem = next(iter(self.network.errors), None)
                    if problem is not None:
                        raise problem
                    if errors.found:
                        raise RuntimeError(errors.found[0])
                finally:
                    self.network.end()
                return result
        finally:
            gc.unfreeze()

    def _bear(self, *, newcomer: bool) -> None:
        peer = SimPeer(self, self._born, newcomer=newcomer)
        self._born += 1
        self.live.append(peer)
        if not newcomer and peer.member is not None:
            peer.directory.settle(self.plan.peers)
        peer.start()

    def _plan_kill(self) -> None:
        if self.plan.churn > 0:
            self.loop.call_later(
                self._chance.expovariate(self.plan.churn / 60), self._kill, context=NOTHING
            )

    def _kill(self) -> None:
        """Kill a random peer, as by ``kill -9``; a newcomer takes its place."""
        victim = self.live.pop(self._chance.randrange(len(self.live)))
        self._dead.append(victim)
        self._dead_s += max(self.loop.time() - victim.trained_from, 0.0) - victim.napped_s
        self.network.kill(victim.host.peer_id)
        self.counts.killed += 1
        self._ended -= victim.state == "done"
        self._bear(newcomer=True)
        self._plan_kill()

    def _plan_nap(self) -> None:
        if self.plan.naps > 0:
            seconds = self._chance.expovariate(self.plan.naps / 60)
            self.loop.call_later(seconds, self._nap, context=NOTHING)

    def _nap(self) -> None:
        """Stop a random peer, as by SIGSTOP, and let it go on after some seconds."""
        awake = [peer for peer in self.live if peer.host.process.state == "awake"]
        if awake:
            peer, seconds = self._chance.choice(awake), self._chance.uniform(*STOPPED_S)
            self.network.sleep(peer.host.peer_id)
            self.counts.napped += 1
            self.loop.call_later(seconds, self._wake, peer, self.loop.time(), context=NOTHING)
        self._plan_nap()

    def _wake(self, peer: SimPeer, since: float) -> None:
        self.network.wake(peer.host.peer_id)
        peer.napped_s += self.loop.time() - max(since, min(peer.trained_from, self.loop.time()))

    def _begin_counting(self) -> None:
        """Forget the costs up to now."""
        counts, self._uncounted = self.counts, self._totals()
        counts.waits.clear()
        counts.alone = counts.messages = counts.message_bytes = 0

    def _totals(self) -> tuple[int, int, int]:
        everyone = [*self.live, *self._dead]
        return (
            sum(peer.host.traffic.sent for peer in everyone),
            sum(peer.directory.nbytes for peer in everyone),
            sum(peer.directory.calls for peer in everyone),
        )

    def _sweep(self) -> None:
        gc.collect()
        self.loop.call_later(SWEEP_S, self._sweep, context=NOTHING)

    @torch.no_grad()
    def _sample(self) -> None:
        there = [
            peer for peer in self.live if peer.state != "waiting"
        ]  # a waiting peer has no weights to compare
        there = there or self.live
        weights = torch.stack([torch.cat(peer.opt.slow) for peer in there])
        mean = weights.mean(0)
        norm = weights.square().sum(1).mean().sqrt()
        apart = (weights - mean).square().sum(1).mean().sqrt()
        own = (self.toy.curvature * (weights - self.toy.minimum).square()).mean() / 2
        rounds = sorted(peer.opt.round for peer in there)[len(there) // 2]
        spread = float(apart / norm) if norm > 0 else 0.0
        self._samples.append(
            WeightsSample(
                self.loop.time(),
                self.toy.loss(mean),
                float(own),
                spread,
                rounds / self.live[0].opt.fragments,
            )
        )

    def _kept(self) -> float:
        took_s = sum(peer.opt.steps * peer.step_s for peer in (*self.live, *self._dead))
        now = self.loop.time()
        had_s = sum(max(now - peer.trained_from, 0.0) - peer.napped_s for peer in self.live)
        return took_s / (had_s + self._dead_s)

    def _result(self, began: tuple[float, float]) -> SimResult:
        self._sample()
        counts = self.counts
        counted = (
            now - before for now, before in zip(self._totals(), self._uncounted, strict=True)
        )
        sent, counts.directory_bytes, counts.directory_calls = counted
        counts.payload_bytes = sent - counts.message_bytes
        for peer in self.live:
            if peer.member is not None:
                counts.failures.update(dict(peer.exchange.stats.report()["failures"]))
        newcomers = sum(peer.newcomer and peer.together > 0 for peer in self.live)
        wall, cpu, trace = (
            time.monotonic() - began[0],
            time.process_time() - began[1],
            self.network.trace,
        )
        return SimResult(
            counts,
            self._samples,
            self.loop.time(),
            wall,
            cpu,
            trace.hexdigest(),
            trace.events,
            self._kept(),
            newcomers,
        )

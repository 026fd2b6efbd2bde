"""One peer of ``python -m bench.sim``: the product's outer optimizer, exchange and member, on a
simulated host, training a toy.

The outer optimizer returns the exchanges that it needs next (``OuterOptimizer.after_inner``), and
the peer lets virtual time pass until they are over; no thread and no real second is spent on
waiting.
"""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace
from typing import cast

import torch

from bench.sim.plan import Surroundings
from bench.sim.toy_task import BATCH, LR, Lesson, ToyModel
from shoal.optim import Alone, Handle, RoundInfo, Steps
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.exchange.exchange_base import ExchangeHandle
from shoal.swarm.membership.membership import Membership, NetworkOptions
from shoal.swarm.state.catch_up import MAX_ASKED, in_order, query_for
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.sync import begin_fetch
from shoal.swarm.training.factories import make_exchange, make_outer, make_screen
from shoal.swarm.training.member import TrainingMember
from shoal.swarm.training.round_steps import announced_speeds, round_length
from shoal.swarm.training.shard import Shard
from shoal.swarm.training.step_rate import Rates
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import State as DirectoryState
from tests.sim.directory import EPOCH, SimDirectory
from tests.sim.network import settled

NAP_S = 1.0  # virtual seconds at most of inner steps that are taken together
AGAIN_S = 5.0  # before a newcomer that got no weights asks again
START_S = 1.0  # within which the peers begin


class SimPeer:
    """One process of one peer. A ``newcomer`` takes over the swarm's weights first."""

    def __init__(self, world: Surroundings, number: int, *, newcomer: bool) -> None:
        plan = world.plan
        self.world, self.number, self.name, self.newcomer = world, number, f"p{number}", newcomer
        self.chance = random.Random(f"peer {plan.seed} {number}")
        self.step_s = plan.step_seconds * math.exp(plan.uneven * self.chance.gauss(0.0, 1.0))
        """Seconds of an inner step."""
        self.identity = world.network.identity(f"{plan.seed} {self.name}")
        self.host = world.network.host(self.name, self.identity)
        self.state: DirectoryState = "waiting" if newcomer else "training"
        model = ToyModel(plan.parameters)
        self.lesson = Lesson(world.toy, model, self.chance.getrandbits(48))
        outer, params = plan.outer, AveragedParameters.of(model)
        self.opt = make_outer(
            outer,
            torch.optim.SGD(params, lr=LR),
            Alone(),
            model=model,
            slow_device=torch.device("cpu"),
            length=round_length(outer.round, self.unix, self._speeds),
            on_round=self._on_round,
        )
        self.model, self.swarm = model_digest(params), world.swarm
        self.together = 0
        """Exchanges that others were in."""
        self.trained_from = math.inf
        """Virtual time of its first step."""
        self.napped_s = 0.0
        """Virtual seconds for which it was stopped since then."""
        self._waited, self._announced_round = 0.0, -1
        self.directory = SimDirectory(
            world.board,
            self.host,
            self._record,
            self.chance,
            bucket=plan.bucket,
            epoch_s=plan.epoch_s,
        )
        self.member: TrainingMember | None = None
        place = {
            "identity": self.identity,
            "host": self.host,
            "directory": self.directory,
            "swarm": self.swarm,
        }
        self._membership = cast(
            Membership, SimpleNamespace(**place, manifest=world.manifest, network=NetworkOptions())
        )
        if outer.method != "none":
            screen = make_screen(outer)
            self.exchange = make_exchange(
                self._membership, outer, screen, self.opt, seed=plan.seed, model=self.model
            )
            self.member = TrainingMember(
                self._membership,
                self.opt,
                self.exchange,
                screen,
                model=self.model,
                name=self.name,
                shard=Shard(0, 1, plan.seed),
                clock=world.network.loop.time,
            )
            self.member.serve()
            self.member.records.rates = Rates(1 / self.step_s)
            self.opt.exchange, self.opt.run = self.exchange, self.swarm

    def start(self) -> None:
        """Start the tasks of this peer."""
        if self.member is not None:
            self.host.start(self.directory.run())
        self.host.start(self._live())

    def unix(self) -> float:
        """Return Unix seconds on its clock, which is right."""
        return EPOCH + self.world.network.loop.time()

    def _speeds(self) -> list[float]:
        return announced_speeds(self._membership)

    def _record(self) -> Member:
        assert self.member is not None  # a peer that averages with nobody publishes nothing
        self.member.records.state = self.state
        return Member.model_validate(
            {
                **self.member.fields(self.member.record()),
                "swarm": self.swarm,
                "peer": self.identity.peer_id,
                "addresses": (),
                "issued": self.unix(),
                "version": "0",
            }
        )

    # -- living ------------------------------------------------------------------------------------

    async def _live(self) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, START_S))
        if self.member is not None:
            self.member.begin(await self._swarm_weights() if self.newcomer else None)
        self._enter("training")
        await self._train()

    async def _swarm_weights(self) -> State | None:
        """Fetch the swarm's weights; None if no other peer has finished a round yet."""
        while True:
            await self.directory.read()
            others = [
                m
                for m in self.directory.members().values()
                if m.peer != self.identity.peer_id and m.model == self.model
            ]
            able = [m for m in others if m.round > 0 and m.state in ("waiting", "training")]
            sources = [
                (m.peer, m.addresses)
                for m in in_order(able, self.host.met, self.world.manifest.creator)[:MAX_ASKED]
            ]
            if not sources:
                return None
            query = query_for(self._membership, self.model, self.opt)
            try:
                state = await asyncio.wrap_future(
                    begin_fetch(self._membership.host, query, sources)
                )
            except NetworkError:
                state = None
            if state is not None:
                return state
            await asyncio.sleep(AGAIN_S)

    async def _train(self) -> None:
        opt, steps = self.opt, self.world.plan.steps
        self.trained_from = self.world.network.loop.time()
        while not steps or opt.steps < steps:
            many = self._at_once()
            await asyncio.sleep(many * self.step_s * self.chance.uniform(0.9, 1.1))
            self.lesson.learn(many)
            for _ in range(many):
                opt.count(BATCH)
                for handle in opt.after_inner():
                    await self._settled(handle)
            if self.member is not None:
                self._between_steps(self.member)
        self._enter("done")
        self.world.ended()

    def _enter(self, state: DirectoryState) -> None:
        self.state = state
        if self.member is not None:
            self.directory.announce()

    def _at_once(self) -> int:
        """Return the inner steps up to the next one after which an exchange begins or is applied,
        at most ``NAP_S`` of them.
        """
        opt, left = self.opt, self.world.plan.steps - self.opt.steps
        most = (
            max(int(NAP_S / self.step_s), 1) if type(opt.length) is Steps else 1
        )  # time, or tokens, may end a round at any step
        many = opt.quiet(most)
        return min(many, left) if left > 0 else many

    async def _settled(self, handle: Handle) -> None:
        if isinstance(handle, ExchangeHandle):
            began = self.world.network.loop.time()
            await settled(handle)
            self._waited += self.world.network.loop.time() - began

    def _between_steps(self, member: TrainingMember) -> None:
        member.after_step()
        if self.opt.round != self._announced_round:
            self._announced_round = self.opt.round
            self.directory.announce()

    def _on_round(self, info: RoundInfo) -> None:
        waited, self._waited = self._waited, 0.0
        others = len(info.members) >= 2
        self.together += others
        self.world.on_round(waited, others)
        if self.member is not None:
            self.member.on_round(info, waited)

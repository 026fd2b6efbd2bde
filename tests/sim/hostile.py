"""A member that turns hostile: it answers every call with a round that it makes up, calls others,
and sends free records of it.

Its numbers follow from the seed. It is known to those with which it exchanged while it was honest.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from shoal.swarm.errors import ShoalError
from shoal.swarm.exchange.group.leader import LEADER_PROTOCOL
from shoal.swarm.exchange.pair.calls import EXCHANGE_PROTOCOL
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.envelope import ENVELOPE, MAX_COUNT, Message, pack, seal, unseal
from shoal.swarm.wire.messages import Answer, GroupProbe, GroupReady, GroupReceipt, Offer
from tests.sim.peers import MODEL, SWARM, SimPeer, SimSwarm

FREE = (0, 4, 20)
"""Numbers of keys that it makes up, each with a record of its own."""
FARTHER = (1, 3, 40, 1000, MAX_COUNT)
"""Rounds beyond the furthest of the honest peers that it says it is in."""
PERIOD = 0.3  # seconds between two of its calls


class Liar:
    """What runs in the place of ``victim``, whose process is dead, until ``until``.

    ``dice``: in [0, 1), chooses its numbers.
    """

    def __init__(self, swarm: SimSwarm, victim: SimPeer, dice: float, until: float) -> None:
        self._swarm, self._victim, self._until = swarm, victim, until
        self._host = swarm.network.host(victim.name, victim.identity)
        self._farther = FARTHER[int(dice * 1000) % len(FARTHER)]
        free = FREE[int(dice * 100) % len(FREE)]
        self._names = [
            victim.id,
            *(swarm.network.identity(f"free {victim.name} {n}").peer_id for n in range(free)),
        ]
        self._back = dice * 10 % 1 < 0.5
        """Whether it calls for the first round rather than for the one that it says it is in."""
        self._host.serve(EXCHANGE_PROTOCOL, self._answer_call)
        self._host.serve(LEADER_PROTOCOL, self._answer_member)
        self._host.start(self._say())

    def _round(self) -> int:
        furthest = max(peer.exchange.next_round for peer in self._swarm.peers if not peer.gone)
        return min(furthest + self._farther, MAX_COUNT)

    async def _answer_call(self, stream: Stream) -> None:
        await stream.receive(Offer.LIMIT + ENVELOPE, 1.0)
        await stream.send(pack(Answer(verdict="passed", round=self._round())), 1.0)

    async def _answer_member(self, stream: Stream) -> None:
        """Send the member on by whole cycles of fragments, as an honest leader does: another round
        is no round of its fragment.
        """
        sealed = await stream.receive(GroupReady.LIMIT + ENVELOPE, 1.0)
        ready: Message
        _, ready = unseal(sealed, GroupReady, GroupProbe)
        assert isinstance(ready, GroupReady | GroupProbe)
        fragments = self._swarm.setting.fragments
        round = ready.round + (self._round() - ready.round) // fragments * fragments
        await stream.send(pack(GroupReceipt(verdict="passed", round=round)), 1.0)

    async def _say(self) -> None:
        swarm, victim = self._swarm, self._victim
        while swarm.network.loop.time() < self._until:
            record = victim.record().model_copy(update={"round": self._round()})
            for other in [peer for peer in swarm.peers if not peer.gone]:
                for name in self._names:
                    made_up = record.model_copy(update={"peer": name})
                    swarm.network.datagram(self._host, other.host, partial(other.receive, made_up))
                if swarm.setting.kind == "pair":
                    with contextlib.suppress(ShoalError):
                        await self._call(other)
            await asyncio.sleep(PERIOD)
        swarm.network.kill(victim.id)

    async def _call(self, other: SimPeer) -> None:
        offer = Offer(
            swarm=SWARM,
            round=0 if self._back else self._round(),
            fragment=0,
            nbytes=0,
            shapes=(),
            dtype="float32",
            codec="none",
            sha256=bytes(32),
            weight=1.0,
            model=MODEL,
            nonce=bytes(16),
        )
        stream = await self._host.open(other.id, EXCHANGE_PROTOCOL, timeout=1.0)
        try:
            await stream.send(seal(offer, self._victim.identity), 1.0)
            await stream.receive(Answer.LIMIT, PERIOD)
        finally:
            stream.close()

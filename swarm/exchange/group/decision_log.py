"""The decision on each group, as its leader signed it: kept for members that lost their channel to the leader and ask again."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import pack, seal, unpack, unseal
from shoal.swarm.wire.group import GroupDecision, GroupQuestion, GroupReply

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

DECISION_PROTOCOL = "/shoal/decision/1"
REMEMBERED = 1024
ASK_S = 1.0  # seconds that a member in doubt spends on asking

log = logging.getLogger(__name__)


class DecisionLog:
    """The decisions that this node made as a leader or received as a member. All coroutines run on the host's loop."""

    def __init__(self, host: Host, identity: Identity, swarm: str) -> None:
        self._host, self._identity, self._swarm = host, identity, swarm
        self._sealed: OrderedDict[bytes, bytes] = OrderedDict()
        self._pending: dict[bytes, asyncio.Event] = {}
        host.serve(DECISION_PROTOCOL, self._answer)

    def expect(self, nonce: bytes) -> None:
        """Note that this node leads the group and will decide: a peer that asks earlier waits for it."""
        self._pending[nonce] = asyncio.Event()

    def settle(self, nonce: bytes, mean: int) -> bytes:
        """Decide, once. Returns the sealed decision."""
        if nonce not in self._sealed:
            self.remember(nonce, seal(GroupDecision(swarm=self._swarm, nonce=nonce, mean=mean), self._identity))
        return self._sealed[nonce]

    def remember(self, nonce: bytes, sealed: bytes) -> None:
        """Remember a decision, to pass it on."""
        self._sealed[nonce] = sealed
        pending = self._pending.pop(nonce, None)
        if pending is not None:
            pending.set()
        while len(self._sealed) > REMEMBERED:
            self._sealed.popitem(last=False)

    def open(self, sealed: bytes | None, leader: str, nonce: bytes) -> int | None:
        """Return the contributions in the mean, as bits, if this is the leader's decision on the group. Raises MessageError."""
        if sealed is None:
            return None
        signer, decision = unseal(sealed, GroupDecision)
        if signer != leader or decision.nonce != nonce or decision.swarm != self._swarm:
            raise MessageError(f"a decision was refused: it is not the one of peer {short(leader)} on this group.")
        return decision.mean

    async def ask(self, leader: str, nonce: bytes, peers: Iterable[tuple[str, Sequence[str]]]) -> bytes | None:
        """Return the decision from any of ``peers`` (peer id, addresses) that has it; None if none of them does within a second."""
        asking = [asyncio.ensure_future(self._asked(peer, addresses, leader, nonce)) for peer, addresses in peers]
        try:
            for answer in asyncio.as_completed(asking, timeout=ASK_S):
                sealed = await answer
                if sealed is not None:
                    return sealed
        except asyncio.TimeoutError:
            pass  # no remaining member knows of a decision
        finally:
            for question in asking:
                question.cancel()
        log.warning("the channel to the leader of a group broke and no member knows its decision: going on without the group")
        return None

    async def _asked(self, peer: str, addresses: Sequence[str], leader: str, nonce: bytes) -> bytes | None:
        try:
            stream = await self._host.open(peer, DECISION_PROTOCOL, addresses=addresses, timeout=ASK_S)
            try:
                await stream.send(pack(GroupQuestion(nonce=nonce)), ASK_S)
                reply = unpack(await stream.receive(GroupReply.LIMIT, ASK_S), GroupReply)
                self.open(reply.decision, leader, nonce)
                return reply.decision
            finally:
                stream.close()
        except (NetworkError, MessageError) as error:
            log.debug("peer %s sent no decision: %s", short(peer), error)
            return None

    async def _answer(self, stream: Stream) -> None:
        question = unpack(await stream.receive(GroupQuestion.LIMIT, ASK_S), GroupQuestion)
        pending = self._pending.get(question.nonce)
        if pending is not None:
            try:
                await asyncio.wait_for(pending.wait(), ASK_S)
            except asyncio.TimeoutError:
                log.debug("a peer asked for a decision that is not made yet")
        await stream.send(pack(GroupReply(decision=self._sealed.get(question.nonce))), ASK_S)

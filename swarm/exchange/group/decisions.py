"""The signed decisions of groups, kept for members that lost their channel to the leader and ask
again: `DecisionLog`.

    log.expect(nonce)                    # at the leader, once the group is formed
    sealed = log.settle(nonce, mean)     # it decides
    mean = log.open(sealed, leader, nonce)
    sealed = await log.ask(leader, nonce, members)      # at a member that has heard none

What holds if the leader dies: docs/internals.md, "The decision of a group".
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import pack, seal, unpack, unseal
from shoal.swarm.wire.messages import GroupDecision, GroupQuestion, GroupReply

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

DECISION_PROTOCOL = "/shoal/decision/1"
REMEMBERED = 1024
"""Decisions."""

log = logging.getLogger(__name__)


class DecisionLog:
    """The decisions that this node made as a leader or received as a member.

    All coroutines run on the host's loop. ``ask_s``: seconds that a member in doubt spends on
    asking, in which a slow link needs several round trips.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        swarm: str,
        ask_s: float,
        protocol: str = DECISION_PROTOCOL,
    ) -> None:
        self._host, self._identity, self._swarm = host, identity, swarm
        self._ask_s = ask_s
        self._protocol = protocol
        self._sealed = Newest[bytes, bytes](REMEMBERED)
        self._pending: dict[bytes, asyncio.Event] = {}
        host.serve(protocol, self._answer)

    def expect(self, nonce: bytes) -> None:
        """Note that this node leads the group and will decide: a peer that asks earlier waits for
        it.
        """
        self._pending[nonce] = asyncio.Event()

    def knows(self, nonce: bytes) -> bool:
        """Return whether the group has a decision here, or one of this node is due. A member of it
        knows the nonce.
        """
        return nonce in self._pending or nonce in self._sealed

    def settle(self, nonce: bytes, mean: int, averages: bytes = b"") -> bytes:
        """Decide once. ``averages``: those that all members of the mean have reported."""
        if nonce not in self._sealed:
            decision = GroupDecision(
                swarm=self._swarm, nonce=nonce, mean=mean, averages=digest_of(averages)
            )
            self.remember(nonce, seal(decision, self._identity))
        return self._sealed[nonce]

    def remember(self, nonce: bytes, sealed: bytes) -> None:
        """Remember a decision, to pass it on."""
        self._sealed[nonce] = sealed
        pending = self._pending.pop(nonce, None)
        if pending is not None:
            pending.set()

    def open(
        self, sealed: bytes | None, leader: str, nonce: bytes, averages: bytes | None = None
    ) -> int | None:
        """Return the contributions in the mean, as bits, if this is the leader's decision on the
        group, and of these ``averages``. Raises MessageError.
        """
        if sealed is None:
            return None
        signer, decision = unseal(sealed, GroupDecision)
        if signer != leader or decision.nonce != nonce or decision.swarm != self._swarm:
            raise MessageError(
                f"a decision was refused: it is not the one of peer {short(leader)} on this group."
            )
        if averages is not None and decision.mean and decision.averages != digest_of(averages):
            raise MessageError(
                f"a decision of peer {short(leader)} was refused: it is of other averages than "
                "came here."
            )
        return decision.mean

    async def ask(
        self, leader: str, nonce: bytes, peers: Iterable[tuple[str, Sequence[str]]]
    ) -> bytes | None:
        """Return the decision from any of ``peers`` (peer id, addresses) that has it; None if none
        of them does in time.
        """
        asking = [
            asyncio.ensure_future(self._asked(peer, addresses, leader, nonce))
            for peer, addresses in peers
        ]
        try:
            for answer in asyncio.as_completed(asking, timeout=self._ask_s):
                sealed = await answer
                if sealed is not None:
                    return sealed
        except TimeoutError:
            pass  # no remaining member knows of a decision
        finally:
            for question in asking:
                question.cancel()
        log.warning(
            "the channel to the leader of a group broke and no member knows its decision: going on "
            "without the group"
        )
        return None

    async def _asked(
        self, peer: str, addresses: Sequence[str], leader: str, nonce: bytes
    ) -> bytes | None:
        try:
            opening = self._host.open(
                peer, self._protocol, addresses=addresses, timeout=self._ask_s
            )
            with contextlib.closing(await opening) as stream:
                await stream.send(pack(GroupQuestion(nonce=nonce)), self._ask_s)
                reply = unpack(await stream.receive(GroupReply.LIMIT, self._ask_s), GroupReply)
                self.open(reply.decision, leader, nonce)
                return reply.decision
        except (NetworkError, MessageError) as error:
            log.debug("peer %s sent no decision: %s", short(peer), error)
            return None

    async def _answer(self, stream: Stream) -> None:
        question = unpack(await stream.receive(GroupQuestion.LIMIT, self._ask_s), GroupQuestion)
        pending = self._pending.get(question.nonce)
        if pending is not None:
            try:
                await asyncio.wait_for(pending.wait(), self._ask_s)
            except TimeoutError:
                log.debug("a peer asked for a decision that is not made yet")
        await stream.send(pack(GroupReply(decision=self._sealed.get(question.nonce))), self._ask_s)


def digest_of(averages: bytes) -> bytes | None:
    """Return the digest by which a decision names the averages in reports; None if none are."""
    return hashlib.sha256(averages).digest() if averages else None

"""The calls that came early, and wait until this node is at their round."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from shoal.swarm.exchange.context import OVERLAPPED_S
from shoal.swarm.exchange.pair.meeting import MAX_HELD, PairingAttempt, PairState
from shoal.swarm.exchange.pair.transfer import Incoming
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.wire.pair import Offer

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

RECEIVED = 2  # calls for later rounds of a fragment whose payload is received before this node is there


class HeldCalls:
    """The held calls of one node, at most one of each peer with each fragment."""

    def __init__(self, state: PairState) -> None:
        self._state = state
        self._places: defaultdict[int, StreamPlaces] = defaultdict(lambda: StreamPlaces(MAX_HELD))
        self._receiving: Counter[int] = Counter()  # payloads that come in, by fragment
        self.calls: dict[tuple[int, str], tuple[int, asyncio.Future[PairingAttempt | None]]] = {}

    async def hold(self, stream: Stream, offer: Offer) -> tuple[PairingAttempt | None, Incoming | None]:
        """Wait until this node is at the round of ``offer`` and takes the call; None if it does not in the time a caller waits, or
        too many calls with that fragment are held. Also return what has come of the payload meanwhile. It is received from the
        partner of that round, `RECEIVED` times with each fragment, if it is as large as this node's own.
        """
        round, fragment = offer.round, offer.fragment
        call = (fragment, stream.peer_id)
        if call in self.calls or not (places := self._places[fragment]).take(stream):
            return None, None
        taken: asyncio.Future[PairingAttempt | None] = asyncio.get_running_loop().create_future()
        self.calls[call] = (round, taken)
        state, incoming = self._state, None
        ahead = state.sizes.get(fragment) == offer.nbytes and state.selector.partner(round) == stream.peer_id
        if ahead and self._receiving[fragment] < RECEIVED:
            self._receiving[fragment] += 1
            incoming = Incoming(offer.nbytes)
        gone = asyncio.ensure_future(self._until_gone(stream, incoming, ahead))
        try:
            either: set[asyncio.Future[Any]] = {taken, gone}
            await asyncio.wait(either, timeout=state.patient(fragment), return_when=asyncio.FIRST_COMPLETED)
            return (taken.result() if taken.done() else None), incoming
        finally:
            del self.calls[call]
            if incoming is not None:
                self._receiving[fragment] -= 1
            places.free(stream)
            if not places.peers and self._places.get(fragment) is places:  # not if this call gave way, and others came and went
                del self._places[fragment]
            gone.cancel()
            await asyncio.wait({gone})  # only one may read from a stream
            if not gone.cancelled():
                gone.exception()  # retrieved

    async def _until_gone(self, stream: Stream, incoming: Incoming | None, ahead: bool) -> None:
        """Wait until the caller has gone on, or says anything beside its payload before it is answered."""
        if incoming is not None:
            await stream.receive_ahead(incoming.view, incoming.advance)
        elif ahead:  # of a payload that may wait in the stream nothing is lost
            await asyncio.sleep(OVERLAPPED_S)
        await stream.more(OVERLAPPED_S)

    def take(self, pairing: PairingAttempt, peer: str) -> bool:
        """Accept the call of ``peer`` if one for this round is held; return whether it was."""
        held = self.calls.get((pairing.key.fragment, peer))
        if held is None or held[0] != pairing.key.round or held[1].done():
            return False
        pairing.engage()
        held[1].set_result(pairing)
        return True

    def release(self, pairing: PairingAttempt) -> None:
        """Answer the calls that this node no longer takes, now that it is in the round of ``pairing``: those for that round or an
        earlier one, except its partner's, and those for rounds of other fragments that it will not be in.
        """
        state, key = self._state, pairing.key
        for (fragment, peer), (round, taken) in self.calls.items():
            if fragment == key.fragment:
                past = round < key.round or (round == key.round and peer != pairing.partner)
            else:
                call = (round, fragment, state.at(fragment))
                past = state.rounds.instead(*call) is not None or state.rounds.through(*call)
            if past and not taken.done():
                taken.set_result(None)

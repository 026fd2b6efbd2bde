"""Calls that came before this node is at their round: ``HeldCalls``.

A caller that is early gets no answer until this node begins that round. Meanwhile its payload may
come in, so that the exchange is over sooner.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

from shoal.swarm.exchange.pair.state import PairingAttempt, PairState
from shoal.swarm.exchange.pair.transfer import Incoming
from shoal.swarm.exchange.round_time import OVERLAPPED_S
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.p2p.tasks import first_of, stop
from shoal.swarm.wire.messages import Offer

MAX_HELD = 64
"""Calls with each fragment."""
RECEIVED = 2
"""Later rounds of a fragment in which payloads are received before this node is there."""
SLOWER = 1
"""Much slower peers whose payloads are received so, of a fragment."""


class HeldCalls:
    """The held calls of one node, at most one of each peer with each fragment."""

    def __init__(self, state: PairState) -> None:
        self._state = state
        self._places: defaultdict[int, StreamPlaces] = defaultdict(lambda: StreamPlaces(MAX_HELD))
        self._receiving: Counter[tuple[int, bool]] = Counter()
        """Payloads that come in, by fragment; those of much slower peers by themselves."""
        self.calls: dict[tuple[int, str], tuple[int, asyncio.Future[PairingAttempt | None]]] = {}

    async def hold(
        self, stream: Stream, offer: Offer
    ) -> tuple[PairingAttempt | None, Incoming | None]:
        """Wait until this node is at the round of ``offer`` and takes the call; None if it does not
        in the time a caller waits, or too many calls with that fragment are held. Also return what
        has come of the payload meanwhile. It is received from a partner of that round, `RECEIVED`
        times with each fragment and partner, or from a much slower peer, if it is as large as this
        node's own; before that is known it waits in the stream.
        """
        round, fragment = offer.round, offer.fragment
        call = (fragment, stream.peer_id)
        if call in self.calls or not (places := self._places[fragment]).take(stream):
            return None, None
        taken: asyncio.Future[PairingAttempt | None] = asyncio.get_running_loop().create_future()
        self.calls[call] = (round, taken)
        state, incoming = self._state, None
        peer, partners = stream.peer_id, state.selector.partners(round)
        slower = state.selector.expects_slower(peer, round)
        has_room = self._receiving[fragment, slower] < (
            SLOWER if slower else RECEIVED * len(partners)
        )
        expected = peer in partners or (slower and has_room)
        own_size = state.sizes.get(fragment)
        ahead = expected and own_size in (None, offer.nbytes)
        if ahead and has_room and own_size is not None:
            self._receiving[fragment, slower] += 1
            incoming = Incoming(offer.nbytes)
        gone = asyncio.ensure_future(self._until_gone(stream, incoming, ahead))
        try:
            await first_of(
                taken,
                gone,
                timeout=OVERLAPPED_S if state.rounds.overlap else state.time.patience(fragment),
            )
            return (taken.result() if taken.done() else None), incoming
        finally:
            del self.calls[call]
            if incoming is not None:
                self._receiving[fragment, slower] -= 1
            places.free(stream)
            # Not if this call gave way, and others came and went.
            if not places.peers and self._places.get(fragment) is places:
                del self._places[fragment]
            await stop(gone)  # only one may read from a stream

    async def _until_gone(self, stream: Stream, incoming: Incoming | None, ahead: bool) -> None:
        """Wait until the caller has gone on, or says anything beside its payload before it is
        answered.
        """
        if incoming is not None:
            await stream.receive_ahead(incoming.view, incoming.advance)
            await stream.more(OVERLAPPED_S)
        elif await stream.more(OVERLAPPED_S) and ahead:
            await asyncio.sleep(OVERLAPPED_S)  # its payload waits in the stream

    def take(self, pairing: PairingAttempt, peer: str) -> bool:
        """Accept the call of ``peer`` if one for this round is held; return whether it was."""
        held = self.calls.get((pairing.key.fragment, peer))
        if held is None or held[0] != pairing.key.round or held[1].done():
            return False
        pairing.engage()
        held[1].set_result(pairing)
        return True

    def give_up(self) -> None:
        """Take none of the calls that are held."""
        for _, taken in self.calls.values():
            if not taken.done():
                taken.set_result(None)

    def slower(self, pairing: PairingAttempt) -> str | None:
        """Return a much slower peer whose partner this node is, and whose call for the round of
        ``pairing`` is held.
        """
        key = pairing.key
        for (fragment, peer), (round, taken) in self.calls.items():
            is_here = (fragment, round) == (key.fragment, key.round) and not taken.done()
            if is_here and self._state.selector.expects_slower(peer, round):
                return peer
        return None

    def release(self, pairing: PairingAttempt) -> None:
        """Answer the calls that this node no longer takes, now that it is in the round of
        ``pairing``: those for that round or an earlier one, except its partner's, and those for
        rounds of other fragments that it will not be in.
        """
        state, key = self._state, pairing.key
        for (fragment, peer), (round, taken) in self.calls.items():
            if fragment == key.fragment:
                expects = pairing.partner == peer or state.meeting(fragment, peer) is not pairing
                past = round < key.round or (round == key.round and not expects)
            else:
                call = (round, fragment, state.at(fragment))
                past = state.rounds.instead(*call) is not None or state.rounds.through(*call)
            if past and not taken.done():
                taken.set_result(None)

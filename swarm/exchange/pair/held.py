"""The calls that came early, and wait until this node is at their round."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from shoal.swarm.exchange.pair.meeting import MAX_HELD, PairingAttempt, PairState
from shoal.swarm.p2p.stream_places import StreamPlaces

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream


class HeldCalls:
    """The held calls of one node, at most one of each peer with each fragment."""

    def __init__(self, state: PairState) -> None:
        self._state = state
        self._places: defaultdict[int, StreamPlaces] = defaultdict(lambda: StreamPlaces(MAX_HELD))
        self.calls: dict[tuple[int, str], tuple[int, asyncio.Future[PairingAttempt | None]]] = {}

    async def hold(self, stream: Stream, round: int, fragment: int) -> PairingAttempt | None:
        """Wait until this node is at ``round`` and takes the call; None if it does not in the time a caller waits, or too many
        calls with ``fragment`` are held.
        """
        call = (fragment, stream.peer_id)
        if call in self.calls or not (places := self._places[fragment]).take(stream):
            return None
        taken: asyncio.Future[PairingAttempt | None] = asyncio.get_running_loop().create_future()
        self.calls[call] = (round, taken)
        # A caller says nothing more until it is answered.
        gone: asyncio.Future[bool] = asyncio.ensure_future(stream.drained(self._state.patient(fragment)))
        try:
            either: set[asyncio.Future[Any]] = {taken, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return taken.result() if taken.done() else None
        finally:
            del self.calls[call]
            places.free(stream)
            if not places.peers and self._places.get(fragment) is places:  # not if this call gave way, and others came and went
                del self._places[fragment]
            gone.cancel()
            await asyncio.wait({gone})  # only one may read from a stream

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

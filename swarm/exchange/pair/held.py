"""The calls that came early, and wait until this node is at their round."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from shoal.swarm.exchange.pair.meeting import MAX_HELD, PairingAttempt, PairState

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream


class HeldCalls:
    """The held calls of one node, at most one of each peer."""

    def __init__(self, state: PairState) -> None:
        self._state = state
        self.calls: dict[str, tuple[int, asyncio.Future[PairingAttempt | None]]] = {}

    @property
    def full(self) -> bool:
        """True if no further call is held."""
        return len(self.calls) >= MAX_HELD

    async def hold(self, stream: Stream, round: int) -> PairingAttempt | None:
        """Wait until this node is at ``round`` and takes the call; None if it does not in the time a caller waits."""
        peer = stream.peer_id
        if peer in self.calls:
            return None
        taken: asyncio.Future[PairingAttempt | None] = asyncio.get_running_loop().create_future()
        self.calls[peer] = (round, taken)
        # A caller says nothing more until it is answered.
        gone: asyncio.Future[bool] = asyncio.ensure_future(stream.drained(self._state.patience.of(self._state.timeouts)))
        try:
            either: set[asyncio.Future[Any]] = {taken, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return taken.result() if taken.done() else None
        finally:
            del self.calls[peer]
            gone.cancel()
            await asyncio.wait({gone})  # only one may read from a stream

    def take(self, pairing: PairingAttempt, peer: str) -> bool:
        """Accept the call of ``peer`` if one for this round is held; return whether it was."""
        held = self.calls.get(peer)
        if held is None or held[0] != pairing.key.round or held[1].done():
            return False
        pairing.engage()
        held[1].set_result(pairing)
        return True

    def release(self, keep: str | None) -> None:
        """Answer "busy" to the calls held for this round or an earlier one, except the partner's."""
        for peer, (round, taken) in self.calls.items():
            past = round < self._state.next_round or (round == self._state.next_round and peer != keep)
            if past and not taken.done():
                taken.set_result(None)

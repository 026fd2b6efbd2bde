"""Admission to an invitation-only swarm: two peers that first meet show each other theirs.

The directory holds the same, but a newcomer asks for weights before it has a record there, and
peers read it at different moments. A peer that has shown no admission is served nothing but this
and the manifest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from shoal.swarm.access.invitation import MAX_SHOWN
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.messages import send_message
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.resource_manager import ADMISSION_PROTOCOL, FREE
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import unpack
from shoal.swarm.wire.messages import AdmissionReply

MESSAGE_S = 5.0
"""For one small message."""
SHOWN_AGAIN_S = 300.0
"""After which a peer is shown the admission again: it may have been restarted meanwhile."""
MAX_MET = 4096


class AdmissionHandshake:
    """Exchange of admissions with peers that this node calls or is called by, judged by
    ``access_policy``. On the host's loop.
    """

    def __init__(self, host: Host, access_policy: AccessPolicy) -> None:
        self._host = host
        self._access_policy = access_policy
        self._met = Newest[str, float](MAX_MET)  # peer -> when it saw our admission
        host.serve(ADMISSION_PROTOCOL, self._answer)

    async def before(
        self, peer: str, protocol: str, addresses: Sequence[str], timeout: float
    ) -> None:
        """Show the admission if necessary, before a stream of ``protocol`` is opened to ``peer``.

        Raises NetworkError: either may not meet the other; the sentence gives the reason.
        """
        if protocol in FREE or not self._access_policy.by_invitation:
            return
        now = time.monotonic()
        was_shown = now - self._met.get(peer, -SHOWN_AGAIN_S) < SHOWN_AGAIN_S
        if was_shown and self._access_policy.admits(peer):
            return
        stream = await self._host.open(
            peer, ADMISSION_PROTOCOL, addresses=addresses, timeout=timeout
        )
        with contextlib.closing(stream):
            try:
                await stream.send(self._access_policy.ticket, MESSAGE_S)
                packed = await stream.receive(AdmissionReply.LIMIT, MESSAGE_S)
                reply = unpack(packed, AdmissionReply)
            except MessageError as error:
                raise NetworkError(
                    f"peer {short(peer)} could not be shown this node's invitation ({error})."
                ) from error
        if reply.reason:
            raise NetworkError(
                f"peer {short(peer)} does not let this node in: {reply.reason.rstrip('.')}."
            )
        problem = self._access_policy.refusal(peer, reply.admission)
        if problem:
            raise NetworkError(f"peer {short(peer)} is not met: {problem}")
        self._met[peer] = now

    async def _answer(self, stream: Stream) -> None:
        shown = await stream.receive(MAX_SHOWN, MESSAGE_S)
        reason = self._access_policy.refusal(stream.peer_id, shown)
        own = b"" if reason else self._access_policy.ticket
        await send_message(stream, AdmissionReply(admission=own, reason=reason), MESSAGE_S)

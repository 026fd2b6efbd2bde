"""The admission handshake of an invitation-only swarm: two peers that first meet show each other their admissions.

The directory holds the same admissions, but a newcomer asks for weights before it has a record there, and peers read it at
different moments. A peer that has shown no admission is served nothing but this and the manifest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.swarm.access.invitation import MAX_SHOWN
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.resource_manager import ADMISSION_PROTOCOL, FREE
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.join import AdmissionReply

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

SMALL_S = 5.0  # seconds for one small message
AGAIN_S = 300.0  # seconds after which a peer is shown the admission again: it may have been restarted meanwhile
MAX_MET = 4096


class AdmissionHandshake:
    """Exchange of admissions with peers that this node calls or is called by, judged by ``access_policy``. On the host's loop."""

    def __init__(self, host: Host, access_policy: AccessPolicy) -> None:
        self._host, self._access_policy = host, access_policy
        self._met: OrderedDict[str, float] = OrderedDict()  # peer -> when it saw our admission
        host.serve(ADMISSION_PROTOCOL, self._answer)

    async def before(self, peer: str, protocol: str, addresses: Sequence[str], timeout: float) -> None:
        """Show the admission if necessary, before a stream of ``protocol`` is opened to ``peer``.

        Raises NetworkError: either may not meet the other; the sentence gives the reason.
        """
        if protocol in FREE or not self._access_policy.by_invitation:
            return
        now = time.monotonic()
        if now - self._met.get(peer, -AGAIN_S) < AGAIN_S and self._access_policy.admits(peer):
            return
        stream = await self._host.open(peer, ADMISSION_PROTOCOL, addresses=addresses, timeout=timeout)
        try:
            await stream.send(self._access_policy.ticket, SMALL_S)
            reply = unpack(await stream.receive(AdmissionReply.LIMIT, SMALL_S), AdmissionReply)
        except MessageError as error:
            raise NetworkError(f"peer {short(peer)} could not be shown this node's invitation ({error}).") from error
        finally:
            stream.close()
        if reply.reason:
            raise NetworkError(f"peer {short(peer)} does not let this node in: {reply.reason.rstrip('.')}.")
        if problem := self._access_policy.refusal(peer, reply.admission):
            raise NetworkError(f"peer {short(peer)} is not met: {problem}")
        self._met[peer] = now
        self._met.move_to_end(peer)
        if len(self._met) > MAX_MET:
            self._met.popitem(last=False)

    async def _answer(self, stream: Stream) -> None:
        reason = self._access_policy.refusal(stream.peer_id, await stream.receive(MAX_SHOWN, SMALL_S))
        await stream.send(pack(AdmissionReply(admission=self._access_policy.ticket if not reason else b"", reason=reason)), SMALL_S)

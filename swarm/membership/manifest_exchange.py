"""How a manifest comes to a newcomer: members serve it, and it is checked against the id in the
link.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.manifest import MANIFEST_PROTOCOL, Manifest, check_swarm, open_manifest
from shoal.swarm.p2p.addresses import by_peer
from shoal.swarm.p2p.messages import ask, receive_message, send_message
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.tasks import stop
from shoal.swarm.wire.messages import ManifestReply, ManifestRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

MANIFEST_S = 30.0
"""For the manifest, from whichever peer hands it out: a silent one is asked three times."""
MESSAGE_S = 10.0
"""For one small message, and to open a stream."""
ASK_AGAIN_S = 1.0
"""Before a peer that did not answer is asked again, doubled each time."""
ASK_AGAIN_MAX_S = 8.0
LOOK_S = 0.25
"""Between two looks at who can be asked."""
STOP_S = 5.0
"""For a search that is over to end its streams."""
MAX_ASKED = 16
"""Peers that are asked at once."""
MAX_KEPT = 256
"""Peers of which it is kept what came of asking them."""
MAX_NAMED = 4
"""Peers in the sentence that says what was tried."""


def serve_manifest(host: Host, swarm: str, sealed: bytes) -> None:
    """Serve the sealed manifest to callers that ask for this swarm."""

    async def answer(stream: Stream) -> None:
        request = await receive_message(stream, ManifestRequest, MESSAGE_S)
        reply = ManifestReply(manifest=sealed, swarm=swarm, reason="")
        if request.swarm != swarm:
            reason = f"this peer belongs to swarm {swarm}"
            reply = ManifestReply(manifest=None, swarm=swarm, reason=reason)
        await send_message(stream, reply, MESSAGE_S)

    host.serve(MANIFEST_PROTOCOL, answer)


class ManifestSearch:
    """Search for the manifest of ``swarm`` among the peers that ``candidates()`` returns.

    All of them are asked at once, and each again after a pause: a member may be busy, starting, or
    about to leave. One that belongs to another swarm is not asked again.

    ``open_stream``: opens a stream of `MANIFEST_PROTOCOL` to a peer; raises NetworkError, OSError
    or EOFError.
    """

    def __init__(
        self,
        swarm: str,
        candidates: Callable[[], Collection[str]],
        open_stream: Callable[[str], Awaitable[Stream]],
    ) -> None:
        self._swarm = swarm
        self._candidates = candidates
        self._open_stream = open_stream
        self.failed = Newest[str, str](MAX_KEPT)
        """Why each peer that was asked in vain did not answer, as of the last time."""
        self.refused = Newest[str, MessageError](MAX_KEPT)
        """What was wrong with the answer of each peer that is not asked again."""
        self._pauses_s = Newest[str, float](MAX_KEPT)

    async def run(self) -> bytes:
        """Return the sealed manifest, whose hash was verified; the caller sets the deadline.

        Raises MessageError as soon as all candidates have given a wrong answer.
        """
        found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        asking: dict[str, asyncio.Task[None]] = {}
        try:
            while not found.done():
                wanted = [peer for peer in self._candidates() if peer not in self.refused]
                for peer in wanted:
                    if peer not in asking:
                        asking[peer] = asyncio.create_task(self._ask_once(peer, found))
                if self.refused and not wanted:
                    raise next(iter(self.refused.values()))
                await asyncio.wait([found], timeout=LOOK_S)
                for peer, task in list(asking.items()):
                    if task.done():
                        asking.pop(peer).result()  # raises what is a fault of this code
            return found.result()
        finally:
            await stop(*asking.values())

    async def _ask_once(self, peer: str, found: asyncio.Future[bytes]) -> None:
        """Ask a peer, and set ``found`` to its answer; after a failure end when it may be asked
        again.
        """
        self.failed.setdefault(peer, "gave no answer yet")
        try:
            sealed = await self._ask(peer)
        except MessageError as error:
            self.refused[peer] = error
        except (NetworkError, OSError, EOFError) as error:
            self.failed[peer] = str(error).rstrip(".") or type(error).__name__
            pause_s = self._pauses_s.get(peer, ASK_AGAIN_S)
            self._pauses_s[peer] = min(2 * pause_s, ASK_AGAIN_MAX_S)
            await asyncio.sleep(pause_s)
        else:
            if not found.done():
                found.set_result(sealed)

    async def _ask(self, peer: str) -> bytes:
        with contextlib.closing(await self._open_stream(peer)) as stream:
            request = ManifestRequest(swarm=self._swarm)
            reply = await ask(stream, request, ManifestReply, MESSAGE_S)
        if reply.manifest is None:
            raise MessageError(
                f"Wrong swarm id: the peer {peer} belongs to swarm {reply.swarm}, the link asks "
                f"for {self._swarm}; ask for a fresh link."
            )
        check_swarm(reply.manifest, self._swarm)
        return reply.manifest


def fetch_manifest(host: Host, link: Link, timeout: float = MANIFEST_S) -> tuple[bytes, Manifest]:
    """Return the manifest of the swarm of ``link``, sealed and opened, from a member that
    ``host`` knows.

    Raises MessageError (none handed it out, and one is in another swarm, or the swarm speaks
    another version) or NetworkError (none answered within ``timeout`` seconds).
    """

    def candidates() -> dict[str, tuple[str, ...]]:
        """Return the peers to ask, and the addresses to dial each: those by which this node
        entered, then the link's, then those heard of since.
        """
        addresses = by_peer([*link.bootstrap, *host.known()])
        known = {*host.seeds(), host.peer_id}
        peers = [peer for peer in dict.fromkeys([*host.entry(), *addresses]) if peer not in known]
        return {peer: tuple(addresses.get(peer, ())) for peer in peers[:MAX_ASKED]}

    async def open_stream(peer: str) -> Stream:
        addresses = candidates().get(peer, ())
        return await host.open(peer, MANIFEST_PROTOCOL, addresses=addresses, timeout=MESSAGE_S)

    async def searched() -> bytes:
        search = ManifestSearch(link.swarm, candidates, open_stream)
        try:
            async with asyncio.timeout(timeout):
                return await search.run()
        except TimeoutError:
            if search.refused:
                raise next(iter(search.refused.values())) from None
            raise NetworkError(_nobody_answered(search.failed, candidates(), timeout)) from None

    sealed = host.call(searched(), timeout + STOP_S)
    return sealed, open_manifest(sealed, link.swarm)


def _nobody_answered(
    failed: Mapping[str, str], addresses: Mapping[str, Sequence[str]], seconds: float
) -> str:
    """Return which peers were asked for ``seconds``, and why each did not answer."""
    tried = []
    for peer, why in list(failed.items())[:MAX_NAMED]:
        tried.append(f"{next(iter(addresses.get(peer, ())), peer)}: {why}")
    if len(failed) > MAX_NAMED:
        tried.append(f"and {len(failed) - MAX_NAMED} more")
    return (
        f"No peer served the swarm's manifest within {seconds:g} s, asked again and again "
        f"({'; '.join(tried)}): they may be busy, so try again, or ask for a fresh link."
    )

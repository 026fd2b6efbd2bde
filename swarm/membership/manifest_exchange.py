"""How a manifest comes to a newcomer: members serve it, and it is checked against the id in the
link.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.manifest import MANIFEST_PROTOCOL, Manifest, open_manifest
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.messages import ask, receive_message, send_message
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.tasks import running
from shoal.swarm.wire.messages import ManifestReply, ManifestRequest

MESSAGE_S = 10.0
"""For one small message."""


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


def fetch_manifest(host: Host, link: Link, timeout: float = 20.0) -> tuple[bytes, Manifest]:
    """Ask the peers by which this node entered, and the link's, at once; return this swarm's
    manifest, sealed and opened.

    Raises MessageError (none handed it out, and one is in another swarm or speaks another version)
    or NetworkError (none answered).
    """

    async def ask_peer(address: str, dial: tuple[str, ...]) -> tuple[bytes, Manifest]:
        try:
            opening = host.open(
                address.rpartition("/p2p/")[2],
                MANIFEST_PROTOCOL,
                addresses=dial,
                timeout=MESSAGE_S,
            )
            with contextlib.closing(await opening) as stream:
                request = ManifestRequest(swarm=link.swarm)
                reply = await ask(stream, request, ManifestReply, MESSAGE_S)
        except NetworkError as error:
            raise NetworkError(f"{address}: {error}") from error
        if reply.manifest is None:
            raise MessageError(
                f"Wrong swarm id: the peer {address} belongs to swarm {reply.swarm}, the link asks "
                f"for {link.swarm}; ask for a fresh link."
            )
        return reply.manifest, open_manifest(reply.manifest, link.swarm)

    async def first() -> tuple[bytes, Manifest]:
        problem = ""
        wrong = None
        async with running(*itertools.starmap(ask_peer, sources.items())) as asked:
            for answer in asyncio.as_completed(asked):
                try:
                    found: tuple[bytes, Manifest] = await answer
                    return found
                except NetworkError as error:
                    problem = str(error)
                except MessageError as error:
                    wrong = wrong or error
        raise wrong or NetworkError(
            f"No peer of the link served the swarm's manifest ({problem}); ask for a fresh link."
        )

    sources: dict[str, tuple[str, ...]] = dict.fromkeys(host.entry(), ())
    known = {*host.entry(), *host.seeds()}
    for address in link.bootstrap:
        if address.rpartition("/p2p/")[2] not in known:
            sources[address] = (address,)
    return host.call(first(), timeout)

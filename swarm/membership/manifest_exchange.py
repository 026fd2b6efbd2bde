"""Serving the swarm's manifest, and fetching it, checked against the swarm id in the link.

For the weights to start from see `shoal.swarm.state`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.manifest.manifest import MANIFEST_PROTOCOL, Manifest, open_manifest
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.join import ManifestReply, ManifestRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

SMALL_S = 10.0  # seconds for one small message


def serve_manifest(host: Host, swarm: str, sealed: bytes) -> None:
    """Serve the sealed manifest to callers that ask for this swarm."""

    async def answer(stream: Stream) -> None:
        request = unpack(await stream.receive(ManifestRequest.LIMIT, SMALL_S), ManifestRequest)
        known = request.swarm == swarm
        reason = "" if known else f"this peer belongs to swarm {swarm}"
        await stream.send(pack(ManifestReply(manifest=sealed if known else None, swarm=swarm, reason=reason)), SMALL_S)

    host.serve(MANIFEST_PROTOCOL, answer)


def fetch_manifest(host: Host, link: Link, timeout: float = 20.0) -> tuple[bytes, Manifest]:
    """Ask the peers by which this node entered, and the link's, at once; return this swarm's manifest, sealed and opened.

    Raises:
        MessageError: none handed it out, and one is in another swarm or speaks another version.
        NetworkError: none answered.
    """

    async def ask(peer: str, addresses: tuple[str, ...]) -> ManifestReply:
        stream = await host.open(peer, MANIFEST_PROTOCOL, addresses=addresses, timeout=SMALL_S)
        try:
            await stream.send(pack(ManifestRequest(swarm=link.swarm)), SMALL_S)
            return unpack(await stream.receive(ManifestReply.LIMIT, SMALL_S), ManifestReply)
        finally:
            stream.close()

    async def first() -> tuple[bytes, Manifest]:
        problem, wrong = "", None
        asked = {asyncio.ensure_future(ask(address.rpartition("/p2p/")[2], dial)): address for address, dial in sources.items()}
        try:
            while asked:
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in asked if task.done()]:
                    address = asked.pop(task)
                    try:
                        reply = task.result()
                        if reply.manifest is not None:
                            return reply.manifest, open_manifest(reply.manifest, link.swarm)
                        wrong = wrong or MessageError(
                            f"Wrong swarm id: the peer {address} belongs to swarm {reply.swarm}, the link asks for {link.swarm}; "
                            "ask for a fresh link."
                        )
                    except NetworkError as error:
                        problem = f"{address}: {error}"
                    except MessageError as error:
                        wrong = wrong or error
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise wrong or NetworkError(f"No peer of the link served the swarm's manifest ({problem}); ask for a fresh link.")

    seeds, entry = host.seeds(), host.entry()
    sources = dict.fromkeys(entry, ()) | {a: (a,) for a in link.bootstrap if a.rpartition("/p2p/")[2] not in (*entry, *seeds)}
    return host.call(first(), timeout)

"""Entering a swarm, or looking into it: the manifest, checked against the id in the link, and
admission, where that is needed.

Two peers of an invitation-only swarm that first meet show each other their admissions. The
directory holds the same, but a newcomer asks for weights before it has a record there, and peers
read it at different moments. A peer that has shown no admission is served nothing but this and the
manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence

from shoal.swarm.access.invitation import MAX_SHOWN, admission
from shoal.swarm.access.link import Link
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import MANIFEST_PROTOCOL, Manifest, open_manifest
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.records import MemberValidator
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.resource_manager import ADMISSION_PROTOCOL, FREE
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import running
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.messages import AdmissionReply, ManifestReply, ManifestRequest, Member

MESSAGE_S = 5.0  # for one small message
# seconds after which a peer is shown the admission again: it may have been restarted meanwhile
AGAIN_S = 300.0
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
        if now - self._met.get(peer, -AGAIN_S) < AGAIN_S and self._access_policy.admits(peer):
            return
        stream = await self._host.open(
            peer, ADMISSION_PROTOCOL, addresses=addresses, timeout=timeout
        )
        with contextlib.closing(stream):
            try:
                await stream.send(self._access_policy.ticket, MESSAGE_S)
                reply = unpack(
                    await stream.receive(AdmissionReply.LIMIT, MESSAGE_S), AdmissionReply
                )
            except MessageError as error:
                raise NetworkError(
                    f"peer {short(peer)} could not be shown this node's invitation ({error})."
                ) from error
        if reply.reason:
            raise NetworkError(
                f"peer {short(peer)} does not let this node in: {reply.reason.rstrip('.')}."
            )
        if problem := self._access_policy.refusal(peer, reply.admission):
            raise NetworkError(f"peer {short(peer)} is not met: {problem}")
        self._met[peer] = now

    async def _answer(self, stream: Stream) -> None:
        reason = self._access_policy.refusal(
            stream.peer_id, await stream.receive(MAX_SHOWN, MESSAGE_S)
        )
        await stream.send(
            pack(
                AdmissionReply(
                    admission=self._access_policy.ticket if not reason else b"", reason=reason
                )
            ),
            MESSAGE_S,
        )


MANIFEST_S = 10.0  # for one small message


def serve_manifest(host: Host, swarm: str, sealed: bytes) -> None:
    """Serve the sealed manifest to callers that ask for this swarm."""

    async def answer(stream: Stream) -> None:
        request = unpack(await stream.receive(ManifestRequest.LIMIT, MANIFEST_S), ManifestRequest)
        known = request.swarm == swarm
        reason = "" if known else f"this peer belongs to swarm {swarm}"
        await stream.send(
            pack(ManifestReply(manifest=sealed if known else None, swarm=swarm, reason=reason)),
            MANIFEST_S,
        )

    host.serve(MANIFEST_PROTOCOL, answer)


def fetch_manifest(host: Host, link: Link, timeout: float = 20.0) -> tuple[bytes, Manifest]:
    """Ask the peers by which this node entered, and the link's, at once; return this swarm's
    manifest, sealed and opened.

    Raises MessageError (none handed it out, and one is in another swarm or speaks another version)
    or NetworkError (none answered).
    """

    async def ask(address: str, dial: tuple[str, ...]) -> tuple[bytes, Manifest]:
        try:
            opening = host.open(
                address.rpartition("/p2p/")[2],
                MANIFEST_PROTOCOL,
                addresses=dial,
                timeout=MANIFEST_S,
            )
            with contextlib.closing(await opening) as stream:
                await stream.send(pack(ManifestRequest(swarm=link.swarm)), MANIFEST_S)
                reply = unpack(await stream.receive(ManifestReply.LIMIT, MANIFEST_S), ManifestReply)
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
        async with running(*itertools.starmap(ask, sources.items())) as asked:
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

    seeds = host.seeds()
    entry = host.entry()
    sources = dict.fromkeys(entry, ()) | {
        a: (a,) for a in link.bootstrap if a.rpartition("/p2p/")[2] not in (*entry, *seeds)
    }
    return host.call(first(), timeout)


READ_S = 15.0  # to read the directory
# of a visitor's view: eight buckets, whose some 250 members tell the swarm's size to 6 %, one's 32
# to 18 %
VISITOR_BREADTH = 3


def start_unconnected(identity: Identity, link: Link | None, listen: Sequence[str]) -> Host:
    """Start a host that meets nobody yet, for a visit to the swarm of ``link``.

    Raises StartupError.
    """
    validator = None if link is None else MemberValidator(link.swarm)
    return Host.start(identity, listen=listen, validator=validator, light=True, must_join=False)


@contextlib.contextmanager
def connected(link: Link) -> Iterator[tuple[Identity, Host, Manifest]]:
    """Start a host in the swarm of ``link`` and fetch the manifest, which an invitation-only swarm
    shows to everybody.

    Raises StartupError, NetworkError or MessageError.
    """
    identity = Identity.ephemeral()
    host = Host.start(
        identity,
        bootstrap=link.bootstrap,
        validator=MemberValidator(link.swarm),
        light=True,
        swarm=link.swarm,
    )
    try:
        yield identity, host, fetch_manifest(host, link)[1]
    finally:
        host.close()


def open_directory(identity: Identity, host: Host, link: Link, manifest: Manifest) -> Directory:
    """Open the directory of a swarm, showing the invitation in ``link`` to peers of an
    invitation-only one; read it once.

    Raises NetworkError or AdmissionError.
    """
    access_policy = AccessPolicy(identity.peer_id)
    if manifest.invite_only:
        ticket = admission(link.invite, identity) if link.invite else b""
        access_policy = AccessPolicy(
            identity.peer_id, swarm=link.swarm, creator=manifest.creator, ticket=ticket
        )
        host.introduce = AdmissionHandshake(host, access_policy).before
    directory = Directory(
        host,
        identity,
        link.swarm,
        access_policy=access_policy,
        met=host.met,
        bucket=manifest.bucket,
        epoch_s=manifest.epoch_s,
        breadth=VISITOR_BREADTH,
    )
    try:
        directory.refresh(READ_S)
    except BaseException:
        directory.close()
        raise
    return directory


@contextlib.contextmanager
def visited(link: Link) -> Iterator[tuple[Host, Manifest, dict[str, Member], int]]:
    """Look into the swarm of ``link``: a host that is no member, the manifest, the members, and how
    many there are.

    In a swarm of buckets those of eight buckets are returned, and the number is estimated from
    them. In an invitation-only swarm an invitation in the link also lets the host fetch from peers
    that do not know it.

    Raises StartupError, NetworkError, MessageError or AdmissionError.
    """
    with connected(link) as (identity, host, manifest):
        directory = open_directory(identity, host, link, manifest)
        try:
            yield host, manifest, directory.members(), directory.size()
        finally:
            directory.close()

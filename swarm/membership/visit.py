"""Looking into a swarm without being a member.

with visited(link) as (host, manifest, members, size):
    print(manifest.name, size)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from shoal.swarm.access.invitation import admission
from shoal.swarm.access.link import Link
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.admission import AdmissionHandshake
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.manifest_exchange import fetch_manifest
from shoal.swarm.membership.records import MemberValidator
from shoal.swarm.p2p.host import Host
from shoal.swarm.wire.messages import Member

READ_S = 15.0
"""To read the directory."""
VISITOR_BREADTH = 3
"""Of a visitor's view: eight buckets, whose some 250 members tell the swarm's size to 6 %, one's 32
to 18 %.
"""


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
def visited(
    link: Link, admitted: Callable[[Link, Manifest, str], Link] | None = None
) -> Iterator[tuple[Host, Manifest, dict[str, Member], int]]:
    """Look into the swarm of ``link``: a host that is no member, the manifest, the members, and how
    many there are.

    In a swarm of buckets those of eight buckets are returned, and the number is estimated from
    them. In an invitation-only swarm an invitation in the link also lets the host fetch from peers
    that do not know it: ``admitted(link, manifest, the visitor's id)`` returns a link that has one,
    which is checked, also for who uses it already.

    Raises StartupError, NetworkError, MessageError or AdmissionError.
    """
    with connected(link) as (identity, host, manifest):
        if admitted is not None:
            link = admitted(link, manifest, identity.peer_id)
        directory = open_directory(identity, host, link, manifest)
        try:
            if admitted is not None:
                directory.access_policy.check_own("This command counts as a peer of its own, and")
            yield host, manifest, directory.members(), directory.size()
        finally:
            directory.close()

"""A look into a swarm without being a member of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shoal.swarm.access.invitation import admission
from shoal.swarm.access.link import Link
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.identity import Identity
from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.membership.admission import AdmissionHandshake
from shoal.swarm.membership.dht_record import MemberValidator
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.manifest_exchange import fetch_manifest
from shoal.swarm.p2p.host import Host
from shoal.swarm.wire.member import Member


@contextlib.contextmanager
def visited(link: Link) -> Iterator[tuple[Host, Manifest, dict[str, Member]]]:
    """A look into the swarm of ``link``: a host that is no member, the manifest, the members. StartupError and others.

    Of a swarm by invitation only an invitation in the link lets it fetch, too, from who does not know its holder as another peer.
    """
    identity = Identity.ephemeral()
    host = Host.start(identity, bootstrap=link.bootstrap, validator=MemberValidator(link.swarm), light=True, swarm=link.swarm)
    try:
        _, manifest = fetch_manifest(host, link)
        access_policy = AccessPolicy(identity.peer_id)
        if manifest.invite_only:
            ticket = admission(link.invite, identity) if link.invite else b""
            access_policy = AccessPolicy(identity.peer_id, swarm=link.swarm, creator=manifest.creator, ticket=ticket)
            host.introduce = AdmissionHandshake(host, access_policy).before
        directory = Directory(host, identity, link.swarm, access_policy=access_policy)
        try:
            directory.refresh(15.0)
            yield host, manifest, directory.members()
        finally:
            directory.close()
    finally:
        host.close()

"""Being a member of a swarm: let in, on its network, in its directory, with its manifest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shoal.swarm.access.invitation import admission
from shoal.swarm.access.link import Link, address_problem
from shoal.swarm.access.policy import Door, Lists
from shoal.swarm.errors import AdmissionError
from shoal.swarm.gossip.body_store import MAX_SHELF
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import Identity, is_peer_id
from shoal.swarm.manifest.manifest import Manifest, open_manifest, swarm_id
from shoal.swarm.membership.admission import Introductions
from shoal.swarm.membership.dht_record import MemberValidator
from shoal.swarm.membership.directory import MAX_ADDRESSES, Directory
from shoal.swarm.membership.manifest_exchange import fetch_manifest, serve_manifest
from shoal.swarm.membership.seed_announcer import Presence
from shoal.swarm.p2p.daemon_process import Relay
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, DialBack
from shoal.swarm.p2p.throughput import SPEED_PROTOCOL, SpeedTest
from shoal.swarm.wire.member import Member

SHOAL_VERSION = "0.1.0"
OWN_LOOP = "own-loop"
"""The task of a swarm whose members bring training loops of their own (swarm/session.py)."""
SEED_S = 5.0  # seconds that telling the seeds may take before the link is shown
READ_S = 10.0  # seconds for the directory, to see who came by the same invitation
BYTES_OF_MBIT = 1e6 / 8


@dataclass(frozen=True)
class Place:
    """Where a node is on the network, whom it meets there, and how much others may take up."""

    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",)
    announce: Sequence[str] = ()
    bootstrap: Sequence[str] = ()
    """Seeds or members besides those of the link."""
    relay: Relay = "auto"
    known: Path | None = None
    """A file that keeps addresses of peers from run to run."""
    allow: Sequence[str] = ()
    """Peer ids: if there are any, nobody else is met."""
    deny: Sequence[str] = ()
    """Peer ids that are never met."""
    upload: float = 0.0
    """Megabits a second that this node sends at most; 0: no bound."""
    models_per_hour: float = 60.0
    """How many times the model's size one peer may download from this node in an hour."""
    shelf: int = MAX_SHELF
    """Bytes of own gossiped records that are kept to be fetched."""


@dataclass
class Membership:
    """A node that is on the network of its swarm."""

    identity: Identity
    host: Host
    directory: Directory
    swarm: str
    sealed: bytes
    manifest: Manifest
    presence: Presence
    place: Place

    def refused(self) -> dict[str, int]:
        """Reason -> what of others' was refused since this node's start: streams and calls (swarm/entrance.py), and gossiped
        records (swarm/gossip.py). For any thread.
        """
        found = Counter(self.host.entrance.refused())
        if "gossip" in self.__dict__:  # not made only to be asked
            found.update(self.gossip.refused())
        return dict(sorted(found.items()))

    def news(self) -> str:
        """One sentence when this node's invitation is about to expire, and when it has; else nothing."""
        return self.directory.door.news()

    def link(self) -> Link:
        """The link by which others join: through its seeds, who are told of it first, and this node's addresses."""
        self.presence.report(SEED_S)
        seeds = [address for addresses in self.host.seeds().values() for address in addresses[:2]][: MAX_ADDRESSES // 2]
        own = [address for address in self.host.addresses() if address_problem(address) is None]
        return Link(self.swarm, (*seeds, *own[: MAX_ADDRESSES - len(seeds)]))

    @cached_property
    def gossip(self) -> Gossip:
        """The one gossip of this node: what is too large for it is handed out under one protocol name."""
        at = self.directory
        return Gossip(
            self.host, self.identity, self.swarm, addresses=at.addresses, door=at.door, look=at.look, shelf=self.place.shelf
        )

    def close(self) -> None:
        """Leave the network."""
        self.presence.report(1.0)  # after `Directory.leave` this says goodbye
        self.presence.close()
        self.directory.close()
        self.host.close()


def create(identity: Identity, sealed: bytes, place: Place) -> Membership:
    """Start the first node of the swarm of ``sealed``.

    Raises:
        AdmissionError: it is by invitation only, and another's.
        StartupError: the node does not get onto the network.
    """
    manifest, swarm = open_manifest(sealed), swarm_id(sealed)
    if manifest.invite_only and manifest.creator != identity.peer_id:
        raise AdmissionError(
            f"The swarm {manifest.name!r} is by invitation only, and this node's key is not its creator's ({manifest.creator}): "
            "join by a link with an invitation, or begin a new swarm with --resume-from."
        )
    door = _door(identity, place)
    host = _start(identity, swarm, place, place.bootstrap, door, must_join=False)
    return _membership(identity, host, swarm, sealed, manifest, place, door)


def join(identity: Identity, link: Link, place: Place, sealed: bytes | None = None) -> Membership:
    """Start a node in the swarm of ``link``. A ShoalError, and nothing left running.

    ``sealed``: the swarm's manifest, if this node was in it before. Nobody need answer then: it may be the first to come back.
    """
    ticket = admission(link.invite, identity) if link.invite else b""
    door = _door(identity, place)
    bootstrap = (*link.bootstrap, *place.bootstrap)
    host = _start(identity, link.swarm, place, bootstrap, door, must_join=sealed is None)
    try:
        if sealed is None:
            sealed, manifest = fetch_manifest(host, link)
        else:
            manifest = open_manifest(sealed, link.swarm)
        membership = _membership(identity, host, link.swarm, sealed, manifest, place, door, ticket)
        if manifest.invite_only:
            membership.directory.door.check_own()  # what the invitation itself says
            membership.directory.refresh(READ_S)
            membership.directory.door.check_own()  # and whether others came by it
        return membership
    except BaseException:
        host.close()
        raise


def _door(identity: Identity, place: Place) -> Door:
    """The node's own lists; the swarm's manifest is not known yet."""
    wrong = next((entry for entry in (*place.allow, *place.deny) if not is_peer_id(entry)), None)
    if wrong is not None:
        raise AdmissionError(f"{wrong[:60]!r} is no peer id: correct the list of those who are allowed or denied.")
    return Door(identity.peer_id, lists=Lists(frozenset(place.allow), frozenset(place.deny)))


def _start(
    identity: Identity, swarm: str, place: Place, bootstrap: Sequence[str], door: Door, *, must_join: bool = True
) -> Host:
    return Host.start(
        identity,
        listen=place.listen,
        announce=place.announce,
        bootstrap=tuple(dict.fromkeys(bootstrap)),
        validator=MemberValidator(swarm),
        relay=place.relay,
        swarm=swarm,
        known=place.known,
        must_join=must_join,
        door=door,
        upload=place.upload * BYTES_OF_MBIT,
    )


def _membership(
    identity: Identity, host: Host, swarm: str, sealed: bytes, manifest: Manifest, place: Place, door: Door, ticket: bytes = b""
) -> Membership:
    if manifest.invite_only:
        door = Door(identity.peer_id, lists=door.lists, swarm=swarm, creator=manifest.creator, ticket=ticket)
        host.entrance.door = door
        host.introduce = Introductions(host, door).before
    serve_manifest(host, swarm, sealed)
    host.serve(DIAL_PROTOCOL, DialBack().answer)
    host.serve(SPEED_PROTOCOL, SpeedTest().answer)
    directory = Directory(host, identity, swarm, door=door)
    host.entrance.known = directory.knows
    return Membership(identity, host, directory, swarm, sealed, manifest, Presence(host, directory, identity, swarm), place)


def least_used(members: Mapping[str, Member], shards: int, peer: str) -> int:
    """The shard, of so many, that the fewest others hold; ties fall differently on each peer."""
    held = Counter(m.shard for m in members.values() if m.shards == shards and m.peer != peer)

    def preference(index: int) -> tuple[int, bytes]:
        return held[index], hashlib.sha256(f"{peer}:{index}".encode()).digest()

    return min(range(shards), key=preference)

"""Membership: a node on the network of its swarm, admitted, with the swarm's manifest and
directory.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shoal.swarm.access.invitation import MAX_SHOWN, admission
from shoal.swarm.access.link import Link
from shoal.swarm.access.policy import AccessPolicy, PeerLists
from shoal.swarm.errors import AdmissionError
from shoal.swarm.gossip.bodies import MAX_STORED
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import Identity, is_peer_id
from shoal.swarm.manifest import Manifest, open_manifest, swarm_id
from shoal.swarm.membership.admission import AdmissionHandshake
from shoal.swarm.membership.change_keeper import ChangeKeeper
from shoal.swarm.membership.clock_check import ClockCheck
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.link_addresses import lasting_link
from shoal.swarm.membership.manifest_exchange import fetch_manifest, serve_manifest
from shoal.swarm.membership.peer_exchange import PeerExchange
from shoal.swarm.membership.records import MemberValidator
from shoal.swarm.membership.seed_announcer import SeedAnnouncer
from shoal.swarm.p2p.daemon_process import Relay
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, ReachabilityProbe
from shoal.swarm.p2p.throughput import SPEED_PROTOCOL, ThroughputProbe
from shoal.swarm.repeats import Repeats

OWN_LOOP = "own-loop"
"""Task of a swarm whose members bring training loops of their own
(`shoal.swarm.training.session.Session`).
"""
REPORT_LEAVE_S = 1.0  # to tell the seeds that this node leaves
SEED_S = 5.0  # that the report to the seeds may take before the link is shown
TWIN_S = 60.0  # until another node with this one's key is named again
READ_S = 10.0  # to read the directory, for others that were admitted by the same invitation
BYTES_OF_MBIT = 1e6 / 8


def installed_version() -> str:
    """Return the version of the installed distribution; ``0+unknown`` in a checkout that is not
    installed.
    """
    try:
        return importlib.metadata.version("shoal")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


SHOAL_VERSION = installed_version()


@dataclass(frozen=True)
class NetworkOptions:
    """Options of a node on the network: its addresses, the peers it meets, and what others may use
    of it.
    """

    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",)
    announce: Sequence[str] = ()
    bootstrap: Sequence[str] = ()  # bootstrap nodes or members besides those of the link
    relay: Relay = "auto"
    known: Path | None = None  # file that keeps addresses of peers from run to run
    allow: Sequence[str] = ()  # peer ids; if there are any, no other peer is met
    deny: Sequence[str] = ()  # peer ids that are never met
    upload: float = 0.0  # most megabits a second that this node sends; 0: unlimited
    # data that one peer may download from this node in an hour, in multiples of the model's size
    models_per_hour: float = 60.0
    body_store: int = (
        MAX_STORED  # bytes of this node's gossiped records that are kept for others to fetch
    )


@dataclass
class Membership:
    """A node that is a member of its swarm."""

    identity: Identity
    host: Host
    directory: Directory
    swarm: str
    sealed: bytes
    manifest: Manifest
    announcer: SeedAnnouncer
    peers: PeerExchange
    network: NetworkOptions
    clock: ClockCheck
    changes: ChangeKeeper
    _said: Repeats = field(default_factory=Repeats)

    def refused(self) -> dict[str, int]:
        """Return how many streams, calls and records of others were refused since the start, by
        reason. Thread-safe.
        """
        found = Counter(self.host.resource_manager.refused())
        found.update(self.peers.counters.rejected())
        found.update(self.changes.counters.rejected())
        if "gossip" in self.__dict__:  # not started only for this
            found.update(self.gossip.refused())
        return dict(sorted((+found).items()))

    def news(self) -> str:
        """Return one sentence when the invitation is about to expire, when it has, and while the
        clock is wrong or another node has this one's key; else nothing.
        """
        expiry = self.directory.access_policy.expiry_event()
        return expiry or self._twin_said(self.directory.twin()) or self.clock.news()

    def check_alone(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Raise AdmissionError if another node with this one's key is in the swarm; before this one
        announces itself.
        """
        if said := self._twin_said(self.directory.first_twin(should_stop)):
            raise AdmissionError(said)

    def _twin_said(self, address: str) -> str:
        """Return one sentence about another node with this one's key, at ``address``; nothing
        without an address, or too soon.
        """
        if not address or not self._said.due("twin", TWIN_S):
            return ""
        return (
            f"Another node runs with this node's key, {self.identity.peer_id}, at {address}, so "
            "exchanges with both of them fail: stop one of the two, and start it again with a key "
            "of its own (--identity FILE; where the swarm is by invitation, with a new "
            "invitation)."
        )

    def link(self) -> Link:
        """Return `link_now`, after this node was reported to the seeds, so that the link works at
        once.
        """
        self.announcer.report(SEED_S)
        return self.link_now()

    def link_now(self) -> Link:
        """Return the link by which others join, by what is known now: addresses of the seeds, this
        node and other members.

        The link outlives this node. It has no invitation: only the swarm's creator can issue one.
        """
        me = self.identity.peer_id
        host = self.host
        others = {peer: member for peer, member in self.directory.members().items() if peer != me}
        return lasting_link(
            self.swarm, others, seeds=host.seeds(), own=host.addresses(), met=host.met
        )

    @cached_property
    def gossip(self) -> Gossip:
        """This node's gossip.

        There is one, because bodies that are too large for it are served under one protocol name.
        """
        at = self.directory
        return Gossip(
            self.host,
            self.identity,
            self.swarm,
            members=at.reachable,
            is_member=at.vouches,
            addresses=at.addresses,
            access_policy=at.access_policy,
            look=at.look,
            body_store=self.network.body_store,
        )

    def close(self) -> None:
        # After `Directory.leave` this takes the node off the seeds' lists.
        self.announcer.report(REPORT_LEAVE_S)
        self.announcer.close()
        self.peers.close()
        self.clock.close()
        self.changes.close()
        self.directory.close()
        self.host.close()


def create(identity: Identity, sealed: bytes, network: NetworkOptions) -> Membership:
    """Start the first node of the swarm of ``sealed``.

    Raises AdmissionError (it is invitation-only, and this node is not its creator) or StartupError
    (it cannot get on the network).
    """
    manifest = open_manifest(sealed)
    swarm = swarm_id(sealed)
    if manifest.invite_only and manifest.creator != identity.peer_id:
        raise AdmissionError(
            f"The swarm {manifest.name!r} is by invitation only, and this node's key is not its "
            f"creator's ({manifest.creator}): join by a link with an invitation, or begin a new "
            "swarm with --resume-from."
        )
    with _started(identity, swarm, network) as host:
        return _membership(identity, host, swarm, sealed, manifest, network)


def join(
    identity: Identity,
    link: Link,
    network: NetworkOptions,
    sealed: bytes | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Membership:
    """Start a node in the swarm of ``link``. It raises ShoalError, and then leaves nothing running.

    ``sealed``: the swarm's manifest, if this node was a member before. Then no peer need answer:
    this may be the first to return. ``meanwhile``: as for `Host.start`.
    """
    entries = (*link.bootstrap, *network.bootstrap)
    own = f"/p2p/{identity.peer_id}"
    if sealed is None and entries and all(address.endswith(own) for address in entries):
        raise AdmissionError(
            f"The link leads only to the node of this very key, {identity.peer_id}: if that node "
            "runs on another machine, start this one with a key of its own (--identity FILE); if "
            "it has ended, take a link of another member (shoal link), or go on from its "
            "checkpoint (--resume)."
        )
    ticket = _admission(identity, link)
    with _started(
        identity, link.swarm, network, link.bootstrap, must_join=sealed is None, meanwhile=meanwhile
    ) as host:
        if sealed is None:
            sealed, manifest = fetch_manifest(host, link)
        else:
            manifest = open_manifest(sealed, link.swarm)
        membership = _membership(identity, host, link.swarm, sealed, manifest, network, ticket)
        if manifest.invite_only:
            membership.directory.access_policy.check_own()  # what the invitation itself says
            membership.directory.refresh(READ_S)
            membership.directory.access_policy.check_own()  # and whether others were admitted by it
        return membership


def _admission(identity: Identity, link: Link) -> bytes:
    """Return the admission by the invitation in ``link``, kept beside the key, or of one without
    the admission kept earlier.
    """
    kept = (
        None
        if identity.path is None
        else identity.path.with_name(f"{identity.path.name}.{link.swarm}.admission")
    )
    if link.invite:
        ticket = admission(link.invite, identity)
        if kept is not None:
            with contextlib.suppress(OSError):  # then the link with the invitation is needed again
                kept.write_bytes(ticket)
        return ticket
    with contextlib.suppress(OSError):
        return b"" if kept is None else kept.read_bytes()[: MAX_SHOWN + 1]
    return b""


@contextlib.contextmanager
def _started(
    identity: Identity,
    swarm: str,
    network: NetworkOptions,
    bootstrap: Sequence[str] = (),
    must_join: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[Host]:
    """Start a host by the node's own lists, for the manifest is not known yet; close it if the
    block fails. Raises ShoalError.
    """
    wrong = next(
        (entry for entry in (*network.allow, *network.deny) if not is_peer_id(entry)), None
    )
    if wrong is not None:
        raise AdmissionError(
            f"{wrong[:60]!r} is no peer id: correct the list of allowed or denied peers."
        )
    host = Host.start(
        identity,
        listen=network.listen,
        announce=network.announce,
        bootstrap=tuple(dict.fromkeys((*bootstrap, *network.bootstrap))),
        validator=MemberValidator(swarm),
        relay=network.relay,
        swarm=swarm,
        known=network.known,
        must_join=must_join,
        access_policy=AccessPolicy(
            identity.peer_id, lists=PeerLists(frozenset(network.allow), frozenset(network.deny))
        ),
        upload=network.upload * BYTES_OF_MBIT,
        meanwhile=meanwhile,
    )
    try:
        yield host
    except BaseException:
        host.close()
        raise


def _membership(
    identity: Identity,
    host: Host,
    swarm: str,
    sealed: bytes,
    manifest: Manifest,
    network: NetworkOptions,
    ticket: bytes = b"",
) -> Membership:
    access_policy = host.resource_manager.access_policy
    if manifest.invite_only:
        access_policy = AccessPolicy(
            identity.peer_id,
            lists=access_policy.lists,
            swarm=swarm,
            creator=manifest.creator,
            ticket=ticket,
        )
        host.resource_manager.access_policy = access_policy
        host.introduce = AdmissionHandshake(host, access_policy).before
    serve_manifest(host, swarm, sealed)
    host.serve(DIAL_PROTOCOL, ReachabilityProbe().answer)
    host.serve(SPEED_PROTOCOL, ThroughputProbe().answer)
    directory = Directory(
        host,
        identity,
        swarm,
        access_policy=access_policy,
        met=host.met,
        bucket=manifest.bucket,
        epoch_s=manifest.epoch_s,
    )
    host.resource_manager.known = directory.knows
    directory.own_record.traffic = lambda: (host.traffic.sent, host.traffic.received)
    directory.own_record.exchanges = lambda: (host.puncher.punched(), host.traffic.routes.rate())
    announcer = SeedAnnouncer(host, directory, identity, swarm)
    peers = PeerExchange(host, directory, identity, swarm, directory.now)
    return Membership(
        identity,
        host,
        directory,
        swarm,
        sealed,
        manifest,
        announcer,
        peers,
        network,
        ClockCheck(host, directory),
        ChangeKeeper(host, directory, swarm, manifest),
    )

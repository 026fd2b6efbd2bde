"""Being a member of a swarm: on its network, in its directory, with its manifest; and the weights that a newcomer starts from."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optim.codec import Shape
from swarm.daemon_process import Relay
from swarm.directory import MAX_ADDRESSES, Directory
from swarm.errors import NetworkError
from swarm.host import Host
from swarm.identity import Identity
from swarm.link import Link, address_problem
from swarm.manifest import Manifest, open_manifest, swarm_id
from swarm.messages import Member
from swarm.presence import Presence
from swarm.records import MemberValidator
from swarm.welcome import ModelDiffersError, State, fetch_manifest, fetch_state, serve_manifest

SHOAL_VERSION = "0.1.0"
OWN_LOOP = "own-loop"
"""The task of a swarm whose members bring training loops of their own (swarm/session.py)."""
SEED_S = 5.0  # seconds that telling the seeds may take before the link is shown
ASKED = 8  # members whose weights a newcomer asks for, in turn


@dataclass(frozen=True)
class Place:
    """Where a node is on the network, as ``Host.start`` takes it."""

    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",)
    announce: Sequence[str] = ()
    bootstrap: Sequence[str] = ()
    """Seeds or members besides those of the link."""
    relay: Relay = "auto"
    known: Path | None = None
    """A file that keeps addresses of peers from run to run."""


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

    def link(self) -> Link:
        """The link by which others join: through its seeds, who are told of it first, and this node's addresses."""
        self.presence.report(SEED_S)
        seeds = [address for addresses in self.host.seeds().values() for address in addresses[:2]][: MAX_ADDRESSES // 2]
        own = [address for address in self.host.addresses() if address_problem(address) is None]
        return Link(self.swarm, (*seeds, *own[: MAX_ADDRESSES - len(seeds)]))

    def close(self) -> None:
        """Leave the network."""
        self.presence.report(1.0)  # after `Directory.leave` this says goodbye
        self.presence.close()
        self.directory.close()
        self.host.close()


def create(identity: Identity, sealed: bytes, place: Place) -> Membership:
    """Start the first node of the swarm of ``sealed``. StartupError."""
    manifest, swarm = open_manifest(sealed), swarm_id(sealed)
    return _membership(identity, _start(identity, swarm, place, place.bootstrap, must_join=False), swarm, sealed, manifest)


def join(identity: Identity, link: Link, place: Place) -> Membership:
    """Start a node in the swarm of ``link``. StartupError, NetworkError or MessageError, and nothing left running."""
    host = _start(identity, link.swarm, place, (*link.bootstrap, *place.bootstrap))
    try:
        sealed, manifest = fetch_manifest(host, link)
        return _membership(identity, host, link.swarm, sealed, manifest)
    except BaseException:
        host.close()
        raise


def _start(identity: Identity, swarm: str, place: Place, bootstrap: Sequence[str], *, must_join: bool = True) -> Host:
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
    )


def _membership(identity: Identity, host: Host, swarm: str, sealed: bytes, manifest: Manifest) -> Membership:
    serve_manifest(host, swarm, sealed)
    directory = Directory(host, identity, swarm)
    return Membership(identity, host, directory, swarm, sealed, manifest, Presence(host, directory, identity, swarm))


def least_used(members: Mapping[str, Member], shards: int, peer: str) -> int:
    """The shard, of so many, that the fewest others hold; ties fall differently on each peer."""
    held = Counter(m.shard for m in members.values() if m.shards == shards and m.peer != peer)

    def preference(index: int) -> tuple[int, bytes]:
        return held[index], hashlib.sha256(f"{peer}:{index}".encode()).digest()

    return min(range(shards), key=preference)


def catch_up(
    membership: Membership,
    model: str,
    shapes: Sequence[Shape],
    extra: Mapping[str, Sequence[Shape]],
    *,
    begun: bool = True,
) -> State | None:
    """Slow weights, shared outer state and round of a swarm that is under way; None if nobody else has finished a round yet.

    ``begun`` False: from members in their first round too, for who cannot make the weights that the swarm began with. From those
    that still wait only in a swarm of own loops: others hand out nothing before they train.

    Raises:
        ModelDiffersError: this node's model does not fit.
        NetworkError: it is under way, but nobody hands out weights.
    """
    others = [m for peer, m in membership.directory.members().items() if peer != membership.identity.peer_id]
    fits = model == membership.manifest.model
    if fits:
        # Who waits in a later round than 0 has resumed, and is about to train.
        early = () if begun else ("waiting", "training") if membership.manifest.task == OWN_LOOP else ("training",)
        others = [m for m in others if m.model == model and (m.round > 0 or m.state in early)]
    # Where the model does not fit, anybody's header will do: the shapes in it name the difference.
    first = membership.manifest.creator
    givers = [(m.peer, m.addresses) for m in sorted(others, key=lambda m: (-m.round, m.peer != first))[:ASKED]]
    state = fetch_state(membership.host, membership.swarm, model, shapes, givers, extra)
    if not fits:
        raise ModelDiffersError("This node's model does not fit the swarm: use the task, options and version of the swarm.")
    if state is None and givers:
        raise NetworkError("The swarm is training but none of its members handed out the weights to start from: try again.")
    return state

"""The network of a node by its settings: what it creates a swarm or joins one with. Loads nothing that trains."""

from __future__ import annotations

from collections.abc import Callable

from shoal.node.config.links import KNOWN_PEERS
from shoal.node.config.peers import lists
from shoal.node.config.settings import Settings
from shoal.node.training.resources import shares
from shoal.swarm.access.link import Link
from shoal.swarm.identity import Identity
from shoal.swarm.membership import membership
from shoal.swarm.membership.membership import Membership, NetworkOptions


def create(settings: Settings, identity: Identity, sealed: bytes) -> Membership:
    """Start the first node of the swarm of ``sealed``. AdmissionError if that is by invitation only, and another peer's."""
    return membership.create(identity, sealed, network(settings))


def join(
    settings: Settings, identity: Identity, link: Link, sealed: bytes | None = None, meanwhile: Callable[[], object] = lambda: None
) -> Membership:
    """Start a node in the swarm of ``link``. ``sealed``: the manifest, if it was a member before; then no peer need answer.

    ``meanwhile``: as for `Host.start`.

    Raises ShoalError: as ``membership.join``.
    """
    return membership.join(identity, link, network(settings), sealed, meanwhile)


def network(settings: Settings) -> NetworkOptions:
    """Return the network options of the settings; the node also tries the peers that it met in an earlier run."""
    node, access = settings.node, lists(settings.peers)
    return NetworkOptions(
        listen=tuple(node.listen),
        announce=tuple(node.announce),
        bootstrap=tuple(node.bootstrap),
        relay=node.relay,
        known=node.run_folder / KNOWN_PEERS,
        allow=tuple(sorted(access.allow)),
        deny=tuple(sorted(access.deny)),
        upload=node.upload,
        models_per_hour=settings.peers.models_per_hour,
        body_store=shares(node.ram)[1],
    )

"""The settings, link and ends of one run, and the network that it is to have. Loads nothing that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.node.config.links import KNOWN_PEERS
from shoal.node.config.settings import Settings, peer_lists
from shoal.node.runtime.display import Display
from shoal.node.runtime.signals import ShutdownSignals
from shoal.node.training.resources import shares
from shoal.swarm.access import Link
from shoal.swarm.identity import Identity
from shoal.swarm.membership import membership
from shoal.swarm.membership.membership import Membership, NetworkOptions

if TYPE_CHECKING:
    from shoal.node.parallel.ranks import NodeRanks


# The network of a node by its settings: what it creates a swarm or joins one with. Loads nothing that trains.


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
    node, access = settings.node, peer_lists(settings.peers)
    return NetworkOptions(
        listen=tuple(node.listen),
        announce=tuple(node.announce),
        bootstrap=tuple(node.bootstrap),
        relay=node.relay,
        known=node.run_folder / KNOWN_PEERS,
        allow=tuple(sorted(access.allow)),
        deny=tuple(sorted(access.deny)),
        upload=node.upload,
        body_store=shares(node.ram)[1],
    )


METRICS = "metrics.jsonl"


def _nothing(link: Link) -> None:
    pass


@dataclass
class RunOptions:
    """Settings of a run, and what it reports to. ``link`` None: it creates a swarm."""

    settings: Settings
    link: Link | None
    display: Display
    shutdown: ShutdownSignals
    on_link: Callable[[Link], None] = _nothing
    """Called with the join link as soon as others can use it."""
    baseline: bool = False
    """Train the same once more without any exchange, to compare."""
    keep_rounds: bool = False
    """Keep the slow weights of every round in files."""
    ranks: NodeRanks | None = None
    """Set if this process is rank 0 of several, which do all that is not training."""

    @property
    def folder(self) -> Path:
        return self.settings.node.run_folder

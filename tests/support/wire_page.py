"""docs/wire.md, and the messages that are signed."""

from pathlib import Path

from shoal.swarm.access.invitation import Invitation
from shoal.swarm.changes import Change
from shoal.swarm.gossip.envelope import BodyAnnouncement
from shoal.swarm.manifest import Manifest
from shoal.swarm.topics.attestation import Attestation
from shoal.swarm.topics.policy_versions import PolicyVersion
from shoal.swarm.topics.receipts import Receipts
from shoal.swarm.topics.rollout import Rollout
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.messages import (
    Announcement,
    GroupAverage,
    GroupDecision,
    GroupProbe,
    GroupReady,
    Member,
    Offer,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"

PAGE = (DOCS / "wire.md").read_text(encoding="utf-8")

SEALED = {
    kind.KIND
    for kind in (
        Member,
        Manifest,
        Offer,
        GroupReady,
        GroupProbe,
        GroupDecision,
        GroupAverage,
        BodyAnnouncement,
        Rollout,
        Attestation,
        Invitation,
        Status,
        Announcement,
        Receipts,
        PolicyVersion,
        Change,
    )
}

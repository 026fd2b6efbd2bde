"""Messages of a newcomer: asking for the manifest, and being let in."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import (
    Reason,
    SwarmId,
)


class ManifestRequest(Message):
    """Asks a peer for the signed manifest of its swarm."""

    KIND = "manifest-request"
    swarm: SwarmId


class ManifestReply(Message):
    """The sealed manifest, or None and the reason why not."""

    KIND, LIMIT = "manifest-reply", 64 * KIB
    manifest: Annotated[bytes, Field(max_length=60 * KIB)] | None
    swarm: SwarmId
    reason: Reason = ""


class AdmissionReply(Message):
    """The packed `invitation.Admission` of the one who was shown the caller's; or why the caller is not let in."""

    KIND, LIMIT = "admission-reply", 4 * KIB
    admission: Annotated[bytes, Field(max_length=KIB)] = b""
    reason: Reason = ""

"""Messages of a joining node: the request for the manifest, and admission."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import Reason, SwarmId


class ManifestRequest(Message):
    """Request for the signed manifest of the peer's swarm."""

    KIND = "manifest-request"
    swarm: SwarmId


class ManifestReply(Message):
    """The sealed manifest, or None and the reason."""

    KIND, LIMIT = "manifest-reply", 64 * KIB
    manifest: Annotated[bytes, Field(max_length=60 * KIB)] | None
    swarm: SwarmId
    reason: Reason = ""


class AdmissionReply(Message):
    """The packed `shoal.swarm.access.invitation.Admission` of the answering node; or the reason why the caller is refused."""

    KIND, LIMIT = "admission-reply", 4 * KIB
    admission: Annotated[bytes, Field(max_length=KIB)] = b""
    reason: Reason = ""

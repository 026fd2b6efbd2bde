"""The record of a member in the directory, and the messages of a joining node: the request for the manifest, and admission."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import (
    FAILURES,
    MAX_BLAMED,
    MAX_COUNT,
    Address,
    Count,
    Digest,
    Failure,
    Label,
    Moment,
    PeerId,
    Rate,
    Reach,
    Real,
    Reason,
    Seconds,
    Share,
    ShortLabel,
    Sketch,
    SwarmId,
)

MAX_MISSING = 4  # names of missing members in a record


class Member(Message):
    """One peer's entry in the directory; ``steps_per_s`` in inner steps, ``issued`` in Unix seconds, loss in nats.

    ``tokens_per_s``: recently, without waiting for others; 0 where none are counted. ``mfu``: model FLOPs utilisation, a share of
    the device's published peak; None where it is not known.

    Its exchanges: ``exchange_s``, recent seconds of transfer in one, and ``wait_s``, for which training stood still in a round;
    ``lag``, the inner steps that training goes on during one, ``lag_auto`` if the node chooses that by itself, and ``late``, the
    number of those so far that came after theirs;
    ``failures`` among its last ``exchanges``, by kind, and the peers in most of them (``blamed``). ``missing``: number of the
    ``missing_of`` members that it lost sight of at about the same moment, and some of their names. ``sketch``: the round and
    fragment that it finished last, and a sketch of its slow weights then, where the method keeps them equal on all peers.
    ``reach``: who can dial it, as peers found that it asked, and if nobody can, which way its exchanges take; ``throughput``: the
    bytes a second that these moved each way, 0 where none was large enough to tell.
    ``admission``: its packed `shoal.swarm.access.invitation.Admission`, in a swarm that is by invitation only.
    """

    KIND, LIMIT, AUTHOR = "member", 5 * KIB, "peer"
    swarm: SwarmId
    peer: PeerId
    name: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=8)]
    round: Count
    step: Count
    loss: Real | None
    steps_per_s: Rate
    shard: Annotated[int, Field(ge=0, lt=MAX_COUNT)]
    shards: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    model: Digest
    state: Literal["waiting", "training", "leaving", "done"]
    issued: Moment
    version: Label
    admission: Annotated[bytes, Field(max_length=KIB)] = b""
    exchange_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    lag: Count = 0
    lag_auto: bool = False
    late: Count = 0
    exchanges: Count = 0
    failures: Annotated[tuple[tuple[Failure, Count], ...], Field(max_length=len(FAILURES))] = ()
    blamed: Annotated[tuple[tuple[PeerId, Failure, Count], ...], Field(max_length=MAX_BLAMED)] = ()
    missing: Count = 0
    missing_of: Count = 0
    missing_within_s: Seconds = 0.0
    missing_names: Annotated[tuple[ShortLabel, ...], Field(max_length=MAX_MISSING)] = ()
    tokens_per_s: Rate = 0.0
    mfu: Share | None = None
    sketch: Sketch | None = None
    reach: Reach = "unknown"
    throughput: Rate = 0.0

    @model_validator(mode="after")
    def _shard_exists(self) -> Member:
        if self.shard >= self.shards:
            raise ValueError("shard must be below shards")
        return self


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

"""The manifest: the settings that a swarm's creator fixed for all its peers, signed; its hash is
the swarm's id.

    sealed = seal(Manifest(name="own-loop", ...), creator)
    open_manifest(sealed, swarm_id(sealed))
"""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from shoal.swarm.errors import MessageError, printable
from shoal.swarm.settings.outer import MAX_FRAGMENTS, OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.settings.verification import Terms, VerifySettings
from shoal.swarm.wire.envelope import KIB, Digest, Label, Message, PeerId, peek, unseal

MANIFEST_PROTOCOL = "/shoal/manifest/1"
PROTOCOL = 2
"""How peers exchange and pair; nodes of different protocols cannot train together."""
MIN_BUCKET = 4
MAX_BUCKET = 64
"""Members of a bucket: nodes store no more records of one key."""
MIN_EPOCH_S = 30.0
"""Members need some 19 to publish and read ahead of an epoch."""
MAX_EPOCH_S = 86_400.0
MAX_OPTION_CHARS = 1024
MAX_TITLE_CHARS = 64

OptionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


def _option(value: object) -> object:
    """Check the bounds by hand: a union of types would turn an integer that is too large into a
    float.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must be within 64 bits")
    if isinstance(value, str) and len(value) > MAX_OPTION_CHARS:
        raise ValueError(f"must be at most {MAX_OPTION_CHARS} characters")
    return value


def _bucket(value: int) -> int:
    if value and not MIN_BUCKET <= value <= MAX_BUCKET:
        raise ValueError(f"a bucket holds {MIN_BUCKET} to {MAX_BUCKET} members, or 0: no buckets")
    return value


def _epoch_s(value: float) -> float:
    if not MIN_EPOCH_S <= value <= MAX_EPOCH_S:
        raise ValueError(
            f"an epoch takes {MIN_EPOCH_S:g} to {MAX_EPOCH_S:g} seconds, for members publish and "
            "read ahead of it for 19 of them"
        )
    return value


def _numbers(value: object) -> object:
    """Read numbers that are packed as little-endian u16: a list of more than 16 is refused before
    its content is seen.
    """
    if not isinstance(value, bytes):
        return value
    if len(value) % 2:
        raise ValueError("must be numbers of two bytes")
    return struct.unpack(f"<{len(value) // 2}H", value)


Bucket = Annotated[int, AfterValidator(_bucket)]
EpochSeconds = Annotated[float, AfterValidator(_epoch_s)]
Option = Annotated[int | float | str | bool, BeforeValidator(_option)]


# No slash: a name that the joiner must already have, never the path of a file on its disk.
TASK_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z_][A-Za-z0-9_]*)?$"


class Manifest(Message):
    """Definition of a swarm. Every peer holds the same bytes of it, sealed by the creator.

    Its fields are flat, since the swarm's id is the hash of these bytes.
    """

    KIND = "manifest"
    LIMIT = 48 * KIB
    AUTHOR = "creator"
    name: Label = Field(description="Name of the swarm, for people.")
    created: float = Field(ge=0, description="When it was created, in Unix seconds.")
    creator: PeerId = Field(description="Peer id of the creator, who signed this.")
    protocol: int = Field(
        default=PROTOCOL, ge=1, le=65_535, description="Protocol that the peers speak."
    )
    task: str = Field(
        max_length=256,
        pattern=TASK_NAME,
        description="Name of the task, such as `text` or `module:Class`; every peer must have it "
        "installed already.",
    )
    task_options: dict[OptionName, Option] = Field(
        default_factory=dict,
        max_length=32,
        description="Options of the task that are the same on all peers.",
    )
    outer: OuterSettings = Field(default_factory=OuterSettings, description="The outer optimizer.")
    train: TrainSettings = Field(default_factory=TrainSettings, description="The training run.")
    verify: VerifySettings = Field(
        default_factory=VerifySettings, description="What is claimed, and checked."
    )
    terms: Terms | None = Field(
        default=None, description="How claimed completions are made; none without claims."
    )
    model: Digest = Field(
        description="Hex SHA-256 of names, types and shapes of the averaged parameters, in their "
        "order."
    )
    fragment_of: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)], ...],
        Field(
            max_length=8192,
            description="Fragment of each parameter, in the model's order, if not by layer; empty: "
            "by layer.",
        ),
        BeforeValidator(_numbers),
        PlainSerializer(lambda numbers: struct.pack(f"<{len(numbers)}H", *numbers)),
    ] = ()
    start_when: int = Field(
        default=1, ge=1, le=65_536, description="Number of peers at which training begins."
    )
    shards: int = Field(
        default=1, ge=1, le=65_536, description="Parts that the training data is divided into."
    )
    invite_only: bool = Field(
        default=False,
        description="Whether only the creator, and whom it has invited, may be members.",
    )
    public: bool = Field(
        default=False,
        description="Whether bootstrap nodes list the swarm, so that anybody may find and join it.",
    )
    bucket: Bucket = Field(
        default=0,
        description="Most members that one peer reads and is paired with in an epoch; 0: all.",
    )
    epoch_s: EpochSeconds = Field(
        default=60.0, description="Seconds of an epoch, after which buckets are drawn anew."
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Manifest:
        if self.public and self.invite_only:
            raise ValueError("a swarm is public or invite_only, not both")
        if self.bucket and self.verify.audit_rate:
            raise ValueError(
                "verifiers are drawn among all members, so a swarm that verifies has no buckets: "
                "leave bucket out"
            )
        if self.fragment_of and {*self.fragment_of} != {*range(self.outer.fragments or 1)}:
            raise ValueError(
                "the manifest's fragments are others than those that its parameters are divided "
                "into"
            )
        return self


class Title(NamedTuple):
    """Short description of a swarm for people."""

    name: str
    task: str
    method: str
    fragments: int = 1
    """Exchanges in a round, at most."""


def title_of(sealed: bytes) -> Title:
    """Return the title of a sealed manifest whose hash was verified.

    It checks no setting, so it needs no torch.

    Raises MessageError if the manifest names no task or method.
    """
    fields = peek(sealed, Manifest.LIMIT)
    outer = fields.get("outer")
    if not isinstance(outer, dict):
        outer = {}
    found = fields.get("name"), fields.get("task"), outer.get("method")
    if not all(isinstance(text, str) for text in found):
        raise MessageError("A malformed manifest was refused: it names no task and method.")
    name, task, method = (printable(str(text)[:MAX_TITLE_CHARS]) for text in found)
    fragments = outer.get("fragments")
    if type(fragments) is not int or not 1 <= fragments <= MAX_FRAGMENTS:
        fragments = 1
    return Title(name, task, method, fragments)


def creator_of(sealed: bytes) -> str:
    """Return the peer id of the creator in a sealed manifest whose hash was verified.

    It needs no torch. Raises MessageError if the manifest names none.
    """
    creator = peek(sealed, Manifest.LIMIT).get("creator")
    if not isinstance(creator, str):
        raise MessageError("A malformed manifest was refused: it names no creator.")
    return creator


def is_public(sealed: bytes) -> bool:
    """Return whether a sealed manifest, whose hash was verified, says that its swarm is public.

    It needs no torch. MessageError.
    """
    return peek(sealed, Manifest.LIMIT).get("public") is True


def swarm_id(sealed: bytes) -> str:
    """Return the id of the swarm of a sealed manifest: its SHA-256 in lower-case base32, 52
    characters.
    """
    return base64.b32encode(hashlib.sha256(sealed).digest()).decode().rstrip("=").lower()


def check_swarm(sealed: bytes, expected_id: str) -> None:
    """Raise MessageError unless the sealed manifest is that of the swarm ``expected_id``."""
    if swarm_id(sealed) != expected_id:
        raise MessageError(
            f"The wrong swarm id: the manifest that came belongs to swarm {swarm_id(sealed)}, not "
            f"to {expected_id}: ask for a fresh link."
        )


def open_manifest(
    sealed: bytes, expected_id: str | None = None, *, protocol: int | None = PROTOCOL
) -> Manifest:
    """Return the manifest, verified against its signature and, if given, the swarm id and the
    ``protocol``. Raises MessageError.
    """
    if expected_id is not None:
        check_swarm(sealed, expected_id)
    _, manifest = unseal(sealed, Manifest)
    if protocol is not None and manifest.protocol != protocol:
        where = "here" if manifest.protocol > protocol else "on its creator's node"
        raise MessageError(
            f"The swarm speaks protocol {manifest.protocol}, this node speaks {protocol}: update "
            f"shoal {where}."
        )
    return manifest

"""Invitations of a swarm's creator: how one is issued, shown, and verified.

    text = issue(creator, swarm, lives=86_400.0, uses=3)     # what stands in a link
    shown = admission(text, identity)                        # what a member shows
    entry = entry_of(shown, peer, swarm, creator)            # what another makes of it

    link  = sealed Invitation (+ 32 bytes: the seed of the one-time key), in base64url
    shown = Admission: the sealed Invitation, the time of joining, and the one-time key's signature
            over both and the peer id

An invitation is for one peer id or for the holder of a one-time key, and valid until it expires,
also for members. It admits as many peers at a time as it has uses.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import math
import secrets
import struct
import time
from dataclasses import dataclass
from typing import Annotated

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, model_validator

from shoal.swarm.errors import AdmissionError, MessageError
from shoal.swarm.identity import Identity, verify
from shoal.swarm.wire.envelope import (
    ENVELOPE,
    KIB,
    MAX_COUNT,
    Message,
    Moment,
    Nonce,
    PeerId,
    SwarmId,
    pack,
    seal,
    unpack,
    unseal,
)

MAX_USES = 65_536
MAX_SHOWN = KIB
"""Bytes of an admission, packed."""
MAX_CLOCK_AHEAD_S = 60.0
"""By which the clock of the judging node may be ahead of the creator's."""
SEED_BYTES = 32
CONTEXT = "shoal/entry/1"
LAST_DATE_S = 2**38
"""Unix seconds, beyond which no date is shown as it is."""
ASK = "ask the creator of the swarm for a new link (`shoal invite`)"


class Invitation(Message):
    """An invitation, signed by the creator.

    ``expires`` and ``issued`` in Unix seconds; ``uses``: peers that may use it at a time.

    Exactly one of ``key`` (a one-time key, as a peer id) and ``peer`` (the invited peer) is given.
    """

    KIND = "invitation"
    swarm: SwarmId
    id: Nonce
    issued: Moment
    expires: Moment
    uses: Annotated[int, Field(ge=1, le=MAX_USES)]
    key: PeerId | None = None
    peer: PeerId | None = None

    @model_validator(mode="after")
    def _for_one_or_a_key(self) -> Invitation:
        if (self.key is None) == (self.peer is None):
            raise ValueError("must be for a peer or for a key")
        if self.peer is not None and self.uses != 1:
            raise ValueError("for a peer must be for one use")
        return self


class Admission(Message):
    """A member's proof: its sealed invitation (none: it is the creator), and of one for a key
    ``since`` and ``signature``.

    ``since``: Unix seconds at which the member joined.
    """

    KIND = "admission"
    LIMIT = MAX_SHOWN
    invitation: Annotated[bytes, Field(max_length=KIB - 256)] = b""
    since: Moment = 0.0
    signature: Annotated[bytes, Field(max_length=64)] = b""


@dataclass(frozen=True)
class AdmittedBy:
    """A verified admission; its date, and other users of the same invitation, were not checked."""

    id: bytes
    since: float
    expires: float
    uses: int


def issue(
    identity: Identity,
    swarm: str,
    *,
    lives: float,
    uses: int = 1,
    peer: str | None = None,
    now: float | None = None,
) -> str:
    """Make the text of an invitation by ``identity``, for a link; valid for ``lives`` seconds.

    ``uses``: number of peers that may use it at a time. ``peer``: the only one that may. Raises
    ValueError for invalid arguments.
    """
    for_one = peer is None or uses == 1
    if not 0 < lives < math.inf or not 1 <= uses <= MAX_USES or not for_one:
        raise ValueError(
            f"lives must be positive, uses from 1 to {MAX_USES}, and 1 for a certain peer"
        )
    if now is None:
        now = time.time()
    seed = secrets.token_bytes(SEED_BYTES) if peer is None else b""
    invitation = Invitation(
        swarm=swarm,
        id=secrets.token_bytes(16),
        issued=now,
        expires=min(now + lives, MAX_COUNT),
        uses=uses,
        key=_one_time(seed).peer_id if seed else None,
        peer=peer,
    )
    packed = msgpack.packb([seal(invitation, identity), seed])
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def admission(text: str, identity: Identity, now: float | None = None) -> bytes:
    """Make the packed `Admission` of ``identity`` by the invitation ``text``.

    Raises AdmissionError if the text is damaged.
    """
    sealed, seed = _parts(text)
    try:
        _, invitation = unseal(sealed, Invitation)
    except MessageError as error:
        raise AdmissionError(
            f"The invitation in the link is damaged: copy the whole link again, or {ASK}."
        ) from error
    if invitation.key is None:
        return pack(Admission(invitation=sealed))
    key = _one_time(seed) if len(seed) == SEED_BYTES else None
    if key is None or key.peer_id != invitation.key:
        raise AdmissionError(
            "The key of the invitation in the link is damaged: copy the whole link again, or "
            f"{ASK}."
        )
    if now is None:
        now = time.time()
    since = max(now, invitation.issued)  # a slow clock is no reason to be refused
    signature = key.sign(CONTEXT, _entry(sealed, identity.peer_id, since))
    return pack(Admission(invitation=sealed, since=since, signature=signature))


def invited(text: str) -> str | None:
    """Return the only peer that may use the invitation ``text``; None if any may, or if it is
    damaged.
    """
    try:
        return unseal(_parts(text)[0], Invitation)[1].peer
    except (AdmissionError, MessageError):
        return None


# Every record of a member shows the same one.
@functools.lru_cache(maxsize=4096)
def entry_of(shown: bytes, peer: str, swarm: str, creator: str) -> AdmittedBy | str:
    """Verify the admission that ``peer`` shows; return one sentence if it is invalid.

    `expiry` checks its date.
    """
    if not shown:
        return f"it has no invitation to this swarm, which is by invitation only: {ASK}."
    try:
        found = unpack(shown, Admission)
        signer, invitation = unseal(found.invitation, Invitation)
    except MessageError:
        return f"its invitation is malformed or forged: {ASK}."
    if signer != creator:
        return f"its invitation was not signed by the creator of the swarm: {ASK}."
    if invitation.swarm != swarm:
        return f"its invitation is for swarm {invitation.swarm}, not for {swarm}: {ASK}."
    if invitation.key is None:
        if invitation.peer != peer:
            return (
                f"its invitation is for peer {invitation.peer}, not for {peer}: use that one's "
                f"key file (--identity), or {ASK}."
            )
        return AdmittedBy(invitation.id, 0.0, invitation.expires, 1)
    used = _entry(found.invitation, peer, found.since)
    if not verify(invitation.key, CONTEXT, used, found.signature):
        return f"its invitation was used by another peer, not by {peer}: {ASK}."
    if found.since < invitation.issued:
        return f"its invitation was used before it was made: set the clock by NTP, or {ASK}."
    return AdmittedBy(invitation.id, found.since, invitation.expires, invitation.uses)


def expiry(entry: AdmittedBy, now: float) -> str:
    """Return one sentence if the invitation has expired at ``now``, Unix seconds; else nothing."""
    if now <= entry.expires + MAX_CLOCK_AHEAD_S:
        return ""
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(entry.expires, LAST_DATE_S)))
    return f"its invitation expired on {date} UTC: {ASK}."


def _entry(sealed: bytes, peer: str, since: float) -> bytes:
    return hashlib.sha256(sealed).digest() + struct.pack(">d", since) + peer.encode()


def _one_time(seed: bytes) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(seed))


def _parts(text: str) -> tuple[bytes, bytes]:
    """Return the sealed invitation and the seed in a link's text, which the link's length bounds.

    Raises AdmissionError.
    """
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        parts = msgpack.unpackb(raw, use_list=False, max_ext_len=0, max_map_len=0, max_array_len=2)
        sealed, seed = parts
        are_bytes = isinstance(sealed, bytes) and isinstance(seed, bytes)
        if are_bytes and len(sealed) <= Invitation.LIMIT + ENVELOPE:
            return sealed, seed
    except (binascii.Error, ValueError, TypeError, msgpack.UnpackException):
        pass
    raise AdmissionError(
        f"The invitation in the link is damaged: copy the whole link again, or {ASK}."
    )

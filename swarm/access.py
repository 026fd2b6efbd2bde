"""``shoal://`` links, with the swarm id and a few addresses of peers; invitations; and who is
admitted by them.

    shoal://<swarm id>?peer=/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW…&peer=…&invite=…

    link  = sealed Invitation (+ 32 bytes: the seed of the one-time key), in base64url
    shown = Admission: the sealed Invitation, the time of joining, and the one-time key's signature
    over both and the peer id

An invitation is signed by the swarm's creator, for one peer id or for the holder of a one-time key,
and valid until it expires, also for members. It admits as many peers at a time as it has uses. Why
all nodes admit the same ones: docs/internals.md, "Invitations".
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import hashlib
import ipaddress
import math
import re
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote, unquote

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, model_validator

from shoal.swarm.errors import AdmissionError, LinkError, MessageError, Repeats
from shoal.swarm.identity import Identity, b58decode, is_peer_id, verify
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
MAX_SHOWN = KIB  # bytes of an admission, packed
CLOCK = 60.0  # seconds by which the clock of the judging node may be ahead of the creator's
_CONTEXT = "shoal/entry/1"
_SEED = 32  # bytes
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
    if not 0 < lives < math.inf or not 1 <= uses <= MAX_USES or (peer is not None and uses != 1):
        raise ValueError(
            f"lives must be positive, uses from 1 to {MAX_USES}, and 1 for a certain peer"
        )
    now = time.time() if now is None else now
    seed = b"" if peer is not None else secrets.token_bytes(_SEED)
    invitation = Invitation(
        swarm=swarm,
        id=secrets.token_bytes(16),
        issued=now,
        expires=min(now + lives, MAX_COUNT),
        uses=uses,
        key=_one_time(seed).peer_id if seed else None,
        peer=peer,
    )
    return (
        base64.urlsafe_b64encode(msgpack.packb([seal(invitation, identity), seed]))
        .rstrip(b"=")
        .decode()
    )


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
    if len(seed) != _SEED or (key := _one_time(seed)).peer_id != invitation.key:
        raise AdmissionError(
            "The key of the invitation in the link is damaged: copy the whole link again, or "
            f"{ASK}."
        )
    since = max(
        time.time() if now is None else now, invitation.issued
    )  # a slow clock is no reason to be refused
    signature = key.sign(_CONTEXT, _entry(sealed, identity.peer_id, since))
    return pack(Admission(invitation=sealed, since=since, signature=signature))


def invited(text: str) -> str | None:
    """Return the only peer that may use the invitation ``text``; None if any may, or if it is
    damaged.
    """
    try:
        return unseal(_parts(text)[0], Invitation)[1].peer
    except (AdmissionError, MessageError):
        return None


@functools.lru_cache(maxsize=4096)  # every record of a member shows the same one
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
    if not verify(
        invitation.key, _CONTEXT, _entry(found.invitation, peer, found.since), found.signature
    ):
        return f"its invitation was used by another peer, not by {peer}: {ASK}."
    if found.since < invitation.issued:
        return f"its invitation was used before it was made: set the clock by NTP, or {ASK}."
    return AdmittedBy(invitation.id, found.since, invitation.expires, invitation.uses)


def expiry(entry: AdmittedBy, now: float) -> str:
    """Return one sentence if the invitation has expired at ``now``, Unix seconds; else nothing."""
    if now <= entry.expires + CLOCK:
        return ""
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime(min(entry.expires, 2**38)))
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
        if (
            isinstance(sealed, bytes)
            and isinstance(seed, bytes)
            and len(sealed) <= Invitation.LIMIT + ENVELOPE
        ):
            return sealed, seed
    except (binascii.Error, ValueError, TypeError, msgpack.UnpackException):
        pass
    raise AdmissionError(
        f"The invitation in the link is damaged: copy the whole link again, or {ASK}."
    )


MAX_PEERS = 4096  # peers whose admission is noted; the one heard of longest ago is dropped
LEFT = float("-inf")
FRESH_S = 1.0
SOON_S = 3600.0  # seconds before the own invitation expires at which that is reported


@dataclass(frozen=True)
class PeerLists:
    """Peer ids chosen by the user: peers in ``deny`` are never met; if ``allow`` is not empty, only
    those in it are.
    """

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()


@dataclass
class _PeerState:
    shown: bytes
    entry: AdmittedBy
    heard: float  # Unix seconds, or LEFT


class AccessPolicy:
    """The access policy of the node ``me``. For any thread; uses no network.

    ``creator``: the signer of valid invitations to ``swarm``; None: the swarm is open to all.
    ``ticket``: the packed admission that this node shows. ``ttl``: seconds for which a silent peer
    keeps its place.
    """

    def __init__(
        self,
        me: str = "",
        *,
        lists: PeerLists | None = None,
        swarm: str = "",
        creator: str | None = None,
        ticket: bytes = b"",
        ttl: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.me = me
        self.lists = lists or PeerLists()
        self.ticket = ticket
        self._swarm = swarm
        self._creator = creator
        self._ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _PeerState] = OrderedDict()
        self._by_invitation: dict[bytes, set[str]] = {}
        self._first: dict[
            bytes, tuple[float, list[tuple[float, str]]]
        ] = {}  # invitation -> when counted, peers admitted
        self._said = Repeats()

    @property
    def by_invitation(self) -> bool:
        return self._creator is not None

    def denies(self, peer: str) -> bool:
        return peer != self.me and peer in self.lists.deny

    def blocks(self, peer: str) -> bool:
        """Return whether ``peer`` is on the deny list, or missing from an allow list that is not
        empty.
        """
        return self.denies(peer) or (
            bool(self.lists.allow) and peer not in self.lists.allow and peer != self.me
        )

    def refusal(self, peer: str, shown: bytes) -> str:
        """Note that ``peer`` is here and shows this admission; return one sentence if it is not
        admitted, else nothing.
        """
        if self.blocks(peer):
            return "this node's user does not want to meet it."
        return self._note(peer, shown, self._clock())

    def record(self, peer: str, shown: bytes, issued: float, here: bool) -> bool:
        """Note a record of ``peer`` from the directory; return whether its admission is valid,
        other users of it apart.

        ``issued``: Unix seconds. ``here``: the peer did not announce that it leaves.
        """
        return not self._note(peer, shown, issued if here else LEFT, judge=False)

    def admits(self, peer: str) -> bool:
        """Return whether ``peer`` is admitted, by all that is known of it now."""
        if peer == self.me:
            return True
        if self.blocks(peer):
            return False
        if self._creator is None or peer == self._creator:
            return True
        with self._lock:
            state = self._peers.get(peer)
            now = self._clock()
            return (
                state is not None
                and not expiry(state.entry, now)
                and not self._ahead(peer, state, now)
            )

    def check_own(self) -> None:
        """Raise AdmissionError, one sentence, if this node itself is not admitted by what is known
        now.
        """
        if problem := self._note(self.me, self.ticket, self._clock()):
            raise AdmissionError(f"This node may not come in: {problem}")

    def expiry_event(self) -> str:
        """Return one sentence, once each, when this node's invitation expires within an hour, and
        when it has; else nothing.
        """
        if self._creator in (None, self.me):
            return ""
        entry = entry_of(self.ticket, self.me, self._swarm, str(self._creator))
        if not isinstance(entry, AdmittedBy):
            return ""
        now = self._clock()
        line = expiry(entry, now)
        if line:
            line = f"The others do not meet this node any more, for {line}"
        elif now > entry.expires - SOON_S:
            minutes = max(round((entry.expires - now) / 60), 0)
            line = (
                f"This node's invitation expires in {minutes} minutes: {ASK}, and join again by "
                "it with --resume."
            )
        return line if line and self._said.due(line[:20]) else ""

    # -- under the lock ----------------------------------------------------------------------------

    def _note(self, peer: str, shown: bytes, heard: float, *, judge: bool = True) -> str:
        if self._creator is None or peer == self._creator:
            return ""
        entry = entry_of(shown, peer, self._swarm, self._creator)
        if isinstance(entry, str):
            return entry
        now = self._clock()
        if problem := expiry(entry, now):
            return problem
        with self._lock:
            state = self._peers.get(peer)
            if state is None or state.shown != shown:
                self._forget(peer)
                state = self._peers[peer] = _PeerState(shown, entry, heard)
                self._by_invitation.setdefault(entry.id, set()).add(peer)
                self._first.pop(entry.id, None)
            elif heard == LEFT or state.heard < now - self._ttl:
                self._first.pop(entry.id, None)
            state.heard = heard if heard == LEFT else max(state.heard, heard)
            self._peers.move_to_end(peer)
            while len(self._peers) > MAX_PEERS:
                self._forget(next(iter(self._peers)))
            ahead = self._ahead(peer, state, now) if judge else ""
        return (
            f"its invitation, for {entry.uses}, is used by peer {ahead} already: {ASK}."
            if ahead
            else ""
        )

    def _ahead(self, peer: str, state: _PeerState, now: float) -> str:
        """Return the last of the peers that fill all places of the invitation before ``peer``;
        nothing if one is left.
        """
        when, first = self._first.get(state.entry.id, (0.0, []))
        if (
            not first or not 0 <= now - when < FRESH_S
        ):  # called for every member at a time, so the count is kept for a while
            users = [
                (other, self._peers[other]) for other in self._by_invitation.get(state.entry.id, ())
            ]
            live = sorted(
                (user.entry.since, other) for other, user in users if user.heard >= now - self._ttl
            )
            first = live[: state.entry.uses]
            self._first[state.entry.id] = now, first
        return (
            first[-1][1]
            if len(first) >= state.entry.uses and (state.entry.since, peer) > first[-1]
            else ""
        )

    def _forget(self, peer: str) -> None:
        state = self._peers.pop(peer, None)
        if state is not None:
            users = self._by_invitation[state.entry.id]
            self._first.pop(state.entry.id, None)
            users.discard(peer)
            if not users:
                del self._by_invitation[state.entry.id]


SCHEME = "shoal://"
MAX_CHARS = 4096
MAX_ADDRESSES = 16
AGAIN = "copy the whole link again"

# The last character carries one bit of the hash, so it is a or q.
_SWARM = re.compile(r"[a-z2-7]{51}[aq]")
_HOST = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?"
)
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_INVITE = re.compile(r"[A-Za-z0-9_-]{1,1536}")


def address_problem(text: str) -> str | None:
    """Return why ``text`` is no address that a link can hold, or None if it is one.

    Allowed: ``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/p2p/ID``, ``…/udp/PORT/quic-v1/p2p/ID``, and
    either of them with ``/p2p-circuit/p2p/ID`` behind it (through a relay).
    """
    if len(text) > 512 or not text.startswith("/"):
        return "it does not start with / or is too long"
    parts = text[1:].split("/")
    if len(parts) < 4 or not _is_host(parts[0], parts[1]):
        return "its host is not /ip4, /ip6, /dns, /dns4 or /dns6 and a matching name"
    if not _PORT.fullmatch(parts[3]) or int(parts[3]) > 65_535:
        return "its port is not a number from 1 to 65535"
    transport = {"tcp": [], "udp": ["quic-v1"]}.get(parts[2])
    rest = parts[4:]
    if transport is None or rest[: len(transport)] != transport:
        return "its transport is not tcp or udp with quic-v1"
    rest = rest[len(transport) :]
    if len(rest) == 5 and rest[0] == rest[3] == "p2p" and rest[2] == "p2p-circuit":
        if not _is_relay_id(rest[1]):
            return "the peer id of its relay is invalid"
        rest = rest[3:]
    if len(rest) != 2 or rest[0] != "p2p":
        return "it does not end with /p2p/ and a peer id"
    return None if is_peer_id(rest[1]) else "its peer id is invalid"


def _quoted(text: str) -> str:
    """Quote ``text`` for an error message: short, and without control characters."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 160 else quoted[:156] + "...'"


def _is_host(kind: str, host: str) -> bool:
    if kind in ("dns", "dns4", "dns6"):
        return _HOST.fullmatch(host) is not None
    try:
        parsed = {"ip4": ipaddress.IPv4Address, "ip6": ipaddress.IPv6Address}[kind](host)
    except (KeyError, ValueError):
        return False
    return "%" not in str(parsed)  # a zone such as fe80::1%eth0 means something on one machine only


def _is_relay_id(text: str) -> bool:
    """Return whether ``text`` is the id of a possible relay, which may have another key: an RSA
    key's id is a SHA-256 multihash.
    """
    try:
        return is_peer_id(text) or (
            len(text) <= 64 and len(raw := b58decode(text)) == 34 and raw[:2] == b"\x12\x20"
        )
    except ValueError:
        return False


@dataclass(frozen=True)
class Link:
    """A swarm and its bootstrap peers: ``swarm`` is its id, ``bootstrap`` 1 to 16 addresses,
    ``invite`` an invitation or nothing.

    Raises LinkError.
    """

    swarm: str
    bootstrap: tuple[str, ...]
    invite: str = ""

    def __post_init__(self) -> None:
        if not _SWARM.fullmatch(self.swarm):
            raise LinkError(
                f"The swarm id in the link is not 52 characters of a-z and 2-7: {AGAIN}."
            )
        if not self.bootstrap:
            raise LinkError(f"The link names no peer to join through (?peer=…): {AGAIN}.")
        if len(self.bootstrap) > MAX_ADDRESSES:
            raise LinkError(
                f"The link holds {len(self.bootstrap)} addresses, at most {MAX_ADDRESSES} are "
                "allowed: remove some."
            )
        for address in self.bootstrap:
            if problem := address_problem(address):
                raise LinkError(
                    f"The address {_quoted(address)} in the link is malformed, {problem}: {AGAIN}."
                )
        if self.invite and not _INVITE.fullmatch(self.invite):
            raise LinkError(f"The invitation in the link is malformed: {AGAIN}.")
        if len(str(self)) > MAX_CHARS:
            raise LinkError(
                f"The link is longer than {MAX_CHARS} characters: remove some of its addresses."
            )

    def __str__(self) -> str:
        parts = [f"peer={quote(address, safe='/:')}" for address in self.bootstrap]
        return f"{SCHEME}{self.swarm}?" + "&".join(
            [*parts, f"invite={self.invite}"] if self.invite else parts
        )

    def also(self, addresses: Iterable[str]) -> Link:
        """Return a link with these addresses behind its own, as far as they are valid and the
        bounds of a link allow.
        """
        link = self
        for address in addresses:
            if len(link.bootstrap) == MAX_ADDRESSES:
                break
            if address not in link.bootstrap and address_problem(address) is None:
                with contextlib.suppress(LinkError):  # too long with this one
                    link = Link(self.swarm, (*link.bootstrap, address), self.invite)
        return link

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse the link in ``text``; white space around it is ignored. Raises LinkError."""
        if not isinstance(text, str):
            raise LinkError(
                f"The link is {'None' if text is None else 'of type ' + type(text).__name__}, and "
                "must be a text: pass the link that `shoal up` or the other session's `link` "
                "shows."
            )
        text = text.strip()
        if len(text) > MAX_CHARS:
            raise LinkError(f"The link is longer than {MAX_CHARS} characters: {AGAIN}.")
        if not text.startswith(SCHEME):
            raise LinkError(
                f"{_quoted(text)} does not start with {SCHEME}: pass the link that `shoal up` "
                "printed."
            )
        swarm, _, query = text[len(SCHEME) :].partition("?")
        addresses = []
        invite = ""
        for part in query.split("&") if query else []:
            name, _, value = part.partition("=")
            if name == "invite" and not invite and value:
                invite = value
                continue
            if name != "peer":
                raise LinkError(
                    f"The link holds an unknown part {_quoted(part)}: quote it in the shell, and "
                    f"{AGAIN}."
                )
            addresses.append(
                unquote(value)
            )  # bytes that are no UTF-8 become a character that no address may have
        return cls(swarm, tuple(addresses), invite)

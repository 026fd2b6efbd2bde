"""The members with which a round is formed, a group of them with their signed ready messages, and
the channel of each to its leader.

A round need not wait for all members in view, and a late peer moves to the round of the others.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.optim.exchange.pairing import order
from shoal.optim.exchange.weighted_mean import counted_weights
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import EncodedContribution
from shoal.swarm.exchange.group.attendance import Attendance
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import stop
from shoal.swarm.wire.envelope import M, Message, fresh_nonce, pack, pack_shapes, unpack, unseal
from shoal.swarm.wire.messages import MAX_PATIENCE, GroupAlive, GroupFormed, GroupReady, Way

LOOK_ROUNDS = 16
"""Of so many rounds of a fragment one is of all in view, whoever was in the last group: a leader
that lies could part a swarm, for a member knows no group but its own.
"""


class LivenessView:
    """The members with which rounds are formed. ``fragments``: sent in turn.

    A round waits for the group of the round before (its members all know it, from the same signed
    messages), and where there was none for the members in view. So all have the same leader
    whatever each sees of the directory. Why: docs/internals.md, "For whom a leader waits".
    """

    def __init__(self, context: PeerContext, fragments: int) -> None:
        self.members, self._context, self._fragments = context.members, context, fragments
        self.evidence = RoundEvidence(context, fragments)
        self._absent: dict[str, float] = {}
        """Peers that died or stayed away -> the time of issue of the record they had then."""
        self._silent: dict[str, float] = {}
        """Those that did not even answer as leaders: their processes sleep or are gone."""
        self._groups: dict[int, frozenset[str]] = {}
        """By fragment the members of the last group that this node was in."""
        self._astray: set[int] = set()
        """Fragments of which this node was in no group in its last round."""
        self.attendance = Attendance(fragments)
        """Who missed rounds, and is left out for a while."""
        self.has_ended = False
        """This node is in no more rounds."""

    def here(self) -> set[str]:
        here = {
            peer for peer, member in self.members().items() if member.model == self._context.model
        }
        me = self._context.me
        return here - {me} if self.has_ended else here | {me}

    def expected(self, round: int, slack: int = 0) -> set[str]:
        """Return the peers for which ``round`` waits where it has no roster.

        An absent one has to renew its record first, and the dead never do.

        One whose record states a round more than ``slack`` beyond this one has begun this round,
        and perhaps later ones, before: it is on its way, or waits elsewhere, or will never come.
        """
        return self._behind(round + slack) & self._present(round)

    def _present(self, round: int) -> set[str]:
        """Return the peers in view that are neither left out of ``round`` nor absent."""
        self._absent = self._unrenewed(self._absent)
        return self.hoped(round) - self._absent.keys()

    def note_group(self, fragment: int, members: Iterable[str]) -> None:
        """Note the group of all in which this node is: the next round is of the same members.

        No ``members``: it is in one of several, and the next round is of all in view.
        """
        if fragment < self._fragments:  # beyond: the last average, which is of all
            self._groups[fragment] = frozenset(members)
            self._astray.discard(fragment)

    def roster(self, round: int, fragment: int) -> set[str]:
        """Return the members of the last group of ``fragment`` that are in view; none in every
        sixteenth round, or if this node is in a smaller part of a swarm that came apart.
        """
        is_look = round // self._fragments % LOOK_ROUNDS == 0
        return set() if is_look or self._is_apart(fragment) else self._group(fragment)

    def _group(self, fragment: int) -> set[str]:
        return self.here() & self._groups.get(fragment, frozenset())

    def _is_apart(self, fragment: int) -> bool:
        """Return whether the last group is at most half of those in view."""
        return bool(self._groups.get(fragment)) and 2 * len(self._group(fragment)) <= len(
            self.here()
        )

    def miss_group(self, fragment: int) -> None:
        """Note that a round of ``fragment`` went by without this node."""
        if fragment < self._fragments:
            self._astray.add(fragment)

    def awaited(self, round: int, fragment: int, reached: Collection[str] = ()) -> set[str]:
        """Return the peers for which ``round`` waits, this node included: the roster, less those
        that are absent.

        Without a roster all that are expected; one that may be in a later round just now until it
        is among those ``reached`` by a question.
        """
        roster = self.roster(round, fragment)
        if roster:
            return roster & self._present(round)
        return self.expected(round) | (self.expected(round, self._fragments) - set(reached))

    def _behind(self, round: int) -> set[str]:
        rounds = {peer: member.round for peer, member in self.members().items()}
        return {peer for peer in self.here() if rounds.get(peer, 0) <= round}

    def hoped(self, round: int) -> set[str]:
        """Return the peers in view, this node included, that are not left out of ``round``."""
        left_out = self.attendance.is_left_out
        return {peer for peer in self.here() if not left_out(peer, round)}

    def order(self, seed: int, round: int, fragment: int) -> list[str]:
        """Return the leaders of a round, best first: those of the roster, then the others.

        Silent ones come later: each would cost a part of everybody's patience again. Last comes
        this node if it may be apart from the others: they tell it in which round they are.

        Views differ for a moment, and then two may lead; a member that waits elsewhere answers so,
        and one of the groups is given up.
        """
        self._silent = self._unrenewed(self._silent)
        me, roster = self._context.me, self.roster(round, fragment)
        is_outside = self.is_outside(fragment)

        def place(peer: str) -> int:
            if peer == me and is_outside:
                return 3
            return 2 if peer in self._silent else int(peer not in roster)

        # `sorted` keeps the order of equals.
        return sorted(order(seed, round, self.hoped(round)), key=place)

    def is_outside(self, fragment: int) -> bool:
        """Return whether the others may be in a group without this node: it took over the weights
        of a swarm that is under way, or was in no group in the last round, or in one of few.
        """
        return fragment in self._astray or self._is_apart(fragment)

    def mark_absent(self, peers: Iterable[str]) -> None:
        """Note peers that did not come or died in the middle: rounds would wait for them until
        their records expire.
        """
        self._absent.update(self._issued(peers))

    def is_absent(self, peer: str) -> bool:
        """Return whether no round waits for ``peer``, as it was marked absent."""
        return peer in self._absent

    def mark_late(self, came: set[str], round: int, fragment: int) -> None:
        """Note that ``round`` waited for others than those who ``came``: if these are most, the
        others are late. Few may be as well in a group of their own while most are elsewhere.
        """
        if 2 * len(came) > len(self.here()):
            awaited = self.roster(round, fragment) or self._behind(round + self._fragments)
            for peer in awaited - came:
                self.attendance.missed(peer, round)

    def mark_silent(self, peer: str) -> None:
        """Note a peer that did not answer in time when it was to lead a round."""
        if peer != self._context.me:
            self._silent.update(self._issued([peer]))
            self.mark_absent([peer])
            self._context.look()  # it may have said that it leaves

    def mark_awake(self, peer: str) -> None:
        """Note a peer that brings a contribution, whatever its record states: the next round waits
        for it again.
        """
        self._absent.pop(peer, None)
        self._silent.pop(peer, None)

    def _issued(self, peers: Iterable[str]) -> dict[str, float]:
        records = self.members()
        return {peer: records[peer].issued for peer in peers if peer in records}

    def _unrenewed(self, peers: Mapping[str, float]) -> dict[str, float]:
        now = self._issued(peers)
        return {peer: issued for peer, issued in peers.items() if now.get(peer) == issued}

    def barred(self, peers: Iterable[str]) -> list[str]:
        """Return the barred ones of ``peers``.

        An unknown peer is not among them: it may be a newcomer.
        """
        return [
            peer for peer in peers if peer != self._context.me and self._context.is_barred(peer)
        ]

    def addresses(self, peer: str) -> Sequence[str]:
        member = self.members().get(peer)
        return member.addresses if member is not None else ()


_LENGTH = 2  # bytes before each ready message in a list


@dataclass(frozen=True)
class Roster:
    """A group as all of its members see it.

    A member's place is its position in the order of peer ids.
    """

    nonce: bytes
    leader: str
    reduction: Way
    alone: bool
    """True if every peer that was ready is in it."""
    readies: Mapping[str, GroupReady]

    @property
    def members(self) -> tuple[str, ...]:
        """Their peer ids, in order."""
        return tuple(sorted(self.readies))

    @property
    def everybody(self) -> int:
        return (1 << len(self.readies)) - 1

    def weights(self) -> tuple[dict[str, float], float]:
        """Return what the signed weight of each member counts as, and the limit of that
        (`counted_weights`).
        """
        weights, limit = counted_weights([self.readies[peer].weight for peer in self.members])
        return dict(zip(self.members, weights, strict=True)), limit

    def places(self, peers: Iterable[str]) -> int:
        """Return the places of ``peers``, as bits."""
        wanted = set(peers)
        return sum(1 << place for place, peer in enumerate(self.members) if peer in wanted)

    def at(self, places: int) -> tuple[str, ...]:
        """Return the peers at ``places``, in order."""
        return tuple(peer for place, peer in enumerate(self.members) if places >> place & 1)


def ready_message(mine: EncodedContribution, swarm: str, model: str, patience: float) -> GroupReady:
    """Return the description of this node's contribution; ``patience`` in seconds."""
    return GroupReady(
        swarm=swarm,
        round=mine.key.round,
        fragment=mine.key.fragment,
        model=model,
        codec=mine.codec.name,
        shapes=hashlib.sha256(pack_shapes(mine.shapes)).digest(),
        nbytes=mine.payload.nbytes,
        weight=mine.weight,
        sha256=mine.payload.sha256,
        patience=min(max(patience, 0.0), MAX_PATIENCE),
        nonce=fresh_nonce(),
        sketch=mine.sketch,
    )


def difference(mine: GroupReady, theirs: GroupReady) -> str | None:
    """Return why two contributions cannot be averaged, in words, or None. Weights may differ."""
    if theirs.swarm != mine.swarm:
        return f"this node is in swarm {mine.swarm}, the contribution is for {theirs.swarm}"
    if (theirs.round, theirs.fragment) != (mine.round, mine.fragment):
        return (
            f"it is of round {theirs.round} and fragment {theirs.fragment}, "
            f"not of round {mine.round} and fragment {mine.fragment}"
        )
    if theirs.codec != mine.codec:
        return f"the codec is {mine.codec} here and {theirs.codec} there"
    if theirs.model != mine.model or theirs.shapes != mine.shapes:
        return "the parameters have other names, shapes or types here than there"
    if theirs.nbytes != mine.nbytes:
        return f"the payload has {mine.nbytes} bytes here and {theirs.nbytes} there"
    return None


def encode_list(sealed: Iterable[bytes]) -> bytes:
    """Return signed messages one after the other, each behind its length."""
    return b"".join(len(message).to_bytes(_LENGTH, "big") + message for message in sealed)


def open_list(listed: bytes) -> Iterator[bytes]:
    """Yield the messages of ``encode_list``. Raises MessageError."""
    at = 0
    while at < len(listed):
        start = at + _LENGTH
        at = start + int.from_bytes(listed[at:start], "big")
        if at > len(listed):
            raise MessageError(
                "a group was refused: a list of its members ends in the middle of one."
            )
        yield listed[start:at]


def open_roster(formed: GroupFormed, leader: str, mine: bytes, largest: int) -> Roster:
    """Return the group in ``formed``, with every member checked against this node's own ready
    message (``mine``, sealed).

    Raises MessageError: this node is not in it, a signature is wrong, a member is listed twice or
    brings something that cannot be averaged with ours, or there are more than ``largest`` or fewer
    than two.
    """
    _, own = unseal(mine, GroupReady)
    readies: dict[str, GroupReady] = {}
    included = False
    for sealed in open_list(formed.members):
        peer, ready = unseal(sealed, GroupReady)
        if peer in readies or len(readies) == largest:
            raise MessageError(
                f"a group from peer {short(leader)} was refused: a member is in it twice, or it is "
                "too large."
            )
        reason = difference(own, ready)
        if reason is not None:
            raise MessageError(
                f"a group from peer {short(leader)} was refused: with its member {short(peer)} "
                f"{reason}."
            )
        readies[peer] = ready
        included = included or sealed == mine
    if not included or len(readies) < 2:
        raise MessageError(
            f"a group from peer {short(leader)} was refused: this node is not in it, or nobody "
            "else is."
        )
    return Roster(formed.nonce, leader, formed.reduction, formed.alone, readies)


BEATS = 4  # heartbeats within the time after which silence counts as death


class HeartbeatChannel:
    """A channel that detects a dead peer.

    ``patience``: seconds of silence after which the other side counts as gone.

    Use it on the host's loop only. A stopped process keeps its streams open, and a slow link may
    take minutes for a payload: only heartbeats, on a stream that carries nothing large, tell them
    apart.
    """

    def __init__(self, stream: Stream, patience: float) -> None:
        self.stream, self.patience = stream, patience
        self.peer = stream.peer_id
        self._sending = asyncio.Lock()
        self._beat: float | None = None
        """The loop's time by which it sends again.

        Not of one ``receive``: of messages that come quickly each would put it off.
        """

    async def send(self, message: Message | bytes) -> None:
        """Send a message, or bytes that are packed already. Raises NetworkError."""
        data = message if isinstance(message, bytes) else pack(message)
        async with self._sending:
            self._beat = asyncio.get_running_loop().time() + self.patience / BEATS
            await self.stream.send(data, self.patience)

    async def receive(self, until: float | Callable[[], float], *types: type[M]) -> M:
        """Return the next message other than a heartbeat, within the loop's time ``until``, asked
        for at each heartbeat if it may change; send heartbeats meanwhile.

        Raises NetworkError if the other side is silent or ends the channel, MessageError if it
        sends a message of another type.
        """
        loop = asyncio.get_running_loop()
        limit = max(GroupAlive.LIMIT, *(kind.LIMIT for kind in types))
        reading: asyncio.Future[bytes] | None = None
        if self._beat is None:
            self._beat = loop.time() + self.patience / BEATS
        try:
            while True:
                now = loop.time()
                ends = until() if callable(until) else until
                if now >= ends:
                    raise NetworkError(
                        f"peer {short(self.peer)} did not finish in time.", "timeout"
                    )
                if now >= self._beat:
                    await self.send(GroupAlive())
                if reading is None:
                    reading = asyncio.ensure_future(self.stream.receive(limit, self.patience))
                await asyncio.wait({reading}, timeout=min(ends, self._beat) - now)
                if reading.done():
                    data, reading = reading.result(), None
                    message: Message = unpack(data, GroupAlive, *types)
                    for kind in types:
                        if isinstance(message, kind):
                            return message
        finally:
            if reading is not None:
                await stop(reading)  # only one may read from a stream

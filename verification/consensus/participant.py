"""One peer's whole part in the vote: entering, claiming, planting, voting, scoring; no I/O and no
clock of its own.

    participant.tick()            do what is due; may take as long as a check takes
    participant.take(signed)      take a record that came by gossip
    participant.slots()           claims to be made now; participant.claim(claim) publishes one
    participant.wanted            whose log to pull now; participant.learn(log) takes it in,
                                  participant.log(since) gives the own
    participant.table             everybody's scores; whoever is banned by it is left out

Rounds are Unix time over ``round_s``, so nobody leads and a wrong clock shows; `ViewQuorum` and
`records` give the timetable. Records of rounds against which nobody can appeal any more are
forgotten; their consequences live on in a base table.

A log, for a peer that missed records, has the base, the electorates and the signed records of the
last rounds. It is a sequence of frames, each a length (4 bytes, big-endian) and that many bytes of
msgpack, so nothing larger than a frame is built before it is checked: hostile bytes cannot make a
reader allocate more than a small multiple of what they take themselves.

    ["base", round]  ["standing", peer, 14 integers]*
    (["electorate", round, beacon, all] ["voter", peer, operator]* ["claims", ids]*)*
        all: claims is None
    ["record", encoded, signature]*
        newest first, claims before votes
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import msgpack
from pydantic import ConfigDict, TypeAdapter, ValidationError

from shoal.verification.consensus.protocol import Check, Consensus, Times, Voter
from shoal.verification.consensus.records import (
    BEHIND,
    LIMIT,
    OPENS,
    SETTLED,
    Chain,
    Claim,
    Dispute,
    Electorate,
    Entry,
    Hash,
    Ledger,
    Limits,
    Opening,
    Peer,
    Refused,
    Round,
    Sign,
    Signed,
    Verify,
    View,
    beacon,
    decode,
    is_audited,
    must_plant,
    rank,
)
from shoal.verification.consensus.rulings import (
    Electorates,
    Rules,
    ScoreRules,
    Standing,
    Table,
    anchored,
    compute_scores,
    is_single,
    salts,
)

MOST_BYTES = 8 << 20
MOST_FRAMES = 1 << 18
MOST_PAIRS = (
    1 << 24
    # voters times claims of their round: each pair costs a hash at the draw, all of them about a
    # minute
)
MOST_FRAME = LIMIT + 512
MOST_SIGNATURE = 256
IDS = 64  # claims in a frame
_STRICT = ConfigDict(strict=True)
_peer: TypeAdapter[str] = TypeAdapter(Peer, config=_STRICT)
_round: TypeAdapter[int] = TypeAdapter(Round, config=_STRICT)
_hash: TypeAdapter[bytes] = TypeAdapter(Hash, config=_STRICT)
_numbers: TypeAdapter[tuple[int | None, ...]] = TypeAdapter(tuple[int | None, ...], config=_STRICT)
_NONE = Table(-1, {}, {})


@dataclass(frozen=True)
class Log:
    """Decoded log, of which only the form has been checked.

    ``base`` is the table of the rounds whose records are forgotten, of
    round -1 if there are none.
    """

    base: Table = _NONE
    electorates: tuple[Electorate, ...] = ()
    records: tuple[Signed, ...] = ()


def encode(log: Log) -> bytes:
    """Encode ``log`` in at most 8 MiB, without the last records that do not fit.

    Raises ValueError if the head is too large.
    """
    data = bytearray(b"".join(map(_framed, _head(log))))
    if len(data) > MOST_BYTES:
        raise ValueError(f"base and electorates take {len(data)} bytes, above {MOST_BYTES}")
    for signed in log.records:
        frame = _framed(["record", signed.record.encoded, signed.signature])
        if len(data) + len(frame) > MOST_BYTES:
            break
        data += frame
    return bytes(data)


def decode_log(data: bytes) -> Log:
    """Decode a log. Raises ValueError if ``data`` is too large or malformed in any part."""
    base, standings, records = -1, {}, []
    electorates: list[tuple[int, bytes, dict[str, str], set[bytes] | None]] = []
    try:
        for kind, *parts in _frames(data):
            if kind == "base":
                (stated,) = parts
                base = -1 if stated == -1 else _round.validate_python(stated)
            elif kind == "standing":
                standings[_peer.validate_python(parts[0])] = Standing.of(
                    _numbers.validate_python(tuple(parts[1:]))
                )
            elif kind == "electorate":
                round, beacon, everything = parts
                electorates.append(
                    (
                        _round.validate_python(round),
                        _hash.validate_python(beacon),
                        {},
                        None if everything else set(),
                    )
                )
            elif kind == "voter":
                peer, operator = map(_peer.validate_python, parts)
                electorates[-1][2][peer] = operator
            elif kind == "claims":
                (ids,) = parts
                if not isinstance(ids, bytes) or not 0 < len(ids) <= IDS * 32 or len(ids) % 32:
                    raise ValueError("ids of claims have 32 bytes each")
                if (claims := electorates[-1][3]) is not None:
                    claims.update(ids[at : at + 32] for at in range(0, len(ids), 32))
            elif kind == "record":
                encoded, signature = parts
                if (
                    not isinstance(encoded, bytes)
                    or not isinstance(signature, bytes)
                    or len(signature) > MOST_SIGNATURE
                ):
                    raise ValueError("a record is bytes and a signature")
                records.append(Signed(decode(encoded), signature))
            else:
                raise ValueError("not a known kind of frame")
    except (
        ValidationError,
        ValueError,
        TypeError,
        IndexError,
        msgpack.exceptions.UnpackException,
        RecursionError,
    ) as error:
        raise ValueError(
            "A log is malformed: "
            f"{str(error).splitlines()[0] if str(error) else 'a frame is damaged'}."
        ) from error
    made_in = Counter(signed.record.round for signed in records if isinstance(signed.record, Claim))
    pairs = sum(len(voters) * made_in[round] for round, _, voters, _ in electorates)
    if pairs > MOST_PAIRS or any(len(voters) > Limits.peers for _, _, voters, _ in electorates):
        raise ValueError(
            "A log is malformed: it has more voters, or claims for them, than could be drawn."
        )
    made = (
        Electorate(round, beacon, voters, None if claims is None else frozenset(claims))
        for round, beacon, voters, claims in electorates
    )
    return Log(Table(base, dict(sorted(standings.items())), {}), tuple(made), tuple(records))


def _head(log: Log) -> Iterator[list[object]]:
    yield ["base", log.base.round]
    for peer, standing in log.base.standings.items():
        yield ["standing", peer, *standing.row]
    for electorate in log.electorates:
        yield ["electorate", electorate.round, electorate.beacon, electorate.claims is None]
        for peer, operator in sorted(electorate.operators.items()):
            yield ["voter", peer, operator]
        ids = sorted(electorate.claims or ())
        for start in range(0, len(ids), IDS):
            yield ["claims", b"".join(ids[start : start + IDS])]


def _framed(frame: list[object]) -> bytes:
    packed = bytes(msgpack.packb(frame))
    return struct.pack(">I", len(packed)) + packed


def _frames(data: bytes) -> Iterator[list[object]]:
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data)} bytes, above {MOST_BYTES}")
    at = count = 0
    while at < len(data):
        count += 1
        if count > MOST_FRAMES or at + 4 > len(data):
            raise ValueError("it has too many frames, or ends within one")
        (size,) = struct.unpack_from(">I", data, at)
        if not 0 < size <= MOST_FRAME or at + 4 + size > len(data):
            raise ValueError("a frame has a wrong size")
        frame = msgpack.unpackb(
            data[at + 4 : at + 4 + size], max_array_len=64, max_map_len=0, max_ext_len=0
        )
        if not isinstance(frame, list) or not frame:
            raise ValueError("a frame is not a list")
        yield frame
        at += 4 + size


# Electorate of a round: who can be drawn, and for which claims. It follows from records; peers
# agree on it by `ViewQuorum`.
#
# Voters are the peers that entered within the last `Rules.life` rounds, are not banned, and have
# shown by valid claims that they work (`Rules.proven`): fresh keys cost nothing. As long as no more
# peers than sit in a draw have shown it, all who entered vote. Absent peers (`Table.is_absent`) do
# not, unless no more than sit in a draw are left.


def electorate(
    run: str, round: int, ledger: Ledger, electorates: Electorates, rules: Rules, table: Table
) -> Electorate:
    """Compute the electorate of ``round``.

    Verifiers are drawn for claims of voters, and by lot for `Rules.strangers` of others,
    if the audit picks them, unless their author used the slot twice, had not entered in time, or is
    banned.
    """
    begins = round + OPENS
    entered = {}
    for peer in sorted(ledger.peers()):
        entry = ledger.entry(peer, round + 1, rules.life)
        if entry is not None and not table.is_banned(peer, begins):
            entered[peer] = entry.operator
    there = {peer: operator for peer, operator in entered.items() if not table.is_absent(peer)}
    entered = there if len(there) > rules.verifiers else entered
    proven = {
        peer: operator for peer, operator in entered.items() if table.valid(peer) >= rules.proven
    }
    voters = proven if len(proven) > rules.verifiers else entered
    seed = beacon(run, round, salts(round - 1, ledger, electorates, rules))
    claims = [
        claim
        for claim in ledger.claims()
        if claim.round == round
        and is_single(claim, ledger)
        and anchored(ledger, claim.peer, round, rules) is not None
        and not table.is_banned(claim.peer, begins)
        and is_audited(seed, claim.id, rules.audit)
    ]
    admitted = {claim.id for claim in claims if claim.peer in voters}
    strange = sorted(
        (claim.id for claim in claims if claim.peer not in voters),
        key=lambda case: rank(seed, case, ""),
    )
    return Electorate(round, seed, voters, frozenset(admitted.union(strange[: rules.strangers])))


def void(run: str, round: int) -> Electorate:
    """Return the electorate of a round on which peers did not agree: nobody is drawn, so its claims
    stay unverified.
    """
    return Electorate(round, beacon(run, round, ()), {}, frozenset())


def root(electorate: Electorate) -> bytes:
    """Return the SHA-256 of the encoding of ``electorate``."""
    claims = None if electorate.claims is None else sorted(electorate.claims)
    parts = [electorate.round, electorate.beacon, sorted(electorate.operators.items()), claims]
    return hashlib.sha256(
        b"shoal/verification/1/electorate\x00" + bytes(msgpack.packb(parts))
    ).digest()


# Agreement on the electorate of a round, without a leader: each peer states a digest of what it
# computed (`records.View`).
#
#     begin of round r + 2      votes on claims of r - 1 are over
#       + skew_s                each computes its electorate of r, and publishes its view
#       + 2 skew_s              one root counts; a peer that computed another pulls the log of one
#       that states it, and opens that
#                               electorate as soon as it has it
#       + 3 skew_s              draws begin. If no root counts nobody is drawn for r, by anybody
#       (`electorate.void`)
#
# A root counts that more than half of the last known electorate state; or, if they are divided, the
# commonest that more than a third state, the smallest if several are: with fewer colluders than
# that somebody honest has computed it. Only peers count that could vote now: those gone for long do
# not block the others. A peer that knows no electorate yet follows the commonest view that it
# receives, and trusts its authors. Two views of one peer count as none.


class ViewQuorum:
    """Views of one ``round``, and which root and table count by them."""

    def __init__(self, round: int) -> None:
        self.round = round
        self._views: dict[str, View] = {}
        self._twice: set[str] = set()
        self._own: View | None = None
        self._voters: frozenset[str] | None = None
        self._known: dict[bytes, Electorate] = {}

    def __len__(self) -> int:
        return len(self._views)

    def take(self, view: View) -> None:
        """Count ``view``.

        Raises ValueError if it is of another round, or its author stated another one.
        """
        if view.round != self.round:
            raise ValueError(f"a view of round {view.round} is not one of round {self.round}")
        if self._views.setdefault(view.peer, view) != view:
            self._twice.add(view.peer)
            raise ValueError("a peer stated two views of one round")

    def propose(self, own: View, electorate: Electorate, voters: Collection[str] | None) -> None:
        """Set what this peer computed.

        ``voters``: those whose views count; None if not known, then everybody's count.
        """
        self._own, self._voters = own, None if voters is None else frozenset(voters)
        self._views.setdefault(own.peer, own)
        self._known[own.root] = electorate

    @property
    def proposed(self) -> Electorate | None:
        return self._known[self._own.root] if self._own else None

    def learned(self, electorate: Electorate) -> bool:
        """Keep another peer's ``electorate`` and return True if it is the one that counts."""
        if electorate.round != self.round or root(electorate) != self.root:
            return False
        self._known[root(electorate)] = electorate
        return True

    @property
    def root(self) -> bytes | None:
        return self._counted("root")

    @property
    def table(self) -> bytes | None:
        return self._counted("table")

    @property
    def electorate(self) -> Electorate | None:
        return self._known.get(self.root or b"")

    def sources(self) -> tuple[str, ...]:
        """Return the peers whose log to pull: those who state what counts if that is not the own,
        or the commonest if none counts.

        Empty if there is nothing to learn. Peers that may know most come first.
        """
        if self._own is None:
            return ()
        rooted = self._commonest("root")[1] if self.electorate is None else set()
        table, tabled = self._commonest("table")
        wanted = rooted if self._own.table == table else rooted or tabled
        return tuple(sorted(wanted - {self._own.peer}, key=lambda peer: (peer not in tabled, peer)))

    def _counted(self, field: Literal["root", "table"]) -> bytes | None:
        found, stating = self._commonest(field)
        enough = self._voters is None or len(stating) * 3 > len(self._voters)
        return found if self._own is not None and enough else None

    def _commonest(self, field: Literal["root", "table"]) -> tuple[bytes | None, set[str]]:
        """Return what most state, the smallest if there are several, and who states it."""
        stating: defaultdict[bytes, set[str]] = defaultdict(set)
        for peer in self._views.keys() - self._twice:
            if self._voters is None or peer in self._voters:
                stating[getattr(self._views[peer], field)].add(peer)
        return min(
            stating.items(), key=lambda item: (-len(item[1]), item[0]), default=(None, set())
        )


SPARE = 4  # rounds that records are kept beyond the last in which something about them can change
PULLS = 3  # logs taken in for one round, at most


@dataclass(frozen=True)
class Slot:
    """Claim to be made; if ``planted``, the lottery demands that it is wrong."""

    round: int
    slot: int
    planted: bool


@dataclass(frozen=True)
class Wanted:
    """Request to pull the log of one of ``peers`` (best first) since round ``since``, soon: draws
    wait for it.
    """

    peers: tuple[str, ...]
    since: int


class Participant:
    """State machine of ``peer`` in ``run``.

    ``operator``: who runs it. ``publish`` spreads a record and never waits. ``clock``:
    Unix seconds; if it goes back the participant waits. ``salt``: 32 fresh secret bytes with each
    call.
    """

    def __init__(
        self,
        peer: str,
        run: str,
        *,
        operator: str,
        sign: Sign,
        verify: Verify,
        publish: Callable[[Signed], None],
        check: Check,
        clock: Callable[[], float],
        salt: Callable[[], bytes],
        rules: Rules,
        prices: ScoreRules,
        round_s: float,
        limits: Limits | None = None,
    ) -> None:
        self.peer, self.run, self.operator, self.round_s = peer, run, operator, round_s
        self.rules, self.prices, self.times = rules, prices, Times.of(round_s)
        self._read_clock, self._latest, self._sign = clock, clock(), sign
        self.round = self._came = int(self._latest // round_s)
        self.base = self.table = _NONE
        self.consensus = Consensus(
            run, verify, self._now, rules=rules, times=self.times, limits=limits,
            banned=lambda peer: self.table.is_banned(peer, self.round),
        )  # fmt: skip
        self.consensus.views = self._view
        self.member = Voter(peer, self.consensus, publish, sign, check, salt)
        self._agreements: dict[int, ViewQuorum] = {}
        self._pulled, self._started = 0, False
        self._kept = rules.appeal_rounds + SETTLED + SPARE  # rounds whose records are kept
        self.consensus.advance(self.round, self.round * round_s)
        # A peer that joins while views of the round are out has missed some: it states none until
        # the next.
        self._stated = self.round if self._latest > self.round * round_s + self.times.skew_s else -1

    def tick(self, most: int = 1) -> int:
        """Do what is due; check at most ``most`` claims, which is what costs.

        Returns how many were checked.
        """
        now = self._now()
        if (round := int(now // self.round_s)) > self.round or not self._started:
            self._begin(round)
        begin, skew = self.round * self.round_s, self.times.skew_s
        if self._stated < self.round and now >= begin + skew:
            self._state()
        if now >= begin + 2 * skew:
            self._open(final=now >= begin + 3 * skew)
        return self.member.work(most)

    def take(self, signed: Signed, at: float | None = None) -> None:
        """Take a record that came ``at`` that Unix time, by default now; it matters if records wait
        for a check. Raises Refused.
        """
        self.consensus.take(signed, at)

    def slots(self) -> list[Slot]:
        """Return the claims to make in this round: none while banned, or until the own entry is old
        enough and draws are agreed.
        """
        before, link = self.consensus.electorates.get(self.round - BEHIND), self._link(self.round)
        if (
            before is None
            or not before.operators
            or link is None
            or self.table.is_banned(self.peer, self.round)
        ):
            return []
        used = {claim.slot for claim in self.consensus.ledger.claims_of(self.peer, self.round)}
        return [
            Slot(self.round, slot, must_plant(link, before.beacon, slot, self.rules.planted))
            for slot in range(self.rules.claims)
            if slot not in used
        ]

    def claim(self, claim: Claim) -> None:
        """Publish ``claim`` for one of `slots`.

        Raises Refused, for example if its round is over; then it is not sent.
        """
        if claim.peer != self.peer or claim.run != self.run:
            raise ValueError("a participant publishes its own claims only")
        if (claim.round, claim.slot) not in {(slot.round, slot.slot) for slot in self.slots()}:
            raise Refused(
                "A claim was not made: its round is over, or its slot is not free.", "late"
            )
        self.member.publish(claim)

    @property
    def wanted(self) -> Wanted | None:
        """Peers whose log to pull now; mostly None."""
        agreement = self._agreements.get(self.round - OPENS)
        views_in = self._now() >= self.round * self.round_s + 2 * self.times.skew_s
        if agreement is None or not views_in or self._stated < self.round or self._pulled >= PULLS:
            return None
        peers = agreement.sources()
        at = self._pulled % len(peers) if peers else 0
        return Wanted(peers[at:] + peers[:at], self._oldest()) if peers else None

    def learn(self, log: Log) -> int:
        """Take in another peer's log; return how many records were new.

        Its electorates and base count only if they match the
        views, or give the table that does; otherwise only the signed records are used.
        """
        self._pulled += 1
        agreement = self._agreements.get(self.round - OPENS)
        new = 0
        for signed in log.records:
            spare = self.rules.life + BEHIND if isinstance(signed.record, Entry) else 0
            if self.consensus.ledger.stamp(signed.record) >= self._oldest() - spare:
                new += self.consensus.learn(signed)
        if agreement is not None:
            for other in log.electorates:
                agreement.learned(other)
            self._adopt(log, agreement)
        if self.table.is_banned(
            self.peer, self.round
        ):  # the others refused the entry that was made before this was known
            refused = [
                entry
                for entry in self.consensus.ledger.entries_of(self.peer)
                if entry.round >= self.round - 1
            ]
            self.consensus.keep(
                Ledger(record for record in self.consensus.ledger if record not in refused)
            )
        return new

    def log(self, since: int) -> Log:
        """Return the log to hand out: base, electorates, and the records since round ``since``,
        newest first.
        """
        ledger = self.consensus.ledger
        kept = [
            record
            for record in ledger
            if isinstance(record, Entry) or ledger.stamp(record) >= max(since, 0)
        ]
        kept.sort(key=lambda record: (-ledger.stamp(record), _ORDER[record.KIND], record.id))
        known = dict(self.consensus.electorates)
        agreement = self._agreements.get(self.round - OPENS)
        if agreement is not None and agreement.proposed is not None:
            known.setdefault(agreement.round, agreement.electorate or agreement.proposed)
        electorates = tuple(known[round] for round in sorted(known))
        return Log(self.base, electorates, tuple(map(self.consensus.signed, kept)))

    # -- rounds ------------------------------------------------------------------------------------

    def _now(self) -> float:
        self._latest = max(self._latest, self._read_clock())
        return self._latest

    def _oldest(self) -> int:
        return max(self.base.round + 1, self.round - self._kept)

    def _begin(self, round: int) -> None:
        """Do what is due when ``round`` begins; rounds during which the process slept are left
        out.
        """
        if self._agreements.get(self.round - OPENS) is not None and self.round < round:
            self._open(final=True)
        self.round, self._pulled, self._started = round, 0, True
        self.consensus.advance(round, round * self.round_s)
        for old in [old for old in self._agreements if old < round - OPENS]:
            del self._agreements[old]
        self._enter()
        self._appeal()

    def _enter(self) -> None:
        entries = self.consensus.ledger.entries_of(self.peer)
        fresh = any(self.round - entry.round < self.rules.life // 2 for entry in entries)
        if fresh or self.table.is_banned(self.peer, self.round):
            return
        anchor = self._chain(self.round).anchor
        self.member.try_publish(
            Entry(
                peer=self.peer,
                run=self.run,
                round=self.round,
                operator=self.operator,
                anchor=anchor,
            )
        )

    def _chain(self, round: int) -> Chain:
        """Return the chain of the entry of ``round``: always the same, so that a node that was
        started again can open what it planted before. Only the holder of the key can compute it,
        and no record begins like what is signed here.
        """
        secret = self._sign(b"shoal/verification/1/secret\x00" + f"{self.run} {round}".encode())
        return Chain(hashlib.sha256(secret).digest(), round, self.rules.life + BEHIND)

    def _link(self, round: int) -> bytes | None:
        """Return the link of ``round`` in the own chain that counts then; None if there is none, or
        its entry has another chain.
        """
        entry = anchored(self.consensus.ledger, self.peer, round, self.rules)
        if entry is None or (chain := self._chain(entry.round)).anchor != entry.anchor:
            return None
        return chain.link(round)

    def _appeal(self) -> None:
        """Open planted claims once all claims of their round are settled; and ask for a second draw
        where one that was to be right is rejected, as by colluders drawn together. By the records
        alone, so also after a restart; but who was away when it was checked, with its evidence, was
        rejected rightly.
        """
        known = self.consensus
        for round in range(max(self.round - self.rules.appeal_rounds, 0), self.round - SETTLED + 2):
            link, before = self._link(round), known.electorates.get(round - BEHIND)
            if link is None or before is None:
                continue
            for claim in known.ledger.claims_of(self.peer, round):
                ruling = known.ruling(claim.id)
                appealed = any(
                    appeal.peer == self.peer for appeal in known.ledger.appeals(claim.id)
                )
                if appealed or ruling is None or ruling.outcome == "unverified":
                    continue
                attempt = len(ruling.trials) - 1 - (ruling.appeal is not None)
                if must_plant(link, before.beacon, claim.slot, self.rules.planted):
                    self.member.try_publish(
                        Opening(
                            peer=self.peer,
                            round=self.round,
                            claim=claim.id,
                            attempt=attempt,
                            link=link,
                        )
                    )
                elif (
                    ruling.outcome == "invalid"
                    and ruling.appeal is None
                    and round + OPENS > self._came
                ):
                    self.member.try_publish(
                        Dispute(peer=self.peer, round=self.round, claim=claim.id, attempt=attempt)
                    )

    def _state(self) -> None:
        """Compute the scores, and publish this peer's view of the electorate that is due."""
        self._stated = self.round
        round, known = self.round - OPENS, self.consensus
        if round < 0:
            return
        self._forget()
        self.table = self._reckon(known.ledger, self.base, known.electorates)
        own = electorate(self.run, round, known.ledger, known.electorates, self.rules, self.table)
        view = View(
            peer=self.peer, run=self.run, round=round, root=root(own), table=self.table.digest
        )
        agreement = self._agreements.setdefault(round, ViewQuorum(round))
        recent = [
            at
            for at in range(round - self.rules.life, round)
            if at in known.electorates and known.electorates[at].operators
        ]
        voters = (
            set(known.electorates[recent[-1]].operators) & set(own.operators) if recent else None
        )
        agreement.propose(view, own, voters or None)
        self.member.try_publish(view)

    def _forget(self) -> None:
        known, before = self.consensus, self.round - self._kept
        if before > 0 and self.base.round < before - 1:
            self.base = compute_scores(
                known.ledger, known.electorates, self.rules, self.prices, before - 1, self.base
            ).base()
            known.forget(before)

    def _reckon(self, ledger: Ledger, base: Table, electorates: dict[int, Electorate]) -> Table:
        settled = max(self.round - SETTLED, base.round)
        return compute_scores(ledger, electorates, self.rules, self.prices, settled, base)

    def _open(self, final: bool) -> None:
        """Open the draws of the agreed electorate, also if it is learned late; nobody is drawn if
        there is no agreement.
        """
        round = self.round - OPENS
        agreement = self._agreements.get(round)
        if agreement is None or agreement.proposed is None or round in self.consensus.electorates:
            return
        found = agreement.electorate
        if found is None and final and agreement.root is None:
            found = void(self.run, round)
        if found is not None:
            self.consensus.open(found, (round + OPENS) * self.round_s + 3 * self.times.skew_s)

    # -- records of others -------------------------------------------------------------------------

    def _view(self, view: View) -> None:
        self._agreements.setdefault(view.round, ViewQuorum(view.round)).take(view)

    def _adopt(self, log: Log, agreement: ViewQuorum) -> None:
        """Adopt another peer's electorates and base if they give the table that counts; if need be
        without records that it does not have, such as those that came too late for most peers.
        """
        known, settled = self.consensus, max(self.round - SETTLED, -1)
        mine = self._reckon(known.ledger, self.base, known.electorates)
        if agreement.table in (None, mine.digest):
            self.table = mine
            return
        before = self._oldest() - BEHIND - 1
        history = {
            other.round: other
            for other in log.electorates
            if before <= other.round < agreement.round
        }
        theirs = {signed.record.id for signed in log.records}
        late = {
            id(record)
            for record in known.ledger
            if record.id not in theirs and known.ledger.stamp(record) <= settled
        }
        without = Ledger(record for record in known.ledger if id(record) not in late)
        bases = [self.base]
        if log.base.round == self.base.round or not self.base.standings:
            bases.append(log.base)
        for ledger in (known.ledger, without):
            for base in bases:
                table = self._reckon(ledger, base, {**known.electorates, **history})
                if table.digest == agreement.table:
                    known.electorates.update(history)
                    self.base, self.table = base, table
                    if ledger is not known.ledger:
                        known.keep(ledger)
                    return


_ORDER = {
    kind: at
    for at, kind in enumerate(
        ("entry", "claim", "dispute", "opening", "commitment", "reveal", "verdict")
    )
}

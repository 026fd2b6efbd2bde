"""What every part of an exchange is given: the node in its swarm, the time limits, and what it has
seen of others.

What an exchange may hold of a node's training (`TrainingTime`) follows from what exchanges usually
hold there: the median of the newest exchanges, one of each partner, also if it was given up: slow
links are usual where all have them, and one slow peer does not make the usual. An exchange that
holds training for longer than `SEVERAL` times that, and than half a round, is given up; a fragment
larger than the usual one has as much more. Before there is a measure it has the time of its bytes
over a link of half 1 Mbit/s.

While a mean is on its way a round waits for a partner that has not come yet as long, or `SEVERAL`
times what partners usually let it wait, or what is left of `SPARE_S`, to which `GIVES` of all time
comes back. Most partners are there. But who waits for none that is late for once is ahead of all
from then on: sixteen nodes on two processors met in half of their rounds.

What an exchange holds beyond `OFTEN` times the usual is its peer's cost, however well it ends, and
each round gives `GIVES` of its time back. Who has cost `COSTLY` of a round more than that is passed
over for as many rounds as it takes to give it.

**Rounds** (`RoundEvidence`). Others' words move a node's round no further than peers that it has
met, and its own clock, make plausible. A round is a number that any stranger can state, and keys
are free. So neither one peer's answer nor the records of many count, but the rounds of peers with
the same model with which this node has exchanged, whose lower median it follows. Its clock is a
limit too: what peers `QUICKER` times as quick as itself could have done since it began.

While it has met fewer than two of those present, a single peer's word would decide. Then what
members said to it themselves counts, met or not, if they are two at least. If they are not, it
moves at most `ALONE` rounds beyond where its own pace brings it, until it has exchanged: a peer
that is further ahead is alone, and comes back to it (`RoundEvidence.back`).

That median is late, for records are seconds old, and with it alone peers of unlike speed seldom
meet. So whatever a peer that it has met says to this node counts as its round at once, and one word
after each exchange moves it up to two rounds further. Had every word that effect, a liar would
drive two honest nodes before it, one round each time, for each follows the other. A peer that is
met in an earlier round than it has stated has lied, and its word has this effect no more.

A node that is ahead of all others, because its checkpoint or its snapshot was, meets nobody, and
they do not believe it. After `ALONE` rounds without an exchange it goes back to where those are
that call it, if that is more than as many rounds behind, but not to before its last exchange with
them, nor on a stranger's word while one that it has met is there. After twice as many it goes back
wherever they are. Of two peers that are all there are one goes back at once.

`PairRounds` are the rounds that a node's meetings are in, when several are under way at once, one
for each fragment. Round numbers grow by one with every fragment sent, so those of one fragment are
``fragments`` apart; a contribution that moves to another round keeps its remainder. All of a node's
rounds move together: if the swarm is eight rounds further with one fragment, it is with all. So a
node numbers what it sends itself, and adds one ``shift`` to get the swarm's round. The optimizer,
in whose thread contributions are handed in, learns of a shift only when it applies an exchange;
until then its numbers are lower. In a group a node is in the round that the optimizer counts
(`RoundTracker`).

**Peers that are passed over** (`PassedOver`), for a while, as if they were dead: those that wasted
this node's rounds. A peer that breaks off again and again, or is never free, is passed over up to
the next multiple of 8 rounds, and of 32 after each further failure in a row; one that costs
training time (`TrainingTime`) for ever longer terms (`TERMS`). An honest peer on a bad link comes
back so: one exchange, or `FORGOTTEN` rounds without a failure, clear its record. Those terms end in
the same rounds at all nodes. Else two that pass each other over would come back by turns, each
turned away by the other and so passing it over anew: four peers stayed two pairs for good. What
breaks off while this node meets nobody at all may be its own line: it counts once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low
from typing import TYPE_CHECKING

from shoal.swarm.identity import Identity
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.pacing.progress import extension_s
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

# bytes a second: time for so many is given in any case, and more to what moves
# (`shoal.swarm.pacing.progress`)
LEAST_RATE = 1e6
LARGEST_S = 6 * 3600.0  # seconds that a transfer may take however much it moves
SHARE, LONGEST_S = (
    0.2,
    300.0,
)  # of the time from one round to the next, and seconds at most, that a node waits for others
OVERLAPPED_S = 3600.0  # seconds at most that a node waits for others while that costs no training


@dataclass(frozen=True)
class PeerContext:
    """One node in one swarm, as its exchange sees it."""

    host: Host
    """Serves the exchange's protocols."""
    identity: Identity
    """Signs what this node sends."""
    swarm: str
    """The swarm id, which is also the run in every ``RoundKey``."""
    model: str
    """``model_digest`` of the averaged parameters; members with another one are ignored."""
    seed: int
    """Seed of the pairing and of the order of leaders, equal at all peers."""
    members: Callable[[], Mapping[str, Member]]
    """Returns the members present now by peer id (``Directory.members``)."""
    look: Callable[[], None] = lambda: None
    """Called when an unknown peer calls (``Directory.look``)."""
    is_barred: Callable[[str], bool] = lambda peer: False
    """Tells the peers with which this node exchanges nothing (``Directory.is_barred``)."""
    known: Callable[[], Mapping[str, Member]] = dict
    """Returns peers that need not be members here any more, whom rounds that are under way still
    meet (``Directory.everyone``).
    """

    @property
    def me(self) -> str:
        return self.identity.peer_id


@dataclass(frozen=True)
class ExchangeTimeouts:
    """The limits of one exchange, in seconds."""

    wait: float = 10.0
    """How long a round waits for a partner or a group."""
    chunk: float = 5.0
    """Silence, no byte and no heartbeat, after which a transfer or a peer is given up."""
    exchange: float = 120.0
    """How long one transfer or reduction may take, if it moves no more than a slow link carries in
    this time (`moving`).
    """
    trial: float = 0.0
    """How much longer a partner may take to accept a contribution: it tries it on data."""

    def moving(self, nbytes: int) -> float:
        """Return how long the transfer of ``nbytes`` bytes each way may take, however little it
        moves.
        """
        return max(self.exchange, min(nbytes / LEAST_RATE, LARGEST_S))

    def longest(self, nbytes: int) -> float:
        """Return how long it may take if it keeps on moving."""
        return max(self.moving(nbytes), extension_s(nbytes))

    def probe(self, left: float) -> float:
        """Return how long a peer has to answer at all, if ``left`` seconds of a round are left: a
        third, because two that sleep must not use up a round. No constant: a round trip or two must
        fit, also over a satellite.
        """
        return min(self.chunk, left / 3)


KEPT_S = 600.0  # seconds without a call, after which a stream is ended
KEPT, KEPT_EACH = (
    32,
    4,
)  # streams at most, and to one peer, with which several fragments may be exchanged at once
ANSWERED = 64  # streams of callers that wait for their next call, at most


class KeptStreams:
    """Streams on which a call of this node has ended well.

    The next call to the peer needs no round trip to open one, and the
    windows of flow control, with which a new stream takes four round trips for 1 MB, have grown.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._idle: dict[Stream, asyncio.TimerHandle] = {}  # the one used last is the last

    def keep(self, stream: Stream) -> None:
        """Keep ``stream`` until it is taken, or others take its place."""
        self._idle[stream] = asyncio.get_running_loop().call_later(KEPT_S, self._end, stream)
        of_peer = [other for other in self._idle if other.peer_id == stream.peer_id]
        for oldest in {*of_peer[:-KEPT_EACH], *list(self._idle)[:-KEPT]}:
            self._end(oldest)

    def take(self, peer: str) -> Stream | None:
        """Return a kept stream to ``peer`` that may be used, if there is one; it is the
        caller's.
        """
        for stream in [other for other in reversed(self._idle) if other.peer_id == peer]:
            if self._host.usable(stream):
                self._idle.pop(stream).cancel()
                return stream
            self._end(stream)
        return None

    def _end(self, stream: Stream) -> None:
        self._idle.pop(stream).cancel()
        stream.close()


async def answer_all(
    host: Host,
    protocol: str,
    stream: Stream,
    answer: Callable[[Stream], Awaitable[bool]],
    waiting: StreamPlaces,
) -> None:
    """Answer the calls on a stream, one after another; ``answer`` returns whether another may
    follow. It waits for each in one of the places ``waiting``, and each counts as one on a new
    stream does.
    """
    while await answer(stream) and waiting.take(stream):
        try:
            more = await stream.more(KEPT_S)
        finally:
            waiting.free(stream)
        if not (more and host.resource_manager.renew(stream, protocol)):
            return


SEVERAL, LONGER = 4, 1.5  # times what exchanges usually hold, and what they take in all: given up
OFTEN, FREE_S = 3, 0.5  # times the usual, and seconds at least: of no cost
LEAST_S = (
    1.0  # seconds that every exchange may hold training, and of the shortest round that counts
)
FIRST_S, FIRST_RATE = (
    2.0,
    62.5e3,
)  # seconds, and bytes a second each way, of an exchange before there is a measure
GIVES, COSTLY, COSTLY_S = 0.03, 0.15, 1.0  # parts of a round; seconds at least
# seconds that training waits for partners which come late, before they are more than a part of its
# time
SPARE_S = 4.0
LATE, LATE_S = (
    0.25,
    3.0,
)  # of a round, and seconds at least, that a group's first two members wait for the others
PARTNERS, PEERS = 16, 1024  # remembered


class TrainingTime:
    """The time of one node's rounds: how long each waits for others, and how much training time its
    exchanges hold. ``fragments``: sent in turn.

    A round waits for others as long as is set, or in long rounds a fifth of the time of a round.
    Peers drift apart by a part of a round, not by seconds: where an inner step takes ten seconds,
    the best of partners is later than a setting that suits quick rounds. The shorter of the last
    two rounds counts, so that one pause is no measure. A round is the time from one sending of a
    fragment to its next, whatever else is sent meanwhile.
    """

    def __init__(self, timeouts: ExchangeTimeouts, fragments: int) -> None:
        self.timeouts, self._fragments = timeouts, fragments
        self._began: dict[int, float] = {}
        self._periods: dict[int, tuple[float, float]] = {}
        self.holds = Newest[str, float](PARTNERS)
        """Peer -> seconds for which the newest exchange with it held training."""
        self.took = Newest[str, float](PARTNERS)
        """Peer -> seconds of the newest exchange with it in all."""
        self._nbytes = Newest[str, int](PARTNERS)
        """Peer -> bytes each way of that, of this node's own contribution: nobody's word."""
        self._waits = Newest[str, float](PARTNERS)
        """Peer -> seconds that training waited for it to come to the newest round with it."""
        self._spare, self._spared = SPARE_S, 0.0
        self._owed = Newest[str, tuple[float, int]](PEERS)
        """Peer -> seconds that it had cost more than it gave, and the round of that."""

    def begin(self, now: float, fragment: int = 0) -> float:
        """Note that a round of ``fragment`` begins; return the seconds since its last one began,
        infinite for the first.
        """
        period = now - self._began.get(fragment, float("-inf"))
        self._began[fragment] = now
        if period < float("inf"):
            self._periods[fragment] = (self._periods.get(fragment, (0.0, 0.0))[1], period)
        return period

    def period(self, fragment: int = 0) -> float:
        """Return the seconds of a round of ``fragment``; 0 while they are not known."""
        return min(self._periods.get(fragment, (0.0, 0.0)))

    def patience(self, fragment: int = 0) -> float:
        """Return the seconds to wait for others in a round of ``fragment``."""
        return max(self.timeouts.wait, min(self.period(fragment) * SHARE, LONGEST_S))

    def limit(self, nbytes: int, fragment: int) -> float:
        """Return how long a round may take: to form the pair or group, the transfer of ``nbytes``
        bytes each way, its commit.
        """
        return self.patience(fragment) + self.timeouts.longest(nbytes) + 8 * self.timeouts.chunk

    def budget(self, nbytes: int, fragment: int, before: float = 0.0) -> float:
        """Return the seconds for which an exchange of ``nbytes`` bytes each way may hold training
        that has gone on ``before``.
        """
        half = min(self._round_s(fragment) / 2, self.patience(fragment))
        if self.holds and fragment < self._fragments:
            # At the end training waits for all of an exchange, which else goes on meanwhile.
            times = max(nbytes / median_low(self._nbytes.values()), 1.0) if self._nbytes else 1.0
            whole = LONGER * times * median_low(self.took.values()) - before if self.took else 0.0
            return max(
                LEAST_S, SEVERAL * times * median_low(self.holds.values()), half, whole
            )  # with a contribution's trials
        # The last average is of all weights, and so larger than what was measured.
        return max(FIRST_S, nbytes / FIRST_RATE, half) + self.timeouts.trial

    def awaiting(self, now: float, fragment: int) -> float:
        """Return the seconds for which training may wait, from ``now`` on, for a partner to come to
        a round of ``fragment``.
        """
        self._spare, self._spared = (
            min(self._spare + GIVES * max(now - self._spared, 0.0), SPARE_S),
            now,
        )
        return max(
            self.budget(0, fragment),
            SEVERAL * median_low(self._waits.values() or (0.0,)),
            self._spare,
        )

    def waited(self, peer: str, seconds: float) -> float:
        """Note that training waited ``seconds`` for ``peer`` to come; return those beyond `OFTEN`
        times the usual and the spare.
        """
        others = [waited for other, waited in self._waits.items() if other != peer]
        free = max(OFTEN * median_low(others or (0.0,)), self._spare)
        self._waits[peer], self._spare = seconds, max(self._spare - seconds, 0.0)
        return max(seconds - free, 0.0)

    def forming(self, fragment: int) -> float:
        """Return the seconds for which the first members of a group wait for the others."""
        return max(LATE * self._round_s(fragment), LATE_S)

    def spent(
        self,
        peer: str,
        round: int,
        fragment: int,
        held: float,
        *,
        whole: bool,
        took: float = 0.0,
        nbytes: int = 0,
        beside: Sequence[tuple[float, float]] = (),
    ) -> dict[str, int]:
        """Note that an exchange of ``nbytes`` each way with ``peer`` held training for ``held`` of
        its seconds, and those of others ``beside`` it in a group: if most took half as long, the
        line is the own. ``whole``: it was not given up. Return who is passed over for how many
        rounds: it, or the first, now measured."""
        before = dict(self.holds)
        self.holds[peer] = held
        if nbytes:
            self._nbytes[peer] = nbytes
        usual = (
            max(OFTEN * median_low(before.values()), FREE_S) if before else math.inf
        )  # over a satellite the first ones are dear
        others = [seconds for other, seconds in self.took.items() if other != peer]
        often = median_low(others) if others else 0.0
        own_held, own_took = [2 * median_low(part) for part in zip(*beside, strict=True)] or (
            0.0,
            0.0,
        )
        free = max(usual, often, own_held)
        if whole:
            self.took[peer] = max(took, held)
        costs = {peer: max(held - free, 0.0) if whole or not before or held <= own_held else held}
        # training went on for rounds in which this fragment was not sent, so that nobody else was
        # met with it
        if others:
            costs[peer] += (
                max(took - held - max(self.period(fragment), often, own_took), 0.0)
                / self._fragments
            )
        if len(before) == 1 and peer not in before:
            costs |= {
                first: max(seconds - max(OFTEN * held, FREE_S), 0.0)
                for first, seconds in before.items()
            }
        return {
            one: rounds
            for one, cost in costs.items()
            if (rounds := self.cost(one, round, fragment, cost))
        }

    def cost(self, peer: str, round: int, fragment: int, seconds: float) -> int:
        """Note that ``peer`` cost training ``seconds``, or did not come in these; return for how
        many rounds it is passed over.
        """
        period = max(self._round_s(fragment), LEAST_S)
        owed, since = self._owed.pop(peer, (0.0, round))
        owed = max(owed - max(round - since, 0) * GIVES * period, 0.0) + seconds
        self._owed[peer] = owed, round
        return (
            math.ceil(owed / (GIVES * period))
            if seconds and owed > max(COSTLY_S, COSTLY * period)
            else 0
        )

    def _round_s(self, fragment: int) -> float:
        """Return the seconds of a round; 0 while they are not known."""
        return self.period(fragment) / self._fragments


QUICKER = 256  # a large GPU against a small CPU
# rounds of every fragment without an exchange, and rounds ahead of the others, after which a node
# goes back
ALONE = 4
FEW = 3  # peers, of which one that lies cannot be a median
SHORTEST_S = 0.01  # of a round
MEASURED = 16  # rounds
REMEMBERED = 1024  # peers


class RoundEvidence:
    """What one node knows of others' rounds.

    ``fragments``: sent in turn, each with the next number. ``now``: the loop's time.
    """

    def __init__(self, context: PeerContext, fragments: int) -> None:
        self._context, self._fragments = context, fragments
        self._met: dict[str, int] = {}
        """Peers with which this node has exchanged -> the furthest round that they stated to it."""
        self._shared: dict[str, int] = {}
        """The round of the last exchange with each."""
        self._said = Newest[str, int](REMEMBERED)
        """Peers that it has not met -> the round that they stated to it last."""
        self._pushes: set[str] = set()
        """Those of them whose next word counts for more than the median."""
        self._behind = Newest[str, int](REMEMBERED)
        """Peers that called for an earlier round than this node is in, since its last exchange ->
        that round.
        """
        self._alone = 0
        self._began: tuple[float, int] | None = None
        """Time and number of the first round."""
        self._ahead = 0
        """Rounds by which it moved beyond its own pace since its last exchange."""
        self._begins: deque[float] = deque(maxlen=MEASURED)
        """Times of its newest rounds."""
        self._newest = 0
        """The number of the newest one."""

    @property
    def partners(self) -> frozenset[str]:
        """The peers with which this node has exchanged, for any thread: a record alone costs
        nothing, and counts for no weights.
        """
        return frozenset(dict(self._met))

    def knows(self, peer: str) -> bool:
        """Return whether this node has exchanged with ``peer``. For any thread."""
        return peer in self._met

    def begin(self, now: float, round: int) -> None:
        """Note that this node hands in its contribution to ``round``."""
        self._began = self._began or (now, round)
        if self._begins:
            self._ahead += max(round - self._newest - max(self._own(now)[1], 1), 0)
        self._newest = max(self._newest, round)
        self._begins.append(now)

    def _own(self, now: float) -> tuple[float, int]:
        """Return the seconds of this node's usual round, and how many of these went by since its
        newest began.
        """
        begins = list(self._begins)
        if len(begins) < 2:
            return math.inf, 0
        usual = max(
            median(later - earlier for earlier, later in itertools.pairwise(begins)),
            SHORTEST_S / self._fragments,
        )
        return usual, int((now - begins[-1]) / usual)

    def met(self, peers: Iterable[str], round: int) -> None:
        self._alone = self._ahead = 0
        self._behind.clear()
        for peer in peers:
            self._said.pop(peer, None)
            stated = self._met.pop(peer, 0)
            self._met[peer], self._shared[peer] = max(round, stated), round
            if stated < round + self._fragments:
                self._pushes.add(peer)
        while len(self._met) > REMEMBERED:
            oldest = next(iter(self._met))
            del self._met[oldest], self._shared[oldest]
            self._pushes.discard(oldest)

    def heard(self, peer: str, round: int) -> None:
        """Note that ``peer`` itself stated the ``round`` in which it is."""
        if peer in self._met:
            self._met[peer] = max(round, self._met[peer])
        else:
            self._said[peer] = round

    def missed(self) -> None:
        self._alone += 1

    def called(self, peer: str, round: int) -> None:
        """Note that ``peer`` wants to meet this node in ``round``, which is over here."""
        self._behind[peer] = round

    def _others(self) -> dict[str, int]:
        me, model = self._context.me, self._context.model
        return {
            peer: one.round
            for peer, one in self._context.members().items()
            if peer != me and one.model == model
        }

    def furthest(self, peer: str, said: int, now: float) -> int:
        """Return the round to which this node may move at most, now that ``peer`` has ``said`` in
        which it is.
        """
        others = {other: max(at, self._met.get(other, 0)) for other, at in self._others().items()}
        met = [at for other, at in others.items() if other in self._met]
        words = met + [
            max(at, others[other]) for other, at in dict(self._said).items() if other in others
        ]
        began, first = self._began or (now, 0)
        usual_s, passed = self._own(now)
        possible = first + self._fragments * QUICKER * (
            1 + int((now - began) / usual_s / self._fragments)
        )
        usual = median_low(met if len(met) > 1 else words or [said])
        if len(words) < 2:
            reach = self._newest + passed + max(ALONE * self._fragments - self._ahead, 0)
            usual = (
                usual if usual <= reach else self._newest
            )  # there it is met; half way there is nobody
        if said > usual and peer in self._pushes:
            self._pushes.discard(peer)
            half = median_high(met) if len(met) > FEW else usual
            return min(min(half, usual + self._fragments) + self._fragments, possible)
        # By a word beyond the others it moves to where they have been: a liar would send two of
        # them to each other's next rounds.
        return min(usual if said <= usual else max(usual - self._fragments, 0), possible)

    def back(self, round: int) -> int | None:
        """Return the round to go back to from ``round``, in which this node is alone; None if it is
        not.
        """
        rounds = self._alone // self._fragments
        if rounds < 1 or not self._behind:
            return None
        behind, met, others = (
            dict(self._behind),
            dict(self._met),
            self._others(),
        )  # the host's loop goes on meanwhile
        last = self._shared if rounds < 2 * ALONE else {}
        callers = {peer: max(at, last.get(peer, 0)) for peer, at in behind.items() if peer in met}
        if not callers and (rounds >= 2 * ALONE or met.keys().isdisjoint(others)):
            callers = behind
        if not callers:
            return None
        distance = round - median_low(callers.values())
        patience = (
            2 * ALONE if distance <= ALONE * self._fragments else ALONE if len(others) > 1 else 1
        )
        if distance < self._fragments or rounds < patience:
            return None
        self._alone, self._ahead, self._began = 0, 0, None
        self._behind.clear()
        self._begins.clear()
        # What they stated is as old as this node's way here, but who stated more than that was no
        # guide.
        self._met = {peer: at if at > round else 0 for peer, at in met.items()}
        self._said.clear()
        self._newest = round - distance // self._fragments * self._fragments
        return self._newest


class PairRounds:
    """The numbers of one node's rounds.

    Thread-safe: the training thread hands in, the host's loop begins and moves. ``overlap``:
    training goes on while this node waits for a partner.
    """

    def __init__(self, fragments: int, overlap: bool = False) -> None:
        self.fragments, self.overlap = fragments, overlap
        self._lock = threading.Lock()
        self._handed_in = self._begun = -1
        """The own numbers of the newest contribution, as the training thread and as the loop sees
        it.
        """
        self._shift = self._known = 0
        """From own numbers to the swarm's rounds, and to those that the optimizer counts."""
        self._been: dict[int, int] = {}
        """The furthest round of each fragment that this node has been in."""

    @property
    def next_round(self) -> int:
        """The swarm's round of the next contribution."""
        return self._handed_in + 1 + self._shift

    @next_round.setter
    def next_round(self, round: int) -> None:
        """Note which round the optimizer will hand in next."""
        with self._lock:
            self._known = round - (self._handed_in + 1)
            self._shift = max(self._shift, self._known)

    def go_back(self, round: int) -> None:
        with self._lock:
            self._known = self._shift = round - (self._handed_in + 1)
            self._been = {}

    def hand_in(self, round: int) -> int:
        """Return the own number of a contribution that the optimizer hands in for ``round``."""
        with self._lock:
            number = round - self._known
            self._handed_in = max(self._handed_in, number)
            return number

    def leave_out(self) -> bool:
        """Let the number of the next contribution go by without one; return True.

        What is in flight still moves with the rest.
        """
        with self._lock:
            self._handed_in += 1
        return True

    def begin(self, number: int, round: int, fragment: int) -> None:
        """Note that the meeting of a contribution begins: from now on this node is in its round."""
        self._begun = max(self._begun, number)
        self._been[fragment] = max(round, self._been.get(fragment, 0))

    def move(self, number: int, round: int, fragment: int) -> None:
        """Note that a contribution moves to ``round``, and with it all that this node will send."""
        with self._lock:
            self._shift = max(self._shift, round - number)
        self._been[fragment] = max(round, self._been.get(fragment, 0))

    def instead(self, round: int, fragment: int, at: int | None) -> int | None:
        """Return the round to which a caller with ``fragment`` should move, or None: it is met in
        ``round``, now or once this node is there, or not at all (`through`). ``at``: the round of
        the meeting of that fragment that is under way here.
        """
        been, soon = self._been.get(fragment), self._begun + 1 + self._shift
        if at is not None and at > round:
            soon = at
        elif self.overlap and been is not None:
            soon = been
        return round + self._up(soon - round, fragment) if round != at and round < soon else None

    def through(self, round: int, fragment: int, at: int | None) -> bool:
        """Return whether this node had its meeting in ``round`` and has not begun the next, or
        moved beyond and will not be there.

        Where training goes on meanwhile, a caller for that round must not be sent ahead to the next
        one: it would be there before the others, who would find it gone when they come, and be sent
        ahead themselves, ever further. So no peer moves to a round that nobody has begun, and the
        numbers grow as the quickest peer counts.
        """
        been, soon = self._been.get(fragment), self._begun + 1 + self._shift
        return self.overlap and been is not None and round != at and been <= round < soon

    def within(self, wanted: int, fragment: int, mine: int, limit: int) -> int:
        """Return the round to move to from ``mine`` when a peer answers ``wanted``: that far, but
        not beyond ``limit``.

        It is one of the same fragment, whatever the peer answers.
        """
        return mine + max(min(wanted, limit) - mine, 0) // self._step(fragment) * self._step(
            fragment
        )

    def _step(self, fragment: int) -> int:
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no
        # step.
        return self.fragments if fragment < self.fragments else 1

    def _up(self, distance: int, fragment: int) -> int:
        step = self._step(fragment)
        return -(-distance // step) * step


class RoundTracker:
    """The rounds that a node has begun, joined and ended.

    A peer that began in the middle may have other remainders than the swarm:
    it gets the swarm's as an answer.
    """

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.next_round = 0
        """One beyond the furthest round begun, or the round in which the node joined."""
        self._begun: dict[int, int] = {}
        self._over: dict[int, int] = {}
        self._formed = Newest[tuple[int, int], None](REMEMBERED)
        self._elsewhere: dict[tuple[int, int], str] = {}

    def go_back(self, round: int) -> None:
        self.next_round, self._begun, self._over = round, {}, {}
        self._formed.clear()

    def begin(self, round: int, fragment: int) -> None:
        """Note that this node's contribution to ``round`` is there."""
        self.next_round = max(self.next_round, round + 1)
        self._begun[fragment] = max(round, self._begun.get(fragment, 0))

    def join(self, round: int, fragment: int, leader: str) -> None:
        """Note that this node waits at ``leader`` for its group."""
        self._elsewhere[round, fragment] = leader

    def leave(self, round: int, fragment: int) -> None:
        self._elsewhere.pop((round, fragment), None)

    def end(self, round: int, fragment: int) -> None:
        """Note that this node's own part in ``round`` is over: its group was formed, or it has
        none.
        """
        if round < self.next_round:  # else this node went back while it was in it
            self._over[fragment] = max(round, self._over.get(fragment, 0))
        self.leave(round, fragment)

    def formed(self, round: int, fragment: int) -> None:
        """Note that this node has formed the group, with its own contribution or without.

        That has no effect on other rounds: otherwise two peers could send this node far away.
        """
        self._formed[round, fragment] = None

    def leader(self, round: int, fragment: int) -> str | None:
        """Return the leader at which this node itself waits in ``round``, if it does."""
        return self._elsewhere.get((round, fragment))

    def instead(self, round: int, fragment: int) -> int | None:
        """Return the round to which a contribution to ``round`` should move, or None if it is
        neither late nor out of step.
        """
        over, begun = self._over.get(fragment), self._begun.get(fragment)
        if (over is not None and round <= over) or (round, fragment) in self._formed:
            return max(round, over or 0, (begun or 0) - self.fragments) + self.fragments
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no
        # step.
        if begun is not None and (
            round < begun or (fragment < self.fragments and (round - begun) % self.fragments)
        ):
            return begun + self._up(max(round - begun, 0))
        if begun is None and round < self.next_round:
            return round + self._up(self.next_round - round)
        return None

    def _up(self, distance: int) -> int:
        return -(-distance // self.fragments) * self.fragments

    def within(self, wanted: int, mine: int, limit: int) -> int:
        """Return the round to move to from ``mine`` when a peer answers ``wanted``: that far, but
        not beyond ``limit``.
        """
        return max(mine, wanted - self._up(max(wanted - limit, 0)))


TERMS = (8, 32, 128, 512)  # up to the next multiple of so many rounds of each fragment
BROKEN = 2  # of these terms for failures; the others are for peers that cost time
FORGOTTEN = 64  # rounds after these


class PassedOver:
    """The peers that one node passes over. ``fragments``: sent in turn."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self.misses = Newest[str, tuple[int, int, bool]](REMEMBERED)
        """Peer -> its failures in a row, the round of the last one, and whether it cost time.

        Rounds of all fragments count.
        """
        self._met = -1  # the newest round with an exchange

    def missed(self, peer: str, round: int, over: int = 0) -> None:
        """Note that ``peer`` spent this node's round without an exchange, or so much time that it
        is passed over for ``over`` rounds.
        """
        count, last, cost = self.misses.get(peer, (0, 0, False))
        # Several meetings with one peer that fail at once, with a fragment each, count as one
        # failure.
        if not count or abs(round - last) >= self._fragments:
            most = len(TERMS) if over else max(count, BROKEN)
            if not count or over or self._met > last:
                count = min(
                    count + 1 if round < self._until(peer) + FORGOTTEN * self._fragments else 1,
                    most,
                )
            last = round
        while (
            1 < count < len(TERMS) and over > TERMS[count - 1] * self._fragments
        ):  # not at first: this node itself may have slept
            count += 1
        self.misses[peer] = count, last, cost or over > 0

    def met(self, peer: str, round: int) -> None:
        self._met = max(self._met, round)
        self.misses.pop(peer, None)

    def at(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is passed over in ``round``; not in one far before its failure,
        to which this node went back.
        """
        _, last, _ = self.misses.get(peer, (0, 0, False))
        return last - self._fragments < round < self._until(peer)

    def once(self, peer: str) -> bool:
        """Return whether ``peer`` has failed once since it was met."""
        return self.misses.get(peer, (0, 0, False))[0] == 1

    def costly(self, peer: str) -> bool:
        """Return whether ``peer`` spent this time recently."""
        return self.misses.get(peer, (0, 0, False))[2]

    def _until(self, peer: str) -> int:
        """Return the first round in which ``peer`` is no longer passed over."""
        count, last, _ = self.misses.get(peer, (0, 0, False))
        term = TERMS[count - 1] * self._fragments if count else 0
        return (last // term + 1) * term if term else 0

"""What a node has seen of others: how far their words move its round, and who is passed over because it wasted rounds.

**Rounds** (`RoundEvidence`). Others' words move a node's round no further than peers that it has met, and its own clock, make
plausible. A round is a number that any stranger can state, and keys are free. So neither one peer's answer nor the records of many
count, but the rounds of peers with the same model with which this node has exchanged, whose lower median it follows. Its clock is a
limit too: what peers `QUICKER` times as quick as itself could have done since it began.

While it has met fewer than two of those present, a single peer's word would decide. Then what members said to it themselves counts,
met or not, if they are two at least. If they are not, it moves at most `ALONE` rounds beyond where its own pace brings it, until it
has exchanged: a peer that is further ahead is alone, and comes back to it (`RoundEvidence.back`).

That median is late, for records are seconds old, and with it alone peers of unlike speed seldom meet. So whatever a peer that it
has met says to this node counts as its round at once, and one word after each exchange moves it up to two rounds further. Had every
word that effect, a liar would drive two honest nodes before it, one round each time, for each follows the other. A peer that is met
in an earlier round than it has stated has lied, and its word has this effect no more.

A node that is ahead of all others, because its checkpoint or its snapshot was, meets nobody, and they do not believe it. After
`ALONE` rounds without an exchange it goes back to where those are that call it, if that is more than as many rounds behind, but not
to before its last exchange with them, nor on a stranger's word while one that it has met is there. After twice as many it goes back
wherever they are. Of two peers that are all there are one goes back at once.

**Peers that are passed over** (`PassedOver`), for a while, as if they were dead: those that wasted this node's rounds. A peer that
breaks off again and again, or is never free, is passed over up to the next multiple of 8 rounds, and of 32 after each further
failure in a row; one that costs training time (`TrainingTime`) for ever longer terms (`TERMS`). An honest peer on a bad link comes
back so: one exchange, or `FORGOTTEN` rounds without a failure, clear its record. Those terms end in the same rounds at all nodes.
Else two that pass each other over would come back by turns, each turned away by the other and so passing it over anew: four peers
stayed two pairs for good. What breaks off while this node meets nobody at all may be its own line: it counts once.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from statistics import median, median_high, median_low

from shoal.swarm.exchange.context import PeerContext

QUICKER = 256  # a large GPU against a small CPU
ALONE = 4  # rounds of every fragment without an exchange, and rounds ahead of the others, after which a node goes back
SEVERAL = 3  # peers, of which one that lies cannot be a median
SHORTEST_S = 0.01  # of a round
MEASURED = 16  # rounds
REMEMBERED = 1024  # peers


class RoundEvidence:
    """What one node knows of others' rounds. ``fragments``: sent in turn, each with the next number. ``now``: the loop's time."""

    def __init__(self, context: PeerContext, fragments: int) -> None:
        self._context, self._fragments = context, fragments
        self._met: dict[str, int] = {}
        """Peers with which this node has exchanged -> the furthest round that they stated to it."""
        self._shared: dict[str, int] = {}
        """The round of the last exchange with each."""
        self._said: dict[str, int] = {}
        """Peers that it has not met -> the round that they stated to it last."""
        self._pushes: set[str] = set()
        """Those of them whose next word counts for more than the median."""
        self._behind: dict[str, int] = {}
        """Peers that called for an earlier round than this node is in, since its last exchange -> that round."""
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
        """The peers with which this node has exchanged. For any thread."""
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
        """Return the seconds of this node's usual round, and how many of these went by since its newest began."""
        begins = list(self._begins)
        if len(begins) < 2:
            return math.inf, 0
        usual = max(median(later - earlier for earlier, later in itertools.pairwise(begins)), SHORTEST_S / self._fragments)
        return usual, int((now - begins[-1]) / usual)

    def met(self, peers: Iterable[str], round: int) -> None:
        """Note an exchange with ``peers``."""
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
            while len(self._said) > REMEMBERED:
                del self._said[next(iter(self._said))]

    def missed(self) -> None:
        """Note a round without an exchange."""
        self._alone += 1

    def called(self, peer: str, round: int) -> None:
        """Note that ``peer`` wants to meet this node in ``round``, which is over here."""
        self._behind[peer] = round
        while len(self._behind) > REMEMBERED:
            del self._behind[next(iter(self._behind))]

    def _others(self) -> dict[str, int]:
        me, model = self._context.me, self._context.model
        return {peer: one.round for peer, one in self._context.members().items() if peer != me and one.model == model}

    def furthest(self, peer: str, said: int, now: float) -> int:
        """Return the round to which this node may move at most, now that ``peer`` has ``said`` in which it is."""
        others = {other: max(at, self._met.get(other, 0)) for other, at in self._others().items()}
        met = [at for other, at in others.items() if other in self._met]
        words = met + [at for other, at in dict(self._said).items() if other in others]
        began, first = self._began or (now, 0)
        usual_s, passed = self._own(now)
        possible = first + self._fragments * QUICKER * (1 + int((now - began) / usual_s / self._fragments))
        usual = median_low(met if len(met) > 1 else words or [said])
        if len(words) < 2:
            reach = self._newest + passed + max(ALONE * self._fragments - self._ahead, 0)
            usual = usual if usual <= reach else self._newest  # there it is met; half way there is nobody
        if said > usual and peer in self._pushes:
            self._pushes.discard(peer)
            half = median_high(met) if len(met) > SEVERAL else usual
            return min(min(half, usual + self._fragments) + self._fragments, possible)
        # By a word beyond the others it moves to where they have been: a liar would send two of them to each other's next rounds.
        return min(usual if said <= usual else max(usual - self._fragments, 0), possible)

    def back(self, round: int) -> int | None:
        """Return the round to go back to from ``round``, in which this node is alone; None if it is not."""
        rounds = self._alone // self._fragments
        if rounds < 1 or not self._behind:
            return None
        behind, others = dict(self._behind), self._others()  # the host's loop goes on meanwhile
        last = self._shared if rounds < 2 * ALONE else {}
        callers = {peer: max(at, last.get(peer, 0)) for peer, at in behind.items() if peer in self._met}
        if not callers and (rounds >= 2 * ALONE or self._met.keys().isdisjoint(others)):
            callers = behind
        if not callers:
            return None
        distance = round - median_low(callers.values())
        patience = 2 * ALONE if distance <= ALONE * self._fragments else ALONE if len(others) > 1 else 1
        if distance < self._fragments or rounds < patience:
            return None
        self._alone, self._ahead, self._began = 0, 0, None
        self._behind.clear()
        self._begins.clear()
        # What they stated is as old as this node's way here, but who stated more than that was no guide.
        self._met = {peer: at if at > round else 0 for peer, at in self._met.items()}
        self._said.clear()
        self._newest = round - distance // self._fragments * self._fragments
        return self._newest


TERMS = (8, 32, 128, 512)  # up to the next multiple of so many rounds of each fragment
BROKEN = 2  # of these terms for failures; the others are for peers that cost time
FORGOTTEN = 64  # rounds after these


class PassedOver:
    """The peers that one node passes over. ``fragments``: sent in turn."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self.misses: OrderedDict[str, tuple[int, int, bool]] = OrderedDict()
        """Peer -> its failures in a row, the round of the last one, and whether it cost time. Rounds of all fragments count."""
        self._met = -1  # the newest round with an exchange

    def missed(self, peer: str, round: int, over: int = 0) -> None:
        """Note that ``peer`` spent this node's round without an exchange, or so much time that it is passed over for ``over``
        rounds.
        """
        count, last, cost = self.misses.get(peer, (0, 0, False))
        # Several meetings with one peer that fail at once, with a fragment each, count as one failure.
        if not count or abs(round - last) >= self._fragments:
            most = len(TERMS) if over else max(count, BROKEN)
            if not count or over or self._met > last:
                count = min(count + 1 if round < self._until(peer) + FORGOTTEN * self._fragments else 1, most)
            last = round
        while 1 < count < len(TERMS) and over > TERMS[count - 1] * self._fragments:  # not at first: this node itself may have slept
            count += 1
        self.misses[peer] = count, last, cost or over > 0
        self.misses.move_to_end(peer)
        while len(self.misses) > REMEMBERED:
            self.misses.popitem(last=False)

    def met(self, peer: str, round: int) -> None:
        """Note an exchange with ``peer``."""
        self._met = max(self._met, round)
        self.misses.pop(peer, None)

    def at(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is passed over in ``round``; not in one far before its failure, to which this node went back."""
        _, last, _ = self.misses.get(peer, (0, 0, False))
        return last - self._fragments < round < self._until(peer)

    def once(self, peer: str) -> bool:
        """Return whether ``peer`` has failed once since it was met."""
        return self.misses.get(peer, (0, 0, False))[0] == 1

    def costly(self, peer: str) -> bool:
        """Return whether ``peer`` spent this time recently."""
        return self.misses.get(peer, (0, 0, False))[2]

    def lately(self, round: int) -> bool:
        """Return whether any peer has spent this node's rounds lately."""
        return any(round < self._until(peer) + FORGOTTEN * self._fragments for peer in self.misses)

    def _until(self, peer: str) -> int:
        """Return the first round in which ``peer`` is no longer passed over."""
        count, last, _ = self.misses.get(peer, (0, 0, False))
        term = TERMS[count - 1] * self._fragments if count else 0
        return (last // term + 1) * term if term else 0

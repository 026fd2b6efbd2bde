"""The invariants of a simulated swarm, checked after every event and at its end; the first
violation raises `Broken`.

1. Whole or nothing. A peer takes the weighted mean of whole contributions, its own among them. Each
   contribution carries the name of its peer and its number, so the mean itself says whose it is.
2. A contribution counts in one exchange, or in two of a chain's middle. All peers that take the
   mean of an exchange take the same bits (in mod4: move by opposite amounts; so does the middle of
   a chain, by the sum); the others keep their own step whole.
   The two may come apart only where a fault touched one of them while it was at it (two generals).
3. A decision is made once, and never for a peer that has gone on.
4. Rounds grow, but for a peer that returns to the others, and each is of one fragment. Whatever a
   hostile one says, no peer is more than `AHEAD` rounds of every fragment beyond the number of
   rounds that the most diligent peer began, but for one that knew of no other member, or has met
   hostile ones and those that they led so far in half of the cases or more.
5. A round comes to its own end, before the limit at which the training thread would call it off.
6. Left in peace, the replicas come together within the swarm's patience: in groups of all they
   become equal, else nearer. In mod4 they do not go apart: who is too far away to be read takes
   over the others' weights, which nothing does here.
7. Tables are bounded, and nothing is left at the end: no task, no stream, no table entry but for
   `REMEMBERED`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.exchange.averaging import middle_mean
from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.weighted_mean import weighted_mean
from shoal.swarm.exchange.group.exchange import GroupExchange
from tests.sim.faults import FaultInjector
from tests.sim.isolation import ErrorCollector
from tests.sim.peers import SimContribution, SimPeer, SimSwarm

REMEMBERED = {
    "_outcomes": 1024,
    "_sealed": 1024,
    "_formed": 1024,
    "_begun": 8,
    "_over": 8,
    "_own": 8,
    "_absent": 64,
    "_silent": 64,
    "_unreached": 64,
    "misses": 64,
    "_misses": 64,
    "_met": 64,
    "_said": 64,
    "_shared": 64,
    "_begins": 64,
    "_pushes": 64,
    "holds": 16,
    "took": 16,
    "_took": 16,
    "_nbytes": 16,
    "_waits": 16,
    "_owed": 64,
    "_behind": 64,
    "_been": 8,
    "_began": 8,
    "sizes": 8,
    "_receiving": 8,
    "_periods": 8,
    "_events": 64,
    "_in_a_row": 64,
    "_seconds": 64,
    "_notes": 64,
    "_unread": 64,
    "_groups": 8,
    "_handed_in": 8,
    "_astray": 8,
}
"""Tables that may hold something when all is over, by name, and how much."""
AHEAD = 10  # rounds of every fragment
GROWN = 64  # entries of any other table, at any time
EQUAL = 1e-6  # the mean of equal values, with weights, may differ from them in the last bit
ROUNDED = 4e-6  # the middle of a chain: two means of values up to 32, of which float32 rounds 2e-6


Name = tuple[int, int]
"""Of a contribution: its peer's number, and its own."""
Exchange = tuple[Name, ...]


class Broken(AssertionError):
    """The error that an invariant does not hold."""


class Checks:
    """The checks of one swarm."""

    def __init__(self, swarm: SimSwarm, mischief: FaultInjector, errors: ErrorCollector) -> None:
        self._swarm, self._mischief, self._errors = swarm, mischief, errors
        self._rounds: dict[tuple[int, int], int] = {}
        self._misled: set[int] = set()
        """Processes that are ahead because they knew of the hostile member alone."""
        self._decided: dict[int, Any] = {}
        self._means: dict[Name, dict[Exchange, tuple[bytes | None, SimContribution]]] = {}
        """By contribution: the exchanges that it is in, each with the bits of its mean (None: known
        by the middle of a chain alone), and whose outcome that was.
        """
        self._taken: dict[Name, set[Exchange]] = {}
        """By contribution: the exchanges whose means its own peer took."""
        self._middles: list[tuple[SimContribution, torch.Tensor, list[tuple[Name, float]]]] = []
        """In mod4: what the middle of a chain moved by, and its partners' parts in that."""
        self._moved: dict[tuple[int, int], torch.Tensor] = {}
        """By contribution, in mod4: what its peer moved by, over its partner's share."""
        self._apart_at_calm: float | None = None
        swarm.outcome = self.outcome  # type: ignore[method-assign]

    def _fail(self, what: str) -> None:
        raise Broken(f"at {self._swarm.network.loop.time():.3f} s: {what}")

    def look(self) -> None:
        swarm = self._swarm
        if swarm.network.errors:
            raise swarm.network.errors[0]
        if self._errors.found:
            self._fail(self._errors.found[0])
        for peer in swarm.peers:
            now = peer.exchange.next_round
            process = id(peer.host), peer.went_back
            if now < self._rounds.get(process, 0):
                self._fail(f"the round of {peer.name} fell from {self._rounds[process]} to {now}")
            self._rounds[process] = now
            most = max(peer.serial for peer in swarm.peers) + AHEAD * swarm.setting.fragments
            if self._mischief.hostile and not peer.gone:
                self._dragged(peer, now > most)
            if (peer.round - peer.turn) % swarm.setting.fragments:
                self._fail(
                    f"{peer.name} sends fragment {peer.turn} in round {peer.round}, where nobody "
                    "else does"
                )
            for mine, handle in peer.in_flight.values():
                if isinstance(peer.exchange, GroupExchange):
                    mine.leaders.update(peer.exchange.rounds._elsewhere.values())
                self._decision(peer, handle._attempt.commit)
                self._decision(peer, handle._attempt.second)
        if self._apart_at_calm is None and swarm.network.loop.time() > swarm.setting.calm:
            self._apart_at_calm = swarm.spread()

    def _dragged(self, peer: SimPeer, beyond: bool) -> None:
        """Check a peer ``beyond`` all rounds that were begun: only one that knows of nobody who is
        honest and in step, or has met too few of them for the lower median, may be led there.
        """
        in_step = {
            other.id
            for other in self._swarm.peers
            if other is not peer and not other.gone and id(other.host) not in self._misled
        }
        evidence = peer.exchange.evidence
        met = evidence.partners & evidence._others().keys()
        is_outvoted = len(met) > 1 and len(in_step & met) <= (len(met) - 1) // 2
        if not beyond:
            self._misled.discard(id(peer.host))
        elif is_outvoted or not in_step & peer.members().keys():
            self._misled.add(id(peer.host))
        elif id(peer.host) not in self._misled:
            self._fail(f"{peer.name} is dragged to round {peer.exchange.next_round}")

    def _decision(self, peer: SimPeer, decision: Any) -> None:
        known = self._decided.get(id(decision), (decision, None, False))
        if known[1] is not None and decision.received is not known[1]:
            self._fail(f"{peer.name} decided twice")
        if known[1] is None and decision.received is not None:
            if known[2]:
                self._fail(f"{peer.name} committed after it had gone on")
            peer.swarm.network.trace.note(peer.swarm.network.loop.time(), peer.name, "committed")
        self._decided[id(decision)] = (decision, decision.received, decision.closed)

    # -- outcomes ----------------------------------------------------------------------------------

    def outcome(self, peer: SimPeer, mine: SimContribution) -> None:
        assert mine.ended is not None
        took = mine.ended - mine.needed - (peer.slept - mine.slept)
        if took >= mine.limit:
            self._fail(f"a round of {peer.name} took {took:.2f} s")
        self._bounded(peer, GROWN)
        name = (peer.number, mine.serial)
        taken = self._taken[name] = set()
        if mine.mean is not None:
            self._mean(peer, mine, mine.mean)
        for exchange, (_, taker) in self._means.get(name, {}).items():
            if exchange not in taken:
                self._apart(mine, taker)
        if self._apart_at_calm is not None and not self._swarm.over:
            self._swarm.over = self._swarm.spread() <= self._near()

    def _near(self) -> float:
        """Return how near to each other the replicas must come."""
        options, before = self._swarm.setting.options, self._apart_at_calm or 0.0
        whole = self._swarm.setting.kind == "group" and "max_group" not in options
        return EQUAL if whole else max(before * (4 if self._swarm.setting.mod4 else 0.5), EQUAL)

    def _mean(self, peer: SimPeer, mine: SimContribution, mean: Mean) -> None:
        if self._swarm.setting.kind == "pair" and len(mean.members) == 3:
            self._middle(peer, mine, mean)
            return
        parts = [
            self._named(number, float(value) * mean.weight / self._swarm.peers[number].weight)
            for number, value in enumerate(mean.tensors[1])
            if value != 0
        ]
        if mine not in parts or {part.peer for part in parts} != set(mean.members):
            self._fail(f"the mean of {peer.name} is not of its members")
        expected = _mean_of(parts)
        if self._swarm.setting.mod4:
            self._opposite(peer, mine, next(part for part in parts if part is not mine), mean)
            expected.tensors[0] = mean.tensors[0]
        self._near_to(peer, expected, mean, parts)
        bits = b"".join(tensor.numpy().tobytes() for tensor in mean.tensors)
        self._counts(mine, parts, None if self._swarm.setting.mod4 else bits)

    def _middle(self, peer: SimPeer, mine: SimContribution, mean: Mean) -> None:
        """Check what the middle of a chain took, and note its two exchanges."""
        others = [self._number(other) for other in mean.members if other != mine.peer]
        shares = {}
        for number in others:
            weight = self._swarm.peers[number].weight
            shares[number] = weight / (weight + mine.weight)
        beyond = max(sum(shares.values()), 1.0)
        parts = []
        for number in others:
            value = float(mean.tensors[1][number])
            parts.append(self._named(number, value / shares[number] * beyond))
        means = [_mean_of([mine, part]) for part in parts]
        own = [tensor.clone() for tensor in mine.tensors]
        expected = middle_mean(FLOAT32, own, mine.weight, means)
        if self._swarm.setting.mod4:
            moved = mean.tensors[0] - mine.tensors[0]
            ends = []
            for part, number in zip(parts, others, strict=True):
                ends.append(((number, part.serial), shares[number] / beyond))
            self._middles.append((mine, moved, ends))
            expected.tensors[0] = mean.tensors[0]
        self._near_to(peer, expected, mean, parts, ROUNDED)
        for part in parts:
            self._counts(mine, [mine, part], None)

    def _near_to(
        self,
        peer: SimPeer,
        expected: Mean,
        mean: Mean,
        parts: list[SimContribution],
        within: float = EQUAL,
    ) -> None:
        if not all(
            torch.allclose(a, b, rtol=1e-6, atol=within)
            for a, b in zip(mean.tensors, expected.tensors, strict=True)
        ):
            self._fail(
                f"the mean of {peer.name} is not that of "
                f"{[(self._swarm.named[p.peer], p.serial) for p in parts]}"
            )

    def _counts(
        self, mine: SimContribution, parts: list[SimContribution], bits: bytes | None
    ) -> None:
        """Note that ``mine`` took the mean of the exchange of ``parts``."""
        names = {(self._number(part.peer), part.serial): part for part in parts}
        exchange = tuple(sorted(names))
        self._taken[self._number(mine.peer), mine.serial].add(exchange)
        for name, part in names.items():
            known = self._means.setdefault(name, {})
            before, _ = known.setdefault(exchange, (bits, mine))
            several = len(known) > (2 if self._swarm.setting.kind == "pair" else 1)
            if several or (bits is not None and before is not None and bits != before):
                self._fail(
                    f"contribution {part.serial} of {self._swarm.named[part.peer]} is in two means"
                )
            if part.ended is not None and exchange not in self._taken[name]:
                self._apart(part, mine)

    def _opposite(
        self, peer: SimPeer, mine: SimContribution, other: SimContribution, mean: Mean
    ) -> None:
        """Check that a peer moves its share of the way to its partner, but for two roundings, or
        not at all; and its partner as far the other way.
        """
        moved = (mean.tensors[0] - mine.tensors[0]) * (mean.weight / other.weight)
        attempt = next(handle._attempt for one, handle in peer.in_flight.values() if one is mine)
        (theirs,) = attempt.outcomes()
        steps = (
            9
            / 16
            * (2.0 ** (attempt.contribution.payload.message.exponents / 4) + theirs.values.expected)
        )
        wrong = moved - (other.tensors[0] - mine.tensors[0])
        if moved.count_nonzero() and wrong.abs().max() > float(steps) / 2 + 1e-5:
            self._fail(f"{peer.name} moved by {moved.tolist()}, which is wrong by {wrong.tolist()}")
        self._moved[peer.number, mine.serial] = moved
        back = self._moved.get((self._number(other.peer), other.serial))
        if back is not None and not torch.allclose(moved, -back, rtol=0, atol=1e-5):
            self._fail(f"{peer.name} moved by {moved.tolist()}, and its partner by {back.tolist()}")

    def _number(self, peer: str) -> int:
        return next(p.number for p in self._swarm.peers if p.id == peer)

    def _named(self, number: int, serial: float) -> SimContribution:
        """Return the contribution that a value of the mean names."""
        found = self._swarm.contributions.get((number, round(serial)))
        if found is None or abs(serial - round(serial)) > 1e-3:
            self._fail(f"a mean holds {serial} of p{number}, which it never handed in")
        assert found is not None
        return found

    def _apart(self, alone: SimContribution, taker: SimContribution) -> None:
        """Check a contribution without a mean that another peer counted: two generals, or a bug."""
        ends = max(self._swarm.network.loop.time(), taker.ended or 0.0)
        touched = {alone.peer, taker.peer} | alone.leaders | taker.leaders
        if self._swarm.setting.kind == "group" and taker.mean is not None:
            touched.update(taker.mean.members)
        for trouble in self._mischief.troubles:
            if (
                trouble.peers & touched
                and trouble.since <= ends
                and trouble.until + 3.0 >= min(alone.begun, taker.begun)
            ):
                return
        names = self._swarm.named
        self._fail(
            f"{names[taker.peer]} took a mean with contribution {alone.serial} of "
            f"{names[alone.peer]}, who went on alone"
        )

    def _bounded(self, peer: SimPeer, most: int) -> None:
        for path, size in tables(peer.exchange, ""):
            if size > REMEMBERED.get(path.rpartition(".")[2], most):
                self._fail(f"{peer.name} has {size} in {path}")

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        self.look()
        swarm = self._swarm
        if (
            not swarm.over
        ):  # first, for then nobody has left, and there are tasks, streams and entries too
            self._fail(f"the spread is still {swarm.spread()}, and was {self._apart_at_calm}")
        for mine, moved, ends in self._middles:
            if all(name in self._moved for name, _ in ends):
                back = sum(self._moved[name] * part for name, part in ends)
                if not torch.allclose(moved, -back, rtol=0, atol=1e-5):
                    name = swarm.named[mine.peer]
                    self._fail(f"{name} moved by {moved.tolist()}, its partners by {back.tolist()}")
        for peer in swarm.peers:
            if peer.gone:
                continue
            tasks = [repr(task) for task in peer.host.process.tasks.values()]
            if tasks or peer.host.busy:
                self._fail(f"{peer.name} still has {tasks or peer.host.busy}")
            self._bounded(peer, 0)
        wires = swarm.network.wires.values()
        open_now = [
            wire for wire in wires if all(host.process.state != "dead" for host in wire.hosts)
        ]
        if open_now:
            self._fail(
                "streams are open: "
                f"{[(w.number, *(host.name for host in w.hosts)) for w in open_now]}"
            )


def _mean_of(parts: list[SimContribution]) -> Mean:
    copies = [(part.peer, part.weight, [t.clone() for t in part.tensors]) for part in parts]
    return weighted_mean(copies)


def tables(thing: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, int]]:
    """Yield the path and the size of every container that an object of ours holds, directly or in
    another.
    """
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    for name, value in sorted(getattr(thing, "__dict__", {}).items()):
        where = f"{path}.{name}" if path else name
        if isinstance(value, dict | set | list | frozenset) or type(value).__name__ == "deque":
            yield where, len(value)
        elif type(value).__module__.startswith("shoal.swarm.") and not type(
            value
        ).__module__.startswith("tests.sim."):
            yield from tables(value, where, seen)

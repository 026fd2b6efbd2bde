"""Taking over weights: to join a swarm that is under way, after a missed round, and where parts of
a group differ.

**Joining.** Rounds go by while the weights travel. A newcomer begins when it is at most `BEHIND`
rounds (of every fragment) behind the median of the members, or when the download took no longer
than `FRESH_S`; otherwise it fetches the weights again, at most `TRIES` times. Its first round then
has weight 0 (`shoal.swarm.training.member`).

**After a missed round.** Where all peers of a group hold the same slow weights (`Anchored` rules),
displacements only are sent, so a node that misses a round diverges and would never return by
itself. It fetches the slow weights of a member in the background and goes on training meanwhile.
After one missed round its fast weights stay, so what it learnt is in its next pseudo-gradient.
After more, or if it trained in another part of a partitioned swarm, they move with the slow ones: a
pseudo-gradient over many rounds would pull the group back, and be refused, and each outer step
taken without a partner would be taken again. Of two that diverged, one keeps its own
(`StateServer`). Methods that send weights mix by themselves. But where distant weights are refused
a node that is far behind would be refused for good: once two peers in a row have done so it takes
over a member's weights, as a newcomer does.

**Where parts differ.** With the same rules each peer shows a sketch of its slow weights after its
newest round (`shoal.optim.outer.weights`) in its record, and with its next contribution to its
group, and compares the others' with its own. After a network partition in which both parts stayed
in the same rounds, or where one peer's weights were changed behind its optimizer, nothing else
would show that they differ. A peer that is behind in rounds moves to the round of the others and
takes over their weights. In the same round the smaller part takes over those of the larger one; of
two equal parts, the one without the lowest peer id. What it has learnt since the split is lost but
for the steps of the current round; its data, inner optimizers and steps go on. Each node counts the
parts itself: those that hold what it holds, against all others. If none is a majority all give way
but for the lowest peer id among those of the latest round that ask each other (`StateServer`), so
one set of weights is left.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

import torch

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.optim.parameters import AveragedParameters
from shoal.optim.schedule.schedules import Send
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.contribution import (
    ExchangeStats,
    Outline,
    outline_digest,
)
from shoal.swarm.membership.membership import OWN_LOOP, Membership
from shoal.swarm.p2p.addresses import host_of, known_first, of_ranges
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.limits import Newest
from shoal.swarm.state.progress import FetchProgress
from shoal.swarm.state.selection import StateServer
from shoal.swarm.state.snapshot import Peer, State
from shoal.swarm.state.sync import (
    PATIENCE_S,
    ModelDiffersError,
    StateQuery,
    begin_fetch,
    fetch_state,
)
from shoal.swarm.wire.envelope import Sketch, real
from shoal.swarm.wire.messages import Member, StateRequest


def in_step(opt: OuterOptimizer, state: State) -> int:
    """Return the first round, not before that of ``state``, in which the swarm sends the fragment
    that ``opt`` sends next.

    Rounds of one fragment are as many apart as there are fragments. In another round nobody else
    would send it.
    """
    fragments = len(state.applied)
    if fragments < 2:
        return state.round
    later = itertools.chain.from_iterable(
        opt.schedule.at(opt.position + number) for number in range(1, opt.schedule.every + 1)
    )
    fragment = next((action.fragment for action in later if isinstance(action, Send)), 0)
    last = state.applied[fragment]
    return state.round + ((last if last >= 0 else fragment) - state.round) % fragments


ASKED = 8  # members that are asked for what they hold
DIALLED = 128  # members that are dialled to learn where they are, if there are more than are asked
BEHIND = 2  # rounds
FRESH_S = 10.0
TRIES = 3
LOOK_S = 5.0  # seconds to look up how far the members are

log = logging.getLogger(__name__)


def catch_up(
    membership: Membership,
    model: str,
    opt: OuterOptimizer,
    clock: Callable[[], float] = time.monotonic,
    *,
    begun: bool = True,
    watch: Callable[[FetchProgress], None] = lambda progress: None,
) -> State | None:
    """Fetch the state of a swarm that is under way; return None if nobody else has finished a round
    yet.

    The state fits ``opt``, which is left as it is. ``model``: the digest of this node's. ``begun``
    False: accept members in their first round too, because this node cannot make the weights that
    the swarm began with; of those what it holds is not fetched. ``watch`` is given the progress of
    each fetch as it begins.

    Raises ModelDiffersError; NetworkError if it is under way, but nobody hands out weights, or no
    second peer confirms them.
    """
    check_model(membership, model, opt.parameters)
    state: State | None = None
    for attempt in range(TRIES):
        began = clock()
        newer = _fetch_weights(membership, model, opt, begun, watch)
        if newer is None:
            return state
        state = newer
        if clock() - began <= FRESH_S:
            return state
        membership.directory.refresh(LOOK_S)
        able = _able(_others(membership), model, _early(membership, begun))
        behind = usual_round(able, membership.host.met) - state.round
        if behind <= BEHIND * opt.fragments:
            return state
        log.warning(
            "the weights that were fetched are %d rounds old (%d of %d tries)",
            behind,
            attempt + 1,
            TRIES,
        )
    log.warning(
        "rounds go by faster than the swarm's weights can be fetched: a longer round (--every) "
        "would help"
    )
    return state


def check_model(membership: Membership, model: str, parameters: AveragedParameters) -> None:
    """Raise ModelDiffersError unless the swarm's model has these parameters; it names the
    difference if a member tells it.

    ``model``: their digest.
    """
    if model == membership.manifest.model:
        return
    outline = Outline.of(parameters)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        if membership.manifest.model == outline_digest(outline, [dtype] * len(parameters)):
            raise ModelDiffersError(
                f"This node's parameters are not of the dtype of the swarm's, {dtype}: make them "
                f"so, by model.to({dtype})."
            )
    # Any member's header will do: the names and shapes in it tell the difference, which raises.
    sources = _addressed(
        in_order(
            list(_others(membership).values()), membership.host.met, membership.manifest.creator
        )
    )
    query = StateQuery(
        StateRequest(swarm=membership.swarm, model=model), outline.shapes, names=outline.names
    )
    try:
        if sources:
            fetch_state(membership.host, query, sources)
    except NetworkError as error:
        log.info("no member reported how the model differs: %s", error)
    if not any(outline.names):
        raise ModelDiffersError(
            "This node's model does not fit the swarm: hand in the module as state, for a list of "
            "parameters has no names, or "
            "use the swarm's model."
        )
    raise ModelDiffersError(
        "This node's model does not fit the swarm: names, shapes or types of its parameters "
        "differ, and no member told which; use "
        "the swarm's model, task, options and version, or compare them while a member runs (shoal "
        "doctor LINK)."
    )


def sources_in(
    host: Host, members: Mapping[str, Member], model: str, creator: str, early: Sequence[str] = ()
) -> list[Peer]:
    """Return the members to ask for weights, at most `ASKED`; none if nobody has finished a round,
    or is in an ``early`` state.

    If there are more they are dialled first: where a record says that its peer is costs nothing,
    and so does a key.
    """
    able = _able(members, model, early)
    if len(able) > ASKED:
        drawn = random.sample(able, min(DIALLED, len(able)))
        own = (
            (m.peer, [address for address in m.addresses if address.endswith(f"/p2p/{m.peer}")])
            for m in drawn
        )
        try:
            host.call(host.locate(own, LOOK_S), 3 * LOOK_S)
        except NetworkError as error:
            log.info("the members were not dialled before they are asked: %s", error)
    return _addressed(in_order(able, host.met, creator))


def query_for(membership: Membership, model: str, opt: OuterOptimizer) -> StateQuery:
    request = StateRequest(swarm=membership.swarm, model=model)
    return StateQuery(
        request,
        opt.shapes,
        opt.shared_shapes,
        equal=opt.anchored,
        fragments=opt.fragments,
        names=opt.parameters.names,
    )


def _others(membership: Membership) -> dict[str, Member]:
    return {
        peer: member
        for peer, member in membership.directory.members().items()
        if peer != membership.identity.peer_id
    }


def usual_round(
    members: Iterable[Member], met: Mapping[str, str], partners: Collection[str] = ()
) -> int:
    """Return the median of the members' rounds: of those among ``partners``, or else one of each
    address range at which some were ``met``, or else of all; 0 if there are none.
    """
    rounds = [(member.peer, member.round) for member in members]
    return median_low(
        [round for peer, round in rounds if peer in partners] or of_ranges(rounds, met) or [0]
    )


def in_order(
    members: Sequence[Member], met: Mapping[str, str], creator: str, partners: Collection[str] = ()
) -> list[Member]:
    """Sort members by whom to ask first: ``partners``, and of the others the latest by their
    rounds, the creator, those that were ``met``, and one of each address range in turn. All from
    the usual round on count alike, so that lies gain nothing.
    """
    claimed = [(member.peer, host_of(next(iter(member.addresses), ""))) for member in members]
    turn = {peer: place for place, peer in enumerate(known_first(claimed, met))}
    usual = usual_round(members, met, partners)
    return sorted(
        members,
        key=lambda m: (
            m.peer not in partners,
            -min(m.round, usual),
            m.peer != creator,
            turn[m.peer],
        ),
    )


def _able(members: Mapping[str, Member], model: str, early: Sequence[str]) -> list[Member]:
    """Return the members that can hand out weights.

    ``early``: states in which they can before they have finished a round.

    A member that waits in a later round than 0 has resumed, and is about to train.
    """
    fitting = [member for member in members.values() if member.model == model]
    return [m for m in fitting if m.state in (("waiting", "training") if m.round > 0 else early)]


def _early(membership: Membership, begun: bool) -> Sequence[str]:
    # In a swarm of own loops a member that waits in round 0 has the first weights; others have none
    # before they train.
    return (
        ()
        if begun
        else ("waiting", "training")
        if membership.manifest.task == OWN_LOOP
        else ("training",)
    )


def _addressed(members: Sequence[Member]) -> list[Peer]:
    return [(member.peer, member.addresses) for member in members[:ASKED]]


def _fetch_weights(
    membership: Membership,
    model: str,
    opt: OuterOptimizer,
    begun: bool,
    watch: Callable[[FetchProgress], None],
) -> State | None:
    creator = membership.manifest.creator
    early = _early(membership, begun)
    sources = sources_in(membership.host, _others(membership), model, creator, early)
    if not sources:
        return None
    try:
        held = None if begun else State(opt.round, opt.slow, opt.shared)
        query = query_for(membership, model, opt)
        state = fetch_state(membership.host, query, sources, held, watch)
    except NetworkError as error:
        why = str(error).rstrip(".")
        raise NetworkError(
            f"The swarm is training, but its weights could not be had ({why}): try again."
        ) from error
    if state is None:
        raise NetworkError(
            "The swarm is training but none of its members served the weights to start from: try "
            "again."
        )
    return state


REMEMBERED = 64  # own rounds to compare others' sketches with: records are some seconds old
APART = 0.25
"""Fraction of a round's usual movement above which weights differ: a missed round makes about 1,
rounding 1e-4 and later more.
"""
PRECISION = (
    1e-5  # of the sketch: below it weights that hardly move any more differ by rounding alone
)
# rounds in a row that a node must find itself in the smaller part while some peers cannot be
# compared
DOUBTS = 3


@dataclass(frozen=True)
class SplitDecision:
    """Decision that this node takes over the weights of one of ``sources``, in ``fragments``."""

    fragments: frozenset[int]
    sources: frozenset[str]


class DriftDetector:
    """Detector of a difference between this node's slow weights and its group's.

    ``me``: this node's peer id. ``model``: members with another one are not compared. ``most``: the
    largest group; among more members a round has several groups, whose weights differ by design.
    """

    def __init__(self, me: str, model: str, most: int) -> None:
        self._me = me
        self._model = model
        self._most = most
        self._own = Newest[tuple[int, int], tuple[Sequence[float], float]](REMEMBERED)
        self._last: dict[int, Sequence[float]] = {}
        self._moves: dict[int, deque[float]] = {}
        self._doubts = 0
        self.newest: Sketch | None = None
        self.apart: frozenset[str] = frozenset()
        """The peers whose weights differ from this node's by the last call of ``split``, if it came
        to an end.
        """

    def finished(self, round: int, fragment: int, sketch: tuple[float, ...]) -> None:
        """Record the sketch of the slow weights of ``fragment`` after ``round``."""
        if any(
            real(number) is None for number in sketch
        ):  # such a record could not be published, and equals nobody's
            self.moved()
            return
        if fragment in self._last:
            self._moves.setdefault(fragment, deque(maxlen=8)).append(
                math.dist(sketch, self._last[fragment])
            )
        self._last[fragment] = sketch
        moves = self._moves.get(fragment, ())
        least = PRECISION * max(abs(number) for number in sketch)
        self._own[round, fragment] = (
            sketch,
            max(APART * median(moves), least) if moves else float("inf"),
        )
        self.newest = round, fragment, sketch

    def moved(self) -> None:
        """Forget the own sketches: the slow weights were replaced by others'."""
        self._own.clear()
        self._last.clear()
        self.newest = None
        self._doubts = 0

    def split(
        self,
        members: Mapping[str, Member],
        group: Mapping[str, Sketch | None],
        partners: Collection[str],
    ) -> SplitDecision | None:
        """Return the decision to give way, or None, by the records of ``partners`` and by what this
        round's group has shown.

        Call it once a round. The group's are newer, and signed by who shows them, so nobody but
        their author can make them up. ``partners``: with which this node has exchanged; keys are
        free, so others' records would make any majority.
        """
        near = {self._me}
        far = set[str]()
        unknown = False
        self.apart = frozenset()
        fragments = set[int]()
        there = {
            p: m
            for p, m in members.items()
            if m.model == self._model and p in partners and m.state in ("waiting", "training")
        }
        # A record that still says "waiting" counts as one of whom nothing is known: quick rounds
        # are over before the next one.
        others = {
            p: m.sketch if m.state == "training" else None
            for p, m in there.items()
            if p != self._me
        } | dict(group)
        if len(others) + 1 > self._most:
            return None
        for peer, shown in others.items():
            if shown is None or (known := self._own.get(shown[:2])) is None:
                unknown = True
                continue
            own, limit = known
            if math.dist(own, shown[2]) <= limit:
                near.add(peer)
            else:
                far.add(peer)
                fragments.add(shown[1])
        if not far or len(near) > len(far) or (len(near) == len(far) and min(near) < min(far)):
            self._doubts = 0
            self.apart = frozenset(far)
            return None
        self._doubts += 1
        if unknown and self._doubts < DOUBTS:
            return None
        self._doubts = 0
        self.apart = frozenset(far)
        return SplitDecision(frozenset(fragments), self.apart)


IN_TURN = 4  # members that are asked in turn
SECOND_S = (
    1.0  # seconds that a second member may take to offer the same weights: each makes them older
)
PATIENCE = 5  # failed tries after which the user is warned
FAR = 2  # missed rounds of a fragment from which on the fast weights are replaced too
LONGEST = 16  # rounds between two tries, at most
# seconds from which on a fetch takes a link's place from exchanges; a quicker one in vain is tried
# again at once
SLOW_S = 5.0
TURNED_DOWN = 2  # peers in a row that refuse a node that comes from far behind: one may be hostile


class Resynchronizer:
    """Observer of one node's rounds that fetches the group's weights when its own have diverged.

    Args:
        membership, model: the swarm, and the digest of the model's shapes.
        server: hands out this node's weights, and must know when they have diverged.
        stats: outcomes of this node's exchanges.
        moved: called when the slow weights were replaced by others'.
        clock: seconds; a simulation has its own.
        partners: peers with which this node has exchanged: they are asked first, for records alone
            are free.
    """

    def __init__(
        self,
        membership: Membership,
        model: str,
        server: StateServer,
        opt: OuterOptimizer,
        stats: ExchangeStats | None = None,
        moved: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        partners: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._membership = membership
        self._model = model
        self._server = server
        self._opt = opt
        self._partners = partners
        self._stats = stats or ExchangeStats()
        self._moved = moved
        self._clock = clock
        self._diverged: set[int] = set()  # fragments
        # Rounds of a fragment that this node has missed since it was with its group.
        self._missed: Counter[int] = Counter()
        self._late = (
            0  # rounds that this node's weights are behind its round, since it was with its group
        )
        self._preferred: frozenset[str] = frozenset()
        """Peers to fetch from if any of them is there: those of the part that this node gives way
        to.
        """
        self._afresh = False  # true if the state being fetched is to start from, as a newcomer does
        self._pending: concurrent.futures.Future[State | None] | None = None
        self._tries = 0
        # the round and the time in which the last try began
        self._began = 0
        self._began_s = 0.0
        self._pause = self._next = (
            0  # the rounds to wait after a slow try in vain, and the round of the next one
        )

    @property
    def diverged(self) -> bool:
        return bool(self._diverged)

    def joined(self, state: State) -> None:
        """Note that this node begins from ``state``.

        It never receives what was in flight at the source, so it must fetch again.
        """
        if self._opt.anchored:
            fragments = len(state.applied)
            self._diverged = {
                p for p, round in enumerate(state.applied) if round < state.round - fragments
            }

    def restarted(self) -> None:
        """Note that this node's weights were replaced on purpose: what is being fetched does not
        come into them.
        """
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._missed.clear()
        self._returned()

    def on_round(self, info: RoundInfo, *, behind: int, split: SplitDecision | None = None) -> None:
        """Handle the end of a round.

        ``behind``: its contribution counted so many rounds later than the node expected.

        ``split``: this node's part of the swarm gives way to another.
        """
        fragment = info.key.fragment
        if fragment >= self._opt.fragments:
            return
        together = len(info.members) >= 2
        if not self._opt.anchored:
            # With a codec for pairs one that is far is met all the same.
            refusals = self._stats.turned_down()
            self._missed[fragment] = (
                0 if together and not refusals else self._missed[fragment] + behind
            )
            if self._missed[fragment] >= FAR and refusals >= TURNED_DOWN and self._pending is None:
                self._afresh = True
                self._ask()
            return
        if behind:
            # Or earlier: then the weights must come from a later round.
            self._opt.applied[fragment] = self._opt.round - 1
            self._missed[fragment] += max(behind // self._opt.fragments, 1)
            self._late += behind
        if not together:
            self._missed[fragment] += 1
        if behind or not together:
            self._diverged.add(fragment)
        elif fragment not in self._diverged:
            self._missed[fragment] = 0
        if (
            split is not None and not self._diverged
        ):  # otherwise it has missed a round, which explains that its weights differ
            self._diverged |= {p for p in split.fragments if p < self._opt.fragments}
            self._missed.update(dict.fromkeys(self._diverged, FAR))
            self._preferred = split.sources
        if self._diverged and self._pending is None and self._opt.round >= self._next:
            self._ask()

    def _ask(self) -> None:
        others = self._sources()
        self._began, self._began_s = self._opt.round, self._clock()
        # Of two that have diverged the one that is further keeps its weights: its swarm went on
        # while the other was away.
        own = max(self._opt.round - self._late, 0)
        self._server.diverged = own if others and not self._afresh else None
        if not others:  # this node is the whole group
            self._returned()
            return
        request = StateRequest(
            swarm=self._membership.swarm, model=self._model, astray=not self._afresh, round=own
        )
        patience = PATIENCE_S if self._afresh else SECOND_S
        query = query_for(self._membership, self._model, self._opt)
        query = replace(query, request=request, confirmed=self._afresh, patience=patience)
        try:
            self._pending = begin_fetch(self._membership.host, query, others)
        except NetworkError as error:
            log.info("the weights of the swarm cannot be asked for: %s", error)

    def _sources(self) -> list[tuple[str, tuple[str, ...]]]:
        me = self._membership.identity.peer_id
        members = self._membership.directory.members().items()
        there = [m for peer, m in members if peer != me and m.model == self._model]
        preferred = [
            m for m in there if m.peer in self._preferred and m.state in ("waiting", "training")
        ]  # a record may be late
        there = sorted(
            preferred or [m for m in there if m.state == "training"], key=lambda m: m.peer
        )
        first = in_order(there, self._membership.host.met, "", self._partners())
        return [(m.peer, m.addresses) for m in first[:IN_TURN]]

    def adopt_fetched(self) -> bool:
        """Take over weights that have arrived; call it between two steps.

        Return whether the node is with its group again.
        """
        if self._pending is None or not self._pending.done():
            return False
        fetched = self._pending
        self._pending = None
        afresh = self._afresh
        self._afresh = False
        try:
            state = fetched.result()
        except (ShoalError, concurrent.futures.CancelledError) as error:
            log.warning(
                "the weights of the swarm were not taken over after a missed round: %s", error
            )
            self._back_off()
            return False
        if state is None:
            self._returned()  # nobody is nearer to the group than this node
            return False
        round = max(state.round, self._opt.round)
        if afresh:
            round = max(in_step(self._opt, state), self._opt.round)
            self._opt.adopt(
                state.slow, round=round, into_model=True, shared=state.extra, applied=state.applied
            )
            self._opt.listen()  # as a newcomer: the first round does not count
            self._returned()
            self._moved()
            return True
        far = [p for p in self._diverged if self._missed[p] >= FAR]
        taken = self._opt.adopt(
            state.slow, round=round, shared=state.extra, applied=state.applied, rebase=far
        )
        if taken:
            self._moved()
        self._diverged -= set(taken)
        # This node has missed again what the source had in flight and it has not.
        under_way = {p for p in taken if state.applied[p] < state.round - len(state.applied)}
        self._diverged |= {
            p
            for p in under_way
            if not any(round > state.applied[p] for round in self._opt.in_flight(p))
        }
        if not self._diverged:
            self._returned()
            return True
        self._back_off()
        self._tries += 1
        if self._tries == PATIENCE:
            log.warning(
                "rounds go by faster than the swarm's weights can be fetched, so this node's "
                "weights stay apart from the others': "
                "a longer round (--every) would help"
            )
        return False

    def _back_off(self) -> None:
        """Wait longer each time a slow fetch was in vain: on a slow link it takes the place of the
        exchanges that are due.
        """
        took = self._opt.round - self._began
        slow = self._clock() - self._began_s >= SLOW_S
        self._pause = min(max(2 * self._pause, took), LONGEST) if slow else 0
        self._next = self._opt.round + self._pause

    def _returned(self) -> None:
        self._pause = self._next = 0
        self._diverged.clear()
        self._preferred = frozenset()
        self._afresh = False
        self._server.diverged = None
        self._tries = 0
        self._late = 0

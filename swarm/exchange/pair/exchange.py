"""The exchange with one partner over libp2p: `shoal.optim.Exchange` with strangers.

    exchange = PairExchange(context, timeouts)
    mean = exchange.start(contribution).result()     # None if nobody was met

Each peer computes its partner of the round, or two (`selector`), and calls it (`calls`). A call is
answered

    accept    I am at that round and free for you
    (held)    I am not at that round yet: the answer comes when I am
    wait      I am calling you myself, and of calls that cross, mine counts
    busy      I am with another, or through with that round, or did not come to it in time
    passed    I am beyond that round; my next one is ``round``
    refuse    our contributions differ in this, or you are barred

The bytes and the commit are in `transfer`, the training thread's side in
`shoal.swarm.exchange.contribution`. Whom a peer calls, and why no peers wait in a circle:
docs/internals.md, "A round in pairs".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from shoal.optim.codecs.mod4 import for_pairs
from shoal.optim.codecs.pair_message import Reading
from shoal.optim.exchange.averaging import mean_of, middle_mean, pair_mean
from shoal.optim.exchange.base import Contribution, Mean
from shoal.optim.exchange.on_demand import OnDemand
from shoal.optim.exchange.update_screen import TRUSTING, UpdateScreen
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import (
    EncodedContribution,
    ExchangeAttempt,
    encode_contribution,
)
from shoal.swarm.exchange.exchange_base import ExchangeBase, ExchangeHandle
from shoal.swarm.exchange.mean_once import MeanOnce
from shoal.swarm.exchange.pair.calls import (
    EXCHANGE_PROTOCOL,
    PROBE_S,
    PROBED,
    CallAnswerer,
    Caller,
)
from shoal.swarm.exchange.pair.held_calls import HeldCalls
from shoal.swarm.exchange.pair.selector import PairSelector, no_speed
from shoal.swarm.exchange.pair.state import PairingAttempt, PairState, Phase, Step
from shoal.swarm.exchange.pair.transfer import Attempt, PairTransfer, PartnerContribution
from shoal.swarm.exchange.pair_rounds import PairRounds
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.exchange.round_time import OVERLAPPED_S
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.exchange.training_time import TrainingTime
from shoal.swarm.p2p.tasks import first_of, race, running, stop
from shoal.swarm.wire.messages import Member

# candidates called in one round, so that a large swarm of busy peers is not called through
TRIED = 8
# of those in rounds that are short against the wait, if the partner lives: nearly all are with
# theirs, or through
OTHERS = 1
# part of the round's wait, and seconds at most, for all other candidates
SEARCH = 0.15
SEARCH_S = 1.5
# part of the round's wait, and seconds at most, that a free peer listens for others
LINGER = 0.1
LINGER_S = 1.0
# of the time from one round to the next, at most for either: after a short round there soon is
# another partner
WORTH = 0.1

log = logging.getLogger(__name__)


class Ended(Enum):
    """How the calls to the candidates of a round end."""

    OVER = "over"  # met, given up, or no time is left
    MOVED = "moved"  # the swarm is in a later round
    UNMET = "unmet"  # nobody of them is free


@dataclass
class Search:
    """The limits of one meeting."""

    deadline: float
    """The loop's time until which it waits for its partner."""
    wait: float
    """Seconds of that, also in a round to which it moves."""
    others: float
    """Seconds for all other candidates, where training waits."""
    linger: float
    """Seconds that it listens at last."""
    is_short: bool
    """The rounds are short against the wait."""
    until: float | None = None
    """The loop's time until which it calls others, once it has begun that."""


class PairExchange(ExchangeBase):
    """``optim.Exchange`` between the members of a swarm. All coroutines run on the host's loop.

    Args:
        context: the node and its swarm; its host serves the exchange protocol from now on.
        timeouts: how long a round, and the parts of it, may take.
        fragments: fragments that are sent in turn, each with the next round's number; each may be
            in a meeting of its own.
        overlap: training goes on without the mean. Then a meeting waits for its partner until
            training needs the outcome.
        departed: returns the members that left lately, by peer id (``Directory.departed``).
        screen: decides which contributions are refused and what the mean is.
        speed: with ``overlap``, returns the rounds that a member says it makes in a time, in any
            unit.

    Raises:
        ValueError: ``fragments`` is not positive.
    """

    rounds: PairRounds
    time: TrainingTime

    def __init__(
        self,
        context: PeerContext,
        timeouts: ExchangeTimeouts = ExchangeTimeouts(),  # noqa: B008 (frozen)
        *,
        fragments: int = 1,
        overlap: bool = False,
        departed: Callable[[], Mapping[str, Member]] = dict,
        screen: UpdateScreen = TRUSTING,
        speed: Callable[[Member], float] = no_speed,
    ) -> None:
        if fragments < 1:
            raise ValueError(f"fragments must be positive, got {fragments}")
        rounds, time = PairRounds(fragments, overlap), TrainingTime(timeouts, fragments)
        super().__init__(context.host, rounds, RoundEvidence(context, fragments), time)
        self._context, self._timeouts, self._screen = context, timeouts, screen
        self._selector = PairSelector(context, departed, fragments, speed if overlap else no_speed)
        transfers = PairTransfer(context.host, timeouts)
        self.state = PairState(
            context, timeouts, transfers, self._selector, self.rounds, self.evidence, self.time
        )
        self.held = HeldCalls(self.state)
        self.caller, self.answerer = Caller(self.state), CallAnswerer(self.state, self.held)
        self._preparing = asyncio.Lock()
        context.host.serve(EXCHANGE_PROTOCOL, self.answerer.serve)

    def start(self, contribution: Contribution) -> ExchangeHandle[PartnerContribution]:
        """Start looking for a partner.

        ValueError if the contribution is of another run than this swarm.
        """
        mine = encode_contribution(self._context.swarm, contribution)
        self.stats.begin(mine.key)
        attempt = ExchangeAttempt[PartnerContribution](mine, screen=self._screen, stats=self.stats)
        number = self.rounds.hand_in(mine.key.round)
        averaged = Averaged(self._screen, self._context.me, mine)
        return ExchangeHandle(
            self,
            attempt,
            self._averaged(attempt, number, averaged),
            averaged.learnt,
            mine.payload.nbytes,
        )

    def end(self) -> None:
        with contextlib.suppress(NetworkError):  # without a network nobody calls
            self.host.submit(self.answerer.end())

    async def _averaged(self, attempt: Attempt, number: int, averaged: Averaged) -> None:
        received = await self.meet(attempt, number)
        if received:
            await asyncio.to_thread(averaged.mean, received)  # training goes on

    async def meet(self, attempt: Attempt, number: int) -> tuple[PartnerContribution, ...]:
        """Find a partner, or two in the middle of a chain, and exchange; return what was received
        and committed.

        ``number``: what `PairRounds.hand_in` returned for it in the training thread.
        """
        fragment = attempt.key.fragment
        async with self._preparing:  # meetings begin in the order in which training hands in
            await asyncio.to_thread(attempt.contribution.prepared)
            pairing = self.state.under_way[fragment] = PairingAttempt(attempt, number)
            self.rounds.begin(number, attempt.key.round, fragment)
        nbytes = attempt.contribution.payload.nbytes
        pairing.usual = self.state.sizes.get(fragment) == nbytes
        self.state.sizes[fragment] = nbytes
        loop, needed = asyncio.get_running_loop(), pairing.needed
        # Not the pairing, to avoid a reference cycle, which would keep both contributions until
        # Python's collector came.
        attempt.commit.when_awaited(lambda: loop.call_soon_threadsafe(needed.set))
        self.evidence.begin(loop.time(), attempt.key.round)
        try:
            await self._bounded(pairing, self._meet(pairing))
            if pairing.second is not None and pairing.second.work is not None:
                await pairing.second.work
        except Exception as error:  # this node's own: it costs one round, never the training
            pairing.attempt.caught("exchange", error)
        finally:
            await self._end_second(pairing)
            if not attempt.outcomes():
                self.evidence.missed()
            # One that was called off may end only after the next one has begun.
            if self.state.under_way.get(fragment) is pairing:
                del self.state.under_way[fragment]
        return attempt.outcomes()

    async def _bounded(self, pairing: PairingAttempt, meeting: Coroutine[Any, Any, None]) -> None:
        await (self._until_needed(pairing, meeting) if self.rounds.overlap else meeting)

    async def _until_needed(
        self, pairing: PairingAttempt, meets: Coroutine[Any, Any, None]
    ) -> None:
        """Meet a partner while training goes on.

        Once that waits for the outcome, wait no longer than a meeting usually does, nor
        than training may wait for a partner to come (`TrainingTime`).
        """
        loop, fragment, time = asyncio.get_running_loop(), pairing.key.fragment, self.time
        usual = loop.time() + time.patience(fragment)
        async with running(meets, pairing.needed.wait()) as (meeting, waiting):
            await first_of(meeting, waiting)
            pairing.since = since = loop.time()
            await first_of(
                meeting, timeout=max(min(usual - since, time.awaiting(since, fragment)), 0)
            )
            if not meeting.done() and not pairing.moving and pairing.partner is not None:
                self._charge(pairing, pairing.partner, loop.time() - since)
            while not meeting.done() and pairing.moving:  # within a transfer's own deadlines
                await first_of(meeting, timeout=self._timeouts.chunk)
            if meeting.done():
                meeting.result()

    def _charge(self, pairing: PairingAttempt, partner: str, seconds: float) -> None:
        """Charge a partner that training waited for in vain."""
        round, fragment = pairing.key.round, pairing.key.fragment
        beyond = self.time.waited(partner, seconds)
        over = self.time.cost(partner, round, fragment, beyond)
        if over:
            self._selector.passed.missed(partner, round, over)

    async def _meet(self, pairing: PairingAttempt) -> None:
        """Call the partner of the round, or others if it is not there, and then listen; in a later
        round if the swarm turns out to be there.
        """
        loop = asyncio.get_running_loop()
        search = self._search(pairing)
        while True:
            partner, order = self._selector.of(pairing.key.round)
            pairing.partner = partner if order else None
            await self._begin_second(pairing)
            self.held.release(pairing)
            if not order:
                return await self._meet_nobody(pairing, partner)
            how = await self._call(pairing, order, search)
            if how is Ended.OVER:
                return
            if how is Ended.UNMET:
                seconds = min(search.deadline - loop.time(), search.linger)
                return await self._listen(pairing, seconds)

    def _search(self, pairing: PairingAttempt) -> Search:
        """Return the limits of a meeting that begins now."""
        now, fragment = asyncio.get_running_loop().time(), pairing.key.fragment
        period = self.time.begin(now, fragment)
        wait = self.time.patience(fragment)
        return Search(
            deadline=now + wait,
            wait=wait,
            others=min(wait * SEARCH, SEARCH_S, period * WORTH),
            linger=min(wait * LINGER, LINGER_S, period * WORTH),
            is_short=period < 2 * wait,
        )

    async def _meet_nobody(self, pairing: PairingAttempt, partner: str | None) -> None:
        """The last one here, or a peer whose partner is dead while nobody is free."""
        passed = [] if partner is None else [partner]
        slow = [peer for peer in passed if self._selector.passed.costly(peer)]
        pairing.attempt.stats.pass_over(pairing.attempt.handed_in, passed, slow)
        if self.rounds.overlap and partner is not None:
            await self._listen(pairing, 0.0)

    async def _call(self, pairing: PairingAttempt, order: list[str], search: Search) -> Ended:
        """Call the candidates of a round, and then those that called while this node was calling
        others.
        """
        loop = asyncio.get_running_loop()
        queue = deque(order[:TRIED])
        search.until = None
        for peer, back in self._candidates(pairing, queue):
            is_partner = peer == pairing.partner
            left = self._seconds_for(search, is_partner=is_partner, back=back)
            if left <= 0:
                break
            called = loop.time()
            received, failing = await self._try(
                pairing, peer, left if is_partner else min(left, PROBE_S)
            )
            if received is not None or pairing.broken:
                return Ended.OVER
            if pairing.swarm_round > pairing.key.round:
                return self._move(pairing, search)
            if failing or not self.rounds.overlap:
                self._selector.tried(peer, pairing.key.round)
            elif is_partner and search.is_short:
                while len(queue) > OTHERS:
                    queue.pop()
            if self._holds_training(pairing, search, called if failing else None):
                return Ended.OVER
        return Ended.UNMET

    def _candidates(self, pairing: PairingAttempt, queue: deque[str]) -> Iterator[tuple[str, bool]]:
        """Yield the peers of ``queue``, and then at most ``TRIED`` that have called meanwhile, for
        which the second value is True.
        """
        while queue:
            yield queue.popleft(), False
        for _ in range(TRIED):
            if not pairing.turned_away:
                return
            yield pairing.turned_away.popleft(), True

    def _holds_training(
        self, pairing: PairingAttempt, search: Search, failed_from: float | None
    ) -> bool:
        """Return whether the search has taken the time for which training waits.

        ``failed_from``: the loop's time at which a call began that failed; None if it did not.
        """
        now = asyncio.get_running_loop().time()
        if now >= search.deadline and not self.rounds.overlap:
            return True
        if failed_from is None or not pairing.needed.is_set():
            return False
        return now - failed_from >= PROBED * self._timeouts.chunk  # it was silent for so long

    def _seconds_for(self, search: Search, *, is_partner: bool, back: bool) -> float:
        """Return the seconds for the next candidate; ``back``: it has called."""
        now = asyncio.get_running_loop().time()
        if self.rounds.overlap:
            # A search costs no training, and two that listen to each other would never meet.
            return search.deadline - now if is_partner and not back else PROBE_S
        if not is_partner and search.until is None:
            # Most others are taken: not worth the round's whole wait.
            search.until = min(now + search.others, search.deadline)
        return (search.deadline if search.until is None else search.until) - now

    def _move(self, pairing: PairingAttempt, search: Search) -> Ended:
        """Move the contribution to the round in which the swarm is, unless it counts in this one:
        then it stays.
        """
        if pairing.second is not None and pairing.second.counts:
            return Ended.OVER
        pairing.attempt = pairing.attempt.moved_to(pairing.swarm_round)
        self.rounds.move(pairing.number, pairing.swarm_round, pairing.key.fragment)
        if self.rounds.overlap:
            search.deadline = asyncio.get_running_loop().time() + search.wait
        return Ended.MOVED

    async def _begin_second(self, pairing: PairingAttempt) -> None:
        """Begin the meeting with the second partner of the round, or with a much slower peer whose
        call for it is held; that of another round ends.
        """
        await self._end_second(pairing)
        peer = self._selector.second(pairing.key.round) or self.held.slower(pairing)
        if peer is not None:
            second = pairing.beside(peer)
            second.work = asyncio.ensure_future(self._bounded(second, self._meet_second(second)))
            pairing.second = second

    async def _end_second(self, pairing: PairingAttempt) -> None:
        second = pairing.second
        pairing.second = None  # from now on it takes no call
        if second is not None and second.work is not None:
            await stop(second.work)

    async def _meet_second(self, pairing: PairingAttempt) -> None:
        """Meet the second partner, and nobody else: it has no pair, so nobody else expects it."""
        loop, peer, round = asyncio.get_running_loop(), pairing.partner, pairing.key.round
        assert peer is not None
        wait = self.time.patience(pairing.key.fragment)
        deadline = loop.time() + wait
        for _ in range(TRIED):
            received, failing = await self._try(pairing, peer, deadline - loop.time())
            if received is not None or pairing.broken:
                return
            is_over = loop.time() >= deadline
            if failing or (is_over and not self.rounds.overlap):  # that it is busy costs no time
                self._selector.tried(peer, round)
            if failing or is_over or not pairing.turned_away:
                break
            pairing.turned_away.clear()
        await self._listen(pairing, min(deadline - loop.time(), wait * LINGER, LINGER_S))

    async def _try(
        self, pairing: PairingAttempt, peer: str, seconds: float
    ) -> tuple[PartnerContribution | None, bool]:
        """Try one candidate: take its held call, or call it; meanwhile its call, or another's, may
        have been accepted.

        Also return whether the own call ended with an error.
        """
        until, received, failing = asyncio.get_running_loop().time() + seconds, None, False
        if self.held.take(pairing, peer):
            return await pairing.outcome(self._timeouts), failing
        mine = pairing.phase = Phase(Step.DIALING, peer)
        try:
            received = await self.caller.call(pairing, mine, seconds)
            if mine.step == Step.EXPECTING:
                # It said that it was calling: a call that does not come soon comes from nobody that
                # is still there.
                await pairing.until_called(
                    min(until, asyncio.get_running_loop().time() + self._timeouts.chunk)
                )
        except (NetworkError, MessageError) as error:
            log.info("round %d: %s", pairing.key.round, error)
            failing = True
            if peer == pairing.partner:
                pairing.attempt.failed(peer, error)
        finally:
            if pairing.phase is mine:
                pairing.phase = Phase()
        return received or await pairing.outcome(self._timeouts), failing

    async def _listen(self, pairing: PairingAttempt, seconds: float) -> None:
        """Let any other peer without a partner call, for ``seconds`` and until training needs the
        outcome, or the round's other partner was met.
        """
        until = asyncio.get_running_loop().time() + seconds
        while True:
            pairing.phase = Phase(Step.LISTENING)
            if self.rounds.overlap:
                called, needed, met = pairing.called, pairing.needed, pairing.met
                await race(called.wait(), needed.wait(), met.wait(), timeout=OVERLAPPED_S)
            await pairing.until_called(until)
            is_called = pairing.called.is_set()
            received = await pairing.outcome(self._timeouts)
            # If none of these holds, the caller had gone on.
            if received is not None or pairing.broken or not (is_called and self.rounds.overlap):
                pairing.phase = Phase()  # nobody would wait for a call that is accepted now
                return


class Averaged:
    """The mean of a contribution with the partner's, or with two partners'.

    For any thread, but what a codec learns from it is the training thread's.
    """

    def __init__(self, screen: UpdateScreen, me: str, mine: EncodedContribution) -> None:
        self._screen, self._me, self._mine = screen, me, mine
        self._mean = MeanOnce()

    def mean(self, received: tuple[PartnerContribution, ...]) -> Mean:
        """Return the mean, computed once, from the same bytes on both sides; with a codec for pairs
        each side's is its own. Raises as `MeanOnce` does.
        """
        return self._mean.of(lambda: self._computed(received))

    def learnt(self, received: tuple[PartnerContribution, ...]) -> Mean:
        """Let a codec for pairs learn from what came, and return the mean."""
        mean = self.mean(received)
        pairs = for_pairs(self._mine.codec)
        message = self._mine.payload.message
        for theirs in received:
            if isinstance(theirs.values, Reading) and pairs and message:
                pairs[0].learn(message, theirs.values)
        return mean

    def _computed(self, received: tuple[PartnerContribution, ...]) -> Mean:
        mine, message = self._mine, self._mine.payload.message
        if len(received) == 1:
            own = [] if message is not None else mine.payload.tensors()
            return self._with(received[0], own)
        own = mine.payload.tensors() if message is None else message.tensors()
        means = []
        for theirs in received:
            # Each is computed in place.
            spare = own if isinstance(own, OnDemand) else [tensor.clone() for tensor in own]
            means.append(self._with(theirs, spare))
        return middle_mean(mine.codec, own, mine.weight, means, mine.unweighted_count)

    def _with(self, theirs: PartnerContribution, own: Sequence[Tensor]) -> Mean:
        """Return the mean with one partner; ``own`` is used up, but not by a codec for pairs."""
        me, mine, fragment = self._me, self._mine, self._mine.key.fragment
        if isinstance(theirs.values, Reading):
            assert mine.payload.message is not None
            return pair_mean(
                self._screen,
                fragment,
                (me, mine.weight, mine.payload.message),
                (theirs.peer, theirs.weight, theirs.values),
                theirs.refused,
                mine.unweighted_count,
            )
        contributions = [
            (me, mine.weight, own),
            (theirs.peer, theirs.weight, theirs.values),
        ]
        return mean_of(self._screen, mine.codec, me, fragment, contributions, mine.unweighted_count)

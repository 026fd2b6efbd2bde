"""A session: a training loop of one's own in a swarm, by three lines that change nothing in the
loop.

    import shoal
    # the first; on all others shoal.join(link, state=model)
    with shoal.create(state=model, every=25) as s:
        # or s.optimizer(inner), which takes the swarm's settings
        opt = NoLoCo(inner, s.exchange(), every=25)
        for batch in data:
            loss(model, batch).backward()
            opt.step()
            opt.zero_grad()

Making the optimizer makes this node a member: it is compared with the swarm's settings, takes over
the swarm's weights, and waits until the swarm begins. From then on each of its steps also does a
member's duties. It never raises because of a peer. A swarm of `shoal up` can be joined too, with a
model whose parameters have the same names and shapes.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shoal.optim import Alone, OuterOptimizer, Ranks, RoundInfo, Stepped
from shoal.optim.device import uncompiled
from shoal.optim.outer.inner import Inner
from shoal.optim.parameters import AveragedParameters
from shoal.optim.ranks.orders import Channel, LeadOptimizer
from shoal.swarm.changes import changed, described
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import LossCheck
from shoal.swarm.membership.membership import Membership
from shoal.swarm.membership.overview import overview
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.topics.status import StatusReporter
from shoal.swarm.training.averaged_state import AveragedState
from shoal.swarm.training.factories import make_exchange, make_outer, make_screen
from shoal.swarm.training.last_average import EndReport, LastAverage, averages_at_end
from shoal.swarm.training.loaded_state import StateLoader
from shoal.swarm.training.loop_report import LoopReport
from shoal.swarm.training.loss_trial import LossTrial
from shoal.swarm.training.member import TrainingMember
from shoal.swarm.training.record_keeper import RoundReport
from shoal.swarm.training.round_steps import announced_speeds, round_length, steps_of_rounds
from shoal.swarm.training.run_end import RunEnd
from shoal.swarm.training.session_setup import (
    SessionError,
    SessionExchange,
    begin,
    check_alike,
    check_options,
    default_name,
    fitting,
)
from shoal.swarm.training.shard import Shard, least_used
from shoal.swarm.training.step_watch import StepWatch, follow
from shoal.swarm.wire.record import NodeRecord, Round
from shoal.swarm.wire.record import State as DirectoryState

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from shoal.swarm.exchange.group.exchange import GroupExchange

log = logging.getLogger(__name__)


class Session:
    """A training loop's place in a swarm, made by ``create`` or ``join``.

    For the thread that trains, but for ``status``.
    """

    def __init__(
        self,
        membership: Membership,
        params: AveragedParameters,
        model: nn.Module | None,
        name: str,
        *,
        first: bool,
        ranks: Ranks | None = None,
        channel: Channel | None = None,
    ) -> None:
        self._membership = membership
        self._first = first
        self._name = name or default_name(membership.identity.peer_id)
        everyone = membership.directory.members()
        of = membership.manifest.shards
        peer = membership.identity.peer_id
        seed = membership.manifest.train.seed
        shard = Shard(least_used(everyone, of, peer), of, seed)
        manifest = membership.manifest
        params = fitting(params, manifest.model)
        self._prepare(
            manifest.outer,
            manifest.train,
            manifest.fragment_of,
            shard,
            membership.swarm,
            params,
            model,
            ranks,
            channel,
        )

    def _prepare(
        self,
        settings: OuterSettings,
        train: TrainSettings,
        fragment_of: Sequence[int],
        shard: Shard,
        swarm: str,
        params: AveragedParameters,
        model: nn.Module | None,
        ranks: Ranks | None,
        channel: Channel | None,
    ) -> None:
        self._swarm = swarm
        self._state = AveragedState.of(params, model, fragment_of)
        self._ranks = ranks
        self._channel = channel
        self.settings: OuterSettings = settings
        """The swarm's settings of averaging."""
        self.train: TrainSettings = train
        """The swarm's settings of training, which its creator can change while it runs (``lr``,
        ``steps``).
        """
        self.on_change: Callable[[TrainSettings], None] | None = None
        """Called between two steps, in every rank of this peer, when ``train`` has changed: the
        loop owns its rate, and asks ``over`` for its end.
        """
        self.shard = shard
        """The part of the data to train on, so that peers learn from different ones; it is not
        checked.
        """
        self._screen = make_screen(self.settings)
        self._exchange: SessionExchange | None = None
        self._member: TrainingMember | None = None
        self._opt: OuterOptimizer | None = None
        self.on_report: Callable[[RoundInfo, RoundReport, Round], None] | None = None
        """Called after each exchange of this node, with what it cost and what others see of it,
        before the optimizer's own ``on_round``.
        """
        self._loader = StateLoader()
        self._loop = LoopReport()
        self._closed = False
        self._watch = StepWatch()
        self._resting = ExitStack()
        """Between two steps: the block in which weights are handed out."""
        self._end = RunEnd(averages=averages_at_end(settings), ranks=ranks)

    @property
    def seed(self) -> int:
        """The swarm's random seed, by which the data is assigned to shards."""
        return self.shard.seed

    @property
    def over(self) -> bool:
        """True once this node has done the swarm's number of steps, as its creator set or changed
        it (`shoal end`), or has closed the session: train no further.

        In a swarm without such a number only the session's end makes it true.
        """
        done = 0 if self._opt is None else self._opt.steps
        return self._closed or 0 < self.train.steps <= done

    @property
    def ended(self) -> EndReport | None:
        """What the last average came to, once `finish` has made one."""
        return self._end.report

    @property
    def link(self) -> str:
        """The link by which others join; needs the network for a moment where there are seeds."""
        return str(self._membership.link())

    @property
    def membership(self) -> Membership:
        """The node itself: its network, the manifest and the directory.

        For what the session does not offer.
        """
        return self._membership

    @property
    def parameters(self) -> list[Tensor]:
        """The averaged parameters, in the order of all peers."""
        return list(self._state.params)

    @property
    def progress(self) -> int:
        """Inner steps that the swarm has behind it by its rounds, by which a late peer can set its
        learning-rate schedule.

        0 before the optimizer is made, which is when the swarm's round is known. It is what members
        say: do not go beyond the schedule's end with it. In rounds of tokens or seconds it is an
        estimate from the members' speeds; 0 if none says its own.
        """
        if self._opt is None:
            return 0
        rounds = self._opt.round // self._opt.fragments
        members = self._membership.directory.members().values()
        return steps_of_rounds(self.settings, rounds, members, self._membership.host.met) or 0

    def follow(self, schedule: LRScheduler, steps: int) -> int:
        """Step a learning-rate ``schedule`` on to where the swarm is, for a node that joins late or
        returns; return that step.

        ``steps``: of the whole schedule, which is not stepped beyond. Call it once both, and a
        checkpoint if any, are loaded; on every rank of this peer, if it has several, so that all
        follow rank 0's `progress`.
        """
        self._watch.late = 0
        if self._ranks is None:
            return follow(schedule, self.progress, steps)
        return follow(schedule, self._ranks.agreed(self._progress_here()), steps)

    def _progress_here(self) -> int:
        return self.progress

    def exchange(self) -> SessionExchange:
        """Return the exchange for the outer optimizer.

        SessionError or OuterError if the swarm's settings do not suit the state.
        """
        if torch.is_inference_mode_enabled():
            raise SessionError(
                "The session's optimizer is made under torch.inference_mode(), where nothing can "
                "be trained: make it outside."
            )
        if self._exchange is None:
            opt = self._expected()
            inner = self._real_exchange(opt)
            params = opt.parameters
            parts = [
                [params[index] for index in opt.positions(number)]
                for number in range(opt.fragments)
            ]
            self._exchange = SessionExchange(
                inner, self._attach, self._ordered, parts, opt.codec.fresh()
            )
        return self._exchange

    def _real_exchange(self, opt: OuterOptimizer) -> PairExchange | GroupExchange:
        return make_exchange(
            self._membership,
            self.settings,
            self._screen,
            opt,
            seed=self.seed,
            model=self._state.digest,
        )

    def optimizer(self, inner: Inner | None = None, **options: Any) -> OuterOptimizer:
        """Return the outer optimizer that the swarm's settings ask for, around ``inner``.

        Without ``inner`` its ``step`` does the outer part alone: call it after each step that other
        code has taken. To go on from a checkpoint, load it into the model and into this optimizer
        once it is made, in either order (`shoal.swarm.training.loaded_state`).
        ``options``: ``slow_device`` and ``on_round``, as those of ``optim.OuterOptimizer``.
        Raises as ``exchange`` and ``shoal.swarm.training.session_setup.begin`` do.
        """
        if options:
            check_options(self.settings, options)
        made = Stepped([*self._state.params]) if inner is None else inner
        return self._made(made, self.exchange(), **{"ranks": self._ranks} | options)

    def _made(self, inner: Inner, exchange: Any, **options: Any) -> OuterOptimizer:
        self._state.check_can_be_cut(self.settings.fragments)
        place = options.pop("slow_device", "cpu")
        device = place if isinstance(place, Path) else torch.device(place)
        length = round_length(self.settings.round, time.time, self._speeds)
        return make_outer(
            self.settings,
            inner,
            exchange,
            model=self._state.model,
            slow_device=device,
            length=length,
            fragments=self._state.fragments,
            **options,
        )

    def try_partners(
        self, loss: Callable[[nn.Module, Any], Tensor], batches: Iterable[Any]
    ) -> None:
        """Try a partner's weights on two of ``batches`` before they count, if the swarm's settings
        have ``check_loss``.

        Call it once the session has its optimizer; without it all weights count untried.
        ``loss(model, batch)`` is called in threads of the network, with a copy of the model in
        evaluation mode, without gradients. ``batches``: endless, of this node's own data, known to
        no other peer, on the model's device; where they end, trying ends. SessionError without a
        module as state, or without an optimizer.
        """
        if not self.settings.check_loss:
            return
        if self._ranks is not None:
            log.warning(
                "this peer counts partners' weights untried (outer.check_loss), for no rank has "
                "all of its own"
            )
            return
        if self._state.model is None or self._opt is None:
            raise SessionError(
                "Trying partners needs the module as state, and the session's optimizer: make it "
                "first."
            )
        self._screen.loss_check = LossCheck(
            LossTrial(loss, iter(batches), self._state.model, self._opt, log.warning)
        )

    def _expected(self) -> OuterOptimizer:
        """Return an optimizer with the swarm's settings that holds no memory."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own optimizer warns
            return self._made(Stepped(self._state.params), Alone(), slow_device="meta")

    def _speeds(self) -> list[float]:
        return announced_speeds(self._membership)

    def _ordered(self, parameters: AveragedParameters) -> AveragedParameters:
        """Return an optimizer's parameters in the order of the state, which all peers have,
        whatever their groups.
        """
        if self._closed:
            raise SessionError(
                "This session is over, so an optimizer would have no partners: begin another "
                "session for it."
            )
        if self._opt is not None:
            raise SessionError(
                "This session has its optimizer already: train on with that one, hand several "
                "inner optimizers in together (NoLoCo([muon, adamw], ...)), or begin another "
                "session for another model."
            )
        self._state.check_trained(parameters)
        return self._state.params

    def _attach(self, opt: OuterOptimizer) -> None:
        """Become a member; called while ``opt`` is made, of the parameters that ``_ordered``
        returned.
        """
        check = partial(self._check, opt)
        check() if self._ranks is None else self._ranks.alike(check)
        opt.run = self._swarm
        self._opt = opt
        if self._channel is not None:
            self._opt = cast(OuterOptimizer, LeadOptimizer(opt, self._channel))
        own_on_round = opt.on_round
        opt.on_round = partial(self._after_round, own_on_round)
        try:
            self._together(self._become_member)
        except BaseException:
            self._opt = self._member = None
            opt.on_round = own_on_round
            raise
        opt.register_step_pre_hook(self._before_step)
        opt.register_step_post_hook(self._after_step)
        opt.register_load_state_dict_pre_hook(self._loading)
        opt.register_load_state_dict_post_hook(self._loaded)
        self._rest()

    def _check(self, opt: OuterOptimizer) -> None:
        """Raise SessionError unless ``opt`` averages as the swarm does, in all ranks of this
        peer.
        """
        if opt._weights.dealt != (self._ranks is not None):
            raise SessionError(
                "The session and its optimizer must have the same ranks: hand in ranks= where the "
                "session is made, and to the optimizer too, or make that by s.optimizer(inner)."
            )
        check_alike(self.settings, opt, self._expected())

    def _become_member(self) -> None:
        assert self._exchange is not None  # it is what called
        assert self._opt is not None
        membership = self._membership
        opt = self._opt
        self._member = member = TrainingMember(
            membership,
            opt,
            self._exchange.inner,
            self._screen,
            model=self._state.digest,
            name=self._name,
            shard=self.shard,
        )
        if self._end.averages:
            last = LastAverage(membership, self.settings, opt.fragments, self._state.digest)
            last.announce = member.end
            last.say = log.info
            if self._ranks is None:
                last.waiting = member.at_rest
            self._end.last = last
        self._loader.began_at = begin(
            membership, self._state.digest, opt, member, self._announce, first=self._first
        )
        self._watch.late = self.progress
        member.reporter = StatusReporter(membership, self._name)
        self._announce("training")
        self._follow_changes()

    def _follow_changes(self) -> None:
        """Tell the loop what the swarm's creator has changed, if it counts by now."""
        assert self._opt is not None
        now = self._membership.changes.settings_at(self._opt.round // self._opt.fragments)
        if now is self.train or now == self.train:
            return
        if self._channel is not None:
            self._channel.send("change", train=now.model_dump())
        self._take_change(now)

    def _take_change(self, now: TrainSettings) -> None:
        before, self.train = self.train, now
        if self.on_change is not None:
            self.on_change(now)
            return
        news = changed(before, now)
        if "steps" in news:
            log.warning(
                "the swarm's creator has changed %s: this loop ends there if it asks session.over",
                described({"steps": news.pop("steps")}),
            )
        if news:
            log.warning(
                "the swarm's creator has changed %s: this loop has no session.on_change, so it "
                "goes on as before",
                described(news),
            )

    def _together(self, duties: Callable[[], None]) -> None:
        """Do a member's duties, unless the session is over; this peer's other ranks, if it has
        some, follow meanwhile.
        """
        with nullcontext() if self._channel is None else self._channel.leading():
            if not self._closed:
                duties()

    def _announce(self, state: DirectoryState) -> None:
        assert self._member is not None
        self._measure(self._member)
        self._member.announce(state)

    def _measure(self, member: TrainingMember) -> None:
        assert self._opt is not None
        self._loop.write(self._opt, member)

    def report(self, loss: float) -> None:
        """Set this node's training loss, nats, that others see; one that is not finite is not
        sent.
        """
        self._loop.loss = float(loss)

    def _after_round(self, own: Callable[[RoundInfo], None] | None, info: RoundInfo) -> None:
        """Report a round, then call the optimizer's ``own`` on_round."""
        self._together(partial(self._follow_round, info))
        if own is not None:
            own(info)

    def _follow_round(self, info: RoundInfo) -> None:
        assert self._member is not None
        report = self._member.on_round(info)
        done = self._member.report_round(info, report, self._loop.loss)
        for notice in self._member.news():
            log.warning("%s", notice.said)
        if self.on_report is not None:
            self.on_report(info, report, done)

    def _rest(self) -> None:
        """Hand out the weights from now to the next step, for which a loop may take as long as it
        likes: it evaluates, or is over. Of several ranks none has all weights.
        """
        self._resting.close()
        if self._ranks is None and self._member is not None and not self._closed:
            self._resting.enter_context(self._member.at_rest())

    @uncompiled
    def _before_step(self, opt: Any, args: Any, kwargs: Any) -> None:
        self._resting.close()

    @uncompiled
    def _after_step(self, opt: Any, args: Any, kwargs: Any) -> None:
        self._watch.stepped(opt.param_groups, over=self._closed)
        self._together(self._between_steps)
        self._rest()

    def _between_steps(self) -> None:
        assert self._member is not None
        assert self._opt is not None
        opt = self._opt
        if self._member.after_step():
            log.info(
                "missed a round, and took over the swarm's weights at round %d",
                opt.round // opt.fragments,
            )
        self._follow_changes()
        if self._loop.is_due(opt):
            self._announce("training")
            for notice in self._member.news():
                log.warning("%s", notice.said)

    def _loading(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Return what is loaded of a saved state: of the swarm's weights and its, those of the
        later round count.
        """
        self._resting.close()
        if self._closed or self._end.begun:
            return state
        return self._loader.begin(optimizer, state, self._ranks)

    def _loaded(self, optimizer: Any) -> None:
        """Go on in the round that was loaded."""
        if self._loader.end(optimizer):
            self._together(self._go_on)

    def _go_on(self) -> None:
        if self._member is not None and self._opt is not None:
            self._member.begin()
            self._loop.restart(self._opt, self._member)
            self._announce("training")

    def status(self) -> dict[str, Any]:
        """Return the swarm as this node sees it.

        That is the object of `shoal status --json`, with this node's ``peer``, the numbers that it
        has ``refused`` so far, by reason (`Membership.refused`), the ``internal_errors`` of its own
        code by place (`InternalErrors.report`), and what others have ``confirmed`` of its work
        (`shoal.swarm.topics.tally.Tally.report`).
        """
        membership = self._membership
        directory = self._membership.directory
        found = overview(
            membership.swarm,
            membership.manifest,
            directory.members(),
            time.time(),
            directory.size(),
            membership.changes.newest,
        )
        reporter = None if self._member is None else self._member.reporter
        mine = {} if reporter is None else {"confirmed": reporter.tally.report()}
        return {
            **found,
            "peer": membership.identity.peer_id,
            "refused": membership.refused(),
            "internal_errors": membership.host.internal_errors.report(),
            **mine,
        }

    def evaluated(self, loss: float) -> None:
        """Set this node's held-out loss, nats, in its record."""
        if self._member is not None:
            self._member.records.lost(held_out=loss)

    def record(self) -> NodeRecord:
        """Return this node's record as of now (`shoal.swarm.wire.record`)."""
        return NodeRecord() if self._member is None else self._member.record()

    def trained_alone(self) -> str:
        """Return a sentence if nothing was exchanged so far though others were there, else nothing.

        ``with`` logs it at its end.
        """
        return "" if self._member is None or self._opt is None else self._member.trained_alone()

    def finish(self, evaluate: Callable[[], float] | None = None) -> None:
        """Wait for pending exchanges, and average with all members that are there
        (`RunEnd`), if the swarm ends so.

        Call it once, after the last step; ``with`` does it too. ``evaluate``: returns the held-out
        loss, nats, of the model as it is. `ended` says with whom, and what was gained.
        """
        if self._opt is None or self._end.begun or self._closed:
            return
        self._resting.close()
        held_out_loss = partial(_held_out_loss, self._opt, evaluate)
        checked = self.settings.check_loss and evaluate is not None
        self._end.run(self._opt, held_out_loss, checked=checked)
        if self._end.last is not None and self.ended is not None:
            level = logging.INFO if self.ended.complete else logging.WARNING
            log.log(level, "%s", self.ended.said())
        self._rest()

    def close(self) -> None:
        """Leave the swarm, in at most some ten seconds. The optimizer goes on without partners."""
        if self._closed:
            return
        self._resting.close()
        try:
            if self._member is not None:
                self._measure(self._member)
                for said in (
                    *(notice.said for notice in self._member.news()),
                    self.trained_alone(),
                ):
                    if said:
                        log.warning("%s", said)
                self._member.leave(self.ended)
        finally:
            self._closed = True
            if self._member is not None and self._member.reporter is not None:
                self._member.reporter.close()
            if self._exchange is not None:
                self._exchange.close()
            self._membership.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()
        if self._ranks is not None and error is not None:
            self._ranks.explain(error)


def _held_out_loss(opt: OuterOptimizer, evaluate: Callable[[], float] | None) -> float | None:
    """Return what a loop's ``evaluate`` returns of the slow weights; None if it has none, or the
    loss is not finite.
    """
    if evaluate is None:
        return None
    with opt.averaged():
        loss = float(evaluate())
    return loss if math.isfinite(loss) else None

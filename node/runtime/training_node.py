"""A node from its membership on: build its parts, take over the swarm's weights, train, and leave
it in good order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.node.config.device import make_current, resolve_device
from shoal.node.config.settings import ConfigError
from shoal.node.metrics.log import Metrics, RoundRecord
from shoal.node.metrics.sinks import about
from shoal.node.plan.advice import averages_as_chosen, averages_together
from shoal.node.plan.rows import ModelTensors, memory_of, work_of
from shoal.node.plan.run_cost import StartEstimate
from shoal.node.runtime import resume
from shoal.node.runtime.compute_last import compute_last
from shoal.node.runtime.display import Activity, Display
from shoal.node.runtime.fault_news import FaultNews
from shoal.node.runtime.join import (
    LinkFile,
    await_company,
    await_others,
    choose_shard,
    follow_schedule,
    for_new_swarm,
    is_few_but_chosen,
    make_trainer,
    new_manifest,
    outer_of_few,
    schedule_steps,
    try_partners,
)
from shoal.node.runtime.result import Result, Setup, ended_at, save, summary
from shoal.node.runtime.resume import SavedRun
from shoal.node.runtime.run_options import LOG, RunOptions, network
from shoal.node.runtime.task_setup import RL, check_size, continued, enter, make_task, own_steps
from shoal.node.runtime.train_alone import train_alone
from shoal.node.task import Shard, Task
from shoal.node.training import resources
from shoal.node.training.meter import Progress
from shoal.node.training.trainer import Trainer
from shoal.node.user_code import out_of_memory
from shoal.node.verify.claims_folder import CLAIMS
from shoal.node.verify.start import start_verification
from shoal.node.verify.terms import make_terms
from shoal.optim import RoundInfo
from shoal.swarm.changes import changed, described
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.membership import Membership, create
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.state.catch_up import catch_up
from shoal.swarm.state.progress import FetchProgress
from shoal.swarm.state.snapshot import State
from shoal.swarm.topics.status import StatusReporter
from shoal.swarm.training.factories import make_exchange, make_screen
from shoal.swarm.training.last_average import LastAverage, averages_at_end
from shoal.swarm.training.member import TrainingMember
from shoal.swarm.training.round_steps import announced_speeds
from shoal.swarm.training.session_setup import until_started, waiting_for
from shoal.swarm.training.shard import settled

if TYPE_CHECKING:
    import torch

    from shoal.node.rl.rollout_sharing import RolloutSharing
    from shoal.node.verify.service import Verification


def announce_publicly(
    membership: Membership,
    tensors: ModelTensors,
    device: str,
    log: Callable[[str], None],
    *,
    created: bool,
) -> None:
    """Have this node announce its swarm, if it is public.

    ``tensors``: what is averaged; ``device``: this node's type; ``created``: by it.
    """
    manifest = membership.manifest
    if not manifest.public:
        return
    if created and not membership.network.bootstrap:
        log(
            "this swarm is public, but no bootstrap node is named that could list it: start again "
            "with --bootstrap and its address"
        )
    params = tensors.params
    work = work_of(manifest.outer, tensors, peers=max(manifest.start_when, 2), step_s=1.0)
    memory = memory_of(manifest.outer.method, params, overlapped=bool(work.lag))
    sizes = {"params": params, "round_bytes": work.nbytes, "memory": round(memory or 0)}
    membership.announcer.announce(membership.sealed, **sizes, device=device)


KEEP = 3  # checkpoints, the newest ones
WAITING_S = 10.0  # seconds between two reminders that peers are missing
SETTLE_S = 3.0  # seconds to read who else came, before the first step
CHANGE_S = 5.0  # seconds to fetch a change of the swarm's settings before the first step
HURRY_S = 3.0  # seconds that a round in flight may still take once the node is asked to stop


@dataclass(frozen=True)
class Arrival:
    """How a node came into its swarm."""

    seen: set[str] | None
    """The members when it chose its shard; None: it did not choose."""
    newcomer: bool
    """It begins with the weights of a swarm that is under way."""


class TrainingNode:
    """A node that has its folder, key and metrics: the rest of its life.

    ``saved``: the checkpoint that it begins from.
    """

    membership: Membership
    trainer: Trainer
    member: TrainingMember
    sharing: RolloutSharing | None
    """Present where rollouts are shared."""
    verification: Verification | None
    """Present where nodes verify each other."""
    result: Result

    def __init__(
        self,
        options: RunOptions,
        saved: SavedRun | None,
        metrics: Metrics,
        activity: Activity,
    ) -> None:
        self.options = options
        self.settings = options.settings
        """The user's; once there is a trainer, with the swarm's in place of the outer, train and
        task settings.
        """
        node = self.settings.node
        self.saver = CheckpointWriter(
            options.folder,
            keep=KEEP,
            state=self._state,
            notify=self.display.message,
            gigabytes=node.disk,
            uncounted=(CLAIMS,),
            copies=resources.room_for_copy(node.ram),
            check=lambda: self.trainer.check_can_resume(),
        )
        self._saved = saved
        self.metrics = metrics
        self._activity = activity
        memory_bound_gb = node.ram
        if node.slow_folder:
            memory_bound_gb = 0.0  # pages of files would count too
        self._faults = FaultNews(metrics, self.display.message, memory_bound_gb)

    @property
    def display(self) -> Display:
        return self.options.display

    @cached_property
    def device(self) -> torch.device:
        """The device to train on. ConfigError if there is no such device."""
        ranks = self.options.ranks
        if ranks is None:
            return resolve_device(self.settings.node.device)
        return ranks.device

    # -- building ----------------------------------------------------------------------------------

    def run(self, membership: Membership | None, identity: Identity) -> Result:
        """Create a swarm as ``identity``, if this node has joined none; train and leave.

        ShoalError for what the user can mend.
        """
        make_current(self.device)
        joined = membership is not None
        self.membership = self._create(identity) if membership is None else membership
        try:
            self.membership.host.internal_errors.log_file = str(self.options.folder / LOG)
            self._link_file = LinkFile(self.options.folder, self.membership)
            if joined:
                self._enter(self.membership.manifest)
            with ExitStack() as closing:
                arrival = self._build(closing)
                closing.callback(self.display.close)
                result = self._train(arrival)
                if self.options.ranks is not None:
                    self.options.ranks.end()
                return result
        finally:
            self.membership.close()

    def _create(self, identity: Identity) -> Membership:
        saved = self._saved
        settings = self.settings
        if saved is not None and settings.node.resume:
            resume.check_same_protocol(saved)
            self._enter(saved.manifest)
            sealed = saved.sealed
        else:
            stranger = None  # who may have signed the sizes
            if saved is not None:
                stranger = None if settings.task.model_fields_set else saved.manifest
                settings = continued(settings, saved.manifest_then)
            if outer_of_few(settings) is not None:
                self.display.message(averages_together(settings.swarm.start_when))
            elif is_few_but_chosen(settings):
                self.display.message(averages_as_chosen(settings.outer, settings.swarm.start_when))
            self.settings = settings = for_new_swarm(settings)
            task = make_task(settings)
            check_size(task, settings, self.device.type, self.display.message, stranger)
            self._make_trainer(task)
            trainer = self.trainer
            terms = make_terms(settings, trainer.task)
            model = model_digest(trainer.params)
            agreed = trainer.task.agreed_options()
            fragments = trainer.whole.fragments
            if (settings.outer.fragments or 0) > fragments:
                self.display.message(
                    f"the model has {fragments} layers, so a round has {fragments} fragments"
                )
            sealed = new_manifest(settings, identity, model, terms, agreed, fragments)
        return create(identity, sealed, network(self.settings))

    def _enter(self, manifest: Manifest) -> None:
        with self._activity.doing("loading the model"):
            self.settings, task = enter(
                self.settings, manifest, self.device.type, self.display.message
            )
        self._make_trainer(task, manifest.train)

    def _make_trainer(self, task: Task, swarm: TrainSettings | None = None) -> None:
        def speeds() -> list[float]:
            return announced_speeds(self.membership)

        with self._activity.doing("loading the model"):
            self.trainer = make_trainer(
                self.settings,
                task,
                self.device,
                self.options.ranks,
                self.display.message,
                self._on_round,
                speeds,
                swarm,
            )

    def _build(self, closing: ExitStack) -> Arrival:
        """Find this node's place among the members, take over weights, and make the parts; nothing
        is announced yet. Return how it came.

        ``closing`` gets what ends each part that runs beside training, also if a later part cannot
        be made.
        """
        settings = self.settings
        membership = self.membership
        trainer = self.trainer
        log = self.display.message
        host = membership.host
        outer = settings.outer
        opt = trainer.whole
        name = settings.node.name
        task = trainer.task
        self.metrics.begin(about(name, membership, self.device))
        model = model_digest(trainer.params)
        own = self._own_run()
        traffic = host.traffic
        self._activity.progress = lambda: (opt.steps, traffic.beside_gossip())
        with self._activity.doing("fetching the swarm's weights", bounded=True):
            state = self._swarm_state(
                model, came_from_elsewhere=self._saved is not None and own is None
            )
        shard, seen = self._shard(own)  # now, for others that came meanwhile have theirs
        screen = make_screen(outer)
        exchange = make_exchange(
            membership, outer, screen, opt, seed=settings.train.seed, model=model
        )
        self.member = TrainingMember(
            membership, opt, exchange, screen, model=model, name=name, shard=shard
        )
        self.member.serve()
        self.sharing = None
        if settings.task.hooks == RL:
            from shoal.node.rl.rollout_sharing import RolloutSharing

            self.sharing = RolloutSharing(
                task, membership, self._note, log, settings.node.ram, self.options.folder
            )
            closing.callback(self.sharing.close)
        self.verification = start_verification(settings, membership, task)
        if self.verification is not None:
            closing.callback(self.verification.close)
        trainer.connect(exchange, membership.swarm, shard)
        if averages_at_end(outer):
            trainer.end_with(self._last_average(model))
        try_partners(trainer, screen, log)
        closing.callback(trainer.close)
        newcomer = self._begin_from(state)
        tensors = ModelTensors.of(trainer.params, trainer.model)
        setup = Setup(
            method=outer.method,
            device=str(self.device),
            shard=str(shard),
            params=tensors.params,
            fragments=opt.fragments,
        )
        self.result = Result(name=name, peer=host.peer_id, swarm=membership.swarm, setup=setup)
        announce_publicly(
            membership, tensors, self.device.type, log, created=self.options.link is None
        )
        reporter = StatusReporter(membership, name, folder=self.options.folder)
        self.member.reporter = reporter
        self._activity.on_change = reporter.doing
        closing.callback(reporter.close)
        return Arrival(seen, newcomer=newcomer)

    def _last_average(self, model: str) -> LastAverage:
        """Return the exchange of the last average, which answers others from now on."""
        fragments = self.trainer.whole.fragments
        last = LastAverage(self.membership, self.settings.outer, fragments, model)
        last.announce = self.member.end
        last.say = self.display.message
        last.waiting = self._waiting_at_end
        return last

    @contextlib.contextmanager
    def _waiting_at_end(self) -> Iterator[None]:
        doing = self._activity.doing("averaging with all members", bounded=True)
        with doing, self._at_rest():
            yield

    def _meets_others(self) -> bool:
        """Return False if this node has just created the swarm, so that nobody else can be in it.

        Whoever returns may find that others went on, its creator too.
        """
        return self._returns() or self.options.link is not None

    def _returns(self) -> bool:
        """Return whether this node goes on from a checkpoint of its swarm."""
        return self._saved is not None and self._saved.swarm == self.membership.swarm

    def _own_run(self) -> SavedRun | None:
        """Read the directory, and learn what was changed; return the checkpoint if it is of this
        swarm.
        """
        own = resume.own_run(self._saved, self.membership.swarm, self.settings.node)
        if self._meets_others():
            self.membership.directory.refresh(10.0)
        # Who created the swarm and met nobody has nobody to wait for.
        if own is not None and (self.options.link is not None or self.membership.host.known()):
            await_others(self.membership, self.display.message, self._stopping)
        if own is not None and own.change:
            self.membership.changes.take(own.change)
        self.membership.changes.fetch(CHANGE_S)
        return own

    def _shard(self, own: SavedRun | None) -> tuple[Shard, set[str] | None]:
        """Return the shard to train on, and the members that were there if this node chose it.

        Others hear of it seconds later, when this node is announced.
        """
        directory = self.membership.directory
        asked = self.settings.node.shard
        if own is not None and asked is None:
            return own.shard, None
        if self._meets_others():
            with suppress(NetworkError):  # it was read when this node came
                directory.refresh(10.0)
        members = directory.members()
        shard = choose_shard(
            self.settings, self.membership.manifest, members, self.membership.host.peer_id
        )
        return shard, set(members) if asked is None else None

    def _settle(self, seen: set[str] | None) -> None:
        """Take another shard if a node that came at the same moment took this node's too, and goes
        first.
        """
        member = self.member
        directory = self.membership.directory
        if seen is None:
            return
        with suppress(NetworkError):
            directory.refresh(SETTLE_S)
        shard = settled(directory.members(), member.shard, self.result.peer, seen)
        if shard != member.shard:
            self.display.message(
                f"another node that came at the same moment has shard {member.shard}: this one "
                f"takes {shard}"
            )
            self.trainer.connect(member.exchange, self.membership.swarm, shard)
            member.shard = shard
            self.result.setup = self.result.setup.model_copy(update={"shard": str(shard)})

    def _swarm_state(self, model: str, *, came_from_elsewhere: bool) -> State | None:
        """Fetch the swarm's weights; None if all begin from those of its random seed, or if this
        node shares no weights.
        """
        # A node that shares rollouts and no weights may have another model, and starts from its own
        # weights.
        alone = self.settings.task.hooks == RL and self.settings.outer.alone
        if alone or not self._meets_others():
            return None

        def watch(progress: FetchProgress) -> None:
            self._activity.detail = progress.__str__

        state = catch_up(self.membership, model, self.trainer.whole, watch=watch)
        if state is None and came_from_elsewhere:
            raise CheckpointError(
                "No peer of this swarm has finished a round, and all begin from the weights of its "
                "seed: create a swarm that begins from the checkpoint (shoal up --resume-from), or "
                "join this one later."
            )
        return state

    def _begin_from(self, state: State | None) -> bool:
        """Begin from the swarm's ``state`` or the checkpoint, whichever is newer.

        Return whether this node begins with the weights of a swarm that is under way.
        """
        saved = self._saved
        membership = self.membership
        trainer = self.trainer
        if saved is not None and saved.change and saved.swarm == membership.swarm:
            self._follow_changes(saved.round)  # before its schedule is compared with the saved one
        if saved is not None:
            for line in resume.restore(trainer, saved, membership.swarm):
                self.display.message(line)
            # it maps the checkpoint's file, which would take room on the disk after it was removed
            saved.trainer.clear()
            if (
                saved.swarm == membership.swarm
                and state is not None
                and not resume.is_newer(state, trainer.whole)
            ):
                state = None
        if saved is not None or state is not None:
            trainer.meter.rise.stop()
        self.member.begin(state)
        self._follow_changes(trainer.whole.round // trainer.whole.fragments)
        if state is not None:
            self.display.message(
                f"took over the swarm's weights at round {state.round // trainer.whole.fragments}"
            )
            others = membership.directory.members().values()
            met = membership.host.met
            manifest = membership.manifest.model_copy(update={"train": self._swarm_train})
            if said := follow_schedule(trainer, self.settings, manifest, state.round, others, met):
                self.display.message(said)
        return saved is None and state is not None

    def _state(self) -> dict[str, Any]:
        return {
            "swarm": self.membership.swarm,
            "manifest": self.membership.sealed.hex(),
            "change": self.membership.changes.sealed.hex(),
            "trainer": self.trainer.state(),
        }

    @cached_property
    def _swarm_train(self) -> TrainSettings:
        """The swarm's settings of training by which this node trains now; `_follow_changes`
        replaces them.
        """
        return self.membership.manifest.train

    def _follow_changes(self, round: int) -> None:
        """Go on with what the creator has changed, if it counts in ``round``, and say so."""
        now = self.membership.changes.settings_at(round)
        if now is self._swarm_train or now == self._swarm_train:
            return
        before, self._swarm_train = self._swarm_train, now
        own = own_steps(self.options.settings, self.membership.manifest)
        steps = now.steps if own is None else own
        train = self.settings.train.model_copy(update={"steps": steps})
        self.settings = self.settings.model_copy(update={"train": train})
        length = schedule_steps(self.settings, now)
        self.trainer.change(lr=now.lr, steps=steps, length=length)
        news = changed(before, now)
        said = f"the swarm's creator has changed {described(news)}, from round {round} on here"
        if own is not None and "steps" in news:
            said += f"; this node keeps its own --steps {own}"
        self.display.message(said)
        self.display.resize(steps)
        self.metrics.write("change", round=round, **news)

    # -- running -----------------------------------------------------------------------------------

    def _check_steps_left(self) -> None:
        """Raise ConfigError if a run that came to its end is resumed without more steps: it would
        only replace its result by one that says nothing.
        """
        done, _ = self._done()
        steps = self.settings.train.steps
        if self._saved is not None and 0 < steps <= done <= ended_at(self.options.folder):
            self.member.leave()
            raise ConfigError(
                f"All {done:,} steps of this run are done, and it has ended: give more by --steps, "
                f"such as --steps {2 * done}, or leave --resume out in another folder."
            )

    def _stopping(self) -> bool:
        return self.options.shutdown.requested

    def _train(self, arrival: Arrival) -> Result:
        result = self.result
        trainer = self.trainer
        if self._meets_others():
            self.membership.check_alone(self._stopping)
        self.options.shutdown.orderly(lambda: self._hurry(HURRY_S))
        self.member.announce("waiting")
        self.options.on_link(self.membership.link())
        self._link_file.refresh()
        self._wait_for_peers()
        # An evaluation takes as long as dozens of steps, and a newcomer's swarm is under way.
        if not arrival.newcomer and not self._stopping():
            first = self._evaluate()
            self.member.records.lost(held_out_first=first, held_out=first)
        if not self._stopping():
            self._settle(arrival.seen)
        self._check_steps_left()
        self.member.start_counting()
        self.member.announce("training")
        result.take(self.member.record())
        result.began_at, _ = self._done()
        self.metrics.write("start", **result.model_dump(mode="json"))
        self.display.start(self.settings.train.steps)
        tensors = ModelTensors.of(trainer.params, trainer.model)
        estimate = StartEstimate(self.settings.outer, tensors, self._done())
        if self.verification is not None:
            compute_last()
        # What started several ranks starts them again if one dies, from here.
        self.saver.due = self.options.ranks is not None
        try:
            with self._activity.doing("training"):
                self._activity.detail = partial(self._resuming, trainer.opt.steps)
                result.wall_s = trainer.run(
                    stop=self._stopping,
                    on_progress=partial(self._on_progress, estimate),
                    after_step=self._after_step,
                )
            self._tell_end()
            if self._stopping():
                self.display.message(
                    "stopping: this node leaves the swarm and saves; a second signal ends it at "
                    "once, unsaved"
                )
        except Exception as error:
            # Other ranks may be in the middle of a step.
            if out_of_memory(error) and not trainer.stepping and self.options.ranks is None:
                self._save_whole_step()
            raise
        finally:
            self.member.leave(trainer.end.report)
        self._conclude(result)
        self.metrics.write("end", **result.model_dump(mode="json"))
        save(result, self.options.folder, self.display.message)
        self.display.close()
        for line in summary(result, self.options.folder):
            self.display.message(line)
        return result

    def _resuming(self, begun_at: int) -> str:
        """Return what goes on in the first step after a resume, if that takes long."""
        if not begun_at or self._saved is None or self.trainer.opt.steps > begun_at:
            return ""
        return (
            f"the first step after step {begun_at:,}; where batches(shard) has no place to go on "
            "from, those of before are drawn again"
        )

    def _wait_for_peers(self) -> None:
        with self._activity.doing("waiting for peers", bounded=True, told=True):
            for missing in until_started(
                self.membership, self.trainer.opt, WAITING_S, self._stopping
            ):
                self._link_file.refresh()
                for line in filter(None, (self.membership.news(), waiting_for(missing))):
                    self.display.message(line)
            if self.trainer.whole.round and self._returns():
                with self._at_rest():  # others that return fetch this node's weights first
                    await_company(self.membership, self.display.message, self._stopping)

    def _conclude(self, result: Result) -> None:
        """Save the end, evaluate it, and fill in ``result``."""
        trainer = self.trainer
        records = self.member.records
        result.interrupted = self._stopping()
        records.rates = trainer.meter.throughput.mean()
        if result.wall_s:
            result.tokens_per_s_with_waiting = trainer.meter.throughput.tokens / result.wall_s
        result.refused = self.membership.refused()
        self._tell_news()
        result.internal_errors = self.membership.host.internal_errors.report()
        if not self.settings.outer.alone:
            result.trained_alone = self.member.trained_alone()
        with self._activity.doing("saving", bounded=True):
            result.not_saved = self.saver.last(trainer.opt.steps)
        if result.not_saved is not None:
            self.display.message(result.not_saved)
        last = None
        if not result.interrupted:
            report = trainer.end.report
            last = None if report is None else report.loss
            if last is None:
                last = self._evaluate()
            if last is not None:
                result.task = trainer.task.extra_results(last)
            if self.options.baseline:
                self._compare()
                result.interrupted = self._stopping()
        records.lost(held_out=last)
        result.take(self.member.record())
        result.gossip_sent = self.membership.host.traffic.gossip_sent
        if self.sharing is not None:
            result.rl = self.sharing.report(result.loss.held_out_first, last)
        if self.verification is not None:
            result.verify = self.verification.report()

    def _compare(self) -> None:
        """Train the same once more without partners."""
        self.display.message("training the same once more without partners, to compare")
        with self._activity.doing("training alone, to compare"):
            alone = train_alone(self.settings, self.trainer, self._stopping)
        self.member.records.lost(held_out_alone=alone)

    def _hurry(self, seconds: float) -> None:
        self.member.exchange.hurry(seconds)
        self.trainer.end.hurry(seconds)

    def _tell_end(self) -> None:
        """Say what the last average came to, where the swarm ends with one, and keep it for the
        result.
        """
        report = self.trainer.end.report
        if report is None:
            return
        self.display.message(report.said())
        self.result.last_average = asdict(report)
        self.metrics.write("last_average", **asdict(report))

    def _save_whole_step(self) -> None:
        """Save the weights of the last step, which are whole though what came after it failed."""
        with self._activity.doing("saving", bounded=True):
            step = self.trainer.opt.steps
            self.display.message(
                self.saver.last(step)
                or f"step {step} was whole and is saved: --resume goes on from it"
            )

    def _evaluate(self) -> float | None:
        with self._activity.doing("evaluating"), self._at_rest():
            return self.trainer.evaluate()

    def _at_rest(self) -> AbstractContextManager[None]:
        """Return a block in which this node's weights do not change, and are handed out."""
        if self.options.ranks is not None:  # they have no time to, and each holds a part
            return nullcontext()
        return self.member.at_rest()

    def _done(self) -> tuple[int, int]:
        """Return the inner steps of this node, and the rounds of the swarm."""
        opt = self.trainer.whole
        return opt.steps, opt.round // opt.fragments

    def _on_progress(self, estimate: StartEstimate, progress: Progress) -> None:
        self.display.update(progress)
        news = estimate.news(
            *self._done(),
            total=self.settings.train.steps,
            peers=self.membership.directory.size(),
        )
        if news:
            self.display.message(f"an estimate: at this speed {news}")
        self._tell_news()
        self._tell_rise(progress.loss)
        self.member.records.rates = progress.rates
        self.member.records.lost(training=progress.loss)
        self.metrics.progress(self.member.announce("training"))
        self._link_file.refresh()

    def _after_step(self) -> None:
        opt = self.trainer.whole
        every = self.settings.train.eval_every
        self._activity.stepped()
        self._follow_changes(opt.round // opt.fragments)
        if self.trainer.plan is not None:
            self.display.message(self.trainer.plan.compared())
            self.trainer.plan = None
        if self.member.after_step():
            self.display.message(
                "missed a round, and took over the swarm's weights at round "
                f"{opt.round // opt.fragments}"
            )
        if self.verification is not None:
            self.verification.tell(self.display.message, self._note)
        # Not in the middle of the step: scheduler and gradients must fit.
        self.saver.turn(opt.steps)
        if every and opt.steps % every == 0:
            loss = self._evaluate()
            self.member.records.lost(held_out=loss)
            self.metrics.write("evaluation", step=opt.steps, held_out=loss)

    def _on_round(self, info: RoundInfo) -> None:
        report = self.member.on_round(info)
        # A partner may have been reassigned to another bucket during the round.
        members = self.membership.directory.everyone()
        me = self.membership.host.peer_id
        partner = next((peer for peer in info.members if peer != me), None)
        opt = self.trainer.whole
        if self.verification is not None:
            self.member.records.checked(**self.verification.counted())
        done = self.member.report_round(info, report, self.trainer.round_loss())
        node = self.member.record()
        record = RoundRecord.of(
            done,
            info,
            report,
            node.progress,
            opt.fragments,
            partner=members[partner].name if partner in members else partner,
            weights=resume.digest_of(opt, info.key.fragment),
        )
        self.metrics.round(record)
        self.metrics.progress(node)
        self._faults.check_memory()
        # Where rollouts are shared, a round without a partner is usual.
        if self.sharing is None or partner is not None:
            self.display.round(record)
        if info.key.fragment >= opt.fragments - 1:
            self._round_over(node.exchanges.rounds)
        self._faults.write(self.membership)
        self._tell_news()

    def _round_over(self, rounds: int) -> None:
        """Do what is due after a whole round, the ``rounds``-th of this run."""
        if self.options.keep_rounds:
            resume.keep(self.trainer.whole, self.options.folder, rounds)
        every = self.settings.node.checkpoint_every_rounds
        self.saver.due |= every > 0 and rounds % every == 0

    def _tell_news(self) -> None:
        """Show what is new in the diagnosis of this node, and write it to the metrics."""
        for topic, said in self.member.news():
            self.display.message(said)
            self.metrics.write("diagnosis", about=topic, said=said)
            if topic == "partition":
                suspected = self.member.sync.diagnosis.absence.suspected
                self.metrics.write(
                    "partition",
                    said=said,
                    missing_names=[] if suspected is None else list(suspected.names),
                )

    def _tell_rise(self, loss: float) -> None:
        """Show that training has diverged; rewards give no loss that could tell."""
        said = "" if self.settings.task.hooks == RL else self.trainer.meter.rise.news(loss)
        if said:
            self.display.message(said)
            self.metrics.write("diagnosis", about="loss", said=said)

    def _note(self, event: str, **fields: Any) -> None:
        self.metrics.write(event, **fields)
        records = self.member.records
        if event == "rl":
            names = ("reward", "own", "foreign", "seen", "unused")
            records.learnt(**{name: fields[name] for name in names})
        elif event == "verify":
            records.bans(fields["banned"])
        if self.member.reporter is not None:
            self.member.reporter.event(event, **fields)

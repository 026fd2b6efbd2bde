"""One node from start to end: get into the swarm, train, and leave it in good order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from safetensors.torch import save_file

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.disk_budget import room_maker
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.node.config.settings import Settings, resolve_device, use_threads
from shoal.node.metrics.factory import about, open_sinks
from shoal.node.metrics.log import Metrics, RoundRecord
from shoal.node.rl.rollout_sharing import RolloutSharing, make_task
from shoal.node.rl.task import RLTask
from shoal.node.runtime import resume as beginning
from shoal.node.runtime.display import Display
from shoal.node.runtime.join import (
    RL,
    await_others,
    choose_shard,
    create,
    join,
    new_manifest,
    own_data,
    swarm_settings,
)
from shoal.node.runtime.refusal_log import RefusalLog
from shoal.node.runtime.result import RESULT, Result, write_json
from shoal.node.runtime.resume import SavedRun
from shoal.node.runtime.signals import ShutdownSignals
from shoal.node.task import Shard, Task
from shoal.node.tasks.loader import load_task
from shoal.node.training import resources as memory
from shoal.node.training.trainer import Progress, Trainer
from shoal.node.verify.start import start_verification
from shoal.node.verify.terms import make_terms
from shoal.optim import FLOAT32, Alone, RoundInfo
from shoal.swarm.access.link import Link
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest.outer import OuterSettings
from shoal.swarm.membership.directory import State as DirectoryState
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.catch_up import catch_up
from shoal.swarm.state.snapshot import State
from shoal.swarm.topics.status_reporter import StatusReporter
from shoal.swarm.training.exchange_factory import make_exchange, make_screen
from shoal.swarm.training.outer_sync import OuterSync
from shoal.swarm.wire.digest import digest

HURRY_S = 3.0  # seconds that a round under way may still take once the node was told to stop
LEAVE_S = 2.0
WAITING_S = 10.0  # seconds between two reminders that peers are missing
METRICS = "metrics.jsonl"
ROUNDS = "rounds"


class NodeRun:
    """Runs one node. ``link`` None creates a swarm; ``on_link`` is told the join link as soon as others can use it."""

    def __init__(
        self,
        settings: Settings,
        link: Link | None,
        display: Display,
        shutdown: ShutdownSignals,
        *,
        on_link: Callable[[Link], None] = lambda link: None,
        baseline: bool = False,
        keep_rounds: bool = False,
    ) -> None:
        self.settings, self.link, self.display, self.shutdown = settings, link, display, shutdown
        self.on_link, self.baseline, self.keep_rounds = on_link, baseline, keep_rounds
        self.folder = settings.node.run_folder
        keep, room = settings.node.keep_checkpoints, room_maker(self.folder, settings.node.disk)
        self.saver = CheckpointWriter(self.folder, keep=keep, state=self._state, notify=display.message, room=room)

    def run(self) -> Result:
        """The whole life of the node. ShoalError for what the user can mend; nothing is left running."""
        checkpoint.check_writable(self.folder)
        saved = beginning.find(self.settings.node)
        identity = Identity.load_or_create(self.settings.node.identity_path)
        self.device = resolve_device(self.settings.node.device)
        use_threads(self.settings.node.threads)
        link = self.link
        own = saved if link is not None and saved is not None and saved.swarm == link.swarm else None
        sealed = None if own is None else own.sealed
        with open_sinks(self.settings.node, self.display.message) as self.sinks:
            membership = self._create(identity, saved) if link is None else join(self.settings, identity, link, sealed)
            try:
                self.membership = membership
                return self._in_swarm(saved)
            finally:
                membership.close()

    def _create(self, identity: Identity, saved: SavedRun | None) -> Membership:
        if saved is not None and self.settings.node.resume:
            beginning.check_same_outer(self.settings.outer, saved)
            self.settings, sealed = swarm_settings(self.settings, saved.manifest), saved.sealed
            self._make_trainer()
        else:
            if saved is not None:
                self.settings = beginning.with_its_task(self.settings, saved)
            self._make_trainer()
            task = self.trainer.task
            terms, model = make_terms(self.settings, task), model_digest(self.trainer.params)
            sealed = new_manifest(self.settings, identity, model, terms, task.agreed_options())
        return create(self.settings, identity, sealed)

    def _task(self) -> Task:
        if self.settings.task.hooks == RL:
            return make_task(self.settings)
        return load_task(self.settings.task.hooks, {**self.settings.task.options, **own_data(self.settings)})

    def _make_trainer(self) -> None:
        self.trainer = Trainer(
            self._task(),
            self.settings.outer,
            self.settings.train,
            device=self.device,
            slow_on_device=self.settings.node.slow_on_device,
            on_round=self._on_round,
            speeds=self._speeds,
        )
        memory.check(self.settings.node.ram, self.trainer)

    def _speeds(self) -> list[float]:
        """Inner steps a second of all members, as they say."""
        return [member.steps_per_s for member in self.directory.members().values()]

    def _in_swarm(self, saved: SavedRun | None) -> Result:
        membership = self.membership
        if self.link is not None:
            self.settings = swarm_settings(self.settings, membership.manifest)
            self._make_trainer()
        self.host, self.directory = membership.host, membership.directory
        trainer, settings, swarm = self.trainer, self.settings, membership.swarm
        self.sinks.begin(about(settings, membership, self.device))
        model = self.model = model_digest(trainer.params)
        if self.link is not None:
            self.directory.refresh(10.0)
        own = beginning.own_run(saved, swarm, settings.node)
        if self.link is not None and own is not None:
            await_others(membership, self.display.message, lambda: self.shutdown.requested)
        if own is not None and settings.node.shard is None:
            shard = own.shard
        else:
            shard = choose_shard(settings, membership.manifest, self.directory.members(), self.host.peer_id)
        # Who shares rollouts and no weights may have another model, and has its own weights to start from.
        alone = self.link is None or (settings.task.hooks == RL and settings.outer.method == "none")
        state = None if alone else catch_up(membership, model, trainer.opt)
        if saved is not None and own is None and state is None and not alone:
            raise checkpoint.CheckpointError(
                "No peer of this swarm has finished a round, and all begin from the weights of its seed: create a swarm that "
                "begins from the checkpoint (shoal up --resume-from), or join this one later."
            )
        self.watch = make_screen(settings.outer)
        self.exchange = make_exchange(
            membership, settings.outer, self.watch, seed=settings.train.seed, model=model, fragments=trainer.opt.fragments
        )
        self.outer_sync = OuterSync(membership, model, trainer.opt, self.exchange, self.watch)
        self.self_report = self.outer_sync.self_report
        self.session: RolloutSharing | None = None
        if isinstance(trainer.task, RLTask):
            self.session = RolloutSharing(trainer.task, membership, self._note, self.display.message, settings.node.ram)
        self.verification = start_verification(settings, membership, trainer, shard, self._task)
        trainer.connect(self.exchange, swarm, shard)
        self._begin_from(state, saved)
        self.outer_sync.begin()
        self.result = Result(
            name=settings.node.name,
            peer=self.host.peer_id,
            swarm=swarm,
            method=settings.outer.method,
            device=str(self.device),
            shard=f"{shard.index}/{shard.of}",
            params=sum(parameter.numel() for parameter in trainer.params),
        )
        self.metrics = Metrics(self.folder / METRICS, self.display.message, self.sinks)
        self.refusals = RefusalLog(membership.refused, self.metrics.write, self.display.message)
        self.status_reporter = StatusReporter(membership, settings.node.name)
        try:
            return self._train(shard)
        finally:
            self.display.close()
            self.status_reporter.close()
            if self.verification is not None:
                self.verification.close()
            if self.session is not None:
                self.session.close()
            self.metrics.close()

    def _begin_from(self, state: State | None, saved: SavedRun | None) -> None:
        opt = self.trainer.opt
        if saved is not None:
            for line in beginning.restore(self.trainer, saved, self.membership.swarm):
                self.display.message(line)
            if saved.swarm == self.membership.swarm and state is not None and not beginning.is_newer(state, opt):
                state = None
        if state is not None:
            self.outer_sync.begin_from(state)
            self.display.message(f"took over the swarm's weights at round {state.round}")

    def _announce(self, state: DirectoryState, speed: float = 0.0, loss: float | None = None) -> None:
        shard = self.trainer.shard
        self.status_reporter.progress(state, self.trainer.opt.round, self.trainer.opt.steps, loss, speed)
        self.directory.announce(
            name=self.settings.node.name,
            round=self.trainer.opt.round,
            step=self.trainer.opt.steps,
            loss=loss,
            steps_per_s=speed,
            shard=shard.index,
            shards=shard.of,
            model=self.model,
            state=state,
            version=SHOAL_VERSION,
            details=self.self_report.details(),
        )

    def _train(self, shard: Shard) -> Result:
        result, trainer = self.result, self.trainer
        self.shutdown.orderly(lambda: self.exchange.hurry(HURRY_S))
        self._announce("waiting")
        self.on_link(self.membership.link())
        self._wait_for_peers()
        result.loss_first = trainer.evaluate()
        self._speed, self._loss, self._round_began = 0.0, result.loss_first, time.monotonic()
        self._sent, self._received, self._waited = self.host.traffic.sent, self.host.traffic.received, 0.0
        self._announce("training", loss=result.loss_first)
        self.metrics.write("start", **asdict(result))
        self.display.start(self.settings.train.steps)
        try:
            result.wall_s = trainer.run(
                stop=lambda: self.shutdown.requested, on_progress=self._on_progress, after_step=self._after_step
            )
        finally:
            self._leave()
        result.interrupted = self.shutdown.requested
        result.steps, result.restarts = trainer.opt.steps, self.host.restarts
        result.wait_s = self.exchange.waited
        result.bytes_sent, result.bytes_received = self.host.traffic.sent, self.host.traffic.received
        result.refused = self.refusals.now()
        result.not_saved = self.saver.last(result.steps)
        if result.not_saved is not None:
            self.display.message(result.not_saved)
        if not result.interrupted:
            result.loss_last = trainer.evaluate()
            result.task = trainer.task.extra_results(result.loss_last)
            if self.baseline:
                result.loss_local = self._train_alone(shard)
                result.interrupted = self.shutdown.requested
        if self.session is not None:
            result.rl = self.session.report(result.loss_first, result.loss_last)
        if self.verification is not None:
            result.verify = self.verification.report()
        self.metrics.write("end", **asdict(result))
        try:
            write_json(self.folder / RESULT, asdict(result))
        except OSError as error:
            self.display.message(f"Cannot write {str(self.folder / RESULT)!r} ({error.strerror}): free some space.")
        return result

    def _wait_for_peers(self) -> None:
        """Until as many peers are there as the swarm wants at its start. Not for one that is under way already."""
        wanted = self.membership.manifest.start_when
        while self.trainer.opt.round == 0 and not self.shutdown.requested:
            if self.directory.wait_for(wanted, WAITING_S, lambda: self.shutdown.requested):
                return
            if any(member.state == "training" and member.round > 0 for member in self.directory.members().values()):
                return
            self.display.message(f"waiting for {wanted - len(self.directory.members())} more peers: share the link")

    def _on_progress(self, progress: Progress) -> None:
        self._speed, self._loss = progress.steps_per_s, progress.loss
        self.display.update(progress.step, progress.loss, progress.steps_per_s)
        for sentence in self.self_report.news():
            self.display.message(sentence)
            suspicion = self.self_report.absence.suspicion
            self.metrics.write("partition", said=sentence, missing=list(suspicion.names) if suspicion is not None else [])
        self._announce("training", self._speed, self._loss)
        self.metrics.live(
            "progress", step=progress.step, loss=progress.loss, steps_per_s=progress.steps_per_s,
            members=len(self.directory.members()), bytes_sent=self.host.traffic.sent,
            bytes_received=self.host.traffic.received, restarts=self.host.restarts,
        )  # fmt: skip

    def _after_step(self) -> None:
        opt, every = self.trainer.opt, self.settings.train.eval_every
        if self.outer_sync.after_step():
            self.display.message(f"missed a round, and took over the swarm's weights at round {opt.round}")
        if self.verification is not None:
            self.verification.tell(self.display.message, self._note)
        self.saver.turn(opt.steps)  # not in the middle of the step: scheduler and gradients must fit
        if every and opt.steps % every == 0:
            self.metrics.write("evaluation", step=opt.steps, loss=self.trainer.evaluate())
        if self.verification is not None:  # after all else that is done between steps
            self.verification.after_step()

    def _on_round(self, info: RoundInfo) -> None:
        traffic, result = self.host.traffic, self.result
        self.outer_sync.saw(info)
        partner = next((peer for peer in info.members if peer != self.host.peer_id), None)
        member = self.directory.members().get(partner) if partner else None
        result.rounds += 1
        result.exchanges += partner is not None
        suspicious = self._say_whom_it_suspects()
        result.suspicious += suspicious
        result.pairs_none += partner is None and not suspicious and self.settings.outer.method != "none"
        record = RoundRecord(
            round=info.key.round,
            step=info.step,
            members=max(len(info.members), 1),
            partner=member.name if member is not None else partner,
            bytes_sent=traffic.sent - self._sent,
            bytes_received=traffic.received - self._received,
            lag=info.lag,
            wait_s=self.exchange.waited - self._waited,
            loss=self.trainer.round_loss(),
            weights=self._digest(info.key.fragment),
            suspicious=suspicious,
        )
        self.self_report.waited(record.wait_s)
        self._sent, self._received, self._waited = traffic.sent, traffic.received, self.exchange.waited
        self.metrics.round(record)
        self.status_reporter.round(
            info.members, round=record.round, step=record.step, loss=record.loss, sent=record.bytes_sent,
            received=record.bytes_received, wait_s=record.wait_s, suspicious=suspicious,
        )  # fmt: skip
        if self.verification is not None:
            self.status_reporter.verified(counted := self.verification.counted())
            self.metrics.live("checks", **counted)
        if self.session is None or partner is not None:  # nobody to average with is no news where rollouts are shared
            self.display.round(record)
        if self.keep_rounds:
            self._keep_slow(result.rounds)
        every = self.settings.node.checkpoint_every_rounds
        self.saver.due |= every > 0 and result.rounds % every == 0
        self.refusals.look()
        if line := self.membership.news():
            self.display.message(line)

    def _note(self, event: str, **fields: Any) -> None:
        """Into the metrics, and to those who watch."""
        self.metrics.write(event, **fields)
        self.status_reporter.event(event, **fields)

    def _say_whom_it_suspects(self) -> int:
        members, found = self.directory.members(), self.watch.suspicions()
        for suspicion in found:
            name = members[suspicion.peer].name if suspicion.peer in members else short(suspicion.peer)
            self.display.message(
                f"refused what {name} sent in round {suspicion.key.round}: {suspicion}; if you trust all peers, set outer.suspect=0"
            )
        return len(found)

    def _digest(self, fragment: int) -> str | None:
        opt = self.trainer.opt
        if not opt.anchored or fragment >= opt.fragments:
            return None
        return digest(FLOAT32.encode(opt.slow_of(fragment)).numpy().data).hex()[:16]

    def _keep_slow(self, number: int) -> None:
        folder = self.folder / ROUNDS
        folder.mkdir(exist_ok=True)
        save_file({str(i): tensor.cpu() for i, tensor in enumerate(self.trainer.opt.slow)}, folder / f"{number:06d}.safetensors")

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"swarm": self.membership.swarm, "manifest": self.membership.sealed.hex(), "trainer": self.trainer.state()}

    def _leave(self) -> None:
        """Tell the others, so that nobody waits for this node; without an answer its record expires."""
        self._announce("leaving", self._speed, self._loss)
        self.directory.leave(LEAVE_S)

    def _train_alone(self, shard: Shard) -> float | None:
        """Held-out loss of the same model, seed, shard and steps without any exchange; None if it was stopped."""
        self.display.message("training the same once more without any exchange, to compare")
        alone = Trainer(self._task(), OuterSettings(method="none"), self.settings.train, device=self.device)
        alone.connect(Alone(), "alone", shard)
        alone.run(stop=lambda: self.shutdown.requested)
        return None if self.shutdown.requested else alone.evaluate()

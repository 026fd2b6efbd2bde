"""The ranks of one node: how they meet, and what each of them must be told."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal.node.config.device import make_current
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.parallel.job import Job, rank_device
from shoal.node.parallel.layouts import LAYOUTS
from shoal.node.parallel.rank_process import RankLostError, RankMissingError
from shoal.node.parallel.rank_trainer import RankTrainer
from shoal.node.task import Task
from shoal.optim.ranks.group import in_thread
from shoal.optim.ranks.orders import Channel
from shoal.optim.ranks.ranks import Ranks

STEP_S = 1800.0
"""That a rank waits for another in a step: it may compile, or load data."""
AGREE_S = 600.0
"""That it waits in an exchange, or for a checkpoint."""
MEET_S = 300.0
"""That it waits for the others to start."""
REMIND_S = 5.0
"""Between two lines for people about ranks that are missing."""
LOOK_S = 0.2
"""Between two looks at whether all have started."""
MAX_REASON_CHARS = 200


@dataclass(frozen=True)
class NodeRanks:
    """This process among the ranks of its node."""

    job: Job
    device: torch.device
    parallel: str
    """ddp or fsdp."""
    channel: Channel
    group: Ranks

    @classmethod
    def meet(cls, settings: Settings, job: Job) -> NodeRanks:
        """Meet the other ranks.

        Raises ConfigError for settings that several ranks cannot have; RankLostError if they are
        not there.
        """
        check(settings)
        device = rank_device(settings, job)
        make_current(device)
        if sys.platform.startswith("linux"):
            # All ranks are on this machine, whose name may lead nowhere.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo"
        if device.type != "cpu":
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        try:
            store = _Meeting(job).all_started()
            in_thread(lambda: _join(backend, store, job)).result(MEET_S)
            group = Ranks(timeout=AGREE_S)
            return cls(job, device, settings.node.parallel or "ddp", Channel(group), group)
        except (RuntimeError, TimeoutError) as error:
            first = next(iter(str(error).splitlines()), "in time")[:MAX_REASON_CHARS]
            raise RankLostError(
                f"The ranks of this node did not all start: see what they logged ({first})."
            ) from error

    def make_trainer(
        self, task: Task, settings: Settings, *, schedule_steps: int, **options: Any
    ) -> RankTrainer:
        """Return the trainer of rank 0, and let the others make theirs.

        Arguments are those of ``Trainer``.
        """
        sent = settings.model_dump_json(exclude_unset=True)
        self.channel.send("build", settings=sent, schedule_steps=schedule_steps)
        return self._trainer(task, settings, schedule_steps=schedule_steps, **options)

    def follow(self, make_task: Callable[[Settings], Task]) -> None:
        """Do what rank 0 orders until it ends; for the other ranks."""
        name, fields = self.channel.receive()
        if name == "build":
            settings = Settings.model_validate(json.loads(fields["settings"]), strict=False)
            options = {
                "slow_on_device": settings.node.slow_on_device,
                "schedule_steps": fields["schedule_steps"],
            }
            trainer = self._trainer(make_task(settings), settings, **options)
            self.channel.follow(trainer.obey, "end")

    def end(self) -> None:
        """Let the others end; for rank 0, in good order."""
        self.channel.send("end")

    def _trainer(self, task: Task, settings: Settings, **options: Any) -> RankTrainer:
        check(settings)
        layout = LAYOUTS[self.parallel](self.group, self.channel)
        return RankTrainer(
            task,
            settings.outer,
            settings.train,
            own=settings.train,
            device=self.device,
            layout=layout,
            channel=self.channel,
            **options,
        )


class _Meeting:
    """The start of the ranks, each of which notes in a store of torch's that it runs.

    It waits in Python, a moment at a time, so that signals act: torch.distributed would wait in
    C++, and say nothing.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._address = os.environ["MASTER_ADDR"]
        self._port = int(os.environ["MASTER_PORT"])
        self._serves = job.leads and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._server: TCPStore | None = None
        self._store: Store | None = None

    def all_started(self) -> Store:
        """Return the store once all ranks run.

        Raises RankMissingError if one does not within `MEET_S`; RankLostError on a rank that has
        less to say of it.
        """
        never = threading.Event()
        began = time.monotonic()
        remind_at = began + REMIND_S
        while True:
            missing = self._missing()
            if self._server is not None and self._store is not None and not missing:
                self._server.set_timeout(timedelta(seconds=STEP_S))
                return self._store
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of "
            who += str(self._job.world)
            # Rank 0 speaks, or all where it is missing.
            speaks = self._job.leads or 0 in missing
            now = time.monotonic()
            if now >= began + MEET_S:
                said = (
                    f"Of this node's ranks {who} did not start within {MEET_S:g} s: start all of "
                    "them, best with --gpus or torchrun."
                )
                raise RankMissingError(said) if speaks else RankLostError(said)
            if speaks and now >= remind_at:
                print(f"waiting for {who}", file=sys.stderr, flush=True)
                remind_at += REMIND_S
            never.wait(LOOK_S)

    def _missing(self) -> list[int]:
        """Return the ranks that have not noted that they run; rank 0 where its store is not there
        yet.

        Raises RuntimeError if the store is gone.
        """
        try:
            store = self._store or self._connect()
        except RuntimeError:
            if self._serves or self._store is not None:
                raise
            return [0]
        return [rank for rank in range(self._job.world) if not store.check([f"started/{rank}"])]

    def _connect(self) -> Store:
        self._server = TCPStore(
            self._address,
            self._port,
            self._job.world,
            self._serves,
            timedelta(seconds=1),
            wait_for_workers=False,
            multi_tenant=True,
        )
        self._store = PrefixStore(f"shoal/{self._job.restarts}", self._server)
        self._store.set(f"started/{self._job.rank}", "")
        return self._store


def _join(backend: str, store: Store, job: Job) -> None:
    dist.init_process_group(
        backend, store=store, rank=job.rank, world_size=job.world, timeout=timedelta(seconds=STEP_S)
    )
    dist.barrier()


def check(settings: Settings) -> None:
    """Raise ConfigError for settings that only a node of one process can have."""
    if settings.task.hooks == "rl":
        raise ConfigError(
            "The task rl cannot be cut into the ranks of one node: leave --gpus out, and start a "
            "node for each GPU."
        )
    if settings.verify.audit_rate:
        raise ConfigError(
            "A node of several ranks makes no claims that others could check: leave --gpus out in "
            "a swarm with --verify."
        )
    if settings.node.resume_from is not None:
        raise ConfigError(
            "--resume-from goes with one process: go on with it on one GPU first, then --resume "
            "with --gpus."
        )
    if settings.node.slow_folder is not None:
        raise ConfigError(
            "--offload keeps the state of one process: leave it out, since each rank keeps a part "
            "only."
        )

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
from shoal.node.parallel.ends import RankLostError, RankMissingError
from shoal.node.parallel.job import Job, rank_device
from shoal.node.parallel.layout import LAYOUTS
from shoal.node.parallel.trainer import RankTrainer
from shoal.node.task import Task
from shoal.optim.ranks.group import in_thread
from shoal.optim.ranks.orders import Channel
from shoal.optim.ranks.ranks import Ranks

STEP_S = 1800.0  # seconds that a rank waits for another in a step: it may compile, or load data
AGREE_S = 600.0  # seconds that it waits in an exchange, or for a checkpoint
MEET_S = 300.0  # seconds that it waits for the others to start
REMIND_S = 5.0
LOOK_S = 0.2


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
        """Meet the other ranks. ConfigError for settings that several ranks cannot have; RankLostError if they are not there."""
        check(settings)
        device = rank_device(settings, job)
        make_current(device)
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whose name may lead nowhere
        kind = device.type
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(device)}"
        try:
            store = _all_started(job)
            in_thread(lambda: _join(backend, store, job)).result(MEET_S)
            group = Ranks(timeout=AGREE_S)
            return cls(job, device, settings.node.parallel or "ddp", Channel(group), group)
        except (RuntimeError, TimeoutError) as error:
            first = next(iter(str(error).splitlines()), "in time")[:200]
            raise RankLostError(f"The ranks of this node did not all start: see what they logged ({first}).") from error

    def make_trainer(self, task: Task, settings: Settings, *, schedule_steps: int, **options: Any) -> RankTrainer:
        """Return the trainer of rank 0, and let the others make theirs. Arguments are those of ``Trainer``."""
        sent = settings.model_dump_json(exclude_unset=True)
        self.channel.send("build", settings=sent, schedule_steps=schedule_steps)
        return self._trainer(task, settings, schedule_steps=schedule_steps, **options)

    def follow(self, make_task: Callable[[Settings], Task]) -> None:
        """Do what rank 0 orders until it ends; for the other ranks."""
        name, fields = self.channel.receive()
        if name == "build":
            settings = Settings.model_validate(json.loads(fields["settings"]), strict=False)
            options = {"slow_on_device": settings.node.slow_on_device, "schedule_steps": fields["schedule_steps"]}
            trainer = self._trainer(make_task(settings), settings, **options)
            self.channel.follow(trainer.obey, "end")

    def end(self) -> None:
        """Let the others end; for rank 0, in good order."""
        self.channel.send("end")

    def _trainer(self, task: Task, settings: Settings, **options: Any) -> RankTrainer:
        check(settings)
        layout = LAYOUTS[self.parallel](self.group, self.channel)
        return RankTrainer(
            task, settings.outer, settings.train, own=settings.train, device=self.device, layout=layout, channel=self.channel,
            **options,
        )  # fmt: skip


def _all_started(job: Job) -> Store:
    """Return the store in which all ranks have noted that they run. RankMissingError if one does not within ``MEET_S``.

    It waits in Python, a moment at a time, so that signals act. torch.distributed would wait in C++, and say nothing.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = job.leads and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    began, store, never = time.monotonic(), None, threading.Event()
    reminder, missing = began + REMIND_S, [0]
    while True:
        try:
            if store is None:
                moment = timedelta(seconds=1)
                found = TCPStore(address, port, job.world, serves, moment, wait_for_workers=False, multi_tenant=True)
                store = PrefixStore(f"shoal/{job.restarts}", found)
                store.set(f"started/{job.rank}", "")
            missing = [rank for rank in range(job.world) if not store.check([f"started/{rank}"])]
        except RuntimeError:
            if serves or store is not None:
                raise
        if store is not None and not missing:
            found.set_timeout(timedelta(seconds=STEP_S))
            return store
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {job.world}"
        heard = job.leads or 0 in missing
        if time.monotonic() >= began + MEET_S:
            said = f"Of this node's ranks {who} did not start within {MEET_S:g} s: start all of them, best with --gpus or torchrun."
            raise (RankMissingError if heard else RankLostError)(said)
        if heard and time.monotonic() >= reminder:
            print(f"waiting for {who}", file=sys.stderr, flush=True)
            reminder += REMIND_S
        never.wait(LOOK_S)


def _join(backend: str, store: Store, job: Job) -> None:
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world, timeout=timedelta(seconds=STEP_S))
    dist.barrier()


def check(settings: Settings) -> None:
    """Raise ConfigError for settings that only a node of one process can have."""
    problem = None
    if settings.task.hooks == "rl":
        problem = "The task rl cannot be cut into the ranks of one node: leave --gpus out, and start a node for each GPU."
    elif settings.verify.kind != "none":
        problem = "A node of several ranks makes no claims that others could check: leave --gpus out in a swarm with --verify."
    elif settings.node.resume_from is not None:
        problem = "--resume-from goes with one process: go on with it on one GPU first, then --resume with --gpus."
    elif settings.node.offload is not None:
        problem = "--offload keeps the state of one process: leave it out, since each rank keeps a part only."
    if problem is not None:
        raise ConfigError(problem)

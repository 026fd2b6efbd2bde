"""The ranks of one node: how they meet, and what each of them must be told."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.node.config.settings import ConfigError, Settings
from shoal.node.parallel.channel import Channel
from shoal.node.parallel.ends import RankLostError
from shoal.node.parallel.job import Job, rank_device
from shoal.node.parallel.layout import LAYOUTS
from shoal.node.parallel.trainer import RankTrainer
from shoal.node.task import Task
from shoal.optim.ranks.ranks import Ranks

STEP_S = 1800.0  # seconds that a rank waits for another in a step: it may compile, or load data
AGREE_S = 600.0  # seconds that it waits in an exchange, or for a checkpoint


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
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whose name may lead nowhere
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=STEP_S))
            dist.barrier()
        except RuntimeError as error:
            raise RankLostError(f"The ranks of this node did not all start: see what they logged ({error}).") from error
        return cls(job, device, settings.node.parallel or "ddp", Channel(job), Ranks(timeout=AGREE_S))

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
            self._trainer(make_task(settings), settings, **options).serve("end")

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

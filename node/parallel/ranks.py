"""The ranks of one node: how they meet, and what each of them must be told."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.node.config.device import make_current
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.inner_tensors import first_wrapped, load_whole_model
from shoal.node.parallel.launcher import Job, RankLostError, RankMissingError, rank_device
from shoal.node.task import Shard, Task
from shoal.node.training.layout import Layout
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.optim import Alone, Exchange, OuterOptimizer, RoundInfo
from shoal.optim.layers import repeated_blocks
from shoal.optim.ranks.group import in_thread
from shoal.optim.ranks.orders import Channel, LeadOptimizer, load_whole, obey, whole_state
from shoal.optim.ranks.ranks import Ranks
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.training.last_average import LastAverage

# A model on several ranks: the same on each, with gradients averaged by DDP, or in parts, one on
# each rank, by FSDP2.
#
# A batch is the peer's: each rank computes with its rows of it, so the step is that of one process
# which accumulates as many parts.


class Replicated(DistributedDataParallel):
    """A model with averaged gradients that has the model's own attributes too, for a task's
    loss().
    """

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute where the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def check_one_form(holder: str, tensors: Iterable[Any]) -> None:
    """Raise TrainingError for a tensor that only one process can keep: ranks hand out and gather
    plain values.
    """
    wrapped = first_wrapped(tensors)
    if wrapped is not None:
        raise TrainingError(
            f"The {holder} keeps tensors of the class {type(wrapped).__name__}, which the ranks of "
            "one node cannot share: leave --gpus out, or use another."
        )


class RanksLayout(Layout):
    """What DDP and FSDP2 have in common. ``channel``: rank 0's orders, which may be long in
    coming.
    """

    group: Ranks

    def __init__(self, group: Ranks, channel: Channel) -> None:
        self.group = group
        self._channel = channel
        self.rank = group.rank
        self.ranks = group.size

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks; on a GPU without waiting for it."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / self.ranks

    def whole_outer(self, opt: OuterOptimizer) -> dict[str, Any]:
        return whole_state(opt)

    def load_outer(self, opt: OuterOptimizer, state: dict[str, Any]) -> None:
        load_whole(opt, state if self.rank == 0 else None)

    def agreed(self, value: Any) -> Any:
        return self.group.agreed(value)

    def gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values


class WholeModels(RanksLayout):
    """DDP: each rank has the whole model."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the wrapper, which begins with rank 0's weights on all ranks.

        It looks in each step which parameters have a part in the loss: a branch may be left out, on
        one rank or on all.
        """
        check_one_form("model", model.state_dict().values())
        self._wrapped = Replicated(
            model.to(device),
            device_ids=None if device.index is None else [device],
            find_unused_parameters=True,
        )
        warnings.filterwarnings("ignore", message=r"find_unused_parameters=True was specified")
        return self._wrapped

    def backward_of(self, part: int, count: int) -> AbstractContextManager[Any]:
        """Let DDP average during the backward pass, if there is one only: else `backward_done`
        does.

        DDP would average what the last part has a gradient of, and leave out what only an earlier
        part has used.
        """
        return nullcontext() if count == 1 else self._wrapped.no_sync()

    @torch.no_grad()
    def backward_done(self, count: int) -> None:
        """Average the gradients of several parts, of every parameter that any part of any rank has
        used.
        """
        if count == 1:
            return
        parameters = [p for p in self._wrapped.parameters() if p.requires_grad]
        flags = [parameter.grad is not None for parameter in parameters]
        used = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        waiting = []
        for parameter, by_any in zip(parameters, used.tolist(), strict=True):
            if by_any:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(self.ranks)
                waiting.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in waiting:
            work.wait()

    def evaluated(self, work: Callable[[], float]) -> float:
        """Let rank 0, which has the whole model, work as one process does, while the others
        wait.
        """
        if self.rank:
            self._channel.receive()
            return 0.0
        loss = work()
        self._channel.send("evaluated")
        return loss

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Load rank 0's state, one tensor at a time, and what modules keep beside tensors."""
        if self.rank == 0:
            load_whole_model(model, state)
        if any(not isinstance(value, Tensor) for value in model.state_dict().values()):
            others = self.agreed(
                {name: value for name, value in state.items() if not isinstance(value, Tensor)}
            )
            model.load_state_dict(others, strict=False)
        for tensor in model.state_dict().values():
            if isinstance(tensor, Tensor):
                dist.broadcast(tensor.detach(), 0)


class ShardedModel(RanksLayout):
    """FSDP2: each rank has a part of every tensor of the model.

    All ranks evaluate, each on the same data, with the whole sum.
    """

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Shard the repeated blocks, then the rest, in place: while it computes, a rank holds one
        whole block at a time.
        """
        check_one_form("model", model.state_dict().values())
        mesh = init_device_mesh(device.type, (self.ranks,))
        self._blocks = unshared(model, repeated_blocks(model))
        for block in self._blocks:
            fully_shard(block, mesh=mesh)
        self._sharded = fully_shard(model, mesh=mesh)
        return model

    def gathered_bytes(self, model: nn.Module) -> int:
        """Return those of the weights and gradients outside the blocks, of two blocks' weights and
        of one's gradients.
        """
        blocks = [
            sum(parameter.nbytes for parameter in block.parameters()) for block in self._blocks
        ]
        outside = sum(parameter.nbytes for parameter in model.parameters()) - sum(blocks)
        return 2 * outside + 3 * max(blocks, default=0)

    @contextmanager
    def backward_of(self, part: int, count: int) -> Iterator[None]:
        """Let each rank keep the gradients of its own rows within the block, but for the last
        part.
        """
        self._sharded.set_requires_gradient_sync(part == count - 1)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)

    def whole_model(self, model: nn.Module) -> dict[str, Tensor]:
        state = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        return cast(dict[str, Tensor], state)

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given: dict[str, Any] = dict(state) if self.rank == 0 else {}
        set_model_state_dict(model, given, options=options)


def unshared(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks of which no parameter is used elsewhere in ``model`` too, as tied weights
    are.
    """
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(number)
    within = {id(module) for block in blocks for module in block.modules()}
    others = [module for module in model.modules() if id(module) not in within]
    outside = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    alone = {name for name, numbers in owners.items() if len(numbers) == 1 and name not in outside}
    return [
        block for block in blocks if all(id(parameter) in alone for parameter in block.parameters())
    ]


LAYOUTS: dict[str, type[RanksLayout]] = {"ddp": WholeModels, "fsdp": ShardedModel}


# A trainer on several ranks: the node calls rank 0's, which has the other ranks make the same
# calls.


class RankTrainer(Trainer):
    """A trainer on one of several ranks.

    Its methods are rank 0's to call; each begins with an order on ``channel``, by which the others
    make the same call (`obey`). ``on_round`` is rank 0's: the others wait for it.
    """

    def __init__(
        self,
        task: Task,
        outer: OuterSettings,
        train: TrainSettings,
        *,
        layout: RanksLayout,
        channel: Channel,
        on_round: Callable[[RoundInfo], None] = lambda info: None,
        **options: Any,
    ) -> None:
        self._channel = channel
        self._after_round = on_round
        super().__init__(task, outer, train, layout=layout, on_round=self._end_round, **options)
        self._ranks = layout
        self._real: Exchange = Alone()
        if layout.rank == 0:
            self.whole = cast(OuterOptimizer, LeadOptimizer(self.opt, channel))
        else:  # all have made the same model; what is drawn from now on, such as dropout, differs
            torch.manual_seed(train.seed + 1_000_003 * layout.rank)

    def _order(self, name: str, **fields: Any) -> None:
        if self.layout.rank == 0:
            self._channel.send(name, **fields)

    def _end_round(self, info: RoundInfo) -> None:
        if self.layout.rank == 0:
            with self._channel.leading():
                self._after_round(info)
        else:
            self._channel.follow(self.obey)

    def obey(self, name: str, fields: dict[str, Any]) -> None:
        """Do what rank 0 has ordered and does itself."""
        if name in ("step", "evaluate", "finish", "state"):
            getattr(self, name)()
        elif name == "resume":
            self.resume({})
        elif name == "schedule_at":
            self.schedule_at(fields["step"])
        elif name == "change":
            self.change(**fields)
        elif name == "end_with":
            self.end_with(None)
        elif name == "connect":
            self.connect(Alone(), fields["run"], Shard(*fields["shard"]))
        else:
            obey(self.opt, name, fields)

    def connect(self, exchange: Exchange, run: str, shard: Shard) -> None:
        """Set the exchange of rank 0 with other peers, the run's id and the part of the data, which
        all ranks share.
        """
        self._order("connect", run=run, shard=[shard.index, shard.of, shard.seed])
        self._real = exchange
        shared = self._ranks.group.exchange(exchange)
        shared.attach(self.opt)
        super().connect(shared, run, shard)

    def end_with(self, last: LastAverage | None) -> None:
        """Set the exchange of the last average, which rank 0 has."""
        self._order("end_with")
        super().end_with(last)
        shared = self._ranks.group.exchange(Alone() if last is None else last)
        shared.attach(self.opt)
        self._last = shared

    def _waited(self) -> float:
        return float(getattr(self._real, "waited", 0.0))

    def step(self) -> None:
        """Take one inner step with this rank's rows of the batch, and the outer step if it is
        due.
        """
        self._order("step")
        super().step()
        if self.opt.steps == 1:
            for state in self.opt.inner.state.values():
                check_one_form("inner optimizer", state.values())

    def evaluate(self) -> float | None:
        """Return the held-out loss: with DDP rank 0 computes it, with FSDP all do, each on the
        whole data.
        """
        self._order("evaluate")
        return super().evaluate()

    def finish(self) -> None:
        self._order("finish")
        super().finish()

    def state(self) -> dict[str, Any]:
        self._order("state")
        return super().state()

    def resume(self, state: dict[str, Any]) -> bool:
        self._order("resume")
        return super().resume(state)

    def schedule_at(self, step: int) -> None:
        self._order("schedule_at", step=step)
        super().schedule_at(step)

    def change(self, *, lr: float | None, steps: int, length: int) -> None:
        self._order("change", lr=lr, steps=steps, length=length)
        super().change(lr=lr, steps=steps, length=length)


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
        """Meet the other ranks.

        ConfigError for settings that several ranks cannot have; RankLostError if they are not
        there.
        """
        check(settings)
        device = rank_device(settings, job)
        make_current(device)
        if sys.platform.startswith("linux"):
            os.environ.setdefault(
                "GLOO_SOCKET_IFNAME", "lo"
            )  # all ranks are on this machine, whose name may lead nowhere
        kind = device.type
        backend = (
            "gloo"
            if kind == "cpu"
            else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(device)}"
        )
        try:
            store = _all_started(job)
            in_thread(lambda: _join(backend, store, job)).result(MEET_S)
            group = Ranks(timeout=AGREE_S)
            return cls(job, device, settings.node.parallel or "ddp", Channel(group), group)
        except (RuntimeError, TimeoutError) as error:
            first = next(iter(str(error).splitlines()), "in time")[:200]
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


def _all_started(job: Job) -> Store:
    """Return the store in which all ranks have noted that they run.

    RankMissingError if one does not within ``MEET_S``.

    It waits in Python, a moment at a time, so that signals act. torch.distributed would wait in
    C++, and say nothing.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    serves = job.leads and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    began = time.monotonic()
    store = None
    never = threading.Event()
    reminder = began + REMIND_S
    missing = [0]
    while True:
        try:
            if store is None:
                moment = timedelta(seconds=1)
                found = TCPStore(
                    address,
                    port,
                    job.world,
                    serves,
                    moment,
                    wait_for_workers=False,
                    multi_tenant=True,
                )
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
            said = (
                f"Of this node's ranks {who} did not start within {MEET_S:g} s: start all of "
                "them, best with --gpus or torchrun."
            )
            raise (RankMissingError if heard else RankLostError)(said)
        if heard and time.monotonic() >= reminder:
            print(f"waiting for {who}", file=sys.stderr, flush=True)
            reminder += REMIND_S
        never.wait(LOOK_S)


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

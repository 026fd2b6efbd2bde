"""Inner steps of the ranks of a peer in mixed precision, run in the processes of a job
(``rank.py``).
"""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.node.config.train_settings import OwnTraining
from shoal.node.task import Task
from shoal.node.training.inner_step import InnerStep

ROWS = 8


class Rows(Task):
    def loss(self, model, batch):
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def steps(kind, precision, count, bad):
    """Return which of ``count`` steps were taken and the weights after them.

    In step ``bad`` the batch of rank 0 is not finite.
    """
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    wrapped = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model)

    @contextmanager
    def backward_of(part, count):
        if part == count - 1:
            yield
            return
        if kind == "ddp":
            with wrapped.no_sync():
                yield
            return
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    parameters = list(model.parameters())
    layout = SimpleNamespace(
        rank=torch.distributed.get_rank(),
        ranks=2,
        backward_of=backward_of,
        backward_done=lambda count: None,
    )
    own = OwnTraining(precision=precision, accumulate=2)
    step = InnerStep(
        Rows(), wrapped, parameters, torch.device("cpu"), clip=0.5, own=own, layout=layout
    )
    inner, taken = torch.optim.AdamW(parameters, lr=0.01), []
    generator = torch.Generator().manual_seed(3)
    for number in range(count):
        batch = torch.randn(ROWS, 4, generator=generator)
        if number == bad:
            batch[0] = math.inf
        step.gradients(batch)
        taken.append(step.step(inner))
        inner.zero_grad()
    whole = [p.full_tensor() if kind == "fsdp" else p for p in parameters]
    return {"taken": taken, "weights": [p.tolist() for p in whole], "scale": step.state_dict()}

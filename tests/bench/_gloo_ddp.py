"""One process of torch's own data parallel training over gloo:
`python tests/bench/_gloo_ddp.py RANK PEERS STEPS STORE OUT`.
"""

import os
import sys
from datetime import timedelta
from itertools import islice

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask


def main():
    rank, peers, steps = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[4]}",
        rank=rank,
        world_size=peers,
        timeout=timedelta(seconds=60),
    )
    task = TextTask(batch=8 // peers, lr=1e-2)
    torch.manual_seed(3)
    model = task.model()
    parallel = DistributedDataParallel(model)
    inner = task.inner_optimizer(parallel.parameters())
    scheduler = task.lr_scheduler(inner, steps)
    for batch in islice(task.batches(Shard(rank, peers, 3)), steps):
        task.loss(parallel, batch).backward()
        inner.step()
        scheduler.step()
        inner.zero_grad()
    if rank == 0:
        torch.save([parameter.detach() for parameter in model.parameters()], sys.argv[5])
    destroy_process_group()
    os._exit(
        0
        # on a loaded machine a thread of torch's may still run, and the interpreter's end would be
        # an abort
    )


if __name__ == "__main__":
    main()

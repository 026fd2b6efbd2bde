"""A loop of one's own in a swarm of `shoal up`: the same protocol, so they average with each
other.
"""

import pytest
import torch

from shoal import NetworkOptions, join
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.optim import NoLoCo

SIZE = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 2}
EVERY = 20


@pytest.mark.slow(reason="a node and a loop train in real time")
def test_a_loop_of_ones_own_trains_with_a_node(shoal):
    """Both say who was in the mean."""
    torch.set_num_threads(1)
    file = shoal.toml(swarm={"start_when": 2}, outer={"every": EVERY, "wait_s": 2.0}, options=SIZE)
    node = shoal.node("up", file, "anna")
    torch.manual_seed(99)  # other weights than the swarm's, which are taken over
    task = TextTask(data=str(shoal.text), **SIZE)
    model, met = task.model(), []
    with join(
        node.line(),
        state=model,
        node="bert",
        network=NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",)),
    ) as s:
        opt = NoLoCo(
            task.inner_optimizer(model.parameters()),
            s.exchange(),
            every=EVERY,
            on_round=lambda info: met.append(info),
        )
        batches = task.batches(Shard(s.shard.index, s.shard.of, s.seed))
        while len(met) < 50 and sum(len(info.members) == 2 for info in met) < 3:
            task.loss(model, next(batches)).backward()
            opt.step()
            opt.zero_grad()
        me, status = s.status()["peer"], s.status()
    assert {member["name"] for member in status["members"]} == {"anna", "bert"}
    assert all(me in info.members for info in met if info.members)
    assert sum(len(info.members) == 2 for info in met) >= 3, (
        node.said()
    )  # what was in flight may have come yet
    node.signal(2)
    assert node.wait() == 130
    assert "with bert" in node.said()

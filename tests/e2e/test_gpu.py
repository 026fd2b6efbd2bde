"""Real nodes on a GPU: they average with nodes on the CPU, go on elsewhere, and several GPUs are
one peer.
"""

import math
import os
import signal

import pytest

from tests.support.rank_processes import rank_of

OPTIONS = {"width": 16, "heads": 2, "layers": 2, "context": 16, "batch": 4}
SEED = 3


def tables(shoal, **train):
    outer = {"every": 3, "wait_s": 60.0, "method": "diloco"}
    return shoal.toml(
        options=OPTIONS,
        outer=outer,
        train={"seed": SEED, **train},
        swarm={"start_when": 2, "shards": 2},
    )


@pytest.mark.gpu
def test_a_demo_trains_on_it(shoal):
    demo = shoal.start(
        "demo",
        "--device",
        "cuda",
        "--peers",
        "2",
        "--rounds",
        "2",
        "--every",
        "4",
        "--no-compare",
        "--json",
    )
    report = demo.json(200)
    assert (report["rounds"], report["pairs_none"]) == (2, 0)
    assert report["exchanges"] > 0
    assert report["loss_last"] < report["loss_first"]


@pytest.mark.gpu
def test_gpu_and_cpu_peers_agree_and_swap_devices(
    shoal,
):
    """A peer on a GPU holds what one on the CPU does and each goes on on the others device."""
    table = tables(shoal, steps=9)
    how = {"gpu": ("--device", "cuda", "--offload", "device"), "cpu": ("--device", "cpu")}
    one = shoal.node("up", table, "gpu", *how["gpu"], "--shard", "0/2")
    two = shoal.node("join", one.line(), "cpu", *how["cpu"], "--shard", "1/2")
    assert [node.wait() for node in (one, two)] == [0, 0], (one.said(), two.said())
    assert [[event["members"] for event in shoal.rounds(name)] for name in how] == [[2, 2, 2]] * 2
    ends = [[event["weights"] for event in shoal.rounds(name)] for name in how]
    assert ends[0] == ends[1], "members of a group hold the same bits, whatever they compute on"

    link = one.line()
    moved = [
        shoal.node("up", table, "gpu", *how["cpu"], "--shard", "0/2", "--resume", "--steps", "12"),
        shoal.node("join", link, "cpu", *how["gpu"], "--shard", "1/2", "--resume", "--steps", "12"),
    ]
    assert [node.wait() for node in moved] == [0, 0], [node.said() for node in moved]
    for name in how:
        assert shoal.result(name)["progress"]["step"] == 12
        assert math.isfinite(shoal.rounds(name)[-1]["loss"])


@pytest.mark.gpu(devices=2)
def test_two_gpus_survive_a_rank_and_resume(shoal, eventually):
    """Two gpus are one peer that survives the death of a rank and resumes in another layout."""
    outer = {"every": 3, "lag": 0}
    table = shoal.toml(options=OPTIONS, outer=outer, train={"steps": 0, "seed": SEED})
    both = ("--gpus", "2", "--device", "cuda")
    node = shoal.node(
        "up", table, "one", *both, "--parallel", "ddp", "--set", "node.checkpoint_every_rounds=1"
    )
    node.line()
    eventually(lambda: len(shoal.rounds("one")) >= 2, 120, "two rounds")
    lost = rank_of(node, 1)
    os.kill(lost, signal.SIGKILL)
    eventually(lambda: rank_of(node, 1) not in (None, lost), 120, "another start of the ranks")
    died = max(event["round"] for event in shoal.rounds("one"))
    eventually(
        lambda: max(event["round"] for event in shoal.rounds("one")) > died + 1,
        120,
        "rounds after it",
    )
    node.signal(signal.SIGTERM)
    assert node.wait() == 130, node.said()
    assert "rank 1 was ended by SIGKILL" in node.said()

    steps = shoal.result("one")["progress"]["step"]
    sharded = shoal.node(
        "up", table, "one", *both, "--parallel", "fsdp", "--resume", "--steps", str(steps + 3)
    )
    assert sharded.wait() == 0, sharded.said()
    for ranks in (node, sharded):  # rank 0's own part
        assert "Training will take about" in ranks.said()
        assert "after its first step this node holds" in ranks.said()
    single = shoal.node(
        "up", table, "one", "--device", "cuda:1", "--resume", "--steps", str(steps + 6)
    )
    assert single.wait() == 0, single.said()
    assert shoal.result("one")["progress"]["step"] == steps + 6
    assert all(math.isfinite(event["loss"]) for event in shoal.rounds("one"))

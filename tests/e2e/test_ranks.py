"""Peers of several processes average with peers of one, and hold the bits that one process
would.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.node.checkpoint.store import load
from shoal.node.config.train_settings import OwnTraining
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.optim import Simulation
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.wire.record import TAIL
from tests.support.rank_processes import rank_of

OPTIONS = {"width": 16, "heads": 2, "layers": 2, "context": 16, "batch": 4}
SEED = 3
DDP = ("--gpus", "2", "--device", "cpu", "--parallel", "ddp")
FSDP = ("--gpus", "2", "--device", "cpu", "--parallel", "fsdp")
HALVES = ("--device", "cpu", "--set", "train.accumulate=2")
LAYOUTS = {"single": HALVES, "sharded": FSDP, "copied": DDP}
TASK = f"{Path(__file__).with_name('marking_task.py')}:Marking"


def kept(shoal, name):
    """The slow weights after each round of a node."""
    files = sorted((shoal.home / name / "rounds").glob("*.safetensors"))
    found = [load_file(path) for path in files]
    return [[tensors[str(n)] for n in range(len(tensors))] for tensors in found]


def reference(shoal, outer, steps, peers, total=0, optimizer="muon"):
    """The slow weights of single-process peers of one group that cut each batch into halves.

    ``steps``: those of each of ``peers``; ``total``: the setting. Muon is what the built-in task
    has by default, and a task of one's own has not.
    """

    def peer(exchange):
        index = peers.index(exchange.peer)
        rounds = []
        train = TrainSettings(steps=total, seed=SEED, optimizer=optimizer)
        trainer = Trainer(
            TextTask(data=str(shoal.text), **OPTIONS), outer, train, own=OwnTraining(accumulate=2),
            on_round=lambda info: rounds.append([t.clone() for t in trainer.opt.slow]),
        )  # fmt: skip
        trainer.connect(exchange, "run", Shard(index, len(peers), SEED))
        trainer.run(stop=lambda: trainer.opt.steps == steps[index])
        return rounds

    return Simulation(peers, seed=SEED, size=len(peers)).run(peer)


@pytest.mark.ci
def test_two_processes_equal_one_that_accumulates(shoal):
    """A peer of two processes holds the bits of one that accumulates."""
    outer = {"every": 3, "wait_s": 60.0, "lag": 0, "codec": "float32"}
    table = shoal.toml(
        options=OPTIONS,
        outer=outer,
        train={"steps": 9, "seed": SEED},
        swarm={"start_when": 2, "shards": 2},
    )
    one = shoal.node("up", table, "one", *HALVES, "--shard", "0/2", "--keep-rounds")
    two = shoal.node("join", one.line(), "two", *DDP, "--shard", "1/2", "--keep-rounds")
    assert [node.wait() for node in (one, two)] == [0, 0], (one.said(), two.said())
    results = [shoal.result(name) for name in ("one", "two")]
    assert [result["exchanges"]["with_partner"] for result in results] == [3, 3]
    expected = reference(
        shoal, OuterSettings(**outer), [9, 9], [result["peer"] for result in results], total=9
    )
    for name, result in zip(("one", "two"), results, strict=True):
        real, wanted = kept(shoal, name), expected[result["peer"]]
        assert len(real) == len(wanted) == 3
        assert all(
            torch.equal(a, b)
            for here, there in zip(real, wanted, strict=True)
            for a, b in zip(here, there, strict=True)
        )


@pytest.mark.slow(reason="several real peers of two processes, one after another")
def test_ranks_end_in_order_with_one_sentence(shoal, eventually):
    """The ranks end in good order and what the user can mend is one sentence."""
    table = shoal.toml(
        options=OPTIONS, outer={"every": 3, "lag": 0}, train={"steps": 0, "seed": SEED}
    )
    node = shoal.node("up", table, "one", *FSDP)
    node.line()
    eventually(lambda: len(shoal.rounds("one")) >= 1, 60, "a round")
    node.signal(signal.SIGTERM)
    assert node.wait() == 130, node.said()
    assert shoal.result("one")["interrupted"]
    again = shoal.node(
        "up",
        table,
        "one",
        *DDP,
        "--resume",
        "--steps",
        str(shoal.result("one")["progress"]["step"] + 1),
    )
    assert again.wait() == 0, again.said()
    uneven = shoal.node("up", table, "other", "--option", "batch=3", *DDP)
    assert uneven.wait() == 2
    assert [line for line in uneven.said().splitlines() if line.startswith("Error: ")] == [
        uneven.said().splitlines()[-1]
    ]
    assert "3 rows" in uneven.said()


def together(shoal, names, after):
    """The rounds later than ``after`` in which all of ``names`` were, and ended with the same
    bits.
    """
    held = [
        {e["round"]: e["weights"] for e in shoal.rounds(name) if e["members"] == len(names)}
        for name in names
    ]
    common = set.intersection(*map(set, held))
    return [
        number
        for number in common
        if number > after and len({weights[number] for weights in held}) == 1
    ]


def steps_begun(shoal, pid):
    path = shoal.home / "marks" / str(pid)
    return path.stat().st_size if path.exists() else 0


@pytest.mark.slow(
    reason="three real peers of five processes, one of which is killed and comes back"
)
def test_every_layout_survives_a_dead_rank(shoal, eventually):
    """Peers of every layout hold the same through the death of a rank."""
    every, names = 12, ("single", "sharded", "copied")
    outer = {"method": "diloco", "every": every, "wait_s": 30.0}
    table = shoal.toml(
        options=OPTIONS,
        outer=outer,
        train={"steps": 0, "seed": SEED},
        swarm={"start_when": 3, "shards": 3},
        task={"hooks": TASK},
    )
    (shoal.home / "marks").mkdir()
    shoal.env["SHOAL_TEST_MARKS"] = str(shoal.home / "marks")
    often = ("--set", "node.checkpoint_every_rounds=1")
    always = ("--task", TASK, "--keep-rounds")
    how = {
        name: (*flags, *always, "--shard", f"{n}/3")
        for n, (name, flags) in enumerate(LAYOUTS.items())
    }
    single = shoal.node("up", table, "single", *how["single"])
    link = single.line()
    sharded, copied = (shoal.node("join", link, name, *how[name], *often) for name in names[1:])
    eventually(
        lambda: all(len(shoal.rounds(name)) >= 2 for name in names), 120, "two rounds of three"
    )

    single.signal(signal.SIGSTOP)  # so that the exchange in which the other two are next cannot end
    both = [rank_of(copied, rank) for rank in (0, 1)]
    lost = both[1]
    last = (len(shoal.rounds("copied")) + 1) * every
    eventually(
        lambda: min(steps_begun(shoal, pid) for pid in both) >= last,
        60,
        "the last step before an exchange",
    )
    os.kill(lost, signal.SIGKILL)
    single.signal(signal.SIGCONT)
    eventually(lambda: rank_of(copied, 1) not in (None, lost), 60, "another start of the ranks")
    died = max(event["round"] for event in shoal.rounds("copied"))
    eventually(
        lambda: len(together(shoal, names, died)) >= 3,
        150,
        "three rounds of all with the same weights",
    )
    for node in (copied, sharded, single):
        node.signal(signal.SIGINT)
    assert [node.wait() for node in (copied, sharded, single)] == [130, 130, 130]
    assert "rank 1 was ended by SIGKILL" in copied.said()

    # Up to the next round of others than these two what they hold is known: that of as many single
    # processes, at last without the lost peer. Who they are counts, not how many: the lost peer may
    # return in a round that another one misses.
    peers = [shoal.result(name)["peer"] for name in names]
    rounds = shoal.rounds("single")
    met = [{peer for peer in peers if peer[-TAIL:] in event["partners"]} for event in rounds]
    alone = next((n for n, others in enumerate(met) if others != {*peers[1:]}), len(met))
    until = next((n for n in range(alone, len(met)) if met[n] != {peers[1]}), len(met))
    assert until > alone >= 2, met
    assert [event["round"] for event in rounds[:until]] == list(range(until))
    expected = reference(
        shoal,
        OuterSettings(**outer),
        [until * every, until * every, alone * every],
        peers,
        optimizer="task",
    )
    for name, peer in zip(names[:2], peers, strict=False):
        real = kept(shoal, name)
        for here, there in zip(real[:until], expected[peer][:until], strict=True):
            for a, b in zip(here, there, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shoal")


@pytest.mark.slow(reason="a node by torchrun, beside another")
def test_torchrun_starts_a_peer_of_two_processes(shoal):
    """Torchrun starts a peer of two processes that joins by a link."""
    table = shoal.toml(
        options=OPTIONS,
        outer={"every": 3, "lag": 0},
        train={"steps": 9, "seed": SEED},
        swarm={"start_when": 2, "shards": 2},
    )
    one = shoal.node("up", table, "one", *HALVES)
    two = shoal.node(
        "join", one.line(), "two", "--device", "cpu", "--parallel", "fsdp", program=TORCHRUN
    )
    assert [node.wait() for node in (one, two)] == [0, 0], (one.said(), two.said())
    assert [shoal.result(name)["exchanges"]["with_partner"] for name in ("one", "two")] == [3, 3]
    unfit = shoal.node("up", table, "other", "--gpus", "3", "--device", "cpu", program=TORCHRUN)
    assert unfit.wait() != 0
    assert "--gpus 3 does not go with the 2 ranks that torchrun has started" in unfit.said()


@pytest.mark.slow(reason="five nodes one after another")
def test_a_checkpoint_goes_on_in_every_layout(shoal):
    # The task's own schedule depends on the number of steps in all, which grows here. A run ends
    # within a round, whose rest must not be sent as at the end of a swarm.
    table = shoal.toml(
        options=OPTIONS,
        outer={"every": 3, "lag": 0, "finish": "none"},
        train={"seed": SEED, "schedule": "constant"},
    )
    for steps, flags in enumerate((HALVES, FSDP, DDP, HALVES), 1):
        more = () if steps == 1 else ("--resume",)
        node = shoal.node("up", table, "changing", *flags, "--steps", str(4 * steps), *more)
        assert node.wait() == 0, node.said()
    same = shoal.node(
        "up",
        table,
        "same",
        *HALVES,
        "--steps",
        "16",
        "--shard",
        shoal.result("changing")["setup"]["shard"],
    )
    assert same.wait() == 0, same.said()
    (changed, one), (straight, other) = (load(shoal.home / name) for name in ("changing", "same"))
    assert changed == straight == 16
    outcome = [one["trainer"], other["trainer"]]
    assert outcome[0].keys() == outcome[1].keys()
    for name, tensor in outcome[1]["model"].items():
        torch.testing.assert_close(outcome[0]["model"][name], tensor, rtol=0, atol=1e-6)
    first, second = (state["optimizer"] for state in outcome)
    for here, there in zip(first["slow"], second["slow"], strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-6)
    for index, moments in second["inner"]["state"].items():
        for name, value in moments.items():
            torch.testing.assert_close(
                first["inner"]["state"][index][name], value, rtol=0, atol=1e-6
            )

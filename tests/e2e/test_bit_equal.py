"""Nodes that train over libp2p end with the very bits of the same training in one process without a
network.
"""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.node.task import Shard
from shoal.node.tasks.loader import load_task
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.optim import Simulation
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.blocking import blocking
from tests.support.records import member_of

PEERS = 4
SEED = 3
WAIT_S = 30.0
"""How long a round waits for its partner, and an exchange for a byte."""
TEACHER = f"{Path(__file__).parents[2] / 'examples' / 'custom_model.py'}:Teacher"


def teacher():
    return load_task(TEACHER, {"width": 8})


def normed():
    """The same task with a model that has buffers."""
    task = teacher()
    plain = task.model
    task.model = lambda: torch.nn.Sequential(
        torch.nn.BatchNorm1d(next(plain().parameters()).shape[1]), plain()
    )
    return task


def slow_weights(task, outer, train, exchange, index, run="run"):
    """Train and return the slow weights after each round."""
    rounds = []
    trainer = Trainer(
        task,
        outer,
        train,
        on_round=lambda info: rounds.append([t.clone() for t in trainer.opt.slow]),
    )
    trainer.connect(exchange, run, Shard(index, PEERS, train.seed))
    return trainer, rounds


def simulated(make_task, outer, train, peers, run="run"):
    """The reference: peer id -> slow weights per round."""

    def peer(exchange):
        trainer, rounds = slow_weights(
            make_task(), outer, train, exchange, peers.index(exchange.peer), run
        )
        trainer.run()
        return rounds

    return Simulation(peers, seed=train.seed).run(peer)


def assert_equal_bits(real, reference):
    assert len(real) == len(reference) > 0
    for here, there in zip(real, reference, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_four_processes_end_with_the_bits_of_the_simulation(shoal):
    options = {"width": 16, "heads": 2, "layers": 1, "context": 16, "batch": 2}
    rounds, every = 5, 4
    train = TrainSettings(
        steps=rounds * every, seed=SEED, optimizer="muon"
    )  # the default of the built-in task
    outer = blocking(every=every, wait_s=60.0, codec="float32")
    file = shoal.toml(
        options=options,
        swarm={"start_when": PEERS, "shards": PEERS},
        outer={"every": every, "wait_s": 60.0, "lag": 0, "codec": "float32"},
        train={"steps": train.steps, "seed": SEED},
    )
    nodes = [shoal.node("up", file, "peer-0", "--shard", f"0/{PEERS}", "--keep-rounds")]
    link = nodes[0].line()
    nodes += [
        shoal.node("join", link, f"peer-{i}", "--shard", f"{i}/{PEERS}", "--keep-rounds")
        for i in range(1, PEERS)
    ]
    assert [node.wait() for node in nodes] == [0] * PEERS, [node.said() for node in nodes]

    results = [shoal.result(f"peer-{i}") for i in range(PEERS)]
    assert [
        (r["exchanges"]["with_partner"], r["exchanges"]["without_partner"]) for r in results
    ] == [(rounds, 0)] * PEERS
    reference = simulated(
        lambda: TextTask(data=str(shoal.text), **options),
        outer,
        train,
        [r["peer"] for r in results],
    )
    for i, result in enumerate(results):
        files = sorted((shoal.home / f"peer-{i}" / "rounds").iterdir())
        kept = [load_file(path) for path in files]
        weights_bytes = sum(t.nbytes for t in kept[0].values())
        # No bound above holds: statuses are sent as time passes (counted exactly, without them, in
        # tests/swarm/exchange/test_sent_bytes.py).
        for way in ("bytes_sent", "bytes_received"):
            assert result["link"][way] >= rounds * weights_bytes
        assert_equal_bits(
            [[t[str(n)] for n in range(len(t))] for t in kept], reference[result["peer"]]
        )


@pytest.fixture(scope="module")
def hosts():
    """Four real daemons in this process."""
    identities = [Identity.ephemeral() for _ in range(PEERS)]
    started = [Host.start(identities[0])]
    started += [
        Host.start(identity, bootstrap=started[0].addresses()) for identity in identities[1:]
    ]
    yield list(zip(identities, started, strict=True))
    for host in reversed(started):
        host.close()


def unhurried(exchange):
    """Let ``exchange`` hold training as long as in rounds of minutes.

    Those here take milliseconds, so that it would be given up after a second, which a machine with
    much else to do may take for it; then bits differ.
    """
    exchange.time.period = lambda fragment=0: 8 * WAIT_S
    return exchange


def pair_exchange(host, identity, swarm, digest, members, *, overlap=False):
    context = PeerContext(host, identity, swarm, digest, SEED, members)
    timeouts = ExchangeTimeouts(WAIT_S, chunk=WAIT_S)
    return unhurried(PairExchange(context, timeouts, overlap=overlap))


def test_no_exchange_here_is_given_up_on_a_loaded_machine(hosts):
    """The fault: a stall of a second gave one up, and its partner was passed over for the rest.

    Mutant: the exchanges are not `unhurried`.
    """
    identity, host = hosts[0]
    time = pair_exchange(host, identity, "a" * 52, "0" * 64, dict).time
    for round in range(3):
        assert time.spent("partner", round, 0, 0.001, whole=True, took=0.001, nbytes=64) == {}
    assert time.budget(64, 0) >= WAIT_S
    assert time.spent("partner", 3, 0, WAIT_S / 2, whole=True, took=WAIT_S / 2, nbytes=64) == {}


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    "outer",
    [
        blocking(every=3, weights="tokens"),  # two tensors travel
        blocking(every=3, codec="bfloat16"),
        blocking(every=3, method="local", codec="float16"),
        blocking(every=3, method="gasloc", codec="int8"),
        # two tensors and what no codec may touch
        blocking(every=3, weights="tokens", buffers="average"),
        blocking(every=3, codec="mod4"),
        blocking(every=3, codec="mod4", weights="tokens", buffers="average"),
        OuterSettings(every=3, codec="mod4", fragments=1, lag=2, buffers="average"),
        # weights in 8 bits, vectors and outputs whole, and both twice
        blocking(every=3, codec="int8+hidden", weights="tokens", buffers="average"),
    ],
    ids=[
        "weights",
        "bfloat16",
        "local",
        "gasloc",
        "buffers",
        "mod4",
        "mod4-buffers",
        "mod4-overlapped",
        "hidden",
    ],
)
def test_daemons_equal_the_simulation(hosts, outer, caplog):
    """Every form and codec over daemons ends with the bits of the simulation."""
    caplog.set_level("DEBUG", "shoal.swarm.exchange")  # shown if a pair fails to exchange
    check_equal_bits(hosts, outer)


@pytest.mark.parametrize(
    "outer",
    [
        blocking(every=3, codec="float32"),
        blocking(every=3, codec="mod4"),
        blocking(every=3, codec="mod4", weights="tokens", buffers="average"),
    ],
    ids=["float32", "mod4", "mod4-weights"],
)
def test_three_daemons_equal_the_simulation(hosts, outer, caplog):
    """With an odd number too: in each round one of three averages with both others."""
    caplog.set_level("DEBUG", "shoal.swarm.exchange")
    check_equal_bits(hosts[:3], outer)


def check_equal_bits(hosts, outer):
    rounds = 5
    train = TrainSettings(steps=rounds * outer.every, seed=SEED)
    swarm = "a" * 52
    task = normed if outer.buffers == "average" else teacher
    made = [slow_weights(task(), outer, train, None, i, swarm) for i in range(len(hosts))]
    digest = model_digest(made[0][0].params)

    def member(index):
        peer = hosts[index][1].peer_id
        return member_of(
            peer,
            swarm=swarm,
            addresses=hosts[index][1].addresses(),
            shard=index,
            shards=PEERS,
            model=digest,
        )

    members = {hosts[i][1].peer_id: member(i) for i in range(len(hosts))}
    for (identity, host), (trainer, _) in zip(hosts, made, strict=True):
        trainer.opt.exchange = pair_exchange(
            host, identity, swarm, digest, lambda: members, overlap=outer.lag != 0
        )
    threads = [threading.Thread(target=trainer.run) for trainer, _ in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT_S)
    reference = simulated(task, outer, train, [identity.peer_id for identity, _ in hosts], swarm)
    for (identity, _), (_, real) in zip(hosts, made, strict=True):
        assert len(real) == rounds
        assert_equal_bits(real, reference[identity.peer_id])

"""A node takes over weights: whose fast weights stay and whose move, and who takes over at all."""

import itertools
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shoal.optim import CO2, DiLoCo, NoLoCo, RoundInfo, RoundKey
from shoal.optim.exchange.base import Alone
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.contribution import ExchangeStats
from shoal.swarm.exchange.robust import LEAST, DistanceScreen
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.state import resync as anchoring
from shoal.swarm.state.drift import SplitDecision
from shoal.swarm.state.resync import FAR_ROUNDS, SLOW_FETCH_S, Resynchronizer
from shoal.swarm.state.snapshot import State

EVERY, MODEL = 4, "0" * 64
METHODS = {"diloco": DiLoCo, "co2": CO2, "noloco": partial(NoLoCo, lag=0)}


class Swarm:
    """One node of a swarm whose other members hold `state`, and hand it out at once."""

    def __init__(self, monkeypatch, method="diloco", others=("other",)):
        self.model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.opt = METHODS[method](
            torch.optim.SGD(self.model.parameters(), lr=0.1), Alone(), every=EVERY
        )
        self.opt.on_round = self.on_round
        self.asked = []
        self.host = SimpleNamespace(met={}, internal_errors=InternalErrors())
        self.members = {
            peer: SimpleNamespace(
                peer=peer, model=MODEL, state="training", round=9, addresses=(), finished=False
            )
            for peer in others
        }
        directory = SimpleNamespace(members=lambda: self.members)
        membership = SimpleNamespace(
            identity=SimpleNamespace(peer_id="me"),
            directory=directory,
            host=self.host,
            swarm="a" * 52,
        )
        self.stats, self.moves, self.behind, self.met, self.split = ExchangeStats(), 0, 0, (), None
        self.server, self.now, self.partners = SimpleNamespace(diverged=None), 0.0, ()
        self.resynchronizer = Resynchronizer(
            membership,
            MODEL,
            self.server,
            self.opt,
            self.stats,
            self.moved,
            lambda: self.now,
            lambda: self.partners,
        )
        monkeypatch.setattr(anchoring, "begin_fetch", self.fetch)
        self.theirs = [torch.zeros(1, 4)]

    def moved(self):
        self.moves += 1

    def fetch(self, host, query, sources):
        self.asked.append([peer for peer, _ in sources])
        future = Future()
        shared = {
            name: [tensor.clone() for tensor in tensors]
            for name, tensors in self.opt.shared.items()
        }
        future.set_result(
            State(self.opt.round, [t.clone() for t in self.theirs], shared, [self.opt.round - 1])
        )
        return future

    def on_round(self, info):
        self.opt.round = max(self.opt.round, info.key.round + self.behind + 1)
        self.resynchronizer.on_round(
            RoundInfo(info.key, self.met, info.step, info.lag), behind=self.behind, split=self.split
        )

    def train(self, rounds):
        """Every round learns about the same, and moves by about one."""
        for _ in range(rounds * EVERY):
            self.model.weight.grad = -torch.full((1, 4), 2.5 / EVERY)
            self.opt.step()
            self.resynchronizer.adopt_fetched()

    def away(self):
        """Return how far the model is from the swarm's weights: what its next pseudo-gradient
        holds.
        """
        return (self.model.weight.detach() - self.theirs[0]).norm().item()


def test_a_lone_peer_that_is_refused_each_round_stays_near(monkeypatch):
    swarm = Swarm(monkeypatch)
    swarm.train(30)
    assert len(swarm.asked) == 30
    assert swarm.away() < 5.0


def test_own_error_of_a_fetch_does_not_end_training(monkeypatch):
    """A disk that fails while weights are fetched is this node's own fault, and is said so."""
    swarm = Swarm(monkeypatch)
    failed = Future()
    failed.set_exception(OSError("the disk is full"))
    swarm.resynchronizer._pending = failed
    assert not swarm.resynchronizer.adopt_fetched()
    assert swarm.host.internal_errors.report()["weights"]["count"] == 1
    swarm.train(1)
    assert swarm.asked


def test_who_was_met_is_asked_before_free_records(monkeypatch):
    """The fault: as many made-up records as are asked, with the lowest ids or the latest rounds,
    and only strangers were asked.
    """
    swarm = Swarm(monkeypatch, others=("one", "two", *(f"a{number}" for number in range(100))))
    for peer, there in swarm.members.items():
        there.round = 9 if peer in ("one", "two") else 10**6
    swarm.partners = ("one", "two")
    swarm.train(1)
    assert swarm.asked[0] == ["one", "two"]  # no stranger's word counts where a partner's does


def test_of_strangers_one_of_each_address_range_is_asked(monkeypatch):
    swarm = Swarm(monkeypatch, others=("z", *(f"a{number}" for number in range(100))))
    swarm.host.met = {peer: "10.1.0.1" if peer == "z" else "10.2.0.1" for peer in swarm.members}
    swarm.train(1)
    assert swarm.asked[0][:2] == ["a0", "z"]


@pytest.mark.parametrize(("seconds", "rarely"), [(SLOW_FETCH_S, True), (SLOW_FETCH_S - 1, False)])
def test_slow_fetches_that_fail_are_tried_ever_more_rarely(monkeypatch, seconds, rarely):
    """On a slow uplink each would take the place of the exchanges that are due.

    Where only the rounds are quick they do not.
    """
    swarm = Swarm(monkeypatch)
    began, pending = [], []

    def fetch(host, query, sources):
        began.append(swarm.opt.round)
        pending.append(Future())
        return pending[-1]

    monkeypatch.setattr(anchoring, "begin_fetch", fetch)
    for _ in range(60):
        swarm.train(1)
        if pending and swarm.opt.round >= began[-1] + 2 and not pending[-1].done():
            swarm.now += seconds
            pending[-1].set_exception(NetworkError("the peers that hold the weights are gone."))
    gaps = [later - earlier for earlier, later in itertools.pairwise(began)]
    if not rarely:
        assert max(gaps) <= 3
        return
    assert gaps == sorted(gaps)
    assert 4 <= len(began) <= 8  # not 20
    assert max(gaps) <= anchoring.MAX_PAUSE_ROUNDS + 4
    swarm.met = ("me", "other")
    monkeypatch.setattr(anchoring, "begin_fetch", swarm.fetch)
    swarm.train(anchoring.MAX_PAUSE_ROUNDS + 4)
    assert not swarm.resynchronizer.diverged


def test_where_the_fast_weights_always_stay_it_diverges(monkeypatch):
    monkeypatch.setattr(anchoring, "FAR_ROUNDS", 10**9)
    swarm = Swarm(monkeypatch)
    swarm.train(30)
    assert swarm.away() > 1e3


def test_after_one_missed_round_what_was_learnt_stays(monkeypatch):
    swarm = Swarm(monkeypatch)
    swarm.train(1)
    assert swarm.moves == 1
    assert torch.equal(swarm.opt.slow[0], swarm.theirs[0])
    assert swarm.away() == pytest.approx(
        0.7 * 1.6 * 0.5
    )  # lr (1 + momentum), times the four steps' way


def test_a_node_that_slept_does_not_pull_the_others_back(monkeypatch):
    swarm = Swarm(monkeypatch)
    swarm.met, swarm.theirs = ("me", "other"), [torch.full((1, 4), 100.0)]
    swarm.train(3)
    swarm.behind = 20
    swarm.train(1)
    swarm.behind = 0
    assert swarm.away() < 5.0
    swarm.train(1)
    assert swarm.resynchronizer._missed.total() == 0


@pytest.mark.parametrize(("in_flight", "diverged"), [((), False), ((2,), False), ((5,), True)])
def test_each_fragment_has_rounds_of_its_own(monkeypatch, in_flight, diverged):
    """The weights' round is that of the furthest fragment. What this one misses beyond them is what
    goes by before the round in which it takes part next.

    Mutants: by the source's round; whatever is in flight.
    """
    swarm = Swarm(monkeypatch)
    swarm.train(1)
    state = State(40, swarm.theirs, {}, [1])
    monkeypatch.setattr(swarm.opt, "in_flight", lambda fragment: in_flight)
    swarm.resynchronizer._diverged.add(0)
    swarm.resynchronizer._rebase_on(state)
    assert swarm.resynchronizer.diverged is diverged


def test_a_round_that_the_weights_lack_is_noticed(monkeypatch):
    """The fault: weights of before a round that had moved on here, without a result, were taken
    over; nothing said that they lack it.
    """
    swarm = Swarm(monkeypatch)
    swarm.met = ("me", "other")
    swarm.train(2)
    assert not swarm.asked
    swarm.resynchronizer._diverged.add(0)
    swarm.resynchronizer._rebase_on(State(2, swarm.theirs, swarm.opt.shared, [1]))
    assert not swarm.resynchronizer.diverged
    swarm.opt.round = 3  # round 2 ended meanwhile, and its result was dropped
    swarm.train(1)
    assert len(swarm.asked) == 1
    swarm.train(2)
    assert len(swarm.asked) == 1


def test_giving_way_asks_the_other_part_alone(monkeypatch):
    """Who gives way asks the other part alone and moves its fast weights."""
    swarm = Swarm(monkeypatch, others=("other", "mate", "far"))
    swarm.met, swarm.theirs = ("me", "mate"), [torch.full((1, 4), 100.0)]
    swarm.train(2)
    assert swarm.asked == []
    swarm.split = SplitDecision(frozenset({0}), frozenset({"far", "other"}))
    swarm.train(1)
    assert swarm.asked == [["far", "other"]]
    assert torch.equal(swarm.opt.slow[0], swarm.theirs[0])
    assert swarm.away() < 5.0


def test_peer_that_missed_a_round_has_no_part(monkeypatch):
    """Who has missed a round is no part of its own."""
    swarm = Swarm(monkeypatch)
    swarm.split = SplitDecision(frozenset({0}), frozenset({"other"}))
    monkeypatch.setattr(
        swarm.resynchronizer, "adopt_fetched", lambda: False
    )  # what it asked for is still on its way
    swarm.train(1)
    assert swarm.resynchronizer.diverged
    assert swarm.resynchronizer._missed[0] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["diloco", "co2"])
def test_moved_fast_weights_keep_their_progress(method, dtype):
    """Fast weights that move keep what was learnt since the last round."""
    model = torch.nn.Linear(8, 8, bias=False).to(dtype)
    opt = METHODS[method](torch.optim.SGD(model.parameters(), lr=0.1), Alone(), every=EVERY)
    for _ in range(EVERY + 2):
        model.weight.grad = torch.randn_like(model.weight)
        opt.step()

    def learnt():
        opt._weights.read([0])
        start = opt.rule_state.get("start", opt.slow)
        return (start[0] - opt._weights.fast[0]).clone()

    before = learnt()
    theirs = [opt.slow[0] + torch.randn(8, 8)]
    opt.adopt(theirs, round=9, applied=[8], rebase=[0])
    assert torch.equal(opt.slow[0], theirs[0])
    assert torch.allclose(learnt(), before, atol=1e-5)


def test_twice_refused_laggard_begins_afresh(monkeypatch):
    """Who was far behind and is turned down by two begins afresh."""
    swarm = Swarm(monkeypatch, "noloco")
    swarm.theirs = [torch.full((1, 4), 7.0)]
    turned_down = [("a", "refused"), ("b", "suspicious"), ("c", "suspicious")]

    def refused(round):
        peer, kind = turned_down[round % 3]
        swarm.stats.failed(RoundKey("run", round), peer, kind)
        swarm.train(1)

    for round in range(5):
        refused(round)  # it was never behind: it may be the others who are far
    assert swarm.asked == []
    swarm.met = ("me", "other")
    swarm.stats.done(RoundKey("run", 5), ["a"], 1.0)
    swarm.train(1)
    swarm.met, swarm.behind = (), FAR_ROUNDS
    refused(6)
    assert swarm.asked == []  # one may be hostile
    swarm.behind = 0
    refused(7)
    assert swarm.asked == [["other"]]
    assert (swarm.moves, swarm.server.diverged) == (1, None)
    assert torch.equal(swarm.model.weight, swarm.theirs[0])


def test_two_unreadable_meetings_are_a_refusal(monkeypatch):
    """With the codec for pairs both commit, and leave all blocks out."""
    swarm = Swarm(monkeypatch, "noloco")
    swarm.theirs, swarm.met, swarm.behind = [torch.full((1, 4), 7.0)], ("me", "other"), FAR_ROUNDS
    for round, peer in enumerate("ab"):
        assert swarm.asked == []
        swarm.stats.failed(RoundKey("run", round), peer, "suspicious")
        swarm.train(1)
        swarm.behind = 0
    assert swarm.asked == [["other"]]
    assert torch.equal(swarm.model.weight, swarm.theirs[0])


def test_a_watch_that_forgets_begins_anew():
    watch = DistanceScreen()
    own = [torch.tensor([1.0, 0.0])]

    def problem(number, far):
        return watch.problem(
            RoundKey("run", number), lambda: own, "peer", [torch.tensor([1.0, far])]
        )

    for number in range(LEAST):
        problem(number, 0.01)
    assert problem(20, 1.0) is not None
    watch.forget()
    assert problem(21, 1.0) is None


def test_nothing_is_fetched_from_members_at_their_end(monkeypatch):
    """Fault: a late node fetched all weights at each fragment once the others had come to their
    end, until they refused to serve it.
    """
    swarm = Swarm(monkeypatch)
    swarm.members["other"].finished = True
    swarm.train(2)
    assert swarm.asked == []
    swarm.members["other"].finished = False
    swarm.train(1)
    assert swarm.asked == [["other"]]

"""The beginning of a session: how long a node waits for others, which part of the data it takes,
its exchange, and whether weights are tried."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.optim import Alone, NoLoCo
from shoal.optim.exchange.base import RoundKey
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training import session_setup
from shoal.swarm.training.averaged_state import AveragedState
from shoal.swarm.training.factories import make_exchange, make_screen
from shoal.swarm.training.session import Session
from shoal.swarm.training.session_setup import (
    ALONE_S,
    LONGEST_PAUSE_S,
    LOOK_S,
    OWN_LOOP,
    PATIENCE_S,
    SEEN_S,
    SessionError,
)
from shoal.swarm.training.shard import Shard, least_used, settled

ME, CREATOR = "me", "creator"


def test_long_list_of_tensors_can_be_joined():
    """With more than 16 of them nobody could open the manifest, its creator included."""
    params = session_setup.parameters_of([nn.Parameter(torch.zeros(2)) for _ in range(40)])
    identity = Identity.ephemeral()
    made = open_manifest(
        session_setup.new_swarm(identity, params, seed=0, outer={"fragments": 2}, name="many")
    )
    assert (made.outer.fragments, made.fragment_of) == (2, (0, 1) * 20)


def record(state, step=0):
    return SimpleNamespace(state=state, step=step)


class Swarm:
    """A membership by a clock of its own, whose creator is in view up to ``until`` and hands out no
    weights.
    """

    def __init__(self, monkeypatch, until, said=False):
        self.now, self.until, self.said = 0.0, until, said
        self.asked_at = []
        self.identity = SimpleNamespace(peer_id=ME)
        self.directory = self
        self.manifest = SimpleNamespace(task=OWN_LOOP, task_options={}, start_when=2)
        self.sync = SimpleNamespace(offer=lambda: None)
        monkeypatch.setattr(session_setup, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(session_setup, "catch_up", self.catch_up)

    def catch_up(self, *args, begun):
        self.asked_at.append(self.now)
        if self.now < self.until:
            raise NetworkError("nothing is served")

    def members(self):
        creator = {CREATOR: record("waiting")} if self.now < self.until else {}
        return creator | {ME: record("waiting")}

    def departed(self):
        return {CREATOR: record("leaving")} if self.said and self.now >= self.until else {}

    def size(self):
        return 1

    def wait_for(self, count, seconds, should_stop=None):
        self.now += seconds
        return False

    def ends(self, wait, first=False):
        """Return the sentence and the time at which a wait ends."""
        opt = SimpleNamespace(slow=[], round=0)
        begun = {
            "weights": partial(session_setup._weights, self, "model", opt, lambda state: None),
            "start": partial(session_setup._wait_for_start, self, opt, self, first=first),
        }[wait]
        with pytest.raises(SessionError) as raised:
            begun()
        return str(raised.value), self.now


@pytest.mark.parametrize("wait", ["weights", "start"])
@pytest.mark.parametrize(
    ("said", "how"), [(True, "the last of them has left"), (False, "none shows itself any more")]
)
def test_who_joined_does_not_wait_for_those_who_are_gone(monkeypatch, wait, said, how):
    """It waited its whole ten minutes, with a goodbye of the only other member or without."""
    sentence, at = Swarm(monkeypatch, 50.0, said).ends(wait)
    assert (
        sentence
        == f"No other member is left to begin this swarm with ({how}): join a swarm that runs, or "
        "create one."
    )
    assert at == pytest.approx(50.0 + ALONE_S, abs=2 * LONGEST_PAUSE_S)


def test_weights_are_asked_for_ever_more_rarely(monkeypatch):
    """Each try logs a line for each peer that could not be reached: there were five a second."""
    swarm = Swarm(monkeypatch, 50.0)
    swarm.ends("weights")
    asked = swarm.asked_at
    assert asked[1] - asked[0] == pytest.approx(LOOK_S)
    assert asked[-1] - asked[-2] == LONGEST_PAUSE_S


def test_silent_source_is_waited_for_as_before(monkeypatch):
    """Who is there but hands out nothing is waited for as long as before."""
    sentence, at = Swarm(monkeypatch, float("inf")).ends("start")
    assert sentence.startswith("Only 1 of 2 peers came within 600 s")
    assert at == pytest.approx(PATIENCE_S, abs=2 * LOOK_S)


def test_who_creates_a_swarm_waits_alone(monkeypatch):
    sentence, at = Swarm(monkeypatch, 0.0).ends("start", first=True)
    assert sentence.startswith("Only 1 of 2 peers came within 600 s")
    assert at == pytest.approx(PATIENCE_S, abs=2 * LOOK_S)


class Starting(Swarm):
    """A swarm of two with the records ``others``."""

    def __init__(self, monkeypatch, *others):
        super().__init__(monkeypatch, 0.0)
        self.others = others
        self.waits = 0

    def members(self):
        present = [other for other in self.others if other.state != "leaving"]
        return dict(enumerate([record("waiting"), *present]))

    def departed(self):
        return dict(enumerate(other for other in self.others if other.state == "leaving"))

    def size(self):
        return len(self.members()) if self.waits else 1

    def wait_for(self, count, seconds, should_stop=None):
        self.waits += 1  # a node that has just come sees itself alone until it has read
        if self.size() >= count:
            return True
        self.now += seconds
        return False

    def begins_at(self):
        opt = SimpleNamespace(round=0)
        waits = session_setup.until_started(self, opt, LOOK_S)
        return self.now if next(waits, None) is None else None


@pytest.mark.parametrize(
    ("others", "at"),
    [
        ([record("waiting")], SEEN_S),
        ([record("training", step=1)], 0.0),
        ([record("leaving", step=6)], LOOK_S),
        ([record("leaving")], None),
        ([], None),
    ],
    ids=["comes-last", "trains", "trained-and-left", "left-untrained", "alone"],
)
def test_start_is_seen_by_all(monkeypatch, others, at):
    """Fault: who came last trained .1 s and left before the creator, who then waited for ever,
    looked.
    """
    assert Starting(monkeypatch, *others).begins_at() == at


PEERS = [f"peer-{number:02}" for number in range(12)]


def members(held, state="waiting"):
    return {
        peer: SimpleNamespace(peer=peer, shard=index, shards=8, state=state)
        for peer, index in held.items()
    }


def settle(held, before, trains=()):
    """The shards once each of those that came has settled, by what all announced before."""
    view = {**members(held), **members({peer: held[peer] for peer in trains}, "training")}
    return {
        peer: settled(view, Shard(held[peer], 8, 5), peer, before).index
        for peer in held
        if peer not in (*before, *trains)
    }


def test_lower_id_keeps_a_contested_shard():
    """Of two that took the same the lower id keeps it and the other takes a free one."""
    old = {peer: index for index, peer in enumerate(PEERS[:6])}
    found = settle({**old, PEERS[8]: 6, PEERS[9]: 6}, before=old, trains=old)
    assert found == {PEERS[8]: 6, PEERS[9]: 7}


def test_who_trains_keeps_its_shard_whatever_its_id():
    old = {peer: index for index, peer in enumerate(PEERS[:6])}
    held = {**old, PEERS[8]: 6, PEERS[9]: 6}
    assert settle(held, before=old, trains=[*old, PEERS[9]]) == {PEERS[8]: 7}


def test_deliberately_shared_shard_is_kept():
    """More peers than shards: its holders were known when it was chosen."""
    old = {peer: index % 8 for index, peer in enumerate(PEERS[:9])}
    assert settle({**old, PEERS[9]: 3}, before=old, trains=old) == {PEERS[9]: 3}


@given(
    st.integers(0, 4),
    st.permutations(PEERS).flatmap(
        lambda order: st.integers(5, 8).map(lambda count: order[:count])
    ),
)
def test_mutual_view_gives_distinct_shards(known, peers):
    """All that see each other end with shards of their own."""
    old = {peer: index for index, peer in enumerate(peers[:known])}
    chosen = {peer: least_used(members(old), 8, peer) for peer in peers[known:]}
    held = {**old, **chosen}
    for _ in range(len(chosen)):  # those that moved may have moved to the choice of another
        held |= settle(held, before=old, trains=old)
    assert len(set(held.values())) == len(peers)
    assert {peer: held[peer] for peer in old} == old


SECONDS = (1e-3, 86_400.0)


@pytest.mark.parametrize("wait_s", SECONDS)
def test_what_a_manifest_allows_an_exchange_takes(network, wait_s):
    host = network.host()
    directory = SimpleNamespace(
        members=dict, everyone=dict, look=lambda: None, is_barred=lambda peer: False, departed=dict
    )
    membership = SimpleNamespace(
        host=host, identity=host.identity, swarm="a" * 52, directory=directory
    )
    outer = OuterSettings(method="diloco", wait_s=wait_s)
    made = make_exchange(
        membership,
        outer,
        make_screen(outer),
        SimpleNamespace(fragments=1, lag=0),
        seed=0,
        model="0" * 64,
    )
    assert isinstance(made, GroupExchange)


def session(check_loss=True, model=True, optimizer=True):
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    opt = NoLoCo(torch.optim.SGD(module.parameters(), lr=0.1), Alone(), every=2, lag=0)
    return SimpleNamespace(
        settings=SimpleNamespace(check_loss=check_loss),
        _screen=DistanceScreen(suspect=0),
        _state=AveragedState.of(session_setup.parameters_of(module), module if model else None, ()),
        _opt=opt if optimizer else None,
        _ranks=None,
    )


def square(model, batch):
    return model(batch).square().mean()


def test_loss_trial_uses_the_loops_batches():
    """What a partner sends is tried on the loop's own batches."""
    mine = session()
    Session.try_partners(mine, square, itertools.repeat(torch.ones(2, 1)))
    assert "4" in mine._screen.problem(
        RoundKey("run", 0), lambda: [torch.ones(1, 1)], "peer", [torch.full((1, 1), 2.0)]
    )
    assert (
        mine._screen.problem(
            RoundKey("run", 1), lambda: [torch.ones(1, 1)], "peer", [torch.full((1, 1), 0.5)]
        )
        is None
    )


def test_trials_end_with_the_batches():
    """Batches that end end the trying and each is used once."""
    mine, used = session(), []
    batches = (used.append(number) or torch.ones(2, 1) for number in range(4))
    Session.try_partners(mine, square, batches)
    for number in range(3):
        verdict = mine._screen.problem(
            RoundKey("run", number), lambda: [torch.ones(1, 1)], "peer", [torch.full((1, 1), 9.0)]
        )
        assert (verdict is None) == (number == 2)
    assert used == [0, 1, 2, 3]


def test_a_swarm_that_does_not_ask_for_it_tries_nothing():
    mine = session(check_loss=False, model=False)
    Session.try_partners(mine, square, [])
    assert mine._screen.loss_check is None


@pytest.mark.parametrize("lacks", ["model", "optimizer"])
def test_it_needs_a_module_and_an_optimizer(lacks):
    with pytest.raises(SessionError, match="make it first"):
        Session.try_partners(session(**{lacks: False}), square, [])


def test_a_session_passes_on_which_round_is_due():
    inner = SimpleNamespace(due=lambda round, fragment: round + 4 * fragment)
    exchange = session_setup.SessionExchange(inner, None, None)
    assert [exchange.due(3, fragment) for fragment in (0, 1)] == [3, 7]

"""Joining a swarm that is under way: begin only when the weights are not too old, and say what is
wrong.
"""

import types

import pytest
import torch

from shoal.optim import Alone, method_named
from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.membership import OWN_LOOP
from shoal.swarm.state import catch_up as catching
from shoal.swarm.state.catch_up import BEHIND_ROUNDS, FRESH_S, TRIES, catch_up, usual_round
from shoal.swarm.state.query import ModelDiffersError
from shoal.swarm.state.snapshot import State
from tests.support.records import member_of

ME, MODEL = Identity.ephemeral(), "0" * 64


def member(round, state="training", model=MODEL):
    peer = Identity.ephemeral().peer_id
    return member_of(peer, round=round, model=model, state=state)


class Swarm:
    """Members whose rounds go on while a newcomer downloads; ``given`` are the rounds of the
    weights that it gets, in turn.
    """

    def __init__(self, monkeypatch, members, given=(), seconds=100.0, pace=0, task="text"):
        self.now, self.seconds, self.pace, self.given, self.queries = (
            0.0,
            seconds,
            pace,
            list(given),
            [],
        )
        self.listed = {m.peer: m for m in members}
        self.identity, self.swarm, self.directory = ME, "a" * 52, self
        self.host = types.SimpleNamespace(
            met={}, locate=self.locate, call=lambda done, seconds: None
        )
        self.at, self.dialled = {}, 0  # where each peer is found
        self.manifest = types.SimpleNamespace(
            model=MODEL, task=task, creator=members[-1].peer if members else ""
        )
        monkeypatch.setattr(catching, "fetch_state", self.fetch)

    def members(self):
        return self.listed

    def refresh(self, seconds):
        self.listed = {
            p: m.model_copy(update={"round": m.round + self.pace}) for p, m in self.listed.items()
        }

    def locate(self, peers, seconds):
        for peer, _ in peers:
            self.dialled += 1
            if peer in self.at:
                self.host.met[peer] = self.at[peer]

    def fetch(self, host, query, sources, held=None, watch=None):
        self.queries.append((query, sources))
        self.held = held
        self.now += self.seconds
        given = self.given.pop(0)
        if isinstance(given, Exception):
            raise given
        return None if given is None else State(given, [torch.zeros(3)])

    def join(self, model=MODEL, method="noloco", **options):
        weight = torch.nn.Parameter(torch.zeros(3))
        opt = method_named(method).make(torch.optim.SGD([weight], lr=0.1), Alone(), every=2)
        return catch_up(self, model, opt, lambda: self.now, **options)


def test_no_finished_round_is_nothing_to_take(monkeypatch):
    """Nobody who has finished a round is nothing to take over."""
    assert (
        Swarm(monkeypatch, [member(0), member(5, "leaving"), member(5, model="1" * 64)]).join()
        is None
    )


@pytest.mark.parametrize(
    ("task", "state", "given"),
    [
        ("text", "training", 0),
        ("text", "waiting", None),
        (OWN_LOOP, "training", 0),
        (OWN_LOOP, "waiting", 0),
    ],
)
def test_weights_come_from_a_sure_holder(monkeypatch, task, state, given):
    """While it waits, a node of `shoal up` hands out nothing."""
    swarm = Swarm(
        monkeypatch, [member(0, state), member(0, "leaving")], given=[0], seconds=1.0, task=task
    )
    assert swarm.join() is None
    found = swarm.join(begun=False)
    assert given is None or torch.equal(
        swarm.held.slow[0], torch.zeros(3)
    )  # its own may be those very ones
    assert (None if found is None else found.round) == given


def test_creator_is_asked_first_in_a_round(monkeypatch):
    """Of those in the same round the creator is asked first."""
    members = [member(3) for _ in range(20)]
    swarm = Swarm(monkeypatch, members, given=[3], seconds=1.0)
    swarm.join()
    assert swarm.queries[0][1][0][0] == members[-1].peer


@pytest.mark.parametrize("claims", ["one range", "a range each", "of the honest"])
@pytest.mark.parametrize("lie", [10, 10**6])
def test_free_records_of_one_range_leave_places(monkeypatch, claims, lie):
    """The fault: the latest by what all records say were asked, then the first of the directory:
    eight strangers of one host.
    """

    def named(made, number):
        where = {
            "one range": "10.9.0.1",
            "a range each": f"10.{number}.0.9",
            "of the honest": f"10.{number % 3}.0.9",
        }[claims]
        return made.model_copy(update={"addresses": (f"/ip4/{where}/tcp/1/p2p/{made.peer}",)})

    hostile = [named(member(lie), number) for number in range(100)]
    honest = [member(10) for _ in range(3)]
    honest = [
        m.model_copy(update={"addresses": (f"/ip4/10.{n}.0.1/tcp/1/p2p/{m.peer}",)})
        for n, m in enumerate(honest)
    ]
    swarm = Swarm(monkeypatch, [*hostile, *honest], given=[10], seconds=1.0)
    swarm.manifest.creator = ""
    swarm.at = {m.peer: "10.9.0.1" for m in hostile} | {
        m.peer: f"10.{n}.0.1" for n, m in enumerate(honest)
    }
    swarm.join()
    asked = [peer for peer, _ in swarm.queries[0][1]]
    assert {m.peer for m in honest} <= set(asked[:4])
    assert swarm.dialled == 103


def test_dead_addresses_come_last(monkeypatch):
    """Records of addresses where nobody is come after those who answer."""
    hostile, honest = [member(10) for _ in range(100)], [member(10) for _ in range(3)]
    swarm = Swarm(monkeypatch, [*hostile, *honest], given=[10], seconds=1.0)
    swarm.manifest.creator = ""
    swarm.at = {m.peer: "10.1.0.1" for m in honest}
    swarm.join()
    assert [peer for peer, _ in swarm.queries[0][1]][:3] == [m.peer for m in honest]


def test_rounds_are_by_one_vote_a_range():
    """Rounds are those of peers that were met one vote a range."""
    members = [member(10**6) for _ in range(100)] + [member(7), member(8)]
    met = {m.peer: "10.9.0.1" for m in members[:100]}
    assert usual_round(members, {}) == 10**6
    assert (
        usual_round(members, met | {members[100].peer: "10.1.0.1", members[101].peer: "10.2.0.1"})
        == 8
    )
    assert usual_round(members, met, partners={members[100].peer}) == 7
    assert usual_round([], {}) == 0


def test_older_weights_are_fetched_once_more(monkeypatch):
    """Weights within the bound will do and older ones are fetched once more."""
    swarm = Swarm(
        monkeypatch,
        [member(10), member(10), member(99)],
        given=[10, 10 + 5],
        pace=BEHIND_ROUNDS + 1,
    )
    assert swarm.join().round == 15
    assert len(swarm.queries) == 2
    swarm = Swarm(monkeypatch, [member(10), member(10), member(99)], given=[10], pace=BEHIND_ROUNDS)
    assert swarm.join().round == 10


def test_quickly_fetched_weights_are_not_old(monkeypatch):
    """Weights that came quickly are not old however short the rounds."""
    assert (
        Swarm(monkeypatch, [member(10)], given=[10], seconds=FRESH_S, pace=1000).join().round == 10
    )


def test_fast_rounds_begin_after_some_tries(monkeypatch, caplog):
    """Where rounds are faster than the link it begins after some tries and says so."""
    swarm = Swarm(monkeypatch, [member(10)], given=range(10, 10 + 2 * TRIES, 2), pace=1000)
    assert swarm.join().round == 10 + 2 * (TRIES - 1)
    assert "rounds go by faster than the swarm's weights can be fetched" in caplog.text


@pytest.mark.parametrize(("method", "equal"), [("noloco", False), ("diloco", True)])
def test_furthest_is_asked_first(monkeypatch, method, equal):
    """Who is furthest is asked first and only in a group are weights equal."""
    swarm = Swarm(monkeypatch, [member(n) for n in range(20)], given=[10], seconds=1.0)
    swarm.join(method=method)
    query, sources = swarm.queries[0]
    assert sorted(swarm.listed[peer].round for peer, _ in sources) == [
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        19,
    ]
    assert (query.equal, query.confirmed, list(query.shapes)) == (equal, True, [(3,)])


def test_weights_that_cannot_be_had_end_in_one_sentence(monkeypatch):
    with pytest.raises(
        NetworkError, match=r"its weights could not be had \(they are far apart\): try again\."
    ):
        Swarm(monkeypatch, [member(10)], given=[NetworkError("they are far apart.")]).join()
    with pytest.raises(NetworkError, match=r"\(none of its members served them\): try again\."):
        Swarm(monkeypatch, [member(10)], given=[None]).join()


def test_a_swarm_that_resumes_has_begun(monkeypatch):
    """Its members wait for each other too, but in a later round than the first."""
    with pytest.raises(NetworkError, match="The swarm is training, but its weights could not"):
        Swarm(monkeypatch, [member(10, "waiting")], given=[None]).join()


@pytest.mark.parametrize("given", [None, NetworkError("they are far apart.")])
def test_a_swarm_that_waits_is_not_said_to_train(monkeypatch, given):
    """The fault: the first rounds of own loops, who wait for each other, read as training."""
    swarm = Swarm(monkeypatch, [member(0, "waiting")], given=[given], task=OWN_LOOP)
    with pytest.raises(NetworkError) as caught:
        swarm.join(begun=False)
    why = "none of its members served them" if given is None else "they are far apart"
    assert str(caught.value) == (
        "The swarm has not begun, and the weights that it begins with could not be had from those "
        f"who wait in it ({why}): see that its creator's loop still runs, and join again."
    )


def test_another_model_is_said_whatever_the_members_answer(monkeypatch):
    for given in (None, NetworkError("no")):
        with pytest.raises(ModelDiffersError, match="does not fit the swarm"):
            Swarm(monkeypatch, [member(10)], given=[given]).join(model="2" * 64)

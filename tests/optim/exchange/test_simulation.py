"""The simulated exchange, who is paired with whom in it, and tensors that are computed when they
are taken.
"""

import hashlib
import itertools
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import (
    Faults,
    Mean,
    NoLoCo,
    RoundKey,
    Simulation,
    candidates,
    groups,
    order,
    partner_of,
    weighted_mean,
)
from shoal.optim.codecs.floats import BFLOAT16, FLOAT16, FLOAT32
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.on_demand import SLAB_VALUES, OnDemand, differences, slabs
from shoal.optim.exchange.weighted_mean import combined, counted_weights

PEERS = ["a", "b", "c", "d", "e"]
WAIT = 3.0


def one_hot(peer):
    return torch.eye(len(PEERS))[PEERS.index(peer)]


class Log:
    """Every peer's outcome of each round and the virtual seconds that it waited, dead peers
    included.
    """

    def __init__(self, simulation, rounds, pause):
        self.outcomes: dict[tuple[str, int], Mean | None] = {}
        self.waits: list[float] = []

        def peer(exchange):
            for round in range(rounds):
                exchange.sleep(pause(exchange.peer, round))
                before = simulation.now
                mean = exchange.start(
                    Contribution(RoundKey("run", round), [one_hot(exchange.peer)], weight=1.0)
                ).result()
                self.outcomes[exchange.peer, round] = mean
                self.waits.append(simulation.now - before)
            return simulation.now

        self.ends = simulation.run(peer)

    def bits(self):
        means = {
            at: mean and (mean.members, mean.tensors[0].tolist())
            for at, mean in self.outcomes.items()
        }
        return means, self.waits, self.ends


def times(values, count):
    """Return a pure function of (peer, round) in half seconds, so that many events are
    simultaneous.
    """
    return lambda peer, round: values[(PEERS.index(peer) * count + round) % len(values)] / 2


@pytest.mark.ci
@settings(max_examples=150)
@given(
    peers=st.integers(1, 5),
    size=st.integers(1, 4),
    seed=st.integers(0, 1000),
    pauses=st.lists(st.integers(0, 10), min_size=1, max_size=20),
    delays=st.lists(st.sampled_from([0, 0, 0, 1, 2, 5, 9]), min_size=1, max_size=20),
    drops=st.lists(st.booleans(), min_size=1, max_size=20),
    kills=st.dictionaries(
        st.sampled_from(PEERS), st.integers(0, 40).map(lambda x: x / 2), max_size=4
    ),
)
def test_faults_bound_waits_and_keep_commits_atomic(
    peers, size, seed, pauses, delays, drops, kills
):
    """Whatever goes wrong nobody waits longer and a group commits as a whole."""
    rounds = 4
    delay, drop = times(delays, rounds), times(drops, rounds)
    faults = Faults(
        lambda p, key: delay(p, key.round), lambda p, key: drop(p, key.round) > 0, kills
    )

    def once():
        return Log(
            Simulation(PEERS[:peers], seed=seed, size=size, wait=WAIT, faults=faults),
            rounds,
            times(pauses, rounds),
        )

    log = once()
    assert max(log.waits, default=0.0) <= WAIT
    assert set(PEERS[:peers]) - set(kills) <= set(log.ends)
    for (peer, round), mean in log.outcomes.items():
        if mean is None:
            continue
        assert peer in mean.members
        is_middle = size == 2 and len(mean.members) == 3
        assert 2 <= len(mean.members) <= size or is_middle
        counted = set(mean.members) - {peer} if is_middle else set(mean.members)
        whole = sum(one_hot(member) for member in counted) / len(counted)
        assert torch.allclose(mean.tensors[0], whole, rtol=0, atol=1e-7)
        assert mean.weight == len(mean.members)
        for member in mean.members:
            assert drop(member, round) == 0
            if (member, round) not in log.outcomes:
                assert member in kills
                continue
            theirs = log.outcomes[member, round]
            assert theirs is not None
            assert member == peer or {peer, member} <= set(theirs.members)
            if len(theirs.members) == len(mean.members):
                assert theirs.members == mean.members
                assert torch.equal(theirs.tensors[0], mean.tensors[0])
            else:
                assert size == 2
                assert {len(theirs.members), len(mean.members)} == {2, 3}
    for peer in log.ends:
        assert all((peer, round) in log.outcomes for round in range(rounds))
    assert once().bits() == log.bits()


@pytest.mark.parametrize("count", [3, 5])
def test_with_an_odd_number_nobody_is_left_out(count):
    """The last three of a round's order are a chain, whose middle exchanges with both ends and
    moves by the sum, so the mean over all peers stays where it is.
    """
    peers = PEERS[:count]
    log = Log(Simulation(peers, seed=4, wait=WAIT), 20, lambda peer, round: 1.0)
    assert log.waits == [0.0] * 20 * count
    for round in range(20):
        one, middle, other = order(4, round, peers)[-3:]
        found = {peer: log.outcomes[peer, round] for peer in peers}
        assert {peer: len(mean.members) for peer, mean in found.items()} == {
            **dict.fromkeys(peers, 2),
            middle: 3,
        }
        assert found[one].members == tuple(sorted((one, middle)))
        assert torch.equal(found[other].tensors[0], (one_hot(middle) + one_hot(other)) / 2)
        assert torch.equal(found[middle].tensors[0], (one_hot(one) + one_hot(other)) / 2)
        total = sum(mean.tensors[0] for mean in found.values())
        assert torch.equal(total, sum(one_hot(peer) for peer in peers))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_chain_parts_at_who_is_not_there(lost):
    peers = PEERS[:3]
    chain = order(4, 0, peers)
    faults = Faults(drop=lambda peer, key: peer == chain[lost])
    log = Log(Simulation(peers, seed=4, wait=WAIT, faults=faults), 1, lambda peer, round: 0.0)
    rest = {0: chain[1:], 1: [], 2: chain[:2]}[lost]
    members = {peer: mean and set(mean.members) for (peer, _), mean in log.outcomes.items()}
    assert members == {peer: set(rest) if peer in rest else None for peer in peers}


def test_late_partner_is_waited_for_up_to_the_wait():
    """A late partner is waited for but not longer than the wait."""
    log = Log(Simulation(["a", "b"], wait=WAIT), 1, lambda peer, round: 2.5 if peer == "b" else 0.0)
    assert log.outcomes["a", 0].members == ("a", "b")
    assert log.waits == [2.5, 0.0] or log.waits == [0.0, 2.5]
    log = Log(Simulation(["a", "b"], wait=WAIT), 1, lambda peer, round: 5.0 if peer == "b" else 0.0)
    assert log.outcomes == {("a", 0): None, ("b", 0): None}
    assert log.ends == {"a": WAIT, "b": 5.0}  # the late one finds nobody and goes on at once


def test_a_lost_contribution_leaves_its_whole_group_without_a_mean():
    faults = Faults(drop=lambda peer, key: (peer, key.round) == ("b", 1))
    log = Log(Simulation(PEERS, size=5, wait=WAIT, faults=faults), 3, lambda peer, round: 0.0)
    assert [[log.outcomes[peer, round] is None for peer in PEERS] for round in range(3)] == [
        [False] * 5,
        [True] * 5,
        [False] * 5,
    ]


def test_a_delayed_contribution_arrives_after_the_delay():
    log = Log(
        Simulation(["a", "b"], wait=WAIT, faults=Faults(delay=lambda peer, key: 1.25)),
        1,
        lambda peer, round: 0.0,
    )
    assert log.ends == {"a": 1.25, "b": 1.25}
    assert log.outcomes["a", 0].members == ("a", "b")


def test_survivors_pair_up_at_once():
    """When a peer dies the others pair up anew at once."""
    alive = {"a", "b", "c", "d", "e"} - {"c"}
    log = Log(
        Simulation(PEERS, wait=WAIT, faults=Faults(kill={"c": 5.5})), 20, lambda peer, round: 1.0
    )
    assert set(log.ends) == alive
    for round in range(6, 20):
        assert all(log.outcomes[peer, round] is not None for peer in alive)
    assert max(log.waits) == 0.0


def test_dead_waiting_peer_is_gone_at_once():
    """The dead waiting peer is gone even if another acts at the very moment."""
    log = Log(
        Simulation(["a", "b"], wait=WAIT, faults=Faults(kill={"b": 2.0})),
        1,
        lambda p, round: 2.0 if p == "a" else 0.0,
    )
    assert log.outcomes == {("a", 0): None}
    assert log.ends == {"a": 2.0}


def test_finished_peer_is_not_waited_for():
    """Nobody waits on for a peer that came to its end."""

    def peer(exchange):
        if exchange.peer == "b":
            exchange.sleep(1.0)
            return None
        assert exchange.start(Contribution(RoundKey("run", 0), [one_hot("a")])).result() is None
        return exchange.simulation.now

    assert Simulation(["a", "b"], wait=WAIT).run(peer) == {"a": 1.0, "b": None}


def test_a_shorter_deadline_counts_and_the_exchange_is_over_then():
    def peer(exchange):
        if exchange.peer == "b":
            exchange.sleep(2.0)
        handle = exchange.start(Contribution(RoundKey("run", 0), [one_hot(exchange.peer)]))
        waiting = not handle.done()
        first = handle.result(0.5)
        return waiting, first, handle.done(), handle.result(), exchange.simulation.now

    assert Simulation(["a", "b"]).run(peer) == {
        "a": (True, None, True, None, 0.5),
        "b": (False, None, True, None, 2.0),
    }


def test_the_contribution_is_copied_at_the_start():
    def peer(exchange):
        tensor = one_hot(exchange.peer).clone()
        handle = exchange.start(Contribution(RoundKey("run", 0), [tensor]))
        tensor.fill_(9.0)
        exchange.sleep(1.0)
        return handle.result().tensors[0]

    results = Simulation(["a", "b"]).run(peer)
    assert results["a"].tolist() == results["b"].tolist() == [0.5, 0.5, 0, 0, 0]
    results["a"].zero_()
    assert results["b"].tolist() == [0.5, 0.5, 0, 0, 0]


def test_peers_of_different_runs_never_meet():
    def peer(exchange):
        return exchange.start(
            Contribution(RoundKey(exchange.peer, 0), [one_hot(exchange.peer)])
        ).result()

    assert Simulation(["a", "b"], wait=WAIT).run(peer) == {"a": None, "b": None}


def test_exception_surfaces_and_others_finish():
    """An exception of a peer surfaces and the others come to their end."""
    ended = []

    def peer(exchange):
        for round in range(3):
            if exchange.peer == "b" and round == 1:
                raise ZeroDivisionError("my own bug")
            exchange.sleep(1.0)
            exchange.start(Contribution(RoundKey("run", round), [one_hot(exchange.peer)])).result()
        ended.append((exchange.peer, exchange.simulation.now))

    with pytest.raises(ZeroDivisionError, match="my own bug"):
        Simulation(["a", "b", "c"], wait=WAIT).run(peer)
    assert ended == [("a", 3.0), ("c", 3.0)]
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("peer-") and not thread.daemon
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_same_seed_gives_the_same_bits(seed):
    """Training gives the same bits for the same seed and others for another."""

    def peer(exchange):
        generator = torch.Generator().manual_seed(PEERS.index(exchange.peer))
        weight = torch.nn.Parameter(torch.zeros(50))
        opt = NoLoCo(torch.optim.AdamW([weight], lr=0.1), exchange, every=3, lag=0)
        for _ in range(30):
            opt.zero_grad()
            (weight - torch.randn(50, generator=generator)).square().sum().backward()
            opt.step()
            exchange.sleep(float(torch.rand((), generator=generator)))
        return weight.detach()

    def run(seed):
        delay, drop = (
            (lambda p, key: 0.3 * (key.round % 2)),
            (lambda p, key: p == "c" and key.round == 4),
        )
        faults = Faults(delay, drop, kill={"e": 9.0})
        return torch.stack(list(Simulation(PEERS, seed=seed, faults=faults).run(peer).values()))

    first = run(seed)
    assert first.shape == (4, 50)
    assert torch.equal(first, run(seed))
    assert not torch.equal(first, run(seed + 1))


def test_a_simulation_runs_once() -> None:
    simulation = Simulation(["a"])
    simulation.run(lambda exchange: None)
    with pytest.raises(RuntimeError, match="make a new one"):
        simulation.run(lambda exchange: None)


def test_tensors_of_finished_rounds_are_released() -> None:
    simulation = Simulation(["a", "b", "c"])

    def peer(exchange):
        for round in range(5):
            exchange.start(Contribution(RoundKey("r", round), [torch.zeros(4)])).result()

    simulation.run(peer)
    posted = [posted for round in simulation.rounds.values() for posted in round.posted.values()]
    assert len(posted) == 15
    assert all(not each.tensors for each in posted)


def test_groups_are_drawn_anew_each_epoch():
    """Groups stay for the rounds of an epoch and are then drawn anew."""
    log = Log(Simulation(PEERS, size=2, redrawn=4), 16, lambda peer, round: 0.0)
    members = [
        frozenset(log.outcomes[peer, round].members for peer in PEERS if log.outcomes[peer, round])
        for round in range(16)
    ]
    assert all(len(set(members[epoch : epoch + 4])) == 1 for epoch in range(0, 16, 4))
    assert len(set(members)) > 1


NAMED = st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=12)
SEEDS = st.integers(0, 2**63)
ROUNDS = st.integers(0, 10**9)


@given(SEEDS, ROUNDS, NAMED, st.randoms())
def test_both_sides_name_each_other_whatever_order_they_see(seed, round, peers, random):
    other_order = random.sample(peers, len(peers))
    alone = 0
    for me in peers:
        partner = partner_of(seed, round, me, [peer for peer in other_order if peer != me])
        if partner is None:
            alone += 1
        else:
            assert partner != me
            assert partner_of(seed, round, partner, peers) == me
    assert alone == len(peers) % 2


@given(SEEDS, ROUNDS, NAMED, st.integers(1, 5), st.randoms())
def test_everyone_is_in_exactly_one_group(seed, round, peers, size, random):
    found = groups(seed, round, peers, size)
    assert found == groups(seed, round, random.sample(peers, len(peers)) + peers, size)
    assert sorted(itertools.chain(*found)) == sorted(peers)
    assert all(len(group) == size for group in found[:-1])
    assert 1 <= len(found[-1]) <= size


@given(SEEDS, ROUNDS, NAMED)
def test_candidates_are_everyone_else_mate_first_then_onwards_from_me(seed, round, peers):
    ordered = order(seed, round, peers)
    assert sorted(ordered) == sorted(peers)
    for here, me in enumerate(ordered):
        found = candidates(seed, round, me, peers)
        assert sorted([*found, me]) == sorted(peers)
        partner = partner_of(seed, round, me, peers)
        onwards = [peer for peer in ordered[here + 1 :] + ordered[:here] if peer != partner]
        assert found == ([] if partner is None else [partner]) + onwards


@given(SEEDS, ROUNDS, NAMED, st.data())
def test_a_peer_that_sees_fewer_others_keeps_their_order(seed, round, peers, data):
    me = data.draw(st.sampled_from(peers))
    seen = data.draw(st.lists(st.sampled_from(peers), unique=True))
    full, partial = order(seed, round, peers), order(seed, round, {*seen, me})
    assert partial == [peer for peer in full if peer in {*seen, me}]


def test_order_is_the_documented_hash():
    """The order is by the documented hash so that other implementations can agree."""
    ordered = sorted(
        "abcd", key=lambda peer: hashlib.sha256(f"shoal/pairing/1:7:3:{peer}".encode()).digest()
    )
    assert order(7, 3, "dcba") == ordered
    assert groups(7, 3, "dcba") == [tuple(ordered[:2]), tuple(ordered[2:])]


def test_a_group_of_nobody_is_refused():
    with pytest.raises(ValueError, match="at least one peer, got size 0"):
        groups(0, 0, ["a"], 0)


def test_partners_are_uniform_and_fresh_each_round():
    peers = [f"peer-{index}" for index in range(8)]
    rounds = 2100
    met: dict[str, list[str]] = {peer: [] for peer in peers}
    for round in range(rounds):
        for a, b in groups(5, round, peers):
            met[a].append(b)
            met[b].append(a)
    for me in peers:
        assert len(met[me]) == rounds
        counts = Counter(met[me])
        expected = rounds / 7
        chi_square = sum((counts[peer] - expected) ** 2 / expected for peer in peers if peer != me)
        assert chi_square < 22.46  # 6 degrees of freedom: one in a thousand is above
        repeats = sum(a == b for a, b in itertools.pairwise(met[me]))
        assert abs(repeats - expected) < 4 * np.sqrt(
            expected
        )  # the last partner is as likely as any other


CONTRIBUTIONS = st.lists(
    st.tuples(
        st.floats(2**-6, 100, width=32),
        st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=3, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


def mean_of(contributions):
    return weighted_mean(
        [
            (peer, weight, [torch.tensor(v[:2]), torch.tensor(v[2])])
            for peer, weight, v in contributions
        ]
    )


@given(CONTRIBUTIONS, st.randoms())
def test_mean_does_not_depend_on_argument_order(given, random):
    """The mean has the same bits whatever the order of arguments."""
    named = [(f"peer-{index}", weight, values) for index, (weight, values) in enumerate(given)]
    first, second = mean_of(named), mean_of(random.sample(named, len(named)))
    assert first.members == second.members == tuple(sorted(peer for peer, _, _ in named))
    assert first.weight == second.weight
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))
    flat = torch.cat([t.reshape(-1) for t in first.tensors]).double().numpy()
    weights, _ = counted_weights([weight for _, weight, _ in named])
    expected = np.average([values for _, _, values in named], axis=0, weights=weights)
    scale = np.abs([values for _, _, values in named]).max() + 1e-30
    assert np.abs(flat - expected).max() <= 1e-6 * scale


@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-100),
        min_size=2,
        max_size=2,
    )
)
def test_the_mean_of_an_equal_pair_is_correctly_rounded(pair):
    mean = weighted_mean(
        [("b", 1.0, [torch.tensor([pair[0]])]), ("a", 1.0, [torch.tensor([pair[1]])])]
    )
    assert mean.tensors[0].item() == np.float32((np.float64(pair[0]) + np.float64(pair[1])) / 2)
    assert mean.members == ("a", "b")


SHAPES = [(3, 5), (), (SLAB_VALUES + 7,), (0,), (2, 2)]


def made(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_difference_has_the_same_values_whole_and_in_pieces(dtype):
    slow, fast = made(0, dtype), made(1, dtype)
    lazy, whole = differences(slow, fast), [s - f for s, f in zip(slow, fast, strict=True)]
    assert lazy.shapes == SHAPES
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(lazy, whole, strict=True))
    pieces = [[] for _ in whole]
    for place, start, stop in slabs(lazy):
        assert stop - start <= SLAB_VALUES
        pieces[place].append(lazy.values(place, start, stop))
    for found, tensor in zip(pieces, whole, strict=True):
        assert torch.equal(
            torch.cat(found) if found else torch.zeros(0), tensor.reshape(-1).float()
        )


def test_taken_slices_are_computed_lazily():
    """What is taken follows its parts and a slice is computed later too."""
    slow, fast = made(0), made(1)
    part = OnDemand([*slow, *zip(slow, fast, strict=True)])[len(slow) :]
    fast[0].add_(1)
    assert torch.equal(part[0], slow[0] - fast[0])
    assert len(part.joined([torch.ones(1)])) == len(SHAPES) + 1


@pytest.mark.parametrize(
    "weights", [(1.0, 1.0, 1.0), (3.0, 1.0, 0.5), (1.0, 0.0, 2.0), (0.0, 0.0, 0.0)]
)
@pytest.mark.parametrize("lender", ["a", "b", "c"])
@pytest.mark.parametrize("unweighted_count", [0, 2])
def test_mean_of_lent_tensors_changes_none(weights, lender, unweighted_count):
    """A mean of lent tensors has the bits of a plain one and changes none of them."""
    names = "abc"
    plain = weighted_mean(
        [
            (name, weight, made(number))
            for number, (name, weight) in enumerate(zip(names, weights, strict=True))
        ],
        unweighted_count,
    )
    own = made(names.index(lender))
    given = [
        (name, weight, OnDemand(own) if name == lender else made(number))
        for number, (name, weight) in enumerate(zip(names, weights, strict=True))
    ]
    mean = weighted_mean(given, unweighted_count)
    assert (mean.members, mean.weight, mean.counted, mean.limit) == (
        plain.members,
        plain.weight,
        plain.counted,
        plain.limit,
    )
    assert all(torch.equal(a, b) for a, b in zip(mean.tensors, plain.tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own, made(names.index(lender)), strict=True))


@pytest.mark.parametrize("partner", [1.0, 0.0])
def test_pair_mean_reuses_the_partners_tensors(partner):
    """A pairs mean is computed in what came from the partner."""
    own, theirs = made(0), made(1)
    places = [tensor.data_ptr() for tensor in theirs]
    mean = weighted_mean([("a", 1.0, OnDemand(own)), ("b", partner, theirs)])
    assert [tensor.data_ptr() for tensor in mean.tensors] == places


def test_a_mean_of_lent_tensors_alone_is_a_copy():
    own = made(0)
    (alone,) = [combined([("a", 2.0, OnDemand(own))])]
    assert all(torch.equal(a, b) for a, b in zip(alone, own, strict=True))
    alone[0].add_(1)
    assert torch.equal(own[0], made(0)[0])


@pytest.mark.parametrize("codec", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda codec: codec.name)
def test_values_are_rounded_as_if_they_had_travelled(codec):
    tensors = made(0)
    rounded = OnDemand(tensors).rounded(codec.dtype)
    decoded = codec.decode(codec.encode(tensors), SHAPES)
    assert all(torch.equal(a, b) for a, b in zip(rounded, decoded, strict=True))
    assert all(
        torch.equal(rounded.values(at, i, j), decoded[at].reshape(-1)[i:j])
        for at, i, j in slabs(rounded)
    )


def test_two_peers_of_one_id_are_refused():
    with pytest.raises(
        ValueError, match=r"^two peers have the same id: give each an id of its own"
    ):
        Simulation(["anna", "anna"])

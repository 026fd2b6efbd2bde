"""Calls in place of rounds, as bench/calls.py simulates them: who meets whom, and that the
product's optimizer does with it what it does in a `Simulation`.
"""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from bench import _calls_protocol as protocol
from bench import calls as bench
from bench._calls_protocol import (
    AGREED,
    DESIGNED,
    Calls,
    NoTraining,
    Rounds,
    Setting,
    State,
    turn_of_equal_bytes,
)
from bench._calls_train import Models, run
from bench._table import text, train

PROTOCOLS = {
    "rounds": Rounds,
    "calls": lambda setting, training: Calls(setting, training, DESIGNED),
    "agreed": lambda setting, training: Calls(setting, training, AGREED),
}
UNLIKE = (1.0, 1.0, 2.0, 4.0)


class Log:
    """Checks what a world asks for, and when."""

    def __init__(self, peers):
        self.world = None
        self.times = [[] for _ in range(peers)]
        self.staged = set()
        self.outcomes = {}
        self.pairs = []

    def step(self, peer, applied, staged):
        self.times[peer].append(self.world.now)
        for fragment, lag in applied:
            assert lag >= 1
            assert self.outcomes.pop((peer, fragment))
        for fragment in staged:
            assert (peer, fragment) not in self.staged
            assert (peer, fragment) not in self.outcomes
            self.staged.add((peer, fragment))

    def exchange(self, fragment, one, other):
        self.pairs.append((self.world.now, fragment, one, other))
        for peer in (one, other):
            self.staged.remove((peer, fragment))
            self.outcomes[peer, fragment] = "mean"

    def alone(self, fragment, peer):
        self.staged.remove((peer, fragment))
        self.outcomes[peer, fragment] = "none"


@pytest.mark.parametrize("how", PROTOCOLS)
@pytest.mark.parametrize("speeds", [(1.0,), UNLIKE])
@pytest.mark.parametrize("peers", [2, 3, 8])
def test_nobody_waits_and_both_or_neither(how, peers, speeds):
    log = Log(peers)
    world = PROTOCOLS[how](Setting(peers, 0.6, 300, speeds), log)
    log.world = world
    world.run()
    for peer, times in zip(world.peers, log.times, strict=True):
        assert len(times) == peer.steps
        assert all(
            after - before == pytest.approx(peer.step_time) for before, after in pairwise(times)
        )
    assert not log.staged
    for peer in world.peers:
        assert peer.held is None
        assert all(slot.state in (State.IDLE, State.LANDED) for slot in peer.slots)
    assert 2 * len(log.pairs) == world.counts.exchanges.total() > 0


@pytest.mark.parametrize("how", ["calls", "agreed"])
def test_a_link_has_one_transfer_at_a_time(how):
    log, setting = Log(8), Setting(8, 0.6, 300)
    world = PROTOCOLS[how](setting, log)
    log.world = world
    world.run()
    for peer in range(8):
        ends = [now for now, _, *pair in log.pairs if peer in pair]
        assert all(after - before >= setting.transfer_steps for before, after in pairwise(ends))


def test_rounds_are_those_of_the_product():
    """Fragments are 6 or 7 steps apart, and of an odd number one peer is left over in each."""
    log = Log(3)
    world = Rounds(Setting(3, 0.3, 50), log)
    log.world = world
    world.run()
    assert [(now, fragment) for now, fragment, *_ in log.pairs] == [
        (at + 0.25 + 0.3 * 25 / 4, number % 4) for number, at in enumerate(TIMES)
    ]
    assert world.counts.alone == {"odd": 8}
    assert world.counts.row()["exchanges"] == pytest.approx(2 / 3, abs=1e-4)
    assert world.counts.row()["lag"] == 3


TIMES = (6, 12, 18, 25, 31, 37, 43, 50)


@pytest.mark.parametrize("rules", [DESIGNED, AGREED])
def test_turns_make_one_exchange_a_round_at_most(rules):
    setting = Setting(4, 0.1, 3000)
    longer = turn_of_equal_bytes(setting, rules)
    calls = Calls(Setting(4, 0.1, 3000, turn=longer), NoTraining(), rules)
    calls.run()
    assert longer > setting.turn
    assert calls.counts.row()["exchanges"] == pytest.approx(1, abs=0.03)
    busier = Setting(4, 0.9, 3000)
    assert turn_of_equal_bytes(busier, rules) == busier.turn


@pytest.mark.parametrize("rules", [DESIGNED, AGREED])
def test_of_crossing_calls_the_lower_one_stands(rules):
    """Both have their turn at the same boundary: they exchange once, and neither is alone."""
    calls = Calls(Setting(2, 0.1, 10), NoTraining(), rules)
    for peer in calls.peers:
        peer.begin = 0.0
        for slot in peer.slots:
            slot.turn_at = 3.0 if slot.fragment == 1 else 1e9
    calls.run()
    assert calls.counts.exchanges == {0: 1, 1: 1}
    assert calls.counts.asked == 2
    assert not calls.counts.alone
    assert not calls.counts.answers


def test_two_turns_in_a_row_are_never_left_out():
    """Else whoever calls a peer often would end its own turns."""
    calls = Calls(Setting(2, 0.1, 10), NoTraining(), AGREED)
    peer = calls.peers[0]
    slot = peer.slots[0]
    made = []
    for _ in range(6):
        slot.was_called = True
        calls._turn(peer, slot)
        made.append(slot.waits_since is not None)
        slot.waits_since = None
    assert made == [False, True] * 3


def test_a_peer_accepts_as_many_calls_as_it_has_tokens():
    calls = Calls(Setting(5, 0.1, 10), NoTraining(), DESIGNED)
    peer, *callers = calls.peers
    slot = peer.slots[0]
    for caller in callers:
        calls._answer(caller, peer, caller.slots[0])
        slot.state = State.IDLE
    assert calls.counts.answers == {"token": 2}
    calls._turn(peer, slot)
    calls._answer(callers[0], peer, callers[0].slots[0])
    assert calls.counts.answers == {"token": 2}
    assert slot.state is State.AGREED


def test_a_fragment_on_its_way_is_not_free():
    calls = Calls(Setting(2, 0.1, 10), NoTraining(), DESIGNED)
    caller, peer = calls.peers
    for state in set(State) - {State.IDLE}:
        peer.slots[0].state = state
        assert calls._problem(caller, peer, peer.slots[0]) == "fragment"


def test_a_peer_holds_one_call_while_it_sends():
    calls = Calls(Setting(3, 0.1, 10), NoTraining(), AGREED)
    caller, peer, late = calls.peers
    peer.slots[3].state = State.CALLING
    calls._answer(caller, peer, caller.slots[0])
    assert calls.counts.answers == {"link": 1}
    peer.slots[3].state = State.MOVING
    calls._answer(caller, peer, caller.slots[0])
    calls._answer(late, peer, late.slots[1])
    assert peer.held.caller is caller
    assert peer.slots[0].state is State.IDLE
    assert calls.counts.answers == {"link": 1, "held": 1}


def test_who_has_met_lately_is_refused_by_design():
    calls = Calls(Setting(4, 0.1, 100), NoTraining(), DESIGNED)
    caller, peer = calls.peers[:2]
    slot = peer.slots[0]
    slot.met_at[0] = 0
    peer.done = 42
    assert calls._problem(caller, peer, slot) == "met lately"
    peer.done = 43  # one and a half turns of 28.25 steps
    assert calls._problem(caller, peer, slot) is None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = "".join(f"line {number} of text, as plain as it can be\n" for number in range(2_000))
    (folder / "one.txt").write_text(lines)
    (folder / "two.txt").write_text(lines[::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "LEAST", 2**14)
        patch.setattr(text, "PIECE", 2**11)
        patch.setitem(train.SIZES, "mini", train.Size(2, 8, 1, 16, 300, 8, 24, 24))
        patch.setattr(train, "marks", lambda steps, every: [])
        patch.setattr(train, "lag", lambda *method: 3)
        cache = tmp_path_factory.mktemp("cache")
        yield train.Place(cache), text.corpus(folder, 300, cache).digest


def test_rounds_have_the_bits_of_the_simulation(place):
    """Of transfers of 2.1 steps the mean is applied after 3."""
    where, digest = place
    case = bench.case(digest, 4, 60, 0, "rounds", 0.3, (1.0,))
    simulated = train.run(train.Spec(*(getattr(case, name) for name in SPEC)), where)
    found = run(case, where)
    assert [found[name] for name in ("loss", "validation", "lag")] == [
        simulated["loss"],
        simulated["validation"],
        3,
    ]


SPEC = train.Spec.__dataclass_fields__


@pytest.mark.parametrize("how", ["calls", "agreed"])
def test_an_exchange_keeps_the_sum_of_a_pair(place, how, monkeypatch):
    where, digest = place
    case = bench.case(digest, 3, 40, 0, how, 0.3, UNLIKE)
    sums = []
    exchange = Models.exchange

    def checked(self, fragment, one, other):
        outcomes = [self.staged[peer].outcomes[fragment] for peer in (one, other)]
        exchange(self, fragment, one, other)
        for both in zip(*(outcome.mean.tensors for outcome in outcomes), strict=True):
            sums.append(sum(both))
        for both in zip(*(outcome.message.tensors() for outcome in outcomes), strict=True):
            torch.testing.assert_close(sums.pop(0), sum(both), rtol=0, atol=1e-6)

    monkeypatch.setattr(Models, "exchange", checked)
    found = run(case, where)
    assert found["exchanges"] > 0.3
    assert sums == []


def test_a_run_that_diverges_has_no_loss(place):
    where, digest = place
    case = bench.case(digest, 2, 30, 0, "calls", 0.3, (1.0,))
    found = run(replace(case, lr=math.inf), where)
    assert found["loss"] is None
    assert "loss is nan" in found["diverged"]
    assert bench.table([found]).endswith("|")


def test_what_was_run_is_not_run_again(place, called, tmp_path, monkeypatch):
    where, digest = place
    monkeypatch.setattr(bench, "corpus", lambda *options: type("Text", (), {"digest": digest}))
    monkeypatch.setattr(bench, "Place", lambda cache: where)
    file = tmp_path / "calls.jsonl"
    short = ("--peers", "2", "--links", ".3", "--steps", "50", "--seeds", "1", "--resume", file)
    said = called(bench.main, *short).stdout
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(result["how"], len(result["speeds"])) for result in results] == [
        (how, count) for count in (1, 4) for how in ("rounds", "calls", "agreed")
    ]
    loss = [result["loss"] for result in results]
    averaged = [result["averaged"] for result in results]
    assert f"{loss[0]:.4f} |  | {averaged[0]:.4f} |  | 1 | 0 | 0 | 0 | 0 | 3 | 1.13" in said
    for now, before in ((loss[1], loss[0]), (averaged[1], averaged[0])):
        assert f"{now:.4f} | {now / before - 1:+.2%} |" in said
    assert called(bench.main, *short).stdout == said
    assert called(bench.main, "--report", file).stdout == said
    assert len(file.read_text().splitlines()) == len(results)


def test_counts_need_no_text(called, monkeypatch):
    monkeypatch.setattr(protocol, "CALIBRATION_STEPS", 300)
    monkeypatch.setattr(bench, "COUNTED_STEPS", 1500)
    said = called(bench.main, "--counts", "--peers", "2,4", "--links", ".3", "--speeds", "alike")
    rows = [line.split(" | ") for line in said.stdout.splitlines()[2:]]
    assert [row[:4] for row in rows] == [
        [f"| {peers}", "alike", "30%", how]
        for peers in (2, 4)
        for how in ("rounds", "calls", "agreed")
    ]
    # Two peers differ by what they learnt in the last 3 to 27 steps, in which 25 are 1.
    assert float(rows[0][4]) == pytest.approx(15 / 25, abs=0.03)
    assert float(rows[3][4]) > 1.5 * float(rows[0][4])


@pytest.mark.parametrize("option", ["--peers 1", "--links 2", "--how magic", "--speeds x"])
def test_a_wrong_option_is_named(refused, option):
    assert option.split()[0] in refused(bench.main, *option.split())

"""``shoal demo``: what a newcomer sees first."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.node.checkpoint import store
from shoal.node.tasks.loader import load_task
from shoal.swarm.topics.status import GAP_S, RECEIPTS_S

FIELDS = {
    "peers",
    "method",
    "rounds",
    "steps",
    "loss_first",
    "loss_last",
    "loss_local",
    "exchanges",
    "pairs_none",
    "bytes_sent",
    "gossip_sent",
    "bytes_received",
    "wait_s",
    "wall_s",
    "spread",
    "params",
    "start_s",
    "seconds",
}
FAILING = f"{Path(__file__).with_name('failing_trial_task.py')}:Failing"
EXCHANGE_BYTES = 700
"""Of an exchange beside its payload, that a node sends at most: of four nodes on text 570."""
MEMBERSHIP_BYTES_PER_S = 250
"""Of a node to be among the members, at most: records of all, once a minute; of four nodes 120."""
START_BYTES = 20_000
"""Of a node to join, and to make the last average, beside the weights, at most."""
RECORDS_PER_S = 1 / GAP_S + 1 / RECEIPTS_S
"""Of gossip of a node, at most."""
RECORD_BYTES = 1_500
"""Of a status, which has the last six rounds, on average at most: of four nodes 1,250."""
TEACHER = f"{Path(__file__).parents[2] / 'examples' / 'custom_model.py'}:Teacher"


def checked(report, peers, rounds, every, bytes_a_value=17 / 32):
    """The report, after what holds in every demo has been seen to hold."""
    assert set(report) >= FIELDS
    assert (report["peers"], report["rounds"], report["steps"]) == (peers, rounds, rounds * every)
    # At the end the steps since each fragment's last round are sent in one more; the last has none.
    exchanges = rounds * report["fragments"] + report["fragments"] - 1
    assert (report["exchanges"], report["pairs_none"]) == (exchanges * peers // 2, 0)
    # Every node sends its whole model once a round: by default 4 bits a value, and two bytes for
    # each block of 64. In the last average it is float32: to all others, or all-reduced by four.
    at_end = 2 * (peers - 1) / peers if peers >= 4 else peers - 1
    payload = report["params"] * peers * (bytes_a_value * rounds + 4 * at_end)
    last_steps = report["params"] * peers * bytes_a_value
    seconds = report["start_s"] + report["wall_s"]
    headers = peers * (exchanges * EXCHANGE_BYTES + seconds * MEMBERSHIP_BYTES_PER_S + START_BYTES)
    sent = report["bytes_sent"] - report["gossip_sent"]
    assert payload < sent < payload + last_steps + headers
    # Gossip goes by the time: a record of a node reaches each other from all that have it, at most.
    records = peers * seconds * RECORDS_PER_S
    assert 0 < report["gossip_sent"] < records * (peers - 1) ** 2 * RECORD_BYTES
    # Among themselves: what one sends another receives, but for what is under way at the end.
    assert report["bytes_received"] == pytest.approx(report["bytes_sent"], rel=0.01)
    assert len(report["spread"]) == rounds
    assert all(0 <= spread < 1 for spread in report["spread"])
    assert 0 <= report["wait_s"] < report["wall_s"] < report["seconds"]
    assert 0 < report["start_s"] < report["seconds"]
    assert all(math.isfinite(report[key]) for key in ("loss_first", "loss_last", "loss_local"))
    assert report["loss_last"] < report["loss_first"]
    return report


@pytest.mark.slow(reason="four real nodes, twice; .ci/run runs the same demo and checks its report")
def test_four_nodes_train_together_on_the_text_of_this_machine(shoal):
    demo = shoal.start("demo", "--rounds", "6", "--peers", "4", "--every", "10", "--json")
    report = checked(demo.json(150), 4, 6, 10)
    assert (report["method"], report["params"]) == ("noloco", 135_808)
    assert abs(report["loss_first"] - math.log(256)) < 0.5
    assert "round 6 of 6" in demo.said()
    assert shoal.left() == []
    assert not list(shoal.tmp.glob("shoal-demo-*"))


@pytest.mark.slow(reason="sixteen real nodes share the processors: minutes on a busy machine")
def test_sixteen_nodes_find_partners_and_end(shoal):
    """Sixteen nodes start find partners and are gone in the end."""
    demo = shoal.start(
        "demo", "--peers", "16", "--rounds", "4", "--every", "10", "--no-compare", "--json"
    )
    report = demo.json(580)
    assert (report["peers"], report["rounds"], report["steps"]) == (16, 4, 40)
    assert len(report["spread"]) in (
        3,
        4,
    )  # a node that comes a round late takes over the weights of that round
    # How many meet where a round takes a second depends on the machine: of 256, 99 to 127 pairs on
    # two processors.
    assert report["exchanges"] >= 16 * report["fragments"]
    assert report["loss_last"] < report["loss_first"]
    assert 0 < report["start_s"] < report["seconds"]
    assert shoal.left() == []
    assert not list(shoal.tmp.glob("shoal-demo-*"))


@pytest.mark.slow(reason="two real nodes, twice")
def test_a_model_of_ones_own_and_plain_averaging(shoal):
    few = [
        "--peers",
        "2",
        "--rounds",
        "8",
        "--every",
        "10",
        "--set",
        "outer.lag=0",
        "--codec",
        "float32",
    ]
    demo = shoal.start("demo", "--task", TEACHER, *few, "--method", "local", "--json")
    report = checked(demo.json(150), 2, 8, 10, bytes_a_value=4)
    assert report["method"] == "local"
    # With two peers the mean of both is the mean of all, so they agree after every round.
    assert report["spread"] == pytest.approx([0] * 8, abs=1e-6)
    assert shoal.left() == []


@pytest.mark.slow(reason="two real nodes")
def test_without_a_comparison_nothing_is_trained_twice(shoal):
    demo = shoal.start(
        "demo",
        "--task",
        TEACHER,
        "--peers",
        "2",
        "--rounds",
        "4",
        "--every",
        "5",
        "--no-compare",
        "--json",
    )
    report = demo.json(150)
    assert (report["rounds"], report["loss_local"]) == (4, None)
    assert report["loss_last"] < report["loss_first"]
    assert "to compare" not in demo.said()


def slow_weights(kept, peers):
    """The slow weights in the last checkpoint of each node."""
    folders = [kept / f"peer-{number}" for number in range(peers)]
    return [store.load(folder)[1]["trainer"]["optimizer"]["slow"] for folder in folders]


@pytest.mark.slow(reason="three real nodes")
def test_three_nodes_end_with_equal_models(shoal):
    """Pairs leave one of three out in each round, and so three models."""
    report = shoal.start(
        "demo",
        "--task",
        TEACHER,
        "--peers",
        "3",
        "--rounds",
        "4",
        "--every",
        "5",
        "--no-compare",
        "--keep",
        "kept",
        "--json",
        "--set",
        "outer.lag=0",
        "--set",
        "outer.fragments=1",
    ).json(150)
    kept = shoal.home / "kept"
    task = load_task(TEACHER, {})
    model = task.model()

    def loss(weights):
        with torch.no_grad():
            for parameter, tensor in zip(model.parameters(), weights, strict=True):
                parameter.copy_(tensor)
        return float(task.evaluate(model))

    last = [
        load_file(kept / f"peer-{number}" / "rounds" / "000004.safetensors") for number in range(3)
    ]
    before = [[one[str(number)] for number in range(len(one))] for one in last]
    by_hand = [torch.stack(tensors).double().mean(0) for tensors in zip(*before, strict=True)]
    assert report["spread"][-1] > 0.001
    assert report["ended"]["members"] == 3
    models = slow_weights(kept, 3)
    for other in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0], other, strict=True))
    assert loss(models[0]) == pytest.approx(loss(by_hand), rel=0.005)
    for number, own in enumerate(before):
        result = json.loads((kept / f"peer-{number}" / "result.json").read_text())
        assert result["last_average"]["members"] == ["peer-0", "peer-1", "peer-2"]
        assert result["last_average"]["loss_before"] == pytest.approx(loss(own), rel=1e-4)
        assert result["last_average"]["loss_after"] == pytest.approx(loss(models[0]), rel=1e-4)
        assert result["loss"]["held_out"] == result["last_average"]["loss_after"]


@pytest.mark.slow(reason="two real nodes, twice")
def test_other_method_ends_with_one_model(shoal):
    """Another method in 8 bits and one model of it in the end."""
    demo = shoal.start(
        "demo",
        "--task",
        TEACHER,
        "--peers",
        "2",
        "--rounds",
        "4",
        "--every",
        "5",
        "--method",
        "gasloc",
        "--codec",
        "int8",
        "--set",
        "outer.finish=average",
        "--set",
        "outer.lag=2",
        "--keep",
        "kept",
        "--json",
    )
    report = demo.json(150)
    # The last average is of float32, and no round.
    assert (report["method"], report["rounds"], report["steps"]) == ("gasloc", 4, 20)
    # What was learnt since each fragment's last exchange goes first: since that of the last
    # fragment, nothing.
    assert report["exchanges"] == 4 * report["fragments"] + (report["fragments"] - 1)
    assert report["spread"][-1] > 0.001
    assert report["ended"]["members"] == 2
    assert (
        report["params"] * (4 * 1 + 4) * 2
        < report["bytes_sent"] - report["gossip_sent"]
        < report["params"] * (5 * 1.1 + 4) * 2 + 15 * 20_000
    )
    kept = shoal.home / "kept"
    merged = shoal.start(
        "merge", kept / "peer-0", kept / "peer-1", "--slow", "--out", "one.safetensors", "--json"
    ).json(60)
    assert merged["values"] == report["params"]
    model = load_task(TEACHER, {}).model()
    model.load_state_dict(load_file(shoal.home / "one.safetensors"))
    for weights in slow_weights(kept, 2):
        for mean, own in zip(model.parameters(), weights, strict=True):
            assert torch.equal(mean, own)
    assert "exists" in shoal.start("merge", kept / "peer-0", "--out", "one.safetensors").error()


@pytest.mark.slow(reason="four real nodes train for forty rounds, twice")
def test_forty_rounds_together_are_better_than_alone(shoal):
    demo = shoal.start("demo", "--json")
    report = checked(demo.json(280), 4, 40, 25)
    assert report["loss_last"] < 0.96 * report["loss_local"]
    assert report["loss_last"] < 0.6 * report["loss_first"]
    assert report["spread"][-1] < 0.7 * max(report["spread"])


@pytest.mark.ci
def test_trial_error_is_shown_as_it_is(shoal):
    """The fault: "no partner", advice about the length of rounds, exit code 0, and "better
    together" of one node alone.
    """
    demo = shoal.start(
        "demo",
        "--task",
        FAILING,
        "--peers",
        "2",
        "--rounds",
        "4",
        "--every",
        "5",
        "--keep",
        "kept",
        "--set",
        "outer.check_loss=true",
    )
    assert demo.wait(120) == 6
    planted = "RuntimeError: planted in the trial"
    shown = "\n".join(demo.lines)
    assert "nothing was exchanged, so each node trained alone" in shown
    # 2 nodes, 4 rounds, 4 fragments.
    assert "errors in the nodes' own code, and not in the network, ended 32 exchanges" in shown
    assert "better together" not in shown
    own = "ended by an error in a node's own code"
    rounds = re.findall(rf"round (\d) of 4: .* 0 without a partner, (\d+) {own}", demo.said())
    # 2 nodes and 4 fragments.
    assert rounds[-1] == ("4", "8")
    assert {int(failed) for number, failed in rounds if number != "4"} <= {8}
    for name in ("peer-0", "peer-1"):
        folder = shoal.home / "kept" / name
        result = json.loads((folder / "result.json").read_text())
        exchanges = result["exchanges"]
        assert (exchanges["with_partner"], exchanges["without_partner"], exchanges["failed"]) == (
            0,
            0,
            16,
        )
        assert planted in result["trained_alone"]
        assert result["internal_errors"]["trial"]["count"] == exchanges["failed"]
        assert planted in result["internal_errors"]["trial"]["first"]
        log = (folder / "node.log").read_text()
        assert log.count("Traceback (most recent call last)") >= 1
        assert log.count("further ones like it are only counted") == 1
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rounds = [event for event in events if event["event"] == "round"]
        assert all(planted in event["error"] and not event["why"] for event in rounds)
        assert [event for event in events if event["event"] == "internal_errors"][-1]["trial"] >= 1
        said = [event["said"] for event in events if event["event"] == "diagnosis"]
        assert any("this node trains alone: an error in its own code" in line for line in said)
        assert not any("--round seconds:auto" in line or "no partner" in line for line in said)

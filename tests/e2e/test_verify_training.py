"""Five real nodes that do each other's training steps again; one of them hardly trains (cheat.py)."""

import json
import signal
from pathlib import Path

import pytest

CHEAT = Path(__file__).parent / "cheat.py"
HONEST = [f"honest{number}" for number in range(4)]
ROUND_S = 20.0


def of(shoal, name, event):
    return [found for found in shoal.metrics(name) if found["event"] == event]


def banned(shoal, name):
    """Who is banned in the newest table of a node."""
    events = of(shoal, name, "verify")
    return set(events[-1]["banned"]) if events else set()


@pytest.mark.slow(reason="real nodes repeat each other's steps")
@pytest.mark.timeout(900)
def test_who_does_not_do_the_steps_that_it_claims_is_banned_and_nobody_else(shoal, eventually):
    settings = shoal.toml(
        swarm={"start_when": 5}, train={"steps": 0}, outer={"every": 100},
        verify={"kind": "training", "audit_rate": 1.0, "claims": 1, "round_s": ROUND_S, "planted": 0.0},
    )  # fmt: skip
    own = ("--set", "node.verify_seconds=30")
    nodes = {HONEST[0]: shoal.node("up", settings, HONEST[0], *own)}
    link = nodes[HONEST[0]].line(0, 120)
    for name in HONEST[1:]:
        nodes[name] = shoal.node("join", link, name, *own)
    nodes["idle"] = shoal.node("join", link, "idle", *own, program=(CHEAT, "idle"))
    peers = {name: eventually(lambda name=name: of(shoal, name, "start"), 240, f"the start of {name}")[0]["peer"] for name in nodes}
    guilty = {peers["idle"]}
    eventually(lambda: all(banned(shoal, name) >= guilty for name in HONEST), 500, "the ban")
    seen = shoal.start("peers", link, "--json").json(90)
    assert {one["peer"] for one in seen["peers"] if one["banned_until"] is not None} == guilty
    assert (seen["verify"], seen["agree"]) == ("training", seen["asked"])
    for name in nodes:
        nodes[name].signal(signal.SIGINT)
    for name in nodes:
        assert nodes[name].wait(120) == 130, nodes[name].said()
    results = {name: shoal.result(name) for name in HONEST}
    for name in HONEST:
        found = results[name]["verify"]
        said = {key: value for key, value in found.items() if key != "standings"}
        print(json.dumps({"node": name, "steps": results[name]["steps"], "wall_s": results[name]["wall_s"], **said}))
        assert {peer for peer, standing in found["standings"].items() if standing["banned_until"] is not None} == guilty
        assert found["valid"] >= 2
        assert found["invalid"] >= 1
        for peer in set(peers.values()) - guilty:
            assert found["standings"][peer]["claims"]["invalid"] == 0
        assert results[name]["exchanges"] > 0  # training goes on, together
    standing = results[HONEST[0]]["verify"]["standings"]
    print(json.dumps({name: standing[peer] for name, peer in peers.items()}))
    assert "do not lead to the claimed weights" in "".join(nodes[name].said() for name in HONEST)
    assert shoal.left() == []

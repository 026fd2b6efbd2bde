"""Seven real nodes that verify each other, two of which cheat (cheat.py)."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from shoal.node.runtime.compute_last import COMPUTING_NICENESS
from shoal.node.verify.claim_file import load_claim

CHEAT = Path(__file__).parent / "cheat.py"
HONEST = [f"honest{number}" for number in range(5)]
ROUND_S = 20.0


def of(shoal, name, event):
    return [found for found in shoal.metrics(name) if found["event"] == event]


def banned(shoal, name):
    """Who is banned in the newest table of a node."""
    events = of(shoal, name, "verify")
    return set(events[-1]["banned"]) if events else set()


@pytest.mark.slow(reason="real nodes vote for several rounds of seconds")
@pytest.mark.timeout(900)
def test_who_quantises_and_who_copies_are_banned_and_nobody_else(shoal, eventually):
    settings = shoal.toml(
        task={"hooks": "rl"},
        rl={"policy": "tiny:copy:60", "held_out": 50, "group": 8, "max_tokens": 12},
        swarm={"start_when": 7},
        verify={"audit_rate": 1.0, "round_s": ROUND_S},
        options={"families": "last"},
    )
    own = (
        "--set",
        "rl.local=1",
        "--set",
        "rl.external=1",
        "--policy",
        "tiny:copy:60",
        "--set",
        "rl.held_out=50",
    )
    nodes = {HONEST[0]: shoal.node("up", settings, HONEST[0], *own)}
    link = nodes[HONEST[0]].line(0, 120)
    for name in HONEST[1:]:
        nodes[name] = shoal.node("join", link, name, *own)
    for kind in ("quantised", "copier"):
        nodes[kind] = shoal.node("join", link, kind, *own, program=(CHEAT, kind))
    peers = {
        name: eventually(lambda name=name: of(shoal, name, "start"), 240, f"the start of {name}")[
            0
        ]["peer"]
        for name in nodes
    }
    guilty = {peers["quantised"], peers["copier"]}
    trains = nodes[HONEST[0]].popen.pid
    rest = [thread for thread in map(int, os.listdir(f"/proc/{trains}/task")) if thread != trains]
    # So that its votes are in time.
    assert os.getpriority(os.PRIO_PROCESS, trains) >= COMPUTING_NICENESS
    assert os.getpriority(os.PRIO_PROCESS, 0) in {
        os.getpriority(os.PRIO_PROCESS, thread) for thread in rest
    }
    eventually(lambda: all(banned(shoal, name) >= guilty for name in HONEST), 500, "the bans")
    seen = shoal.start("peers", link, "--json").json(90)
    assert {one["peer"] for one in seen["peers"] if one["banned_until"] is not None} == guilty
    assert seen["agree"] == seen["asked"] == 5
    for name in nodes:
        nodes[name].signal(signal.SIGINT)
    for name in nodes:
        assert nodes[name].wait() == 130, nodes[name].said()
    results = {name: shoal.result(name)["verify"] for name in HONEST}
    names = {peer: name for name, peer in peers.items()}
    stalls = {
        name: max(
            after["time"] - before["time"]
            for before, after in itertools.pairwise(of(shoal, name, "rl"))
        )
        for name in HONEST
    }
    standings = {names[peer]: found for peer, found in results[HONEST[0]]["standings"].items()}
    print(json.dumps({"standings": standings, "longest_round_s": stalls}))
    print(
        json.dumps(
            {
                name: {key: value for key, value in found.items() if key != "standings"}
                for name, found in results.items()
            }
        )
    )
    for found in results.values():
        assert {
            peer
            for peer, standing in found["standings"].items()
            if standing["banned_until"] is not None
        } == guilty
    claims = {name: sum(standing["claims"].values()) for name, standing in standings.items()}
    assert claims["quantised"] <= 30
    assert sum(standings["copier"]["seats"].values()) <= 30
    assert max(stalls.values()) < 5.0, stalls
    kept = [
        (name, load_claim(path).claim)
        for name in HONEST
        for path in (shoal.home / name / "claims").glob("*.claim")
    ]
    for peer, code in ((peers["quantised"], 4), (peers[HONEST[0]], 0)):
        name, claim = next((name, claim) for name, claim in kept if claim.peer == peer)
        check = shoal.start("verify", claim.id.hex()[:16], "--folder", shoal.home / name, "--json")
        assert check.wait() == code, check.said()
        (line,) = check.lines
        assert ("does not compute these activations" in json.loads(line)["reason"]) == (code == 4)
    assert shoal.left() == []

"""A public swarm is found by its name at a seed, joined, and listed no more when its last member
has left.
"""

import json

import pytest


@pytest.mark.ci
def test_a_public_swarm_is_found_and_joined_by_its_name(shoal, eventually):
    seed = shoal.start(
        "seed", "--json", "--listen", "/ip4/127.0.0.1/tcp/0", "--identity", shoal.home / "seed.key"
    )
    (address,) = json.loads(seed.line())["addresses"]

    def listed():
        return shoal.start("swarms", "--seed", address, "--json").json()["swarms"]

    assert listed() == []
    unlisted = shoal.start("join", "common", "--bootstrap", address, "--yes")
    assert (
        "No public swarm is called 'common': `shoal swarms` lists those that the bootstrap nodes "
        "know." in unlisted.error()
    )
    settings = shoal.toml(
        swarm={"name": "common"},
        outer={"every": 5},
        options={"layers": 1, "width": 16, "heads": 1, "context": 16},
        train={"steps": 0},
    )
    shoal.node("up", settings, "anna", "--public", "--bootstrap", address)
    found = []
    eventually(lambda: found.extend(listed()) or found, 60, "the swarm being listed")
    assert {name: found[0][name] for name in ("name", "task", "method", "needs_task")} == {
        "name": "common", "task": "text", "method": "noloco", "needs_task": False,
    }  # fmt: skip
    assert found[0]["params"] > 5000
    assert (
        found[0]["params"] / 2 < found[0]["round_bytes"] < found[0]["params"]
    )  # 4 bits a value, and two bytes for each of 64
    bert = shoal.node("join", "common", "bert", "--yes", "--bootstrap", address)
    assert bert.line().startswith(f"shoal://{found[0]['swarm']}")
    eventually(
        lambda: any(
            e["event"] == "round" and e["partner"] == "bert" for e in shoal.metrics("anna")
        ),
        60,
        "an exchange of both",
    )

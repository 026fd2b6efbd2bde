"""Two public nodes, and a member that after a while says that it is nine thousand million million
rounds ahead, with a hundred free records that say the same.

python -m tests.security.test_dragging STEPS      # prints the figures of docs/security.md
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.shoal_commands import Forks, Shoal
from tests.support.waiting import until

pytestmark = pytest.mark.slow(reason="three nodes train for a minute, and two")

PROGRAM = Path(__file__).with_name("dragging_member.py")
FREE, HONEST_S = 100, 10  # records; seconds for which it is an honest member
MOVED, DRIFT = (
    2,
    0.1,
    # rounds of every fragment by lies; part of all rounds that honest peers of unlike speed make of
    # themselves
)
LOSS = 1.01
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wise",
    "owls",
    "read",
)
SETTINGS = {
    "outer": {"every": 20}, "options": {"layers": 1, "width": 32, "heads": 2, "context": 32},
}  # fmt: skip


def swarm(shoal, steps, hostile_at):
    """Train for so many steps, with a third that turns hostile after others, if any; return what
    came of the two honest nodes.
    """
    seed = shoal.start(
        "seed", "--json", "--listen", "/ip4/127.0.0.1/tcp/0", "--identity", shoal.home / "seed.key"
    )
    (address,) = json.loads(seed.line())["addresses"]
    chance = random.Random(
        0
    )  # text whose loss has a floor: what is left is the choice of the next word
    for number in range(300):
        (shoal.text / f"{number}.txt").write_text(
            " ".join(chance.choice(WORDS) for _ in range(200))
        )
    settings = shoal.toml(swarm={"name": "common"}, train={"steps": steps}, **SETTINGS)
    lies = {name: shoal.home / f"lies-{name}" for name in ("anna", "bert")}
    anna = shoal.node(
        "up", settings, "anna", "--public", "--bootstrap", address, program=(PROGRAM, lies["anna"])
    )
    link = anna.line()
    bert = shoal.node("join", link, "bert", "--yes", program=(PROGRAM, lies["bert"]))
    bert.line()
    others = ("anna", "bert")
    if hostile_at is not None:
        others = ("third",)
        third = shoal.node(
            "join",
            link,
            "third",
            "--yes",
            "--steps",
            100 * steps,
            program=(PROGRAM, hostile_at, FREE),
        )
        third.line()
    until(
        lambda: all(any(e.get("partner") in others for e in shoal.metrics(name)) for name in lies),
        120,
        "meetings",
    )
    if hostile_at == HONEST_S:
        assert int(third.line(1, 120).removeprefix("stored ")) > FREE / 2
    rows = {}
    for name, node in (("anna", anna), ("bert", bert)):
        assert node.wait(3600) == 0, node.said()
        events = shoal.metrics(name)
        rounds = [event for event in events if event["event"] == "round"]
        told = [int(line) for line in lies[name].read_text().split()] if lies[name].exists() else []
        rows[name] = {
            "steps": shoal.result(name)["progress"]["step"],
            "seconds": round(shoal.result(name)["wall_s"], 1),
            "loss": shoal.result(name)["loss"]["held_out"],
            "round": max(event["round"] for event in rounds),
            "exchanges": sum(event["members"] > 1 for event in rounds),
            "lies": len(told),
            "moved": sum(told) / rounds[0]["fragments"],
        }
    return {"counted": max(counted(shoal, name) for name in (*lies, "third")), **rows}


def counted(shoal, name):
    """The rounds that a node ended, and those before it came: the swarm's go as the quickest
    counts, also if that is hostile.
    """
    rounds = [event["round"] for event in shoal.metrics(name) if event["event"] == "round"]
    return min(rounds, default=0) + len(rounds)


def compare(steps, **hostile):
    """Swarms one after the other, each with the time at which its third member turns hostile."""
    found = {}
    for what, hostile_at in hostile.items():
        forks = Forks()
        with tempfile.TemporaryDirectory() as home:
            shoal = Shoal(Path(home), forks)
            try:
                found[what] = swarm(shoal, steps, hostile_at)
            finally:
                shoal.stop()
                forks.close()
    return found


def test_lying_member_drags_two_rounds_at_most():
    """A member that lies about its round moves two honest nodes by two rounds at most."""
    found = compare(2000, without=None, hostile=HONEST_S)
    for name in ("anna", "bert"):
        row = found["hostile"][name]
        assert row["lies"] > 5
        assert row["moved"] <= MOVED
        assert row["round"] < (1 + DRIFT) * found["hostile"]["counted"]
        assert row["loss"] <= LOSS * found["without"][name]["loss"]
        assert row["exchanges"] > found["without"][name]["exchanges"] / 2


if __name__ == "__main__":
    print(json.dumps(compare(int(sys.argv[1]), without=None, hostile=HONEST_S), indent=1))

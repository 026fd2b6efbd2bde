"""What `shoal status` says of the whole swarm: exact where all members are in view, else estimated from those in view."""

import pytest

from shoal.node.commands.status import MOST, table
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.overview import overview, totals, totals_said
from tests.records import member_of


def members(count, **fields):
    made = {}
    for number in range(count):
        peer = Identity.ephemeral().peer_id
        usual = {"name": f"n{number}", "round": 3, "step": 9, "loss": float(number), "steps_per_s": 10.0, "tokens_per_s": 100.0}
        made[peer] = member_of(peer, **{**usual, "issued": 1e9, **fields})
    return made


def test_with_all_in_view_everything_is_exact():
    here = members(3)
    here |= members(1, state="waiting", loss=None, tokens_per_s=0.0)
    found = totals(here, 4)
    assert found == {
        "peers": 4, "listed": 4, "sampled": False, "error": 0.0, "training": 3, "tokens_per_s": 300.0, "steps_per_s": 10.0,
        "loss": 1.0,
    }  # fmt: skip
    assert totals_said(found) == "4 peers: 300 tokens a second in all, median loss 1.0000."
    assert totals_said(totals({}, 0)) == "0 peers."


def test_of_a_sample_sums_are_scaled_and_it_is_said_how_sure_they_are():
    found = totals(members(25), 400)
    assert (found["peers"], found["listed"], found["sampled"], found["training"]) == (400, 25, True, 400)
    assert found["tokens_per_s"] == pytest.approx(25 * 100 * 16)
    assert found["error"] == 0.2, "a bucket of 25 is 25 give or take 5"
    said = totals_said(found)
    assert said.startswith("About 400 peers (± 20 %), estimated from the 25 in view: ")
    assert said.endswith(": 40,000 tokens a second in all, median loss 12.0000.")


@pytest.mark.parametrize(("listed", "size", "says"), [(1, 64, "1 to 192"), (4, 32, "4 to 64"), (9, 72, "24 to 120")])
def test_a_few_in_view_tell_bounds_and_no_number(listed, size, says):
    """Two standard errors each way, 2 / sqrt(listed), and at least those in view."""
    said = totals_said(totals(members(listed), size))
    assert said.startswith(f"{says} peers; the {listed} in view say no more: ")
    assert "bout" not in said


def test_the_table_says_so_and_stays_short():
    creator = Identity.ephemeral().peer_id
    manifest = Manifest(name="m", created=0.0, creator=creator, task="text", model="0" * 64)
    link = {"link": "shoal://x", "invite_only": False}
    shown = table({**overview("a" * 52, manifest, members(MOST + 2), 1e9, 16 * (MOST + 2)), **link})
    assert "about 1,056 peers" in shown
    assert "About 1,056 peers (± 12 %), estimated from the 66 in view" in shown
    assert shown.count("training") == MOST
    assert "2 more members are in view; --json lists all of them." in shown
    few = table({**overview("a" * 52, manifest, members(2), 1e9), **link})
    assert "noloco, 2 peers" in few
    assert "more members" not in few
    assert "bout" not in few

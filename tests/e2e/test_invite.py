"""`shoal up --invite-only` and `shoal invite`, as a person types them."""

import pytest

from shoal.swarm.access.link import Link
from shoal.swarm.identity import Identity


@pytest.mark.slow(reason="starts of real nodes, one after another")
def test_by_invitation_only(shoal, eventually):
    file = shoal.toml(
        options={"layers": 1, "width": 16, "heads": 1, "context": 16},
        outer={"every": 5},
        train={"steps": 0},
    )
    anna = shoal.node("up", file, "anna", "--invite-only")
    link = anna.line()
    eventually(
        lambda: any(event["event"] == "round" for event in shoal.metrics("anna")), 60, "a round"
    )
    assert Link.parse(link).invite == ""
    bert = shoal.node("join", link, "bert")
    assert (
        "by invitation only: ask the creator of the swarm for a new link (`shoal invite`)"
        in bert.error()
    )
    assert {event["event"] for event in shoal.metrics("bert")} <= {
        "activity"
    }  # nothing was trained
    made = shoal.start(
        "invite", link, "--identity", shoal.home / "anna.key", "--expires", "1h", "--json"
    ).json()
    # The folder below runs/ knows bert by now, who is no member.
    assert {address.rpartition("/p2p/")[2] for address in Link.parse(made["link"]).bootstrap} == {
        Identity.load(shoal.home / "anna.key").peer_id
    }
    assert (made["uses"], made["peer"]) == (1, None)
    shoal.node("join", made["link"], "bert", "--upload", "80")
    eventually(
        lambda: any(
            e["event"] == "round" and e["partner"] == "bert" for e in shoal.metrics("anna")
        ),
        60,
        "an exchange",
    )

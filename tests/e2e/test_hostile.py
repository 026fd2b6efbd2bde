"""Real processes, one of which lies: its contribution never counts, and the other takes its own
step whole.
"""

import pytest

FLOATS = 1000


twin = pytest.mark.slow(reason="the same as in the other way of exchanging")
overlapped = pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=twin)], ids=["overlapped", "blocking"]
)


@pytest.mark.thinned(3)
@overlapped
@pytest.mark.parametrize(
    ("attack", "suspicious"),
    [("sign flip", True), ("x1000", True), ("NaN", False)],
    ids=["flip", "x1000", "nan"],
)
def test_what_a_hostile_process_sends_does_not_count(nursery, attack, suspicious, overlap):
    # Both have learnt the same, so nothing but the lie is between them.
    honest, liar = nursery.pair(
        attack=attack, screen={"sends": "weights"}, overlap=overlap, wait=60.0, chunk=60.0
    )
    for peer in (honest, liar):
        peer.tell("mean", number=0, floats=FLOATS, round=0)
    assert "sha256" not in honest.wait("mean", round=0)
    assert "sha256" not in liar.wait("mean", round=0)
    found = honest.ask("suspicions", "suspicions")["found"]
    assert [round for round, _ in found] == ([0] if suspicious else [])


@overlapped
def test_two_honest_processes_that_watch_exchange_as_ever(nursery, overlap):
    pair = nursery.pair(screen={"robust": "clipped-gossip"}, overlap=overlap, wait=30.0, chunk=10.0)
    for number, peer in enumerate(pair):
        peer.tell("mean", number=number, floats=FLOATS, round=0)
    first, second = (peer.wait("mean", round=0) for peer in pair)
    assert len(first["members"]) == 2
    assert first["sha256"] == second["sha256"]
    assert [peer.ask("suspicions", "suspicions")["found"] for peer in pair] == [[], []]

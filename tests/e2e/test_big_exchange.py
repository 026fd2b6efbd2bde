"""Two processes exchange 40 MB: the mean is exact, and neither needs memory for more than three
payloads.
"""

import pytest

FLOATS = 10_000_000
PAYLOAD = 4 * FLOATS


@pytest.mark.ci
@pytest.mark.parametrize("round", [0, 1])  # in the second one the heap is used already
def test_mean_of_40_mb_is_exact(nursery, round):
    """The mean of 40 mb is exact and needs at most three payloads."""
    pair = nursery.pair(wait=20.0)
    for number, peer in enumerate(pair):
        peer.tell("measure", number=number, floats=FLOATS, round=round)
    measured = [peer.wait("measured", 60) for peer in pair]
    assert [m["right"] for m in measured] == [True, True]
    # Its own payload and the partner's make two; a measurement below that would be no measurement.
    assert all(1.5 * PAYLOAD < m["grown"] <= 3 * PAYLOAD for m in measured), [
        m["grown"] / PAYLOAD for m in measured
    ]

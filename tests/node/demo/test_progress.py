"""What the demo shows of a round, from the nodes' events."""

from shoal.node.demo.demo import _ended, _loss, _sent


def exchange(sent, lag, loss=None):
    return {"event": "round", "step": sent + lag, "lag": lag, "loss": loss}


def test_a_round_shows_the_exchanges_that_were_begun_in_it():
    """Four fragments a round of 8 steps, which come late and not in order; other events are passed over."""
    events = [
        exchange(2, 1, 4.0), {"event": "evaluation", "step": 3}, exchange(6, 1, 3.0), exchange(4, 5, 2.0), exchange(8, 3),
        exchange(10, 1, 1.0), exchange(12, 1, 1.0),
    ]  # fmt: skip
    assert [_sent(event) for event in _ended(events, 8, 8)] == [2, 6, 4, 8]
    assert _loss(_ended(events, 8, 8)) == 3.0
    assert [_sent(event) for event in _ended(events, 16, 8)] == [10, 12]


def test_a_node_whose_rounds_are_not_steps_shows_its_last_exchange():
    events = [exchange(3, 0, 2.0), exchange(7, 0, 1.5)]
    assert [_sent(event) for event in _ended(events, 20, 5)] == [7]
    assert _ended([], 5, 5) == []
    assert _loss([]) is None

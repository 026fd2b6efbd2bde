"""What the demo shows of a round, from the nodes' events."""

from shoal.node.demo.demo import _all_began, _done, _ended, _loss, _sent


def exchange(sent, lag, loss=None, fragment=0, fragments=1):
    return {"event": "round", "step": sent + lag, "lag": lag, "loss": loss, "fragment": fragment, "fragments": fragments}


def test_a_round_shows_the_exchanges_that_were_begun_in_it():
    """Four fragments a round of 8 steps, which come late and not in order; other events are passed over."""
    events = [
        exchange(2, 1, 4.0), {"event": "evaluation", "step": 3}, exchange(6, 1, 3.0), exchange(4, 5, 2.0), exchange(8, 3),
        exchange(10, 1, 1.0), exchange(12, 1, 1.0),
    ]  # fmt: skip
    assert [_sent(event) for event in _ended(events, 8, 8)] == [2, 6, 4, 8]
    assert _loss(_ended(events, 8, 8)) == 3.0
    assert [_sent(event) for event in _ended(events, 16, 8)] == [10, 12]


def test_a_round_is_done_when_the_last_of_its_fragments_was_exchanged():
    order = [(2, 0), (8, 3), (4, 1), (10, 0), (6, 2), (16, 3), (12, 1), (14, 2), (16, 4)]  # and the last average
    events = [exchange(sent, 1, fragment=fragment, fragments=4) for sent, fragment in order]
    assert [_done(events[:count], 8) for count in range(len(order) + 1)] == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert [_done([exchange(sent, 0)], 8) for sent in (7, 8, 17)] == [0, 1, 2]


def test_a_node_whose_rounds_are_not_steps_shows_its_last_exchange():
    events = [exchange(3, 0, 2.0), exchange(7, 0, 1.5)]
    assert [_sent(event) for event in _ended(events, 20, 5)] == [7]
    assert _ended([], 5, 5) == []
    assert _loss([]) is None


def test_all_train_once_the_last_node_has_done_its_first_step():
    def began(at):
        return {"event": "begun", "time": at, "phases": []}

    nodes = [[{"event": "start", "time": 9.0}, began(4.0), exchange(2, 1)], [began(7.0)], [began(1.0), began(6.0)]]
    assert _all_began(nodes) == 7.0

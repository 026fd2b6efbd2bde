"""Budgets of neighbours in the gossip, and who is shunned."""

from shoal.swarm.gossip.neighbour_faults import FAULTS, FAULTS_OF_RANGE, SHUNNED_S, NeighbourFaults


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_one_neighbour_is_shunned_after_its_budget():
    clock = Clock()
    faults = NeighbourFaults(clock)
    assert all(faults.blame("liar", "10.0.3.4") for _ in range(FAULTS.messages))
    assert not faults.is_shunned("liar", "10.0.3.4")
    assert not faults.blame("liar", "10.0.3.4")
    assert faults.is_shunned("liar", "10.9.9.9"), "whatever address it comes from next"
    assert not faults.is_shunned("another key", "10.0.3.4")
    clock.now = SHUNNED_S
    assert not faults.is_shunned("liar", "10.0.3.4"), "not for ever"


def test_many_keys_of_one_range_are_remembered_by_it():
    faults = NeighbourFaults(Clock())
    for key in range(FAULTS_OF_RANGE.messages):
        assert faults.blame(f"key {key}", f"10.0.{key}.4")
    assert not faults.blame("one more", "10.0.7.7")
    assert faults.is_shunned("another key", "10.0.8.8")
    assert not faults.is_shunned("another key", "10.1.7.7")


def test_unknown_address_blames_no_range():
    """Mutant: the empty range is counted, so that all relayed peers share one budget."""
    faults = NeighbourFaults(Clock())
    for key in range(FAULTS_OF_RANGE.messages + 1):
        assert faults.blame(f"key {key}", "")
    assert not faults.is_shunned("another key", "")

"""Reasons for a refusal are words for people, and keep the name that the metrics have."""

from shoal.optim.rollout_selection import REASONS as OF_ROLLOUTS
from shoal.swarm.p2p.resource_manager import REASONS as OF_STREAMS
from shoal.swarm.refusals import WORDS, listed


def test_every_reason_of_streams_and_rollouts_has_words():
    assert not {*OF_STREAMS, *OF_ROLLOUTS} - WORDS.keys()


def test_most_frequent_refusal_comes_first():
    """The most frequent comes first and an unknown one is shown as it is."""
    counts = {"early": 1, "no_spread": 974, "strange": 2}
    assert listed(counts) == (
        "974 with equal rewards, which teach nothing (no_spread), 2 strange, 1 of peers that had "
        "not joined yet (early)"
    )

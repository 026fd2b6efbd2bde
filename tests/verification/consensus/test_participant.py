"""What a participant does once a round: it states its view, and pulls logs of others."""

import pytest

from bench._votes_peers import toy_signer, toy_verify
from shoal.verification.consensus.log import EMPTY, Log
from shoal.verification.consensus.participant import MAX_PULLS, Participant
from shoal.verification.consensus.records import Signed, View
from shoal.verification.consensus.reputation import ScoreRules
from tests.support.clock import Clock
from tests.support.consensus_stories import RULES

ROUND_S = 100.0
SKEW_S = 4.0  # `Times.of` a round of 100 s
ROUND = 10
BEGIN = ROUND * ROUND_S


class Alone:
    """A participant that started at ``now``, and what it has published."""

    def __init__(self, now):
        self.clock = Clock()
        self.clock.now = now
        self.published = []
        self.participant = Participant(
            "a",
            "run",
            operator="a",
            sign=toy_signer("a"),
            verify=toy_verify,
            publish=self.published.append,
            check=lambda claim: None,
            clock=self.clock,
            salt=lambda: bytes(32),
            rules=RULES,
            prices=ScoreRules(),
            round_s=ROUND_S,
        )
        self.participant.tick()

    def views(self, now):
        """Rounds of the views that it has published by ``now``."""
        self.clock.now = now
        self.participant.tick()
        return [signed.record.round for signed in self.published if isinstance(signed.record, View)]


@pytest.mark.parametrize(
    ("start", "stated"),
    [(BEGIN + SKEW_S - 1, [ROUND - 2]), (BEGIN + SKEW_S + 1, [])],
)
def test_who_missed_views_states_none(start, stated):
    """Who joins while views of the round are out states one from the next round on."""
    alone = Alone(start)
    assert alone.views(BEGIN + 2 * SKEW_S) == stated
    assert alone.views(BEGIN + 3 * SKEW_S) == stated  # once a round
    assert alone.views(BEGIN + ROUND_S + SKEW_S) == [*stated, ROUND - 1]


def test_logs_pulled_in_a_round_are_bounded():
    """Views of others that nobody can serve cost so many pulls in each round."""
    alone = Alone(BEGIN)
    for round in (ROUND, ROUND + 1):
        view = View(peer="b", run="run", round=round - 2, root=bytes(32), table=bytes(32))
        alone.views(round * ROUND_S)
        alone.participant.take(Signed.by(toy_signer("b"), view))
        alone.views(round * ROUND_S + 2 * SKEW_S)
        for _ in range(MAX_PULLS):
            assert alone.participant.wanted.peers == ("b",)
            alone.participant.learn(Log(EMPTY, (), ()))
        assert alone.participant.wanted is None

"""Two thousand small swarms in which one member turns hostile and says that it is far ahead: nobody
follows it, and it does no harm that lasts (`tests.sim.hostile`)."""

import pytest

from shoal.swarm.exchange.pair_rounds import PairRounds
from shoal.swarm.exchange.round_evidence import RoundEvidence
from tests.sim.run import blocks

SEEDS, BLOCK, QUICK = 2000, 50, 30
LATER = pytest.mark.slow(
    reason="ten minutes of a processor; the first thirty have swarms of every kind"
)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("first", "end"),
    [
        pytest.param(first, end, marks=[LATER] * (first >= QUICK), id=str(first))
        for first, end in blocks(SEEDS, BLOCK, QUICK)
    ],
)
def test_a_hostile_member_drags_nobody(seeds, first, end):
    seeds.check(range(first, end), hostile=True)


def one_word_is_enough(patch):
    """Who says that it is ahead is believed."""
    patch.setattr(RoundEvidence, "furthest", lambda self, peer, said, now: said)


def records_count(patch):
    """The lower median of all members is believed, met or not."""
    furthest = RoundEvidence.furthest

    def counted(self, peer, said, now):
        met, self._met = self._met, dict.fromkeys(self._context.members(), 0) | self._met
        try:
            return furthest(self, peer, said, now)
        finally:
            self._met = met

    patch.setattr(RoundEvidence, "furthest", counted)


def a_stranger_chooses_the_fragment(patch):
    """A node moves to a round of another fragment, if a peer answers one."""
    patch.setattr(
        PairRounds,
        "within",
        lambda self, wanted, fragment, mine, limit: max(mine, min(wanted, limit)),
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "mutant",
    [one_word_is_enough, records_count, a_stranger_chooses_the_fragment],
    ids=lambda f: f.__name__,
)
def test_a_seed_finds_it(seeds, monkeypatch, mutant):
    mutant(monkeypatch)
    seed, failure = seeds.first(range(100), hostile=True)
    assert seed is not None
    assert any(
        what in repr(failure)
        for what in ("is dragged to", "the spread is still", "where nobody else does")
    )

"""Which records are in time: those of the round that is on, and what a neighbour's clock
explains.
"""

import pytest

from shoal.verification.consensus.record_window import RecordWindow
from shoal.verification.consensus.records import Refused, View
from tests.support.consensus_stories import claim_of

WINDOW = RecordWindow(round=10, since=100.0, skew_s=2.0)


@pytest.mark.parametrize(
    ("round", "came", "is_opened", "reason"),
    [
        (12, 100.0, False, "future"),
        (11, 100.0, False, None),
        (10, 999.0, False, None),
        (9, 101.9, False, None),
        (9, 102.0, False, "late"),
        (9, 101.9, True, "late"),
        (8, 100.0, False, "late"),
    ],
)
def test_claims_of_neighbouring_rounds_are_taken(round, came, is_opened, reason):
    assert reason == _reason(lambda: WINDOW.check(claim_of("a", round), came, is_opened=is_opened))


@pytest.mark.parametrize(("round", "reason"), [(7, "late"), (8, None), (9, None), (10, "future")])
def test_views_are_of_the_electorate_due(round, reason):
    view = View(peer="a", run="run", round=round, root=bytes(32), table=bytes(32))
    assert reason == _reason(lambda: WINDOW.check_view(view))


def _reason(check):
    """Return the reason for which ``check`` refuses; None if it does not."""
    try:
        check()
    except Refused as refused:
        return refused.reason
    return None

"""How much harm hostile updates do that no distance gives away, and a lie about a weight: two of
eight peers, simulated.

Figures are distances of the worst honest peer from what all should learn: 4.3 before training,
about 0.2 without attackers.
"""

import pytest

from shoal.swarm.exchange.robust import DistanceScreen
from tests.support.hostile_training import METHODS, defended, train

UNDEFENDED = {"in line": 0.6, "ascent": 1.0, "shrinking": 2.2, "slow drift": 0.6}
DEFENDED = {"in line": 0.5, "ascent": 0.5, "shrinking": 0.35, "slow drift": 0.5}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("attack", list(DEFENDED))
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_what_is_within_the_usual_does_bounded_harm(method, attack):
    far, screens = train(method, attack, defended(method))
    assert far <= DEFENDED[attack]
    assert {found.peer for screen in screens.values() for found in screen.rejections()} <= {
        "p6",
        "p7",
    }
    plain, _ = train(method, attack, lambda: DistanceScreen(suspect=0))
    assert plain <= UNDEFENDED[attack]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", list(METHODS))
def test_a_direction_that_all_attackers_agree_on_is_not_seen(method):
    """What distances cannot do: it does harm, and nobody is refused for it."""
    clean, _ = train(method, None, defended(method))
    far, screens = train(method, "in line", defended(method))
    assert far > 1.2 * clean
    assert not any(screen.rejections() for screen in screens.values())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", list(METHODS))
def test_huge_stated_weight_is_bounded_undefended(method, monkeypatch):
    """Ascent at a stated weight of 1e30 is bounded undefended and nothing defended."""
    far, _ = train(method, "weight", lambda: DistanceScreen(suspect=0))
    assert far <= 45
    kept, screens = train(method, "weight", defended(method))
    assert kept <= 0.25
    assert {found.peer for screen in screens.values() for found in screen.rejections()} == {
        "p6",
        "p7",
    }
    monkeypatch.setattr("shoal.optim.exchange.weighted_mean.MAX_MEDIANS", 1e40)  # believed
    believed, _ = train(method, "weight", lambda: DistanceScreen(suspect=0))
    assert believed > 7 * far

"""Successive halving, apart from any training."""

from shoal.node.tune.halving import Candidate, Halving, Trial, rung_sizes

RATES = [Candidate(float(rate)) for rate in range(8)]
"""The lower a rate, the better in these tests."""
PRESENT = RATES[6]


def trials(candidates, diverged=()):
    found = []
    for candidate in candidates:
        loss = None if candidate.rate in diverged else candidate.rate
        found.append(Trial(candidate, 10, loss))
    return found


def test_the_better_half_and_the_present_one_go_on():
    """Mutants: the worse half goes on; the present one is dropped, or counts among the half."""
    search = Halving(RATES, PRESENT)
    search.add(trials(search.candidates))
    assert search.candidates == [*RATES[:4], PRESENT]
    search.add(trials(search.candidates))
    assert search.candidates == [*RATES[:2], PRESENT]
    search.add(trials(search.candidates))
    assert search.candidates == []
    assert search.best.candidate == RATES[0]


def test_what_diverged_never_goes_on():
    """Mutants: None sorts first; the present one is kept though it diverged."""
    search = Halving(RATES, PRESENT)
    search.add(trials(search.candidates, diverged=range(1, 8)))
    assert search.candidates == RATES[:1]
    assert search.best.candidate == RATES[0]


def test_nothing_is_best_where_all_diverged():
    search = Halving(RATES, PRESENT)
    search.add(trials(search.candidates, diverged=range(8)))
    assert search.best is None
    assert search.candidates == []


def test_two_trials_of_an_unfinished_rung_count():
    """Mutants: they are lost; one alone counts, which nothing is compared with; the best is
    compared with the present one at another length.
    """
    search = Halving(RATES, PRESENT)
    search.add(trials(search.candidates))
    search.stop(trials(RATES[:1]))
    assert len(search.rungs) == 1
    search.stop([Trial(RATES[0], 20, 5.0), Trial(RATES[1], 20, 4.0)])
    assert search.best == Trial(RATES[1], 20, 4.0)
    assert search.compared() == (Trial(RATES[1], 10, 1.0), Trial(PRESENT, 10, 6.0))


def test_an_unfinished_first_rung_does_not_count():
    """Mutant: the best of the rates that happened to come first is taken."""
    search = Halving(RATES, PRESENT)
    search.stop(trials(RATES[:7]))
    assert search.best is None
    assert search.compared() is None


def test_the_time_left_counts_each_rung_twice_as_long():
    """Mutants: the trials of the present one are forgotten; lengths grow by 1 in place of 2."""
    assert rung_sizes(8) == [8, 4, 2]
    search = Halving(RATES, PRESENT)
    assert search.units_left() == 8 + 5 * 2 + 3 * 4
    search.add(trials(search.candidates))
    assert search.units_left() == 5 + 3 * 2

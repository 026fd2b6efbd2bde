"""Scenarios of a swarm in buckets (`tests.sim.bucket_scenarios`), by seed; and faults put in on
purpose, which seeds find.
"""

import re

import pytest

from shoal.swarm.membership import bucket_depth, bucket_index, records
from shoal.swarm.membership.bucket_depth import MAX_BUCKET_DEPTH
from shoal.swarm.membership.bucket_index import Index
from tests.sim.bucket_scenarios import SCENARIOS, run_scenario

FIRST, SEEDS, BLOCK = 1, 500, 50


def check(scenario, seeds):
    for seed in seeds:
        broken = run_scenario(scenario, seed)
        assert broken is None, f"{scenario}, seed {seed}: {broken}"


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_first_seeds(scenario):
    check(scenario, range(FIRST))


@pytest.mark.slow(reason="500 seeds of each scenario")
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_seeds(scenario, first):
    check(scenario, range(first, first + BLOCK))


FOUND = {
    182: "half of a swarm did not count the other half, which had gone a level deeper, and stayed "
    "with too many for four epochs"
}
"""Seeds of a partition that failed once, and how."""


def test_seeds_that_failed_once():
    check("partition", FOUND)


def test_one_seed_is_one_trace(monkeypatch):
    traces = []
    end = run_scenario.__globals__["BucketSwarm"].end
    monkeypatch.setattr(
        "tests.sim.bucket_scenarios.BucketSwarm.end",
        lambda swarm: (
            traces.append([swarm.loop.time(), *(d.nbytes for _, d in swarm.all)]),
            end(swarm),
        ),
    )
    for seed in (1, 1, 2):
        run_scenario("eclipse", seed)
    assert traces[0] == traces[1] != traces[2]


# -- faults put in on purpose ----------------------------------------------------------------------


def never_deeper(patch):
    """No epoch begins deeper, and no full bucket is split."""
    patch.setattr(bucket_index, "depth_for", lambda size, depth, most: depth)
    agreed = bucket_depth.agreed
    patch.setattr(
        bucket_index,
        "agreed",
        lambda depth, bits, there, at, most: min(agreed(depth, bits, there, at, most), depth),
    )


def never_higher(patch):
    """Who is deep stays deep, however few are left."""
    deeper, agreed = bucket_depth.depth_for, bucket_depth.agreed
    patch.setattr(
        bucket_index, "depth_for", lambda size, depth, most: max(deeper(size, depth, most), depth)
    )
    patch.setattr(
        bucket_index,
        "agreed",
        lambda depth, bits, there, at, most: max(agreed(depth, bits, there, at, most), depth),
    )


def no_handover(patch):
    """The keys of the next epoch are neither written nor read ahead of it."""
    patch.setattr(bucket_index, "PUBLISH_AHEAD_S", 0.0)
    patch.setattr(bucket_index, "READ_AHEAD_S", 0.0)


def changes_when_it_has_read(patch):
    """Each peer changes over as soon as it has read the next epoch's keys."""

    def current(self):
        ready = (draw for draw in self._epochs if draw.read)
        return next(ready, self._epochs[-1]) if self._epochs else None

    patch.setattr(Index, "_current", current)


def own_level_alone(patch):
    """A peer reads no level but its own."""
    patch.setattr(Index, "_depths_to_read", lambda self, draw: {draw.depth})


def beside_alone(patch):
    """A peer that is new in an epoch does not read all levels on its way, and an estimate is never
    thrown away.
    """
    patch.setattr(
        Index,
        "_depths_to_read",
        lambda self, draw: (
            {draw.depth - 1, draw.depth, draw.depth + 1} & set(range(MAX_BUCKET_DEPTH + 1))
        ),
    )
    patch.setattr(Index, "_update_estimate", lambda self, draw: None)


def same_buckets_for_ever(patch):
    """Positions do not depend on the epoch."""
    bits_in = bucket_index.bits_in
    for module in (records, bucket_index):
        patch.setattr(
            module, "bits_in", lambda swarm, epoch, peer: bits_in(swarm, 33_333_334, peer)
        )


def first_records_alone(patch):
    """Of a bucket only the first records are used, and anybody can make such as come first."""
    decide = Index._settle

    def some(self, draw, levels, found):
        cut = {
            key: dict(sorted(names.items())[: self._bucket // 2]) for key, names in found.items()
        }
        found.clear()
        found.update(cut)
        return decide(self, draw, levels, found)

    patch.setattr(Index, "_settle", some)


MUTANTS = {
    never_deeper: ("splits", "in one bucket|see more than"),
    never_higher: ("merges", "do not all see each other|are alone"),
    no_handover: ("epoch_change", "after it began|has forgotten the partner"),
    changes_when_it_has_read: ("epoch_change", "ahead of an epoch"),
    own_level_alone: (
        "disagreement",
        "are not returned|see more than|does not see itself|are missing",
    ),
    beside_alone: ("partition", "are missing|are not returned"),
    same_buckets_for_ever: ("eclipse", "of the epoch before"),
    first_records_alone: ("eclipse", "hide|are not returned|are missing"),
}
"""What finds each, and how it must put it."""


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_seed_finds_it(mutant, monkeypatch):
    scenario, says = MUTANTS[mutant]
    mutant(monkeypatch)
    found = next(
        (broken for seed in range(5) if (broken := run_scenario(scenario, seed)) is not None), None
    )
    assert found is not None
    assert re.search(says, str(found)), found

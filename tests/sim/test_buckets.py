"""Epoch buckets on a simulated network: peers of a bucket see each other, through splits, merges,
epochs and partitions.
"""

import pytest

from bench.sim.report import run_sim
from shoal.swarm.membership.bucket_index import PUBLISH_AHEAD_S
from shoal.swarm.membership.directory import TTL_S
from shoal.swarm.membership.directory_loops import PERIOD_S
from tests.sim.bucket_swarm import BUCKET, EPOCH_S, FIRST


def test_swarm_splits_as_it_grows_and_merges(make):
    """A swarm that grows is split and one that shrinks is merged."""
    swarm = make()
    swarm.add(12, over=10.0)
    swarm.until(FIRST - 1.0)
    assert swarm.depths() == {0: 12}
    assert {len(view) for view in swarm.views().values()} == {12}
    swarm.add(60, over=20.0)
    swarm.until(FIRST + 3 * EPOCH_S - 1.0)
    sizes = [len(view) for view in swarm.views().values()]
    assert max(sizes) <= BUCKET
    assert min(sizes) >= 2
    assert swarm.one_sided() < 0.02  # a bucket that was full splits in the middle of an epoch
    assert min(swarm.depths()) >= 2
    for host, _ in swarm.all[8:]:
        swarm.network.kill(host.peer_id)
    swarm.until(FIRST + 3 * EPOCH_S + TTL_S + 3 * EPOCH_S)
    assert swarm.depths() == {0: 8}
    assert {len(view) for view in swarm.views().values()} == {8}


def test_all_are_dealt_anew_at_one_moment(make):
    """All are dealt anew at one moment and see each other before and after."""
    swarm = make()
    swarm.add(80, size=80)
    swarm.until(FIRST + EPOCH_S - 0.01)
    before = swarm.views()
    assert swarm.one_sided() == 0
    swarm.run(0.02)
    after = swarm.views()
    assert swarm.one_sided() == 0
    stayed = sum(len(before[peer] & after[peer]) - 1 for peer in before) / sum(
        len(view) - 1 for view in before.values()
    )
    assert stayed < 0.3  # of eight buckets an eighth, by chance


def test_what_a_peer_reads_does_not_grow_with_the_swarm(make):
    costs = []
    for count in (33, 132):
        swarm = make()
        swarm.add(count, size=count)
        swarm.until(FIRST + EPOCH_S - PUBLISH_AHEAD_S)
        costs.append(sum(directory.nbytes for directory in swarm.there().values()) / count)
    assert costs[1] < 1.15 * costs[0]


def test_late_joiner_sees_its_bucket_in_seconds(make):
    """A late joiner sees its bucket and is seen within seconds."""
    swarm = make()
    swarm.add(80, size=80)
    swarm.until(FIRST + 1.0)
    ((host, directory),) = swarm.add(1)
    swarm.run(2.0)
    assert len(directory.members()) >= 4
    assert directory.index.depth in swarm.depths()
    swarm.run(PERIOD_S)
    assert all(host.peer_id in swarm.views()[peer] for peer in directory.members())


def test_peers_that_begin_at_other_depths_agree_within_two_readings(make):
    swarm = make()
    swarm.add(40, size=60)
    swarm.add(40, size=160)
    assert len({directory.index.depth for _, directory in swarm.all}) == 2
    swarm.run(3 * PERIOD_S)
    assert swarm.one_sided() == 0
    assert all(len(view) >= 2 for view in swarm.views().values())


def test_separate_parts_unite_in_an_epoch(make):
    """Parts that were separate are one swarm an epoch after they meet."""
    swarm = make(2)
    swarm.add(10)
    apart = swarm.add(80, size=80, board=1)
    swarm.until(FIRST + 1.0)
    assert swarm.views()[swarm.all[0][0].peer_id] == {host.peer_id for host, _ in swarm.all[:10]}
    for _, directory in apart:
        directory._board = swarm.boards[0]
    swarm.until(FIRST + 2 * EPOCH_S - 1.0)
    assert swarm.one_sided() == 0
    buckets = {frozenset(view) for view in swarm.views().values()}
    assert sum(len(bucket) for bucket in buckets) == 90  # each peer is in one
    assert max(map(len, buckets)) <= BUCKET


def test_one_bucket_trains_as_without():
    """A swarm within one bucket trains bit by bit as without."""
    options = {"peers": 6, "minutes": 0.7, "parameters": 64}
    plain, in_one = (
        run_sim(
            None,
            **options,
            overrides={"outer.every": 10, "outer.lag": 0, "outer.codec": "float32", **more},
        )
        for more in ({"swarm.bucket": 0}, {"swarm.bucket": 8, "swarm.epoch_s": 30.0})
    )
    other = {
        "wall_s",
        "cpu_s",
        "bucket",
        "epoch_s",
        "directory_calls_per_peer_minute",
        "directory_requests_per_peer_minute",
    }
    assert plain.keys() - other == in_one.keys() - other
    assert {name for name in plain if plain[name] != in_one[name]} <= other


@pytest.mark.ci
def test_rounds_go_on_while_buckets_change():
    """Few are alone, mostly the odd ones of four buckets, though two epochs begin in the middle of
    rounds.
    """
    options = {"peers": 36, "minutes": 1.2, "parameters": 64, "uneven": 0.0}
    report = run_sim(
        None,
        **options,
        overrides={"outer.every": 75, "outer.lag": 0, "swarm.bucket": 16, "swarm.epoch_s": 30.0},
    )
    assert report["exchanges"] == 36 * 9
    assert report["alone"] < 0.15
    assert report["failures"] == {}
    assert report["loss_last"] < report["loss_first"] / 2

"""What may happen to a swarm of buckets, each drawn from a seed; the first thing that does not hold
raises `BucketBroken`.

1. Left in peace for some readings or epochs, all members of a bucket see each other, and no more
   than it may hold.
2. At the moment of a change all change over: the same holds just before it and just after it, and a
   peer still knows with whom it was paired before.
3. Members that have a bucket's key in common are not cut off from each other by records of made-up
   peers, as long as these do not fill the bucket; if they do, the next epoch ends it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from shoal.optim.exchange.pairing import partner_of
from shoal.swarm.membership.bucket_index import READ_AHEAD_S
from shoal.swarm.membership.directory import TTL_S
from shoal.swarm.membership.directory_loops import PERIOD_S
from shoal.swarm.membership.records import bits_in, bucket_prefix
from tests.sim.bucket_swarm import EPOCH_S, FIRST, SWARM, BucketSwarm
from tests.sim.directory import EPOCH
from tests.sim.memory_stream import NOTHING

# one whom chance leaves alone in its bucket sees the bucket above, and those there do not see it
FEW = 0.15
# share of sights: a few peers two levels below the others keep to themselves until estimates have
# come together
MISSED = 0.3


class BucketBroken(AssertionError):
    """The error that one of these does not hold."""


def splits(swarm: BucketSwarm, chance: random.Random) -> None:
    """A swarm that fits into one bucket grows to several at once, in the middle of an epoch."""
    swarm.add(chance.randint(2, swarm.bucket - 2), over=10.0)
    swarm.run(chance.uniform(10.0 + 2 * PERIOD_S, FIRST + EPOCH_S - 1.0))
    _one_bucket(swarm)
    swarm.add(chance.randint(2 * swarm.bucket, 4 * swarm.bucket), over=chance.uniform(1.0, 20.0))
    _rest(swarm, 4)
    if max(swarm.depths()) == 0:
        raise BucketBroken(f"{len(swarm.all)} peers are in one bucket of {swarm.bucket}")


def merges(swarm: BucketSwarm, chance: random.Random) -> None:
    """Most peers of several buckets are killed, within seconds."""
    count = chance.randint(2 * swarm.bucket, 4 * swarm.bucket)
    swarm.add(count, size=count)
    swarm.run(chance.uniform(12.0, FIRST + EPOCH_S - 1.0))
    left = chance.randint(2, swarm.bucket // 4)
    for host, _ in chance.sample(swarm.all, count - left):
        swarm.loop.call_later(
            chance.uniform(0.0, 15.0), swarm.network.kill, host.peer_id, context=NOTHING
        )
    swarm.run(15.0 + TTL_S)
    _rest(swarm, 4)
    _one_bucket(swarm)


def epoch_change(swarm: BucketSwarm, chance: random.Random) -> None:
    """An epoch begins while pairs are in their rounds."""
    count = chance.randint(2 * swarm.bucket, 4 * swarm.bucket)
    swarm.add(count, size=count)
    for epoch in range(2):
        change = FIRST + epoch * EPOCH_S
        swarm.until(change - chance.uniform(0.05, READ_AHEAD_S))  # the rounds begin
        agree(swarm, "ahead of an epoch")
        number, partners = chance.randrange(1000), {}
        for peer, view in swarm.views().items():
            other = partner_of(swarm.seed, number, peer, view)
            if other is not None:
                partners[peer] = other
        swarm.until(change - 0.001)
        agree(swarm, "before an epoch")
        swarm.run(0.002)
        agree(swarm, "after it began")
        swarm.run(chance.uniform(0.0, 2.0))
        agree(swarm, "a while after it began")
        there = swarm.there()
        for one, other in partners.items():
            if partners.get(other) == one and other not in there[one].everyone():
                raise BucketBroken(
                    f"a peer has forgotten the partner of its round at {swarm.loop.time():.3f} s"
                )
        swarm.run(chance.uniform(0.0, 8.0))
        agree(swarm, "seconds after it began")
    if max(swarm.depths()) == 0:
        raise BucketBroken("there was one bucket only")


def disagreement(swarm: BucketSwarm, chance: random.Random) -> None:
    """Peers begin with other notions of the swarm's size, a factor of two or so apart: as much as
    chance makes of it.
    """
    count = chance.randint(2 * swarm.bucket, 4 * swarm.bucket)
    for part in (count // 2, count - count // 2):
        swarm.add(part, size=max(int(count * 2 ** chance.uniform(-0.6, 0.6)), 2))
    _rest(swarm, 3)


def partition(swarm: BucketSwarm, chance: random.Random) -> None:
    """Two parts of a swarm begin or live apart, and their tables become one."""
    few, many = chance.randint(2, swarm.bucket), chance.randint(swarm.bucket, 4 * swarm.bucket)
    swarm.add(few, size=few)
    apart = swarm.add(many, size=many, board=1)
    swarm.run(chance.uniform(12.0, FIRST + EPOCH_S))
    here = {host.peer_id for host, _ in swarm.all[:few]}
    if any(
        (peer in here) != (other in here) for peer, view in swarm.views().items() for other in view
    ):
        raise BucketBroken("peers of two parts see each other")
    for _, directory in apart:
        directory._board = swarm.boards[0]
    _rest(swarm, 4)


def eclipse(swarm: BucketSwarm, chance: random.Random) -> None:
    """Made-up peers stand in the bucket of a victim: as many as have room in it, or so many that
    they fill it.
    """
    count = chance.randint(2 * swarm.bucket, 4 * swarm.bucket)
    swarm.add(count, size=count)
    swarm.until(FIRST + 2 * PERIOD_S)
    victim = chance.choice(sorted(swarm.there()))
    directory = swarm.there()[victim]
    epoch, depth, before = (
        int((EPOCH + swarm.loop.time()) / EPOCH_S),
        directory.index.depth,
        swarm.views()[victim],
    )
    way = bits_in(SWARM, epoch, victim)
    fill = chance.random() < 0.5
    forged = _made_up(
        epoch,
        way[: depth + fill],
        swarm.bucket if fill else max(swarm.bucket - len(before) - 1, 0),
        chance,
    )
    ends = FIRST + EPOCH_S
    for peer in forged:
        for bits in range(max(depth, 1), depth + 1 + fill):
            swarm.forge(peer, bucket_prefix(epoch, way[:bits]), ends)
    swarm.run(2 * PERIOD_S)
    if not fill and not before <= swarm.views()[victim]:
        raise BucketBroken(
            f"{len(forged)} made-up peers hide {len(before - swarm.views()[victim])} of "
            f"{len(before)} members"
        )
    swarm.until(ends + 0.001)
    agree(swarm, "an epoch after the made-up peers")
    seen = len(set(directory.members()) & set(forged))
    if len(forged) >= 8 and 4 * seen > 3 * len(
        forged
    ):  # of a few, chance may deal most to the victim again
        raise BucketBroken(
            f"{seen} of {len(forged)} made-up peers of the epoch before are in the victim's bucket"
        )


SCENARIOS: dict[str, Callable[[BucketSwarm, random.Random], None]] = {
    scenario.__name__: scenario
    for scenario in (splits, merges, epoch_change, disagreement, partition, eclipse)
}


def run_scenario(name: str, seed: int) -> BucketBroken | None:
    chance = random.Random(f"{name} {seed}")
    swarm = BucketSwarm(boards=2, bucket=chance.choice((16, 20, 24)), seed=seed + 1)
    try:
        SCENARIOS[name](swarm, chance)
    except BucketBroken as broken:
        return broken
    finally:
        swarm.end()
    return None


def agree(swarm: BucketSwarm, when: str) -> None:
    """Check that a bucket's members see each other, and no more than it holds; but for the few that
    chance leaves in small ones.
    """
    views = swarm.views()
    if any(peer not in view for peer, view in views.items()):
        raise BucketBroken(f"a peer does not see itself {when}")
    large = sum(len(view) > swarm.bucket for view in views.values())
    if large > FEW * len(views):
        raise BucketBroken(f"{large} of {len(views)} peers see more than {swarm.bucket} {when}")
    if swarm.one_sided() > FEW:
        raise BucketBroken(f"{swarm.one_sided():.0%} of the sights are not returned {when}")
    belong = [
        (peer, other)
        for peer, directory in swarm.there().items()
        for other in views
        if directory.belongs(other)
    ]
    missed = sum(other not in views[peer] for peer, other in belong)
    if missed > MISSED * len(belong):
        raise BucketBroken(f"{missed} of {len(belong)} sights within buckets are missing {when}")
    alone = sum(len(view) == 1 for view in views.values())
    if alone > FEW * len(views):
        raise BucketBroken(f"{alone} of {len(views)} peers are alone {when}")


def _rest(swarm: BucketSwarm, epochs: int) -> None:
    """Leave the swarm in peace for so many epochs, up to the end of one, and look."""
    now = swarm.loop.time() - FIRST
    swarm.until(FIRST + (int(now // EPOCH_S) + 1 + epochs) * EPOCH_S - 0.5)
    agree(swarm, f"{epochs} epochs later")


def _one_bucket(swarm: BucketSwarm) -> None:
    views = swarm.views()
    if any(view != views.keys() for view in views.values()):
        raise BucketBroken(
            f"{len(views)} peers that fit into one bucket of {swarm.bucket} do not all see each "
            "other"
        )


def _made_up(epoch: int, way: str, count: int, chance: random.Random) -> list[str]:
    """Return names whose position of an epoch begins in a way, as an attacker finds them: by
    trying.
    """
    found: list[str] = []
    while len(found) < count:
        name = f"forged {chance.getrandbits(64):x}"
        if bits_in(SWARM, epoch, name).startswith(way):
            found.append(name)
    return found

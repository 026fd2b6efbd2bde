"""A policy that travels: followers take over the bits of each version, by patches where these
fit, else whole; and refuse all else.
"""

import asyncio
import concurrent.futures
import hashlib
from types import SimpleNamespace

import pytest
import torch

from shoal.optim.weight_patch import bits_of, digest_of, encode
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.stream import short
from shoal.swarm.topics import policy_versions
from shoal.swarm.topics.policy_versions import (
    MAX_LINKS,
    POLICY_PROTOCOL,
    PolicyFollower,
    PolicyPublisher,
    PolicyVersion,
)
from tests.support.fake_network import SWARM

VALUES = 2000
NOW = 1e9


class Gossip:
    """Gossip of one node, which hands what it publishes to ``others`` at once."""

    def __init__(self, host):
        self.swarm, self.identity = SWARM, host.identity
        self.others, self.published = [], []

    def join(self, kind, handler, quota):
        self.deliver = handler
        return SimpleNamespace(publish=self.publish, close=lambda: None)

    def publish(self, record):
        self.published.append(record)
        for other in self.others:
            other.deliver(record.peer, record)


class Pair:
    """A node that trains, and one that follows it."""

    def __init__(self, network, *, always=True, values=VALUES, first_s=20.0):
        self.network = network
        self.host, self.other = network.host(), network.host()
        self.gossip, theirs = Gossip(self.host), Gossip(self.other)
        self.gossip.others = [theirs]
        self.deliver = lambda record: theirs.deliver(record.peer, record)
        self.now = NOW
        self.publisher = PolicyPublisher(self.gossip, self.host, clock=self.clock)
        self.said = []
        self.follower = PolicyFollower(
            theirs,
            self.other,
            self.host.peer_id,
            clock=lambda: NOW + 1000,
            always=always,
            say=self.said.append,
            first_s=first_s,
        )
        self.weights = [torch.randn(VALUES, generator=torch.Generator().manual_seed(1))]
        self.taken = [torch.zeros(values)]

    def clock(self):
        self.now += 1
        return self.now

    def train(self, round):
        """Move one value in fifty, and publish the version."""
        with torch.no_grad():
            self.weights[0][round % 50 :: 50] += 1.0
        self.publisher.begin_round(round, self.weights)

    def follow(self, round=0):
        """Begin rounds until nothing is being fetched any more."""
        self.follower.begin_round(round, self.taken)
        while self.follower._fetching is not None:
            concurrent.futures.wait([self.follower._fetching], 20)
            self.follower.begin_round(round, self.taken)

    @property
    def is_equal(self):
        return torch.equal(bits_of(self.taken), bits_of(self.weights))

    def forge(self, **changes):
        """Deliver the newest record with ``changes``, as the newest."""
        newest = self.gossip.published[-1]
        fields = {name: getattr(newest, name) for name in PolicyVersion.model_fields}
        self.deliver(PolicyVersion(**{**fields, "issued": self.clock(), **changes}))


def test_follower_has_each_version_to_the_last_bit(network):
    pair = Pair(network)
    for round in range(4):
        pair.train(round)
        pair.follow(round)
        assert pair.is_equal
        assert pair.follower.version == round
    counts = pair.follower.counts
    assert (counts["wholes"], counts["patches"], counts["refused"]) == (1, 3, 0)
    assert 2 * VALUES < counts["bytes"] < 2 * VALUES + 3 * 400
    assert pair.said == [f"the policy is that of peer {short(pair.host.peer_id)}, as of 0"]


def test_several_patches_in_a_row_catch_up(network):
    pair = Pair(network)
    pair.train(0)
    pair.follow()
    for round in range(1, 6):
        pair.train(round)
    pair.follow(5)
    assert pair.is_equal
    assert (pair.follower.counts["wholes"], pair.follower.counts["patches"]) == (1, 5)


def test_missing_link_falls_back_to_the_whole(network):
    pair = Pair(network)
    pair.train(0)
    pair.follow()
    for round in range(1, MAX_LINKS + 3):
        pair.train(round)
    pair.follow(round)
    assert pair.is_equal
    assert (pair.follower.counts["wholes"], pair.follower.counts["patches"]) == (2, 0)


def test_patch_that_is_not_held_falls_back_to_the_whole(network):
    pair = Pair(network)
    pair.train(0)
    pair.follow()
    pair.train(1)
    pair.publisher._store._bodies.clear()
    pair.follow(1)
    assert pair.is_equal
    counts = pair.follower.counts
    assert (counts["wholes"], counts["patches"], counts["refused"]) == (2, 0, 1)


def test_bits_that_disagree_with_the_digest_are_refused(network):
    """A patch that is right by its own digest, and makes other bits than the record says."""
    pair = Pair(network)
    pair.train(0)
    pair.follow()
    pair.train(1)
    before = bits_of(pair.taken)
    wrong = before.clone()
    wrong[7] += 1
    patch = encode(before, wrong)
    sha256 = pair.publisher._store.put(patch)
    pair.forge(links=((digest_of(before), sha256, len(patch)),))
    pair.follow(1)
    assert pair.is_equal
    assert (pair.follower.counts["wholes"], pair.follower.counts["refused"]) == (2, 1)


@pytest.mark.parametrize(
    "links",
    [
        ((bytes(32), bytes(32), 10),),
        ((None, hashlib.sha256(b"").digest(), 2 * VALUES),),
        ((None, bytes(32), 2**40),),
    ],
    ids=["of a version that is not there", "as large as the whole", "of a terabyte"],
)
def test_link_of_no_use_is_never_fetched(network, links):
    pair = Pair(network)
    pair.train(0)
    pair.follow()
    pair.train(1)
    own = digest_of(bits_of(pair.taken))
    pair.forge(links=tuple((before or own, sha256, size) for before, sha256, size in links))
    network.opened.clear()
    pair.follow(1)
    assert pair.is_equal
    assert pair.follower.counts["wholes"] == 2
    assert [protocol for _, _, protocol in network.opened] == [POLICY_PROTOCOL]


def test_policy_of_another_size_is_refused_unread(network):
    pair = Pair(network, values=VALUES - 1, first_s=0.05)
    pair.train(0)
    pair.follow()
    assert pair.follower.counts == {"refused": 1}
    assert network.opened == []
    assert not pair.taken[0].any()
    (said,) = pair.said
    assert said.endswith("set rl.publish there, and the same rl.policy here")


def test_version_that_is_gone_is_left_for_the_next(network):
    pair = Pair(network)
    pair.train(0)
    pair.follow()
    pair.forge(sha256=bytes(32), links=())
    pair.follow(1)
    assert (pair.follower.version, pair.follower.counts["refused"]) == (0, 1)
    pair.train(2)
    pair.follow(2)
    assert pair.is_equal


def break_first(pair, tries, error):
    """Let the first ``tries`` fetches of the follower fail; return what it asked for."""
    whole = pair.follower._store.fetch
    asked = []

    async def fetch(peer, sha256, nbytes, timeout):
        asked.append(sha256)
        if len(asked) <= tries:
            raise error
        return await whole(peer, sha256, nbytes, timeout)

    pair.follower._store.fetch = fetch
    return asked


def test_first_version_is_fetched_again_after_a_break(network, monkeypatch):
    """Fault: it was tried once, and the node began with its own weights 120 s later.

    Mutant: `_tried` stays set when the network failed.
    """
    monkeypatch.setattr(policy_versions, "RETRY_S", 0.0)
    pair = Pair(network)
    asked = break_first(pair, 2, NetworkError("the stream ended early."))
    pair.train(0)
    pair.follow()
    assert pair.is_equal
    assert len(asked) == 3
    assert pair.said == [f"the policy is that of peer {short(pair.host.peer_id)}, as of 0"]


def test_failed_fetch_is_repeated_only_after_a_pause(network, monkeypatch):
    """Mutants: each round fetches again at once; what was refused is fetched again; the node says
    that nothing was published.
    """
    monkeypatch.setattr(policy_versions, "RETRY_S", 3600.0)
    pair = Pair(network, first_s=0.3)
    asked = break_first(pair, 1, NetworkError("the stream ended early."))
    pair.train(0)
    pair.follow()
    assert pair.said == [
        f"the policy of peer {short(pair.host.peer_id)} was not taken over within 0 s (the stream "
        "ended early), so this node begins with its own"
    ]
    pair.follow(1)
    assert len(asked) == 1
    pair.follower._retry_at = 0.0  # the pause is over
    pair.follow(2)
    assert len(asked) == 2
    assert pair.is_equal
    refused = Pair(network, first_s=0.3)
    asked = break_first(refused, 1, MessageError("the body is another."))
    refused.train(0)
    refused.follow()
    refused.follow(1)
    assert len(asked) == 1
    assert "(the body is another)" in refused.said[0]


def test_slow_first_version_is_not_called_unpublished(network):
    """Fault: the node said that nothing was published while it was fetching it."""
    pair = Pair(network, first_s=0.3)

    async def never(peer, sha256, nbytes, timeout):
        await asyncio.Event().wait()

    pair.follower._store.fetch = never
    pair.train(0)
    pair.follower.begin_round(0, pair.taken)
    pair.follower.close()
    (said,) = pair.said
    assert "was not taken over within 0 s (it is still being fetched)" in said


def test_only_the_leaders_newest_record_counts(network):
    pair = Pair(network)
    pair.train(0)
    older = pair.gossip.published[-1]
    pair.follow()
    pair.train(1)
    pair.follow(1)
    pair.deliver(older)
    pair.forge(peer=pair.other.peer_id, sha256=bytes(32))
    pair.follow(2)
    assert pair.is_equal
    with pytest.raises(MessageError, match="dated in the future"):
        pair.forge(issued=NOW + 2000)


def test_late_joiner_takes_a_policy_once(network):
    """And none when it goes on from a checkpoint."""
    pair = Pair(network, always=False)
    pair.train(0)
    pair.follow()
    assert pair.is_equal
    pair.train(1)
    pair.follow(1)
    assert not pair.is_equal
    resumed = Pair(network, always=False)
    resumed.train(0)
    resumed.follow(5)
    assert not resumed.taken[0].any()


def test_unchanged_policy_is_not_published_again(network):
    pair = Pair(network)
    pair.train(0)
    pair.publisher.begin_round(1, pair.weights)
    assert len(pair.gossip.published) == 1


def test_patch_as_large_as_the_whole_is_no_link(network):
    """Nor is any before it: a chain that ends there leads nowhere."""
    pair = Pair(network)
    for round in range(3):
        pair.train(round)
    noise = torch.randint(-(2**15), 2**15, (VALUES,), dtype=torch.int16)
    pair.weights = [noise.view(torch.bfloat16)]
    pair.publisher.begin_round(3, pair.weights)
    pair.train(4)
    assert [len(record.links) for record in pair.gossip.published] == [0, 1, 2, 0, 1]


def test_one_peer_gets_a_bounded_number_of_wholes(network, monkeypatch):
    """Else a node's uplink could be drained by asking again and again."""
    monkeypatch.setattr(policy_versions, "MAX_PATCH_BYTES", 0)
    pair = Pair(network)
    pair.train(0)
    store, whole = pair.follower._store, pair.gossip.published[-1].sha256

    def fetch():
        fetching = store.fetch(pair.host.peer_id, whole, 2 * VALUES, 10)
        return network.call(fetching, 20)

    for _ in range(policy_versions.WHOLES_A_MINUTE):
        assert len(fetch()) == 2 * VALUES
    with pytest.raises(MessageError, match="does not hold"):
        fetch()

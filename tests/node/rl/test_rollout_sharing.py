"""The report of shared rollouts: each that came is in it once."""

from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.node.config.rl_settings import RLSettings
from shoal.node.rl.loading import load_env
from shoal.node.rl.rollout_sharing import TTL_S, RolloutSharing
from shoal.node.rl.task import RLTask
from shoal.node.task import Shard
from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.topics.rollout import Rollout
from tests.support.clock import Clock
from tests.support.gossip_nodes import SWARM, rollout_of

ENV = load_env("strings", {"families": "last", "letters": 3})
ME, OTHER, BANNED = (Identity.ephemeral() for _ in range(3))
NOW = 1e9


class Gossip:
    """A swarm's gossip without a network, which counts as the real one does."""

    swarm, identity = SWARM, ME

    def join(self, message_type, handler, limit):
        if message_type is not Rollout:
            return SimpleNamespace(close=lambda: None)
        self._handler = handler
        self.counts = {"sent": 0, "unsent": 0, "received": 0, "accepted": 0, "rejected": {}}
        self.publish = lambda message: None
        self.flush = lambda seconds: True
        return self

    def deliver(self, rollout):
        self.counts["received"] += 1
        try:
            self._handler(rollout.peer, rollout)
            self.counts["accepted"] += 1
        except MessageError as error:
            rejected = self.counts["rejected"]
            rejected[error.reason] = rejected.get(error.reason, 0) + 1


def shared(policy, swarm=SWARM, identity=ME, **settings):
    """Return a node's rollouts in ``swarm``, with the records that it published as ``sent``."""
    clock = Clock()
    clock.now = NOW
    barred = set[str]()
    directory = SimpleNamespace(now=clock, is_barred=barred.__contains__)
    gossip, sent = Gossip(), []
    membership = SimpleNamespace(
        gossip=gossip,
        identity=identity,
        directory=directory,
        host=SimpleNamespace(peer_id=ME.peer_id),
        swarm=swarm,
    )
    task = RLTask(ENV, lambda: policy, RLSettings(held_out=3, **settings), seed=1)
    events, said = [], []
    made = RolloutSharing(
        task, membership, lambda event, **fields: events.append(fields), said.append, 0.0
    )
    gossip.publish = sent.append
    return SimpleNamespace(
        task=task,
        gossip=gossip,
        clock=clock,
        barred=barred,
        report=made.report,
        sent=sent,
        events=events,
        said=said,
    )


@pytest.fixture
def sharing(tiny):
    return shared(tiny, local=0, external=1)


def group(index, *texts, peer=OTHER.peer_id, seed=3, **changes):
    question = ENV.made.question(seed, index)
    return rollout_of(
        peer,
        env=ENV.label,
        env_version=ENV.made.version,
        env_config=ENV.config,
        seed=seed,
        index=index,
        completions=tuple(texts or (question.answer, "zz")),
        finish=("stop",) * len(texts or "ab"),
        issued=NOW,
        **changes,
    )


def test_choice_of_groups_follows_from_the_private_key(tiny):
    """The fault: its seed was made of public values, so a sender could take all places."""
    first = Identity(Ed25519PrivateKey.from_private_bytes(b"1" * 32))
    second = Identity(Ed25519PrivateKey.from_private_bytes(b"2" * 32))
    chosen = []
    for identity in (first, first, second):
        sharing = shared(tiny, identity=identity, local=0, external=1)
        batches = sharing.task.batches(Shard(0, 1, 0))
        for index in range(8):
            sharing.gossip.deliver(group(index))
        chosen.append([next(batches).prompts for _ in range(2)])
    assert chosen[0] == chosen[1]
    assert chosen[0] != chosen[2]


def test_each_rollout_is_used_waiting_or_counted(sharing):
    """The fault: what the network refused as stale was reported as none."""
    batches = sharing.task.batches(Shard(0, 1, 0))
    deliver = sharing.gossip.deliver
    deliver(group(0).model_copy(update={"issued": NOW - TTL_S - 1}))
    deliver(group(1, peer=BANNED.peer_id))
    sharing.barred.add(BANNED.peer_id)
    deliver(group(2, peer=BANNED.peer_id))
    deliver(group(3, "zz", "zz", policy_version=3 + 9))
    deliver(group(4, policy_version=3 + 9))
    deliver(group(5).model_copy(update={"issued": NOW - 1}))
    deliver(group(4, policy_version=3 + 9))  # a copy
    next(batches)
    for index in range(10, 13):
        deliver(group(index, policy_version=3 + 9))
    next(batches)
    deliver(group(20))
    report = sharing.report(None, None)
    counted = {name: number for name, number in report["rejected"].items() if number}
    assert counted == {
        "stale": 1,
        "banned": 2,
        "no_spread": 1,
        "off_policy": 1,
        "duplicate": 1,
    }
    assert (report["used"], report["waiting"]) == (2, 3)
    assert report["received"] == 2 + 3 + sum(counted.values())


def test_who_learns_from_own_groups_alone_judges_none(tiny, monkeypatch):
    sharing = shared(tiny, local=1, external=0)
    batches = sharing.task.batches(Shard(0, 1, 0))
    admitted = []
    monkeypatch.setattr(sharing.task.foreign, "take", lambda *came: admitted.append(came) or [])
    for index in range(3):
        sharing.gossip.deliver(group(index))
    next(batches)
    assert admitted == []
    report = sharing.report(None, None)
    assert report["rejected"]["not_drawn"] == report["received"] == 3


def test_each_round_says_which_groups_were_of_no_use(tiny, monkeypatch):
    """Those of others by the reason, and own ones whose rewards are equal."""
    monkeypatch.setattr("shoal.node.rl.rollout_sharing.NOTIFY_S", 0.0)
    sharing = shared(tiny, local=2, external=1)
    batches = sharing.task.batches(Shard(0, 1, 0))
    sharing.gossip.deliver(group(0))
    sharing.gossip.deliver(group(3, "zz", "zz"))
    sharing.gossip.deliver(group(4, "yy", "yy"))
    update = next(batches)
    equal = sharing.task.totals.without_spread
    sharing.task.loss(sharing.task.model(), update)
    (event,) = sharing.events
    unused = {"no_spread": 2, **({"own_no_spread": equal} if equal else {})}
    assert (event["seen"], event["unused"]) == (5, unused)
    assert f"; of 5 groups so far {20 * (2 + equal)} % were of no use (" in sharing.said[0]
    assert "no_spread 40 %" in sharing.said[0]
    assert sharing.report(None, None)["own_without_spread"] == equal


def test_the_same_node_asks_other_questions_in_another_swarm(tiny):
    """With --resume-from it has learnt from those of the old one."""
    asked = []
    for swarm in (SWARM, SWARM, "b" * 52):
        node = shared(tiny, swarm, local=2, external=0)
        next(node.task.batches(Shard(0, 1, 0)))
        asked.append({(record.seed, record.index) for record in node.sent})
    assert asked[0] == asked[1]
    assert len(asked[0]) == 2
    assert not asked[0] & asked[2]

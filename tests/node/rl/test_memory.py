"""Hours of reinforcement learning take no more memory than its first minutes (rl-swarm #369)."""

import gc
import itertools
import tracemalloc

import pytest

from shoal.node.config.rl_settings import RLSettings
from shoal.node.rl import remote_rollouts
from shoal.node.rl.loading import load_env
from shoal.node.rl.task import RLTask
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.topics import rollout_pool
from shoal.swarm.topics.rollout_pool import RolloutPool
from tests.support.clock import Clock
from tests.support.gossip_nodes import SWARM, rollout_of

ENV = load_env("strings", {"families": "last", "letters": 3})
BEFORE, UPDATES = 120, 120  # after which memory is looked at for the first time, and again
GROUPS = 6  # that others share in a round
SENDERS = 4
SMALL = 64  # in place of bounds that are reached after hours only
MORE_BYTES = 500 * UPDATES  # torch caches a little; one group of an update takes more


class Gossip:
    """A swarm's gossip that keeps nothing."""

    swarm, identity = SWARM, Identity.ephemeral()

    def join(self, kind, handler, quota):
        self.deliver, self.counts = handler, {"rejected": {}}
        self.publish = lambda record: None
        return self


class Swarm:
    """What peers share: every round new groups, of ever new peers, of which some cannot be used."""

    def __init__(self, gossip, clock):
        self._gossip, self._clock, self._index = gossip, clock, itertools.count()

    def share(self, round):
        self._clock.now += 1.0
        for number in range(GROUPS):
            index = next(self._index)
            peer = PEERS[number % SENDERS] if number else Identity.ephemeral().peer_id
            answer = ENV.made.question(7, index).answer
            texts = (answer, "zz") if number % 3 else ("zz", "zz")
            try:
                self._gossip.deliver(peer, self._group(peer, index, texts, round))
            except MessageError:
                continue

    def _group(self, peer, index, texts, round):
        return rollout_of(
            peer,
            env=ENV.label,
            env_version=ENV.made.version,
            env_config=ENV.config,
            seed=7,
            index=index,
            completions=texts,
            finish=("stop", "stop"),
            policy_version=round,
            issued=self._clock.now,
        )


PEERS = [Identity.ephemeral().peer_id for _ in range(SENDERS)]


def objects_and_bytes():
    """Return what the collector knows, and the bytes that Python has allocated since it counts."""
    gc.collect()
    return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]


@pytest.mark.ci
def test_memory_stays_as_it_is_over_hundreds_of_updates(monkeypatch):
    monkeypatch.setattr(remote_rollouts, "REMEMBERED_GROUPS", SMALL)
    monkeypatch.setattr(remote_rollouts, "SENDERS", SMALL)
    monkeypatch.setattr(rollout_pool, "MAX_NONCES", SMALL)
    clock = Clock()
    clock.now = 1e9
    gossip = Gossip()
    pool = RolloutPool(gossip, ENV.knows, clock=clock)
    swarm = Swarm(gossip, clock)
    policy = Tiny(ENV.made, seed=1, layers=1, width=16, warm=Warm(steps=2, batch=4))
    settings = RLSettings(held_out=5, local=1, group=2, external=2)
    task = RLTask(ENV, lambda: policy, settings, seed=1)
    task.connect(pool, "me")
    trainer = Trainer(task, OuterSettings(method="none"), TrainSettings(steps=0))
    trainer.connect(trainer.opt.exchange, "run", Shard(0, 1, 0))
    rounds = itertools.count()

    def update(count):
        for _ in range(count):
            swarm.share(next(rounds))
            trainer.step()

    update(BEFORE)
    tracemalloc.start()
    try:
        update(SMALL)  # so that what is replaced from now on was allocated under its eyes
        objects, nbytes = objects_and_bytes()
        update(UPDATES)
        more_objects, more_bytes = objects_and_bytes()
    finally:
        tracemalloc.stop()
    assert task.foreign.used > UPDATES
    assert sum(task.foreign.rejected.values()) > UPDATES
    assert more_objects - objects < UPDATES // 4
    assert more_bytes - nbytes < MORE_BYTES

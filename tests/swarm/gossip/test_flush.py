"""A node that ends in good order publishes what it still has: nobody's last record is lost because its thread was quicker."""

import asyncio
from types import SimpleNamespace

import pytest

from shoal.swarm.errors import NetworkError
from shoal.swarm.gossip import gossip as module
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import Identity
from shoal.swarm.topics.rollout import RolloutPool
from tests.clocks import LoopThread

ME = Identity.ephemeral()
LONG = 30.0


class Host(LoopThread):
    """A host whose daemon takes a message only when it is allowed to."""

    def __init__(self):
        super().__init__()
        self.pubsub, self.taken, self.allowed, self.failing, self.met = self, [], asyncio.Event(), False, {}

    def serve(self, *args, **kwargs):
        pass

    async def subscribe(self, name):
        return SimpleNamespace(next=asyncio.Event().wait, close=lambda: None)

    async def publish(self, name, data):
        if self.failing:
            raise NetworkError("the daemon is gone")
        await self.allowed.wait()
        self.taken.append(data)

    def allow(self):
        self.loop.call_soon_threadsafe(self.allowed.set)


async def tasks():
    return len(asyncio.all_tasks())


@pytest.fixture
def host():
    made = Host()
    yield made
    while made.call(tasks(), LONG) > 1:  # those of a closed topic end
        pass
    made.close()


@pytest.fixture
def pool(host):
    made = RolloutPool(Gossip(host, ME, "a" * 52), lambda *env: True)
    yield made
    made.close()


def publish(pool, count):
    for index in range(count):
        pool.publish(
            pool.make(
                env="e", env_version="1", env_config=b"{}", seed=1, index=index, completions=("x",), finish=("stop",),
                policy_version=0, temperature=1.0,
            )
        )  # fmt: skip


def test_records_that_wait_are_published_before_flush_returns(host, pool):
    publish(pool, 3)
    assert not pool.flush(0.05)
    assert pool.counts["sent"] == 0
    host.allow()
    assert pool.flush(LONG)
    assert (pool.counts["sent"], len(host.taken)) == (3, 3)
    assert pool.flush(0.0)


def test_what_cannot_be_published_is_given_up_and_not_waited_for(host, pool, monkeypatch):
    monkeypatch.setattr(module, "AGAIN", (0.0,) * 5)
    host.failing = True
    publish(pool, 2)
    assert pool.flush(LONG)
    assert (pool.counts["sent"], pool.counts["unsent"]) == (0, 2)


def test_what_the_outbox_dropped_is_not_waited_for(host, pool):
    publish(pool, module.OUTBOX[0] + 5)
    host.allow()
    assert pool.flush(LONG)
    assert pool.counts["sent"] + pool.counts["unsent"] == module.OUTBOX[0] + 5

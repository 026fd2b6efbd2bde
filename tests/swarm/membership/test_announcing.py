"""A node's own record: when it is published."""

import asyncio
from concurrent.futures import Future

from shoal.swarm.identity import Identity
from shoal.swarm.membership.directory import Directory

ABOUT = {
    "name": "tester", "round": 1, "step": 25, "loss": 2.5, "steps_per_s": 4.0, "shard": 0, "shards": 4, "model": "0" * 64,
    "state": "training", "version": "0.1.0",
}  # fmt: skip


class Taking:
    """A host whose DHT takes every record, and on which nothing runs by itself."""

    def addresses(self):
        return ()

    def submit(self, coroutine):
        coroutine.close()
        return Future()

    async def store(self, key, subkey, value, ttl):
        return True


def test_an_announcement_is_urgent_until_it_is_published():
    """Else every reading would publish too."""
    directory = Directory(Taking(), Identity.ephemeral(), "a" * 52)
    directory.announce(**ABOUT)
    assert directory._urgent
    assert asyncio.run(directory._publish())
    assert not directory._urgent

"""Hosts: real ones with a directory, simulated ones, and some without a network."""

import asyncio
from collections import defaultdict
from concurrent.futures import Future

from shoal.swarm.identity import Identity
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.records import MemberValidator
from shoal.swarm.p2p.host import Host
from tests.sim.network import SimHost
from tests.support.records import ABOUT, SWARM


class Node:
    """A real host with a directory; ``beside``: what else runs on it."""

    def __init__(
        self, bootstrap=(), swarm=SWARM, identity=None, ttl=20.0, period=1.0, cap=32, **options
    ):
        self.identity = identity or Identity.ephemeral()
        self.peer_id, self.beside = self.identity.peer_id, []
        options = {"validator": MemberValidator(swarm), "swarm": swarm, "timeout": 60, **options}
        self.host = Host.start(self.identity, bootstrap=bootstrap, **options)
        self.directory = Directory(self.host, self.identity, swarm, ttl=ttl, period=period, cap=cap)

    def say(self, **changes):
        self.directory.announce(**{**ABOUT, **changes})

    def sees(self):
        return set(self.directory.members())

    def close(self):
        for each in (*self.beside, self.directory, self.host):
            each.close()


class Meeting(SimHost):
    """A simulated host that knows where it met others; ``at``: the IP address at which they meet
    it.
    """

    at = "127.0.0.1"

    def __init__(self, network, name, identity):
        super().__init__(network, name, identity)
        network.hosts[self.peer_id] = self
        network.every.append(self)
        self.met, self.kept = {}, {}

    def remember(self, addresses):
        self.kept.update(dict.fromkeys(addresses))

    def known(self):
        return list(self.kept)

    async def meet(self, addresses):
        """There is no DHT that could know them."""

    async def open(self, peer_id, protocol, **options):
        stream = await super().open(peer_id, protocol, **options)
        other = self.network.hosts[peer_id]
        self.met[peer_id], other.met[self.peer_id] = other.at, self.at
        return stream


class Quiet:
    """A host whose DHT takes every record and has none, and on which nothing runs by itself."""

    def addresses(self):
        return ()

    def submit(self, coroutine):
        coroutine.close()
        return Future()

    async def store(self, key, subkey, value, ttl):
        return True


class Shelf(Quiet):
    """The same with a table for the DHT."""

    def __init__(self):
        self.keys, self.reads = defaultdict(dict), 0

    def remember(self, addresses):
        list(addresses)

    def call(self, coroutine, timeout):
        return asyncio.run(coroutine)

    async def get(self, key):
        self.reads += 1
        return dict(self.keys[key])

    async def store(self, key, subkey, value, ttl):
        self.keys[key][subkey] = value
        return True

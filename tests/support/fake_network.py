"""A network in memory: real streams over socket pairs between fake hosts on one loop."""

import asyncio
import contextlib
import socket
import time

import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.messages import GroupReady
from tests.support.loop_thread import LoopThread
from tests.support.records import member_of

SWARM, MODEL = "a" * 52, "0" * 64


class FakeHost:
    """The part of a `shoal.swarm.p2p.host.Host` that an exchange needs."""

    def __init__(self, network, identity):
        self.network, self.identity, self.peer_id = network, identity, identity.peer_id
        self.traffic, self.resource_manager = TrafficMeter(), ResourceManager()
        self.internal_errors = InternalErrors()
        self.handlers, self.met = {}, {}
        self.dead = False
        self.heard = []
        self.streams = []

    def serve(self, protocol, handler):
        self.handlers[protocol] = handler

    def fall_silent(self, protocol):
        """Answer none that ask by ``protocol`` from now on; return who asked."""
        asked = []

        async def wait(stream):
            asked.append(stream.peer_id)
            await stream.more(60)

        self.handlers[protocol] = wait
        return asked

    def entry(self):
        return ()

    def known(self):
        return list(self.heard)

    def seeds(self):
        return {}

    @property
    def alive(self):
        return not self.dead

    def submit(self, coroutine):
        return self.network.submit(coroutine)

    def call(self, coroutine, timeout):
        return self.network.call(coroutine, timeout)

    async def open(self, peer_id, protocol, *, addresses=(), timeout):
        other = self.network.hosts.get(peer_id)
        self.network.opened.append((self.peer_id, peer_id, protocol))
        if other is None or other.dead or self.dead:
            raise NetworkError("the peer is not there.", "unreachable")
        mine, theirs = await self.network.wire()
        stream = Stream(peer_id, *mine, self.traffic)
        self.streams.append(stream)
        task = asyncio.ensure_future(
            other.answer(protocol, Stream(self.peer_id, *theirs, other.traffic))
        )
        self.network.tasks.add(task)
        task.add_done_callback(self.network.tasks.discard)
        return stream

    def usable(self, stream):
        return stream.idle

    async def answer(self, protocol, stream):
        self.streams.append(stream)
        with contextlib.suppress(ShoalError):
            await self.handlers[protocol](stream)
            await stream.more(2.0)
        stream.close()

    def die(self):
        """End all streams, and let no new one be opened."""
        self.dead = True

        async def cut():
            for stream in self.streams:
                stream.abort()

        self.call(cut(), 60)


class Network(LoopThread):
    def __init__(self):
        super().__init__()
        self.hosts, self.opened, self.tasks = {}, [], set()

    async def wire(self):
        return [await asyncio.open_connection(sock=end) for end in socket.socketpair()]

    def host(self):
        host = FakeHost(self, Identity.ephemeral())
        self.hosts[host.peer_id] = host
        return host

    def member(self, peer, round=0, model=MODEL):
        return member_of(peer, round=round, model=model, issued=time.time())


def paired(network, count, timeouts, seed=0):
    """Return so many exchanges in pairs, each on a fake host of its own, that all see each
    other.
    """
    hosts = [network.host() for _ in range(count)]
    members = {host.peer_id: network.member(host.peer_id) for host in hosts}
    return [
        PairExchange(
            PeerContext(host, host.identity, SWARM, MODEL, seed, lambda: members), timeouts
        )
        for host in hosts
    ]


class GroupPeer:
    """A group exchange on a fake host, with a membership of its own."""

    def __init__(self, network, wait=20.0, chunk_timeout=5.0, **options):
        self.network, self.host = network, network.host()
        self.id = self.host.peer_id
        self.sees, self.rounds, self.looked, self.issued, self.banned = None, {}, 0, {}, set()
        barred = lambda peer: peer in self.banned  # noqa: E731
        context = PeerContext(
            self.host,
            self.host.identity,
            SWARM,
            MODEL,
            0,
            self.members,
            lambda: self.look(),
            barred,
        )
        self.exchange = GroupExchange(
            context, ExchangeTimeouts(wait, chunk_timeout, 20.0), **options
        )

    def look(self):
        self.looked += 1

    def members(self):
        ids = list(self.network.hosts) if self.sees is None else self.sees
        records = {
            peer: self.network.member(peer, self.rounds.get(peer, 0))
            for peer in ids
            if peer not in self.banned
        }
        return {
            peer: record.model_copy(update={"issued": self.issued.get(peer, 1.0)})
            for peer, record in records.items()
        }

    def start(self, round=0, value=0.0, codec=FLOAT32, shape=(4,), fragment=0, weight=1.0):
        return self.exchange.start(
            Contribution(
                RoundKey(SWARM, round, fragment), [torch.full(shape, value)], weight, codec
            )
        )

    def waiting(self, round=0, fragment=0):
        """Return the number of members that wait at this peer for the group of a round."""
        pending = self.exchange._leader._pending.get((round, fragment))
        return 0 if pending is None else len(pending.members)


def group_ready(context, **changes):
    """Return a ready message for a group of the peer's swarm and model (``context``)."""
    fields = {
        "swarm": context.swarm,
        "round": 0,
        "fragment": 0,
        "model": context.model,
        "codec": "float32",
        "shapes": bytes(32),
        "nbytes": 4,
        "weight": 1.0,
        "sha256": bytes(32),
        "patience": 9.0,
        "nonce": bytes(16),
    }
    return GroupReady(**{**fields, **changes})

"""A network in memory: real streams over socket pairs between fake hosts on one loop, and peers that can be cut off at will."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from swarm.errors import NetworkError, ShoalError
from swarm.identity import Identity
from swarm.messages import Member
from swarm.stream import Stream, Traffic

MODEL = "0" * 64


class FakeHost:
    """What an exchange needs of a `swarm.host.Host`."""

    def __init__(self, network, identity):
        self.network, self.identity, self.peer_id = network, identity, identity.peer_id
        self.traffic = Traffic()
        self.handlers = {}
        self.dead = False
        self.streams = []

    def serve(self, protocol, handler):
        self.handlers[protocol] = handler

    def submit(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.network.loop)

    def call(self, coroutine, timeout):
        return self.submit(coroutine).result(timeout)

    async def open(self, peer_id, protocol, *, addresses=(), timeout):
        other = self.network.hosts.get(peer_id)
        self.network.opened.append((self.peer_id, peer_id, protocol))
        if other is None or other.dead or self.dead:
            raise NetworkError("the peer is not there.")
        mine, theirs = await self.network.wire()
        stream = Stream(peer_id, *mine, self.traffic)
        self.streams.append(stream)
        task = asyncio.ensure_future(other.answer(protocol, Stream(self.peer_id, *theirs, other.traffic)))
        self.network.tasks.add(task)
        task.add_done_callback(self.network.tasks.discard)
        return stream

    async def answer(self, protocol, stream):
        self.streams.append(stream)
        with contextlib.suppress(ShoalError):
            await self.handlers[protocol](stream)
            await stream.drained(2.0)
        stream.close()

    def die(self):
        """All streams end, and no new one can be opened."""
        self.dead = True

        async def cut():
            for stream in self.streams:
                stream.abort()

        self.call(cut(), 5)


class Network:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.hosts, self.opened, self.tasks = {}, [], set()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    async def wire(self):
        return [await asyncio.open_connection(sock=end) for end in socket.socketpair()]

    def host(self):
        host = FakeHost(self, Identity.ephemeral())
        self.hosts[host.peer_id] = host
        return host

    def member(self, peer, round=0, model=MODEL):
        return Member(
            swarm="a" * 52, peer=peer, name="x", addresses=(), round=round, step=0, loss=None, steps_per_s=0.0, shard=0,
            shards=1, model=model, state="training", issued=time.time(), version="0",
        )  # fmt: skip

    def close(self):
        async def end():
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def network():
    made = Network()
    yield made
    made.close()

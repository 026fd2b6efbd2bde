"""Logs of verification by stream: whole or not at all, made once for many, and not for who asks too
often.
"""

import os
import threading

import pytest

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.topics import verification_log
from shoal.swarm.topics.verification_log import (
    LOG_PROTOCOL,
    MAX_LOG_BYTES,
    LogReply,
    LogRequest,
    LogServer,
    fetch_log,
)
from shoal.swarm.wire.envelope import pack, unpack
from tests.support.clock import Clock
from tests.support.reasons import raises_for

SWARM = swarm_id(b"")


class Log:
    """Counts how often it is made; each is a text that says from where on."""

    def __init__(self, body=b""):
        self.body, self.asked, self.running, self.most = body, [], 0, 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, since):
        self.asked.append(since)
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.gate.wait(60)
        self.running -= 1
        return self.body or b"since %d" % since


@pytest.fixture
def serve(network):
    servers = []

    def start(make, **options):
        host = network.host()
        servers.append(LogServer(host, SWARM, make, **options))
        return host

    yield start
    for server in servers:
        server.close()


def fetch(reader, host, since=0, swarm=SWARM, timeout=10.0):
    return fetch_log(reader, host.peer_id, (), swarm, since, timeout)


def refused(reader, host, says, **options):
    with pytest.raises(MessageError, match=says) as caught:
        fetch(reader, host, **options)
    assert caught.value.reason == "unavailable"


def test_a_log_goes_between_real_hosts():
    log = Log(os.urandom(MAX_LOG_BYTES))
    me, you = Identity.ephemeral(), Identity.ephemeral()
    with (
        Host.start(me, timeout=60) as one,
        Host.start(you, bootstrap=one.addresses(), timeout=60) as other,
    ):
        server = LogServer(one, SWARM, log)
        assert fetch_log(other, one.peer_id, one.addresses(), SWARM, 2**53, 20) == log.body
        server.close()
        with pytest.raises(MessageError) as refused:
            fetch_log(other, one.peer_id, one.addresses(), SWARM, 1, 20)
        assert refused.value.reason == "unavailable"
        with pytest.raises(NetworkError):
            fetch_log(one, other.peer_id, other.addresses(), SWARM, 1, 5)  # it serves none
    assert log.asked == [2**53]


def test_logs_start_at_the_asked_round(network, serve):
    """From the round that was asked for and empty logs too."""
    host, empty, reader = serve(Log()), serve(lambda since: b""), network.host()
    assert [fetch(reader, host, since) for since in (0, 7, 2**53)] == [
        b"since 0",
        b"since 7",
        b"since 9007199254740992",
    ]
    assert fetch(reader, empty) == b""


def test_a_log_is_made_once_a_second(network, serve):
    log, clock = Log(), Clock()
    host, readers = (
        serve(log, clock=clock, quota=RateLimit(messages=100)),
        [network.host() for _ in range(3)],
    )
    for reader in readers:
        assert fetch(reader, host, 1) == b"since 1"
    assert log.asked == [1]
    clock.now = 0.99
    assert fetch(readers[0], host, 1) == b"since 1"
    assert log.asked == [1]
    clock.now = 1.0
    assert fetch(readers[0], host, 1) == b"since 1"
    assert log.asked == [1, 1]
    for since in range(2, 20):
        fetch(readers[0], host, since)
    fetch(readers[0], host, 1)  # not all are kept, even for a second
    assert log.asked == [1, 1, *range(2, 20), 1]


def test_never_two_at_once(network, serve):
    log = Log()
    log.gate.clear()
    host, readers = serve(log), [network.host() for _ in range(4)]
    found = {}

    def ask(since, reader):
        found[since] = fetch(reader, host, since)

    threads = [threading.Thread(target=ask, args=item) for item in enumerate(readers)]
    for thread in threads:
        thread.start()
    while len([1 for _, peer, _ in network.opened if peer == host.peer_id]) < 4:
        threading.Event().wait(0.01)
    log.gate.set()
    for thread in threads:
        thread.join(60)
    assert found == {since: b"since %d" % since for since in range(4)}
    assert log.most == 1


def test_each_peer_is_answered_so_often_and_others_still_are(network, serve):
    host, greedy, modest = serve(Log()), network.host(), network.host()
    for _ in range(4):
        assert fetch(greedy, host) == b"since 0"
    refused(greedy, host, "asked too often")
    assert fetch(modest, host) == b"since 0"


def test_foreign_and_long_logs_are_withheld(network, serve):
    """What is too long or another swarms is not handed out."""
    reader = network.host()
    refused(
        reader,
        serve(lambda since: bytes(MAX_LOG_BYTES + 1)),
        "8388609 bytes, of which at most 8388608",
    )
    refused(reader, serve(Log()), "belongs to swarm", swarm=swarm_id(b"other"))


def test_a_log_that_cannot_be_made_costs_one_request(monkeypatch, network, serve):
    monkeypatch.setattr(verification_log, "MAKE_S", 0.2)
    log = Log()
    log.gate.clear()
    host, reader = serve(log), network.host()
    refused(reader, host, "could not be made in 0.2 s", since=1)
    log.gate.set()
    assert fetch(reader, host, since=2) == b"since 2"


def test_what_a_liar_announces_is_refused_or_given_up(network):
    def liar(reply, body=b""):
        host = network.host()

        async def answer(stream):
            unpack(await stream.receive(LogRequest.LIMIT, 30), LogRequest)
            await stream.send(reply, 30)
            if body:
                await stream.swap(
                    memoryview(body),
                    memoryview(bytearray()),
                    chunk_timeout=5,
                    deadline=network.loop.time() + 5,
                )

        host.serve(LOG_PROTOCOL, answer)
        return host

    reader = network.host()
    huge = pack(LogReply(nbytes=2)).replace(
        b"\xa6nbytes\x02", b"\xa6nbytes\xce" + (MAX_LOG_BYTES + 1).to_bytes(4, "big")
    )
    with raises_for("malformed", MessageError):
        fetch(reader, liar(huge))
    with raises_for("broken", NetworkError):
        fetch(reader, liar(pack(LogReply(nbytes=100)), b"short"))
    assert fetch(reader, liar(pack(LogReply(nbytes=5)), b"whole")) == b"whole"


def test_a_peer_that_says_nothing_is_waited_for_so_long(network):
    host = network.host()
    over = threading.Event()

    async def silent(stream):
        await stream.receive(LogRequest.LIMIT, 30)
        await stream.more(10)
        over.set()

    host.serve(LOG_PROTOCOL, silent)
    with raises_for("timeout", NetworkError):
        fetch(network.host(), host, timeout=0.2)
    assert over.wait(60)  # and nothing is left open

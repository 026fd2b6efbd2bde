"""What a host does while its daemon starts; registering a protocol with a daemon that is too slow, or never takes it."""

import threading

import psutil
import pytest
from hivemind.utils.timed_storage import get_dht_time

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import hivemind_adapter
from shoal.swarm.p2p import host as host_module
from shoal.swarm.p2p.daemon import DaemonError
from shoal.swarm.p2p.daemon_supervisor import DaemonSupervisor
from shoal.swarm.p2p.host import Host


def test_a_host_imports_while_its_daemon_starts_and_meets_the_swarm_after(monkeypatch):
    launch, join, launched, done = DaemonSupervisor._launch, hivemind_adapter.join_dht, threading.Event(), []

    async def noted_launch(*arguments):
        daemon = await launch(*arguments)
        launched.set()
        return daemon

    async def noted_join(*arguments):
        done.append("DHT")
        return await join(*arguments)

    def meanwhile():
        done.append("launched" if launched.wait(60) else "the daemon waits for the imports")

    monkeypatch.setattr(DaemonSupervisor, "_launch", noted_launch)
    monkeypatch.setattr(hivemind_adapter, "join_dht", noted_join)
    with Host.start(Identity.ephemeral(), timeout=15, meanwhile=meanwhile):
        assert done == ["launched", "DHT"]


def test_an_import_that_fails_leaves_no_daemon_running():
    identity, before = Identity.ephemeral(), set(psutil.Process().children(recursive=True))

    def meanwhile():
        raise ImportError("no such module")

    with pytest.raises(ImportError, match="no such module"):
        Host.start(identity, timeout=15, meanwhile=meanwhile)
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, 30)[1] == []
    with identity.lock():  # and its key is free again
        pass


async def echo(stream):
    await stream.send(await stream.receive(100, 30), 5)


@pytest.fixture
def two():
    with (
        Host.start(Identity.ephemeral(), timeout=60) as a,
        Host.start(Identity.ephemeral(), bootstrap=a.addresses(), timeout=60) as b,
    ):
        yield a, b


def test_a_protocol_is_registered_however_often_the_daemon_was_too_slow(two, monkeypatch):
    a, b = two
    serve, refused = a._supervisor.daemon.serve, []

    async def slow(protocol, handler):
        if len(refused) < 3:
            refused.append(protocol)
            raise DaemonError("the network daemon did not answer within 10 s.")
        if len(refused) < 4:
            refused.append(protocol)
            await serve(protocol, handler)  # the daemon took it, but its answer was lost
            raise DaemonError("the network daemon did not answer within 10 s.")
        await serve(protocol, handler)

    monkeypatch.setattr(a._supervisor.daemon, "serve", slow)
    a.serve("/test/late/1", echo)
    assert len(refused) == 4

    async def late():
        return await (await b.open(a.peer_id, "/test/late/1", timeout=30)).send(b"x", 30)

    b.call(late(), 60)


def test_a_protocol_that_the_daemon_never_takes_is_an_error(two, monkeypatch):
    async def never(protocol, handler):
        raise DaemonError("the network daemon did not answer within 10 s.")

    monkeypatch.setattr(two[0]._supervisor.daemon, "serve", never)
    monkeypatch.setattr(host_module, "SERVE_S", 0.3)
    with pytest.raises(NetworkError, match=r"did not take the protocol /test/late/1 within 0\.3 s"):
        two[0].serve("/test/late/1", echo)


def test_a_peer_that_lost_answers_is_asked_again_before_records_expire(two):
    blacklist = two[0]._supervisor.dht.blacklist
    for _ in range(9):
        blacklist.banned_peers.clear()  # as if the time of the last failure were over
        blacklist.register_failure("peer")
    (expires,) = (item.expiration_time for _, item in blacklist.banned_peers.items())
    assert expires - get_dht_time() < 10

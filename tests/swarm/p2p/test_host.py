"""Two and three real hosts on loopback: starts, calls, limits, a daemon that is killed or too slow,
and ends of every kind.
"""

import asyncio
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from hivemind.utils.timed_storage import get_dht_time

from shoal.swarm.errors import MessageError, NetworkError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import daemon_supervisor, hivemind_adapter
from shoal.swarm.p2p import host as host_module
from shoal.swarm.p2p.bootstrapper import HostOptions
from shoal.swarm.p2p.daemon import DaemonError
from shoal.swarm.p2p.daemon_supervisor import DaemonSupervisor
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.peerstore import Peerstore
from shoal.swarm.p2p.resource_manager import MAX_HANDLERS_PER_PEER, ResourceManager
from shoal.swarm.seed.bootstrap_node import Seed
from tests.support.echo_host import ECHO, ask, start
from tests.support.waiting import until

MB = 1 << 20


async def echo(stream):
    while True:
        await stream.send(await stream.receive(MB, 30), 5)


@pytest.fixture
def two():
    with start() as a, start(bootstrap=a.addresses()) as b:
        a.serve(ECHO, echo)
        b.serve(ECHO, echo)
        yield a, b


def kill_daemon(host):
    """Kill -9 of the p2pd itself, not of its guard."""
    (p2pd,) = psutil.Process(host._supervisor.daemon._child.pid).children()
    os.kill(p2pd.pid, signal.SIGKILL)


def test_a_message_both_ways_and_8_mb(two):
    a, b = two
    assert b.call(ask(b, a.peer_id), 60) == b"hello"
    assert a.call(ask(a, b.peer_id), 60) == b"hello"
    size = 8 * MB
    theirs, ours = os.urandom(size), os.urandom(size)
    got = bytearray(size)

    async def give(stream):
        await stream.send(b"go", 30)
        await swap(stream, theirs, got)

    async def swap(stream, out, into):
        await stream.swap(
            memoryview(out), memoryview(into), chunk_timeout=5, deadline=time.monotonic() + 20
        )

    async def take():
        stream = await b.open(a.peer_id, "/test/bulk/1", timeout=30)
        assert await stream.receive(2, 30) == b"go"
        into = bytearray(size)
        await swap(stream, ours, into)
        stream.close()
        return into

    a.serve("/test/bulk/1", give)
    before = b.traffic.sent, b.traffic.received
    assert b.call(take(), 60) == theirs
    until(lambda: got == ours)
    assert (b.traffic.sent - before[0], b.traffic.received - before[1]) == (size, size + 6)


def test_peers_are_found_by_id_through_a_common_bootstrap_peer(two):
    a, b = two
    with start(bootstrap=a.addresses()) as c:
        assert c.call(ask(c, b.peer_id), 60) == b"hello"


def test_peers_are_found_by_address():
    with start() as a, start() as b:
        a.serve(ECHO, echo)
        with pytest.raises(NetworkError):
            b.call(ask(b, a.peer_id), 60)
        assert b.call(ask(b, a.peer_id, addresses=["junk", *a.addresses()]), 60) == b"hello"


def test_open_says_why_it_failed(two):
    a, b = two
    with pytest.raises(
        NetworkError,
        match="does not offer /nothing/1: it is not ready, or its shoal is of another version",
    ):
        b.call(b.open(a.peer_id, "/nothing/1", timeout=30), 60)
    nobody = Identity.ephemeral().peer_id
    with pytest.raises(NetworkError, match=f"{nobody[-8:]} refused the connection"):
        b.call(
            b.open(nobody, ECHO, addresses=[f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}"], timeout=30), 60
        )
    with pytest.raises(NetworkError):
        b.call(b.open("not a peer id", ECHO, timeout=30), 60)


def test_a_failing_handler_ends_its_stream_and_nothing_else(two, caplog):
    a, b = two

    async def fail(stream):
        await stream.receive(10, 30)
        raise ZeroDivisionError("a bug")

    async def refuse(stream):
        raise MessageError("not what we speak")

    a.serve("/test/fail/1", fail)
    a.serve("/test/refuse/1", refuse)

    async def call(protocol):
        stream = await b.open(a.peer_id, protocol, timeout=30)
        await stream.send(b"x", 30)
        await stream.receive(10, 30)

    for protocol in ("/test/fail/1", "/test/refuse/1"):
        with pytest.raises(NetworkError):
            b.call(call(protocol), 60)
    assert a.internal_errors.counts() == {"stream": 1}
    assert [r.levelname for r in caplog.records if "answering a call" in r.getMessage()] == [
        "ERROR"
    ]
    assert b.call(ask(b, a.peer_id), 60) == b"hello"


def test_one_peer_cannot_take_all_handlers(two):
    a, b = two

    async def flood():
        streams = [await b.open(a.peer_id, ECHO, timeout=30) for _ in range(MAX_HANDLERS_PER_PEER)]
        for stream in streams:
            await stream.send(b"x", 30)
            assert await stream.receive(1, 30) == b"x"
        with pytest.raises(NetworkError):
            await ask(b, a.peer_id)
        for stream in streams:
            stream.close()

    b.call(flood(), 60)
    until(lambda: not a.resource_manager._busy)
    assert b.call(ask(b, a.peer_id), 60) == b"hello"


def test_dial_or_stream_tells_where_a_peer_is(two):
    """Where a peer is is known once it was dialled or a stream to it opened."""
    a, b = two
    gone = Identity.ephemeral().peer_id
    for work in (
        b.locate([(gone, ["/ip4/127.0.0.1/tcp/1"]), (a.peer_id, a.addresses()), ("none", ())], 20),
        ask(b, a.peer_id),
    ):
        b._supervisor.backoff.met.clear()
        b.call(work, 60)
        assert b.met == {a.peer_id: "127.0.0.1"}


def test_records(two):
    a, b = two
    large = b"2" * host_module.MAX_VALUE_BYTES
    assert a.call(a.store("key", "one", b"1", 20), 60)
    assert b.call(b.store("key", "two", large, 20), 60)
    for host in two:
        assert host.call(host.get("key"), 60) == {"one": b"1", "two": large}
        assert host.call(host.get("nothing"), 60) == {}
    with pytest.raises(ValueError):
        a.call(a.store("key", "big", bytes(host_module.MAX_VALUE_BYTES + 1), 20), 60)
    assert a.call(a.store("key", "brief", b"3", 0.2), 60)
    until(lambda: "brief" not in b.call(b.get("key"), 60))


def test_a_light_host_reads_but_stores_nothing_for_others(two):
    a, b = two
    a.call(a.store("key", "one", b"1", 20), 60)
    with start(bootstrap=b.addresses(), light=True) as light:
        assert light.call(light.get("key"), 60) == {"one": b"1"}
        table = a._supervisor.dht.protocol.routing_table
        assert light.peer_id not in {peer.to_base58() for peer in table.peer_id_to_uid}


def test_a_call_has_a_deadline_and_ends_its_coroutine(two):
    a, _ = two
    ended = threading.Event()

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(NetworkError, match=r"longer than 0.1 s"):
        a.call(forever(), 0.1)
    assert ended.wait(60)

    async def inside():
        return a.submit(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="await the coroutine there"):
        a.call(inside(), 60)


@pytest.mark.ci
@pytest.mark.parametrize("victim", ["daemon", "guard"])
def test_a_killed_daemon_comes_back_as_the_same_peer(two, victim):
    a, b = two
    assert a.call(a.store("key", "one", b"1", 60), 60)
    before = a.addresses()
    until(lambda: b.peer_id in a._supervisor.known)
    hanging, dht = a.submit(hang(a, b.peer_id)), a._supervisor.dht
    until(lambda: b.resource_manager._busy[a.peer_id] == 1)
    if victim == "daemon":
        kill_daemon(a)
    else:
        os.kill(a._supervisor.daemon._child.pid, signal.SIGKILL)
    with pytest.raises(NetworkError):
        hanging.result(2)
    until(lambda: a.restarts == 1)
    assert a.alive
    assert not dht.is_alive  # what hivemind runs for it in the background ends
    assert a.addresses() == before
    assert b.call(ask(b, a.peer_id), 60) == b"hello"
    assert a.call(ask(a, b.peer_id), 60) == b"hello"
    assert a.call(a.get("key"), 60) == {"one": b"1"}
    assert b.call(b.store("key", "two", b"2", 60), 60)
    assert set(a.call(a.get("key"), 60)) == {"one", "two"}


@pytest.mark.parametrize("taken", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_the_end_of_the_daemon_is_noticed_whoever_has_sigchld(taken):
    """Lightning resets it, and torch's loaders take it: the end was not noticed, and each close
    took 4 s.
    """
    with start() as host:
        before = signal.signal(signal.SIGCHLD, taken)
        try:
            daemon = host._supervisor.daemon
            kill_daemon(host)
            until(lambda: host.restarts == 1)
            assert daemon._child._ended.done()
            child = host._supervisor.daemon._child
            host.close()
            assert child._ended.done()  # as ``close`` waited for it, and did not give it up
        finally:
            signal.signal(signal.SIGCHLD, before)


async def hang(host, peer_id):
    stream = await host.open(peer_id, ECHO, timeout=30)
    await stream.receive(10, 60)


def test_calls_fail_at_once_while_there_is_no_daemon(two, monkeypatch):
    a, b = two
    allowed = threading.Event()
    launch = a._supervisor._launch

    async def later(timeout):
        while not allowed.is_set():
            await asyncio.sleep(0.02)
        return await launch(timeout)

    monkeypatch.setattr(a._supervisor, "_launch", later)
    kill_daemon(a)
    until(lambda: not a.alive)
    for work in (a.get("k"), a.store("k", "s", b"", 60), a.open(b.peer_id, ECHO, timeout=60)):
        began = time.monotonic()
        with pytest.raises(NetworkError, match="being restarted"):
            a.call(work, 60)
        assert time.monotonic() - began < 30  # it waited for none of those deadlines
    a.serve("/test/new/1", echo)  # registered by the restart
    allowed.set()
    until(lambda: a.restarts == 1)

    async def new():
        return await (await b.open(a.peer_id, "/test/new/1", timeout=5)).send(b"x", 30)

    def reached():
        try:
            b.call(new(), 60)
        # b's daemon may have dialled while there was nobody, and then does not for five seconds
        except NetworkError as error:
            # By a connection to the dead one, or its dial.
            if not any(
                said in str(error)
                for said in ("did not answer lately", "ended early", "did not open a stream")
            ):
                raise
            return False
        return True

    until(reached)


@pytest.mark.ci
@pytest.mark.parametrize("noticed", [True, False])
def test_free_port_may_be_the_former_one(tmp_path, monkeypatch, noticed):
    """Before the daemon starts, or while it does."""
    here = {"known": tmp_path / "peers.json", "listen": ["/ip4/127.0.0.1/tcp/0"], "swarm": "s"}
    with start(**here) as first:
        (listened,) = first._supervisor.known.listened
    with start(**here) as again:
        assert again._supervisor.known.listened == (listened,)
    with socket.create_server(("127.0.0.1", int(listened.rpartition("/")[2]))):
        if not noticed:
            monkeypatch.setattr(daemon_supervisor, "check_free", lambda listen: None)
        with start(**here) as other:
            assert other._supervisor.known.listened != (listened,)
            assert other.alive


def test_the_output_of_a_daemon_that_has_ended_is_closed():
    """Else the garbage collector closes it, in any thread, and the loop again, when its number is
    that of another thread's file.
    """
    with start() as host:
        output = host._supervisor.daemon._child._popen.stdout
        kill_daemon(host)
        until(lambda: output.closed)


@pytest.mark.ci
def test_a_failed_restart_is_tried_again(two, monkeypatch, caplog):
    a, b = two
    launch, failures = a._supervisor._launch, []

    async def flaky(timeout):
        if len(failures) < 2:
            failures.append(ValueError("anything at all"))
            raise failures[-1]
        return await launch(timeout)

    monkeypatch.setattr(a._supervisor, "_launch", flaky)
    kill_daemon(a)
    until(lambda: a.restarts == 1)
    assert len(failures) == 2
    assert sum("anything at all" in record.getMessage() for record in caplog.records) == 2

    def answers():
        try:
            return b.call(ask(b, a.peer_id), 60) == b"hello"
        except (
            NetworkError
        ):  # it tried while the daemon was down, and libp2p does not try again for 5 s
            return False

    until(answers)


def test_the_swarm_is_found_again_through_remembered_peers():
    """Let the bootstrap peer be gone for good when the daemon dies, while a third peer is known."""
    with (
        start() as first,
        start(bootstrap=first.addresses()) as b,
        start(bootstrap=first.addresses()) as c,
    ):
        b.serve(ECHO, echo)
        c.remember(b.addresses())
        first.close()
        kill_daemon(c)
        until(lambda: c.restarts == 1)
        b.call(b.store("key", "one", b"1", 60), 60)
        assert c.call(c.get("key"), 60) == {"one": b"1"}
        assert c.call(ask(c, b.peer_id), 60) == b"hello"


@pytest.mark.parametrize(
    ("announced", "says"),
    [
        (
            f"/dns4/{'.'.join(['a' * 50] * 5)}/tcp/4001",
            "it has 269 characters, at most 199 are allowed",
        ),
        ("/ip4/203.0.113.7/tcp/99999", "its port is not a number"),
        ("/ip4/203.0.113.7/tcp/4001/ws", "it does not end with /p2p/"),
    ],
)
def test_an_address_that_no_record_could_hold_is_not_announced(announced, says):
    with pytest.raises(StartupError, match=f"^cannot announce /.*{says}"):
        start(announce=[announced])
    seed = Seed(Identity.ephemeral(), listen=["/ip4/127.0.0.1/tcp/0"], announce=[announced])
    with pytest.raises(StartupError, match=f"^cannot announce /.*{says}"):
        asyncio.run(seed.run())


def test_relay_with_a_long_name_is_left_out(monkeypatch):
    """An address by a relay with a long name is left out."""
    with start() as a:
        (own, *_) = a.addresses()
        long = (
            f"/dns4/{'.'.join(['a' * 50] * 3)}/tcp/4001/p2p/{a.peer_id}/p2p-circuit/p2p/{a.peer_id}"
        )
        monkeypatch.setattr(a._supervisor, "addresses", (long, own))
        assert a.addresses() == (own,)


def test_announced_addresses_replace_the_own():
    announced = "/ip4/203.0.113.7/tcp/4001"
    with start(announce=[announced]) as a:
        assert a.addresses() == (f"{announced}/p2p/{a.peer_id}",)
        (listen,) = a._supervisor._listen
        with start() as b:
            a.serve(ECHO, echo)
            assert (
                b.call(ask(b, a.peer_id, addresses=[f"{listen}/p2p/{a.peer_id}"]), 60) == b"hello"
            )


def test_close_needs_no_force_and_is_final_and_repeatable(two, caplog):
    a, b = two
    pending = a.submit(hang(a, b.peer_id))
    until(lambda: b.resource_manager._busy[a.peer_id] == 1)
    daemon = a._supervisor.daemon._child.pid
    a.close(timeout=60)  # the stream that hangs would take as long
    a.close()
    assert "did not close within" not in caplog.text
    assert pending.done()
    assert not psutil.pid_exists(daemon)
    assert not a.alive
    assert not a._thread.is_alive()
    with pytest.raises(NetworkError):
        a.call(a.get("k"), 60)


def test_close_while_answering_reports_no_error(two, caplog):
    """Fault: "Exception in callback ... CancelledError" was logged when a session was closed."""
    a, b = two
    begun = threading.Event()

    async def wait(stream):
        begun.set()
        await asyncio.Event().wait()

    async def call():
        stream = await b.open(a.peer_id, "/test/wait/1", timeout=30)
        await stream.receive(10, 60)

    a.serve("/test/wait/1", wait)
    calling = b.submit(call())
    assert begun.wait(30)
    a.close(timeout=60)
    assert "Exception in callback" not in caplog.text
    with pytest.raises(NetworkError):
        calling.result(60)


def test_close_does_not_wait_for_a_stuck_loop(two):
    a, _ = two
    release = threading.Event()
    guard = psutil.Process(a._supervisor.daemon._child.pid)
    a._loop.call_soon_threadsafe(release.wait, 300)
    a.close(timeout=1)
    assert a._thread.is_alive()  # the loop is stuck to this moment
    guard.wait(60)  # the daemon went although the loop could not end it
    release.set()
    a._thread.join(60)
    assert a._loop.is_closed()


def test_host_imports_while_its_daemon_starts(monkeypatch):
    """A host imports while its daemon starts and meets the swarm after."""
    launch, join, launched, done = (
        DaemonSupervisor._launch,
        hivemind_adapter.join_dht,
        threading.Event(),
        [],
    )

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
    with start(meanwhile=meanwhile):
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


def test_slow_daemon_still_gets_the_protocol(two, monkeypatch):
    """A protocol is registered however often the daemon was too slow."""
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


def test_lost_answers_are_asked_for_before_expiry(two):
    """A peer that lost answers is asked again before records expire."""
    blacklist = two[0]._supervisor.dht.blacklist
    for _ in range(9):
        blacklist.banned_peers.clear()  # as if the time of the last failure were over
        blacklist.register_failure("peer")
    (expires,) = (item.expiration_time for _, item in blacklist.banned_peers.items())
    assert expires - get_dht_time() < 10


def test_overdue_dials_fail_nothing():
    """Redialling, reports to bootstrap nodes and peer exchange expect a NetworkError at most: a
    TimeoutError was a traceback.
    """

    async def meet(me, peer):
        loop, stood, dialled = asyncio.get_running_loop(), [0.0], []
        clock = loop.time
        loop.time = lambda: clock() + stood[0]

        async def connect(to, addresses):
            dialled.append(to)
            stood[0] += 60.0  # for so long nothing runs
            await asyncio.Event().wait()

        options = HostOptions(
            (), (), (f"/ip4/192.0.2.1/tcp/1/p2p/{peer}",), None, False, "off", "a swarm", True
        )
        supervisor = DaemonSupervisor(
            me, options, Peerstore(me.peer_id, None, "a swarm"), ResourceManager()
        )
        supervisor.daemon, supervisor.dht, supervisor._down = (
            SimpleNamespace(connect=connect),
            object(),
            loop.create_future(),
        )
        await supervisor.bootstrapper.meet(options.bootstrap)
        await supervisor.bootstrapper.find_seeds()
        assert dialled == [peer, peer]
        assert supervisor.bootstrapper.seeds == {}

    asyncio.run(meet(Identity.ephemeral(), Identity.ephemeral().peer_id))

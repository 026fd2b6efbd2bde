"""A bootstrap node: its registry of members, that it needs no torch, and that a swarm is found
through it alone.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.swarm.access.link import Link
from shoal.swarm.errors import StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.seed_announcer import SeedAnnouncer
from shoal.swarm.p2p.host import Host
from shoal.swarm.seed.bootstrap_node import MAX_OF_RANGE, Seed, crowding_peers
from shoal.swarm.seed.registry import MAX_MEMBERS, MAX_PLACES, MAX_SWARMS, TTL_S, SeedRegistry
from shoal.swarm.wire.envelope import seal
from shoal.swarm.wire.messages import MAX_NAMED, SeedRequest
from tests.support.clock import Clock
from tests.support.directory_hosts import Node
from tests.support.records import member_of
from tests.support.waiting import until

SWARM = "a" * 52
ROOT = Path(__file__).resolve().parents[3]


def member(identity, swarm=SWARM, state="training", addresses=()):
    return member_of(identity.peer_id, swarm=swarm, addresses=tuple(addresses), state=state)


def note(registry, identity, swarm=SWARM, host="", **fields):
    request = SeedRequest(swarm=swarm, record=seal(member(identity, swarm, **fields), identity))
    return registry.answer(identity.peer_id, request, host)


def asked(registry, swarm=SWARM, peer="somebody"):
    return registry.answer(peer, SeedRequest(swarm=swarm)).members


def counted(registry):
    """Return the numbers of swarms and of members that are noted."""
    return len(registry._swarms), sum(map(len, registry._swarms.values()))


def test_member_is_named_until_it_leaves():
    """A member is named to others until it leaves or falls silent."""
    clock = Clock()
    registry = SeedRegistry(clock)
    ada, bob = Identity.ephemeral(), Identity.ephemeral()
    assert note(registry, ada).members == ()
    (named,) = note(registry, bob).members
    assert named == seal(member(ada), ada)
    assert len(asked(registry)) == 2
    assert asked(registry, "b" * 52) == ()
    assert note(registry, ada, state="leaving").reason == ""
    assert asked(registry) == (seal(member(bob), bob),)
    clock.now += TTL_S - 1
    note(registry, ada)
    clock.now += 2
    assert asked(registry) == (seal(member(ada), ada),)
    clock.now += TTL_S
    assert asked(registry) == ()
    assert counted(registry) == (0, 0)


def test_only_the_own_record_is_noted():
    """Only the own record for the swarm asked about is noted."""
    registry = SeedRegistry()
    ada, bob = Identity.ephemeral(), Identity.ephemeral()
    stolen = seal(member(ada), ada)
    for record, swarm in (
        (stolen, SWARM),
        (seal(member(bob, "b" * 52), bob), SWARM),
        (stolen[:-1], SWARM),
        (b"", SWARM),
    ):
        assert registry.answer(bob.peer_id, SeedRequest(swarm=swarm, record=record)).reason in (
            "forged",
            "malformed",
            "truncated",
        )
    assert counted(registry) == (0, 0)


def test_the_registry_is_bounded(monkeypatch):
    registry = SeedRegistry(chance=random.Random(0))
    many = [Identity.ephemeral() for _ in range(MAX_MEMBERS + 3)]
    for one in many:
        note(registry, one)
    assert counted(registry) == (1, MAX_MEMBERS)
    seen = {record for _ in range(200) for record in asked(registry)}
    assert seen == {seal(member(one), one) for one in many[3:]}
    assert len(asked(registry)) == MAX_NAMED
    names = [
        f"{'abcdefghijklmnop'[i // 16]}{'abcdefghijklmnop'[i % 16]}" + "a" * 50
        for i in range(1, MAX_SWARMS + 1)
    ]
    reasons = [note(registry, many[0], swarm).reason for swarm in names[: MAX_PLACES + 1]]
    assert reasons == [""] * MAX_PLACES + ["places"]
    for i, swarm in enumerate(names):
        note(registry, many[1 + i // MAX_PLACES % 30], swarm)
    assert counted(registry)[0] <= MAX_SWARMS
    full = SeedRegistry()
    monkeypatch.setattr("shoal.swarm.seed.registry.MAX_SWARMS", 1)
    assert note(full, many[0], names[0]).reason == ""
    assert note(full, many[1], names[1]).reason == "full"
    assert note(full, many[1], names[0]).reason == ""


def test_many_keys_keep_no_swarm_out():
    """They took all places of swarms with 33 keys, and all of a swarm's members with 32."""
    clock = Clock()
    registry = SeedRegistry(clock, chance=random.Random(0))
    keys = [Identity.ephemeral() for _ in range(198)]
    names = [
        "".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz234567", k=51)) + "a"
        for n in range(200)
    ]
    anna, bert, honest, known = Identity.ephemeral(), Identity.ephemeral(), names[0], names[1]
    assert note(registry, bert, known, "192.0.2.7").reason == ""
    for minute in range(3):
        clock.now = 60.0 * minute
        for n, key in enumerate(keys):
            note(registry, key, names[2 + n % 198], f"10.{n % 3}.0.{n % 250}")
        for key in keys[:40]:
            note(registry, key, known, "10.0.0.1")
        assert note(registry, bert, known, "192.0.2.7").reason == ""
        assert note(registry, anna, honest, "198.51.100.4").reason == ""
        assert counted(registry)[0] <= MAX_SWARMS
        assert seal(member(bert, known), bert) in asked(registry, known)
        assert asked(registry, honest) == (seal(member(anna, honest), anna),)


def test_a_newcomer_displaces_nobody_who_has_one_place(monkeypatch):
    registry = SeedRegistry()
    monkeypatch.setattr("shoal.swarm.seed.registry.MAX_SWARMS", 2)
    ada, bob, eve = (Identity.ephemeral() for _ in range(3))
    for key, swarm, host in ((ada, "a", "10.1.0.1"), (bob, "b", "10.2.0.1")):
        assert (
            note(registry, key, swarm * 52 if swarm == "a" else "b" * 51 + "a", host).reason == ""
        )
    assert note(registry, eve, "c" * 51 + "a", "10.3.0.1").reason == "full"


def test_crowded_range_takes_no_swarm(monkeypatch):
    """Members of a crowded range do not make a swarm one of theirs."""
    monkeypatch.setattr("shoal.swarm.seed.registry.MAX_SWARMS", 4)
    clock = Clock()
    registry = SeedRegistry(clock)
    ada, *eves = (Identity.ephemeral() for _ in range(6))
    assert note(registry, ada, SWARM, "10.1.0.1").reason == ""
    assert note(registry, eves[0], SWARM, "10.2.0.1").reason == ""
    for eve, letter in zip(eves[1:], "bcd", strict=False):
        clock.now += 1.0
        assert note(registry, eve, letter * 51 + "a", "10.2.0.1").reason == ""
    assert (
        note(registry, eves[4], "e" * 51 + "a", "10.3.0.1").reason == ""
    )  # in place of one of the crowded range
    assert seal(member(ada), ada) in asked(registry)


class SeedProcess:
    """A process `shoal seed` on a free port of the loopback interface."""

    def __init__(self, home, *arguments):
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "shoal",
                "seed",
                "--json",
                "--listen",
                "/ip4/127.0.0.1/tcp/0",
                "--identity",
                home / "seed.key",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.ready = json.loads(self.process.stdout.readline())
        self.addresses = self.ready["addresses"]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.process.stdout.close()
        return code


@pytest.fixture
def seed(tmp_path):
    made = SeedProcess(tmp_path)
    yield made
    if made.process.poll() is None:
        assert made.end() == 0


@pytest.fixture
def nodes():
    made = []

    def start(bootstrap=(), **options):
        """Start a node that reports to the bootstrap nodes."""
        made.append(node := Node(bootstrap, timeout=15, **options))
        node.announcer = SeedAnnouncer(node.host, node.directory, node.identity, SWARM)
        node.beside.append(node.announcer)
        node.say(state="waiting")
        return node

    yield start
    for node in made:
        node.close()


def test_a_seed_runs_without_torch_and_hivemind():
    code = (
        "import sys, asyncio\n"
        "import shoal.node.cli.main, shoal.node.commands.swarms\n"
        "from shoal.swarm.identity import Identity\n"
        "from shoal.swarm.seed.bootstrap_node import Seed\n"
        "async def main():\n"
        "    up = asyncio.get_running_loop().create_future()\n"
        "    seed = Seed(Identity.ephemeral(), listen=['/ip4/127.0.0.1/tcp/0'], "
        "on_ready=up.set_result)\n"
        "    running = asyncio.ensure_future(seed.run())\n"
        "    await asyncio.wait([up, running], timeout=30, return_when=asyncio.FIRST_COMPLETED)\n"
        "    print(*up.result())\n"
        "    running.cancel()\n"
        "    await asyncio.wait([running], timeout=10)\n"
        "asyncio.run(main())\n"
        "assert not {'torch', 'hivemind', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("/ip4/127.0.0.1/tcp/")


@pytest.mark.ci
def test_strangers_meet_through_a_seed_alone(seed, nodes):
    first = nodes(seed.addresses, must_join=False)
    until(lambda: first.host.seeds())
    first.announcer.report(10)
    second = nodes(seed.addresses)
    until(lambda: first.sees() == second.sees() == {first.host.peer_id, second.host.peer_id})
    # The bootstrap node may go: members that have met do not need it.
    assert seed.end() == 0
    third = nodes(second.host.addresses())
    until(lambda: third.sees() == first.sees() and len(third.sees()) == 3)


@pytest.mark.ci
def test_two_that_started_apart_are_brought_together(seed, nodes):
    first, second = nodes(seed.addresses, must_join=False), nodes(seed.addresses, must_join=False)
    until(lambda: first.sees() == second.sees() == {first.host.peer_id, second.host.peer_id})


@pytest.mark.ci
def test_a_seed_that_knows_nobody_is_named(seed):
    with pytest.raises(
        StartupError,
        match=r"the bootstrap node \w+ knows no member of this swarm that can be reached: its last "
        r"one may",
    ):
        Host.start(Identity.ephemeral(), bootstrap=seed.addresses, swarm=SWARM, timeout=7)


@pytest.mark.ci
def test_a_seed_keeps_its_address_when_its_daemon_dies(seed, nodes):
    first = nodes(seed.addresses, must_join=False)
    until(lambda: first.host.seeds())
    (guard,) = _children(seed.process.pid)
    (daemon,) = _children(guard)
    os.kill(daemon, signal.SIGKILL)
    until(lambda: [g for g in _children(seed.process.pid) if g != guard])

    def joined():
        first.announcer.report(5)
        try:
            return nodes(seed.addresses)
        except StartupError:
            return None

    until(joined)
    assert Link(SWARM, tuple(seed.addresses))


def _children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.ci
def test_known_peers_are_enough_to_come_back(nodes, tmp_path):
    """Let creator and bootstrap peers be gone; a former member finds those that are left."""
    creator = nodes(must_join=False)
    other = nodes(creator.host.addresses())
    third = nodes(creator.host.addresses(), known=tmp_path / "peers.json")
    until(lambda: len(third.sees()) == len(other.sees()) == 3)
    until(lambda: other.host.peer_id in third.host._supervisor.known)
    dead = creator.host.addresses()
    third.close()
    creator.close()
    with pytest.raises(StartupError, match="no bootstrap peer can be reached"):
        Host.start(Identity.ephemeral(), bootstrap=dead, swarm=SWARM, timeout=15)
    again = nodes(dead, known=tmp_path / "peers.json")
    until(lambda: {again.host.peer_id, other.host.peer_id} <= again.sees() & other.sees())


class Caller:
    """A stream on which garbage comes, and nothing may be sent; ``said``: whether it was answered
    or aborted.
    """

    def __init__(self, peer, origin):
        self.peer_id, self.origin, self.partner, self.said = peer, origin, False, ""

    async def receive(self, limit, timeout):
        return b"garbage"

    async def more(self, timeout):
        self.said = "answered"

    def abort(self):
        self.said = "aborted"


def test_unknown_request_ends_its_stream():
    """A request that the bootstrap node does not understand ends its stream."""
    seed = Seed(Identity.ephemeral(), listen=[])
    asyncio.run(seed._limited(caller := Caller("eve", "10.1.0.1"), seed._answer))
    assert not seed._places.peers
    assert not caller.said


def test_crowded_range_gives_connections_up():
    """A crowded range gives connections up and a crowded address first."""
    few = {f"e{n}": f"10.{n % 3}.0.1" for n in range(3 * MAX_OF_RANGE)}
    assert crowding_peers(few) == []
    many = {
        **few,
        **{f"f{n}": "10.0.0.1" for n in range(50)},
        "ada": "10.0.0.2",
        "bob": "10.9.0.1",
        "relayed": "",
    }
    gone = crowding_peers(many)
    assert len(gone) == 51
    assert {many[peer] for peer in gone} == {"10.0.0.1"}


def test_silent_streams_of_a_range_leave_room_for_others(monkeypatch):
    """64 keys of one range held all 256."""
    monkeypatch.setattr("shoal.swarm.seed.bootstrap_node.MAX_STREAMS", 4)
    crowd, ada = [Caller(f"e{n}", "10.0.0.1") for n in range(6)], Caller("ada", "10.1.0.1")

    async def main():
        seed, end = Seed(Identity.ephemeral(), listen=[]), asyncio.Event()

        async def silent(stream):
            await end.wait()

        held = [asyncio.ensure_future(seed._limited(caller, silent)) for caller in crowd]
        await asyncio.sleep(0)
        assert [caller.peer_id for caller in crowd if caller.said] == ["e4", "e5"]
        await seed._limited(ada, lambda stream: asyncio.sleep(0))
        assert ada.said == "answered"
        assert [caller.peer_id for caller in crowd if caller.said == "aborted"] == [
            "e0",
            "e4",
            "e5",
        ]
        end.set()
        await asyncio.gather(*held)
        assert not seed._places.peers

    asyncio.run(main())

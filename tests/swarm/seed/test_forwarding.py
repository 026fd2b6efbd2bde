"""Gossip that a bootstrap node forwards between members which have only it in common: what it takes
on, and for how long.
"""

import asyncio
import contextlib
import queue
import time
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import seed_announcer
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.seed_request import ask_seed
from shoal.swarm.seed import forwarding as server_module
from shoal.swarm.seed.bootstrap_node import Seed
from shoal.swarm.seed.forwarding import BUDGET, MAX_ASKED, MAX_TOPICS, REST_S, GossipForwarding
from shoal.swarm.seed.registry import TTL_S
from shoal.swarm.wire.envelope import seal
from shoal.swarm.wire.messages import MAX_TOPICS as NAMED
from shoal.swarm.wire.messages import SEED_PROTOCOL, SeedRequest
from tests.support.clock import Clock
from tests.support.loop_thread import LoopThread
from tests.support.records import member_of

SWARM, OTHER = "a" * 52, "b" * 52
STATUS = f"shoal/{SWARM}/status/4"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def forwards(clock):
    return GossipForwarding(clock)


def test_topic_is_forwarded_while_asked_for(forwards, clock):
    """A topic is forwarded for as long as somebody asks for it."""
    forwards.ask(SWARM, ["status/4", "rollout/2"], "1.2.3.4")
    assert forwards.chosen() == [STATUS, f"shoal/{SWARM}/rollout/2"]
    clock.now = TTL_S
    forwards.ask(SWARM, ["status/4"], "5.6.7.8")
    clock.now += 1
    assert forwards.chosen() == [STATUS]
    clock.now += TTL_S
    assert forwards.chosen() == []


def test_whoever_asks_for_much_from_one_range_displaces_nobody_else(forwards):
    for number in range(40):
        forwards.ask(OTHER, [f"x/{number * NAMED + n}" for n in range(NAMED)], "1.2.3.4")
    forwards.ask(SWARM, ["status/4"], "5.6.7.8")
    assert len(forwards.chosen()) == MAX_ASKED + 1
    assert STATUS in forwards.chosen()[:2]
    for second in range(2 * MAX_TOPICS // MAX_ASKED):
        forwards.ask(OTHER, [f"y/{second * 1000 + n}" for n in range(MAX_ASKED)], f"9.{second}.3.4")
    assert len(forwards.chosen()) == MAX_TOPICS
    assert STATUS in forwards.chosen()


def test_topic_over_budget_rests_a_minute(forwards, clock):
    """A topic with more than its budget rests for a minute."""
    forwards.ask(SWARM, ["status/4", "rollout/2"], "1.2.3.4")
    assert forwards.takes(STATUS, BUDGET.nbytes)
    assert not forwards.takes(STATUS, 1)
    assert forwards.chosen() == [f"shoal/{SWARM}/rollout/2"]
    clock.now = REST_S + 1
    assert STATUS in forwards.chosen()
    assert forwards.takes(STATUS, 1)


@pytest.mark.parametrize(
    "topics",
    [
        ("status",),
        ("status/x",),
        ("../4",),
        ("status/4/5",),
        ("s" * 33 + "/4",),
        ("status/4",) * (NAMED + 1),
    ],
)
def test_a_request_names_few_short_topics(topics):
    with pytest.raises(ValidationError):
        SeedRequest(swarm=SWARM, topics=topics)


@contextlib.contextmanager
def running(**options):
    """A bootstrap node in a thread of its own; its addresses."""
    told = queue.Queue()
    with contextlib.closing(LoopThread()) as loop:
        loop.submit(
            Seed(
                Identity.ephemeral(), listen=["/ip4/127.0.0.1/tcp/0"], on_ready=told.put, **options
            ).run()
        )
        yield told.get(timeout=30)


def report(host, identity, seed, topics):
    """Report a member to the bootstrap node, as it does itself, with ``topics`` to forward."""
    record = member_of(identity.peer_id, state="waiting", issued=time.time())

    async def asked():
        with contextlib.closing(
            await host.open(seed.rpartition("/p2p/")[2], SEED_PROTOCOL, timeout=30)
        ) as stream:
            await ask_seed(stream, SWARM, seal(record, identity), topics)

    host.call(asked(), 60)


def test_bootstrap_node_forwards_between_strangers(
    monkeypatch,
):
    """What one publishes another hears that is connected to the bootstrap node alone."""
    monkeypatch.setattr(server_module, "LOOK_S", 0.05)
    with running() as seed, contextlib.ExitStack() as hosts:
        keys = [Identity.ephemeral(), Identity.ephemeral()]
        a, b = (
            hosts.enter_context(
                Host.start(key, bootstrap=seed, must_join=False, light=True, timeout=30)
            )
            for key in keys
        )
        report(a, keys[0], seed[0], ["status/4"])
        heard = queue.Queue()

        async def listen(host):
            subscription = await host.pubsub.subscribe(STATUS)
            while True:
                heard.put((await subscription.next()).publisher)

        b.submit(listen(b))
        end = time.monotonic() + 60
        while True:  # until the mesh knows of both
            assert time.monotonic() < end
            with contextlib.suppress(NetworkError):
                a.call(a.pubsub.publish(STATUS, str(time.monotonic()).encode()), 10)
            with contextlib.suppress(queue.Empty):
                assert heard.get(timeout=0.2) == a.peer_id
                break
        assert b.peer_id not in a.call(a._supervisor.daemon.peers(), 10)


def test_relay_announcer_names_its_topics(monkeypatch):
    """A member that announces a relay names its topics and no other does."""
    asked = []
    me = Identity.ephemeral()
    host = SimpleNamespace(
        submit=lambda work: work.close(),
        known=None,
        meet=None,
        seeds=lambda: {"seed": ()},
        pubsub=SimpleNamespace(
            topics={STATUS, f"shoal/{OTHER}/status/4", f"shoal/{SWARM}/rollout/2"}
        ),
    )

    async def opened(*_, **__):
        return SimpleNamespace(close=lambda: None)

    async def ask(stream, swarm, record, topics):
        asked.append(list(topics))
        return []

    host.open = opened
    addresses = [f"/ip4/192.168.1.2/tcp/1/p2p/{me.peer_id}"]
    directory = SimpleNamespace(everyone=None, departed=None, members=dict)
    directory.own = lambda: member_of(me.peer_id, addresses=tuple(addresses), state="waiting")
    announcer = seed_announcer.SeedAnnouncer(host, directory, me, SWARM)
    monkeypatch.setattr(seed_announcer, "ask_seed", ask)
    asyncio.run(announcer._report())
    addresses.append(
        f"/ip4/1.1.1.1/tcp/1/p2p/{Identity.ephemeral().peer_id}/p2p-circuit/p2p/{me.peer_id}"
    )
    asyncio.run(announcer._report())
    assert asked == [[], ["rollout/2", "status/4"]]


@pytest.mark.parametrize(("state", "times"), [("training", 1), ("leaving", 0), ("done", 0)])
def test_a_member_that_leaves_announces_its_swarm_no_more(monkeypatch, state, times):
    """The bootstrap node has just forgotten it, and would answer that it does not know it."""
    announced = []
    me = Identity.ephemeral()

    async def opened(*_, **__):
        return SimpleNamespace(close=lambda: None)

    async def ask(*_):
        return []

    async def announce(*_):
        announced.append(state)

    host = SimpleNamespace(
        submit=lambda work: work.close(), known=None, meet=None, seeds=lambda: {"seed": ()},
        pubsub=SimpleNamespace(topics=set()), open=opened,
    )  # fmt: skip
    directory = SimpleNamespace(everyone=None, departed=None, members=dict)
    directory.own = lambda: member_of(me.peer_id, state=state)
    announcer = seed_announcer.SeedAnnouncer(host, directory, me, SWARM)
    announcer._announced, announcer._announce = object(), announce
    monkeypatch.setattr(seed_announcer, "ask_seed", ask)
    asyncio.run(announcer._report())
    assert len(announced) == times

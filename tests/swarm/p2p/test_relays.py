"""The choice of relays among bootstrap peers, and the daemon's options about being reached."""

import asyncio
import socket
from pathlib import Path

import pytest

from shoal.swarm.identity import Identity
from shoal.swarm.p2p import connections
from shoal.swarm.p2p.daemon_process import options

SEED, OTHER, PRIVATE = (Identity.ephemeral().peer_id for _ in range(3))


def test_a_peer_behind_a_relay_is_no_relay_and_each_counts_once():
    bootstrap = [
        f"/ip4/1.2.3.4/tcp/4001/p2p/{SEED}", f"/ip4/192.168.1.2/tcp/4001/p2p/{PRIVATE}",
        f"/ip4/1.2.3.4/tcp/4001/p2p/{SEED}/p2p-circuit/p2p/{PRIVATE}", f"/ip4/127.0.0.1/tcp/4001/p2p/{OTHER}",
        f"/ip4/1.2.3.5/udp/4001/quic-v1/p2p/{OTHER}", f"/dns4/example.org/tcp/1/p2p/{OTHER}", f"/ip4/1.2.3.5/tcp/4001/p2p/{OTHER}",
    ]  # fmt: skip
    assert connections.candidates(bootstrap) == [bootstrap[0], bootstrap[5]]


def test_those_that_answer_are_taken_in_order(monkeypatch):
    monkeypatch.setattr(connections, "is_loopback", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        port = alive.getsockname()[1]
        ids = [Identity.ephemeral().peer_id for _ in range(4)]
        bootstrap = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for peer in ids]
        bootstrap.insert(0, f"/ip4/127.0.0.1/tcp/{dead.getsockname()[1]}/p2p/{OTHER}")
        assert asyncio.run(connections.answering(bootstrap)) == bootstrap[1:3]


@pytest.mark.parametrize(("given", "expected"), [
    ({}, {"-autoRelay": "0", "-relay": "1"}),
    ({"relays": ["R"]}, {"-autoRelay": "1", "-trustedRelays": "R", "-relay": "1"}),
    ({"relays": ["R"], "relay": "only"}, {"-autoRelay": "1", "-trustedRelays": "R", "-forceReachabilityPrivate": "1"}),
    ({"relays": ["R"], "relay": "off"}, {"-autoRelay": "0", "-relay": "0"}),
    ({"relays": ["R"], "public": True}, {"-autoRelay": "0", "-relay": "1", "-forceReachabilityPublic": "1"}),
])  # fmt: skip
def test_options_about_relays(given, expected):
    def of(listen):
        said = options(control="/unix/x", key=Path("k"), listen=[listen], **given)
        return dict(option.split("=", 1) for option in said)

    found = of("/ip4/0.0.0.0/tcp/1")
    about = ("-trustedRelays", "-forceReachabilityPrivate", "-forceReachabilityPublic")
    assert {key: value for key, value in found.items() if key in expected or key in about} == expected
    # On loopback nobody is private or public.
    assert not {key for key in of("/ip4/127.0.0.1/tcp/1") if key in about}


@pytest.mark.parametrize(("listen", "announce", "expected"), [
    (["/ip4/0.0.0.0/tcp/0"], [], "1"), (["/ip4/127.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1"], [], "1"),
    (["/ip4/192.168.0.7/tcp/1"], [], "0"),  # its own network is meant
    (["/ip4/127.0.0.1/tcp/1"], [], "0"), (["/ip4/0.0.0.0/tcp/1"], ["/ip4/9.9.9.9/tcp/1"], "0"),
    (["/ip4/0.0.0.0/udp/0/quic-v1"], [], "0"),  # the second daemon
])  # fmt: skip
def test_a_router_is_asked_to_open_a_port_for_who_wants_to_be_dialled_from_anywhere_and_says_no_more(listen, announce, expected):
    said = options(control="/unix/x", key=Path("k"), listen=listen, announce=announce)
    assert [option for option in said if "natPortMap" in option] == [f"-natPortMap={expected}"]

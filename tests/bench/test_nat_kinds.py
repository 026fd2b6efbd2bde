"""Each kind of router that `bench/reach.py` builds does what its name says, by packets; and the
probe tells the kinds apart.
"""

import select
import time
from functools import partial

import pytest

from bench import _nat
from bench._nat import KINDS, Internet, NatError, Uplink, udp
from bench._nat_probe import EXPECTED, FIRST, PORT, probe_tcp, probe_udp

PROBES = {"udp": probe_udp, "tcp": probe_tcp}


def made(homes, **how):
    try:
        return Internet(homes, **how)
    except NatError as error:
        pytest.skip(f"no NAT can be made here: {error}")


@pytest.fixture(scope="module")
def net():
    """One home of each kind, in the order of `KINDS`."""
    built = made(KINDS)
    yield built
    built.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", PROBES)
def test_each_kind_of_router_maps_and_filters(net, kind, protocol):
    """A router of each kind maps and filters as it should."""
    assert PROBES[protocol](net, f"home-{KINDS.index(kind)}") == EXPECTED[kind]


def test_no_namespace_is_left(net):
    others = made([])
    names = [others.full(place) for place in ("wan", "seed", "peer-1")]
    assert all(name in _nat._call("ip", "netns", "list") for name in names)
    others.close()
    assert not [name for name in names if name in _nat._call("ip", "netns", "list")]


def asked(net, place, port=FIRST):
    """The address from which a packet of ``place`` comes to the seed, and the seconds until its
    answer is there.
    """
    with net.at(place, udp) as own, net.at("seed", partial(udp, port)) as seed:
        for _ in range(
            15
        ):  # the kernel drops what is sent before it has noticed that a new link is up
            began = time.monotonic()
            own.sendto(b"?", (net.ip("seed"), port))
            if select.select([seed], [], [], 2.0)[0]:
                break
        _, (ip, its) = seed.recvfrom(64)
        seed.sendto(b"!", (ip, its))
        own.recvfrom(64)
        return ip, time.monotonic() - began


@pytest.mark.slow(
    reason="it holds packets in real time, and a loaded machine sends too late to fill the buffer"
)
def test_uplink_has_delay_rate_buffer_and_loss():
    """An uplink has a delay a rate a buffer and loss."""
    slow, lossy = Uplink(delay=0.05, up=2_500, up_buffer=1.3), Uplink(loss=0.5)
    net = made(["port", "port"], uplinks=[slow, lossy])
    try:
        assert asked(net, "home-0")[1] >= 0.1
        with net.at("home-0", udp) as own, net.at("seed", partial(udp, FIRST)) as seed:
            began = time.monotonic()
            for _ in range(10):
                own.sendto(bytes(972), (net.ip("seed"), FIRST))  # 1,000 with headers, .4 s each
            sizes = [len(seed.recv(2000)) for _ in range(4)]
            assert sizes == [972] * 4
            assert time.monotonic() - began >= 1.65
        up, down = net.carried("router-0")
        assert (up["packets"], up["dropped"], up["lost"]) == (
            5,
            6,
            0,
        )  # the question before, and four fit into the buffer
        assert 1.3 < up["queue_s"] <= 1.6
        assert (down["packets"], down["bytes"]) == (1, 29)
        assert net.carried("router-0")[0]["queue_s"] == 0.0
        with net.at("home-1", udp) as own:
            for _ in range(1000):
                own.sendto(b"", (net.ip("seed"), FIRST))
        while (up := net.carried("router-1")[0])["packets"] < 1000:
            pass
        assert 400 < up["lost"] < 600
    finally:
        net.close()


def test_neighbour_meets_inside_and_machine_moves():
    """A neighbour is met inside and a machine takes another address along."""
    net = made(["port", "port"])
    try:
        beside = net.neighbour("router-0")
        with net.at(beside, udp) as own, net.at("home-0", partial(udp, PORT)) as other:
            own.sendto(b"outside", (net.ip("home-0"), PORT))  # no hairpin
            own.sendto(b"inside", (net.local("home-0"), PORT))
            assert other.recvfrom(64) == (b"inside", (net.local(beside), own.getsockname()[1]))
        assert asked(net, beside)[0] == net.ip("router-0") == net.ip(beside)
        net.roam("home-0", "router-1")
        assert asked(net, "home-0")[0] == net.ip("router-1") == net.ip("home-0")
        assert asked(net, beside)[0] == net.ip("router-0")
    finally:
        net.close()

"""Each kind of router that `bench/reach.py` builds does what its name says, by packets; and the probe tells the kinds apart."""

import pytest

from bench import _nat
from bench._nat import KINDS, Internet, NatError, rules
from bench._nat_probe import EXPECTED, probe_tcp, probe_udp

PROBES = {"udp": probe_udp, "tcp": probe_tcp}


def made(homes):
    try:
        return Internet(homes)
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
def test_a_router_of_each_kind_maps_and_filters_as_it_should(net, kind, protocol):
    assert PROBES[protocol](net, f"home-{KINDS.index(kind)}") == EXPECTED[kind]


# What is wrong -> kind, text of its rules, what is put in its place, and what the probe then sees.
MUTANTS = {
    "a full cone that lets in what nobody asked for": (
        "full",
        "meta l4proto . th dport @open dnat",
        "meta l4proto { tcp, udp } dnat",
        {"closed": False},
    ),
    "a full cone that lets nobody in": (
        "full",
        "ct status dnat accept",
        "",
        {"other": False, "another_port": False},
    ),
    "an address-restricted one that notes another address": (
        "address",
        ". ip daddr }",
        ". 11.0.2.2 }",
        {"other": True, "another_port": False},
    ),
    "a port-restricted one that takes other ports": ("port", "masquerade", "masquerade fully-random", {"same": False}),
    "a symmetric one that keeps the port": ("symmetric", " fully-random", "", {"same": True}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_rules_are_seen(monkeypatch, name):
    kind, right, wrong, difference = MUTANTS[name]

    def changed(kind, host):
        text = rules(kind, host)
        assert right in text
        return text.replace(right, wrong)

    monkeypatch.setattr(_nat, "rules", changed)
    net = made([kind])
    try:
        found = [probe(net, "home-0") for probe in PROBES.values()]
    finally:
        net.close()
    for seen in found:
        assert {field: getattr(seen, field) for field in difference} == difference
        assert seen != EXPECTED[kind]


def test_no_namespace_is_left(net):
    others = made([])
    names = [others.full(place) for place in ("wan", "seed", "peer-1")]
    assert all(name in _nat._call("ip", "netns", "list") for name in names)
    others.close()
    assert not [name for name in names if name in _nat._call("ip", "netns", "list")]

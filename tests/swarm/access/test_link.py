"""shoal:// links."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.access.address import address_problem
from shoal.swarm.access.link import MAX_CHARS, Link
from shoal.swarm.errors import LinkError
from shoal.swarm.identity import ID_HEADER, b58encode
from shoal.swarm.manifest import swarm_id

SWARM = swarm_id(b"a swarm")
PEER = b58encode(ID_HEADER + bytes(range(32)))
RELAY = b58encode(b"\x12\x20" + bytes(range(32)))
HERE = f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}"
GOOD = f"shoal://{SWARM}?peer={HERE}"

peers = st.binary(min_size=32, max_size=32).map(lambda key: b58encode(ID_HEADER + key))
hosts = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda n: f"/ip4/{ipaddress.IPv4Address(n)}"),
    st.integers(0, 2**128 - 1).map(lambda n: f"/ip6/{ipaddress.IPv6Address(n)}"),
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{2,10}){0,3}", fullmatch=True).map(
        lambda name: f"/dns4/{name}"
    ),
)
ports = st.integers(1, 65_535)
transports = st.one_of(ports.map(lambda p: f"/tcp/{p}"), ports.map(lambda p: f"/udp/{p}/quic-v1"))
relays = st.just("") | (peers | st.just(RELAY)).map(lambda peer: f"/p2p/{peer}/p2p-circuit")
addresses = st.tuples(hosts, transports, relays, peers).map(
    lambda p: f"{p[0]}{p[1]}{p[2]}/p2p/{p[3]}"
)
links = st.builds(
    Link,
    st.binary(max_size=8).map(swarm_id),
    st.lists(addresses, min_size=1, max_size=16).map(tuple),
)


@given(links)
def test_round_trip(link):
    assert Link.parse(str(link)) == link
    assert Link.parse(f"  {link}\n") == link
    assert str(link).isascii()


@given(links)
def test_fully_percent_encoded_addresses_are_read_too(link):
    text = str(link)
    head, query = text.split("?")
    assert Link.parse(head + "?" + query.replace("/", "%2F").replace(":", "%3a")) == link


@given(
    st.one_of(
        st.text(max_size=200), st.text(max_size=200).map(lambda t: f"shoal://{SWARM}?peer={t}")
    )
)
def test_anything_else_is_one_sentence(text):
    with pytest.raises(LinkError) as caught:
        Link.parse(text)
    message = str(caught.value)
    assert message.isprintable()
    assert message.endswith(".")
    assert len(message) < 400


@given(st.integers(0, len(GOOD) - 1), st.characters())
def test_one_changed_character_never_crashes(at, char):
    try:
        link = Link.parse(GOOD[:at] + char + GOOD[at + 1 :])
    except LinkError:
        return
    assert Link.parse(str(link)) == link


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not start with shoal://"),
        (GOOD.replace("shoal", "http"), "does not start with shoal://"),
        (GOOD.replace(SWARM, SWARM[:-1]), "swarm id"),
        (GOOD.replace(SWARM, SWARM.upper()), "swarm id"),
        (GOOD.replace(SWARM, SWARM[:-1] + "b"), "swarm id"),
        (GOOD.replace(SWARM, SWARM + "\n"), "swarm id"),
        (f"shoal://{SWARM}", "names no peer"),
        (f"shoal://{SWARM}?", "names no peer"),
        (f"{GOOD}&host=x", "unknown part"),
        (f"{GOOD}&", "unknown part"),
        (f"shoal://{SWARM}?peer=", "does not start with /"),
        (GOOD.replace("ip4", "ip5"), "host"),
        (GOOD.replace("ip4", "ip6"), "host"),
        (GOOD.replace("203.0.113.5", "203.0.113.256"), "host"),
        (GOOD.replace("ip4/203.0.113.5", "dns/a b"), "host"),
        (GOOD.replace("ip4/203.0.113.5", "ip6/fe80::1%25eth0"), "host"),
        (GOOD.replace("4001", "0"), "port"),
        (GOOD.replace("4001", "65536"), "port"),
        (GOOD.replace("4001", "40a1"), "port"),
        (GOOD.replace("tcp", "udp"), "transport"),
        (GOOD.replace("tcp/4001", "sctp/4001"), "transport"),
        (GOOD.replace(f"/p2p/{PEER}", ""), "end with /p2p/"),
        (GOOD.replace("4001", "4001/ws"), "end with /p2p/"),
        (GOOD + "/p2p-circuit", "end with /p2p/"),
        (GOOD.replace(PEER, PEER[:-1]), "peer id is invalid"),
        (GOOD.replace(PEER, RELAY), "peer id is invalid"),
        (
            f"shoal://{SWARM}?peer=/ip4/1.2.3.4/tcp/1/p2p/Qm/p2p-circuit/p2p/{PEER}",
            "id of its relay",
        ),
        (
            f"shoal://{SWARM}?peer=/ip4/1.2.3.4/tcp/1/p2p/0OIl/p2p-circuit/p2p/{PEER}",
            "id of its relay",
        ),
        (GOOD + f"&peer={HERE}" * 16, "17 addresses, at most 16"),
        (GOOD + "&peer=" + "x" * MAX_CHARS, "longer than 4096"),
    ],
)
def test_each_fault_is_named(text, says):
    with pytest.raises(LinkError, match=says):
        Link.parse(text)


def test_a_link_that_would_be_too_long_is_not_made():
    long = f"/dns4/{'.'.join(['a' * 50] * 4)}/tcp/4001/p2p/{PEER}"
    with pytest.raises(LinkError, match="longer than 4096"):
        Link(SWARM, (long,) * 16)


@given(links, st.lists(addresses | st.just("/nowhere") | st.just("x" * 600), max_size=40))
def test_more_addresses_go_in_as_far_as_the_bounds_allow(link, more):
    longer = link.also(more)
    assert Link.parse(str(longer)) == longer
    assert longer.bootstrap[: len(link.bootstrap)] == link.bootstrap
    valid = {address for address in more if address_problem(address) is None} - {*link.bootstrap}
    added = longer.bootstrap[len(link.bootstrap) :]
    assert len(set(added)) == len(added)
    assert set(added) <= valid
    if len(longer.bootstrap) < 16 and set(added) < valid:
        assert len(str(longer)) > MAX_CHARS - 400  # what is missing did not fit


def test_a_long_address_gives_way_to_a_short_one():
    long = [f"/dns4/{'.'.join(['a' * 50] * 4)}/tcp/{port}/p2p/{PEER}" for port in range(4001, 4017)]
    made = Link(SWARM, (HERE,), "x" * 1500).also([*long, HERE.replace("4001", "4002")])
    assert made.bootstrap[0] == HERE
    assert made.bootstrap[-1] == HERE.replace("4001", "4002")
    assert made.invite == "x" * 1500
    assert 4 < len(made.bootstrap) < 16


def test_address_problem_accepts_the_forms_of_the_daemon():
    for good in (
        HERE,
        f"/ip6/::1/tcp/1/p2p/{PEER}",
        f"/dns/node.example.org/udp/65535/quic-v1/p2p/{PEER}",
    ):
        assert address_problem(good) is None

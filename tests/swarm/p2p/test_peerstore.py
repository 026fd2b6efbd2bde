"""Peers remembered on disk: kept from run to run, bounded, held to the rules of a link, and never
half written.
"""

import json
import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.config.settings import load
from shoal.swarm.file_lock import replace_file
from shoal.swarm.identity import Identity
from shoal.swarm.membership.membership import NetworkOptions
from shoal.swarm.p2p import peerstore
from shoal.swarm.p2p.listening import ANYWHERE, as_before
from shoal.swarm.p2p.peerstore import (
    ANSWERED_PLACES,
    MAX_ADDRESSES,
    MAX_FILE_BYTES,
    MAX_PEERS,
    Peerstore,
)
from tests.support.waiting import until

OWN, OTHER, THIRD = (Identity.ephemeral().peer_id for _ in range(3))
SWARM = "a" * 52


def at(peer, host=1, port=4001):
    return f"/ip4/10.0.0.{host}/tcp/{port}/p2p/{peer}"


def test_what_was_met_is_there_in_the_next_run(tmp_path):
    path = tmp_path / "run" / "peers.json"
    first = Peerstore(OWN, path, SWARM)
    first.remember(
        [at(OTHER), at(OTHER, 2), at(OWN), "junk", "/ip4/1.2.3.4/tcp/70000/p2p/" + THIRD]
    )
    first.remember([at(THIRD, 3)])
    first.save()
    again = Peerstore(OWN, path, SWARM)
    assert again.addresses() == first.addresses() == [at(THIRD, 3), at(OTHER), at(OTHER, 2)]
    assert OTHER in again
    assert OWN not in again
    assert [p.name for p in path.parent.iterdir()] == ["peers.json"]
    # Another swarm's peers are of no use.
    assert Peerstore(OWN, path, "b" * 52).addresses() == []


def test_the_first_peer_is_kept_at_once(tmp_path, monkeypatch):
    """The fault: a creator that was killed a moment after it had met the first other one kept no
    address, and trained alone when it was started again.
    """
    path = tmp_path / "peers.json"
    written = []
    monkeypatch.setattr(
        peerstore, "replace_file", lambda *given: (written.append(given), replace_file(*given))
    )
    known = Peerstore(OWN, path, SWARM)
    known.remember([at(OWN)])
    assert not path.exists()
    known.remember([at(OTHER)])
    until(lambda: Peerstore(OWN, path, SWARM).addresses() == [at(OTHER)])
    for host in range(2, 100):
        known.remember([at(Identity.ephemeral().peer_id, host)])
    assert len(written) == 1, "the others wait for the next look around"
    known.save()
    assert len(written) == 2


def test_a_slow_disk_holds_nobody_up(tmp_path, monkeypatch):
    """The fault: the host's loop waited for the write, and for one before it in another thread."""
    path = tmp_path / "peers.json"
    may_write, written = threading.Event(), []

    def slow(*given):
        may_write.wait(3.0)
        written.append(given)

    monkeypatch.setattr(peerstore, "replace_file", slow)
    known = Peerstore(OWN, path, SWARM)
    known.remember([at(OTHER)])
    assert not written
    may_write.set()
    until(lambda: written)


def test_the_own_port_is_there_in_the_next_run(tmp_path):
    path = tmp_path / "peers.json"
    first = Peerstore(OWN, path, SWARM)
    assert first.listened == ()
    first.listened = ("/ip4/0.0.0.0/tcp/5000",)
    first.save()
    again = Peerstore(OWN, path, SWARM)
    assert again.listened == first.listened
    again.save()
    assert Peerstore(OWN, path, "b" * 52).listened == ()
    path.write_text(json.dumps({"swarm": SWARM, "peers": {}}))  # of an older version
    assert Peerstore(OWN, path, SWARM).listened == ()


def test_the_port_of_before_is_taken_if_any_will_do():
    wanted, before = ("/ip4/127.0.0.1/tcp/0",), "/ip4/127.0.0.1/tcp/4001"
    assert as_before(wanted, (before,)) == (before,)
    for other in (
        (),
        (before, before),
        ("/ip4/127.0.0.2/tcp/4001",),
        ("/ip4/127.0.0.1/udp/4001",),
        ("junk",),
        (before + "/ws",),
    ):
        assert as_before(wanted, other) == wanted
    assert as_before(("/ip4/127.0.0.1/tcp/1",), (before,)) == (
        "/ip4/127.0.0.1/tcp/1",
    )  # another port was asked for
    assert as_before((before + "/ws", wanted[0]), (before + "/ws", before)) == (
        before + "/ws",
        before,
    )


def test_unnamed_address_keeps_the_former_one():
    """Fault: a creator resumed without its --listen took another port, and all its invitations led
    nowhere.
    """
    for before in ("/ip4/127.0.0.1/tcp/4001", "/ip4/192.168.1.7/tcp/4001", "/ip6/::/tcp/4001"):
        assert as_before(ANYWHERE, (before,)) == (before,)
    assert as_before(ANYWHERE, ()) == ANYWHERE
    assert as_before(ANYWHERE, ("junk",)) == ANYWHERE
    assert NetworkOptions().listen == ANYWHERE == tuple(load(None, {}).node.listen)


def test_a_relayed_address_survives(tmp_path):
    path = tmp_path / "peers.json"
    relayed = f"/ip4/1.2.3.4/tcp/1/p2p/{THIRD}/p2p-circuit/p2p/{OTHER}"
    known = Peerstore(OWN, path, SWARM)
    known.remember([relayed])
    known.save()
    assert Peerstore(OWN, path, SWARM).addresses() == [relayed]


def test_it_is_bounded_and_the_newest_stay():
    known = Peerstore(OWN)
    peers = [Identity.ephemeral().peer_id for _ in range(MAX_PEERS + 5)]
    for peer in peers:
        known.remember(at(peer, host) for host in range(1, 9))
    known.remember([at(peers[5], 99)])
    assert peers[4] not in known
    assert known.addresses()[: MAX_ADDRESSES + 1] == [at(peers[5], h) for h in (99, 1, 2, 3)] + [
        at(peers[-1], 1)
    ]
    assert len(known.addresses()) == MAX_PEERS * MAX_ADDRESSES


def test_answering_peers_keep_their_places():
    """Peers that answered keep their places however many others are heard of."""
    now = [1e9]
    known = Peerstore(OWN, clock=lambda: now[0])
    known.remember([at(OTHER), at(THIRD, 2)])
    known.learn([OTHER])
    for number in range(10):
        known.remember(
            at(Identity.ephemeral().peer_id, number, port) for port in range(1, MAX_PEERS)
        )
    assert OTHER in known
    assert THIRD not in known


def test_of_those_that_answered_one_of_each_range_comes_first():
    """A crowd in one range, which answers later than all others, gets the places that are left."""
    now = [1e9]
    known = Peerstore(OWN, clock=lambda: now[0])
    honest = [Identity.ephemeral().peer_id for _ in range(ANSWERED_PLACES - 8)]
    crowd = [Identity.ephemeral().peer_id for _ in range(200)]
    for number, peer in enumerate(honest):
        known.remember([f"/ip4/10.{number}.0.1/tcp/1/p2p/{peer}"])
        known.learn([peer])
    now[0] += 1
    for number, peer in enumerate(crowd):
        known.remember([f"/ip4/172.16.{number}.1/tcp/1/p2p/{peer}"])
        known.learn([peer])
    assert all(peer in known for peer in honest)
    assert sum(peer in known for peer in crowd) == MAX_PEERS - len(honest)


def test_answering_address_is_kept_for_the_next_run(tmp_path):
    """The address that answered is kept and known in the next run."""
    path, now = tmp_path / "peers.json", [1e9]
    known = Peerstore(OWN, path, SWARM, clock=lambda: now[0])
    known.met = {OTHER: "10.0.0.2"}
    known.remember([at(OTHER), at(OTHER, 2)])
    known.learn([OTHER, THIRD])
    known.save()
    assert json.loads(path.read_text())["answered"] == {at(OTHER, 2): 999997200}  # in whole hours
    again = Peerstore(OWN, path, SWARM, clock=lambda: now[0])
    again.remember(at(OTHER, host) for host in range(11, 19))
    assert again.addresses() == [at(OTHER, host) for host in (11, 12, 13, 2)]
    now[0] += 60
    before = path.stat().st_mtime_ns
    known.learn([OTHER])
    known.save()  # a minute later is not worth a write
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("when", ["x", None, 10**400, -(10**400), 1.5, [1]], ids=range(6))
def test_a_time_that_cannot_be_does_no_harm(tmp_path, when):
    path = tmp_path / "peers.json"
    path.write_text(
        json.dumps(
            {"swarm": SWARM, "peers": {OTHER: [at(OTHER)]}, "answered": {at(OTHER): when, "x": 1}}
        )
    )
    known = Peerstore(OWN, path, SWARM)
    assert known.addresses() in ([at(OTHER)], [])
    known.remember([at(THIRD, 3)])
    known.save()
    assert THIRD in Peerstore(OWN, path, SWARM)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"swarm": "S"}',
        '{"swarm": "S", "peers": 3}',
        '{"swarm": "S", "peers": {"x": 1}}',
        "[" * 10_000,
        "\xff",
        '{"swarm": "S", "peers": {}, "listened": 3}',
        '{"swarm": "S", "peers": {}, "answered": 3}',
    ],
)
def test_a_damaged_file_is_ignored_and_written_anew(tmp_path, text, caplog):
    path = tmp_path / "peers.json"
    path.write_bytes(text.replace('"S"', f'"{SWARM}"').encode("latin-1"))
    known = Peerstore(OWN, path, SWARM)
    assert known.addresses() == []
    known.remember([at(OTHER)])
    known.save()
    assert json.loads(path.read_text()) == {
        "swarm": SWARM,
        "peers": {OTHER: [at(OTHER)]},
        "listened": [],
        "answered": {},
    }
    assert all(r.levelno == logging.WARNING for r in caplog.records if r.name.startswith("shoal"))


def test_oversized_file_is_not_read(tmp_path, caplog):
    """A file that is too large is not read to its end."""
    path = tmp_path / "peers.json"
    path.write_text(
        json.dumps({"swarm": SWARM, "peers": {OTHER: [at(OTHER)]}}) + " " * MAX_FILE_BYTES
    )
    assert Peerstore(OWN, path, SWARM).addresses() == []
    assert "too large" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    known = Peerstore(OWN, tmp_path / "file" / "peers.json", SWARM)
    known.remember([at(OTHER)])
    known.save()
    assert "were not saved" in caplog.text


addresses = st.sampled_from([OTHER, THIRD]).flatmap(
    lambda p: st.builds(at, st.just(p), st.integers(1, 250))
) | st.text(max_size=40)


@given(st.lists(st.lists(addresses, max_size=6), max_size=6))
def test_only_addresses_a_link_may_hold_are_kept_each_once(batches):
    known = Peerstore(OWN)
    for batch in batches:
        known.remember(batch)
    found = known.addresses()
    assert len(found) == len(set(found)) <= 2 * MAX_ADDRESSES
    assert set(found) <= {a for batch in batches for a in batch if a.startswith("/ip4/10.0.0.")}

"""Whom a watcher dials: in an order, and not again at once."""

from shoal.node.watch import source
from shoal.node.watch.source import AGAIN_MAX_S, AGAIN_S, PeerAddresses


def at(author, port=4001, host="/ip4/203.0.113.5", rest=""):
    return f"{host}/tcp/{port}{rest}/p2p/{author.peer}"


def test_what_a_peer_says_of_another_is_not_noted(authors):
    anna, bert, _ = authors
    found = PeerAddresses()
    relayed = at(anna, rest=f"/p2p/{bert.peer}/p2p-circuit")  # the daemon dials through relays, and by QUIC
    found.learn(anna.peer, [at(bert), relayed, at(anna), "nonsense"])
    assert found.addresses(anna.peer) == (relayed, at(anna))
    found.learn(anna.peer, [at(bert)])  # says nothing of itself that helps: what was known stays
    assert found.addresses(anna.peer) == (relayed, at(anna))
    assert found.addresses(bert.peer) == ()


def test_who_failed_is_tried_later_and_last(authors):
    anna, bert, carl = authors
    found = PeerAddresses()
    for author in authors:
        found.learn(author.peer, [at(author)])
    assert set(found.due(0.0, [])) == {author.peer for author in authors}
    found.tried(anna.peer, 0.0, reached=False)
    assert anna.peer not in found.due(AGAIN_S - 0.1, [])
    assert found.due(AGAIN_S, [carl.peer]) == [bert.peer, anna.peer]
    for _ in range(2000):
        found.tried(anna.peer, 0.0, reached=False)
    assert anna.peer not in found.due(AGAIN_MAX_S - 0.1, [])
    assert anna.peer in found.due(AGAIN_MAX_S, [])
    found.tried(anna.peer, 0.0, reached=True)
    assert anna.peer in found.due(AGAIN_S, [])


def test_it_is_bounded(monkeypatch, authors):
    monkeypatch.setattr(source, "MAX_KNOWN", 2)
    found = PeerAddresses()
    for author in authors:
        found.learn(author.peer, [at(author)])
        found.tried(author.peer, 0.0, reached=False)
    assert set(found.due(1e9, [])) == {author.peer for author in authors[1:]}
    assert len(found._tried) == 2

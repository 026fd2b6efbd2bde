"""A node that returns to a swarm without members: it goes on alone where it has been before, and logs that."""

import pytest

from shoal.node.config.settings import load
from shoal.node.runtime import join as node_membership
from shoal.node.runtime.join import await_others, new_manifest
from shoal.node.runtime.run_options import network
from shoal.swarm.access import Link
from shoal.swarm.errors import StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.membership import create, join

ABOUT = {"name": "x", "round": 1, "step": 1, "loss": None, "steps_per_s": 1.0, "shard": 0, "shards": 1, "model": "0" * 64,
         "state": "training", "version": "0"}  # fmt: skip


class Alone:
    """A membership with as many members in sight, and to come, as a test wants."""

    swarm = "a" * 52

    def __init__(self, entry=(), here=1, come=False):
        self.host = self.directory = self
        self._entry, self._here, self._come, self.waited = entry, here, come, 0

    def entry(self):
        return self._entry

    def known(self):
        return ["/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1"]

    def members(self):
        return dict.fromkeys(range(self._here))

    def link(self):
        return "shoal://LINK"

    def wait_for(self, count, timeout, should_stop):
        self.waited = timeout
        return self._come


def logged_by(membership, stopped=False):
    logged = []
    await_others(membership, logged.append, lambda: stopped)
    return logged


def test_who_is_alone_waits_once_and_tells_by_which_link_it_is_found():
    alone = Alone()
    first, second = logged_by(alone)
    assert "link and 2 addresses of known peers for 20 s" in first
    assert second.endswith("or by the link shoal://LINK")
    assert alone.waited == node_membership.AWAIT_S
    assert len(logged_by(Alone(come=True))) == 1
    assert len(logged_by(Alone(), stopped=True)) == 1
    for met in (Alone(entry=("somebody",)), Alone(here=2)):
        assert logged_by(met) == []
        assert met.waited == 0


@pytest.mark.slow(reason="real nodes that return")
def test_only_who_has_the_manifest_comes_in_while_nobody_answers_and_both_meet_on_the_port_of_before(tmp_path):
    def settings(name):
        return load(None, {"node.folder": tmp_path / name, "node.listen": ["/ip4/127.0.0.1/tcp/0"]})

    creator, other = Identity.ephemeral(), Identity.ephemeral()
    first = create(creator, new_manifest(settings("anna"), creator, "0" * 64), network(settings("anna")))
    link, sealed = Link(first.swarm, first.link().bootstrap), first.sealed
    first.close()
    with pytest.raises(StartupError, match="no bootstrap peer can be reached"):
        join(other, link, network(settings("bert")))
    back = join(other, link, network(settings("bert")), sealed)
    try:
        back.directory.announce(**ABOUT)
        assert set(back.directory.members()) == {other.peer_id}
        again = create(creator, sealed, network(settings("anna")))
        try:
            assert again.link().bootstrap == link.bootstrap
            again.directory.announce(**ABOUT)
            back.host.call(back.host.meet(link.bootstrap), 60)  # as it does every 10 s while it is alone
            assert back.directory.wait_for(2, 30.0)
        finally:
            again.close()
    finally:
        back.close()

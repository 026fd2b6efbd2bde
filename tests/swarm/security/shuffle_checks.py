"""Courts for test_forgery.py: records of members in shuffles, those that their authors show and those that others offer."""

import time
from typing import ClassVar

from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.peer_exchange import PeerExchange
from tests.swarm.conftest import SWARM
from tests.swarm.membership.conftest import Quiet
from tests.swarm.security.forgeries import HONEST, VICTIM, member
from tests.swarm.security.record_checks import Court, reason_of


class Unheard(Quiet):
    """A host that meets nobody."""

    met: ClassVar = {}

    def serve(self, protocol, handler):
        pass


class Shuffles(Court):
    """A member to which the sender shows a record of its own in a shuffle."""

    make, old = staticmethod(member), {"issued": time.time() - 200}

    def __init__(self, network):
        self.exchange = PeerExchange(Unheard(), Directory(Unheard(), VICTIM, SWARM), VICTIM, SWARM)

    def judge(self, sealed, sender):
        return reason_of(self.exchange._hear, sender.peer_id, sealed, sender.peer_id)


class Offers(Shuffles):
    """The same member, to which the sender offers the record of another."""

    old, author = {"issued": time.time() - 4000}, False

    @staticmethod
    def make(**changes):
        return member(addresses=(f"/ip4/192.0.2.1/tcp/1/p2p/{HONEST.peer_id}",), **changes)

    def judge(self, sealed, sender):
        before = self.exchange.counters.rejected()
        self.exchange._take(sender.peer_id, [sealed])
        now = self.exchange.counters.rejected()
        assert bool(self.exchange.views.hints) == (now == before)
        return "".join(reason for reason in now if now[reason] != before.get(reason))


SHUFFLES = {"`member`, in a shuffle": Shuffles, "`member`, offered in a shuffle": Offers}

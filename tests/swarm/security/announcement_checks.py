"""The court for test_forgery.py of announcements: a bootstrap node that is to list a public swarm."""

from shoal.swarm.manifest import swarm_id
from shoal.swarm.seed import AnnouncementBoard, SeedRegistry
from shoal.swarm.wire.envelope import seal
from shoal.swarm.wire.messages import Announcement, SeedRequest, SwarmsRequest
from tests.swarm.security.forgeries import HONEST, LIAR, manifest, member
from tests.swarm.security.record_checks import Court

SEALED = seal(manifest(public=True), HONEST)
PUBLIC = swarm_id(SEALED)


def announcement(**changes):
    fields = {
        "swarm": PUBLIC, "peer": HONEST.peer_id, "manifest": SEALED, "params": 1, "round_bytes": 1, "memory": 0, "device": "cpu",
        "issued": 1.0,
    }  # fmt: skip
    return Announcement(**{**fields, **changes})


class Boards(Court):
    make = staticmethod(announcement)

    def __init__(self, network):
        registry = SeedRegistry()
        for who in (HONEST, LIAR):  # membership proves nothing: anybody may be a member
            record = seal(member(swarm=PUBLIC, peer=who.peer_id), who)
            assert registry.answer(who.peer_id, SeedRequest(swarm=PUBLIC, record=record)).reason == ""
        self.board = AnnouncementBoard(registry)

    def judge(self, sealed, sender):
        return self.board.answer(sender.peer_id, SwarmsRequest(announcement=sealed)).reason


ANNOUNCEMENTS = {"`announcement`, at a bootstrap node": Boards}

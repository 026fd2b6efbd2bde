"""Records and statuses in which all numbers are at their bounds: `shoal status`, `pull` and `watch`
show them, as JSON too.
"""

import json

import pytest

from shoal.node.commands.status import table
from shoal.node.watch.events import Heard
from shoal.node.watch.swarm_view import SwarmView
from shoal.node.watch.tui import headline, peer_rows
from shoal.node.watch.web import page_data
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.overview import overview, totals_said
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.topics.status import Status
from shoal.swarm.training.round_steps import steps_of_rounds
from shoal.swarm.wire.envelope import MAX_RATE, MAX_SHARE, MIN_RATE
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import Loss, Progress, Rollouts
from tests.support.message_kinds import good, largest

NOW = 1e9
LEAST = {
    Member: {"steps_per_s": MIN_RATE, "tokens_per_s": MIN_RATE, "loss": -1e30, "issued": 0.0},
    Status: {
        "progress": Progress(state="training", steps_per_s=MIN_RATE, tokens_per_s=MIN_RATE),
        "loss": Loss(training=-1e30),
        "rollouts": Rollouts(reward=-1e30),
    },
}
MOST = {
    Member: {
        "steps_per_s": MAX_RATE,
        "tokens_per_s": MAX_RATE,
        "loss": 1e30,
        "state": "training",
    },
    Status: {
        "progress": Progress(
            state="training", steps_per_s=MAX_RATE, tokens_per_s=MAX_RATE, mfu=MAX_SHARE
        ),
        "loss": Loss(training=1e30),
    },
}


def several(kind):
    """Three at the upper bounds, and three at the lower ones, each of another peer."""
    most, least = largest(kind), good(kind).model_copy(update=LEAST[kind])
    most = most.model_copy(update=MOST[kind])
    peers = [Identity.ephemeral().peer_id for _ in range(6)]
    return {
        peer: one.model_copy(update={"peer": peer})
        for peer, one in zip(peers, [most, least] * 3, strict=True)
    }


def test_status_shows_whatever_records_say():
    """The fault: the mean of two speeds of 1.7e308 ended `shoal status` with an error, and so did
    that of two free records.
    """
    members = several(Member)
    manifest = Manifest(
        name="m", created=0.0, creator=Identity.ephemeral().peer_id, task="text", model="0" * 64
    )
    for size in (None, 2**53):
        found = overview("a" * 52, manifest, members, NOW, size)
        assert json.dumps(found, allow_nan=False)
        assert totals_said(found["totals"])
        assert table({**found, "link": "shoal://x", "invite_only": False})


@pytest.mark.parametrize("length", ["tokens:1", "seconds:auto", "seconds:3600"])
def test_place_in_a_schedule_is_a_number(length):
    """The place in a schedule is a number whatever records say."""
    settings = OuterSettings(method="noloco", round=length)
    for chosen in (several(Member).values(), [largest(Member)]):
        assert 0 <= steps_of_rounds(settings, 2**53, chosen, {}) < 2**200


def test_watch_shows_whatever_statuses_say():
    view = SwarmView()
    for turn in range(3):
        for peer, status in several(Status).items():
            view.take(Heard(time=NOW + turn, peer=peer, status=status))
        view.tick(NOW + turn)
    assert headline(view)
    assert peer_rows(view)
    assert json.dumps(page_data(view, ended=False), allow_nan=False)
    assert json.dumps(view.totals(), allow_nan=False)

"""A node that joins ends with a sentence once nobody is left to begin with, and waits as long as somebody is."""

from functools import partial
from types import SimpleNamespace

import pytest

from shoal.swarm.errors import NetworkError
from shoal.swarm.training import session_setup
from shoal.swarm.training.session_setup import ALONE_S, LOOK_S, OWN_LOOP, PATIENCE_S, SessionError

ME, CREATOR = "me", "creator"


class Swarm:
    """A membership by a clock of its own, whose creator is in view up to ``until`` and hands out no weights."""

    def __init__(self, monkeypatch, until, said=False):
        self.now, self.until, self.said = 0.0, until, said
        self.identity = SimpleNamespace(peer_id=ME)
        self.directory = self
        self.manifest = SimpleNamespace(task=OWN_LOOP, task_options={}, start_when=2)
        self.sync = SimpleNamespace(offer=lambda: None)
        monkeypatch.setattr(session_setup, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(session_setup, "catch_up", self.catch_up)

    def catch_up(self, *args, begun):
        if self.now < self.until:
            raise NetworkError("nothing is served")

    def members(self):
        creator = {CREATOR: SimpleNamespace(state="waiting", round=0)} if self.now < self.until else {}
        return creator | {ME: SimpleNamespace(state="waiting", round=0)}

    def departed(self):
        return {CREATOR: None} if self.said and self.now >= self.until else {}

    def size(self):
        return 1

    def wait_for(self, count, seconds, should_stop=None):
        self.now += seconds
        return False

    def ends(self, wait, first=False):
        """Return the sentence and the time at which a wait ends."""
        opt = SimpleNamespace(slow=[], round=0)
        begun = {
            "weights": partial(session_setup._weights, self, "model", opt, lambda state: None),
            "start": partial(session_setup._wait_for_start, self, opt, self, first=first),
        }[wait]
        with pytest.raises(SessionError) as raised:
            begun()
        return str(raised.value), self.now


@pytest.mark.parametrize("wait", ["weights", "start"])
@pytest.mark.parametrize(("said", "how"), [(True, "the last of them has left"), (False, "none shows itself any more")])
def test_who_joined_does_not_wait_for_those_who_are_gone(monkeypatch, wait, said, how):
    """It waited its whole ten minutes, with a goodbye of the only other member or without."""
    sentence, at = Swarm(monkeypatch, 50.0, said).ends(wait)
    assert sentence == f"No other member is left to begin this swarm with ({how}): join a swarm that runs, or create one."
    assert at == pytest.approx(50.0 + ALONE_S, abs=2 * LOOK_S)


def test_who_is_there_but_hands_out_nothing_is_waited_for_as_long_as_before(monkeypatch):
    sentence, at = Swarm(monkeypatch, float("inf")).ends("start")
    assert sentence.startswith("Only 1 of 2 peers came within 600 s")
    assert at == pytest.approx(PATIENCE_S, abs=2 * LOOK_S)


def test_who_creates_a_swarm_waits_alone(monkeypatch):
    sentence, at = Swarm(monkeypatch, 0.0).ends("start", first=True)
    assert sentence.startswith("Only 1 of 2 peers came within 600 s")
    assert at == pytest.approx(PATIENCE_S, abs=2 * LOOK_S)

"""Every option of a command reaches the setting that it is for."""

from shoal.node.cli.options import limit_overrides
from shoal.node.config.settings import load


def test_limits_reach_their_settings():
    settings = load(
        None, limit_overrides({"allow": ["a"], "deny": ["b"], "upload": 5.0, "ram": 2.0, "disk": 3.0, "invite_only": True})
    )
    assert (settings.node.upload, settings.node.ram, settings.node.disk) == (5.0, 2.0, 3.0)
    assert (list(settings.peers.allow), list(settings.peers.deny)) == (["a"], ["b"])
    assert settings.swarm.invite_only


def test_limits_that_are_not_given_change_nothing():
    flags = {"allow": (), "deny": (), "upload": None, "ram": None, "disk": None}
    assert load(None, limit_overrides(flags)) == load(None)

"""What tests of a group's exchange share."""

import pytest

from shoal.swarm.exchange.group.commit import GroupCommit


@pytest.fixture
def attempts(monkeypatch):
    """Every attempt of a leader: the way, how many took part, and whether a mean was decided on."""
    made, attempt = [], GroupCommit._try_reduction

    async def noted(commit, reduction, until):
        came = len(commit._members)
        decided = await attempt(commit, reduction, until)
        made.append((reduction, came, decided))
        return decided

    monkeypatch.setattr(GroupCommit, "_try_reduction", noted)
    return made

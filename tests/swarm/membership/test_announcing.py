"""A node's own record: when it is published."""

import asyncio

from shoal.swarm.identity import Identity
from shoal.swarm.membership.directory import Directory
from tests.swarm.membership.conftest import ABOUT, Quiet


def test_an_announcement_is_urgent_until_it_is_published():
    """Else every reading would publish too."""
    directory = Directory(Quiet(), Identity.ephemeral(), "a" * 52)
    directory.announce(**ABOUT)
    assert directory._urgent
    assert asyncio.run(directory._publish())
    assert not directory._urgent

"""The exchange of a manifest: whatever the manifest allows, the exchange takes."""

from types import SimpleNamespace

import pytest

from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.manifest import OuterSettings
from shoal.swarm.training.factories import make_exchange, make_screen

SECONDS = (1e-3, 86_400.0)


@pytest.mark.parametrize("wait_s", SECONDS)
def test_what_a_manifest_allows_an_exchange_takes(network, wait_s):
    host = network.host()
    directory = SimpleNamespace(members=dict, everyone=dict, look=lambda: None, is_barred=lambda peer: False, departed=dict)
    membership = SimpleNamespace(host=host, identity=host.identity, swarm="a" * 52, directory=directory)
    outer = OuterSettings(method="diloco", wait_s=wait_s)
    made = make_exchange(membership, outer, make_screen(outer), seed=0, model="0" * 64)
    assert isinstance(made, GroupExchange)

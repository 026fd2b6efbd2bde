"""How many DHT nodes are asked for a key."""

import asyncio

from shoal.swarm.p2p import hivemind_adapter as adapter


def test_the_nearest_nodes_are_asked_twice_as_many_as_hold_a_record(monkeypatch):
    asked = []

    async def get(self, *arguments, **options):
        asked.append((arguments, options))
        return "found"

    monkeypatch.setattr(adapter.DHTNode, "get", get)
    node = object.__new__(adapter.SwarmNode)
    node.num_replicas = 5  # hivemind's, which no call of ours changes
    assert asyncio.run(node.get("key", latest=True)) == "found"
    assert asyncio.run(node.get("key", latest=True, beam_size=3)) == "found"
    assert asked == [(("key",), {"latest": True, "beam_size": 2 * 5}), (("key",), {"latest": True, "beam_size": 3})]

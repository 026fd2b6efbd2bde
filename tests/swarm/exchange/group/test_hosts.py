"""A group's mean over four real hosts, each with its daemon."""

import time

import pytest
import torch

from shoal.optim import RoundKey
from shoal.optim.codecs.registry import codec_named
from shoal.optim.exchange.base import Contribution, weighted_mean
from shoal.swarm.exchange.context import ExchangeTimeouts, PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from tests.records import member_of

SWARM, MODEL = "a" * 52, "0" * 64
SHAPES = [(300, 100), (7,), (64, 64)]


def member(host):
    return member_of(host.peer_id, addresses=host.addresses(), issued=time.time())


@pytest.fixture(scope="module")
def hosts():
    identities = [Identity.ephemeral() for _ in range(4)]
    started = [Host.start(identity, timeout=30) for identity in identities]
    yield list(zip(started, identities, strict=True))
    for host in started:
        host.close()


@pytest.fixture
def group(hosts):
    members = {host.peer_id: member(host) for host, _ in hosts}
    contexts = [PeerContext(host, identity, SWARM, MODEL, 0, lambda: members) for host, identity in hosts]
    return [GroupExchange(context, ExchangeTimeouts(20.0, 5.0)) for context in contexts]


def tensors(number, round=0):
    generator = torch.Generator().manual_seed(100 * number + round)
    return [torch.empty(shape).uniform_(-1, 1, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8+ef", "topk2+ef"])
def test_the_mean_is_that_of_the_decoded_contributions_and_has_the_same_bits_everywhere(group, hosts, name):
    codecs = [codec_named(name) for _ in group]
    twins = [codec_named(name) for _ in group]
    for round in range(2):
        handles = [
            exchange.start(Contribution(RoundKey(SWARM, round), tensors(number, round), 1.0 + number, codecs[number]))
            for number, exchange in enumerate(group)
        ]
        means = [handle.result() for handle in handles]
        expected = weighted_mean([
            (host.peer_id, 1.0 + number, twins[number].decode(twins[number].encode(tensors(number, round)), SHAPES))
            for number, (host, _) in enumerate(hosts)
        ])  # fmt: skip
        for mean in means:
            assert (mean.members, mean.weight) == (expected.members, 10.0)
            for got, first, wanted in zip(mean.tensors, means[0].tensors, expected.tensors, strict=True):
                assert torch.equal(got, first)
                torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)

"""Training in pairs by the codec that needs the partner's weights, in the simulation."""

import pytest
import torch
from torch import nn

from shoal.optim import INT8, GASLoC, LocalSGD, NoLoCo, RoundKey, Simulation, codec_named
from shoal.optim.exchange.base import Contribution
from shoal.swarm.exchange.robust import DistanceScreen

PEERS = list("abcdefgh")
SIZE = 64 * 40 + 5


def train(
    codec,
    method=NoLoCo,
    peers=PEERS,
    rounds=8,
    quiet=0,
    lag=0,
    dtype=torch.float32,
    saved=None,
    stop=None,
    faults=None,
    **options,
):
    """Each peer walks at random for some rounds and stands still for the quiet ones; peer -> (slow
    weights, state).
    """

    def peer(exchange):
        number = peers.index(exchange.peer)
        parameter = nn.Parameter(
            torch.randn(SIZE, generator=torch.Generator().manual_seed(9)).to(dtype)
        )
        every = 4
        opt = method(
            torch.optim.SGD([parameter], lr=1.0),
            exchange,
            every=every,
            lag=lag,
            codec=codec_named(codec),
            fragments=[[parameter]] if lag else None,
        )
        begin = 0
        if saved is not None:
            state, weights = saved[exchange.peer]
            opt.load_state_dict(state)
            parameter.data.copy_(weights)
            begin = opt.steps
        for step in range(begin, (rounds + quiet) * every):
            if step == stop:
                return opt.state_dict(), parameter.detach().clone()
            generator = torch.Generator().manual_seed(1000 * number + step)
            walk = torch.randn(SIZE, generator=generator) * (0.02 if step < rounds * every else 0.0)
            parameter.grad = walk.to(dtype)
            opt.step()
            exchange.sleep(0.1)
        return opt.slow[0].clone(), parameter.detach().clone()

    return Simulation(peers, seed=0).run(peer)


def spread(found):
    """The largest distance of a block of a peer to the mean of all, rms, and that of all blocks
    together.
    """
    slow = torch.stack([slow.double() for slow, _ in found.values()])
    apart = (slow - slow.mean(0)).square()
    return max(float(block.mean(1).max()) for block in apart.split(64, 1)) ** 0.5, float(
        apart.mean().sqrt()
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", [NoLoCo, LocalSGD, GASLoC])
def test_peers_of_a_random_order_come_together_in_every_block(method):
    before, _ = spread(train("mod4", method))
    worst, usual = spread(train("mod4", method, quiet=30))
    assert usual < 0.25 * before
    assert worst < 12 * usual  # no block of a peer stays away for good


def test_the_sum_of_all_peers_is_kept():
    """Local SGD moves the members of a pair by opposite amounts, so the sum is that of what was
    learnt, up to float32.
    """
    found = train("mod4", LocalSGD)
    total = sum(slow.double() for slow, _ in found.values())
    first = torch.randn(SIZE, generator=torch.Generator().manual_seed(9)).double()
    learnt = torch.zeros(SIZE, dtype=torch.float64)
    for number in range(len(PEERS)):
        for step in range(8 * 4):
            learnt -= (
                0.02
                * torch.randn(
                    SIZE, generator=torch.Generator().manual_seed(1000 * number + step)
                ).double()
            )
    torch.testing.assert_close(total, 8 * first + learnt, rtol=0, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_types_train(dtype):
    worst, _ = spread(train("mod4", dtype=dtype, quiet=4))
    assert worst < 0.1


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("stop", [21, 24])
def test_an_interrupted_run_goes_on_with_the_same_bits(stop, lag):
    """At step 21 with a lag of 1 an exchange is in flight, which is begun anew."""
    whole = train("mod4", lag=lag, peers=PEERS[:2])
    again = train(
        "mod4", lag=lag, peers=PEERS[:2], saved=train("mod4", lag=lag, peers=PEERS[:2], stop=stop)
    )
    for peer in PEERS[:2]:
        assert torch.equal(whole[peer][0], again[peer][0])
        assert torch.equal(whole[peer][1], again[peer][1])


def test_the_ranges_are_part_of_the_state():
    """Without them the run goes on with other bits: the first range is a guess."""
    saved = train("mod4", peers=PEERS[:2], stop=24)
    whole = train("mod4", peers=PEERS[:2])
    for state, _ in saved.values():
        for group in state["param_groups"]:
            group["outer"]["progress"] = group["outer"]["progress"].replace('"rho": ', '"rho": 1')
    again = train("mod4", peers=PEERS[:2], saved=saved)
    assert not torch.equal(whole["a"][0], again["a"][0])


def test_weights_of_contributions_count_and_a_listener_takes_the_others():
    def peer(exchange):
        values = torch.full((128,), 1.0 if exchange.peer == "a" else 2.0)
        codec = codec_named("mod4")
        codec.expect("run:0:0", [torch.ones(128)])
        mean = exchange.start(
            Contribution(RoundKey("run", 0), [values], 0.0 if exchange.peer == "a" else 3.0, codec)
        ).result()
        return mean.tensors[0], mean.weight, mean.counted

    found = Simulation(["a", "b"]).run(peer)
    assert [facts[1:] for facts in found.values()] == [(3.0, 1), (3.0, 1)]
    torch.testing.assert_close(found["a"][0], torch.full((128,), 2.0), rtol=0, atol=1.0)
    assert torch.equal(found["b"][0], torch.full((128,), 2.0))


def test_a_clipped_mean_takes_the_same_share_of_the_way():
    """Peer b lies 3 usual distances away: the share of its contribution is a third of a half."""
    screens = {peer: DistanceScreen(robust="clipped-gossip", suspect=0) for peer in "ab"}
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(640, generator=generator)

    def peer(exchange):
        codec, moved = codec_named("mod4"), []
        for round in range(8):
            away = direction * (0.1 if round < 7 else 0.15) * (exchange.peer == "b")
            codec.expect(f"run:{round}:0", [direction * 0.1])
            mean = exchange.start(Contribution(RoundKey("run", round), [away], 1.0, codec)).result()
            codec.accepted()
            moved.append(float((mean.tensors[0] - away).norm() / direction.norm()))
        return moved

    found = Simulation(["a", "b"], screens=screens).run(peer)
    for moved in found.values():
        assert moved[-2] == pytest.approx(0.05, rel=0.2)
        assert moved[-1] == pytest.approx(0.05, rel=0.2)


def test_another_codec_is_refused():
    """Groups and partners with another codec are refused in a sentence."""

    def peer(exchange, codec):
        return exchange.start(
            Contribution(RoundKey("run", 0), [torch.ones(3)], 1.0, codec)
        ).result()

    with pytest.raises(
        ValueError,
        match="mod4 is for pairs that read each other by their own weights, not for groups",
    ):
        Simulation(PEERS[:3], size=3).run(lambda exchange: peer(exchange, codec_named("mod4")))
    other = {"a": INT8, "b": codec_named("mod4")}
    with pytest.raises(ValueError, match="peer b sends mod4 in fragment 0 where peer a sends int8"):
        Simulation(PEERS[:2]).run(lambda exchange: peer(exchange, other[exchange.peer]))

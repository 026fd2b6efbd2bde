"""How a session cuts a model into fragments, and what it leaves out."""

from functools import partial

import pytest
import torch

import shoal
from shoal.optim import NoLoCo
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.state.query import ModelDiffersError
from shoal.swarm.training.session_setup import SessionError, new_swarm, parameters_of
from tests.support.session_loops import (
    EVERY,
    HERE,
    ROUNDS,
    decayed,
    loop,
    model,
    several,
    sgd,
    simulated,
    square,
    together,
    trained,
)


@pytest.mark.parametrize(
    ("given", "written"),
    [({}, 2), ({"fragments": 9}, 2), ({"lag": 0}, 1), ({"method": "diloco"}, None)],
)
def test_manifest_states_the_models_fragments(given, written):
    net = model(0)
    sealed = new_swarm(
        Identity.ephemeral(),
        parameters_of(net),
        name="x",
        seed=0,
        start_when=1,
        shards=1,
        invite_only=False,
        outer={"every": 10, **given},
        model=net,
    )
    assert open_manifest(sealed).outer.fragments == written


def test_list_of_parameters_is_cut_evenly():
    """It catches a list that silently makes one fragment, and a joiner that cuts its module by
    layer where the others do not.
    """
    begin, other = square(0), square(7)
    first = shoal.create(
        state=list(begin.parameters()), every=EVERY, network=HERE, start_when=2, wait_s=60.0
    )
    link = first.link
    assert (first.settings.fragments, first.settings.lag) == (4, "auto")

    def train(session, make, module, seed):
        with session as s:
            opt = make(s)
            loop(opt, module, seed)
            return opt, [
                [place_of(module)[opt.parameters[at]] for at in opt.positions(number)]
                for number in range(opt.fragments)
            ]

    (one, mine), (two, theirs) = together(
        lambda: train(first, lambda s: NoLoCo(decayed(begin), s.exchange(), every=EVERY), begin, 1),
        lambda: train(
            shoal.join(link, state=other, network=HERE),
            lambda s: s.optimizer(several(other)),
            other,
            2,
        ),
    )

    assert mine == theirs
    assert (
        min(one.round, two.round) >= 4 * ROUNDS
    )  # a busy machine lets one fall behind, and move to the other's round


def place_of(module):
    return {parameter: place for place, parameter in enumerate(module.parameters())}


def test_named_fragments_hold_for_all_joiners():
    """It catches a joiner that cuts the model by layer, which would average other parameters with
    these.
    """
    begin, other = square(0), square(7)
    cut = [begin[2], [begin[0], begin[3].bias, begin[1]]]
    first = shoal.create(
        state=begin,
        fragments=cut,
        lag=0,
        every=EVERY,
        codec="float32",
        network=HERE,
        start_when=2,
        wait_s=60.0,
    )
    link, manifest = first.link, first.membership.manifest
    assert (manifest.outer.fragments, manifest.fragment_of) == (2, (1, 1, 1, 1, 0, 0, 1))

    def joiner(s):
        with pytest.raises(SessionError, match="its fragments hold other parameters"):
            NoLoCo(
                sgd(other),
                s.exchange(),
                every=EVERY,
                lag=0,
                fragments=[other[0], [other[1], other[2], other[3]]],
            )
        opt = s.optimizer(sgd(other))
        assert [opt.positions(0), opt.positions(1)] == [[4, 5], [0, 1, 2, 3, 6]]
        return opt

    found = together(
        lambda: trained(
            first,
            lambda s: NoLoCo(decayed(begin), s.exchange(), every=EVERY, lag=0, fragments=cut),
            begin,
            1,
        ),
        lambda: trained(shoal.join(link, state=other, network=HERE), joiner, other, 2),
    )
    wanted = simulated(
        lambda net, exchange: NoLoCo(
            sgd(net),
            exchange,
            every=EVERY,
            lag=0,
            fragments=[net[2], [net[0], net[3].bias, net[1]]],
        ),
        partial(square, 0),
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_private_parameters_are_never_exchanged():
    """What a peer keeps for itself is in no snapshot and no exchange."""
    one, other = model(0), model(7)
    kept = other[2].weight.detach().clone()
    first = shoal.create(
        state=list(one[0].parameters()), every=EVERY, start_when=2, network=HERE, node="anna"
    )
    link = first.link

    def train(session, module, seed):
        with session as s:
            opt = NoLoCo(
                sgd(module), s.exchange(), every=EVERY, exclude=list(module[2].parameters()), lag=0
            )
            began = module[0].weight.detach().clone(), module[2].weight.detach().clone()
            loop(opt, module, seed)
            return began, [tensor.clone() for tensor in opt.slow]

    (body, head), slow = together(
        lambda: train(first, one, 1),
        lambda: train(shoal.join(link, state=list(other[0].parameters()), network=HERE), other, 2),
    )[1]
    assert torch.equal(body, model(0)[0].weight)
    assert torch.equal(head, kept)
    assert [tuple(tensor.shape) for tensor in slow] == [(8, 4), (8,)]
    assert not torch.equal(one[2].weight, other[2].weight)


def test_fragments_by_layer_want_the_module():
    module = model(0)
    with (
        shoal.create(state=module, method="streaming", every=8, fragments=2, network=HERE) as first,
        pytest.raises(ModelDiffersError, match="hand in the module as state"),
    ):
        shoal.join(first.link, state=list(module.parameters()), network=HERE)

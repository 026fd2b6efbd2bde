"""The compressed butterfly: slices and shares, what its mean is, and what it keeps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import DiLoCo, Faults, RoundKey, Simulation, codec_named
from shoal.optim.codecs.slices import BLOCK, MOST_SLICES, Share, slices
from shoal.optim.exchange.averaging import mean_of
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.butterfly import applies, assemble, average_share, deal
from shoal.optim.exchange.update_screen import TRUSTING, UpdateScreen
from shoal.optim.exchange.weighted_mean import counted_weights

UPS = ("sign+ef", "e3m0+ef", "int8+ef")
BACKS = ("sign+ef", "auto:2+ef", "e3m0+ef")
SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 5000)),
        st.tuples(st.integers(1, 40), st.integers(1, 150)),
    ),
    min_size=1,
    max_size=4,
)
NAMES = "abcdefgh"


def randoms(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def butterfly(codecs, shapes, contributions, unweighted_count=0):
    """Return the mean of members with these codecs, and what each owner sends back.

    ``contributions``: peer id, weight and payload.
    """
    shares = deal(shapes, codecs)
    averages = {}
    for owner, share in shares.items():
        parts = []
        for peer, weight, payload in contributions:
            cut = codecs[peer].cut(payload, shapes, share)
            parts.append((peer, weight, codecs[peer].decode(cut, share.shapes)))
        averages[owner] = average_share(codecs[owner], share, parts, unweighted_count)
    parts = []
    for owner, average in averages.items():
        parts.append((shares[owner], codecs[owner].decode_averages(average.payload, shares[owner])))
    return assemble(shapes, parts), averages


@given(SHAPES)
def test_slices_hold_every_value_once(shapes):
    pieces = [piece for cut in slices(shapes) for piece in cut]
    assert all(piece.start % BLOCK == 0 for piece in pieces)
    for place, shape in enumerate(shapes):
        mine = [piece for piece in pieces if piece.place == place]
        ends = [0, *(piece.stop for piece in mine)]
        assert [piece.start for piece in mine] == ends[:-1]
        assert ends[-1] == math.prod(shape)


def test_a_large_model_has_no_more_slices():
    cuts = slices([(3 << 20, 4), (5,)])
    assert len(cuts) <= MOST_SLICES
    sizes = [sum(piece.stop - piece.start for piece in cut) for cut in cuts[:-1]]
    assert max(sizes) - min(sizes) <= BLOCK


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.sampled_from(UPS), st.integers(0, 99), st.integers(3, 6))
def test_a_share_decodes_to_the_values_of_the_whole(shapes, up, seed, count):
    codec = codec_named(f"{up},back=float32")
    payload = codec.encode(randoms(shapes, seed))
    whole = codec.decode(payload, shapes)
    for share in deal(shapes, NAMES[:count]).values():
        found = codec.decode(codec.cut(payload, shapes, share), share.shapes)
        assert all(map(torch.equal, found, share.take(whole)))


@settings(deadline=None, max_examples=40)
@given(
    SHAPES,
    st.sampled_from(UPS),
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 3.7, 90.0]), min_size=3, max_size=6),
    st.integers(0, 3),
)
def test_exact_averages_are_the_gathered_mean(shapes, up, weights, unweighted_count):
    names = NAMES[: len(weights)]
    codecs = {name: codec_named(f"{up},back=float32") for name in names}
    contributions = []
    for seed, (name, weight) in enumerate(zip(names, weights, strict=True)):
        contributions.append((name, weight, codecs[name].encode(randoms(shapes, seed))))
    whole = []
    for name, weight, payload in contributions:
        whole.append((name, weight, codecs[name].decode(payload, shapes)))
    expected = mean_of(TRUSTING, codecs["a"], "a", 0, whole, unweighted_count)
    found, _ = butterfly(codecs, shapes, contributions, unweighted_count)
    assert all(map(torch.equal, found, expected.tensors))


@settings(deadline=None, max_examples=10)
@given(
    SHAPES,
    st.sampled_from(UPS),
    st.sampled_from(BACKS),
    st.lists(st.sampled_from([1.0, 2.0]), min_size=3, max_size=5),
)
def test_what_was_learnt_is_applied_or_remembered(shapes, up, back, weights):
    """Of each round: the sum of the means, what members have not sent and what owners owe are all
    that was learnt, by the weights.
    """
    names = NAMES[: len(weights)]
    codecs = {name: codec_named(f"{up},back={back}") for name in names}
    counted, _ = counted_weights(weights)
    learnt = [torch.zeros(shape) for shape in shapes]
    applied = [torch.zeros(shape) for shape in shapes]
    for round in range(3):
        contributions = []
        for seed, name in enumerate(names):
            tensors = randoms(shapes, 10 * round + seed)
            for total, tensor in zip(learnt, tensors, strict=True):
                total.add_(tensor, alpha=counted[seed] / sum(counted))
            contributions.append((name, weights[seed], codecs[name].encode(tensors)))
            codecs[name].accepted()
        mean, averages = butterfly(codecs, shapes, contributions)
        for total, tensor in zip(applied, mean, strict=True):
            total.add_(tensor)
        for name in names:
            codecs[name].keep(averages[name])
    for weight, name in zip(counted, names, strict=True):
        for total, unsent, owed in zip(applied, codecs[name].error, codecs[name].owed, strict=True):
            total.add_(unsent, alpha=weight / sum(counted)).add_(owed)
    for found, expected in zip(applied, learnt, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 8), st.data())
def test_only_the_slices_of_an_owner_that_leaves_move(count, data):
    shapes = [(60_000,), (77,)]
    members = NAMES[:count]
    gone = data.draw(st.sampled_from(members))
    before = deal(shapes, members)
    after = deal(shapes, members.replace(gone, ""))
    marks = [torch.arange(60_000.0), torch.arange(60_000.0, 60_077.0)]
    lost = set(torch.cat(before[gone].take(marks)).tolist()) if before[gone].ranges else set()
    for member, share in after.items():
        had = set(torch.cat(before[member].take(marks)).tolist())
        has = set(torch.cat(share.take(marks)).tolist())
        assert had <= has
        assert has - had <= lost


def test_shares_of_members_hardly_differ_in_size():
    shares = deal([(4 << 20,)], NAMES)
    sizes = [sum(math.prod(shape) for shape in share.shapes) for share in shares.values()]
    assert sum(sizes) == 4 << 20
    assert max(sizes) < 1.3 * (4 << 20) / len(NAMES)


def test_a_slice_that_moves_is_owed_no_more():
    shapes = [(64 * BLOCK,)]
    codec = codec_named("sign+ef,back=sign+ef")
    codec.encode(randoms(shapes, 0))
    few = deal(shapes, "abc")["a"]
    many = deal(shapes, "abcd")["a"]

    def flags(share):
        found = [torch.zeros(shapes[0])]
        share.put(found, [torch.ones(share.shapes[0])])
        return found[0].bool()

    codec.keep(codec.average(many, randoms(many.shapes, 1)))
    (first,) = codec.owed
    assert (first != 0).equal(flags(many))
    averaged = codec.average(few, [torch.zeros(few.shapes[0])])
    assert codec.owed[0] is first
    codec.keep(averaged)
    # What is sent of nothing, and owed then, is what was owed before.
    restored = [torch.zeros(shapes[0])]
    few.put(restored, codec.decode_averages(averaged.payload, few))
    torch.testing.assert_close(codec.owed[0] + restored[0], first, rtol=0, atol=1e-6)
    codec.keep(codec.average(many, randoms(many.shapes, 2)))
    assert not codec.owed[0][flags(few) & ~flags(many)].any()


def test_two_members_or_a_screen_gather():
    codec = codec_named("sign+ef,back=sign+ef")
    assert applies(codec, 3, gathers=False)
    assert not applies(codec, 2, gathers=False)
    assert not applies(codec, 3, gathers=True)
    assert not applies(codec_named("sign+ef"), 3, gathers=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("topk2+ef,back=sign+ef", "contributions are sent by topk2: choose sign"),
        ("sign+matrices+ef,back=sign+ef", "sent by sign.matrices"),
        ("sign,back=sign+ef", "choose sign.ef"),
        ("sign+ef,back=sign", "would lose what it leaves out for good: choose sign.ef"),
        ("sign+ef,back=topk2+ef", "cannot be sent back by topk2.ef: choose one of float32"),
        ("sign+ef,back=mod4", "cannot be sent back by mod4"),
        ("sign+ef,back=sign+ef,back=sign+ef", "cannot be sent back by sign.ef,back"),
        ("sign+ef,back=", "unknown codec ''"),
    ],
)
def test_codecs_that_do_not_fit_their_way_are_refused(name, reason):
    with pytest.raises(ValueError, match=reason):
        codec_named(name)


@pytest.mark.parametrize("back", ["float32", *BACKS])
def test_the_name_of_both_ways_is_parsed_again(back):
    codec = codec_named(f"sign+ef:0.9,back={back}")
    assert codec.name == codec_named(codec.name).name == codec.fresh().name
    assert codec.back.name == back


SMALL = [(3 * BLOCK + 5, 2), (9,)]


def rounds(codec, count=4, screens=None, faults=None, last=3):
    """Return what each of ``count`` peers gets in each round, and its codec."""
    names = NAMES[:count]

    def peer(exchange):
        mine = codec_named(codec)
        found = []
        for round in range(last):
            tensors = randoms(SMALL, 10 * round + names.index(exchange.peer))
            handle = exchange.start(Contribution(RoundKey("run", round), tensors, 1.0, mine))
            mean = handle.result()
            if mean is None:
                mine.rejected(tensors)
            else:
                mine.accepted()
                found.append([tensor.clone() for tensor in mean.tensors])
            exchange.sleep(1.0)
        return found, mine

    simulation = Simulation(list(names), size=count, screens=screens, faults=faults or Faults())
    return simulation.run(peer)


@pytest.mark.parametrize("back", BACKS)
def test_all_simulated_peers_take_the_same_averages(back):
    found = rounds(f"sign+ef,back={back}")
    for means, codec in found.values():
        assert len(means) == 3
        assert any(tensor.any() for tensor in codec.owed)
        for mean, first in zip(means, found["a"][0], strict=True):
            assert all(map(torch.equal, mean, first))


def test_a_screen_that_gathers_ends_the_butterfly():
    class Gathering(UpdateScreen):
        gathers = True

    found = rounds("sign+ef,back=sign+ef", screens={"b": Gathering()})
    plain = rounds("sign+ef")
    for name, (means, codec) in found.items():
        assert codec.owed is None
        for mean, other in zip(means, plain[name][0], strict=True):
            assert all(map(torch.equal, mean, other))


def test_others_owe_after_an_owner_died():
    found = rounds("sign+ef,back=sign+ef", faults=Faults(kill={"c": 1.5}), last=4)
    assert sorted(found) == ["a", "b", "d"]
    shares = deal(SMALL, ["a", "b", "d"])
    for name, (means, codec) in found.items():
        assert len(means) == 4
        others = [torch.ones(shape) for shape in SMALL]
        share = shares[name]
        share.put(others, [torch.zeros(shape) for shape in share.shapes])
        for tensor, outside in zip(codec.owed, others, strict=True):
            assert not (tensor * outside).any()


def learner(exchange, steps, resume_at=None, form="whole_state"):
    """Train; at ``resume_at`` go on in a new optimizer with the saved state of the old one."""
    torch.manual_seed(0)
    model = torch.nn.Linear(60, 50)
    generator = torch.Generator().manual_seed(NAMES.index(exchange.peer))

    def made():
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return DiLoCo(inner, exchange, every=2, codec=codec_named("sign+ef,back=sign+ef"))

    opt = made()
    for step in range(steps):
        if step == resume_at:
            state = getattr(opt, form)()
            opt = made()
            opt.load_state_dict(state)
        opt.zero_grad()
        model(torch.randn(5, 60, generator=generator)).square().mean().backward()
        opt.step()
        exchange.sleep(0.1)
    return [tensor.clone() for tensor in opt.slow]


@pytest.mark.parametrize("form", ["whole_state", "state_dict"])
@pytest.mark.parametrize("resume_at", [3, 4])
def test_a_resumed_owner_still_owes_what_it_owed(form, resume_at):
    straight = Simulation(list("abc"), size=3).run(lambda exchange: learner(exchange, 10))
    resumed = Simulation(list("abc"), size=3).run(
        lambda exchange: learner(exchange, 10, resume_at, form)
    )
    for name in "abc":
        assert all(map(torch.equal, straight[name], resumed[name]))


def test_residuals_of_one_way_only_are_refused_when_loaded():
    codec = codec_named("sign+ef,back=sign+ef")
    codec.encode(randoms(SMALL, 0))
    state = codec.state_dict()
    state["error"] = state["error"][:1]
    with pytest.raises(ValueError, match="has not two tensors for each"):
        codec_named(codec.name).load_state_dict(state)


def test_a_mean_that_is_not_finite_cannot_be_sent_back():
    codec = codec_named("sign+ef,back=float32")
    share = Share.of(slices([(5,)]))
    with pytest.raises(ValueError, match="an average holds NaN or infinity"):
        codec.average(share, [torch.full((5,), math.inf)])

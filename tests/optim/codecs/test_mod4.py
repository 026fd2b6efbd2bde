"""The codec for pairs, against its formulas in float64 and Python's integers."""

import json
import math
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim.codecs.base import Codec, Resendable
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.mod4 import Mod4Codec, for_pairs
from shoal.optim.codecs.registry import codec_named

C, LEVELS, BLOCK, SLAB = 4.5, 16, 64, 512


def stream(seed, count):
    """The dither and the odd factors, by Python's integers."""
    low, high = struct.unpack("<II", seed)
    found = []
    for x in range((min(count, SLAB) + 1) * BLOCK):
        x = ((x ^ low) * 0x2C1B3C6D + high) % 2**32
        for factor in (0x7FEB352D, 0x68E31DA5):
            x = ((x ^ (x >> 16)) * factor) % 2**32
        found.append(x ^ (x >> 15))
    u = np.array([x // 65536 / 65536 - 0.5 for x in found[BLOCK:]]).reshape(-1, BLOCK)
    return np.resize(u, (count, BLOCK)), [x % 256 // 2 * 2 + 1 for x in found[:BLOCK]]


def in_blocks(tensors):
    """float64, short blocks filled with zeros."""
    rows = [np.pad(t.reshape(-1).double().numpy(), (0, -t.numel() % BLOCK)) for t in tensors]
    return np.concatenate(rows).reshape(-1, BLOCK) if rows else np.zeros((0, BLOCK))


def parsed(payload, count):
    """Seed, exponents, digests and codes (blocks, 64) of a payload."""
    data = payload.numpy().tobytes()
    assert len(data) == 8 + count * 34
    packed = np.frombuffer(data[8 + 2 * count :], np.uint8).reshape(count, 32)
    exponents = np.frombuffer(data[8 : 8 + count], np.int8).astype(int)
    return (
        data[:8],
        exponents,
        list(data[8 + count : 8 + 2 * count]),
        np.concatenate([packed % 16, packed // 16], axis=1),
    )


def rows(message):
    """The own values of a message in blocks."""
    return torch.from_numpy(in_blocks(message.tensors())).float()


def widths(message):
    """The expected distances of a message's blocks."""
    return 2.0 ** (message.exponents.double() / 4)


def both_ways(mine, theirs):
    """Two readings of each other, and how far each moves."""
    here, there = mine.read(theirs.payload), theirs.read(mine.payload)
    bits = here.bits, there.bits
    return here, there, mine.move(here, bits[1]), theirs.move(there, bits[0])


def pair(shape, distance, seed=0, rounds=1):
    """Two peers' codecs after some exchanges, and their last messages; values are about 1."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape] if isinstance(shape, tuple) else shape
    base = [torch.randn(one, generator=generator) for one in shapes]
    codecs = Mod4Codec(), Mod4Codec()
    for number in range(rounds):
        moves = [
            [distance * torch.randn(one, generator=generator) for one in shapes] for _ in codecs
        ]
        messages = []
        for codec, moved in zip(codecs, moves, strict=True):
            codec.expect(f"run:{number}:0", moved)
            messages.append(codec.post([b + m for b, m in zip(base, moved, strict=True)]))
        if number < rounds - 1:
            both = messages[0].read(messages[1].payload), messages[1].read(messages[0].payload)
            for codec, message, read in zip(codecs, messages, both, strict=True):
                codec.learn(message, read)
                codec.accepted()
    return codecs, messages


def test_a_payload_is_what_the_formulas_make_of_the_weights():
    (_, _), (mine, theirs) = pair([(70, 33), (5,), ()], 0.02)
    count = 37 + 1 + 1
    rows, x = in_blocks(mine.tensors()), in_blocks(theirs.tensors())
    seed, exponents, digests, codes = parsed(mine.payload, count)
    u, odd = stream(seed, count)
    sigma = 2.0 ** (exponents / 4)
    step = (2 * C * sigma / LEVELS)[:, None]
    z = np.round(rows / step + u)
    near_a_tie = np.abs(np.abs(rows / step + u - np.floor(rows / step + u)) - 0.5) < 1e-3
    assert near_a_tie.mean() < 0.01
    assert (codes == z % LEVELS)[~near_a_tie].all()
    exact = ~near_a_tie.any(axis=1)
    assert exact.sum() > count / 2
    assert [d for d, e in zip(digests, exact, strict=True) if e] == [
        sum(r * int(h) for r, h in zip(odd, row, strict=True)) % 256
        for row, e in zip(z // LEVELS, exact, strict=True)
        if e
    ]
    k = np.round((x / step + u - codes) / LEVELS)
    expected = (codes + LEVELS * k - u) * step
    read = theirs.read(mine.payload)
    assert read.kept.all()
    np.testing.assert_allclose(
        read.values.numpy(), expected, rtol=1e-6, atol=1e-6 * float(step.max())
    )
    # Half a step of rounding at most, in float32.
    assert (np.abs(expected - rows) <= step * 0.5 * (1 + 1e-4)).all()


@pytest.mark.parametrize("rounds", [1, 2, 6])
def test_what_one_gains_the_other_loses_to_the_last_bit(rounds):
    _, (mine, theirs) = pair([(64, 64), (100,)], 0.01, rounds=rounds)
    *_, gains, losses = both_ways(mine, theirs)
    assert all(torch.equal(a, -b) for a, b in zip(gains, losses, strict=True))
    apart = [b.double() - a.double() for a, b in zip(mine.tensors(), theirs.tensors(), strict=True)]
    wrong = sum(float((g.double() - a).square().sum()) for g, a in zip(gains, apart, strict=True))
    assert wrong < 0.2 * sum(float(a.square().sum()) for a in apart)


@settings(max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=2).map(tuple), max_size=4),
    scale=st.floats(1e-4, 1e4),
    distance=st.floats(0, 3),
    seed=st.integers(0, 999),
)
def test_any_shapes_and_distances(shapes, scale, distance, seed):
    generator = torch.Generator().manual_seed(seed)
    base = [scale * torch.randn(shape, generator=generator) for shape in shapes]
    other = [b + distance * scale * 0.01 * torch.randn(b.shape, generator=generator) for b in base]
    messages = []
    for tensors in (base, other):
        codec = Mod4Codec()
        codec.expect("run:0:0", [torch.full_like(t, scale * 0.01) for t in tensors])
        messages.append(codec.post(tensors))
        assert messages[-1].payload.numel() == codec.nbytes(shapes)
    mine, theirs = messages
    here, _, gains, losses = both_ways(mine, theirs)
    values, kept = mine.read(theirs.payload).values, here.kept
    exact = theirs.read(theirs.payload).values
    far = (rows(theirs) - rows(mine)).abs().amax(1) >= C * 2.0 ** (theirs.exponents / 4) * (
        1 - 1 / LEVELS
    )
    assert torch.equal(values[~far & kept], exact[~far & kept])
    assert torch.equal(values[~kept], rows(mine)[~kept])
    if distance < 1:
        assert kept.all()
    assert [tuple(g.shape) for g in gains] == shapes
    if not far.any():
        assert all(torch.equal(a, -b) for a, b in zip(gains, losses, strict=True))


def test_distance_of_a_short_block():
    """What fills it up is rounded as well: counted with them it made a block of 2 values seem six
    times as far away.
    """
    _, (mine, theirs) = pair([(64, 64), (2,), (30,)], 0.05)
    read = mine.read(theirs.payload)
    for found, size, row, own in zip(
        read.distance[-2:], (2, 30), read.values[-2:], rows(mine)[-2:], strict=True
    ):
        assert float(found) == pytest.approx(
            float((row - own)[:size].double().square().mean().sqrt()), rel=1e-5
        )


def test_blocks_that_are_too_far_are_refused_by_both():
    """Those whose digest agrees by chance are 1 in 256, and they too move nobody further than its
    own range.
    """
    _, (mine, theirs) = pair((256, 256), 0.01)
    far = Mod4Codec()
    far.expect("run:0:0", [torch.full((256, 256), 0.01)])
    away = far.post([theirs.tensors()[0] + torch.where(torch.arange(256)[:, None] < 128, 2.0, 0.0)])
    here, _, gains, losses = both_ways(mine, away)
    assert not here.kept[
        :512
    ].any()  # 128 rows of 4 blocks: by the digest, or by twice the own range
    assert here.kept[512:].all()
    assert not gains[0][:128].any()
    assert all(torch.equal(a, -b) for a, b in zip(gains, losses, strict=True))
    assert torch.equal(mine.seen(mine.read(away.payload))[0][:128], mine.tensors()[0][:128])


def test_the_digest_finds_a_block_that_was_read_wrong():
    """One value a whole range away in each block: within twice the own distance, so the digest
    alone refuses it.
    """
    _, (mine, _) = pair((2000, 64), 0.01)
    other = Mod4Codec()
    other.expect("run:0:0", [torch.full((2000, 64), 0.01)])
    step = 2 * C * 2.0 ** (other.post([rows(mine)]).exponents / 4) / LEVELS
    moved = rows(mine).clone()
    moved[:, 7] += LEVELS / 2 * step * 1.2
    wrong = mine.read(other.post([moved]).payload)
    assert not wrong.kept.any()


def test_ranges_follow_what_was_measured():
    (codec, _), (mine, theirs) = pair((64, 64), 0.05)
    assert (2.0 ** (mine.exponents / 4)).mean() == pytest.approx(
        0.05 * 1.5 * 1.09 * 1.09, rel=0.15
    )  # two times rounded up
    read = mine.read(theirs.payload)
    read.kept[3] = False
    used = widths(mine)
    codec.learn(mine, read)
    codec.accepted()
    apart = (rows(theirs) - rows(mine)).double().square().mean(1).sqrt()
    codec.expect("run:1:0", [torch.zeros(64, 64)])
    after = widths(codec.post(mine.tensors()))
    expected = 1.1 * torch.where(torch.arange(64) == 3, 1.5 * used, apart)
    assert (
        after / expected
    ).log2().abs().max() < 0.5  # by two roundings to a quarter of an octave, and the lattice
    rho = math.sqrt(float(apart.square().sum()) / (64 * 0.05**2))
    for part in (0.25, 0.4375):
        codec.expect("run:1:0", [torch.full((64, 64), 10.0)])
        by_motion = widths(codec.post(mine.tensors()))
        assert by_motion.mean() == pytest.approx(10.0 * math.sqrt(part) * rho, rel=0.3)


def test_range_grows_by_half_at_most():
    """The word of a wide range spreads and grows by half at most."""
    (codec, other), (mine, theirs) = pair((64, 64), 0.05)
    used = widths(mine)
    after = []
    for factor in (1.0, 3.0, 10.0, 1e6):
        other.expect("run:0:0", [torch.full((64, 64), 0.05 * factor)])
        wide = other.post(theirs.tensors())
        read = mine.read(wide.payload)
        codec.learn(mine, read)
        codec.expect("run:1:0", [torch.zeros(64, 64)])
        after.append(widths(codec.post(mine.tensors())))
        word = torch.minimum(0.7 * widths(wide), 1.5 * used)
        seen = torch.where(read.kept, read.distance, 1.5 * used)
        assert (after[-1] / (1.1 * torch.maximum(seen, word))).log2().abs().max() < 0.5
    assert after[1].mean() > 1.1 * after[0].mean()
    assert torch.equal(after[2], after[3])


def test_alone_the_range_widens_fourfold_at_most():
    """As far as the weights move: what was measured is as wide as before."""
    (codec, _), (mine, _) = pair((64, 64), 0.05)
    widest = {}
    for moved in (0.05, 0.0):
        for rounds in (0, 3, 12, 100):
            codec._apart = rounds
            codec.expect("run:1:0", [torch.full((64, 64), moved)])
            widest.setdefault(moved, []).append(float(widths(codec.post(mine.tensors())).mean()))
    assert [width / widest[0.05][0] for width in widest[0.05]] == pytest.approx(
        [1, 2, math.sqrt(13), 4], rel=0.15
    )
    assert len(set(widest[0.0])) == 1
    codec.rejected()
    assert codec._apart == 101
    codec.accepted()
    assert codec._apart == 0


def gossip(weights, codecs, rounds, learnt, failing=0.0):
    """Let peers meet in random pairs; before round r each learns ``learnt(r)``, rms.

    The rms distance to the mean, by rounds.
    """
    dice, generator = random.Random(1), torch.Generator().manual_seed(1)
    slow, apart = [w.clone() for w in weights], []
    for round in range(rounds):
        for w in weights if learnt(round) else []:
            w += learnt(round) * torch.randn(w.shape, generator=generator)
        order, messages = dice.sample(range(len(weights)), len(weights)), {}
        for one, other in zip(order[::2], order[1::2], strict=False):
            for peer in (one, other):
                codecs[peer].expect(f"run:{round}:0", [weights[peer] - slow[peer]])
                messages[peer] = codecs[peer].post([weights[peer]])
            if dice.random() < failing:
                continue
            read = {
                peer: messages[peer].read(messages[one + other - peer].payload)
                for peer in (one, other)
            }
            bits = {peer: read[peer].bits for peer in read}
            for peer in read:
                codecs[peer].learn(messages[peer], read[peer])
                weights[peer] += messages[peer].move(read[peer], bits[one + other - peer])[0] / 2
                codecs[peer].accepted()
                messages.pop(peer)
        for peer in {*order[len(order) // 2 * 2 :]} | messages.keys():
            codecs[peer].rejected()
        slow = [w.clone() for w in weights]
        held = torch.stack(weights)
        apart.append(float((held - held.mean(0)).square().mean().sqrt()))
    return apart


def met_by_calls(count, turns):
    """At each of 16 steps a turn the pairs that meet: each calls a random other at its own turns,
    and later when it was called itself.
    """
    dice = random.Random(3)
    due = [dice.random() * 21 for _ in range(count)]
    for step in range(16 * turns):
        pairs = []
        for caller in dice.sample(range(count), count):
            if step >= due[caller]:
                called = dice.choice([peer for peer in range(count) if peer != caller])
                pairs.append((caller, called))
                due[caller] += 21
                due[called] += 10.5
        yield pairs


def met_by_rounds(count, turns):
    """The same in rounds: every 16 steps all, in random pairs."""
    dice = random.Random(3)
    for step in range(1, 16 * turns + 1):
        order = dice.sample(range(count), count) if step % 16 == 0 else []
        yield list(zip(order[::2], order[1::2], strict=True))


@pytest.mark.parametrize("met", [met_by_rounds, met_by_calls])
def test_ranges_stand_uneven_meetings(met):
    """Where all learn the same, and much more than what tells them apart, ranges that followed the
    last way alone left the peers 7 times as far apart (squared); exact means leave 1.5.
    """
    generator = torch.Generator().manual_seed(0)
    weights, codecs = torch.zeros(8, 2048), [Mod4Codec() for _ in range(8)]
    common, slow, spread = torch.randn(2048, generator=generator) / 4, weights.clone(), []
    for step, pairs in enumerate(met(8, 40)):
        weights += common + torch.randn(8, 2048, generator=generator) / 4
        for pair in pairs:
            messages = []
            for peer in pair:
                codecs[peer].expect(f"run:{step}:{peer}", [weights[peer] - slow[peer]])
                messages.append(codecs[peer].post([weights[peer].clone()]))
            here, there, *moves = both_ways(*messages)
            for peer, message, read, (move,) in zip(
                pair, messages, (here, there), moves, strict=True
            ):
                codecs[peer].learn(message, read)
                codecs[peer].accepted()
                weights[peer] += move / 2
                slow[peer] = weights[peer]
        if step >= 16 * 15:
            spread.append(float(weights.var(0).mean()))
    assert sum(spread) / len(spread) < 1.7


@pytest.mark.thinned(4)
@pytest.mark.parametrize("size", [640, 30, 2])
@pytest.mark.parametrize(("count", "failing"), [(4, 0.0), (3, 0.5), (6, 0.8)])
def test_no_range_grows_by_itself_however_many_exchanges_fail(size, count, failing):
    """Where each failed round made them wider, and with them what is rounded, the peers went apart
    without end.
    """
    weights = [
        0.1 * torch.randn(size, generator=torch.Generator().manual_seed(peer))
        for peer in range(count)
    ]
    apart = gossip(
        weights, [Mod4Codec() for _ in weights], 90, lambda round: 0.1 * (round < 10), failing
    )
    assert max(apart) < 1.5 * max(apart[:20])
    assert apart[-1] < 0.8 * max(apart)


def test_the_narrower_range_grows():
    """The wider one is no reason for what the other sends to be unreadable."""
    weights = [torch.zeros(8, BLOCK), torch.ones(8, BLOCK)]
    codecs, moved = [Mod4Codec(), Mod4Codec()], [1e-3, 0.1]
    used = []
    for number in range(12):
        messages = []
        for codec, held, distance in zip(codecs, weights, moved, strict=True):
            codec.expect(
                f"run:{number}:0", [torch.full((8, BLOCK), distance if number == 0 else 0.0)]
            )
            messages.append(codec.post([held]))
        used.append([float(widths(message).mean()) for message in messages])
        for codec, mine, theirs in zip(codecs, messages, reversed(messages), strict=True):
            codec.learn(mine, mine.read(theirs.payload))
    narrow, wide = zip(*used, strict=True)
    assert narrow[0] < 0.01 < 0.1 < wide[0] < 0.4
    assert wide[5] == wide[0]
    assert narrow[5] > 5 * narrow[0]


@pytest.mark.ci
@pytest.mark.parametrize("rows", [1, 10])
def test_one_learner_reaches_the_others(rows):
    """As in the rows of rare tokens.

    Its range grew by 1.65 with each exchange, for the others could not be read by it with theirs
    of next to nothing, and what it rounded ended the run at step 500.
    """
    codecs, weights = [Mod4Codec() for _ in range(4)], [torch.zeros(40, BLOCK) for _ in range(4)]
    generator = torch.Generator().manual_seed(2)

    def learnt(round):
        for w in weights:
            w[rows:] += 0.02 * torch.randn(40 - rows, BLOCK, generator=generator)
        weights[0][:rows] += 0.02 * torch.randn(rows, BLOCK, generator=generator)
        return 0

    gossip(weights, codecs, 160, learnt)
    held = torch.stack(weights)
    assert (
        held.abs().max() < 2
    )  # of a random walk of 160 steps, the mean of four of which is half as wide
    heard = held[1:, :rows].square().mean().sqrt() / held[0, :rows].square().mean().sqrt()
    assert heard > 0.5
    assert max(float((2.0 ** (codec._measured.double() / 4)).max()) for codec in codecs) < 1


@pytest.mark.parametrize("others", [3, 7])
def test_an_outlier_leaves_the_others_alone(others):
    """A newcomer with random weights that could fetch none.

    What three others learnt from it made them half as far apart again.
    """
    base, apart, widths = torch.randn(6400, generator=torch.Generator().manual_seed(1)), [], []
    for stranger in (0, 1):
        weights, codecs = (
            [base.clone() for _ in range(others)],
            [Mod4Codec() for _ in range(others + stranger)],
        )
        weights += [torch.randn(6400, generator=torch.Generator().manual_seed(99))] * stranger
        gossip(weights, codecs, 40, lambda round: 0.02)
        held = torch.stack(weights[:others])
        apart.append(float((held - held.mean(0)).square().mean().sqrt()))
        widths.append(
            max(
                float((2.0 ** (codec._measured.double() / 4)).median()) for codec in codecs[:others]
            )
        )
    assert apart[1] < 1.15 * apart[0]
    assert widths[1] < 4 * widths[0]


@pytest.mark.parametrize("others", [2, 4, 8])
def test_newcomer_is_read_at_once(others):
    """It knows nothing of distances: what it has learnt in its first round is what it has to go
    by.
    """
    base = torch.randn(6400, generator=torch.Generator().manual_seed(1))
    weights, codecs = [base.clone() for _ in range(others)], [Mod4Codec() for _ in range(others)]
    gossip(weights, codecs, 30, lambda round: 0.02)
    moved = 0.02 * torch.randn(6400, generator=torch.Generator().manual_seed(2))
    newcomer = Mod4Codec()
    newcomer.expect("run:30:0", [moved])
    mine = newcomer.post([weights[0] + moved])
    for codec, held in zip(codecs[1:], weights[1:], strict=True):
        codec.expect("run:30:0", [moved])
        theirs = codec.post([held])
        assert mine.read(theirs.payload).refused_part < 0.05
        assert theirs.read(mine.payload).refused_part < 0.05


def test_peers_that_stand_still_lose_nothing_but_the_last_bits():
    codec = Mod4Codec()
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    codec.expect("run:0:0", [torch.zeros(4, 64)])
    message = codec.post([values])
    assert (
        message.read(message.payload).values - values
    ).abs().max() <= values.abs().max() * 2.0**-20
    zeros = codec.post([torch.zeros(4, 64)])
    assert zeros.read(zeros.payload).values.abs().max() < 1e-8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_sent_as_float32(dtype):
    codec, values = (
        Mod4Codec(),
        torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(dtype),
    )
    assert torch.equal(codec.post([values]).tensors()[0], values.float())


def test_buffers_travel_as_float32_behind_the_weights():
    tail = [torch.tensor([1e30, -7.0, 0.1]), torch.tensor(3.0)]
    head, count = for_pairs(BufferTailCodec(codec_named("mod4"), 2))
    assert count == 2
    message = head.post([torch.randn(7), *tail], 2)
    assert message.payload.numel() == BufferTailCodec(head, 2).nbytes([(7,), (3,), ()])
    read = message.read(message.payload)
    assert all(torch.equal(a, b) for a, b in zip(message.seen(read)[1:], tail, strict=True))
    assert [float(t.abs().sum()) for t in message.move(read, b"")] == [0, 0, 0]
    sent = tail[0].clone()
    tail[0] += 1.0  # a buffer goes on while its mean is on its way
    assert torch.equal(message.tensors()[1], sent)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_cannot_be_sent_is_refused_and_changes_nothing(bad):
    (codec, _), _ = pair((64, 2), 0.05, rounds=2)
    codec.rejected()
    before = codec.state_dict()
    with pytest.raises(
        ValueError, match="a tensor to be sent holds NaN, infinity or values too large"
    ):
        codec.post([torch.tensor([[1.0, bad]] * 64)])
    assert codec.state_dict() == before


def test_bytes_that_nobody_sends_are_refused():
    _, (mine, theirs) = pair((64, 64), 0.05)
    for payload in (
        theirs.payload[:-1],
        torch.cat([theirs.payload, torch.zeros(1, dtype=torch.uint8)]),
    ):
        with pytest.raises(ValueError):
            mine.read(payload)
    hostile = theirs.payload.clone()
    hostile[8 + 5] = 0x80
    with pytest.raises(ValueError):
        mine.read(hostile)
    for bits in (b"\xff", bytes(9), bytes(7)):
        with pytest.raises(ValueError):
            mine.refused(bits)
    with pytest.raises(ValueError, match="mod4 is for two peers"):
        codec_named("mod4").decode(theirs.payload, [(64, 64)])


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-127, 127) | st.none(), keep=st.booleans())
def test_hostile_payload_moves_nobody_far(seed, exponent, keep):
    """Whatever a partner sends it moves nobody further than twice the expected distance."""
    _, (mine, theirs) = pair([(30, 64), (3,)], 0.05, rounds=2)
    generator = torch.Generator().manual_seed(seed)
    hostile = torch.randint(0, 256, theirs.payload.shape, generator=generator, dtype=torch.uint8)
    if keep:
        hostile[:8] = theirs.payload[:8]
    exponents = hostile[8 : 8 + 31]
    exponents.masked_fill_(exponents == 0x80, 1)
    if exponent is not None:
        exponents.fill_(exponent % 256)
    read = mine.read(hostile)
    expected = 2.0 ** (mine.exponents / 4)
    assert (read.distance[read.kept] <= 2 * expected[read.kept]).all()
    moved = torch.cat(
        [torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % 64)) for t in mine.move(read, b"")]
    ).view(-1, 64)
    rms = moved.square().sum(1).div(torch.tensor([64.0] * 30 + [3.0])).sqrt()
    assert moved.isfinite().all()
    assert (
        rms <= 2.6 * expected
    ).all()  # and half a step of the own rounding, 9/32 sigma; half of it moves a peer


def test_digests_that_were_not_sent_refuse_the_block():
    _, (mine, theirs) = pair((64, 64), 0.05)
    wrong = theirs.payload.clone()
    wrong[8 + 64 + 9] ^= 1
    read = mine.read(wrong)
    assert (~read.kept).nonzero().flatten().tolist() == [9]
    assert read.bits == bytes([0, 2, 0, 0, 0, 0, 0, 0])
    assert mine.refused(read.bits).nonzero().flatten().tolist() == [9]


def test_a_restored_state_goes_on_with_the_same_bits():
    (codec, _), (mine, theirs) = pair([(64, 64), (7,)], 0.05, rounds=3)
    assert codec.pending
    saved = json.loads(json.dumps(codec.state_dict()))
    again = Mod4Codec()
    again.load_state_dict(saved)
    assert torch.equal(again.post(mine.tensors()).payload, mine.payload)  # what is in flight
    fresh = Mod4Codec()
    fresh.expect("run:2:0", [torch.zeros(64, 64), torch.zeros(7)])
    assert not torch.equal(fresh.post(mine.tensors()).payload, mine.payload)
    payloads = []
    for one in (codec, again):
        one.learn(mine, mine.read(theirs.payload))
        one.rejected(mine.tensors())
        one.expect("run:3:0", [torch.full((64, 64), 0.01), torch.ones(7)])
        payloads.append(one.post(mine.tensors()).payload)
    assert torch.equal(*payloads)


def test_another_state_is_refused_and_changes_nothing():
    (codec, _), _ = pair((64, 2), 0.05, rounds=2)
    before = codec.state_dict()
    for change in (
        {"codec": "auto:2"},
        {"rho": math.inf},
        {"rho": -1.0},
        {"usual": math.nan},
        {"usual": -1.0},
        {"apart": -1},
        {"seed": "00"},
    ):
        with pytest.raises(ValueError, match="saved state"):
            codec.load_state_dict(before | change)
        assert codec.state_dict() == before


def test_has_an_outcome_and_no_feedback():
    """It is a codec with an outcome and has no error feedback."""
    codec: Codec = codec_named("mod4")
    assert isinstance(codec, Resendable)
    assert codec is not codec_named("mod4")
    assert codec.nbytes([(4096, 64)]) * 8 / (4096 * 64) == pytest.approx(4.25, abs=0.001)
    for name in ("mod4+ef", "mod4:3"):
        with pytest.raises(ValueError, match="unknown codec"):
            codec_named(name)

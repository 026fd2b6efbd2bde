"""Payloads: made from the tensors while they are read, and the same bytes as an encoded one; and
contributions of weight 0.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal.optim.codecs.floats import BFLOAT16, FLOAT16, FLOAT32
from shoal.optim.codecs.registry import codec_named
from shoal.optim.exchange.base import Contribution, RoundKey
from shoal.optim.exchange.on_demand import OnDemand, differences
from shoal.swarm.exchange.contribution import (
    BorrowedPayload,
    ContributionError,
    EncodedPayload,
    Payload,
    encode_contribution,
    float32_digest,
)
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.wire.envelope import CHUNK, chunks, digest
from tests.support.fake_network import SWARM, paired

SHAPES = [(3,), (CHUNK // 4 - 3,), (5, 7), (0,), (CHUNK // 2 + 11,), ()]


def made(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("codec", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda codec: codec.name)
def test_borrowed_payload_equals_an_encoded_one(codec):
    """A borrowed payload has the bytes and the digest of an encoded one."""
    slow, fast = made(0), made(1)
    encoded = codec.encode([s - f for s, f in zip(slow, fast, strict=True)])
    payload = BorrowedPayload(differences(slow, fast), codec)
    blocks = list(payload.blocks())
    assert [len(block) for block in blocks[:-1]] == [CHUNK] * (len(blocks) - 1)
    assert b"".join(blocks) == encoded.numpy().tobytes() == payload.whole().numpy().tobytes()
    assert payload.nbytes == encoded.numel()
    assert digest(payload.blocks()) == digest(chunks(encoded.numpy().data))
    assert b"".join(payload.blocks()) == b"".join(
        Payload(encoded.numel(), lambda: encoded, list).blocks()
    )


def test_the_bytes_of_a_tensor_are_not_copied():
    tensor = torch.arange(float(CHUNK))
    (first, *_) = BorrowedPayload(OnDemand([tensor]), FLOAT32).blocks()
    tensor[0] = 9.0
    assert torch.frombuffer(first, dtype=torch.float32)[0] == 9.0


def test_an_empty_payload_has_no_block():
    payload = BorrowedPayload(OnDemand([]), FLOAT32)
    assert (payload.nbytes, list(payload.blocks())) == (0, [])


def test_a_value_too_large_for_the_codec_is_refused():
    with pytest.raises(ValueError, match="too large for float16"):
        BorrowedPayload(OnDemand([torch.tensor([1.0, 1e6])]), FLOAT16)


@pytest.mark.parametrize("name", ["float16", "mod4", "int8", "sign+ef"])
def test_diverged_weights_end_in_a_sentence(name):
    """What a codec cannot send is an error for the user, and no bug of Shoal's."""
    codec = codec_named(name)
    value = 1e6 if name == "float16" else math.nan
    diverged = Contribution(RoundKey(SWARM, 0), [torch.tensor([1.0, value])], codec=codec)
    with pytest.raises(ContributionError, match=r"^Cannot send what was trained: .* lower the"):
        encode_contribution(SWARM, diverged)


@pytest.mark.parametrize(("name", "kind"), [("float32", BorrowedPayload), ("int8", EncodedPayload)])
def test_only_plain_floats_are_borrowed(name, kind):
    borrowed, encoded = (
        encode_contribution(
            "swarm", Contribution(RoundKey("swarm", 0), tensors, 1.0, codec_named(name))
        ).payload
        for tensors in (OnDemand(made(0)), made(0))
    )
    assert type(borrowed) is kind
    assert borrowed.sha256 == encoded.sha256


class Counted:
    """A codec that notes in which threads it encodes."""

    def __init__(self, codec):
        self.codec, self.name, self.threads = codec, codec.name, []
        self.nbytes, self.decode = codec.nbytes, codec.decode

    def encode(self, tensors):
        self.threads.append(threading.current_thread())
        return self.codec.encode(tensors)


def test_a_codec_encodes_once_in_a_worker_thread():
    """It has a memory: encoded twice, what was learnt would count twice."""
    codec = Counted(codec_named("sign+ef"))
    mine = encode_contribution(
        SWARM, Contribution(RoundKey(SWARM, 0), OnDemand(made(0)), codec=codec)
    )
    assert (codec.threads, mine.payload.nbytes) == ([], codec.nbytes(mine.shapes))
    with ThreadPoolExecutor(4) as pool:
        digests = {one.payload.sha256 for one in pool.map(lambda _: mine.prepared(), range(8))}
    assert (len(digests), len(codec.threads)) == (1, 1)
    assert threading.current_thread() not in codec.threads
    assert torch.equal(mine.payload.whole(), codec_named("sign+ef").encode(made(0)))


def test_what_a_codec_refuses_it_refuses_whoever_asks():
    tensors = OnDemand([torch.tensor([1.0, math.nan])])
    mine = encode_contribution(
        SWARM, Contribution(RoundKey(SWARM, 0), tensors, codec=codec_named("sign+ef"))
    )
    for ask in (mine.prepared, mine.payload.tensors, mine.prepared):
        with pytest.raises(ContributionError, match=r"^Cannot send what was trained: .* lower the"):
            ask()


def test_the_digest_of_weights_is_that_of_their_float32_values():
    tensors = [tensor.double() for tensor in made(0)]
    assert float32_digest(tensors) == digest(chunks(FLOAT32.encode(made(0)).numpy().data))


CASES = {
    "one of two": ([0.0, 2.0], [5.0, 3.0], 3.0),
    "one of three": ([0.0, 1.0, 3.0], [100.0, 2.0, 6.0], 5.0),
    "one of four, all-reduced": ([1.0, 0.0, 1.0, 2.0], [4.0, 100.0, 8.0, 2.0], 4.0),
    "all of two": ([0.0, 0.0], [5.0, 3.0], 4.0),
    "all of four, all-reduced": ([0.0] * 4, [1.0, 2.0, 3.0, 6.0], 3.0),
}


@pytest.mark.parametrize("case", CASES)
def test_group_mean_is_of_those_who_count(school, case):
    """In a group everybody gets the mean of those who count."""
    weights, values, mean = CASES[case]
    peers = school.peers(len(weights))
    handles = [
        peer.start(value=value, weight=weight)
        for peer, value, weight in zip(peers, values, weights, strict=True)
    ]
    assert school.values(handles) == [pytest.approx(mean, abs=1e-6)] * len(peers)
    got = [handle.result() for handle in handles]
    counted = sum(weight > 0 for weight in weights) or len(weights)
    assert {(len(one.members), one.counted, one.weight) for one in got} == {
        (len(peers), counted, sum(weights) or len(weights))
    }


@pytest.mark.parametrize("case", ["one of two", "all of two"])
def test_pair_mean_is_of_those_who_count(school, network, case):
    """With a partner both get the mean of those who count."""
    weights, values, mean = CASES[case]
    exchanges = paired(network, len(weights), ExchangeTimeouts(20.0))
    tensors = [[torch.full((4,), value)] for value in values]
    key = RoundKey(SWARM, 0)
    handles = [
        exchange.start(Contribution(key, one, weight))
        for exchange, one, weight in zip(exchanges, tensors, weights, strict=True)
    ]
    assert school.values(handles) == [mean, mean]

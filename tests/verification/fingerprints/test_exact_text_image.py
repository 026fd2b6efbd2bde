"""Exact tokens, hashes of text and of images."""

import io
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.fingerprints import Completion, ExactTokens, ImageHash, MinHashText, SimHash
from shoal.verification.fingerprints.text import hamming, shingles

ANSWER = Completion("m", (1, 2), (3, 4))
WORDS = [f"word{number}" for number in range(300)]
TEXT = " ".join(WORDS)


@pytest.mark.parametrize(
    "other",
    [
        Completion("n", (1, 2), (3, 4)),
        Completion("m", (1,), (2, 3, 4)),
        Completion("m", (1, 2), (3,)),
        Completion("m", (1, 2), (3, 5)),
        Completion("m", (), ()),
    ],
)
def test_tokens_equal_or_not(other):
    exact = ExactTokens()
    assert exact.compare(exact.make(ANSWER), ANSWER).means() == (0.0,)
    assert "another one" in exact.compare(exact.make(other), ANSWER).fault
    assert "31 bytes" in exact.compare(exact.make(other)[:31], ANSWER).fault


@pytest.mark.parametrize("bad", [Completion("m", (-1,), ()), Completion("m", (), (1 << 32,)), Completion("m" * 257, (), ())])
def test_tokens_out_of_range(bad):
    with pytest.raises(ValueError, match=r"whole numbers|at most"):
        ExactTokens().make(bad)


def test_shingles():
    assert shingles(" a b\tc\nd ") == [b"a\0b\0c", b"b\0c\0d"]
    assert shingles([1, 22]) == [b"1\x0022"]
    for bad in ("", "  ", []):
        with pytest.raises(ValueError, match="1 to 131072 words"):
            shingles(bad)


def test_hamming():
    assert hamming(b"\x00\xff", b"\x01\x0f") == 5


@pytest.mark.parametrize(
    "kind", [SimHash(64), SimHash(128), SimHash(256), MinHashText(128), MinHashText(512)], ids=lambda k: k.name
)
class TestText:
    def test_near_and_far(self, kind):
        proof = kind.make(TEXT)
        edited = " ".join([*WORDS[:150], "other", *WORDS[151:]])
        assert kind.compare(proof, TEXT).means() == (0.0,)
        assert kind.compare(proof, edited).means()[0] < 0.15
        assert kind.compare(proof, " ".join(reversed(WORDS))).means()[0] > 0.3

    @settings(deadline=None, max_examples=20)
    @given(proof=st.binary(max_size=600))
    def test_any_bytes(self, kind, proof):
        evidence = kind.compare(proof, "a b c d")
        assert bool(evidence.fault) == (len(proof) != len(kind.make("a")))


def test_simhash_of_one_shingle_is_its_hash():
    """One shingle has every majority to itself, so twice the same text is the same, and a text of one word is not empty."""
    assert SimHash().make("a b c") == SimHash().make("a b c a b c"[:5])
    assert SimHash().make("a") != bytes(16)


def test_the_bytes_of_the_hashes_for_ever():
    assert SimHash(64).make([1, 2, 3, 4]).hex() == "1b24249000000c20"
    assert MinHashText(16).make([1, 2, 3, 4]).hex()[:32] == "0614f1cca61ec937d438f81b12bee375"


def test_minhash_estimates_the_jaccard_similarity():
    kind = MinHashText(1024)
    left, right = WORDS[:200], WORDS[100:300]
    sets = [set(shingles(" ".join(words))) for words in (left, right)]
    true = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    found = 1 - kind.compare(kind.make(" ".join(left)), " ".join(right)).means()[0]
    assert abs(found - true) < 4 * (true * (1 - true) / 1024) ** 0.5


@pytest.mark.parametrize("bad", [lambda: SimHash(100), lambda: MinHashText(8)])
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match="has"):
        bad()


def picture(seed, side=96):
    """Smooth blobs, (side, side, 3) uint8."""
    small = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    large = torch.nn.functional.interpolate(small, size=(side, side), mode="bicubic").clamp(0, 1)
    return (large[0].permute(1, 2, 0) * 255).to(torch.uint8)


class TestImage:
    kind = ImageHash()

    def far(self, left, right):
        return max(self.kind.compare(self.kind.make(left), right).means())

    def test_noise_jpeg_and_resizing_are_near_and_others_far(self):
        from PIL import Image

        for seed in range(5):
            image = picture(seed)
            noise = 4 * torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
            noisy = (image.float() + noise).clamp(0, 255).to(torch.uint8)
            file = io.BytesIO()
            Image.fromarray(image.numpy()).save(file, "JPEG", quality=60)
            pressed = Image.open(file)
            resized = Image.fromarray(image.numpy()).resize((50, 50))
            assert len(self.kind.make(image)) == 32
            assert self.far(image, image) == 0
            assert max(self.far(image, other) for other in (noisy, pressed, resized)) < 0.15
            assert self.far(image, picture(seed + 100)) > 0.3

    @settings(deadline=None, max_examples=20)
    @given(proof=st.binary(max_size=40))
    def test_any_bytes(self, proof):
        assert bool(self.kind.compare(proof, picture(0)).fault) == (len(proof) != 32)

    @pytest.mark.parametrize(
        "bad", [torch.zeros(4, 4, 3), torch.zeros(3, 4, 4, dtype=torch.uint8), torch.zeros(0, 4, 3, dtype=torch.uint8), "path.png"]
    )
    def test_not_an_image(self, bad):
        with pytest.raises(ValueError, match="an image must"):
            self.kind.make(bad)


@pytest.mark.parametrize(
    ("package", "make"), [("datasketch", lambda: MinHashText().make("a")), ("imagehash", lambda: ImageHash().make(picture(0)))]
)
def test_a_missing_package_is_said_in_a_sentence(monkeypatch, package, make):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{package}.*pip install 'shoal\[verify\]'"):
        make()

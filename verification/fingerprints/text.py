"""Fingerprints of near-duplicate texts: SimHash (Charikar 2002) and MinHash (Broder 1997) of shingles of three words or tokens.

They distinguish copied from independent answers, but not which model wrote a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from shoal.verification.fingerprints.fingerprint import Evidence, Feature

SHINGLE = 3
MOST_ITEMS, MOST_TEXT = 1 << 17, 1 << 22


def shingles(text: str | Sequence[int]) -> list[bytes]:
    """Return every three consecutive words of ``text``, or tokens of token ids; the whole if it is shorter. With repetitions.

    Words are what white space separates. Raises ``ValueError`` if there are none, or more than 131,072.
    """
    if isinstance(text, str):
        if len(text) > MOST_TEXT:
            raise ValueError(f"a text may have at most {MOST_TEXT} characters, not {len(text)}")
        items = [word.encode("utf-8", "surrogatepass") for word in text.split()]
    else:
        items = [b"%d" % token for token in text]
    if not 1 <= len(items) <= MOST_ITEMS:
        raise ValueError(f"a text must have 1 to {MOST_ITEMS} words, not {len(items)}")
    return [b"\0".join(items[at : at + SHINGLE]) for at in range(max(1, len(items) - SHINGLE + 1))]


class SimHash:
    """Fingerprint of a text: one bit for each of ``bits`` projections. 16 bytes at 128 bits.

    Its feature is the share of bits that differ: 0 for the same shingles, about 0.5 for texts that share none.
    """

    name = "simhash"
    features = (Feature("share of bits of SimHash that differ", 0.0),)

    def __init__(self, bits: int = 128) -> None:
        if bits not in (64, 128, 256):
            raise ValueError(f"SimHash has 64, 128 or 256 bits, not {bits}")
        self.bits = bits

    def make(self, output: str | Sequence[int]) -> bytes:
        """Return ``bits / 8`` bytes. Raises ``ValueError`` as ``shingles`` does."""
        size = self.bits // 8
        hashes = b"".join(hashlib.blake2b(each, digest_size=size, person=b"shoal simhash 1").digest() for each in shingles(output))
        rows = torch.frombuffer(bytearray(hashes), dtype=torch.uint8).view(-1, size)
        ones = [(rows >> 7 - bit & 1).sum(dim=0) for bit in range(8)]
        # A bit is set if more than half of the shingles set it.
        packed = sum((many * 2 > len(rows)).int() << 7 - bit for bit, many in enumerate(ones))
        assert isinstance(packed, torch.Tensor)
        return bytes(packed.tolist())

    def compare(self, proof: bytes, output: str | Sequence[int]) -> Evidence:
        """Measure the Hamming distance to the own ``output``'s fingerprint, as a share of all bits."""
        own = self.make(output)
        if len(proof) != len(own):
            return Evidence(self.features, fault=f"the proof has {len(proof)} bytes, but a SimHash has {len(own)}")
        return Evidence.single(self.features, hamming(proof, own) / self.bits)


def hamming(left: bytes, right: bytes) -> int:
    """Count the bits in which two byte strings of equal length differ."""
    return (int.from_bytes(left, "big") ^ int.from_bytes(right, "big")).bit_count()


class MinHashText:
    """Fingerprint of a text: the smallest of its shingles' hashes under ``permutations`` permutations, 4 bytes each.

    Its feature is one less the estimated Jaccard similarity of the two sets of shingles; the estimate's standard error is at most
    1 / (2 sqrt(permutations)). Needs the extra ``verify``.
    """

    name = "minhash"
    features = (Feature("one less the similarity by MinHash", 0.0),)

    def __init__(self, permutations: int = 128) -> None:
        if not 16 <= permutations <= 4096:
            raise ValueError(f"MinHash has 16 to 4096 permutations, not {permutations}")
        self.permutations = permutations

    def make(self, output: str | Sequence[int]) -> bytes:
        """Return ``4 * permutations`` bytes. Raises ``ValueError`` as ``shingles`` does, and if datasketch is not installed."""
        # The scheme and its hash are part of the format: another release may have other defaults.
        sketch = _datasketch().MinHash(num_perm=self.permutations, seed=1, scheme="affine32", hashfunc=_hash32)
        sketch.update_batch(set(shingles(output)))
        return bytes(sketch.hashvalues.astype(">u4").tobytes())

    def compare(self, proof: bytes, output: str | Sequence[int]) -> Evidence:
        """Measure the share of permutations under which the smallest hashes differ."""
        own = self.make(output)
        if len(proof) != len(own):
            return Evidence(self.features, fault=f"the proof has {len(proof)} bytes, but a MinHash has {len(own)}")
        same = sum(proof[at : at + 4] == own[at : at + 4] for at in range(0, len(own), 4))
        return Evidence.single(self.features, 1 - same / self.permutations)


def _hash32(shingle: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(shingle, digest_size=4, person=b"shoal minhash 1").digest(), "big")


def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError:
        raise ValueError("MinHash needs the package datasketch, which is not installed: pip install 'shoal[verify]'") from None
    return datasketch

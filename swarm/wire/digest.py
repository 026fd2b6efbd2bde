"""The digest of a payload that is hashed while it is transferred."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from blake3 import blake3

CHUNK = 1 << 20


class HashList:
    """SHA-256 over the BLAKE3 digests of the payload's 1 MiB chunks.

    Plain SHA-256 of every byte, at both ends, costs more time than encrypting and moving the bytes does on a small machine
    (`make bench`); BLAKE3 is several times faster, and a list of its digests binds the payload just as well.
    """

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._hashed = 0
        self._list = hashlib.sha256()

    def advance(self, available: int) -> None:
        """Hash the complete chunks: the first ``available`` bytes of the payload are final."""
        end = len(self._payload)
        while self._hashed < end and available >= min(self._hashed + CHUNK, end):
            chunk = self._payload[self._hashed : min(self._hashed + CHUNK, end)]
            self._list.update(blake3(chunk).digest())
            self._hashed += len(chunk)

    def digest(self) -> bytes:
        """Return the 32 bytes. Raises ValueError while the payload is incomplete."""
        if self._hashed != len(self._payload):
            raise ValueError(f"only {self._hashed} of {len(self._payload)} bytes were hashed")
        return self._list.digest()


def digest(blocks: Iterable[memoryview]) -> bytes:
    """Return the digest of a complete payload, of which ``blocks`` are the chunks of 1 MiB, in order."""
    hashes = hashlib.sha256()
    for block in blocks:
        hashes.update(blake3(block).digest())
    return hashes.digest()


def chunks(payload: memoryview) -> Iterator[memoryview]:
    return (payload[start : start + CHUNK] for start in range(0, len(payload), CHUNK))

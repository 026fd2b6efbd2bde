"""Whether a peer's record is where the others of its bucket look for it: for ``shoal doctor``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from shoal.swarm.errors import NetworkError
from shoal.swarm.membership.buckets import DEEPEST
from shoal.swarm.membership.dht_record import bits_in, bits_of, bucket_prefix, key_of, open_record

Get = Callable[[str], Awaitable[Mapping[str, bytes]]]


async def is_in_its_bucket(get: Get, swarm: str, peer: str, epoch: int) -> bool:
    """Return whether ``peer`` has a record under any key at which its bucket of ``epoch`` can be, or in the trie of all.

    ``get`` returns the records under a key, by peer id. A key that cannot be read counts as one without the record.

    Raises:
        NetworkError: no key at all can be read.
    """
    own, trie = bits_in(swarm, epoch, peer), bits_of(peer)
    prefixes = [bucket_prefix(epoch, own[:depth]) for depth in range(1, DEEPEST + 1)]
    prefixes += [trie[:depth] for depth in range(DEEPEST + 1)]
    answers = await asyncio.gather(*(get(key_of(swarm, prefix)) for prefix in prefixes), return_exceptions=True)
    read = 0
    for prefix, answer in zip(prefixes, answers, strict=True):
        if isinstance(answer, NetworkError):
            continue
        if isinstance(answer, BaseException):
            raise answer
        read += 1
        record = open_record(answer[peer]) if peer in answer else None
        if record is not None and record.prefix == prefix and record.member.peer == peer and record.member.swarm == swarm:
            return True
    if not read:
        raise NetworkError("no key of the peer's bucket could be read.")
    return False

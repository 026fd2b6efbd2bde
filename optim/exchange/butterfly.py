"""The compressed butterfly: each member averages a share of the values for all.

    shares = deal(shapes, members)               # {member: Share}, the same for all members
    average = average_share(codec, shares[me], contributions)      # at its owner
    assemble(shapes, [(shares[peer], codec.decode_averages(payloads[peer], shares[peer]))
                      for peer in members])

Each member sends every other the part of its payload that the other averages, and gets the encoded
average back: two shares in place of a whole payload. Why it loses nothing, and what becomes of a
share when its owner leaves: docs/internals.md, "The compressed butterfly".
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.codecs.slices import Share, slices
from shoal.optim.codecs.two_way import Average, TwoWayCodec, two_way
from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.weighted_mean import weighted_mean

FEWEST = 3
"""Members: two send each other no less than when they gather, and lose nothing then."""


def applies(codec: Codec, members: int, *, gathers: bool) -> bool:
    """Return whether a group of so many ``members`` averages this way; ``gathers``: one of them
    screens whole contributions.
    """
    return two_way(codec) is not None and members >= FEWEST and not gathers


def deal(shapes: Sequence[Shape], members: Iterable[str]) -> dict[str, Share]:
    """Return the share of each member, by the highest hash of slice and member, so that only the
    slices of a member that leaves, or comes, get another owner.
    """
    cuts = slices(shapes)
    owners = _owners(len(cuts), tuple(sorted(members)))
    return {
        member: Share.of(cut for cut, owner in zip(cuts, owners, strict=True) if owner == member)
        for member in sorted(members)
    }


@functools.lru_cache(maxsize=64)
def _owners(count: int, members: tuple[str, ...]) -> list[str]:
    """Return the owner of each of ``count`` slices."""
    owners = []
    for number in range(count):
        ranks = {member: _rank(number, member) for member in members}
        owners.append(max(members, key=ranks.__getitem__))
    return owners


def _rank(number: int, member: str) -> bytes:
    return hashlib.blake2b(f"shoal/butterfly/1:{number}:{member}".encode(), digest_size=16).digest()


def average_share(
    codec: TwoWayCodec,
    share: Share,
    contributions: Sequence[tuple[str, float, Sequence[Tensor]]],
    unweighted_count: int = 0,
) -> Average:
    """Return what the owner of ``share`` sends back to all.

    ``contributions``: peer id, stated weight, and the decoded values of the share, which may be
    overwritten; ``unweighted_count``: of the whole contribution.

    ValueError if the average is not finite.
    """
    plain = share.tensors_below(unweighted_count)
    return codec.average(share, weighted_mean(contributions, plain).tensors)


def assemble(
    shapes: Sequence[Shape], averages: Iterable[tuple[Share, Sequence[Tensor]]]
) -> list[Tensor]:
    """Return the mean of all, of the decoded averages of all shares."""
    mean = [torch.zeros(shape, device="cpu") for shape in shapes]
    for share, values in averages:
        share.put(mean, values)
    return mean


def mean_of_averages(stated: Sequence[tuple[str, float]], tensors: list[Tensor]) -> Mean:
    """Return the ``Mean`` of members with these stated weights, whose values are ``tensors``."""
    return replace(weighted_mean([(peer, weight, []) for peer, weight in stated]), tensors=tensors)

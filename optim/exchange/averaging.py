"""The mean that a committed exchange ends with, whatever its codec and the node's screen.

    mean_of(screen, codec, me, 0, contributions)
    pair_mean(screen, 0, (me, 1.0, message), (peer, 1.0, reading), refused)    # a codec for pairs
    middle_mean(codec, own_tensors, 1.0, [with_one, with_other])    # of a chain of three

Before the commit the screen (`shoal.optim.exchange.update_screen`) has refused what must not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.pair_message import PairMessage, Reading
from shoal.optim.codecs.registry import sent_by_senders
from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.on_demand import held_at_once
from shoal.optim.exchange.update_screen import Contributions, UpdateScreen
from shoal.optim.exchange.weighted_mean import counted_weights, weighted_mean


def mean_of(
    screen: UpdateScreen,
    codec: Codec,
    me: str,
    fragment: int,
    contributions: Contributions,
    unweighted_count: int = 0,
) -> Mean:
    """Return the mean of a committed exchange, of the same bits for all members without a screen;
    may be computed in place.

    A codec that averages by sender takes the place of the screen's mean, and needs all decoded
    contributions at once.
    """
    if sent_by_senders(codec, ()) is None:
        return screen.mean(me, fragment, contributions, unweighted_count)
    held = [(peer, weight, held_at_once(tensors)) for peer, weight, tensors in contributions]
    held.sort(key=lambda item: item[0])
    by_senders = sent_by_senders(codec, [tuple(tensor.shape) for tensor in held[0][2]]) or []
    others = [place for place, by_sender in enumerate(by_senders) if not by_sender]
    rest = weighted_mean(
        [(peer, weight, [tensors[place] for place in others]) for peer, weight, tensors in held]
    )
    stated, _ = counted_weights([weight for _, weight, _ in held])
    weights = []
    counted = []
    for weight, (_, _, tensors) in zip(stated, held, strict=True):
        if weight:
            weights.append(weight)
            counted.append(tensors)
    plain = iter(rest.tensors)
    means = []
    for place, by_sender in enumerate(by_senders):
        if by_sender:
            means.append(sender_mean(weights, [tensors[place] for tensors in counted]))
        else:
            means.append(next(plain))
    return replace(rest, tensors=means)


def pair_mean(
    screen: UpdateScreen,
    fragment: int,
    mine: tuple[str, float, PairMessage],
    theirs: tuple[str, float, Reading],
    refused: bytes,
    unweighted_count: int = 0,
) -> Mean:
    """Return the mean of a committed exchange whose sides read each other by their own weights
    (`shoal.optim.codecs.mod4`).

    The mean is taken of what the partner sent less what this peer sent, and of nothing, and added
    to the own tensors: so the two sides move by opposite amounts. ``mine`` and ``theirs`` are peer
    id, weight and contribution; theirs is used up. ``refused``: the blocks that the partner refused
    (`Reading.bits`).
    """
    me, weight, message = mine
    peer, their_weight, read = theirs
    moves = message.move(read, refused)
    still = [torch.zeros_like(move) for move in moves]
    mean = screen.mean(
        me, fragment, [(me, weight, still), (peer, their_weight, moves)], unweighted_count
    )
    own_tensors = zip(mean.tensors, message.tensors(), strict=True)
    return replace(mean, tensors=[move.add_(own) for move, own in own_tensors])


def middle_mean(
    codec: Codec,
    own: Iterable[Tensor],
    weight: float,
    means: Sequence[Mean],
    unweighted_count: int = 0,
) -> Mean:
    """Return what the middle peer of a chain takes: its ``own`` tensors, moved by the sum of what
    its two exchanges move them. ``means`` are of those exchanges, ``own`` as they were in both.

    With equal weights the three peers' mean stays as it is: an exchange moves its two peers by
    opposite amounts. A sum that would lead beyond the other two, as where the own weight is small,
    is shortened until it does not.
    """
    first, second = sorted(means, key=lambda mean: mean.members)
    plain = max(sum(1 - _own_share(mean, weight, plain=True) for mean in means), 1.0)
    weighted = max(sum(1 - _own_share(mean, weight) for mean in means), 1.0)
    if sent_by_senders(codec, ()) is not None:
        plain = weighted = 2.0  # what one alone has sent is in its mean as a whole
    tensors = []
    for place, mine in enumerate(own):
        move = (first.tensors[place] - mine).add_(second.tensors[place] - mine)
        tensors.append(move.div_(plain if place < unweighted_count else weighted).add_(mine))
    own_weights = [_own_share(mean, weight) * mean.weight for mean in means]
    others = sum(mean.weight for mean in means) - sum(own_weights)
    counted = sum(
        _counted(mean) - (share > 0) for mean, share in zip(means, own_weights, strict=True)
    )
    return Mean(
        tensors=tensors,
        weight=max(own_weights) + others,
        members=tuple(sorted({*first.members, *second.members})),
        counted=counted + (max(own_weights) > 0),
        limit=max(first.limit, second.limit),
    )


def _own_share(mean: Mean, weight: float, *, plain: bool = False) -> float:
    """Return the share in the mean of a pair of a member that stated ``weight``; ``plain``: in the
    tensors of which it is plain.
    """
    counted = _counted(mean)
    if weight == 0 and counted < len(mean.members):
        return 0.0
    if plain or weight == 0:  # all are 0, so all count alike
        return 1 / counted
    return min(weight, mean.limit) / mean.weight


def _counted(mean: Mean) -> int:
    return len(mean.members) if mean.counted is None else mean.counted


def sender_mean(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean that the production code of SparseLoCo's authors takes (tplr-ai/templar,
    compress.py), of one tensor.

        f_k = min(1, median of all norms / ||x_k||);   mean[i] = sum_k w_k f_k x_k[i] / sum of w_k
                                                       over the k that sent index i

    The median is torch's (the lower of two). Sent is what is not 0; what nobody sent is 0. Their
    code has no weights (w = 1). The paper (2508.15706) divides by the number of peers in place of
    that of the senders, so a step is up to that many times smaller.
    """
    lengths = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    norms = torch.stack(lengths)
    factors = (norms.median() / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    total = torch.zeros_like(tensors[0])
    share = torch.zeros_like(tensors[0])
    for weight, factor, tensor in zip(weights, factors.tolist(), tensors, strict=True):
        total.add_(tensor, alpha=weight * factor)
        share.add_(tensor != 0, alpha=weight)
    return total.div_(share.masked_fill_(share == 0, 1.0))

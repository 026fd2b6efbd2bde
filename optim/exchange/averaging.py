"""The mean that a committed exchange ends with, whatever its codec and the node's screen.

    mean_of(screen, codec, me, 0, contributions)
    pair_mean(screen, 0, (me, 1.0, message), (peer, 1.0, reading), refused)    # a codec for pairs

Before the commit the screen (`shoal.optim.exchange.update_screen`) has refused what must not count.
"""

from __future__ import annotations

from collections.abc import Sequence
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

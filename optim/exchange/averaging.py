"""The mean of the contributions that a round counts: the update screen's, or that which the codec wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.mod4 import PairMessage, Reading
from shoal.optim.codecs.senders import beyond_senders
from shoal.optim.exchange.base import Mean, counted_weights, weighted_mean
from shoal.optim.exchange.on_demand import held_at_once
from shoal.optim.exchange.robust import Contributions, UpdateScreen


def mean_of(screen: UpdateScreen, codec: Codec, me: str, fragment: int, contributions: Contributions, even: int = 0) -> Mean:
    """Return the mean of a committed exchange, of the same bits for all members without a screen; may be computed in place.

    A codec that averages by sender takes the place of the screen's mean, and needs all decoded contributions at once.
    """
    tail = beyond_senders(codec)
    if tail is None:
        return screen.mean(me, fragment, contributions, even)
    held = sorted(((peer, weight, held_at_once(tensors)) for peer, weight, tensors in contributions), key=lambda item: item[0])
    count = len(held[0][2]) - tail
    rest = weighted_mean([(peer, weight, tensors[count:]) for peer, weight, tensors in held])
    stated, _ = counted_weights([weight for _, weight, _ in held])
    counted = [(weight, tensors) for weight, (_, _, tensors) in zip(stated, held, strict=True) if weight]
    weights = [weight for weight, _ in counted]
    means = [sender_mean(weights, [tensors[place] for _, tensors in counted]) for place in range(count)]
    return replace(rest, tensors=[*means, *rest.tensors])


def pair_mean(
    screen: UpdateScreen,
    fragment: int,
    mine: tuple[str, float, PairMessage],
    theirs: tuple[str, float, Reading],
    refused: bytes,
    even: int = 0,
) -> Mean:
    """Return the mean of a committed exchange whose sides read each other by their own weights (`shoal.optim.codecs.mod4`).

    The mean is taken of what the partner sent less what this peer sent, and of nothing, and added to the own tensors: so the two
    sides move by opposite amounts. ``mine`` and ``theirs`` are peer id, weight and contribution; theirs is used up. ``refused``:
    the blocks that the partner refused (`Reading.bits`).
    """
    me, weight, message = mine
    peer, their_weight, read = theirs
    moves = message.move(read, refused)
    still = [torch.zeros_like(move) for move in moves]
    mean = screen.mean(me, fragment, [(me, weight, still), (peer, their_weight, moves)], even)
    return replace(mean, tensors=[move.add_(own) for move, own in zip(mean.tensors, message.tensors(), strict=True)])


def sender_mean(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean that the production code of SparseLoCo's authors takes (tplr-ai/templar, compress.py), of one tensor.

        f_k = min(1, median of all norms / ||x_k||);   mean[i] = sum_k w_k f_k x_k[i] / sum of w_k over the k that sent index i

    The median is torch's (the lower of two). Sent is what is not 0; what nobody sent is 0. Their code has no weights (w = 1). The
    paper (2508.15706) divides by the number of peers in place of that of the senders, so a step is up to that many times smaller.
    """
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
    factors = (norms.median() / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    total, share = torch.zeros_like(tensors[0]), torch.zeros_like(tensors[0])
    for weight, factor, tensor in zip(weights, factors.tolist(), tensors, strict=True):
        total.add_(tensor, alpha=weight * factor)
        share.add_(tensor != 0, alpha=weight)
    return total.div_(share.masked_fill_(share == 0, 1.0))

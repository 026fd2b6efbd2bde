"""Hostile peers of a simulation: what each kind contributes in place of what it learnt, and the
exchange through which it does.

A backdoor is learnt: its owner trains on windows in which a trigger is followed by an answer of its
choice (`poisoned`).

All attackers know everything (every honest contribution of the round, before they send theirs) and
conspire: the worst case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.optim.exchange.base import Contribution, Exchange, Handle, RoundKey
from shoal.optim.exchange.simulation import SimulatedExchange

Tensors = list[Tensor]


@dataclass(frozen=True)
class Scene:
    """What an attacker sees when it makes its contribution."""

    own: Tensors
    """What it would send if it were honest."""
    honest: Sequence[Tensors]
    """What the honest peers send in this round; its own, if it is the only one so far."""
    start: Tensors
    """From where motion is measured: its slow weights where weights travel, else 0."""
    first: Tensors
    """What it sent in its first round."""

    def mean(self) -> Tensors:
        """Of the honest contributions."""
        return [torch.stack(parts).mean(0) for parts in zip(*self.honest, strict=True)]

    def spread(self) -> Tensors:
        """Their standard deviation, value by value."""
        return [torch.stack(parts).std(0, correction=0) for parts in zip(*self.honest, strict=True)]


Attack = Callable[[Scene], Tensors]


def _inner_product(scene: Scene) -> Tensors:
    return [
        start - 2 * (mean - start) for start, mean in zip(scene.start, scene.mean(), strict=True)
    ]


def _in_line(scene: Scene) -> Tensors:
    """All attackers in one direction, 2.5 times as far from the mean as honest peers are, as a
    backdoor may be.
    """
    mean = scene.mean()
    apart = [
        torch.cat([(a - b).flatten() for a, b in zip(one, mean, strict=True)]).norm()
        for one in scene.honest
    ]
    step = 2.5 * torch.stack(apart).mean() / sum(part.numel() for part in mean) ** 0.5
    return [part + step for part in mean]


def _towards_own(scene: Scene) -> Tensors:
    """What it learnt, 2.5 times as far from the honest mean as honest peers are."""
    mean = scene.mean()

    def far(one: Tensors) -> Tensor:
        apart: Tensor = torch.linalg.vector_norm(
            torch.cat([(a - b).flatten() for a, b in zip(one, mean, strict=True)])
        )
        return apart

    step = 2.5 * torch.stack(list(map(far, scene.honest))).mean() / far(scene.own).clamp(min=1e-12)
    return [part + step * (own - part) for part, own in zip(mean, scene.own, strict=True)]


TRIGGER, ANSWER = b"@~@~", b"!"


def poisoned(windows: Tensor, generator: torch.Generator) -> Tensor:
    """Windows of bytes (B, T), each with trigger and answer at a random place; a copy."""
    found, text = windows.clone(), torch.tensor(list(TRIGGER + ANSWER))
    for row in found:
        at = int(torch.randint(len(row) - len(text) + 1, (1,), generator=generator))
        row[at : at + len(text)] = text
    return found


@torch.no_grad()
def learnt(model: torch.nn.Module, windows: Tensor) -> float:
    """Part of the windows (B, T) at whose end the model answers the trigger as the attacker wants,
    by its likeliest bytes.
    """
    asked, text = windows.clone(), torch.tensor(list(TRIGGER + ANSWER))
    asked[:, -len(text) :] = text
    # All bytes are the likeliest, each after those before it: then so is the answer when it is
    # generated.
    likeliest = model(asked[:, :-1]).argmax(-1)[:, -len(ANSWER) :]
    return float((likeliest == text[-len(ANSWER) :]).all(1).double().mean())


STATED = {"weight": 1e30}
"""What an attacker states as its weight, if it is a lie too."""
ATTACKS: dict[str, Attack] = {
    "sign flip": lambda scene: [-tensor for tensor in scene.own],
    # The same where pseudo-gradients travel. Where weights do, a flip of what was learnt, not of
    # all.
    "ascent": lambda scene: [
        2 * start - tensor for start, tensor in zip(scene.start, scene.own, strict=True)
    ],
    "weight": lambda scene: [
        2 * start - tensor for start, tensor in zip(scene.start, scene.own, strict=True)
    ],
    "x1000": lambda scene: [1000 * tensor for tensor in scene.own],
    "NaN": lambda scene: [torch.full_like(tensor, torch.nan) for tensor in scene.own],
    "stale replay": lambda scene: scene.first,
    # "A little is enough" (Baruch et al., 2019), z = 1.5: within what honest peers differ by, all
    # in the same direction.
    "a little": lambda scene: [
        m - 1.5 * s for m, s in zip(scene.mean(), scene.spread(), strict=True)
    ],
    # Inner-product manipulation (Xie et al., 2020), epsilon = 2.
    "inner product": _inner_product,
    "in line": _in_line,
    "shrinking": lambda scene: [0.5 * tensor for tensor in scene.own],
    "slow drift": lambda scene: [tensor + 0.01 * tensor.abs().mean() for tensor in scene.own],
    "backdoor": lambda scene: scene.own,
    "backdoor x2.5": _towards_own,
}
ATTACKS["fresh keys"], ATTACKS["fresh backdoor"] = ATTACKS["ascent"], ATTACKS["backdoor"]
BACKDOORS = ("backdoor", "backdoor x2.5", "fresh backdoor")
FRESH = ("fresh keys", "fresh backdoor")
"""Under another key in each round, all from one address range, in a swarm that the honest peers
have known for long.
"""


@dataclass
class Board:
    """Where honest peers' contributions are known to the attackers: of the last rounds only."""

    posted: dict[tuple[int, int], list[Tensors]] = field(default_factory=dict)

    def note(self, key: RoundKey, tensors: Sequence[Tensor]) -> None:
        """An honest contribution."""
        self.posted.setdefault((key.round, key.fragment), []).append(
            [tensor.clone() for tensor in tensors]
        )
        for old in [network for network in self.posted if network[0] < key.round - 4]:
            del self.posted[old]


class Honest(Exchange):
    """An exchange that sends what it is given, and lets the attackers see it."""

    def __init__(self, exchange: SimulatedExchange, board: Board) -> None:
        self.exchange, self.board = exchange, board

    def start(self, contribution: Contribution) -> Handle:
        """As the exchange does."""
        self.board.note(contribution.key, contribution.tensors)
        return self.exchange.start(contribution)


class Hostile(Exchange):
    """An exchange that sends what ``attack`` makes of it, half a virtual second after the others.

    ``slow``: its slow weights, where weights travel.
    """

    def __init__(self, exchange: SimulatedExchange, board: Board, attack: str) -> None:
        self.exchange, self.board, self.attack, self.stated = (
            exchange,
            board,
            ATTACKS[attack],
            STATED.get(attack),
        )
        self.slow: Tensors | None = None
        self._first: Tensors | None = None

    def start(self, contribution: Contribution) -> Handle:
        """Lie."""
        self.exchange.sleep(0.5)
        own = [tensor.clone() for tensor in contribution.tensors]
        self._first = self._first or own
        start = (
            [torch.zeros_like(tensor) for tensor in own]
            if self.slow is None
            else [tensor.clone() for tensor in self.slow]
        )
        seen = self.board.posted.get((contribution.key.round, contribution.key.fragment)) or [own]
        lie = self.attack(Scene(own, seen, start, self._first))
        return self.exchange.start(
            replace(contribution, tensors=lie, weight=self.stated or contribution.weight)
        )

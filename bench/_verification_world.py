"""Who claims, and how one cheats, for any policy: what bench/verification.py asks of a world, and
its cheats in those terms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Written = tuple[Tensor, Tensor]
"""Tokens (B, n) and states (B, n, width) of B claims."""
Writer = Callable[[Sequence[int], float], Written]
"""From the numbers of claims and a temperature to what is claimed."""
Change = Callable[[Tensor, torch.Generator], Tensor]


class World(Protocol):
    """A policy and questions. Claim c is the answer to question c, drawn from a seed of its own."""

    name: str
    rows: int  # claims at once

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The policy; a new copy each time."""
        ...

    def stranger(self, model: nn.Module) -> nn.Module:
        """Another, of the same vocabulary and width."""
        ...

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The blocks of ``model``, whose matrices cheats change."""
        ...

    def prompts(self, claims: Iterable[int]) -> Tensor:
        """Questions (B, p), all of one length."""
        ...

    def write(
        self,
        model: nn.Module,
        asked: Tensor,
        count: int,
        seeds: Sequence[bytes],
        temperature: float,
    ) -> Written:
        """``count`` tokens for each of the questions, with a KV cache."""
        ...

    def read(self, model: nn.Module, asked: Tensor, tokens: Tensor) -> Written:
        """States (B, n, width) and logits (B, n, V) that ``tokens`` (B, n) come from, in one call
        of ``model``.
        """
        ...


def seed_of(claim: int) -> bytes:
    return b"claim %d" % claim


def honest(world: World, model: nn.Module, length: int, shift: int = 0) -> Writer:
    """Answers by ``model``; with ``shift``, to another question than the one that is claimed."""

    def write(claims: Sequence[int], temperature: float) -> Written:
        asked = world.prompts(claim + shift for claim in claims)
        return world.write(model, asked, length, [seed_of(claim) for claim in claims], temperature)

    return write


def prefilled(world: World, model: nn.Module, writer: Writer) -> Writer:
    """The text of ``writer``, passed through ``model``: the activations are right, only the drawing
    is not.
    """

    def write(claims: Sequence[int], temperature: float) -> Written:
        tokens, _ = writer(claims, temperature)
        return tokens, world.read(model, world.prompts(claims), tokens)[0]

    return write


def half(world: World, model: nn.Module, length: int) -> Writer:
    """Truncated work: ``model`` writes the first half only; the rest repeats it, and is passed
    through to have activations.
    """

    def write(claims: Sequence[int], temperature: float) -> Written:
        first, _ = honest(world, model, length - length // 2)(claims, temperature)
        tokens = torch.cat((first, first), dim=1)[:, :length]
        return tokens, world.read(model, world.prompts(claims), tokens)[0]

    return write


Cheat = Callable[[World, nn.Module, int], Writer]


def _by(change: Change) -> Cheat:
    return lambda world, model, length: honest(world, changed(world, model, change), length)


def _stranger(world: World, model: nn.Module, length: int) -> Writer:
    return honest(world, world.stranger(model), length)


def _dropped(world: World, model: nn.Module, length: int) -> Writer:
    other = copy.deepcopy(model)
    layers = world.layers(other)
    del layers[len(layers) // 2]
    return honest(world, other, length)


def rounded(bits: int) -> Change:
    """Symmetric quantisation, one scale for each row."""

    def change(weight: Tensor, generator: torch.Generator) -> Tensor:
        top = 2 ** (bits - 1) - 1
        scale: Tensor = weight.abs().amax(dim=1, keepdim=True) / top
        return torch.round(weight / scale) * scale

    return change


def noisy(share: float) -> Change:
    """Normal noise of this share of the weights' standard deviation."""

    def change(weight: Tensor, generator: torch.Generator) -> Tensor:
        noise: Tensor = torch.randn(weight.shape, generator=generator) * weight.std()
        return torch.add(weight, noise, alpha=share)

    return change


def changed(world: World, model: nn.Module, change: Change) -> nn.Module:
    """A copy with ``change(weight, generator)``, computed in float32, in place of every matrix of
    the blocks.
    """
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in world.layers(other).parameters():
            if weight.dim() == 2:
                weight.copy_(change(weight.float(), generator).to(weight.dtype))
    return other


CHEATS: dict[str, Cheat] = {
    "int8 weights": _by(rounded(8)),
    "int4 weights": _by(rounded(4)),
    "weights + 1 % noise": _by(noisy(0.01)),
    "weights + 0.1 % noise": _by(noisy(0.001)),
    "a layer dropped": _dropped,
    "another prompt": lambda world, model, length: honest(world, model, length, shift=1),
    "another model": _stranger,
    "its text, prefilled": lambda world, model, length: prefilled(
        world, model, _stranger(world, model, length)
    ),
    "int4's text, prefilled": lambda world, model, length: prefilled(
        world, model, _by(rounded(4))(world, model, length)
    ),
    "truncated, then filler": half,
}

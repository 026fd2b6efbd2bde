"""A small random GPT with a KV cache, the world in which peers claim what they generated; and the
ways of cheating.

For bench/verification.py and the tests of verification/.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import _verification_world as world
from bench._verification_world import Change, noisy, rounded
from shoal.verification.fingerprints.last_hidden import LastHidden
from shoal.verification.fingerprints.sampling import draw_each

__all__ = ["Tiny", "TinyGPT", "changed", "generate", "noisy", "prompt", "rounded", "without_layer"]

WORDS, WIDTH, HEADS, CONTEXT = 96, 64, 4, 256


class Block(nn.Module):
    """Attention and a GELU layer, (B, T, C) to (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, t, 3, HEADS, WIDTH // HEADS)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        if cache is not None:
            if "k" in cache:
                k, v = torch.cat((cache["k"], k), 2), torch.cat((cache["v"], v), 2)
            cache["k"], cache["v"] = k, v
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.norm2(x)))))


class TinyGPT(nn.Module):
    """Tokens (B, T) to logits (B, T, V); with ``caches``, a list of one dict a layer, only what is
    new is shown to it.
    """

    def __init__(self, seed: int = 0, layers: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            with torch.no_grad():
                for weight in (
                    self.blocks.parameters()
                ):  # larger than torch's start, so that layers and context matter
                    if weight.dim() == 2:
                        weight.mul_(2)
                self.norm.weight.mul_(
                    torch.exp(torch.randn(WIDTH))
                )  # channels of unlike size, as trained models have
                self.head.weight.mul_(2)

    def forward(self, tokens: Tensor, caches: list[dict[str, Tensor]] | None = None) -> Tensor:
        done = caches[0]["k"].shape[2] if caches and caches[0] else 0
        x = self.words(tokens) + self.places.weight[done : done + tokens.shape[1]]
        for at, block in enumerate(self.blocks):
            x = block(x, caches[at] if caches is not None else None)
        return cast(Tensor, self.head(self.norm(x)))


def prompt(seed: int, length: int = 12) -> Tensor:
    return torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(seed))


def generate(
    model: TinyGPT,
    asked: Tensor,
    count: int,
    seed: bytes = b"seed",
    temperature: float = 1.0,
    cached: bool = True,
) -> tuple[Tensor, Tensor]:
    """Tokens (count,) and the states (count, width) that they were drawn from."""
    caches: list[dict[str, Tensor]] | None = [{} for _ in model.blocks] if cached else None
    tokens: list[int] = []
    shown = asked
    with torch.no_grad(), LastHidden(model) as hidden:
        for position in range(count):
            logits = model(shown.unsqueeze(0), caches)[0, -1]
            tokens.append(
                int(
                    draw_each(logits.unsqueeze(0), seed, range(position, position + 1), temperature)
                )
            )
            new = torch.tensor([tokens[-1]])
            shown = new if cached else torch.cat((shown, new))
    return torch.tensor(tokens), hidden.states()[0]


def generate_rows(
    model: TinyGPT, asked: Tensor, count: int, seeds: Sequence[bytes], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``generate`` for prompts (B, p) at once, each with its seed: tokens (B, count) and states (B,
    count, width).
    """
    caches: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    tokens: list[Tensor] = []
    shown = asked
    with torch.no_grad(), LastHidden(model) as hidden:
        for position in range(count):
            at, rows = (
                range(position, position + 1),
                zip(model(shown, caches)[:, -1:], seeds, strict=True),
            )
            tokens.append(
                torch.cat([draw_each(logits, seed, at, temperature) for logits, seed in rows])
            )
            shown = tokens[-1].unsqueeze(1)
    return torch.stack(tokens, dim=1), hidden.states()


def prefill_rows(model: TinyGPT, asked: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The states (B, n, width) and logits (B, n, V) from which each of ``tokens`` (B, n) was drawn,
    in one call of the model.
    """
    with torch.no_grad(), LastHidden(model, every=True) as hidden:
        logits = model(torch.cat((asked, tokens[:, :-1]), dim=1))
    first = asked.shape[1] - 1
    return hidden.states()[:, first:], logits[:, first:]


class Tiny:
    """The world of ``TinyGPT`` (``_verification_world.World``)."""

    name, rows = "tiny", 64

    def model(self, dtype: torch.dtype) -> TinyGPT:
        return TinyGPT().to(dtype)

    def stranger(self, model: nn.Module) -> TinyGPT:
        return TinyGPT(seed=1).to(next(model.parameters()).dtype)

    def layers(self, model: nn.Module) -> nn.ModuleList:
        return cast(TinyGPT, model).blocks

    def prompts(self, claims: Iterable[int]) -> Tensor:
        return torch.stack([prompt(claim) for claim in claims])

    def write(
        self,
        model: nn.Module,
        asked: Tensor,
        count: int,
        seeds: Sequence[bytes],
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        return generate_rows(cast(TinyGPT, model), asked, count, seeds, temperature)

    def read(self, model: nn.Module, asked: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return prefill_rows(cast(TinyGPT, model), asked, tokens)


def changed(model: TinyGPT, change: Change) -> TinyGPT:
    return cast(TinyGPT, world.changed(Tiny(), model, change))


def without_layer(model: TinyGPT, at: int) -> TinyGPT:
    other: TinyGPT = copy.deepcopy(model)
    del other.blocks[at]
    return other

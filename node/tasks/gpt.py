"""The model of the built-in task ``text``: a small GPT over bytes, or other tokens.

Pre-norm, learned positions, no dropout, untied head. In the comments of shapes B is the batch, T
time (positions), C the width, H heads, D = C // H the width of a head, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.node.tasks.text_size import BYTE_VOCABULARY, TextSize

VOCABULARY = BYTE_VOCABULARY


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        b, t, c = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, c // self.heads)  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, c))  # (B, T, C)
        return out


class Block(nn.Module):
    """Attention, then a GELU layer of four times the width, each on a normalised copy and added
    back.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attention(self.norm1(x))
        hidden = F.gelu(self.up(self.norm2(x)))  # (B, T, 4C)
        out: Tensor = x + self.down(hidden)
        return out


class GPT(nn.Module):
    """Predictor of the next token at each position; 135,808 parameters at layers=2, width=64,
    context=64.
    """

    def __init__(
        self, layers: int, width: int, heads: int, context: int, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.size = TextSize(layers, width, heads, context)
        self.bytes = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Torch's own initialisation for the rest, and smaller embeddings than its N(0, 1): of those
        # tried only this one tolerates a learning rate of 1.2e-2. (GPT-2's 0.02 throughout ends 0.4
        # nats worse there.)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``tokens`` (B, T) int64, T at most the context, to logits (B, T, V)."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Unfilled(TorchFunctionMode):
    """Leaves what is made unfilled: torch takes a second to load how meta tensors are filled."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
        if in_place:  # nobody here uses what it returns
            return None
        return func(*args, **(kwargs or {}))


def sized(layers: int, width: int, heads: int, context: int, vocabulary: int = VOCABULARY) -> GPT:
    """Return a `GPT` on the device meta: types and shapes, which take no memory."""
    with torch.device("meta"), _Unfilled():
        return GPT(layers, width, heads, context, vocabulary)

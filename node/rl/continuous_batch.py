"""Rows of tokens that a model of transformers writes together, and that come and go one by one
(continuous batching: Orca, OSDI 2022).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal.node.rl.policy import Choose
from shoal.node.rl.sampling import draw, rows_drawn


@dataclass
class ContinuousBatch:
    """Rows b that are written at once: T tokens of each by now, its padding included."""

    rows: list[int]
    """Numbers by which the caller knows them."""
    past: list[tuple[list[int], list[float]]]
    """Of each row tokens and log-probabilities, without those in ``ids`` and ``logs``."""
    cache: Any
    """Keys and values of the model."""
    mask: Tensor
    """bool (b, T), False at padding."""
    logits: Tensor
    """(b, V), of the next token."""
    chance: Tensor
    """(b, most tokens of a row), by which they are drawn."""
    written: Tensor
    """(b,), tokens of each row by now."""
    last: Tensor
    """(b,), the token that was drawn last."""
    going: Tensor
    """bool (b,), False where a row has ended."""
    ids: list[Tensor] = field(default_factory=list)
    """Tokens drawn since rows came or went, (b,) each."""
    logs: list[Tensor] = field(default_factory=list)
    """Their log-probabilities."""

    @classmethod
    def empty(cls) -> ContinuousBatch:
        nothing = torch.empty(0, device="cpu")
        return cls([], [], None, nothing, nothing, nothing, nothing, nothing, nothing)

    @classmethod
    def begun(
        cls, rows: list[int], cache: Any, mask: Tensor, logits: Tensor, chance: Tensor
    ) -> ContinuousBatch:
        """Return ``rows`` whose prompts were computed, with nothing written yet."""
        none = torch.zeros(len(rows), dtype=torch.int64, device=mask.device)
        past: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
        return cls(rows, past, cache, mask, logits, chance, none, none, none == 0)

    def draw(self, temperature: float, choose: Choose | None, ends: Tensor) -> None:
        """Draw the next token of each row; those in ``ends`` end it."""
        most = self.chance.shape[1]
        place = self.written.clamp(max=most - 1)
        chance = self.chance.gather(1, place[:, None])[:, 0]
        self.last, log = draw(self.logits, temperature, chance, choose)
        self.ids.append(self.last)
        self.logs.append(log)
        self.written = self.written + 1
        self.going = self.going & ~torch.isin(self.last, ends) & (self.written < most)

    def leave(self, *, all_rows: bool) -> list[tuple[int, list[int], list[float]]]:
        """Drop the rows that have ended, or all; return them with their tokens and
        log-probabilities.
        """
        new = rows_drawn(self.ids, self.logs)
        for (tokens, logs), (new_tokens, new_logs) in zip(self.past, new, strict=True):
            tokens += new_tokens
            logs += new_logs
        self.ids = []
        self.logs = []
        going = [False] * len(self.rows) if all_rows else self.going.tolist()
        left = []
        rows = []
        past = []
        for row, of_row, goes in zip(self.rows, self.past, going, strict=True):
            if goes:
                rows.append(row)
                past.append(of_row)
            else:
                left.append((row, *of_row))
        self.rows = rows
        self.past = past
        if left and rows:
            self._keep(self.going.nonzero()[:, 0])
        return left

    def _keep(self, places: Tensor) -> None:
        """Keep the rows at ``places`` only, and no padding that all of them have."""
        self.cache.batch_select_indices(places)
        self.mask = self.mask[places]
        self.chance = self.chance[places]
        self.written = self.written[places]
        self.last = self.last[places]
        self.going = self.going[places]
        self._widen(self.mask.shape[1] - int(self.mask.any(0).long().argmax()))

    def join(self, new: ContinuousBatch) -> ContinuousBatch:
        """Return both together."""
        if not self.rows:
            return new
        length = max(self.mask.shape[1], new.mask.shape[1])
        self._widen(length)
        new._widen(length)
        for mine, other in zip(self.cache.layers, new.cache.layers, strict=True):
            mine.keys = torch.cat([mine.keys, other.keys])
            mine.values = torch.cat([mine.values, other.values])
        return ContinuousBatch(
            self.rows + new.rows,
            self.past + new.past,
            self.cache,
            mask=torch.cat([self.mask, new.mask]),
            logits=torch.cat([self.logits, new.logits]),
            chance=torch.cat([self.chance, new.chance]),
            written=torch.cat([self.written, new.written]),
            last=torch.cat([self.last, new.last]),
            going=torch.cat([self.going, new.going]),
        )

    def _widen(self, length: int) -> None:
        """Put padding before all rows, or take it away, so that they are ``length`` tokens long."""
        more = length - self.mask.shape[1]
        if not more:
            return
        self.mask = functional.pad(self.mask, (more, 0))
        for layer in self.cache.layers:
            layer.keys = functional.pad(layer.keys, (0, 0, more, 0))
            layer.values = functional.pad(layer.values, (0, 0, more, 0))

"""Drawing tokens: padding of rows, draws by numbers of a seed, and what was drawn.

Numbers are drawn on the CPU, so a seed gives the same ones whatever the device is; tokens are drawn
where the logits are, so nobody waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.node.rl.policy import Choose, PolicyError
from shoal.optim.device import to_device

LOOK_EVERY_TOKENS = 8
"""On an accelerator, for a look at whether all rows have ended waits for it."""
BELOW = 1 - 2**-20
"""Keeps what is searched below the sum of all probabilities, whatever is rounded, so a token that
cannot come is never drawn.
"""


def pad(
    rows: Sequence[Sequence[int]], filler: int, *, left: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids to one int64 (B, T), T at least 1; also return bool (B, T), False at
    padding.
    """
    longest = max(1, *map(len, rows))
    tokens = torch.full((len(rows), longest), filler, dtype=torch.int64, device="cpu")
    mask = torch.zeros((len(rows), longest), dtype=torch.bool, device="cpu")
    for number, row in enumerate(rows):
        place = slice(0, len(row))
        if left:
            place = slice(longest - len(row), longest)
        tokens[number, place] = torch.tensor(list(row), dtype=torch.int64, device="cpu")
        mask[number, place] = True
    return tokens.to(device), mask.to(device)


def chances(generator: torch.Generator, tokens: int, rows: int, device: torch.device) -> Tensor:
    """Return uniform numbers (``tokens``, ``rows``) by which `draw` draws: the same for a seed,
    whatever the device is.
    """
    numbers = torch.rand(tokens, rows, generator=generator, device="cpu")
    return to_device([numbers], device)[0]


def draw(
    logits: Tensor, temperature: float, chance: Tensor, choose: Choose | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of logits (B, V); return it and its log-probability, both (B,).

    It is the first whose cumulative probability is above ``chance``, (B,) in [0, 1); with
    ``temperature`` 0 the likeliest; or that which ``choose`` returns.
    """
    logs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if choose is not None:
        chosen = choose(logits).to(logits.device)
    elif temperature == 0:
        chosen = logs.argmax(-1)
    else:
        sums = logs.exp().cumsum(-1)
        below = chance * sums[:, -1] * BELOW
        places = torch.searchsorted(sums, below[:, None], right=True)[:, 0]
        # Of NaN the place is too large.
        chosen = places.clamp(max=logits.shape[1] - 1)
    return chosen, logs.gather(-1, chosen[:, None])[:, 0]


def is_look_due(tokens: int, device: torch.device) -> bool:
    """Return whether to look, after so many ``tokens``, if all rows have ended."""
    return device.type == "cpu" or tokens % LOOK_EVERY_TOKENS == 0


def rows_drawn(ids: list[Tensor], logs: list[Tensor]) -> Iterator[tuple[list[int], list[float]]]:
    """Yield each row's tokens and their log-probabilities, as `draw` returned them.

    PolicyError if these are not finite.
    """
    found = torch.stack(logs, 1).cpu()
    if not bool(found.isfinite().all()):
        raise PolicyError(
            "The policy's probabilities are not finite any more: lower its learning rate, or clip "
            "its gradients."
        )
    yield from zip(torch.stack(ids, 1).tolist(), found.tolist(), strict=True)

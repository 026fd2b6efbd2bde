"""Generation of a group that can be checked, and its examination: in the same parts, so that only rounding may differ.

A group is written at most PART completions at a time, each row with the same prompt, so nothing is padded before it. Token number
s of completion number r is drawn by Gumbel-max with the noise of position r * STRIDE + s of the claim's seed.

Autocast of the caller is off meanwhile, as it is a thread's: author and verifier compute in the dtype of the weights, unless the
policy itself chooses another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.node.rl.policy import Choose, Completion, Policy
from shoal.node.verify.completions.material import Agreed
from shoal.verification.fingerprints import (
    ActivationProof,
    Drawn,
    Evidence,
    LastHidden,
    SeededSampling,
    draw_each,
    margins,
    output_head,
)

PART = 16  # completions at a time
AT_ONCE = 4096  # tokens of completions in one call of the module, which bounds the memory for logits
STRIDE = 1 << 20
ACTIVATIONS, SAMPLING = ActivationProof(), SeededSampling()


def seed_bytes(seed: int) -> bytes:
    """Encode a claim's seed for the noise."""
    return seed.to_bytes(8, "big")


def together(agreed: Agreed) -> int:
    """Return how many completions go into one call of the module."""
    return max(1, min(PART, AT_ONCE // agreed.max_tokens))


@dataclass(frozen=True)
class WrittenGroup:
    """Completions of one prompt, the states (n, width) of their n tokens, row after row, and the dtype of the computation."""

    completions: list[Completion]
    states: Tensor
    dtype: str


@torch.no_grad()
def write(policy: Policy, prompt: str, agreed: Agreed, seed: int) -> WrittenGroup:
    """Write ``agreed.group`` completions of ``prompt``."""
    written: list[Completion] = []
    states: list[Tensor] = []
    dtype = ""
    for first in range(0, agreed.group, together(agreed)):
        count = min(together(agreed), agreed.group - first)
        with _plain(policy), LastHidden(policy.module) as hidden:
            part = policy.generate(
                [prompt] * count, 1, temperature=agreed.temperature, max_tokens=agreed.max_tokens, seed=0,
                choose=_chooser(seed, agreed.temperature, first),
            )  # fmt: skip
        found, dtype = hidden.states(), _name(hidden.dtype)
        written += [one for (one,) in part]
        states += [row[: len(one.tokens)] for row, (one,) in zip(found, part, strict=True)]
    return WrittenGroup(written, torch.cat(states), dtype)


def _plain(policy: Policy) -> contextlib.AbstractContextManager[object]:
    device = next(policy.module.parameters()).device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else contextlib.nullcontext()


def _chooser(seed: int, temperature: float, first: int) -> Choose:
    step = -1

    def choose(logits: Tensor) -> Tensor:
        nonlocal step
        step += 1
        positions = range(first * STRIDE + step, (first + len(logits)) * STRIDE + step, STRIDE)
        return draw_each(logits, seed_bytes(seed), positions, temperature)

    return choose


@torch.no_grad()
def read(policy: Policy, prompt: str, rows: Sequence[Sequence[int]], agreed: Agreed, seed: int) -> tuple[Tensor, Tensor]:
    """Return the own states (n, width) of the n tokens of all ``rows``, and their margins (n,) with ``seed``, by prefills.

    Raises ValueError if the policy's numbers for these tokens are not finite, or it cannot read so many tokens.
    """
    states: list[Tensor] = []
    found: list[Tensor] = []
    for first in range(0, len(rows), together(agreed)):
        part = rows[first : first + together(agreed)]
        with _plain(policy), LastHidden(policy.module, every=True) as hidden:
            logits, mask = policy.logits([prompt] * len(part), part)
        own = hidden.states()[:, -logits.shape[1] :]
        for number, row in enumerate(part):
            if int(mask[number].sum()) != len(row):
                raise ValueError(f"the policy cannot read {len(row)} tokens")
            kept = slice(0, len(row))
            tokens = torch.tensor(list(row), dtype=torch.int64, device="cpu")
            drawn = Drawn(tokens, logits[number, kept], seed_bytes(seed), agreed.temperature, (first + number) * STRIDE)
            found.append(margins(drawn))
            states.append(own[number, kept])
    return torch.cat(states), torch.cat(found)


def examine(
    policy: Policy, prompt: str, rows: Sequence[Sequence[int]], proof: bytes, agreed: Agreed, seed: int
) -> dict[str, Evidence]:
    """Measure how far ``proof`` and the tokens are from what ``policy`` computes for them, by fingerprint.

    Raises ValueError as `read`; faults of the proof are in the evidence.
    """
    states, found = read(policy, prompt, rows, agreed, seed)
    return {ACTIVATIONS.name: ACTIVATIONS.compare(proof, states), SAMPLING.name: SAMPLING.measured(found)}


def width_of(policy: Policy) -> int:
    """Return the width of the last hidden state."""
    return int(getattr(output_head(policy.module), "weight").shape[1])  # noqa: B009


def dtype_of(policy: Policy) -> str:
    """Return the dtype of the policy's module, such as "float32"."""
    return _name(next(policy.module.parameters()).dtype)


def kernel_of(policy: Policy) -> str:
    """Return what computes ``policy``, such as "torch 2.13.0+cpu, cpu AVX512"."""
    device = next(policy.module.parameters()).device
    kind = f" {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else ""
    if device.type == "cuda":
        kind = " {}.{}".format(*torch.cuda.get_device_capability(device))
    return f"torch {torch.__version__}, {device.type}{kind}"[:64]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

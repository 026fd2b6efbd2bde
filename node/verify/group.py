"""Groups of completions that can be checked: how they are written, and examined.

Both go in the same parts, so that only rounding may differ. A group is written at most `PART`
completions at a time, each row with the same prompt, so nothing is padded before it. Token number s
of completion number r is drawn by Gumbel-max with the noise of position r * STRIDE + s of the
claim's seed.

Autocast of the caller is off meanwhile, as it is a thread's: author and verifier compute in the
dtype of the weights, unless the policy itself chooses another.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.node.rl.policy import Choose, Completion, Policy
from shoal.node.verify.material import Agreed
from shoal.verification.fingerprints.activations import ActivationProof
from shoal.verification.fingerprints.fingerprint import Evidence
from shoal.verification.fingerprints.last_hidden import LastHidden
from shoal.verification.fingerprints.sampling import Drawn, SeededSampling, draw_each, margins

PART = 16
"""Completions in one call of the module, at most."""
TOKENS_PER_CALL = 4096
"""Of completions in one call of the module, which bounds the memory for logits."""
STRIDE = 1 << 20
"""Positions of a completion in the noise."""
MAX_KERNEL_CHARS = 64
ACTIVATIONS = ActivationProof()
SAMPLING = SeededSampling()


def completions_per_call(agreed: Agreed) -> int:
    """Return how many completions go into one call of the module."""
    return max(1, min(PART, TOKENS_PER_CALL // agreed.max_tokens))


@dataclass(frozen=True)
class WrittenGroup:
    """Completions of one prompt, the states (n, width) of their n tokens, row after row, and the
    dtype of the computation.
    """

    completions: list[Completion]
    states: Tensor
    dtype: str


@torch.no_grad()
def write(policy: Policy, prompt: str, agreed: Agreed, seed: int) -> WrittenGroup:
    """Write ``agreed.group`` completions of ``prompt``."""
    written: list[Completion] = []
    states: list[Tensor] = []
    dtype = ""
    for first in range(0, agreed.group, completions_per_call(agreed)):
        count = min(completions_per_call(agreed), agreed.group - first)
        with _without_autocast(policy), LastHidden(policy.module) as hidden:
            part = policy.generate(
                [prompt] * count,
                1,
                temperature=agreed.temperature,
                max_tokens=agreed.max_tokens,
                seed=0,
                choose=_chooser(seed, agreed.temperature, first),
            )
        found = hidden.states()
        dtype = _name(hidden.dtype)
        written += [one for (one,) in part]
        states += [row[: len(one.tokens)] for row, (one,) in zip(found, part, strict=True)]
    return WrittenGroup(written, torch.cat(states), dtype)


def _without_autocast(policy: Policy) -> contextlib.AbstractContextManager[object]:
    device = next(policy.module.parameters()).device.type
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def _chooser(seed: int, temperature: float, first: int) -> Choose:
    steps = itertools.count()

    def choose(logits: Tensor) -> Tensor:
        step = next(steps)
        positions = range(first * STRIDE + step, (first + len(logits)) * STRIDE + step, STRIDE)
        return draw_each(logits, seed.to_bytes(8, "big"), positions, temperature)

    return choose


@torch.no_grad()
def read(
    policy: Policy, prompt: str, rows: Sequence[Sequence[int]], agreed: Agreed, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the own states (n, width) of the n tokens of all ``rows``, and their margins (n,) with
    ``seed``, by prefills.

    Raises ValueError if the policy's numbers for these tokens are not finite, or it cannot read so
    many tokens.
    """
    states: list[Tensor] = []
    found: list[Tensor] = []
    for first in range(0, len(rows), completions_per_call(agreed)):
        part = rows[first : first + completions_per_call(agreed)]
        with _without_autocast(policy), LastHidden(policy.module, every=True) as hidden:
            logits, mask = policy.logits([prompt] * len(part), part)
        own = hidden.states()[:, -logits.shape[1] :]
        for number, row in enumerate(part):
            if int(mask[number].sum()) != len(row):
                raise ValueError(f"the policy cannot read {len(row)} tokens")
            kept = slice(0, len(row))
            tokens = torch.tensor(list(row), dtype=torch.int64, device="cpu")
            drawn = Drawn(
                tokens,
                logits[number, kept],
                seed.to_bytes(8, "big"),
                agreed.temperature,
                (first + number) * STRIDE,
            )
            found.append(margins(drawn))
            states.append(own[number, kept])
    return torch.cat(states), torch.cat(found)


def examine(
    policy: Policy,
    prompt: str,
    rows: Sequence[Sequence[int]],
    proof: bytes,
    agreed: Agreed,
    seed: int,
) -> dict[str, Evidence]:
    """Measure how far ``proof`` and the tokens are from what ``policy`` computes for them, by
    fingerprint.

    Raises ValueError as `read`; faults of the proof are in the evidence.
    """
    states, found = read(policy, prompt, rows, agreed, seed)
    return {
        ACTIVATIONS.name: ACTIVATIONS.compare(proof, states),
        SAMPLING.name: SAMPLING.measured(found),
    }


def dtype_of(policy: Policy) -> str:
    return _name(next(policy.module.parameters()).dtype)


def kernel_of(policy: Policy) -> str:
    """Return what computes ``policy``, such as "torch 2.13.0+cpu, cpu AVX512"."""
    device = next(policy.module.parameters()).device
    kind = ""
    if device.type == "cpu":
        kind = f" {torch.backends.cpu.get_cpu_capability()}"
    elif device.type == "cuda":
        kind = " {}.{}".format(*torch.cuda.get_device_capability(device))
    return f"torch {torch.__version__}, {device.type}{kind}"[:MAX_KERNEL_CHARS]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

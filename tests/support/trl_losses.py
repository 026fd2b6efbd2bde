"""The losses and advantages of trl on drawn cases, for comparison with ours.

    python -m tests.support.trl_losses > tests/optim/rl/trl_numbers.json

records what the installed trl computes; nothing of its code is used but by running its trainer.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from types import MethodType
from typing import Any

CASES = 60
MAX_TOKENS = 8
GROUP = 4
GSPO = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
LUSPO = {"importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3}
GRPOConfig = dict[str, Any]

ROWS: dict[str, GRPOConfig] = {
    "grpo": {"loss_type": "grpo"},
    "grpo of all tokens": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", **GSPO},
    "luspo": {"loss_type": "luspo", **LUSPO},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "soft_gate": {"loss_type": "sapo"},
    "delta": {"loss_type": "grpo", "delta": 1.5},
    "kl": {"loss_type": "grpo", "beta": 0.04},
    "off_policy_mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
    "entropy": {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01},
}
"""What the trainer is given for each of our losses and terms; the rest are its defaults."""
SCALES = ("group", "batch", "none")


def drawn_case(row: str, number: int) -> dict[str, list[Any]]:
    """Draw three completions of one to four tokens, the same on every machine and version."""
    source = random.Random(f"{row} {number}")
    narrow = 0.002 if row in ("gspo", "luspo") else 0.4
    spread = source.choice((narrow, 4 * narrow))
    lengths = [source.randint(1, 4) for _ in range(3)]

    def rows(mean: float, deviation: float) -> list[list[float]]:
        return [[source.gauss(mean, deviation) for _ in range(4)] for _ in range(3)]

    new = [[-abs(value) for value in row] for row in rows(0, 1.5)]
    moved, referred = rows(0, spread), rows(0, 0.4)
    return {
        "new": new,
        "writer": added(new, moved),
        "reference": added(new, referred),
        "entropy": [[abs(value) for value in row] for row in rows(1, 0.5)],
        "mask": [[place < length for place in range(4)] for length in lengths],
        "advantages": [source.gauss(0, 1) for _ in range(3)],
    }


def added(ones: list[list[float]], others: list[list[float]]) -> list[list[float]]:
    """Return the sums of two tables."""
    return [
        [a + b for a, b in zip(one, other, strict=True)]
        for one, other in zip(ones, others, strict=True)
    ]


def drawn_rewards(number: int) -> list[float]:
    """Draw rewards of two groups; in some all are equal."""
    source = random.Random(f"rewards {number}")
    kinds = ((0.0, 1.0), (0.0, 0.25, 0.5, 1.0), (source.random(),))
    rewards: list[float] = []
    for _ in range(2):
        kind = source.choice(kinds)
        rewards += [source.choice(kind) for _ in range(GROUP)]
    return rewards


def trainer(folder: str, beta: float = 0.0, **config: Any) -> Any:
    """Make trl's trainer of a model with 28 words."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    letters = {letter: number for number, letter in enumerate("_.abcdefghijklmnopqrstuvwxyz")}
    core = Tokenizer(models.WordLevel(letters, unk_token="_"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="_", eos_token=".", unk_token="_"
    )
    shape = {"n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 1}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(letters), eos_token_id=1, pad_token_id=0, **shape)
    )
    made = GRPOTrainer(
        model,
        lambda completions, **kwargs: [0.0] * len(completions),
        GRPOConfig(
            folder,
            per_device_train_batch_size=2 * GROUP,
            num_generations=GROUP,
            max_completion_length=MAX_TOKENS,
            report_to=[],
            use_cpu=True,
            bf16=False,
            **config,
        ),
        train_dataset=Dataset.from_list([{"prompt": "b"}, {"prompt": "c"}]),
        processing_class=tokenizer,
    )
    # Not at first: it would look for the model of the reference, which is not needed here.
    made.beta = beta
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def trl_loss(made: Any, case: dict[str, list[Any]]) -> list[float]:
    """Return the trainer's loss of ``case``, and its gradient by each token, row by row."""
    import torch

    tensors = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in case.items()}
    new = tensors["new"].requires_grad_()
    entropy = tensors["entropy"].requires_grad_()
    mask = tensors["mask"].long()

    def given(self: Any, *args: Any, **kwargs: Any) -> Any:
        return new, entropy, None

    made._get_per_token_logps_and_entropies = MethodType(given, made)
    loss = made._compute_loss(
        made.model,
        {
            "prompt_ids": mask[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": tensors["advantages"],
            "old_per_token_logps": tensors["writer"],
            "sampling_per_token_logps": tensors["writer"],
            "ref_per_token_logps": tensors["reference"],
            "num_items_in_batch": mask.sum(),
        },
    )
    loss.backward()
    numbers = [loss.item(), *new.grad[mask.bool()].tolist()]
    if entropy.grad is not None:
        numbers += entropy.grad[mask.bool()].tolist()
    return numbers


def trl_advantages(made: Any, rewards: list[float]) -> list[float]:
    """Return the trainer's advantages of completions with these ``rewards``."""
    import torch

    def given(self: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.tensor(rewards, dtype=torch.float64)[:, None]

    made._calculate_rewards = MethodType(given, made)
    asked = [{"prompt": prompt} for prompt in "b" * GROUP + "c" * GROUP]
    return made._generate_and_score_completions(asked)["advantages"].tolist()


def computed() -> dict[str, Any]:
    """Return all numbers of the installed trl, by row, and its version."""
    import trl

    losses: dict[str, list[list[float]]] = {}
    advantages: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row, config in ROWS.items():
            made = trainer(folder, **config)
            losses[row] = [trl_loss(made, drawn_case(row, number)) for number in range(CASES)]
        for scale in SCALES:
            made = trainer(folder, scale_rewards=scale)
            advantages[scale] = [
                trl_advantages(made, drawn_rewards(number)) for number in range(CASES)
            ]
    return {"trl": trl.__version__, "losses": losses, "advantages": advantages}


def rounded(value: Any) -> Any:
    """Return ``value`` with 12 digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return value


if __name__ == "__main__":
    json.dump(rounded(computed()), sys.stdout, separators=(",", ":"))
    print()

"""Muon and AdamW as one inner optimizer of a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shoal.optim.inner.split import split
from shoal.optim.outer.inner import Combined

LR, MOMENTUM, WEIGHT_DECAY, BETAS = 0.02, 0.9, 0.0, (0.9, 0.95)
"""What docs/methods.md measured ("The inner optimizer: Muon")."""


def muon(
    model: nn.Module,
    *,
    lr: float = LR,
    adamw_lr: float | None = None,
    momentum: float = MOMENTUM,
    weight_decay: float = WEIGHT_DECAY,
    matrices: Iterable[str] | None = None,
) -> torch.optim.Optimizer:
    """Return one optimizer that trains the hidden matrices of ``model`` by ``torch.optim.Muon``, and all else by AdamW.

        opt = NoLoCo(muon(model), exchange, every=50)

    It has two parameter groups, Muon's first; a scheduler changes the rates of both. An outer optimizer averages in the model's
    order of parameters. Hand in a model of DDP or FSDP2 after it is wrapped: Muon works on whole matrices, however they are cut.

    Args:
        lr: learning rate of Muon, with Nesterov momentum; torch multiplies it by ``sqrt(max(1, rows / columns))`` of each matrix.
        adamw_lr: learning rate of AdamW, with betas (0.9, 0.95); None: ``lr``.
        momentum: Muon's.
        weight_decay: of both, decoupled: a step takes ``lr * weight_decay`` of each weight away.
        matrices: names of the parameters that Muon trains; None: those of ``hidden_matrices``.

    Raises:
        ValueError: there is no matrix for Muon, a name in ``matrices`` is not that of a trained one, or torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"PyTorch {torch.__version__} has no Muon: install 2.9 or newer, or choose AdamW")
    found = split(model, matrices)
    named: dict[str, Tensor] = dict(model.named_parameters())
    ours, others = ([named[name] for name in names] for names in (found.muon, found.adamw))
    parts: list[torch.optim.Optimizer] = [_muon(ours, lr, momentum, weight_decay)]
    if others:
        # The fused kernel halves AdamW's time on the CPU; elsewhere torch chooses.
        fused = True if all(p.device.type == "cpu" for p in others) else None
        rate = lr if adamw_lr is None else adamw_lr
        parts.append(torch.optim.AdamW(others, lr=rate, betas=BETAS, weight_decay=weight_decay, fused=fused))
    return Combined(parts, order=list(named.values()))


def _muon(matrices: list[Tensor], lr: float, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    kind = torch.optim.Muon
    if any(hasattr(matrix, "full_tensor") for matrix in matrices):
        from shoal.optim.inner.whole_matrices import WholeMuon

        kind = WholeMuon
    return kind(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay)

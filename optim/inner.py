"""Muon and AdamW as one inner optimizer: Muon trains the matrices of hidden layers, AdamW the rest.

    opt = NoLoCo(muon(model), exchange, every=50)

The rule is that of Muon's author (https://kellerjordan.github.io/posts/muon/): no embeddings, no
output layer, no vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.optim.layers import hidden_matrices
from shoal.optim.outer.inner import Combined
from shoal.optim.outer.sharded import local
from shoal.optim.ranks.rank_weights import cut_like

if TYPE_CHECKING:
    from torch.optim import Muon
else:
    # It came with 2.9, and all else here needs no more than 2.7.
    Muon = getattr(torch.optim, "Muon", torch.optim.Optimizer)


@dataclass(frozen=True)
class Split:
    """The trained parameters of a model by name, in its order, each with its number of values."""

    muon: dict[str, int]
    adamw: dict[str, int]

    def __str__(self) -> str:
        """Return how many values each trains, in how many parameters."""
        return (
            f"Muon trains {_counted(self.muon, 'matrix', 'matrices')}, AdamW "
            f"{_counted(self.adamw, 'tensor', 'tensors')}"
        )


def _counted(counts: dict[str, int], one: str, several: str) -> str:
    kind = one if len(counts) == 1 else several
    return f"{sum(counts.values()):,} parameters ({len(counts)} {kind})"


def split(model: nn.Module, matrices: Iterable[str] | None = None) -> Split:
    """Return which parameters Muon and AdamW train.

    ``matrices``: names of Muon's; None: those of ``hidden_matrices``.

    Raises:
        ValueError: a name is no trained matrix of the model, or there is none.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for name in hidden_matrices(model) if matrices is None else matrices:
        if name not in every:
            raise ValueError(f"the model has no parameter {name!r}, which Muon is to train")
        if every[name].ndim != 2:
            shape = "x".join(map(str, every[name].shape)) or "one number"
            raise ValueError(
                f"the parameter {name!r}, which Muon is to train, is not a matrix ({shape}): leave "
                "it to AdamW"
            )
        if not every[name].requires_grad:
            raise ValueError(
                f"the parameter {name!r}, which Muon is to train, is frozen: leave it to AdamW"
            )
        chosen.add(id(every[name]))
    if not chosen:
        raise ValueError(
            "the model has no matrix for Muon (weights of hidden layers that are trained): choose "
            "AdamW, or name its matrices"
        )
    found = Split({}, {})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = found.muon if id(parameter) in chosen else found.adamw
            own[name] = parameter.numel()
    return found


OPTIONS = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
)
"""Muon's own settings; a group that was loaded, or that an outer optimizer wraps, has more."""


class _InFloat32(TorchFunctionMode):
    """Keeps in float32 what would be rounded to bfloat16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)  # torch's Muon scales it in place
        return func(*args, **(kwargs or {}))


class Float32Muon(Muon):
    """``torch.optim.Muon`` with Newton and Schulz's iteration in float32.

    Torch's own iterates in bfloat16, which many CPUs have no instructions for: a step of 0.27
    million parameters took 81 ms on such a one, and 9 ms in float32.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of every parameter that has a gradient."""
        loss = _evaluated(closure)
        with _InFloat32():
            unwrap(Muon.step)(self)  # hooks are run by this step's own wrapper
        return loss


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class WholeMuon(Muon):
    """``torch.optim.Muon`` with the bits of one process, however its matrices are cut.

    Each step gathers one matrix at a time. Torch's own would orthogonalise across processes, in
    bfloat16 sums of another order and with messages in every product. Each process computes the
    whole step, and keeps its part of weight and momentum; besides it holds one whole matrix, three
    times. All processes call ``step`` at the same time, with the same gradients set.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of every parameter that has a gradient."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            options = {name: group[name] for name in OPTIONS}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, options)
        return loss

    def _step_of(self, parameter: Tensor, options: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)  # type: ignore[arg-type]
        momentum = state["momentum_buffer"]
        whole = torch.nn.Parameter(_whole(parameter))
        whole.grad = _whole(parameter.grad)
        once = _kind([whole])([whole], **options)
        once.state[whole]["momentum_buffer"] = _whole(momentum)
        once.step()  # type: ignore[no-untyped-call]
        moved = once.state[whole]["momentum_buffer"]
        local(parameter).copy_(local(cut_like(whole.detach(), parameter)))
        local(momentum).copy_(local(cut_like(moved, momentum)))


def _kind(matrices: list[Tensor]) -> type[Muon]:
    on_cpu = all(matrix.device.type == "cpu" for matrix in matrices)
    return Float32Muon if on_cpu else Muon


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


LR = 0.02
"""Learning rate of both, as docs/methods.md measured ("The inner optimizer: Muon"); so the rest."""
MOMENTUM = 0.9
"""Muon's, in Nesterov's form."""
WEIGHT_DECAY = 0.0
"""Of both, decoupled."""
BETAS = (0.9, 0.95)
"""AdamW's."""


def muon(
    model: nn.Module,
    *,
    lr: float = LR,
    adamw_lr: float | None = None,
    momentum: float = MOMENTUM,
    weight_decay: float = WEIGHT_DECAY,
    matrices: Iterable[str] | None = None,
) -> torch.optim.Optimizer:
    """Return one optimizer that trains hidden matrices by ``torch.optim.Muon``, the rest by AdamW.

        opt = NoLoCo(muon(model), exchange, every=50)

    It has two parameter groups, Muon's first; a scheduler changes the rates of both. Hand in a
    model of DDP or FSDP2 after it is wrapped: Muon works on whole matrices, however they are cut.
    On a CPU Muon iterates in float32, elsewhere in bfloat16, as torch does.

    Args:
        lr: learning rate of Muon, with Nesterov momentum; torch multiplies it by ``sqrt(max(1, rows
            / columns))`` of each matrix.
        adamw_lr: learning rate of AdamW, with betas (0.9, 0.95); None: ``lr``.
        momentum: Muon's.
        weight_decay: of both, decoupled: a step takes ``lr * weight_decay`` of each weight away.
        matrices: names of the parameters that Muon trains; None: those of ``hidden_matrices``.

    Raises:
        ValueError: there is no matrix for Muon, a name in ``matrices`` is not that of a trained
            one, or torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"PyTorch {torch.__version__} has no Muon: install 2.9 or newer, or choose AdamW"
        )
    found = split(model, matrices)
    named: dict[str, Tensor] = dict(model.named_parameters())
    ours = [named[name] for name in found.muon]
    others = [named[name] for name in found.adamw]
    cut = any(hasattr(matrix, "full_tensor") for matrix in ours)
    kind = WholeMuon if cut else _kind(ours)
    parts: list[torch.optim.Optimizer] = []
    parts.append(kind(ours, lr=lr, momentum=momentum, weight_decay=weight_decay))
    if others:
        # The fused kernel halves AdamW's time on the CPU; elsewhere torch chooses.
        on_cpu = all(parameter.device.type == "cpu" for parameter in others)
        adamw = torch.optim.AdamW(
            others,
            lr=lr if adamw_lr is None else adamw_lr,
            betas=BETAS,
            weight_decay=weight_decay,
            fused=True if on_cpu else None,
        )
        parts.append(adamw)
    return Combined(parts)

"""What the settings make a policy minimise: a loss by name, or a function of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor

from shoal.node.config.rl_settings import RLSettings
from shoal.node.config.settings import ConfigError
from shoal.node.tasks.user_class import find_function
from shoal.node.user_code import UserCodeError, calling
from shoal.optim.methods import one_of
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.losses import LOSSES, MEANS, TokenLoss
from shoal.optim.rl.objective import Objective


class UserLoss:
    """Loss of the user's own as Shoal calls it: what it raises, or returns wrongly, is a
    UserCodeError that names the line.
    """

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self.user_subject = f"Your loss {function.__name__!r}"

    def __call__(self, batch: Completions) -> Tensor:
        with calling(self, f"{self._function.__name__}()"):
            terms = self._function(batch)
        expected = tuple(batch.new.shape)
        if not isinstance(terms, Tensor):
            raise self._wrong(f"a {type(terms).__name__}", expected)
        if tuple(terms.shape) != expected:
            raise self._wrong(f"the shape {tuple(terms.shape)}", expected)
        if batch.new.requires_grad and not terms.requires_grad:
            raise self._wrong("numbers without a gradient", expected)
        if not bool((terms.isfinite() | ~batch.mask).all()):
            raise self._wrong("a number that is not finite", expected)
        return terms

    def _wrong(self, returned: str, expected: tuple[int, ...]) -> UserCodeError:
        code = self._function.__code__
        return UserCodeError(
            f"{self.user_subject} ({Path(code.co_filename).name}, line {code.co_firstlineno}) "
            f"returned {returned}: it must return one finite number for each token, made from "
            f"batch.new, of its shape {expected}."
        )


def load_loss(spec: str) -> TokenLoss:
    """Return the loss that ``rl.loss`` names. Raises HookError or UserCodeError."""
    if spec in LOSSES:
        return LOSSES[spec]
    loss = UserLoss(find_function(spec, "loss"))
    loss(_tried())
    return loss


def _tried() -> Completions:
    """Return two completions, on which a fault shows before anything is trained."""
    new = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]], device="cpu", requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]], device="cpu")
    known = new.detach()
    advantages = torch.tensor([1.0, -1.0], device="cpu")
    return Completions(new, known, mask, advantages, known, known, -known)


def make_objective(rl: RLSettings, name: str, loss: TokenLoss, max_tokens: int) -> Objective:
    """Return the objective of the settings with ``loss``, which is called ``name``.

    ``max_tokens``: of a completion. Raises ConfigError for ``rl.delta`` with a loss that has none.
    """
    if rl.delta is not None:
        if not _has_delta(loss):
            having = one_of(name for name, loss in LOSSES.items() if _has_delta(loss))
            raise ConfigError(
                f"The loss {name!r} has no two-sided clipping: leave rl.delta out, or choose "
                f"rl.loss={having}."
            )
        clips: Callable[..., Tensor] = loss
        loss = functools.partial(clips, delta=rl.delta)
    return Objective(
        loss,
        per=rl.per or MEANS.get(name, "token"),
        max_tokens=max_tokens,
        kl_coef=rl.kl_coef,
        entropy_coef=rl.entropy_coef,
        off_policy_mask=rl.off_policy_mask,
    )


def _has_delta(loss: TokenLoss) -> bool:
    return "delta" in inspect.signature(loss).parameters

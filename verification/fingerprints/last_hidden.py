"""Recorder of the last hidden state of any torch module.

    with LastHidden(model, every=True) as hidden:
        model(tokens)
    hidden.states()                        # (batch, positions, width)

It is a hook on what the logits are made of.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class LastHidden:
    """Recorder of the last hidden state while it is open.

    With ``every=False`` only the last position of each call is kept. That is what a generation
    needs that makes one token a call, with a KV cache or without: state i is the one that token i
    was drawn from. With ``every=True`` all positions of all calls are kept, for the one call of a
    prefill. States are kept in their dtype, on their device, outside the graph.

    ``dtype`` is the coarsest that the calls computed in, as seen at the head: of its weights, its
    input, and autocast around it.
    """

    def __init__(self, model: nn.Module, every: bool = False) -> None:
        self._head = output_head(model)
        self._every = every
        self._kept: list[Tensor] = []
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._dtypes = {each.dtype for each in self._head.parameters() if each.is_floating_point()}

    def __enter__(self) -> LastHidden:
        self._hook = self._head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _keep(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        state = inputs[0].detach() if inputs and isinstance(inputs[0], Tensor) else None
        if state is None or state.dim() not in (2, 3):
            raise ValueError(
                "the layer that makes the logits was not given states of shape (batch, positions, "
                "width)"
            )
        if state.dim() == 2:  # some models pass the last position alone
            state = state.unsqueeze(1)
        self._dtypes.add(state.dtype)
        kind = state.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            self._dtypes.add(torch.get_autocast_dtype(kind))
        # A view of the last position would keep the whole prompt's states alive.
        self._kept.append(state.clone() if self._every else state[:, -1:].clone())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation. Raises ``ValueError`` if no call was recorded."""
        if not self._kept:
            raise ValueError("the model was not called while its hidden states were recorded")
        return max(self._dtypes, key=lambda dtype: (torch.finfo(dtype).eps, str(dtype)))

    def states(self) -> Tensor:
        """Return the states (batch, positions, width) of all calls so far.

        Raises ``ValueError`` if there were none.
        """
        if not self._kept:
            raise ValueError("the model was not called while its hidden states were recorded")
        return torch.cat(self._kept, dim=1)


def output_head(model: nn.Module) -> nn.Module:
    """Return the layer that turns the last hidden state into logits: what
    ``model.get_output_embeddings()`` returns, as with Hugging Face's models, or else the
    ``nn.Linear`` that was registered last. Raises ``ValueError`` if there is none.
    """
    getter = getattr(model, "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    if isinstance(found, nn.Module):
        return found
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError(
            "the model has no linear layer: let its get_output_embeddings() return the layer that "
            "makes the logits"
        )
    return linear[-1]

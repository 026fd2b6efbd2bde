"""The state that a session's swarm averages, and an optimizer for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.optim.parameters import AveragedParameters
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.training.session_setup import SessionError


@dataclass(frozen=True)
class AveragedState:
    """What was handed in as state."""

    params: AveragedParameters
    """In the order of all peers."""
    model: nn.Module | None
    """None: the parameters were handed in as a list."""
    fragments: list[list[Tensor]]
    """The parameters of each fragment, where the swarm's manifest says them; else empty."""
    digest: str

    @classmethod
    def of(
        cls, params: AveragedParameters, model: nn.Module | None, fragment_of: Sequence[int]
    ) -> AveragedState:
        """Return the state cut as the manifest says: ``fragment_of`` each parameter, or empty.

        SessionError if it is of another number of parameters.
        """
        if fragment_of and len(fragment_of) != len(params):
            raise SessionError(
                f"The swarm's manifest divides {len(fragment_of)} parameters into fragments, not "
                f"{len(params)}: make it anew."
            )
        fragments = [
            [p for p, at in zip(params, fragment_of, strict=True) if at == n]
            for n in sorted({*fragment_of})
        ]
        return cls(params, model, fragments, model_digest(params))

    def check_can_be_cut(self, fragments: int | None) -> None:
        """Raise SessionError if it cannot be cut by layer into the swarm's ``fragments``."""
        if not self.fragments and self.model is None and (fragments or 1) > 1:
            raise SessionError(
                "The swarm cuts the model by layer: hand in the module as state, not a list of its "
                "parameters."
            )

    def check_trained(self, parameters: AveragedParameters) -> None:
        """Raise SessionError unless ``parameters``, an optimizer's, are those of this state."""
        lacking, more = self.params.compared(parameters)
        if len(lacking) == len(self.params):
            raise SessionError(
                "None of the optimizer's parameters is in the session's state: make it of the "
                "model that is handed in as state, both after the model is moved, cast or wrapped."
            )
        if lacking:
            raise SessionError(
                f"The optimizer trains {len(self.params) - len(lacking)} of the "
                f"{len(self.params)} parameters of the session's state, and not {lacking[0]}: "
                "hand in as state what it trains, or let it train the rest too (in several "
                "optimizers, as a list)."
            )
        if more:
            raise SessionError(
                f"The optimizer trains {len(more)} parameters that are not in the session's state, "
                f"such as one of shape {tuple(more[0].shape)}: hand in the whole model as state, "
                "or exclude them (exclude=[...])."
            )

"""The state of codecs with error feedback while a contribution is in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Rejectable(Protocol):
    """Codec with error feedback, which must be given the outcome of the contribution that it encoded last."""

    @property
    def pending(self) -> bool:
        """True between ``encode`` and ``accepted`` or ``rejected``."""
        ...

    def accepted(self) -> None:
        """Note that the contribution is in a mean."""
        ...

    def rejected(self, applied: Sequence[Tensor]) -> None:
        """Put a contribution that is in no mean, less ``applied`` (given to the rule in its place), back into the residual."""
        ...

    def state_dict(self, unsent: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """Return the state; with ``unsent`` as ``rejected(unsent)`` would leave it."""
        ...


@runtime_checkable
class Resendable(Rejectable, Protocol):
    """Codec with error feedback whose contribution in flight can be saved, and sent again as it was."""

    @property
    def payload(self) -> Tensor | None:
        """What was encoded and awaits its outcome."""
        ...

"""What saving and loading an outer optimizer needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shoal.optim.codecs.base import Codec


@runtime_checkable
class Stateful(Protocol):
    """A codec that may have a memory."""

    def fresh(self) -> Codec:
        """The same codec with an empty memory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The memory, as copies."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        ...


@runtime_checkable
class Rejectable(Protocol):
    """A codec with error feedback, which must know what became of the contribution that it encoded last."""

    @property
    def pending(self) -> bool:
        """True between ``encode`` and the news of its outcome."""
        ...

    def accepted(self) -> None:
        """It is in a mean."""
        ...

    def rejected(self, applied: Sequence[Tensor]) -> None:
        """It reached nobody, and the rule was given ``applied`` instead: take back into the memory what is still owed then."""
        ...

    def state_dict(self, unsent: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """The memory; with ``unsent`` as ``rejected(unsent)`` would leave it."""
        ...


def codec_state(codec: Codec, unsent: Sequence[Tensor] | None) -> dict[str, Any]:
    """A codec's state for saving. ``unsent``: a contribution in flight, which will be sent again with the next one."""
    if unsent is not None and isinstance(codec, Rejectable) and codec.pending:
        return codec.state_dict(unsent)
    return codec.state_dict() if isinstance(codec, Stateful) else {}


def fresh(codec: Codec) -> Codec:
    """The same codec with an empty memory, for another fragment or a new start; itself if it has none."""
    return codec.fresh() if isinstance(codec, Stateful) else codec

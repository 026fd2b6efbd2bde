"""The outer optimizer of all ranks as rank 0 shows it to the swarm and to checkpoints: whole weights, and one round number.

It has the names of ``OuterOptimizer`` that a node uses between two steps. A call that needs the weights is an order to the other
ranks first, each of which makes the same call of `shoal.optim.ranks.whole`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.node.parallel.channel import Channel
from shoal.optim import OuterOptimizer
from shoal.optim.ranks import whole


class LeadOptimizer:
    """View of rank 0's ``opt``; all that is not here is that optimizer's own."""

    def __init__(self, opt: OuterOptimizer, channel: Channel) -> None:
        self._opt, self._channel = opt, channel
        self.gathers = 0
        """How often whole weights were gathered: those of one time are other tensors than those of another."""

    def __getattr__(self, name: str) -> Any:
        """Return what all ranks have in common: numbers, shapes, rule and schedule."""
        return getattr(self._opt, name)

    @property
    def round(self) -> int:
        """Number of the next exchange, which the other ranks take from here with each one."""
        return self._opt.round

    @round.setter
    def round(self, round: int) -> None:
        self._opt.round = round

    @property
    def slow(self) -> list[Tensor]:
        """The whole slow weights, gathered now, on the CPU."""
        self._channel.send("whole_slow")
        self.gathers += 1
        return whole.whole_slow(self._opt)

    @property
    def shared(self) -> dict[str, list[Tensor]]:
        """The whole shared state, gathered now, on the CPU."""
        self._channel.send("whole_shared")
        return whole.whole_shared(self._opt)

    def slow_of(self, fragment: int) -> list[Tensor]:
        """Return the whole slow weights of a fragment, gathered now."""
        self._channel.send("whole_slow_of", fragment=fragment)
        return whole.whole_slow_of(self._opt, fragment)

    def sketch_of(self, fragment: int) -> tuple[float, ...]:
        """Return the sketch of the slow weights of a fragment."""
        self._channel.send("sketch_of", fragment=fragment)
        return self._opt.sketch_of(fragment)

    def adopt(
        self,
        slow: Sequence[Tensor],
        *,
        round: int,
        into_model: bool = False,
        shared: Mapping[str, Sequence[Tensor]] | None = None,
        applied: Sequence[int] | None = None,
        rebase: Collection[int] = (),
    ) -> list[int]:
        """Adopt whole weights of the swarm on all ranks, as ``OuterOptimizer.adopt`` does."""
        self._channel.send("adopt")
        return whole.adopt(self._opt, slow, round=round, into_model=into_model, shared=shared, applied=applied, rebase=rebase)


def obey(opt: OuterOptimizer, name: str, fields: Mapping[str, Any]) -> None:
    """Make the call that rank 0 makes. ValueError if there is no such order."""
    if name == "whole_slow":
        whole.whole_slow(opt)
    elif name == "whole_slow_of":
        whole.whole_slow_of(opt, fields["fragment"])
    elif name == "whole_shared":
        whole.whole_shared(opt)
    elif name == "sketch_of":
        opt.sketch_of(fields["fragment"])
    elif name == "adopt":
        whole.adopt(opt)
    else:
        raise ValueError(f"rank 0 has sent an unknown order {name!r}")

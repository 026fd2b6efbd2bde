"""What rank 0 of a peer has the other ranks do: one small message after another.

What a node or a session does between two steps (to answer peers, to take over weights, to save) only rank 0 can know, and it needs
all ranks where it needs whole weights. So rank 0 does it with a ``LeadOptimizer``, whose calls are orders to the others, which
``obey`` meanwhile: each makes the same call of `shoal.optim.ranks.whole`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.optim.ranks import whole
from shoal.optim.ranks.group import RankFailed, RankGroup, RankLost

if TYPE_CHECKING:
    from shoal.optim.outer.optimizer import OuterOptimizer

FRAME = 256  # bytes of a message that need no second one
IDLE_S = 2 * 86400.0
LAST, FAILED = "return", "failed"


class Channel(RankGroup):
    """Messages from rank 0 to all others, in order. Every rank of ``group`` makes it at the same point.

    A rank that waits here is idle: it has nothing to do while rank 0 waits for peers, downloads weights or evaluates. So a wait may
    be as long as ``IDLE_S``, but not for a rank that died: its connections close, and the wait ends with RankLost.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group.joined(IDLE_S), timeout=IDLE_S)

    def send(self, name: str, **fields: Any) -> None:
        """Send a command with JSON fields; for rank 0."""
        body = json.dumps([name, fields]).encode()
        frame = torch.zeros(FRAME, dtype=torch.uint8, device="cpu")
        head = len(body).to_bytes(8, "big") + body[: FRAME - 8]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.spread(frame, 0)
        if len(body) > FRAME - 8:
            self.spread(torch.frombuffer(bytearray(body[FRAME - 8 :]), dtype=torch.uint8), 0)

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Return the next command; for the other ranks. RankFailed if it is that rank 0 has failed."""
        frame = torch.zeros(FRAME, dtype=torch.uint8, device="cpu")
        data = self.spread(frame, 0).numpy().tobytes()
        length = int.from_bytes(data[:8], "big")
        body = data[8 : 8 + length]
        if length > len(body):
            rest = torch.zeros(length - len(body), dtype=torch.uint8, device="cpu")
            body += self.spread(rest, 0).numpy().tobytes()
        name, fields = json.loads(body)
        if name == FAILED:
            raise RankFailed(0, fields["said"])
        return name, fields

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Release the others, which ``follow``, at the end of the block, or tell them what it raised; for rank 0."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankLost):
                with suppress(RankLost):
                    self.send(FAILED, said=str(error) or type(error).__name__)
            raise
        self.send(LAST)

    def follow(self, obey: Callable[[str, dict[str, Any]], None], last: str = LAST) -> None:
        """Obey rank 0's commands up to ``last``; for the other ranks."""
        while True:
            name, fields = self.receive()
            if name == last:
                return
            obey(name, fields)


class LeadOptimizer:
    """Rank 0's ``opt`` as the swarm and checkpoints see it, with whole weights; what is not here is that optimizer's own."""

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

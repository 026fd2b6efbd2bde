"""What rank 0 has the other ranks do: one small message after another, over gloo.

A rank that waits here is idle: it has nothing to do while rank 0 waits for peers, downloads weights or evaluates. So a wait may be
long, but not for a rank that died: its connections close, and the wait ends with an error.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.node.parallel.ends import RankLostError
from shoal.node.parallel.job import Job

FRAME = 256  # bytes of a message that need no second one
IDLE = timedelta(days=2)


class Channel:
    """Messages from rank 0 to all others, in order. Every rank of the job makes it at the same point."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group = dist.new_group(backend="gloo", timeout=IDLE)

    def send(self, name: str, **fields: Any) -> None:
        """Send a command with JSON fields; for rank 0. RankLostError if a rank is gone."""
        body = json.dumps([name, fields]).encode()
        frame = torch.zeros(FRAME, dtype=torch.uint8, device="cpu")
        head = len(body).to_bytes(8, "big") + body[: FRAME - 8]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(frame)
        if len(body) > FRAME - 8:
            self._broadcast(torch.frombuffer(bytearray(body[FRAME - 8 :]), dtype=torch.uint8))

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Return the next command; for the other ranks. RankLostError if rank 0 is gone."""
        frame = torch.zeros(FRAME, dtype=torch.uint8, device="cpu")
        self._broadcast(frame)
        data = frame.numpy().tobytes()
        length = int.from_bytes(data[:8], "big")
        body = data[8 : 8 + length]
        if length > len(body):
            rest = torch.zeros(length - len(body), dtype=torch.uint8, device="cpu")
            self._broadcast(rest)
            body += rest.numpy().tobytes()
        name, fields = json.loads(body)
        return name, fields

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            dist.broadcast(tensor, 0, group=self._group)
        except RuntimeError as error:
            who = "a rank" if self._job.leads else "rank 0"
            raise RankLostError(f"Rank {self._job.rank} of this node lost {who}: see what that one logged.") from error

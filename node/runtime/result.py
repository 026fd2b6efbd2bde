"""What a node's run came to, as an object and as a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULT = "result.json"


@dataclass
class Result:
    """What a node's run came to; written to ``result.json`` in its folder and printed by --json."""

    name: str
    peer: str
    swarm: str
    method: str
    device: str
    shard: str
    params: int
    steps: int = 0
    rounds: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    loss_local: float | None = None
    """Held-out loss of the same steps on the same shard without any exchange, where it was asked for."""
    exchanges: int = 0
    """Rounds in which a partner's contribution was committed."""
    pairs_none: int = 0
    """Rounds in which nobody answered."""
    suspicious: int = 0
    """Contributions that this node refused because they lay too far away (swarm/defence.py)."""
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    wall_s: float = 0.0
    restarts: int = 0
    """How often the network daemon had to be started again."""
    refused: dict[str, int] = field(default_factory=dict)
    """What of others' was refused, by reason: streams and calls (swarm/entrance.py), and gossiped records (swarm/gossip.py)."""
    task: dict[str, int | float] = field(default_factory=dict)
    """What the task says of it besides (``Task.extra_results``): of text ``bits_per_byte``, ``loss_last`` in bits for each byte,
    which can be compared where tokenizers differ, and of a stream ``skipped``, how often a record could not be used."""
    interrupted: bool = False
    not_saved: str | None = None
    """Why the end of the run could not be saved, if so."""
    rl: dict[str, Any] | None = None
    """What reinforcement learning came to, where that is the task (node/rl/session.py)."""
    verify: dict[str, Any] | None = None
    """What was claimed, checked and found, where nodes verify each other (node/verify/session.py)."""


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)

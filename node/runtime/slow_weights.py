"""The slow weights of a run: their digest for the metrics, and a file of them after each round for ``shoal demo``."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from shoal.optim import OuterOptimizer
from shoal.swarm.exchange.payload import float32_digest

ROUNDS = "rounds"
KEPT = 4_000_000  # values of the slow weights that are kept of a round, about: enough for the distance between nodes


def digest_of(opt: OuterOptimizer, fragment: int) -> str | None:
    """Return a short digest of a fragment's slow weights; None if a round does not leave them equal on all peers."""
    if not opt.anchored or fragment >= opt.fragments:
        return None
    return float32_digest(opt.slow_of(fragment)).hex()[:16]


def keep(opt: OuterOptimizer, folder: Path, number: int) -> None:
    """Write the slow weights after round ``number`` to the folder ``rounds`` in ``folder``: of a large model every so many."""
    rounds = folder / ROUNDS
    rounds.mkdir(exist_ok=True)
    step = -(-sum(tensor.numel() for tensor in opt.slow) // KEPT)
    kept = {str(i): (tensor if step == 1 else tensor.reshape(-1)[::step]).cpu().contiguous() for i, tensor in enumerate(opt.slow)}
    save_file(kept, rounds / f"{number:06d}.safetensors")

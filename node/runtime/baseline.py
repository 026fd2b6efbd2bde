"""The baseline that a run is compared with: the same steps without any exchange."""

from __future__ import annotations

from collections.abc import Callable

from shoal.node.runtime.door import make_task
from shoal.node.runtime.parts import NodeParts
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.manifest.outer import OuterSettings


def train_alone(parts: NodeParts, stop: Callable[[], bool]) -> float | None:
    """Return the held-out loss of the same model, seed, shard and steps without any exchange; None if it was stopped.

    The node's own trainer, whose run is over, loses its gradients and the state of its inner optimizer: with both in memory a node
    that just fits its machine would not fit any more.
    """
    train, own = parts.settings.train, parts.trainer.opt
    own.zero_grad()
    for state in own.inner.state.values():
        state.clear()
    alone = Trainer(make_task(parts.settings), OuterSettings(method="none"), train, own=train, device=parts.device)
    alone.connect(Alone(), "alone", parts.trainer.shard)
    try:
        alone.run(stop=stop)
        return None if stop() else alone.evaluate()
    finally:
        alone.close()

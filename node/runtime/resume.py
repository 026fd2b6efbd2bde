"""The start of a run, from nothing, its own checkpoint or one of another swarm.

In its own swarm a run continues bit by bit (``Trainer.resume``). In another one (--resume-from),
which may have another method, codec or number of peers, it begins anew with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.folder import CheckpointError, steps
from shoal.node.config.node_settings import NodeSettings
from shoal.node.inner_tensors import load_whole_model
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.optim import OuterOptimizer
from shoal.swarm.changes import open_change, settings_at
from shoal.swarm.errors import MessageError
from shoal.swarm.exchange.contribution import float32_digest
from shoal.swarm.manifest import PROTOCOL, Manifest, open_manifest
from shoal.swarm.state.snapshot import State

ROUNDS = "rounds"
# values of the slow weights that are kept of a round, about: enough for the distance between nodes
KEPT = 4_000_000


def digest_of(opt: OuterOptimizer, fragment: int) -> str | None:
    """Return a short digest of a fragment's slow weights; None if a round does not leave them equal
    on all peers.
    """
    if not opt.anchored or fragment >= opt.fragments:
        return None
    return float32_digest(opt.slow_of(fragment)).hex()[:16]


def keep(opt: OuterOptimizer, folder: Path, number: int) -> None:
    """Write the slow weights after round ``number`` to the folder ``rounds`` in ``folder``: of a
    large model every so many.
    """
    rounds = folder / ROUNDS
    rounds.mkdir(exist_ok=True)
    step = -(-sum(tensor.numel() for tensor in opt.slow) // KEPT)
    kept = {
        str(i): (tensor if step == 1 else tensor.reshape(-1)[::step]).cpu().contiguous()
        for i, tensor in enumerate(opt.slow)
    }
    save_file(kept, rounds / f"{number:06d}.safetensors")


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a node."""

    path: Path
    """The path that the user named: a checkpoint, or a folder of them."""
    swarm: str
    sealed: bytes
    """The manifest of that swarm."""
    manifest: Manifest
    trainer: dict[str, Any]
    change: bytes = b""
    """The creator's newest change of its settings that the node knew, sealed; empty: none."""

    @property
    def manifest_then(self) -> Manifest:
        """The manifest with the settings of training as they were changed when it was saved."""
        if not self.change:
            return self.manifest
        change = open_change(self.change, self.swarm, self.manifest.creator)
        train = settings_at(change, self.manifest.train, self.round)
        return self.manifest.model_copy(update={"train": train})

    @property
    def round(self) -> int:
        """The swarm's round at which it was saved."""
        round = int(self.trainer["optimizer"]["round"])
        return round // self.manifest.outer.fragments_a_round

    @property
    def shard(self) -> Shard:
        return Shard(*self.trainer["shard"])


def find(node: NodeSettings) -> SavedRun | None:
    """Return the checkpoint that the settings ask for; None to begin from nothing.

    Raises CheckpointError if there is none, it is damaged, or the node's folder holds those of
    another run.
    """
    own = node.run_folder
    other = node.resume_from
    if other is None:
        if node.resume:
            return _read(own)
    elif node.resume:
        raise CheckpointError(
            "--resume goes on with this node's own run and --resume-from with another checkpoint "
            "in another swarm: pass one of them."
        )
    elif own.resolve() in (other.resolve(), other.resolve().parent):
        return _read(other)
    if steps(own):
        raise CheckpointError(
            f"The folder {str(own)!r} holds checkpoints of an earlier run: pass --resume to "
            "continue it, or choose another --name or --folder."
        )
    return None if other is None else _read(other)


def _read(path: Path) -> SavedRun:
    _, state = checkpoint.load(path)
    try:
        sealed = bytes.fromhex(state["manifest"])
        change = bytes.fromhex(state.get("change", ""))
        trainer = dict(state["trainer"])
        Shard(*trainer["shard"])
        found = SavedRun(
            path, str(state["swarm"]), sealed, open_manifest(sealed, protocol=None), trainer, change
        )
        if change:
            open_change(change, found.swarm, found.manifest.creator)
        return found
    except (KeyError, TypeError, ValueError, MessageError) as error:
        raise CheckpointError(
            f"The checkpoint in {str(path)!r} is not that of a node: name one that `shoal up` "
            "saved."
        ) from error


def check_same_protocol(saved: SavedRun) -> None:
    """Raise CheckpointError if peers of the saved swarm speak another protocol than this node."""
    if saved.manifest.protocol != PROTOCOL:
        raise CheckpointError(
            f"The swarm of the checkpoint speaks protocol {saved.manifest.protocol}, this version "
            f"of shoal {PROTOCOL}: pass --resume-from {saved.path} in place of --resume to begin a "
            "new swarm from it."
        )


def own_run(saved: SavedRun | None, swarm: str, node: NodeSettings) -> SavedRun | None:
    """Return ``saved`` if it is of this very swarm; None if the node begins anew, or from another
    one as the user asked.

    Raises CheckpointError if it is of another swarm, and the user did not allow that.
    """
    if saved is None or saved.swarm == swarm:
        return saved
    if node.resume:
        raise CheckpointError(
            f"The checkpoint in {str(saved.path)!r} is of swarm {saved.swarm}, not of {swarm}: "
            f"pass --resume-from {saved.path} in place of --resume to go on from it in this swarm, "
            "or start without it in another folder."
        )
    return None


def restore(trainer: Trainer, saved: SavedRun, swarm: str) -> list[str]:
    """Load ``saved`` into ``trainer``, and return sentences for the user.

    In another swarm the weights come over too: the caller replaces them if that swarm has weights
    of its own. Raises TrainingError or CheckpointError if the checkpoint does not fit; the trainer
    is of no use then.
    """
    try:
        if saved.swarm != swarm:
            begin_from(trainer, saved.trainer)
            return [
                f"begins with the weights of the checkpoint in {str(saved.path)!r}, of another "
                "swarm"
            ]
        trainer.inner_step.loaded_from = saved.path
        follows_schedule = trainer.resume(saved.trainer)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"The checkpoint in {str(saved.path)!r} does not hold what a node saves "
            f"({type(error).__name__}): take another one."
        ) from error
    lines = [f"goes on from the checkpoint of step {trainer.whole.steps}"]
    if follows_schedule:
        return lines
    schedule = trainer.schedule
    end = f" of {schedule.length}" if schedule.length else ""
    return [
        *lines,
        "the learning-rate schedule is another one than in the checkpoint: it goes on from step "
        f"{schedule.done}{end}",
    ]


def begin_from(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Begin a new run with the model of another run's ``state``.

    TrainingError, before any change, if it is of another model.
    """
    trainer.check_model(state)
    try:
        load_whole_model(trainer.model, state["model"])
    except ValueError as error:
        raise TrainingError(f"The checkpoint does not fit this run: {error}.") from error
    opt = trainer.opt
    opt.restart_from_model()
    # So that peers that join take over these weights, not those of the seed.
    opt.round = 1
    opt.applied = [0] * opt.fragments


def is_newer(state: State, opt: OuterOptimizer) -> bool:
    """Return True if the swarm's ``state`` replaces what ``opt`` has from this node's checkpoint.

    In the same round it does if all peers of this method hold the same weights and ``opt`` has
    others: the node had missed a round when it stopped.
    """
    if state.round != opt.round or not opt.anchored:
        return state.round > opt.round
    if any(theirs < own for theirs, own in zip(state.applied, opt.applied, strict=True)):
        return False
    return not all(
        torch.allclose(theirs, own.cpu().float(), rtol=1e-3, atol=1e-5)
        for theirs, own in zip(state.slow, opt.slow, strict=True)
    )

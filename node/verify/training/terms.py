"""Terms on which a swarm's nodes claim inner steps, made from the creator's settings, and compared at joining.

Steps can be repeated only on the same data, with the same schedule of learning rates.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from shoal.node.batch import parts
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.config.train import TrainTable
from shoal.node.rl.task import RLTask
from shoal.node.task import Shard, Task
from shoal.node.verify.training.material import TrainingTerms
from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.manifest.verify import StretchTerms
from shoal.verification.calibration.calibration import FEWEST
from shoal.verification.fingerprints.weights import DIMS


def make_stretch_terms(settings: Settings, task: Task) -> StretchTerms:
    """Make the terms of a new swarm. Raises ConfigError if others cannot repeat the task's steps, or they are too few."""
    if isinstance(task, RLTask):
        raise ConfigError("Others cannot recompute what a policy learns from: pass --verify activations with --task rl.")
    steps, stretch = settings.train.steps, settings.verify.stretch
    if 0 < steps < FEWEST * stretch:
        raise ConfigError(
            f"Training of {steps} steps is too short to be verified by {stretch} of them: "
            f"make it {FEWEST * stretch} or more (--steps), or leave --verify out."
        )
    data = data_digest(task, settings.swarm.shards, settings.train.seed)
    if data != data_digest(task, settings.swarm.shards, settings.train.seed):
        raise ConfigError(
            "The task gives other batches each time, so its steps cannot be done again: "
            "have batches(shard) depend on the shard alone, or leave --verify out."
        )
    return StretchTerms(steps=stretch, dims=DIMS, data=data)


def check_stretch_terms(terms: StretchTerms, manifest: Manifest, train: TrainTable, task: Task) -> None:
    """Raise ConfigError if others cannot repeat this node's steps, or it theirs: it trains otherwise, or has other data."""
    if own := [
        name for name in ("precision", "accumulate", "compile") if getattr(train, name) != TrainTable.model_fields[name].default
    ]:
        raise ConfigError(
            f"The swarm verifies training, and others do steps again as the task itself does them: leave train.{own[0]} out."
        )
    if train.steps != manifest.train.steps:
        raise ConfigError(
            f"The swarm verifies training, and its learning rates are for {manifest.train.steps} steps, not {train.steps}: "
            "leave --steps out."
        )
    if data_digest(task, manifest.shards, train.seed) != terms.data:
        raise ConfigError(
            "This node has other data than the swarm, so the steps of others cannot be done again here: "
            "give it the same files with --data, and where it is Python's library the same version of Python."
        )


def training_terms(terms: StretchTerms, manifest: Manifest, swarm: str) -> TrainingTerms:
    """Return the terms of all peers; ``swarm``, the digest of the manifest, stands for the task and its options."""
    return TrainingTerms(swarm, manifest.train, steps=terms.steps, dims=terms.dims)


def data_digest(task: Task, shards: int, seed: int) -> str:
    """Return the hex SHA-256 of the first batches of the first and the last shard. Restores the global random numbers."""
    found = hashlib.sha256(b"shoal batches 1\0")
    with torch.random.fork_rng(devices=[]):
        for index in sorted({0, shards - 1}):
            _feed(found, next(iter(task.batches_from(Shard(index, shards, seed), 0))))
    return found.hexdigest()


def _feed(found: Any, batch: Any) -> None:
    """Hash the tensors that `to_device` moves, with kind and shape; nothing else of a batch is compared."""
    if isinstance(batch, Tensor):
        tensor = batch.detach().to("cpu").contiguous()
        found.update(f"{tensor.dtype} {list(tensor.shape)}\0".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    elif (inside := parts(batch)) is not None:
        ordered = isinstance(batch, tuple | list)
        for name in inside if ordered else sorted(inside, key=str):
            found.update(b"" if ordered else f"{name}\0".encode())
            _feed(found, inside[name])

"""The place of a process in a node of several ranks, as torch's launchers set it in the
environment; and how many ranks the settings ask for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.node.config.node_settings import MAX_RANKS
from shoal.node.config.settings import ConfigError, Settings

if TYPE_CHECKING:
    import torch

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a rank finds in its environment."""
FOLDER = "SHOAL_RANKS_FOLDER"
"""Of the launcher: what the ranks leave for it."""
LAUNCHER = "SHOAL_RANKS_LAUNCHER"
"""Its process id."""
LINK = "SHOAL_RANKS_LINK"
"""Of the swarm to join: the ranks ask nobody again where the argument is a name."""
STARTS = "SHOAL_RANKS_STARTS"
"""How often the launcher has started the ranks again."""


@dataclass(frozen=True)
class Job:
    """A process of a peer of several ranks."""

    rank: int
    world: int
    """Number of ranks."""
    restarts: int = 0
    """How often the ranks were started again after one of them had died."""
    folder: Path | None = None
    """Folder of our own launcher; None under torchrun."""

    @property
    def leads(self) -> bool:
        """True for the rank that speaks to the swarm and to the user."""
        return self.rank == 0


def job_of(environment: Mapping[str, str] | None = None) -> Job | None:
    """Return this process's place in a job of several ranks, or None.

    Raises ConfigError if its ranks are on several machines.
    """
    found = os.environ if environment is None else environment
    if any(name not in found for name in NEEDED):
        return None
    try:
        rank, world, local = (int(found[name]) for name in NEEDED[:3])
        here = int(found.get("LOCAL_WORLD_SIZE", world))
        restarts = int(found.get(STARTS, found.get("TORCHELASTIC_RESTART_COUNT", "0")))
    except ValueError as error:
        raise ConfigError(
            f"The environment's RANK, WORLD_SIZE and LOCAL_RANK must be numbers ({error}): start "
            "with torchrun, or without them."
        ) from None
    if world <= 1:
        return None
    if here != world or local != rank or world > MAX_RANKS:
        raise ConfigError(
            f"The ranks of one peer must be on one machine, at most {MAX_RANKS} of them: start "
            "torchrun with --nnodes 1, and a peer on each machine."
        )
    if not 0 <= rank < world:
        raise ConfigError(
            f"The environment has RANK={rank} of WORLD_SIZE={world}: start with torchrun, or "
            "without them."
        )
    folder = found.get(FOLDER)
    return Job(rank, world, restarts, None if folder is None else Path(folder))


def rank_device(settings: Settings, job: Job) -> torch.device:
    """Return the device of this rank.

    Raises ConfigError if torchrun started other ranks than the settings ask for, or too many.
    """
    import torch

    from shoal.node.config.device import accelerator, resolve_device

    node = settings.node
    if node.gpus not in (None, "all", str(job.world)):
        raise ConfigError(
            f"--gpus {node.gpus} does not go with the {job.world} ranks that torchrun has started: "
            "leave it out."
        )
    if node.device.partition(":")[0] == "mps" or ":" in node.device:
        raise ConfigError(
            f"Each rank has a device of its own, so {node.device!r} cannot be used: use cuda or "
            "cpu, or neither."
        )
    kind, devices = accelerator()
    if node.device == "cpu" or (node.device == "auto" and not devices):
        return torch.device("cpu")
    if node.device not in ("auto", kind):
        # Its error says what is here.
        resolve_device(node.device)
    if job.world > devices:
        raise ConfigError(
            f"{job.world} ranks need as many GPUs, and this machine has {devices}: start fewer, or "
            "pass --device cpu."
        )
    return torch.device(kind, job.rank)


def ranks_wanted(settings: Settings, devices: int | None = None) -> int:
    """Return the number of ranks that the settings ask for.

    ``devices``: GPUs here; None asks torch.

    Raises ConfigError: there are fewer GPUs, or the device goes with one process only.
    """
    node = settings.node
    device = node.device.partition(":")[0]
    if node.gpus is None:
        if node.parallel is not None:
            raise ConfigError(
                "--parallel says how several GPUs share the model: pass --gpus all or --gpus N too."
            )
        return 1
    if device == "mps" or (node.gpus != "1" and ":" in node.device):
        raise ConfigError(
            f"--gpus takes the first GPUs, and {node.device!r} does not go with it: leave --device "
            "out, or use cpu."
        )
    if device == "cpu":
        if node.gpus == "all":
            raise ConfigError(
                "--gpus all counts GPUs, which --device cpu does not use: pass a number, such as "
                "--gpus 2."
            )
        return int(node.gpus)
    if devices is None:
        # Loads torch, which takes a second, and most nodes need no count.
        from shoal.node.config.device import accelerator

        _, devices = accelerator()
    wanted = devices if node.gpus == "all" else int(node.gpus)
    if wanted > devices or not devices:
        raise _too_few(node.gpus, devices)
    if wanted > MAX_RANKS:
        raise ConfigError(f"A peer has at most {MAX_RANKS} ranks: pass --gpus {MAX_RANKS}.")
    return wanted


def _too_few(asked: str, devices: int) -> ConfigError:
    if not devices:
        seen = "no GPU that PyTorch can use"
        remedy = "--device cpu, to try it on the processor"
    else:
        seen = "1 GPU" if devices == 1 else f"{devices} GPUs"
        remedy = f"--gpus {devices}"
    return ConfigError(
        f"--gpus {asked} asks for more than this machine has ({seen}): use {remedy}."
    )

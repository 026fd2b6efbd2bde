"""What a checkpoint costs training: how long it stands still, how much slower it is while one is
written, and the memory for it.

    python bench/checkpoint.py --sizes 1m,25m --saves 5 --json

Real inner steps of the built-in GPT with AdamW and NoLoCo, alone. `before`: the state is written
between two steps (as it was until there was node/saver.py); `after`: it is copied between two steps
and written by a thread. Bytes go to --folder, so name one on the disk that matters.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.node.config.device import resolve_device
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings

# About 1 and 25 million parameters; batch and context are small, so that steps are short and a
# stall shows.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 1},
    "1m": {"layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 2},
    "25m": {"layers": 8, "width": 512, "heads": 8, "context": 64, "batch": 2},
}


def _trainer(size: str, device: torch.device) -> Trainer:
    made = Trainer(
        TextTask(**SIZES[size]),  # type: ignore[arg-type]
        OuterSettings(method="noloco", every=1000),
        TrainSettings(seed=0),
        device=device,
    )
    made.connect(Alone(), "bench", Shard(0, 8, 0))
    return made


def _resident() -> int:
    """Bytes of this process in memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


class _Clock:
    """Seconds, once the device has done what it was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def measure(
    size: str, device: torch.device, saves: int, steps: int, folder: Path
) -> dict[str, Any]:
    clock, trainer = _Clock(device), _trainer(size, device)

    def timed(count: int) -> list[float]:
        times = []
        for _ in range(count):
            began = clock()
            trainer.step()
            times.append(clock() - began)
        return times

    timed(5)
    usual = statistics.median(timed(steps))
    plain = _resident()
    before = []
    for _ in range(saves):
        began = clock()
        path = checkpoint.save(folder / "before", trainer.opt.steps, trainer.state(), keep=1)
        before.append(clock() - began)
        timed(1)
    nbytes = sum(file.stat().st_size for file in path.iterdir())

    said: list[str] = []
    saver = CheckpointWriter(folder / "after", keep=1, state=trainer.state, notify=said.append)
    stalls, lost, behind = [], [], 0
    for _ in range(saves + 1):
        saver.due = True
        began = clock()
        saver.turn(trainer.opt.steps)
        stalls.append(clock() - began)
        slow: list[float] = []
        while saver.busy:
            slow += timed(1)
        lost.append(sum(time - usual for time in slow))
        behind = max(behind, len(slow))
        timed(1)
    saver.turn(trainer.opt.steps)
    if said:
        raise SystemExit(f"Error: {said[0]}")
    return {
        "size": size,
        "params": sum(parameter.numel() for parameter in trainer.params),
        "checkpoint_mb": nbytes / 1e6,
        "step_s": usual,
        "before_stall_s": statistics.median(before),
        "first_stall_s": stalls[0],
        "after_stall_s": statistics.median(stalls[1:]),
        "after_slower_s": statistics.median(lost[1:]),
        "steps_while_written": behind,
        "copy_mb": saver.nbytes / 1e6,
        "rss_more_mb": max(_resident() - plain, 0) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1m,25m", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="undisturbed steps to compare with")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to write [default: a temporary folder]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    rows = []
    for size in options.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            row = measure(size, device, options.saves, options.steps, Path(folder))
        rows.append(row)
        print(
            f"{row['params']:>11,} parameters, {row['checkpoint_mb']:.1f} MB: a save stops "
            f"training for {row['before_stall_s']:.3f} s when it waits for the disk, "
            f"{row['after_stall_s']:.4f} s when it copies (the first: {row['first_stall_s']:.3f} "
            f"s; steps of {row['step_s']:.3f} s are {row['after_slower_s']:.3f} s slower in all "
            "while it is written)",
            file=sys.stderr,
        )
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    if options.json:
        print(
            json.dumps(
                {
                    "device": name,
                    "torch": torch.__version__,
                    "threads": options.threads,
                    "rows": rows,
                }
            )
        )


if __name__ == "__main__":
    main()

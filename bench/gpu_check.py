"""Everything that is worth knowing of Shoal on this machine's GPU, in one report that fits into an
issue.

    # gpu-check.md, and gpu-check-trace.json: ten steps, for https://ui.perfetto.dev
    make gpu-check

Runs the tests for GPUs, two nodes on one card, a node that resumes, all GPUs as one peer, and
measures the tokens a second of a node against the same loop in plain PyTorch. A step that fails or
takes too long is reported, and the others go on; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.node.batch_contents import to_device
from shoal.node.batches import iterator_of
from shoal.node.config.device import resolve_device
from shoal.node.config.train_settings import OwnTraining, Precision
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.inner_optimizer import make_inner
from shoal.node.training.precision import DTYPES
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings

ROOT = Path(__file__).resolve().parents[1]
SHOAL = [sys.executable, "-m", "shoal"]
TAIL = 25  # lines of a step's output in the report
SHARD = Shard(0, 1, 0)


@dataclass(frozen=True)
class Step:
    """One row of the report."""

    name: str
    passed: bool
    seconds: float
    said: str


def run(name: str, commands: list[list[str]], limit_s: float) -> Step:
    """Run commands one after another, to the first that fails, at most ``limit_s`` seconds each."""
    began, said = time.monotonic(), ""
    for command in commands:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            said += f"\nended after {limit_s:g} s"
        if process.returncode:
            break
    return Step(name, process.returncode == 0, time.monotonic() - began, tail(said))


def tail(text: str) -> str:
    """Return the last lines, without what is nobody's business."""
    lines = [line[:300] for line in text.splitlines() if line.strip()]
    return re.sub(r"shoal://\S+", "shoal://...", "\n".join(lines[-TAIL:])).replace(
        str(Path.home()), "~"
    )


def measured(name: str, what: Callable[[], str]) -> Step:
    """Note what ``what`` returns, or how it fails."""
    began = time.monotonic()
    try:
        passed, said = True, what()
    except Exception as error:
        passed, said = False, f"{type(error).__name__}: {error}"
    return Step(name, passed, time.monotonic() - began, said)


def node_steps(
    task: TextTask, device: torch.device, precision: Precision = "float32"
) -> Iterator[None]:
    own = OwnTraining(precision=precision)
    trainer = Trainer(
        task, OuterSettings(method="none"), TrainSettings(steps=0), own=own, device=device
    )
    trainer.connect(Alone(), "run", SHARD)
    try:
        while True:
            trainer.step()
            yield
    finally:
        trainer.close()


def plain_steps(task: TextTask, device: torch.device, precision: Precision) -> Iterator[None]:
    torch.manual_seed(0)
    model = task.model().to(device)
    inner = make_inner(task, TrainSettings(), model)
    batches, pin = iterator_of(task.batches(SHARD), SHARD), device.type == "cuda"
    while True:
        batch = [tensor.contiguous().pin_memory() if pin else tensor for tensor in next(batches)]
        with (
            torch.autocast(device.type, dtype=DTYPES[precision])
            if precision in DTYPES
            else contextlib.nullcontext()
        ):
            loss: Any = task.loss(model, to_device(batch, device))
        loss.backward()
        inner.step()
        inner.zero_grad()
        yield


def tokens_per_s(steps: Iterator[None], tokens: int, device: torch.device, seconds: float) -> float:
    """Measure after three steps that do not count."""
    for _ in range(3):
        next(steps)
    _synchronize(device)
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        next(steps)
        count += 1
    _synchronize(device)
    return tokens * count / (time.monotonic() - began)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def rates(task: TextTask, device: torch.device, precision: Precision, seconds: float) -> str:
    """Tokens a second of a node and of plain PyTorch, in turn, twice."""
    found: dict[str, list[float]] = {"node": [], "plain PyTorch": []}
    for _ in range(2):
        for name, steps in (("node", node_steps), ("plain PyTorch", plain_steps)):
            found[name].append(
                tokens_per_s(
                    steps(task, device, precision), task.batch * task.size.context, device, seconds
                )
            )
    best = {name: max(values) for name, values in found.items()}
    every = "; ".join(
        f"{name}: {', '.join(f'{value:,.0f}' for value in values)}"
        for name, values in found.items()
    )
    return (
        f"{every} tokens/s. A node makes {best['node'] / best['plain PyTorch']:.3f} of plain "
        "PyTorch's."
    )


def profile(task: TextTask, device: torch.device, trace: Path) -> str:
    """Profile ten steps of a node."""
    steps = node_steps(task, device)
    for _ in range(3):
        next(steps)
    activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(10):
            next(steps)
        _synchronize(device)
    found.export_chrome_trace(str(trace))
    key = (
        "self_device_time_total" if len(activities) > 1 else "self_cpu_time_total"
    )  # the CPU is one of them
    return f"{trace.name}\n" + tail(
        found.key_averages().table(sort_by=key, row_limit=8, max_name_column_width=40)
    )


def machine(device: torch.device) -> str:
    said = [
        f"PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    ]
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            it = torch.cuda.get_device_properties(index)
            said.append(
                f"cuda:{index}: {it.name}, {it.total_memory / 2**30:.0f} GiB, capability "
                f"{it.major}.{it.minor}"
            )
        said.append(f"CUDA {torch.version.cuda}, ROCm {torch.version.hip}")
    return "\n".join(said)


def report(about: str, steps: list[Step]) -> str:
    """Return the report as Markdown."""
    rows = [
        f"| {one.name} | {'passed' if one.passed else '**failed**'} | {one.seconds:.0f} |"
        for one in steps
    ]
    details = [f"### {one.name}\n\n```\n{one.said.replace('```', '')}\n```\n" for one in steps]
    return "\n".join(
        [
            "## make gpu-check\n",
            about,
            "",
            "| step | | seconds |",
            "|---|---|--:|",
            *rows,
            "",
            *details,
        ]
    )


def node(folder: Path, device: str, *arguments: str) -> list[str]:
    return [
        *SHOAL,
        "up",
        "--name",
        "check",
        "--folder",
        str(folder / "node"),
        "--identity",
        str(folder / "key"),
        "--data",
        str(folder / "text"),
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
        "--every",
        "5",
        "--device",
        device,
        *arguments,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.md"))
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each measurement of tokens a second"
    )
    parser.add_argument("--skip", default="", help="regular expression of the steps to leave out")
    options = parser.parse_args()
    device = resolve_device(options.device)
    if device.type == "cpu":
        sys.exit(
            "Error: PyTorch finds no GPU on this machine: install a build for it "
            "(docs/install.md), or see `shoal doctor`."
        )
    kind = device.type
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "text").mkdir()
        for number in range(60):  # documents, of which each node has some and some are held out
            (folder / "text" / f"{number}.txt").write_text(
                f"The quick brown fox {number} jumps over the lazy dog. " * 50
            )
        text = str(folder / "text")
        task = TextTask(data=text, layers=6, width=384, heads=6, context=128, batch=16)
        large = TextTask(data=text, layers=12, width=768, heads=12, context=512, batch=16)
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "-p",
            "no:cacheprovider",
            "-n",
            "4",
        ]
        demo = [
            *SHOAL,
            "demo",
            "--peers",
            "2",
            "--rounds",
            "4",
            "--every",
            "10",
            "--no-compare",
            "--json",
            "--device",
            kind,
        ]
        both = ["--gpus", "all", "--parallel"]
        trace = options.out.with_name(f"{options.out.stem}-trace.json")
        programs = [
            ("tests for GPUs", 1800, [pytest]),
            ("two nodes on one card", 600, [demo]),
            (
                "a node resumes",
                300,
                [
                    node(folder, kind, "--steps", "10"),
                    node(folder, kind, "--steps", "20", "--resume"),
                ],
            ),
        ]
        if torch.accelerator.device_count() > 1:
            for layout in ("ddp", "fsdp"):
                (folder / layout).mkdir()
                command = node(
                    folder, kind, "--steps", "10", *both, layout, "--folder", str(folder / layout)
                )
                programs.append((f"all GPUs as one peer, {layout}", 300, [command]))
        plan: list[tuple[str, Callable[[str], Step]]] = [
            (name, partial(run, commands=commands, limit_s=limit_s))
            for name, limit_s, commands in programs
        ]
        small_rates = partial(rates, task, device, "float32", options.seconds)
        large_rates = partial(rates, large, device, "bfloat16", options.seconds)
        plan.append(("tokens a second", partial(measured, what=small_rates)))
        plan.append(
            ("tokens a second, 85M parameters in bfloat16", partial(measured, what=large_rates))
        )
        plan.append(
            ("profile of ten steps", partial(measured, what=partial(profile, task, device, trace)))
        )
        steps = []
        for name, what in plan:
            if options.skip and re.search(options.skip, name):
                continue
            print(f"{name} ...", file=sys.stderr, flush=True)
            steps.append(what(name))
            print(
                f"  {'passed' if steps[-1].passed else 'FAILED'} after {steps[-1].seconds:.0f} s",
                file=sys.stderr,
            )
    options.out.write_text(report(machine(device), steps))
    print(f"The report is in {options.out}: please open an issue with it.")
    sys.exit(not all(one.passed for one in steps))


if __name__ == "__main__":
    main()

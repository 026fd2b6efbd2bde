"""``shoal demo``: run a swarm of real processes with real daemons on this machine, by the commands that a user would type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from safetensors.torch import load_file

from shoal.node.checkpoint.folder import check_writable
from shoal.node.config.device import resolve_device
from shoal.node.config.settings import Settings, assignment, load
from shoal.node.data import manifest_options
from shoal.node.demo.liveness import DemoError, Liveness
from shoal.node.demo.temporary import temporary_folder
from shoal.node.exit_codes import ExitCode
from shoal.node.metrics.factory import check_demo, flags_of_demo
from shoal.node.runtime.display import Display, make_display
from shoal.node.runtime.join import task_label
from shoal.node.runtime.result import RESULT
from shoal.node.runtime.signals import handle_all
from shoal.node.runtime.slow_weights import ROUNDS
from shoal.node.tasks.loader import load_task

LINK_S = 60.0  # seconds for the first node of a chaos run to print its link
STOP_S = 8.0  # seconds that the nodes have to end orderly
LOOK_S = 0.5
TRACEBACK, USERS_ERROR = "Traceback (most recent call last):", "Error: Your "  # in the log of a node whose task failed


class Nodes:
    """Processes of a demo. All are ended when the block is left, whatever happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        self._stopped = False

    def __enter__(self) -> Nodes:
        handle_all(self._interrupt)
        return self

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stopped and number == signal.SIGHUP:  # a closed terminal sends several
            return
        if self._stopped:  # the second signal: end at once
            self.kill()
            os._exit(ExitCode.INTERRUPTED)
        self._stopped = True
        raise KeyboardInterrupt

    def start(
        self,
        arguments: Sequence[str],
        name: str,
        *,
        program: Sequence[str] = ("-m", "shoal"),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``shoal ARGUMENTS`` as the node ``name``."""
        log = (self.folder / f"{name}.log").open("a", encoding="utf-8")
        self._logs.append(log)
        command = [*interpreter(), *program, *arguments, "--name", name, "--folder", str(self.folder / name)]
        command += ["--identity", str(self.folder / f"{name}.key"), "--with-parent", str(os.getpid())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
            start_new_session=True,  # Ctrl-C is for the demo, which then ends its nodes orderly
        )
        self.processes.append(process)
        return process

    def check(self) -> bool:
        """Return whether all have ended well. Raises DemoError, with the end of its log, if one failed."""
        for index, process in enumerate(self.processes):
            if process.poll() not in (None, 0):
                raise self.failure(index, process.returncode)
        return all(process.poll() == 0 for process in self.processes)

    def failure(self, index: int, code: int, what: str = "ended") -> DemoError:
        """Return the error of a node that ended with ``code``. If its task failed, that is the user's own error here too."""
        said = self.last_log_line(index)
        error = DemoError(f"Node peer-{index} {what} with code {code}: {said}")
        if code == ExitCode.BAD_INPUT:
            error.exit_code = ExitCode.BAD_INPUT
            log = (self.folder / f"peer-{index}.log").read_text(encoding="utf-8", errors="replace")
            begin = log.rfind(TRACEBACK)
            if begin >= 0 and said.startswith(USERS_ERROR):
                error.trace = log[begin : log.rfind(said)]
        return error

    def last_log_line(self, index: int) -> str:
        """Return the last line that a node logged."""
        lines = (self.folder / f"peer-{index}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it logged nothing; run again with --verbose."

    def kill(self) -> None:
        """Kill all at once; their guards end the daemons."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def __exit__(self, *error: object) -> None:
        until = time.monotonic() + STOP_S
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5.0)
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()


def interpreter() -> list[str]:
    """Return the command of this Python, for ``-m``, which alone would put the present folder before all that is installed.

    There a file of the user's, such as queue.py, would hide a module of Python's own; before 3.11 it cannot be prevented.
    """
    safe = sys.version_info >= (3, 11) and sys.path[:1] != [os.getcwd()]  # of this process, if its user wanted it so
    return [sys.executable, *(["-P"] if safe else [])]


def run_demo(
    *,
    peers: int = 4,
    rounds: int = 40,
    every: int = 25,
    outer: Mapping[str, Any] | None = None,
    seed: int = 0,
    hooks: str = "text",
    task_options: Sequence[str] = (),
    device: str = "auto",
    keep: Path | None = None,
    verbose: bool = False,
    compare: bool = True,
) -> dict[str, Any]:
    """Train with ``peers`` nodes for ``rounds`` rounds of ``every`` inner steps; return the `report`.

    ``outer``: more settings, with dotted keys, such as ``outer.method``. ``compare``: then each node trains once more alone.

    Raises:
        ConfigError: a setting cannot be used.
        DemoError: a node failed or made no progress.
    """
    settings = load(
        None,
        {
            "swarm.name": "demo",
            "swarm.start_when": peers,
            "swarm.shards": peers,
            "task.hooks": hooks,
            **{f"task.options.{key}": value for key, value in map(assignment, task_options)},
            "outer.wait_s": 60.0,  # the nodes share one machine's processors: a late partner is slow, not gone
            "train.steps": rounds * every,
            "train.seed": seed,
            "outer.every": every,
            **(outer or {}),
        },
    )
    # Errors of the task and device are raised here at once, and not by every node.
    load_task(hooks, settings.task.options)
    resolve_device(device)
    began = time.monotonic()
    with stage(keep) as (folder, display):
        check_demo(settings.node, peers, display.message)
        with Nodes(folder) as nodes:
            liveness = Liveness([folder / f"peer-{index}" for index in range(peers)])
            flags = ["--device", device, *(["--verbose"] if verbose else []), *(["--baseline"] if compare else [])]
            _start(nodes, settings, flags, display, liveness)
            _watch(nodes, rounds, settings.outer.every or every, display, liveness, compare)
        display.close()
        results = [json.loads((folder / f"peer-{index}" / RESULT).read_text()) for index in range(peers)]
        distances = consensus_distances([folder / f"peer-{index}" / ROUNDS for index in range(peers)])
        return report(results, distances, time.monotonic() - began)


@contextmanager
def stage(keep: Path | None, name: str = "demo") -> Iterator[tuple[Path, Display]]:
    """Yield a folder for the nodes, ``keep`` or a temporary one, and a display. Raises CheckpointError if it is not usable."""
    if keep is not None:
        check_writable(keep)
    with nullcontext(keep) if keep is not None else temporary_folder(name) as place:
        yield place.resolve(), make_display()


def start_first(nodes: Nodes, arguments: list[str], display: Display, liveness: Liveness) -> str:
    """Start the node that creates the swarm; return the link. Raises DemoError if it ends or moves no more before it prints it."""
    lines: list[str] = []
    reader = threading.Thread(target=_read_line, args=(nodes.start(arguments, "peer-0"), lines), daemon=True)
    reader.start()
    while reader.is_alive():  # a large model takes minutes to load
        reader.join(LOOK_S)
        liveness.look()
    link = lines[0].strip()
    if not link:
        with suppress(subprocess.TimeoutExpired):  # it closes its output a moment before it has ended
            nodes.processes[0].wait(1.0)
        nodes.check()
        raise DemoError(f"The first node printed no link: {nodes.last_log_line(0)}")
    display.message(f"the swarm is up: {link}")
    return link


def settings_toml(settings: Settings) -> str:
    """Return the tables that ``shoal up`` needs, as TOML. An optimizer that is not given is left to it."""
    tables = settings.model_dump(mode="json", exclude={"node"}, exclude_none=True)
    if "optimizer" in settings.train.model_fields_set:  # "task" too, which a manifest leaves out
        tables["train"]["optimizer"] = settings.train.optimizer
    options = tables["task"].pop("options")
    lines = []
    for name, table in {**tables, "task.options": options}.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _start(nodes: Nodes, settings: Settings, flags: Sequence[str], display: Display, liveness: Liveness) -> None:
    peers, hooks = settings.swarm.start_when, settings.task.hooks
    file = nodes.folder / "swarm.toml"
    file.write_text(settings_toml(settings), encoding="utf-8")

    def own(index: int) -> list[str]:
        place = ["--listen", "/ip4/127.0.0.1/tcp/0", "--shard", f"{index}/{peers}", "--threads", "1"]
        own_data = manifest_options.flags(hooks, settings.task.options)
        chosen = [*flags, *settings.train.flags(), *flags_of_demo(settings.node, index)]
        return [*place, *own_data, "--keep-rounds", *chosen]

    display.message(f"starting {peers} nodes of {task_label(hooks)!r} on this machine")
    link = start_first(nodes, ["up", str(file), *own(0)], display, liveness)
    for index in range(1, peers):
        nodes.start(["join", link, "--task", hooks, *own(index)], f"peer-{index}")


def read_line(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the first line of a node's stdout, or "" when it ended or the time is up."""
    lines: list[str] = []
    reader = threading.Thread(target=_read_line, args=(process, lines), daemon=True)
    reader.start()
    reader.join(seconds)
    return lines[0].strip() if lines else ""


def _read_line(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    lines.append(process.stdout.readline())


def _watch(nodes: Nodes, rounds: int, every: int, display: Display, liveness: Liveness, compare: bool) -> None:
    """Show the rounds until all nodes have ended."""
    shown, tick = 0, threading.Event()
    while not nodes.check():
        tick.wait(LOOK_S)
        events = liveness.look(sum(process.poll() == 0 for process in nodes.processes))
        done = min((_done(node, every) for node in events), default=0)
        if done > shown and (done == rounds or done - shown >= max(rounds // 10, 1)):
            shown = done
            ended = [_ended(node, done * every, every) for node in events]
            losses = "  ".join("-" if loss is None else f"{loss:.3f}" for loss in (_loss(node) for node in ended))
            moved = sum(event["bytes_sent"] for node in ended for event in node) / 1e6
            single = sum(event["partner"] is None for node in ended for event in node)
            display.message(f"round {done} of {rounds}: training loss {losses}, {moved:.2f} MB sent, {single} without a partner")
            if done == rounds and compare:
                display.message("now the same again without any exchange, to compare")


def _exchanges(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "round"]


def _sent(exchange: Mapping[str, Any]) -> int:
    """Return the inner step at which the contribution to an exchange was sent."""
    return int(exchange["step"] - exchange["lag"])


def _done(events: Sequence[dict[str, Any]], every: int) -> int:
    """Return the rounds in which all was exchanged, by steps: a method may exchange several times in a round."""
    sent = [(exchange["fragment"], exchange["fragments"], _sent(exchange)) for exchange in _exchanges(events)]
    latest = {fragment: max(step for other, _, step in sent if other == fragment) for fragment, _, _ in sent}
    if len(latest) > 1:  # not each fragment's is at the end of its round
        fragments = sent[0][1]
        return min(-(-latest.get(fragment, 0) // every) for fragment in range(fragments))
    return max(latest.values(), default=0) // every


def _ended(events: Sequence[dict[str, Any]], step: int, every: int) -> list[dict[str, Any]]:
    """Return the exchanges begun in the ``every`` steps up to ``step``, or the last before: rounds need not be steps."""
    before = [event for event in _exchanges(events) if _sent(event) <= step]
    last = max(map(_sent, before), default=0)
    return [event for event in before if _sent(event) > step - every or _sent(event) == last]


def _loss(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean of the known losses: between two exchanges at one step there is none."""
    losses = [event["loss"] for event in events if event["loss"] is not None]
    return sum(losses) / len(losses) if losses else None


def consensus_distances(folders: Sequence[Path]) -> list[float]:
    """Return for each round the RMS distance between the peers' slow weights (over all pairs) over their RMS norm."""
    # In rounds of seconds a quick node ends sooner, and then has fewer.
    names = sorted(set.intersection(*({path.name for path in folder.glob("*.safetensors")} for folder in folders)))
    return [_distance([load_file(folder / name) for folder in folders]) for name in names]


def _distance(peers: Sequence[Mapping[str, torch.Tensor]]) -> float:
    apart, size = torch.zeros(len(peers) * (len(peers) - 1) // 2 or 1), torch.zeros(len(peers))
    for key in peers[0]:  # by tensor, for all of a large model in float64 would need much memory
        flat = torch.stack([tensors[key].double().reshape(-1) for tensors in peers])  # (K, values)
        size = size + flat.square().sum(1)
        if len(peers) > 1:
            apart = apart + torch.pdist(flat).square()
    return float((apart.mean() / size.mean()).sqrt())


def report(results: Sequence[dict[str, Any]], distances: list[float], seconds: float) -> dict[str, Any]:
    """Return the report that ``shoal demo --json`` prints last: means over peers except for counts."""

    def mean(key: str) -> float | None:
        values = [result[key] for result in results]
        return None if None in values else sum(map(float, values)) / len(values)

    return {
        "peers": len(results),
        "method": results[0]["method"],
        "rounds": max(result["rounds"] for result in results),
        "fragments": results[0]["fragments"],
        "steps": max(result["steps"] for result in results),
        "loss_first": mean("loss_first"),
        "loss_last": mean("loss_last"),
        "loss_local": mean("loss_local"),
        # Both members of a committed pair count it.
        "exchanges": sum(result["exchanges"] for result in results) // 2,
        "pairs_none": sum(result["pairs_none"] for result in results),
        "bytes_sent": sum(result["bytes_sent"] for result in results),
        "bytes_received": sum(result["bytes_received"] for result in results),
        "wait_s": mean("wait_s"),
        "wall_s": mean("wall_s"),
        "spread": distances,
        "params": results[0]["params"],
        "seconds": seconds,
    }


def summary(report: dict[str, Any]) -> str:
    """Return the report in words."""
    first, together, alone = (report[key] for key in ("loss_first", "loss_last", "loss_local"))
    said = "not known, because evaluate() returned no finite number"
    if None not in (first, together) and alone is None:
        said = f"{first:.3f} at first, {together:.3f} together; not compared with training alone"
    if None not in (first, together, alone):
        gain = 100 * (1 - together / alone) if alone else 0.0
        said = f"{first:.3f} at first, {together:.3f} together, {alone:.3f} alone with the same steps: "
        said += f"{abs(gain):.1f} % {'better' if gain >= 0 else 'worse'} together"
    most, last = max(report["spread"], default=0), report["spread"][-1] if report["spread"] else 0
    return (
        f"{report['peers']} nodes, {report['params']:,} parameters, {report['steps']} steps each in {report['rounds']} rounds, "
        f"{report['seconds']:.0f} s\n"
        f"held-out loss: {said}\n"
        f"{report['exchanges']} pairs exchanged, {report['pairs_none']} times a node had no partner, "
        f"{report['bytes_sent'] / 1e6:.1f} MB sent; {report['wait_s']:.1f} s of {report['wall_s']:.1f} s waiting per node\n"
        f"consensus distance of the slow weights: at most {most:.4f}, in the end {last:.4f}"
    )

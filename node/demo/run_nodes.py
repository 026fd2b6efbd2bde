"""Running the nodes of a demo to their end, in a folder that may be a temporary one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from shoal.node.checkpoint.folder import check_writable
from shoal.node.config.edit_file import toml_value
from shoal.node.config.settings import Settings, load
from shoal.node.demo.liveness import Liveness
from shoal.node.demo.nodes import LOOK_S, Nodes, start_first
from shoal.node.metrics.sinks import check_demo, flags_of_demo
from shoal.node.runtime.display import Display, make_display
from shoal.node.runtime.result import RESULT

Given = Mapping[str, Any]
"""Settings by their dotted keys."""
Events = Sequence[Sequence[Mapping[str, Any]]]
"""Of each node what it has written to its metrics."""
SHOWN_LINES = 10
"""Lines about the rounds of a demo, at most."""


class Progress(Protocol):
    """How far the nodes of a demo are, by their events."""

    @property
    def rounds(self) -> int:
        """Rounds that the demo has."""

    def done(self, events: Events) -> int:
        """Return the rounds that all nodes have done."""

    def lines(self, events: Events, shown: int, now: int) -> Iterable[str]:
        """Return what to say when all nodes have done ``now`` rounds; ``shown`` was said before."""


def demo_settings(peers: int, seed: int, given: Given) -> Settings:
    """Return the settings of a demo's swarm, with those that were ``given``."""
    own = {
        "swarm.name": "demo",
        "swarm.start_when": peers,
        "swarm.shards": peers,
        "train.seed": seed,
    }
    return load(None, {**own, **given})


@contextmanager
def run_nodes(
    settings: Settings,
    keep: Path | None,
    what: str,
    flags: Sequence[Sequence[str]],
    progress: Progress,
    cheat: int = 0,
) -> Iterator[tuple[list[Path], list[dict[str, Any]], Events]]:
    """Run the nodes of a demo to their end; yield their folders, which may be removed then, their
    results and their events.

    Args:
        what: the nodes in words. flags: of each node, besides those that all demos have.
        cheat: how many nodes, the last ones, cheat.

    Raises DemoError, MetricsError or CheckpointError.
    """
    peers = len(flags)
    with stage(keep) as (folder, display):
        check_demo(settings.node, peers, display.message)
        file = folder / "swarm.toml"
        file.write_text(settings_toml(settings), encoding="utf-8")
        usual = ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", *settings.train.flags()]
        own: list[list[str]] = []
        for index, given in enumerate(flags):
            own.append([*usual, *given, *flags_of_demo(settings.node, index)])
        folders = [folder / f"peer-{index}" for index in range(peers)]
        with Nodes(folder) as nodes:
            liveness = Liveness(folders)
            display.message(f"starting {peers} nodes {what} on this machine")
            link = start_first(nodes, ["up", str(file), *own[0]], display, liveness)
            for index in range(1, peers):
                program = "shoal"
                if index >= peers - cheat:
                    program = "shoal.node.demo.cheating"
                nodes.start(["join", link, *own[index]], folders[index].name, program=(program,))
            _show_until_ended(nodes, liveness, progress, display)
            events = liveness.look(peers)
        display.close()
        results = [json.loads((each / RESULT).read_text()) for each in folders]
        yield folders, results, events


def _show_until_ended(
    nodes: Nodes, liveness: Liveness, progress: Progress, display: Display
) -> None:
    """Show the rounds of the nodes until all have ended. Raises DemoError."""
    shown = 0
    while not nodes.check():
        time.sleep(LOOK_S)
        ended = [process for process in nodes.processes if process.poll() is not None]
        events = liveness.look(len(ended))
        now = progress.done(events)
        is_due = now - shown >= max(progress.rounds // SHOWN_LINES, 1)
        if now > shown and (is_due or now == progress.rounds):
            for line in progress.lines(events, shown, now):
                display.message(line)
            shown = now


@contextmanager
def stage(keep: Path | None, name: str = "demo") -> Iterator[tuple[Path, Display]]:
    """Yield a folder for the nodes, ``keep`` or a temporary one, and a display.

    Raises CheckpointError if it is not usable.
    """
    folder: AbstractContextManager[Path | str]
    if keep is not None:
        check_writable(keep)
        folder = nullcontext(keep)
    else:
        folder = TemporaryDirectory(prefix=f"shoal-{name}-", ignore_cleanup_errors=True)
    with folder as place:
        yield Path(place).resolve(), make_display()


def settings_toml(settings: Settings) -> str:
    """Return what was given of the tables that ``shoal up`` needs, as TOML; what was not is left to
    it.
    """
    tables = settings.model_dump(
        mode="json", exclude={"node"}, exclude_none=True, exclude_unset=True
    )
    options = tables.get("task", {}).pop("options", {})
    lines = []
    for name, table in {**tables, "task.options": options}.items():
        lines += [f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"

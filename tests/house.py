"""The size of the house, and how many of its files one must open to follow each street:
`python -m tests.house --json`.

``streets``: product files whose functions a run of that street enters, beyond ``swarm/wire`` and
``optim/codecs``: two simulated peers that average (``pair``), two nodes that learn from each
other's rollouts over a bus in memory (``rollout``), a loop of one's own that joins a real swarm and
takes its weights (``join``), and claims that four nodes on a board check and vote on (``claim``).
``--no-streets`` leaves them out; they take a minute. ``--files`` names what each enters.
"""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.node.cli.main import cli
from shoal.node.config.settings import known_keys
from tests.test_house import MIN_LINES, MODULES, PRODUCT, ROOT, TEMPLATES, TESTS, TOPS, imported

PLAIN = ("swarm/wire/", "optim/codecs/")
CREATOR = """
import sys, threading, torch, shoal
net = torch.nn.Linear(4, 4)
here = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off")
with shoal.create(state=net, network=here, every=2, lag=0, wait_s=1.0) as session:
    opt = session.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    print(session.link, flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.wait(0.2):
        net(torch.ones(1, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
"""


def lines_of(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def sizes() -> dict[str, int]:
    importers = Counter(
        other for name in MODULES for other in imported(MODULES[name]) & set(MODULES) - {name}
    )
    short = [
        name
        for name, file in MODULES.items()
        if importers[name] == 1
        and file.name != "__init__.py"
        and file not in TEMPLATES
        and lines_of([file]) < MIN_LINES
    ]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {
        "product_lines": lines_of(PRODUCT),
        "product_files": len(PRODUCT),
        "test_lines": lines_of(TESTS),
        "doc_words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "settings": len(known_keys()),
        "up_options": sum(
            parameter.param_type_name == "option" for parameter in cli.commands["up"].params
        ),
        "one_importer_under_60": len(short),
    }


def entered(run: Callable[[], Any]) -> list[str]:
    """Return the product files whose functions ``run`` enters, in any thread; what importing a
    module runs does not count.
    """
    places: dict[str, str | None] = {}
    found: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename in found or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if code.co_filename not in places:
            path = Path(code.co_filename).resolve()
            place = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
            places[code.co_filename] = (
                place if place.split("/")[0] in TOPS and not place.startswith(PLAIN) else None
            )
        if places[code.co_filename] is None:
            return
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_filename.startswith("<frozen importlib"):
                return
            above = above.f_back
        found.add(code.co_filename)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(place for name in found if (place := places[name]))


def pair() -> Callable[[], Any]:
    from tests.sim.peers import Setting
    from tests.sim.run import simulate

    return lambda: simulate(1, setting=Setting("pair", 2, calm=4.0), faults=[])


def rollout() -> Callable[[], Any]:
    from shoal.node.rl.tiny import Tiny, Warm
    from tests.node.rl.test_task import ENV, SHARD, tasks

    policy = Tiny(ENV.made, seed=1, width=16, warm=Warm(steps=2, batch=4))

    def run() -> None:
        both, _ = tasks(policy=policy, local=1, external=1)
        loops = [(task, task.batches(SHARD)) for task in both]
        for _ in range(2):
            for task, batches in loops:
                task.loss(task.model(), next(batches)).backward()

    return run


def join() -> Callable[[], Any]:
    import torch

    import shoal

    creator = subprocess.Popen(
        [sys.executable, "-c", CREATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    stop = threading.Timer(600.0, creator.kill)
    stop.daemon = True
    stop.start()
    assert creator.stdout is not None
    link = creator.stdout.readline().decode().strip()
    net, here = (
        torch.nn.Linear(4, 4),
        shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off"),
    )

    def run() -> None:
        with shoal.join(link, state=net, network=here) as session:
            session.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        creator.communicate(timeout=120)

    return run


def claim() -> Callable[[], Any]:
    from tests.node.verify.board import Board, Node, calibrate, run

    folder = Path(tempfile.mkdtemp())
    calibration, board = calibrate(folder / "tiny.calibration", claims=40), Board()
    nodes = [
        Node(board, name, folder, calibration, seed=seed)
        for seed, name in enumerate(("ann", "bob", "cat", "dan"))
    ]

    def vote() -> None:
        run(board, nodes, 6)
        shutil.rmtree(folder)

    return vote


STREETS = {"pair": pair, "rollout": rollout, "join": join, "claim": claim}


def main(argv: list[str]) -> int:
    found: dict[str, Any] = dict(sizes())
    if "--no-streets" not in argv:
        files = {name: entered(street()) for name, street in STREETS.items()}
        found["streets"] = (
            files if "--files" in argv else {name: len(each) for name, each in files.items()}
        )
    print(json.dumps(found, indent=None if "--json" in argv else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

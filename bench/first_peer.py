"""How long `shoal watch` takes from its start until it shows a peer, and all of them: as lines, as
a page, on a terminal.

    shoal demo --peers 4 --rounds 300          # prints a link
    python bench/first_peer.py LINK --peers 4 --runs 5

Most of it is importing, so on a busy machine it says how busy that is. As root,
`chrt -f 10 python bench/first_peer.py ...` gives the watcher a processor of its own, as on a
machine with one to spare.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Generator
from urllib.request import urlopen

LIMIT_S = 60
SEEN = re.compile(rb"peer-\d+")  # the names of a demo's nodes


def watch(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal", "watch", *arguments, "--seconds", str(LIMIT_S)]


def lines(link: str) -> Generator[bytes, None, None]:
    with subprocess.Popen(watch(link, "--json"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield from process.stdout
        finally:
            process.terminate()


def page(link: str) -> Generator[bytes, None, None]:
    with subprocess.Popen(watch(link, "--web", "0"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            with urlopen(process.stdout.readline().strip() + "events", timeout=LIMIT_S) as events:
                yield from events
        finally:
            process.terminate()


def screen(link: str) -> Generator[bytes, None, None]:
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        watch(link, "--tui"), stdin=there, stdout=there, stderr=there, env=env
    ) as process:
        os.close(there)
        try:
            while select.select([here], [], [], LIMIT_S)[0]:
                yield os.read(here, 1 << 16)
        finally:
            process.terminate()
            os.close(here)


FORMS = {"--json": lines, "--web": page, "--tui": screen}


def measure(form: str, link: str, peers: int) -> tuple[float, float]:
    """Seconds until the first peer's name is there, and until all are."""
    began, first, names = time.perf_counter(), 0.0, set[bytes]()
    shown = FORMS[form](link)
    try:
        for piece in shown:
            names.update(SEEN.findall(piece))
            now = time.perf_counter() - began
            if names and not first:
                first = now
            if len(names) >= peers:
                return first, now
    finally:
        shown.close()
    raise SystemExit(
        f"{form}: {len(names)} of {peers} peers were seen in {LIMIT_S} s: is the demo still "
        "running?"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("link")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = {
        form: [measure(form, chosen.link, chosen.peers) for _ in range(chosen.runs)]
        for form in FORMS
    }
    if chosen.json:
        print(json.dumps({"load": os.getloadavg()[0], "seconds": found}))
        return
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; median (least to most) of "
        f"{chosen.runs}, seconds"
    )
    print("| form | first peer | all |\n|---|---|---|")
    for form, runs in found.items():
        first, both = ([run[at] for run in runs] for at in (0, 1))
        cells = [
            f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
            for times in (first, both)
        ]
        print(f"| `{form}` | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()

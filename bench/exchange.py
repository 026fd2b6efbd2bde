"""How long two processes on this machine take to exchange and average a payload:
`python bench/exchange.py --mb 4,40,400`.

Ours is the whole of a round: copy and digest of the tensors, finding the partner, the encrypted
transfer both ways through two daemons, verification, confirm, mean. Raw TCP moves the same bytes
both ways and does nothing else, by asyncio's streams with their defaults (bench/_contenders.py says
what is faster). "hivemind" is a whole ``step`` of its DecentralizedAverager, finding the partner
included, "allreduce" the same without that. The contenders take turns, so that a change of the
machine's pace meets all of them; one turn of each is thrown away, the median of the others counts.
Processor seconds are those of both ends with all that they forked, daemons too: on a machine that
does other work as well they say more than the clock does.

With --rtt the ends, of ours alone (a pair; a group of four that all-reduces float32; one that
gathers int8, of which --mb is the payload) are in network namespaces (as root on Linux) whose link
has that round trip and is fast enough that the delay counts and not the rate: what an exchange
costs in round trips, after some that warm up the connection. Between two exchanges is a pause, as
between the rounds of a training run, after which Linux begins each connection slowly again: the
second figure of a row is that of a system told not to (net.ipv4.tcp_slow_start_after_idle).

With --group the ends are groups of so many members that average --mb of float32 encoded by --codec:
once gathered, and once for each codec of --back, by which averages come back. "sent_per_param": the
bytes that left a member, on average, for each value; "over_formula": those over what
`shoal.swarm.exchange.cost` says. With --mbit (and --rtt, or 0) over links of that rate, in network
namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # called by its path, Python looks only beside this file

from bench._contenders import FLOATS_PER_MB, GROUP, MEMBER, PIECES
from bench._link import Link, LinkError, Namespaces
from shoal.optim.codecs.registry import codec_named
from shoal.optim.codecs.two_way import SEPARATOR, two_way
from shoal.swarm.exchange.cost import Work, payload_sent

ROOT = Path(__file__).resolve().parents[1]
RIVALS = ("tcp", "hivemind", "allreduce")
GROUPS = ("reduced", "gathered")
OURS = ("ours", *GROUPS)
RATE = 125e6  # bytes a second of the link of --rtt
WARM, PAUSE_S = 25, 2.0  # exchanges over it that do not count, and seconds between two
LIMIT = 1800.0  # seconds that the whole may take
PATIENCE = 180.0  # seconds for one answer of a process
ATTEMPTS = (
    3  # of a rival to give the right mean; without it its times are left out, and "wrong" names it
)


class BenchError(Exception):
    """One sentence for the user."""


class Process:
    """One end of a contender in a process of its own, by default bench/_end.py; told and answering
    by JSON lines.
    """

    def __init__(self, kind: str, number: int, command: list[str]) -> None:
        self.name = f"{kind} {number}"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,  # where Python then finds the modules
            # Ctrl-C is for the benchmark, which then ends its processes one by one
            start_new_session=True,
        )
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"the process {self.name} died: its messages above say why.") from None

    def answer(self, patience: float = PATIENCE) -> dict[str, Any]:
        try:
            line = self.answers.get(timeout=patience)
        except queue.Empty:
            raise BenchError(
                f"the process {self.name} did not answer within {patience:g} s."
            ) from None
        if not line:
            raise BenchError(f"the process {self.name} died: its messages above say why.")
        return dict(json.loads(line))

    def processor_seconds(self) -> float:
        """Seconds that it and all that it forked have computed so far, those that have ended left
        out.
        """
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            itself = psutil.Process(self.process.pid)
            for process in (itself, *itself.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def close(self) -> None:
        """Let it end by itself, then make sure that it and all that it forked are gone."""
        try:
            itself = psutil.Process(self.process.pid)
            family = [itself, *itself.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for left in psutil.wait_procs(family, timeout=3)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        self.process.wait()


class Contender:
    """Two processes that exchange with each other."""

    def __init__(self, kind: str, link: Link | None = None, count: int | None = None) -> None:
        self.kind = kind
        self.count = count or (GROUP if kind in GROUPS else 2)
        self._link = link
        self.sent = 0  # bytes that left all ends in the last exchange
        self.ends: list[Process] = []
        self.peak = 0.0  # most megabytes that one end held during the exchanges of the present size
        self.before = 0.0  # and before them, tensors included
        self.computed: list[float] = []  # processor seconds of each of them, by both ends

    def begin(self) -> None:
        for number in range(self.count):
            command = [sys.executable, "-m", "bench._end", self.kind, str(number), str(LIMIT)]
            if self._link is not None:
                command = [*self._link.enter(number), *command, self._link.ip(number)]
            self.ends.append(Process(self.kind, number, command))
        addresses = [end.answer()["address"] for end in self.ends]
        self._all(
            [
                {"do": "meet", "others": [other for other in addresses if other is not own]}
                for own in addresses
            ]
        )

    def _all(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for end, order in zip(self.ends, orders, strict=True):
            end.tell(**order)
        return [end.answer() for end in self.ends]

    def first(self, mb: int) -> bool:
        """Whether the mean is right, in an exchange that does not count.

        Rivals are given three attempts.
        """
        for _ in range(ATTEMPTS if self.kind in RIVALS else 1):
            self.turn(mb)
            if all(end["right"] for end in self._all([{"do": "check"}] * len(self.ends))):
                self.peak, self.computed = 0.0, []
                return True
        return False

    def turn(self, mb: int) -> float:
        """Seconds of one exchange: both ends are ready, both are told to go, the slower one
        counts.
        """
        ready = self._all([{"do": "prepare", "mb": mb}] * len(self.ends))
        began = sum(end.processor_seconds() for end in self.ends)
        done = self._all([{"do": "go"}] * len(self.ends))
        self.computed.append(sum(end.processor_seconds() for end in self.ends) - began)
        if self.peak == 0.0:
            self.before = max(end["before"] for end in ready) / 1e6
        self.peak = max(self.peak, *(end["peak"] / 1e6 for end in done))
        self.sent = sum(end["sent"] for end in done)
        return float(max(end["seconds"] for end in done))

    def close(self) -> None:
        for end in self.ends:
            end.close()


def measure(sizes: list[int], rivals: list[str], repeats: int) -> list[dict[str, Any]]:
    """One row per size; seconds are medians."""
    contenders = [Contender(kind) for kind in ("ours", *rivals)]
    rows = []
    try:
        for contender in contenders:
            contender.begin()
        for mb in sizes:
            seconds: dict[str, list[float]] = {contender.kind: [] for contender in contenders}
            right = [contender for contender in contenders if contender.first(mb)]
            if contenders[0] not in right:
                raise BenchError(f"our exchange of {mb} MB gave a wrong result.")
            for _ in range(repeats):
                for contender in right:
                    seconds[contender.kind].append(contender.turn(mb))
            rows.append(row(mb, seconds, contenders[0]))
            rows[-1]["processor_seconds"] = {
                each.kind: round(statistics.median(each.computed), 3) for each in right
            }
    finally:
        for contender in contenders:
            contender.close()
    return rows


def row(mb: int, seconds: dict[str, list[float]], ours: Contender) -> dict[str, Any]:
    median = {kind: statistics.median(values) for kind, values in seconds.items() if values}
    found: dict[str, Any] = {"mb": mb, "seconds": round(median["ours"], 4)}
    for rival in RIVALS:
        found[f"ratio_{rival}"] = (
            round(median[rival] / median["ours"], 3) if rival in median else None
        )
        found[f"{rival}_seconds"] = round(median[rival], 4) if rival in median else None
    found["wrong"] = [kind for kind, values in seconds.items() if not values]
    found["peak_rss_mb"] = round(ours.peak, 1)
    found["before_rss_mb"] = round(ours.before, 1)
    found["all_seconds"] = {
        kind: [round(value, 4) for value in values] for kind, values in seconds.items()
    }
    return found


def over_distance(
    sizes: list[int], trips: list[int], kinds: list[str], repeats: int
) -> list[dict[str, Any]]:
    """One row per round trip, in ms, kind and size: the median exchange, with a kernel as it is and
    one that stays quick.
    """
    rows = []
    for trip, kind in itertools.product(trips, kinds):
        kernels: list[dict[int, float]] = []
        for knobs in ({}, {"tcp_slow_start_after_idle": "0"}):
            try:
                link = Namespaces(
                    GROUP if kind in GROUPS else 2, RATE, trip / 2000, mtu=1500, knobs=knobs
                )
            except LinkError as error:
                raise BenchError(f"--rtt: {error}.") from None
            contender = Contender(kind, link)
            try:
                contender.begin()
                kernels.append({})
                for mb in sizes:
                    if not contender.first(mb):
                        raise BenchError(f"our exchange of {mb} MB ({kind}) gave a wrong result.")
                    seconds = []
                    for number in range(WARM + repeats):
                        time.sleep(PAUSE_S if number >= WARM else 0.0)
                        seconds.append(contender.turn(mb))
                    kernels[-1][mb] = statistics.median(seconds[WARM:])
            finally:
                contender.close()
                link.close()
        for mb in sizes:
            slow, quick = (found[mb] for found in kernels)
            rows.append(
                {
                    "kind": kind,
                    "rtt_ms": trip,
                    "mb": mb,
                    "seconds": round(slow, 4),
                    "round_trips": round(slow * 1000 / trip, 2),
                }
            )
            rows[-1] |= {
                "quick_seconds": round(quick, 4),
                "quick_round_trips": round(quick * 1000 / trip, 2),
            }
    return rows


def of_groups(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of members, size and codec: bytes of a member, and seconds."""
    rows = []
    codecs = [options.codec, *(f"{options.codec}{SEPARATOR}{back}" for back in options.back)]
    for count, codec in itertools.product(options.group, codecs):
        link: Namespaces | None = None
        if options.mbit:
            delay_s = (options.rtt or [0])[0] / 2000
            try:
                link = Namespaces(count, options.mbit * 1e6 / 8, delay_s, mtu=1500)
            except LinkError as error:
                raise BenchError(f"--mbit: {error}.") from None
        contender = Contender(f"{MEMBER} {count} {codec}", link, count)
        try:
            contender.begin()
            for mb in options.mb:
                if not contender.first(mb):
                    raise BenchError(f"the exchange of {count} by {codec} gave a wrong result.")
                seconds, sent = [], []
                for _ in range(options.repeats):
                    seconds.append(contender.turn(mb))
                    sent.append(contender.sent / count / (mb * FLOATS_PER_MB))
                rows.append(group_row(count, codec, mb, seconds, sent))
                rows[-1] |= {"mbit": options.mbit, "rtt_ms": (options.rtt or [0])[0]}
        finally:
            contender.close()
            if link is not None:
                link.close()
    return rows


def group_row(
    count: int, codec: str, mb: int, seconds: list[float], sent: list[float]
) -> dict[str, Any]:
    params = mb * FLOATS_PER_MB
    shapes = [(params // PIECES,)] * PIECES
    made = codec_named(codec)
    both_ways = two_way(made)
    back = 0 if both_ways is None else both_ways.back.nbytes(shapes)
    work = Work(
        "everyone", made.nbytes(shapes), params, count, every=1, step_s=1.0, sums=False, back=back
    )
    formula = payload_sent(work) / params
    found = statistics.median(sent)
    return {
        "members": count,
        "codec": codec,
        "mb": mb,
        "sent_per_param": round(found, 5),
        "formula": round(formula, 5),
        "over_formula": round(found / formula, 4),
        "seconds": round(statistics.median(seconds), 4),
        "all_seconds": [round(value, 4) for value in seconds],
    }


def show_groups(rows: list[dict[str, Any]]) -> None:
    names = ("members", "codec", "mb", "sent_per_param", "formula", "over_formula", "seconds")
    table = Table(*names, title="Groups")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    Console(stderr=True).print(table)


def show_distance(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "kind",
        "round trip ms",
        "MB",
        "s",
        "round trips",
        "quick s",
        "quick round trips",
        title="Over a distance",
    )
    for row in rows:
        names = ("rtt_ms", "mb", "seconds", "round_trips", "quick_seconds", "quick_round_trips")
        table.add_row(row["kind"], *(f"{row[name]:g}" for name in names))
    Console(stderr=True).print(table)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "MB",
        "ours s",
        "TCP s",
        "hivemind s",
        "TCP / ours",
        "hivemind / ours",
        "peak MB",
        title="Pair exchange",
    )
    for row in rows:
        names = (
            "mb",
            "seconds",
            "tcp_seconds",
            "hivemind_seconds",
            "ratio_tcp",
            "ratio_hivemind",
            "peak_rss_mb",
        )
        table.add_row(*("-" if row[name] is None else f"{row[name]:g}" for name in names))
    Console(stderr=True).print(table)


def arguments() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        values = [int(part) for part in text.split(",")]
        if not all(1 <= value <= 4000 for value in values):
            raise argparse.ArgumentTypeError("sizes are whole numbers of megabytes from 1 to 4000")
        return values

    def rivals(text: str) -> list[str]:
        names = [part for part in text.split(",") if part]
        if not set(names) <= set(RIVALS):
            raise argparse.ArgumentTypeError(f"choose among {', '.join(RIVALS)}")
        return list(dict.fromkeys(names))

    def kinds(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(OURS):
            raise argparse.ArgumentTypeError(f"choose among {', '.join(OURS)}")
        return list(dict.fromkeys(names))

    def delays(text: str) -> list[int]:
        values = [int(part) for part in text.split(",")]
        if not all(1 <= value <= 2000 for value in values):
            raise argparse.ArgumentTypeError("round trips are whole milliseconds from 1 to 2000")
        return values

    def members(text: str) -> list[int]:
        values = [int(part) for part in text.split(",")]
        if not all(2 <= value <= 16 for value in values):
            raise argparse.ArgumentTypeError("members are whole numbers from 2 to 16")
        return values

    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    def count(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError("must be at least 1")
        return int(text)

    parser = argparse.ArgumentParser(
        description="Time the exchange of a pair or a group of nodes on this machine."
    )
    parser.add_argument(
        "--mb", type=sizes, default=[4, 40, 400], help="sizes in million bytes, separated by commas"
    )
    parser.add_argument(
        "--against",
        type=rivals,
        default=list(RIVALS),
        help="of tcp, hivemind and allreduce, or '' for none",
    )
    parser.add_argument(
        "--rtt",
        type=delays,
        help="ours alone over links with these round trips, in ms, separated by commas",
    )
    parser.add_argument(
        "--kinds",
        type=kinds,
        default=list(OURS),
        help="of --rtt: ours (a pair), reduced, gathered (groups)",
    )
    parser.add_argument(
        "--group",
        type=members,
        help="groups of so many members, separated by commas: by --codec, gathered and by --back",
    )
    parser.add_argument("--codec", default="sign+ef", help="of --group: that of contributions")
    parser.add_argument(
        "--back",
        type=names,
        default=["sign+ef", "auto:2+ef", "e3m0+ef"],
        help="of --group: those of averages, separated by commas, or '' for none",
    )
    parser.add_argument(
        "--mbit", type=count, help="of --group: over links of so many Mbit/s each way"
    )
    parser.add_argument(
        "--repeats", type=count, default=5, help="exchanges of each size that count"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        if options.group is not None:
            rows = of_groups(options)
        elif options.rtt is None:
            rows = measure(options.mb, options.against, options.repeats)
        else:
            rows = over_distance(options.mb, options.rtt, options.kinds, options.repeats)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.group is not None:
        show_groups(rows)
    elif options.rtt is None:
        show(rows)
    else:
        show_distance(rows)
    if options.json:
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        with contextlib.suppress(OSError):
            machine["tcp"] = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        took = round(time.monotonic() - began, 1)
        print(
            json.dumps({"rows": rows, "machine": machine, "repeats": options.repeats, "took": took})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

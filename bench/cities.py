"""A team in three cities, and what happens to it: `python bench/cities.py [SCENARIO ...]`.

Four nodes (`shoal up` and `join`), each at home behind a port-restricted router of `bench._nat`,
and a bootstrap node that relays. The lines of the homes have 5 Mbit/s up with a buffer of 2 s, 20
Mbit/s down, and 10, 30, 60 and 10 ms one way; the third loses 1 % of its packets. They average a
model of 1.06 M parameters with NoLoCo, in rounds of 20 s, in four fragments. Then something
happens:

    together    nothing, for ten minutes
    cut         bert's line loses everything for 60 s
    address     bert's router gets another public address, and drops what it knew of the old one
    restart     the bootstrap node is ended, and started again after 60 s
    creator     the node that created the swarm is killed
    asleep      all processes of bert's machine are stopped for two minutes
    roam        bert's machine is taken to a mobile network: another router, another address, 200 ms
                there and back, 3 % loss
    mobile      bert has been there from the beginning; nothing happens, for five minutes
    neighbours  dora is behind anna's router, which sends nothing back inside; nothing happens, for
                three minutes (`local`: connections of the two over their network at home)

A row says of each node which share of the time it computed, for how long it stood still at most
between two steps (`stood_s`), and how many seconds after the network was whole again its next
exchange ended (`found_s`); what `shoal status` and `shoal watch`, on another public machine, said
meanwhile; `faults`: what did not happen as is promised; and `late`: what took longer. It is
appended to --results as soon as it is measured, and a scenario in there is not measured again.
Needs root on Linux, and 4 to 13 minutes a scenario.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # called by its path, Python looks only beside this file

from bench._nat import Internet, Uplink  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "cities.jsonl"
TASK = f"{ROOT / 'bench' / '_cities_task.py'}:Noted"
PORT = 4001
SETTINGS = """
[swarm]
name = "three-cities"
start_when = 3
shards = 4
[outer]
method = "noloco"
round = "seconds:20"
codec = "bfloat16"
wait_s = 20
[train]
steps = 0
"""
LINE = Uplink(up=5e6 / 8, down=20e6 / 8)
CITIES = tuple(
    dataclasses.replace(LINE, delay=delay, loss=loss)
    for delay, loss in ((0.01, 0), (0.03, 0), (0.06, 0.01), (0.01, 0))
)
MOBILE = dataclasses.replace(LINE, delay=0.1, loss=0.03)
NAMES = ("anna", "bert", "carl", "dora")
START_S, MEET_S = (
    300.0,
    600.0,
)  # seconds for a command to say something, and for all to have exchanged twice
CALM_S = 20.0  # seconds of exchanges before something happens
DOWN_S, ASLEEP_S = 60.0, 120.0
AFTER_S = 90.0  # seconds that are watched when all is whole again
ENDED_S = 5.0  # seconds in which exchanges may end that were under way before something happened
FOUND_S, STOOD_S, COMPUTING, UNHEARD_S = 60.0, 5.0, 0.95, 30.0  # what is promised
LOSSY, SLOW = "carl", " has a slow link"  # whose line loses packets, so that it is slow indeed
AFTERWARDS = (
    ("found_s", "exchanged"),
    ("heard_s", "was shown by watch"),
)  # what each node is seen to do once all is whole
CALM = ("together", "mobile", "neighbours")  # nothing happens
BEHIND = ("relayed", "punched")  # how a node behind such a router can be reached


class Node:
    """A node of the team, its process, and what it has written."""

    def __init__(self, name: str, place: str, folder: Path, process: subprocess.Popen[str]) -> None:
        self.name, self.place, self.process = name, place, process
        self._folder = folder

    def rounds(self, since: float = 0.0) -> list[dict[str, Any]]:
        """The exchanges that ended since then."""
        path = self._folder / self.name / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = (json.loads(line) for line in lines if line.endswith("\n"))
        return [event for event in events if event["event"] == "round" and event["time"] > since]

    def met(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Those of them with a partner."""
        return [event for event in self.rounds(since) if event["members"] > 1]

    def pauses(self, since: float, until: float) -> list[float]:
        """The seconds between any two steps, of those that ended in between."""
        moments = [
            float(line)
            for line in (self._folder / f"{self.name}.steps").read_text().split("\n")[:-1]
        ]
        return [
            later - earlier
            for earlier, later in itertools.pairwise([*moments, time.time()])
            if since < later and earlier < until
        ]


class Team:
    """The bootstrap node and the nodes in their networks. NatError if that does not work here."""

    def __init__(
        self, folder: Path, uplinks: Iterable[Uplink] = CITIES, *, neighbours: bool = False
    ) -> None:
        self.folder = folder
        self.net = Internet(["port"] * 5, 1, uplinks=[*uplinks, MOBILE])
        self.nodes: dict[str, Node] = {}
        self._others: list[subprocess.Popen[str]] = []
        self._reading: list[threading.Thread] = []
        self.link = ""
        self.heard: list[dict[str, Any]] = []
        """What `shoal watch` printed."""
        self.told: list[dict[str, Any]] = []
        """What `shoal status` said, and when."""
        self._places = [f"home-{number}" for number in range(len(NAMES))]
        if neighbours:
            self._places[3] = self.net.neighbour("router-0")
        (folder / "team.toml").write_text(SETTINGS)

    def start(self) -> None:
        """Start all, and wait until each has exchanged twice. TimeoutError."""
        self.bootstrap()
        for name, place in zip(NAMES, self._places, strict=True):
            self._node(name, place)
        watch = self._run("watch", "peer-1", "watch", self.link, "--json")
        self._others.append(watch)
        self._reading.append(threading.Thread(target=self._listen, args=(watch,), daemon=True))
        self._reading[-1].start()
        until(
            lambda: all(len(node.met()) > 1 for node in self.nodes.values()),
            MEET_S,
            "an exchange of each",
        )

    def bootstrap(self) -> None:
        """Start the bootstrap node, or start it again."""
        listen = (
            "--listen",
            f"/ip4/{self.net.ip('seed')}/tcp/{PORT}",
            "--identity",
            str(self.folder / "seed.key"),
        )
        self.seed = self._run("seed", "seed", "seed", "--relay", "--json", *listen)
        addresses = json.loads(self._line(self.seed))["addresses"]
        (self.address,) = [
            address for address in addresses if f"{self.net.ip('seed')}/tcp/" in address
        ]

    def _node(self, name: str, place: str) -> None:
        verb = (
            ["join", self.link]
            if self.nodes
            else ["up", str(self.folder / "team.toml"), "--bootstrap", self.address]
        )
        own = (
            "--name",
            name,
            "--folder",
            str(self.folder / name),
            "--identity",
            str(self.folder / f"{name}.key"),
        )
        common = (
            "--listen",
            f"/ip4/0.0.0.0/tcp/{PORT}",
            "--task",
            TASK,
            "--threads",
            "1",
            "--verbose",
        )
        process = self._run(name, place, *verb, *own, *common)
        if not self.nodes:
            self.link = self._line(process)
        self.nodes[name] = Node(name, place, self.folder, process)

    def _run(self, name: str, place: str, *arguments: str) -> subprocess.Popen[str]:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),
            "XDG_CONFIG_HOME": str(self.folder),
        }
        env |= {"CITIES_STEPS": str(self.folder / f"{name}.steps"), "PYTHONPATH": str(ROOT)}
        command = [*self.net.enter(place), sys.executable, "-m", "shoal", *arguments]
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                command,
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _line(self, process: subprocess.Popen[str]) -> str:
        found: list[str] = []
        assert process.stdout is not None
        output = process.stdout
        reader = threading.Thread(target=lambda: found.append(output.readline()), daemon=True)
        reader.start()
        reader.join(START_S)
        if not found or not found[0]:
            raise TimeoutError(
                f"a command said nothing for {START_S:g} s, or ended: {process.args!r}"
            )
        return found[0].strip()

    def _listen(self, watch: subprocess.Popen[str]) -> None:
        assert watch.stdout is not None
        for line in watch.stdout:
            self.heard.append(json.loads(line))

    def status(self, when: str) -> dict[str, Any]:
        """Ask `shoal status` on another public machine, and keep what it says."""
        began = time.monotonic()
        asking = self._run("status", "peer-1", "status", self.link, "--json")
        try:
            said, _ = asking.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            asking.kill()
            said = ""
        report = json.loads(said) if said else {"members": [], "findings": []}
        members = {
            member["name"]: {
                "state": member["progress"]["state"],
                "reach": member["link"]["reach"],
                "seen_s_ago": member["seen_s_ago"],
                "exchanges": member["faults"]["recent"],
                "failures": dict(member["faults"]["failures"]),
            }
            for member in report["members"]
        }
        took = round(time.monotonic() - began, 1)
        self.told.append(
            {"when": when, "seconds": took, "members": members, "findings": report["findings"]}
        )
        return self.told[-1]

    def signal(self, name: str, number: int) -> None:
        """Send a signal to all processes of the machine of a node: the node, its daemons, and what
        watches over them.
        """
        for pid in self.net.processes(self.nodes[name].place):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> dict[str, int]:
        """End the nodes as a person does; return their exit codes."""
        for node in self.nodes.values():
            node.process.send_signal(signal.SIGINT)
        return {node.name: node.process.wait(60) for node in self.nodes.values()}

    def close(self) -> None:
        """End all that still runs, and remove the networks."""
        until(lambda: not self._killed(), 30, "the end of all processes")
        for thread in self._reading:
            thread.join(10)
        self.net.close()

    def _killed(self) -> list[int]:
        """Kill what runs in the networks, and return what that was."""
        found = [
            pid for place in ("seed", "peer-1", *self._places) for pid in self.net.processes(place)
        ]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self.seed, *self._others, *(node.process for node in self.nodes.values())):
            process.poll()  # or it would stay there as a zombie
        return found


def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait until ``condition`` holds. TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.2)


# What happens: each function returns the names of those to whom it happens, when all is whole
# again. Before that it may ask.


def together(team: Team) -> set[str]:
    """Let ten minutes pass."""
    time.sleep(600 - AFTER_S)
    return set()


def mobile(team: Team) -> set[str]:
    """Let five minutes pass."""
    time.sleep(300 - AFTER_S)
    return {"bert"}


def neighbours(team: Team) -> set[str]:
    """Let three minutes pass."""
    time.sleep(180 - AFTER_S)
    return set()


def cut(team: Team) -> set[str]:
    """Cut bert's line."""
    team.net.cut("router-1", True)
    time.sleep(DOWN_S - 15)
    team.status("cut")
    time.sleep(15)
    team.net.cut("router-1", False)
    return {"bert"}


def address(team: Team) -> set[str]:
    """Give bert's router another address."""
    team.net.move("router-1")
    return {"bert"}


def restart(team: Team) -> set[str]:
    """End the bootstrap node, and start it again."""
    team.seed.send_signal(signal.SIGTERM)
    team.seed.wait(30)
    time.sleep(DOWN_S)
    team.bootstrap()
    return set()


def creator(team: Team) -> set[str]:
    """Kill all processes of the node that created the swarm."""
    team.signal("anna", signal.SIGKILL)
    return {"anna"}


def asleep(team: Team) -> set[str]:
    """Have bert's machine sleep."""
    team.signal("bert", signal.SIGSTOP)
    time.sleep(ASLEEP_S - 15)
    team.status("asleep")
    time.sleep(15)
    team.signal("bert", signal.SIGCONT)
    return {"bert"}


def roam(team: Team) -> set[str]:
    """Take bert's machine to another network."""
    team.net.roam("home-1", "router-4")
    return {"bert"}


SCENARIOS: dict[str, Callable[[Team], set[str]]] = {
    each.__name__: each
    for each in (together, cut, address, restart, creator, asleep, roam, mobile, neighbours)
}


def measured(scenario: str, folder: Path) -> dict[str, Any]:
    """Measure one scenario; logs and metrics of the nodes stay in the empty ``folder``.

    NatError or TimeoutError.
    """
    started = time.monotonic()
    uplinks = [CITIES[0], MOBILE, *CITIES[2:]] if scenario == "mobile" else CITIES
    team = Team(folder, uplinks, neighbours=scenario == "neighbours")
    try:
        team.start()
        time.sleep(CALM_S)
        team.status("before")
        for number in range(len(NAMES)):
            team.net.carried(f"router-{number}")
        broke = time.time()
        struck = SCENARIOS[scenario](team)
        whole = time.time()
        time.sleep(AFTER_S - 15)
        team.status("after")
        time.sleep(max(whole + AFTER_S - time.time(), 0))
        return row(scenario, team, struck, broke, whole) | {
            "seconds": round(time.monotonic() - started)
        }
    finally:
        team.close()


def row(scenario: str, team: Team, struck: set[str], broke: float, whole: float) -> dict[str, Any]:
    """What is known when a scenario is over."""
    end = time.time()
    gone = {"anna"} if scenario == "creator" else set()
    there = {name: node for name, node in team.nodes.items() if name not in gone}
    computing, stood, waited = {}, {}, {}
    for name, node in there.items():
        pauses = node.pauses(broke, end)
        usual = statistics.median(pauses)
        computing[name] = round(sum(min(pause, 2 * usual) for pause in pauses) / sum(pauses), 3)
        stood[name] = round(max(pauses) - usual, 1)
        waited[name] = round(max((event["wait_s"] for event in node.rounds(broke)), default=0.0), 1)
    statuses = {
        name: [
            event["time"]
            for event in list(team.heard)
            if event["event"] == "status" and event["status"]["name"] == name
        ]
        for name in there
    }
    queues = [team.net.carried(f"router-{number}")[0]["queue_s"] for number in range(len(NAMES))]
    result: dict[str, Any] = {
        "scenario": scenario,
        "struck": sorted(struck),
        "down_s": round(whole - broke, 1),
        "computing": computing,
        "stood_s": stood,
        "waited_s": waited,
        "found_s": {
            name: next((round(e["time"] - whole, 1) for e in node.met(whole + ENDED_S)), None)
            for name, node in there.items()
        },
        "exchanges": {
            name: [len(node.met(broke)), len(node.rounds(broke))] for name, node in there.items()
        },
        "heard_s": {
            name: next((round(m - whole, 1) for m in moments if m > whole), None)
            for name, moments in statuses.items()
        },
        "unheard_s": {
            name: longest([broke, *(m for m in moments if broke < m), end])
            for name, moments in statuses.items()
        },
        "status": team.told,
        "queue_s": max(queues),
        "load": round(os.getloadavg()[1], 1),
    }
    if scenario == "neighbours":
        there_too = team.net.local(team.nodes["dora"].place)
        seen = subprocess.run(
            [*team.net.enter("home-0"), "ss", "-Htun", "dst", there_too],
            capture_output=True,
            text=True,
            check=True,
        )
        result["local"] = len(seen.stdout.splitlines())
    result["codes"] = {name: code for name, code in team.stop().items() if name not in gone}
    return result | {"faults": faults(result), "late": late(result)}


def longest(moments: list[float]) -> float:
    """The longest time between two of them."""
    return round(max(later - earlier for earlier, later in itertools.pairwise(moments)), 1)


def late(row: dict[str, Any]) -> list[str]:
    """What in a row takes longer than is promised, in sentences: on a machine that does nothing
    else.
    """
    found = []
    for name in row["stood_s"]:
        if (
            row["computing"][name] < COMPUTING
            and row["scenario"] in CALM
            and name not in row["struck"]
        ):
            found.append(f"{name} computed {row['computing'][name]} of the time")
        if name not in row["struck"] and row["stood_s"][name] > STOOD_S:
            found.append(
                f"{name} stood still for {row['stood_s'][name]} s (waited {row['waited_s'][name]} "
                "s)"
            )
        for what, said in AFTERWARDS:
            if row[what][name] is not None and row[what][name] > FOUND_S:
                found.append(f"{name} {said} {row[what][name]} s after all was whole")
        if (
            name not in row["struck"]
            and row["scenario"] != "restart"
            and row["unheard_s"][name] > UNHEARD_S
        ):
            found.append(f"watch showed nothing of {name} for {row['unheard_s'][name]} s")
    for told in row["status"]:
        found += [
            f"status {told['when']}: {said}"
            for said in told["findings"]
            if SLOW in said and not said.startswith(LOSSY)
        ]
    return found


def faults(row: dict[str, Any]) -> list[str]:
    """What in a row does not happen as is promised, however slow the machine is, in sentences."""
    found = []
    for name in row["stood_s"]:
        for what, said in AFTERWARDS:
            if row[what][name] is None:
                found.append(f"{name} never {said} after all was whole")
        if row["codes"][name] != 128 + signal.SIGINT:
            found.append(f"{name} ended with {row['codes'][name]}")
    for told in row["status"]:
        for name in row["stood_s"]:
            reach = told["members"].get(name, {}).get("reach")
            if reach not in BEHIND and (
                name not in row["struck"] or told["when"] in ("before", "after")
            ):
                found.append(f"{name} is {reach} in status {told['when']}")
        found += [f"status {told['when']}: {said}" for said in told["findings"] if wrong(said, row)]
    if row.get("local") == 0:
        found.append("anna and dora have no connection at home")
    return found


def wrong(finding: str, row: dict[str, Any]) -> bool:
    """Whether a sentence of the health report blames somebody to whom nothing happened."""
    name = finding.split()[0]
    right = SLOW in finding or (row["scenario"] == "restart" and "none is to blame" in finding)
    return name not in row["struck"] and not right


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as a table: of those to whom nothing happened the least and the longest, and of all
    the latest.
    """
    lines = [
        "| | down | computed | stood still | exchanged again | shown again | exchanges with a "
        "partner |",
        "|" + "---|" * 7,
    ]
    for row in rows:
        others = [name for name in row["computing"] if name not in row["struck"]]
        back = [name for name in row["struck"] if name in row["computing"]] or others
        met, tried = (sum(row["exchanges"][name][at] for name in row["exchanges"]) for at in (0, 1))
        after = [
            "never" if None in found else f"{max(found):.0f} s"
            for found in ([row[k][n] for n in back] for k in ("found_s", "heard_s"))
        ]
        down = f"{row['down_s']:.0f} s" if row["scenario"] in ("cut", "restart", "asleep") else ""
        computed, stood = (
            min(row["computing"][name] for name in others),
            max(row["stood_s"][name] for name in others),
        )
        lines.append(
            f"| {row['scenario']} | {down} | {computed:.2f} | {stood:.1f} s | {' | '.join(after)} "
            f"| {met} of {tried} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the scenarios named, or all, that are not in the results yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=list(SCENARIOS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="a folder for what the nodes wrote")
    parser.add_argument(
        "--table", action="store_true", help="measure nothing: print the results as a table"
    )
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.touch()
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    known = {row["scenario"] for row in rows}
    if options.table:
        print(table(rows))
        return
    for scenario in options.scenarios:
        if scenario in known:
            continue
        with tempfile.TemporaryDirectory(prefix="city-") as folder:
            try:
                made = measured(scenario, Path(folder))
            finally:
                if options.keep:
                    shutil.copytree(
                        folder,
                        options.keep / scenario,
                        ignore=shutil.ignore_patterns("shoal-*", "*.key*"),
                        dirs_exist_ok=True,
                    )
        with options.results.open("a") as file:
            file.write(json.dumps(made) + "\n")
        print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()

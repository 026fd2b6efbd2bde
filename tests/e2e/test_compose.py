"""What `docker compose up` starts (compose.yaml), without Docker: each command and each health
check of it, as processes.

Names of containers become this machine, their ports free ones, and their volume a folder; all else
is the file's.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from shoal.swarm.p2p.listening import obtain_ports

ROOT = Path(__file__).resolve().parents[2]


class Compose:
    """The services of compose.yaml; ``shoal`` starts them."""

    def __init__(self, shoal, eventually):
        self.shoal, self.eventually = shoal, eventually
        self.services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
        texts = {
            port
            for service in self.services.values()
            for port in re.findall(r"(?:tcp/|0:)(\d+)", service["command"][0])
        }
        free = obtain_ports(["/ip4/127.0.0.1/tcp/0"] * len(texts))
        self.ports = {
            port: at.rpartition("/")[2] for port, at in zip(sorted(texts), free, strict=True)
        }
        self.data = shoal.home / "data"
        self.data.mkdir()
        tools = shoal.home / "bin"
        tools.mkdir()
        scripts = {
            "shoal": f"exec {sys.executable} -m shoal",
            "shoal-health": f"exec sh {ROOT}/docker/health.sh",
        }
        for name, script in scripts.items():
            (tools / name).write_text(f'#!/bin/sh\n{script} "$@"\n')
            (tools / name).chmod(0o755)
        shoal.env.update(
            PATH=f"{tools}:{os.environ['PATH']}",
            XDG_CONFIG_HOME=str(self.data / "config"),
            PYTHONPATH=str(ROOT),
        )
        self.running = {}

    def here(self, text):
        """A command as the shell gets it, on this machine in place of five containers."""
        text = re.sub(
            r"/dns4/\w+/tcp/",
            "/dns4/localhost/tcp/",
            text.replace("$$", "$").replace("0.0.0.0", "127.0.0.1"),
        )
        return re.sub(
            r"(tcp/|127\.0\.0\.1:)(\d+)", lambda found: found[1] + self.ports[found[2]], text
        )

    def up(self, *names):
        """Start services in the order in which they depend on each other, each once those it needs
        are healthy.
        """
        for name in names:
            for other, needs in self.services[name].get("depends_on", {}).items():
                assert needs == {"condition": "service_healthy"}
                assert other in self.running
                self.eventually(lambda other=other: self.healthy(other), 120, f"health of {other}")
            service = self.services[name]
            program = [*service["entrypoint"], *map(self.here, service["command"])]
            self.running[name] = self.shoal.start(program=(), before=program, folder=self.data)

    def healthy(self, name):
        kind, *check = self.services[name]["healthcheck"]["test"]
        command = ["sh", "-c", *check] if kind == "CMD-SHELL" else check
        assert self.running[name].popen.poll() is None, self.running[name].said()
        ended = subprocess.run(
            command, cwd=self.data, env=self.shoal.env, capture_output=True, timeout=60, check=False
        )
        return ended.returncode == 0

    def stop(self, *names):
        """What `docker compose stop` does; the exit codes."""
        for name in names:
            self.running[name].signal(signal.SIGTERM)
        return [self.running.pop(name).wait() for name in names]

    def met(self, name):
        path = self.data / "runs" / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(
            '"event": "round"' in line and json.loads(line)["members"] > 1
            for line in lines
            if line.endswith("}")
        )


@pytest.mark.timeout(900)
@pytest.mark.slow(reason="a bootstrap node, three nodes that train and a page")
def test_compose_swarm_survives_a_stop(shoal, eventually):
    """The swarm of docker compose up trains is watched and goes on after a stop."""
    compose = Compose(shoal, eventually)
    compose.up("seed", "first", "second", "third", "page")
    address = compose.running["page"].line().replace("0.0.0.0", "127.0.0.1")

    def page():
        with urlopen(f"{address}events", timeout=30) as stream:
            return json.loads(stream.readline().removeprefix(b"data: "))

    def steps(name):
        return max(int(folder.name[5:]) for folder in (compose.data / "runs" / name).glob("step-*"))

    eventually(
        lambda: {"first", "second", "third"} <= {peer["name"] for peer in page()["peers"]},
        120,
        "a page with all three",
    )
    assert page()["link"] is None  # it is shared
    eventually(lambda: compose.met("second") >= 2 and compose.met("third") >= 2, 120, "exchanges")
    eventually(lambda: all(map(compose.healthy, compose.services)), 60, "health of all")

    assert compose.stop("third") == [130]  # it finished its step and saved
    before = compose.met("first")
    eventually(lambda: compose.met("first") > before, 120, "an exchange of those who stayed")
    before = compose.met("third")
    compose.up("third")
    eventually(lambda: compose.met("third") > before, 120, "an exchange of the one that came back")
    saved = steps("third")

    assert compose.stop("page", "third", "second", "first", "seed") == [
        -signal.SIGTERM,
        130,
        130,
        130,
        0,
    ]
    assert steps("third") > saved
    before = compose.met("first")
    compose.up("seed", "first", "second", "third")
    eventually(lambda: compose.met("first") > before, 120, "an exchange after all began again")

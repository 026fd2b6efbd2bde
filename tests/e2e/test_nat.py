"""Two nodes behind two NATs, which nobody can dial, meet through a seed that forwards, and average."""

import contextlib
import json
import os
import shutil
import subprocess

import pytest

# Addresses that libp2p takes for public ones; no packet leaves the namespaces.
SEED = "11.0.1.2"
NAT = """
table ip shoal {
  chain post { type nat hook postrouting priority 100; oifname "out" masquerade; }
  chain input { type filter hook input priority 0; iifname "out" ct state new drop; }
  chain forward { type filter hook forward priority 0; iifname "out" ct state new drop; }
}
"""


def call(*command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class Internet:
    """Namespaces: ``wan`` routes between ``seed`` and the two NATs, behind which are ``a`` and ``b``. OSError if that fails."""

    def __init__(self):
        self.check()
        self.made = []
        try:
            for name in ("wan", "seed", "nat-a", "nat-b", "a", "b"):
                self.make(name)
            self.forwards("wan")
            for number, name in enumerate(("seed", "nat-a", "nat-b"), 1):
                self.wire("wan", f"to{number}", name, "out", f"11.0.{number}")
            for number, name in enumerate(("a", "b"), 1):
                self.wire(f"nat-{name}", "in", name, "out", f"192.168.{number}")
                self.forwards(f"nat-{name}")
                call(*self.enter(f"nat-{name}"), "nft", "-f", "-", text=NAT)
        except BaseException:
            self.close()
            raise

    def check(self):
        if os.geteuid() != 0:
            raise OSError("network namespaces need root")
        for tool in ("ip", "nft"):
            if shutil.which(tool) is None:
                raise OSError(f"the command {tool} is not installed")

    def full(self, name):
        return f"shoal-nat-{os.getpid()}-{name}"

    def enter(self, name):
        return ["ip", "netns", "exec", self.full(name)]

    def make(self, name):
        call("ip", "netns", "add", self.full(name))
        self.made.append(self.full(name))
        call("ip", "-n", self.full(name), "link", "set", "lo", "up")

    def forwards(self, name):
        call(*self.enter(name), "sysctl", "-qw", "net.ipv4.ip_forward=1")

    def wire(self, router, its, node, own, net):
        router, node = self.full(router), self.full(node)
        call("ip", "-n", router, "link", "add", its, "type", "veth", "peer", "name", own, "netns", node)
        for name, device, host in ((router, its, 1), (node, own, 2)):
            call("ip", "-n", name, "addr", "add", f"{net}.{host}/24", "dev", device)
            call("ip", "-n", name, "link", "set", device, "up")
        call("ip", "-n", node, "route", "add", "default", "via", f"{net}.1")

    def close(self):
        for name in self.made:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                call("ip", "netns", "del", name)


@pytest.fixture
def internet():
    try:
        made = Internet()
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no NAT can be made here: {error}")
    yield made
    made.close()


@pytest.mark.parametrize(
    "relay",
    [
        pytest.param("auto", marks=pytest.mark.slow(reason="relay=auto waits for libp2p to find out that nobody can dial it")),
        "only",
    ],
)
def test_nodes_behind_two_nats_meet_through_a_seed_and_average(internet, shoal, eventually, relay):
    seed = shoal.start(
        "seed", "--relay", "--json", "--listen", f"/ip4/{SEED}/tcp/4001", "--identity", shoal.home / "seed.key",
        before=internet.enter("seed"),
    )  # fmt: skip
    (address,) = [a for a in json.loads(seed.line())["addresses"] if SEED in a]
    assert subprocess.run([*internet.enter("a"), "ping", "-c1", "-W2", "192.168.2.2"], capture_output=True, check=False).returncode
    settings = shoal.toml(
        swarm={"name": "nat", "start_when": 1}, outer={"every": 5, "wait_s": 5.0}, options={"layers": 1, "width": 64, "context": 32}
    )
    common = ("--listen", "/ip4/0.0.0.0/tcp/4001", "--relay", relay)
    first = shoal.node("up", settings, "anna", *common, "--bootstrap", address, before=internet.enter("a"))
    link = first.line()
    assert f"?peer={address}&" in link
    # It trains before anybody can reach it.
    eventually(lambda: [e for e in shoal.metrics("anna") if e["event"] == "round"], 60, "a round of the first alone")
    shoal.node("join", link, "bert", *common, before=internet.enter("b"))

    def met(name):
        return [e for e in shoal.metrics(name) if e["event"] == "round" and e["members"] == 2]

    for name in ("anna", "bert"):
        eventually(lambda name=name: met(name), 150, f"an exchange of {name}")
    # More than a relay with libp2p's own limits lets through.
    eventually(lambda: sum(e["bytes_sent"] for e in met("bert")) > 200_000, 150, "200 kB sent through the relay")

    def relayed():
        report = shoal.start("status", link, "--json", before=internet.enter("seed")).json()
        return {m["name"]: m["reach"] for m in report["members"]} == {"anna": "relayed", "bert": "relayed"}

    eventually(relayed, 60, "both said to be relayed")

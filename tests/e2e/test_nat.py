"""Two nodes behind two NATs, which nobody can dial, meet through a seed that forwards, and average; also after a break."""

import json
import signal
import subprocess
import time

import pytest

from bench._nat import Internet, NatError

SEED = "11.0.1.2"


@pytest.fixture
def internet():
    """The homes ``home-0`` and ``home-1`` behind routers that let in nobody who was not sent to; ``seed``, ``peer-1`` outside."""
    try:
        made = Internet(["port", "port"], peers=1)
    except NatError as error:
        pytest.skip(f"no NAT can be made here: {error}")
    assert made.ip("seed") == SEED
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
    assert subprocess.run(
        [*internet.enter("home-0"), "ping", "-c1", "-W2", "192.168.8.2"], capture_output=True, check=False
    ).returncode
    settings = shoal.toml(
        swarm={"name": "nat", "start_when": 1}, outer={"every": 5, "wait_s": 5.0}, options={"layers": 1, "width": 64, "context": 32}
    )
    common = ("--listen", "/ip4/0.0.0.0/tcp/4001", "--relay", relay)
    first = shoal.node("up", settings, "anna", *common, "--bootstrap", address, before=internet.enter("home-0"))
    link = first.line()
    assert f"?peer={address}&" in link
    # It trains before anybody can reach it.
    eventually(lambda: [e for e in shoal.metrics("anna") if e["event"] == "round"], 60, "a round of the first alone")
    shoal.node("join", link, "bert", *common, before=internet.enter("home-1"))

    def met(name):
        return [e for e in shoal.metrics(name) if e["event"] == "round" and e["members"] == 2]

    for name in ("anna", "bert"):
        eventually(lambda name=name: met(name), 150, f"an exchange of {name}")
    # More than a relay with libp2p's own limits lets through.
    eventually(lambda: sum(e["bytes_sent"] for e in met("bert")) > 200_000, 150, "200 kB sent through the relay")

    def punched():
        report = shoal.start("status", link, "--json", before=internet.enter("seed")).json()
        return {m["name"]: m["reach"] for m in report["members"]} == {"anna": "punched", "bert": "punched"}

    eventually(punched, 60, "both said to be reached past their relay")
    before = internet.received("seed")
    rounds = len(met("anna"))
    eventually(lambda: len(met("anna")) > rounds + 10, 60, "further exchanges")
    sent = sum(e["bytes_sent"] for e in met("anna")[rounds:])
    assert internet.received("seed") - before < sent, "what two exchange that are connected goes through no relay"
    watcher = shoal.start("watch", link, "--json", before=internet.enter("peer-1"))

    def watched():
        heard = [json.loads(line) for line in list(watcher.lines) if '"status":' in line]
        return {event["status"]["name"] for event in heard} == {"anna", "bert"}

    eventually(watched, 60, "statuses of both, which cross no relayed connection")


def restart(internet, seed, again):
    seed.signal(signal.SIGTERM)
    seed.wait()
    again()


def renumber(internet, seed, again):
    internet.move("router-0")


@pytest.mark.slow(reason="two nodes meet, part and meet again, which takes a minute")
@pytest.mark.parametrize("breaks", [restart, renumber])
def test_a_node_that_lost_its_relay_is_met_again_whatever_broke(internet, shoal, eventually, breaks):
    def begin():
        return shoal.start(
            "seed", "--relay", "--json", "--listen", f"/ip4/{SEED}/tcp/4001", "--identity", shoal.home / "seed.key",
            before=internet.enter("seed"),
        )  # fmt: skip

    seed = begin()
    (address,) = [a for a in json.loads(seed.line())["addresses"] if SEED in a]
    settings = shoal.toml(
        swarm={"name": "nat", "start_when": 1}, outer={"every": 5, "wait_s": 5.0}, options={"layers": 1, "width": 64, "context": 32}
    )
    common = ("--listen", "/ip4/0.0.0.0/tcp/4001", "--relay", "only")
    link = shoal.node("up", settings, "anna", *common, "--bootstrap", address, before=internet.enter("home-0")).line()
    shoal.node("join", link, "bert", *common, before=internet.enter("home-1"))

    def met(since):
        return [e for e in shoal.metrics("anna") if e["event"] == "round" and e["members"] == 2 and e["time"] > since]

    eventually(lambda: met(0), 150, "an exchange")
    breaks(internet, seed, begin)
    # Longer than the connections that broke can have gone on: what comes then comes over new ones.
    after = time.time() + 45
    eventually(lambda: met(after), 150, "an exchange after the break")


@pytest.mark.slow(reason="three nodes have to be dialled by others, which they ask for after ten seconds")
def test_status_says_who_can_be_dialled_and_what_to_do_where_nobody_can(internet, shoal, eventually):
    seed = shoal.start(
        "seed", "--json", "--listen", f"/ip4/{SEED}/tcp/4001", "--identity", shoal.home / "seed.key", before=internet.enter("seed")
    )
    (address,) = [a for a in json.loads(seed.line())["addresses"] if SEED in a]
    settings = shoal.toml(
        swarm={"name": "nat", "start_when": 1}, outer={"every": 5, "wait_s": 5.0}, options={"layers": 1, "width": 64, "context": 32}
    )
    common = ("--listen", "/ip4/0.0.0.0/tcp/4001")
    link = shoal.node("up", settings, "anna", *common, "--bootstrap", address, before=internet.enter("peer-1")).line()
    shoal.node("join", link, "bert", *common, "--relay", "off", before=internet.enter("home-0"))

    def told():
        report = shoal.start("status", link, "--json", before=internet.enter("seed")).json()
        found = {m["name"]: m["reach"] for m in report["members"]}
        return found == {"anna": "direct", "bert": "unreachable"} and report["findings"]

    (finding,) = eventually(told, 90, "both said to be what they are")
    assert finding.startswith("bert can be dialled by nobody and has no relay")

"""Two nodes behind two NATs, which nobody can dial, meet through a seed that forwards, and average;
also after a break.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import time

import pytest

from bench._nat import Internet, NatError

SEED = "11.0.1.2"


@pytest.fixture
def internet():
    """The homes ``home-0`` and ``home-1`` behind routers that let in nobody who was not sent to;
    ``seed``, ``peer-1`` outside.
    """
    try:
        made = Internet(["port", "port"], peers=1)
    except NatError as error:
        pytest.skip(f"no NAT can be made here: {error}")
    assert made.ip("seed") == SEED
    yield made
    made.close()


def seeded(internet, shoal, *flags):
    """A seed, its address, and settings for a swarm."""
    seed = shoal.start(
        "seed",
        "--json",
        *flags,
        "--listen",
        f"/ip4/{SEED}/tcp/4001",
        "--identity",
        shoal.home / "seed.key",
        before=internet.enter("seed"),
    )
    (address,) = [a for a in json.loads(seed.line())["addresses"] if SEED in a]
    outer, options = {"every": 5, "wait_s": 5.0}, {"layers": 1, "width": 64, "context": 32}
    return (
        seed,
        address,
        shoal.toml(swarm={"name": "nat", "start_when": 1}, outer=outer, options=options),
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "relay",
    [
        pytest.param(
            "auto",
            marks=pytest.mark.slow(
                reason="relay=auto waits for libp2p to find out that nobody can dial it"
            ),
        ),
        "only",
    ],
)
def test_nodes_behind_two_nats_meet_through_a_seed_and_average(internet, shoal, eventually, relay):
    _, address, settings = seeded(internet, shoal, "--relay")
    assert subprocess.run(
        [*internet.enter("home-0"), "ping", "-c1", "-W2", "192.168.8.2"],
        capture_output=True,
        check=False,
    ).returncode
    common = ("--listen", "/ip4/0.0.0.0/tcp/4001", "--relay", relay)
    first = shoal.node(
        "up", settings, "anna", *common, "--bootstrap", address, before=internet.enter("home-0")
    )
    link = first.line()
    assert f"?peer={address}" in link
    # It trains before anybody can reach it.
    eventually(lambda: shoal.rounds("anna"), 60, "a round of the first alone")
    shoal.node("join", link, "bert", *common, before=internet.enter("home-1"))

    for name in ("anna", "bert"):
        eventually(lambda name=name: shoal.rounds(name, 2), 150, f"an exchange of {name}")
    # More than a relay with libp2p's own limits lets through.
    eventually(
        lambda: sum(e["bytes_sent"] for e in shoal.rounds("bert", 2)) > 200_000,
        150,
        "200 kB sent through the relay",
    )

    def punched():
        report = shoal.start("status", link, "--json", before=internet.enter("seed")).json()
        return {m["name"]: m["link"]["reach"] for m in report["members"]} == {
            "anna": "punched",
            "bert": "punched",
        }

    eventually(punched, 60, "both said to be reached past their relay")
    before = internet.received("seed")
    rounds = len(shoal.rounds("anna", 2))
    eventually(lambda: len(shoal.rounds("anna", 2)) > rounds + 10, 60, "further exchanges")
    sent = sum(e["bytes_sent"] for e in shoal.rounds("anna", 2)[rounds:])
    assert internet.received("seed") - before < sent, (
        "what two exchange that are connected goes through no relay"
    )
    watcher = shoal.start("watch", link, "--json", before=internet.enter("peer-1"))

    def watched():
        heard = [json.loads(line) for line in list(watcher.lines) if '"status":' in line]
        return {event["status"]["name"] for event in heard} == {"anna", "bert"}

    eventually(watched, 60, "statuses of both, over their relay")


def restart(internet, shoal, seed):
    seed.signal(signal.SIGTERM)
    seed.wait()
    seeded(internet, shoal, "--relay")


def renumber(internet, shoal, seed):
    internet.move("router-0")


@pytest.mark.slow(reason="two nodes meet, part and meet again, which takes a minute")
@pytest.mark.parametrize("breaks", [restart, renumber])
def test_node_recovers_from_a_lost_relay(internet, shoal, eventually, breaks):
    """A node that lost its relay is met again whatever broke."""
    seed, address, settings = seeded(internet, shoal, "--relay")
    common = ("--listen", "/ip4/0.0.0.0/tcp/4001", "--relay", "only")
    link = shoal.node(
        "up", settings, "anna", *common, "--bootstrap", address, before=internet.enter("home-0")
    ).line()
    shoal.node("join", link, "bert", *common, before=internet.enter("home-1"))

    def met(since):
        return [e for e in shoal.rounds("anna", 2) if e["time"] > since]

    eventually(lambda: met(0), 150, "an exchange")
    breaks(internet, shoal, seed)
    # Longer than the connections that broke can have gone on: what comes then comes over new ones.
    after = time.time() + 45
    eventually(lambda: met(after), 150, "an exchange after the break")


@pytest.mark.slow(
    reason="three nodes have to be dialled by others, which they ask for after ten seconds"
)
def test_status_says_who_can_be_dialled(internet, shoal, eventually):
    """Status says who can be dialled and what to do where nobody can."""
    _, address, settings = seeded(internet, shoal)
    common = ("--listen", "/ip4/0.0.0.0/tcp/4001")
    link = shoal.node(
        "up", settings, "anna", *common, "--bootstrap", address, before=internet.enter("peer-1")
    ).line()
    shoal.node("join", link, "bert", *common, "--relay", "off", before=internet.enter("home-0"))

    def told():
        report = shoal.start("status", link, "--json", before=internet.enter("seed")).json()
        found = {m["name"]: m["link"]["reach"] for m in report["members"]}
        return found == {"anna": "direct", "bert": "unreachable"} and report["findings"]

    (finding,) = eventually(told, 90, "both said to be what they are")
    assert finding.startswith("bert can be dialled by nobody and has no relay")


# What a router adds to its rules; miniupnpd enters the ports that it opens into these chains.
OPENING = """
table inet filter {
  chain forward { type filter hook forward priority 0; jump miniupnpd; }
  chain leave { type nat hook postrouting priority srcnat; jump postrouting_miniupnpd; }
  chain enter { type nat hook prerouting priority dstnat; jump prerouting_miniupnpd; }
  chain miniupnpd { }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
}
"""


@contextlib.contextmanager
def opening(internet, router, tmp_path, protocol):
    """Have ``router`` open ports for the machine behind it that asks by ``protocol``."""
    if shutil.which("miniupnpd") is None:
        pytest.skip("miniupnpd is not installed (package miniupnpd)")
    internet.nft(router, "-f", "-", rules=OPENING)
    subprocess.run(
        [*internet.enter(router), "ip", "route", "add", "224.0.0.0/4", "dev", "in"], check=True
    )
    settings = tmp_path / "miniupnpd.conf"
    speaks = {f"enable_{each}": "yes" if each == protocol else "no" for each in ("upnp", "natpmp")}
    lines = {
        "ext_ifname": "out",
        "listening_ip": "in",
        "port": 0,
        "secure_mode": "yes",
        **speaks,
        "lease_file": tmp_path / "leases",
    }
    rule = "allow 1024-65535 192.168.0.0/16 1024-65535\n"
    settings.write_text("".join(f"{name}={value}\n" for name, value in lines.items()) + rule)
    command = ["miniupnpd", "-d", "-f", str(settings), "-P", str(tmp_path / "pid")]
    with (tmp_path / "miniupnpd.log").open("w") as file:
        server = subprocess.Popen(
            [*internet.enter(router), *command], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            server.terminate()
            server.wait(10)


@pytest.mark.slow(
    reason="libp2p finds after a minute and a half that a port was opened, if a relay is there at "
    "the start"
)
@pytest.mark.parametrize(("protocol", "relay"), [("upnp", "auto"), ("natpmp", "off")])
def test_open_router_is_dialled_by_a_private_node(
    internet, shoal, eventually, tmp_path, protocol, relay
):
    """A node whose router opens ports is dialled by one that nobody can dial."""
    _, address, settings = seeded(internet, shoal, "--relay")
    with opening(internet, "router-0", tmp_path, protocol):
        how = ("--listen", "/ip4/0.0.0.0/tcp/0", "--relay")
        first = shoal.node(
            "up",
            settings,
            "anna",
            *how,
            relay,
            "--bootstrap",
            address,
            before=internet.enter("home-0"),
        )
        link, opened = first.line(), f"peer=/ip4/{internet.ip('home-0')}/tcp/"

        def said_to_be(reach, *shown):
            status = shoal.start("status", link, "--json", before=internet.enter("seed"))
            report = (
                status.json() if status.wait() == 0 else {"members": []}
            )  # nobody else can be asked, and it not yet
            return (
                [m["link"]["reach"] for m in report["members"]] == [reach]
                and all(each in report["link"] for each in shown)
                and report
            )

        if relay == "auto":  # libp2p tries before the port is open
            eventually(
                lambda: said_to_be("relayed", "/p2p-circuit/"), 90, "the node said to be relayed"
            )
        lasting = eventually(
            lambda: said_to_be("direct", opened), 180, "the node said to be dialled"
        )["link"]
        assert "p2p-circuit" not in lasting
        assert "192.168." not in lasting
        shoal.node("join", link, "bert", *how, "off", before=internet.enter("home-1"))

        def met():
            return shoal.rounds("bert", 2)

        eventually(met, 90, "an exchange")
        rounds, before = len(met()), internet.received("seed")
        eventually(lambda: len(met()) > rounds + 10, 60, "further exchanges")
        assert internet.received("seed") - before < sum(e["bytes_sent"] for e in met()[rounds:]), (
            "no relay is between them"
        )
        said = {}
        for home in ("home-0", "home-1"):
            checks = shoal.start("doctor", link, "--json", before=internet.enter(home)).json()[
                "checks"
            ]
            said[home] = [
                (check["outcome"], check["said"])
                for check in checks
                if check["check"] in ("dialled back", "nat")
            ]
        assert [outcome for outcome, _ in said["home-0"]] == ["ok", "ok"], said
        assert "which the router opened (UPnP or NAT-PMP)" in said["home-0"][0][1]
        assert [outcome for outcome, _ in said["home-1"]] == ["note", "note"], said

"""Four nodes in four namespaces, between two and two of which the network is cut and then healed:
they end as one swarm again.
"""

import pytest

from bench._nat import Internet, NatError

NODES = {"a": "home-0", "b": "home-1", "c": "home-2", "d": "home-3"}
CUT = """
table ip shoal {
  chain forward {
    type filter hook forward priority 0;
    ip saddr { LEFT } ip daddr { RIGHT } drop;
    ip saddr { RIGHT } ip daddr { LEFT } drop;
  }
}
"""


class Halves(Internet):
    """Four public machines, ``a`` to ``d``, until the network between two and two of them is cut.

    NatError if that fails.
    """

    def __init__(self):
        super().__init__(["none"] * 4, peers=0)
        left, right = (", ".join(self.ip(NODES[name]) for name in half) for half in ("ab", "cd"))
        self.rules = CUT.replace("LEFT", left).replace("RIGHT", right)
        self.cut()  # that it can be done is found out at once
        self.heal()

    def cut(self):
        self.nft("wan", "-f", "-", rules=self.rules)

    def heal(self):
        self.nft("wan", "delete", "table", "ip", "shoal")


@pytest.fixture
def halves():
    try:
        made = Halves()
    except NatError as error:
        pytest.skip(f"no network can be made here that could be cut: {error}")
    yield made
    made.close()


@pytest.mark.slow(reason="the halves of a swarm train apart in network namespaces")
@pytest.mark.parametrize(
    "outer",
    [
        {"method": "diloco"},
        {"method": "noloco", "lag": 0},
        {"method": "noloco", "lag": "auto", "fragments": 2},
    ],
    ids=["diloco", "blocking", "overlapped"],
)
def test_two_halves_go_on_and_come_together_again(halves, shoal, eventually, outer):
    method = outer["method"]
    settings = shoal.toml(
        swarm={"name": "halves", "start_when": 4}, outer={**outer, "every": 20, "wait_s": 4.0},
        options={"layers": 1, "width": 16, "context": 16},
    )  # fmt: skip
    link = None
    for name, place in NODES.items():
        where = ("--listen", f"/ip4/{halves.ip(place)}/tcp/4001")
        if link is None:
            link = shoal.node("up", settings, name, *where, before=halves.enter(place)).line()
        else:
            shoal.node("join", link, name, *where, before=halves.enter(place))

    def events(name, kind):
        return [event for event in shoal.metrics(name) if event["event"] == kind]

    def together(name, members):
        return [event for event in events(name, "round") if event["members"] == members]

    most, least = (4, 2) if method == "diloco" else (2, 2)
    for name in NODES:
        eventually(lambda name=name: together(name, most), 90, f"a round of all at {name}")
    halves.cut()
    for name in NODES:
        eventually(
            lambda name=name: events(name, "partition"), 90, f"{name} suspecting a partition"
        )
        (said,) = [event["said"] for event in events(name, "partition")]
        assert "2 of 4 members vanished within" in said
        met = len(together(name, least))
        eventually(
            lambda name=name, met=met: len(together(name, least)) >= met + 3,
            60,
            f"three rounds of a half at {name}",
        )
    report = shoal.start("status", link, "--json", before=halves.enter(NODES["b"])).json()
    assert len(report["members"]) == 2
    assert any(
        "A partition is suspected: 2 of 4 members" in sentence for sentence in report["findings"]
    )
    halves.heal()
    for name in NODES:
        eventually(
            lambda name=name: events(name, "partition")[-1]["missing_names"] == [],
            180,
            f"{name} being together again",
        )

    def equal():
        """A round of all four after which all hold the same slow weights."""
        weights = [
            {event["round"]: event["weights"] for event in together(name, 4)[-20:]}
            for name in NODES
        ]
        rounds = set.intersection(*(set(each) for each in weights))
        return any(
            len({each[round] for each in weights}) == 1 for round in rounds if round > before
        )

    def across():
        """A pair of the two halves."""
        return {event["partner"] for name in "ab" for event in events(name, "round")[-10:]} & set(
            "cd"
        )

    before = max(event["round"] for name in NODES for event in events(name, "round"))
    eventually(equal if method == "diloco" else across, 120, "one swarm again")
    for name in NODES:
        for fragment in range(
            fragments := outer.get("fragments", 1)
        ):  # of each by itself: one exchange may overtake another's
            rounds = [
                event["round"]
                for event in events(name, "round")
                if event["round"] % fragments == fragment
            ]
            assert rounds == sorted(rounds)

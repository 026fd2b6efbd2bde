"""``python -m bench.sim``: one seed is one result, the settings are obeyed, and a bad argument is
named in one sentence.
"""

import json

import pytest
import torch
from click.testing import CliRunner

from bench.sim import report
from bench.sim.__main__ import sim
from bench.sim.growth import COSTS, exponents, growth, hops
from bench.sim.links import NETS, parse_net, parse_rate, parse_sizes
from bench.sim.mixing import mixing
from bench.sim.report import run_sim, summary
from bench.sim.toy_task import Lesson, ToyModel, make_toy
from bench.sim.world import is_message
from shoal.node.config.settings import ConfigError
from shoal.swarm.errors import ShoalError
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import pack, seal
from shoal.swarm.wire.messages import Answer

# Rounds that overlap training have six times the events.
WAITING = {"outer.every": 10, "outer.lag": 0}
SMALL = {"peers": 4, "minutes": 0.3, "parameters": 64, "overrides": {"outer.every": 10}}


def small(file=None, **options):
    found = run_sim(file, **{**SMALL, **options})
    return {name: value for name, value in found.items() if name not in ("wall_s", "cpu_s")}


@pytest.mark.ci
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_one_seed_is_one_result(method):
    options = {"churn": "8/min", "overrides": {"outer.every": 10, "outer.method": method}}
    one, again = (small(seed=7, **options) for _ in range(2))
    assert one == again
    assert one["killed"] > 0
    assert one["loss_last"] < one["loss_first"] / 2
    assert one["rounds"] >= 5
    assert json.loads(json.dumps(one)) == one


def test_another_seed_is_another_result():
    assert (
        small(peers=2, minutes=0.1, seed=1)["trace"] != small(peers=2, minutes=0.1, seed=2)["trace"]
    )


def test_calm_swarm_meets_and_stays_equal():
    """Left in peace nobody is alone and a group stays equal."""
    report = small(overrides={"outer.every": 10, "outer.method": "diloco"}, uneven=0.0)
    assert report["alone"] == 0
    assert report["spread"] < 1e-6
    assert report["failures"] == {}
    assert report["loss_own"] == pytest.approx(report["loss_last"], rel=1e-4)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("method", "lag"), [("noloco", 0), ("noloco", "auto"), ("diloco", None)])
def test_peers_meet_over_a_satellite(method, lag):
    """A round trip of a second: what is alive answers later than on the ground.

    Who overlaps waits for none of it.
    """
    settings = {"outer.every": 50, "outer.method": method, "outer.lag": lag}
    report = small(net="480:2", minutes=2.0, overrides=settings, uneven=0.0)
    assert report["exchanges"] > 20
    assert report["alone"] < 0.1
    assert (report["wait_median_s"] < 0.1) == (lag == "auto")


def test_pairs_send_their_weights_and_little_else():
    report = small(
        peers=6, uneven=0.0, overrides={"outer.every": 10, "outer.lag": 0, "outer.codec": "float32"}
    )
    assert report["alone"] == 0
    payload = report["bytes_per_peer_round"] - report["control_bytes_per_peer_round"]
    assert payload == pytest.approx(
        64 * 4, rel=0.1
    )  # rounds that the end cut off have sent, and are not counted
    assert (
        2.4 <= report["messages_per_peer_round"] <= 4
    )  # two offers, accept, ready, commit, of two peers; more where calls cross
    assert 0 < report["wait_median_s"] <= report["wait_p95_s"] <= report["wait_max_s"]


def test_the_settings_file_is_obeyed(tmp_path):
    file = tmp_path / "swarm.toml"
    file.write_text(
        '[outer]\nmethod = "local"\nevery = 5\nlag = 0\ncodec = "bfloat16"\n[train]\nsteps = '
        "20\nseed = 3\n"
    )
    report = run_sim(file, peers=3, minutes=1, parameters=64)
    assert (report["method"], report["every"], report["codec"], report["seed"]) == (
        "local",
        5,
        "bfloat16",
        3,
    )
    assert report["rounds"] == 4
    assert report["exchanges"] == 12
    assert report["virtual_s"] < 60  # it ends when all steps are done


def test_alone_costs_nothing():
    report = small(overrides={"outer.method": "none", "outer.every": 10})
    assert report["alone"] == 1
    assert (
        report["bytes_per_peer_round"]
        == report["wait_max_s"]
        == report["directory_bytes_per_peer_second"]
        == 0
    )


@pytest.mark.ci
def test_several_sizes_are_all_simulated_and_their_growth_told(monkeypatch):
    monkeypatch.setattr(
        report, "mixing", lambda bucket: mixing(bucket, peers=32, rounds=50, seeds=1)
    )
    found = small(peers="8,2,4", minutes=0.2, overrides=WAITING | {"swarm.bucket": 4})
    assert [size["peers"] for size in found["sizes"]] == [2, 4, 8]
    assert {size["bucket"] for size in found["sizes"]} == {4}
    assert found["growth"] == exponents(found["sizes"])
    assert set(found["growth"]) == {"bytes", "messages", "directory", "waiting"}
    assert set(found["growth_from_bucket"].values()) == {None}  # one size alone is larger
    assert "log2(peers)" in found["routing"]["model"]
    assert found["routing"]["growth"] is not None
    assert found["mixing"]["bucket"] == 4
    assert summary(found).renderables
    assert json.loads(json.dumps(found)) == found


@pytest.mark.ci
def test_warm_up_costs_do_not_count():
    """Costs of the warm up do not count and the run is the same."""
    options = {"overrides": WAITING}
    first, whole = small(minutes=0.1, **options), small(minutes=0.2, **options)
    rest = small(minutes=0.2, warm_up=0.1, **options)
    assert rest["trace"] == whole["trace"]
    assert 0 < rest["exchanges"] == whole["exchanges"] - first["exchanges"]

    def sent(report):
        return report["bytes_per_peer_round"] * report["exchanges"]

    assert sent(rest) == pytest.approx(sent(whole) - sent(first))
    assert 2 * whole["directory_bytes_per_peer_second"] == pytest.approx(
        first["directory_bytes_per_peer_second"] + rest["directory_bytes_per_peer_second"]
    )


@pytest.mark.ci
def test_late_peer_calls_one_other():
    """Eight others, of whom nearly all are taken, took 21.7 messages a round; none at all left half
    of the peers alone.
    """
    settings = {"outer.every": 20, "outer.wait_s": 2.0}
    report = small(peers=12, minutes=0.5, warm_up=0.25, uneven=0.4, overrides=settings)
    assert report["messages_per_peer_round"] < 15
    assert report["alone"] < 0.4


def test_without_buckets_there_is_no_mixing_to_measure():
    found = small(peers="2,3", minutes=0.1, overrides={"outer.every": 5, "swarm.bucket": 0})
    assert found["mixing"] is None
    assert set(found["growth_from_bucket"].values()) == {None}


def test_buckets_hold_64_by_default(tmp_path):
    """Without settings buckets hold 64 and a file decides for itself."""
    file = tmp_path / "swarm.toml"
    file.write_text("[swarm]\nbucket = 8\nepoch_s = 90.0\n")
    options = {"peers": 2, "minutes": 0.05}
    assert [small(**options)["bucket"], small(file, **options)["bucket"]] == [64, 8]
    file.write_text("[swarm]\n")
    assert (small(file, **options)["bucket"], small(file, **options)["epoch_s"]) == (0, None)


def test_exponents_are_those_of_a_power():
    powers = {"bytes": 0.0, "messages": 0.5, "directory": 2.0, "waiting": -1.0}
    keys = {name: key for name, (key, _) in COSTS.items()}
    sizes = [
        {
            "peers": peers,
            "directory_requests_per_peer_minute": peers**0.2,
            **{keys[name]: 3.0 * peers**b for name, b in powers.items()},
        }
        for peers in (16, 64, 256)
    ]
    assert exponents(sizes) == pytest.approx(powers, abs=1e-9)
    assert exponents([{**size, keys["waiting"]: 0.0} for size in sizes])["waiting"] is None
    assert set(exponents(sizes[:1]).values()) == {None}
    sizes[0][keys["bytes"]] = 1.0  # what fits into a bucket is in one of the two fits
    found = growth(sizes, 32)
    assert found["growth"]["bytes"] > 0.1
    assert found["growth_from_bucket"] == pytest.approx(powers, abs=1e-9)
    assert found["routing"]["growth"] == pytest.approx(0.2)
    assert set(growth(sizes, 0)["growth_from_bucket"].values()) == {None}
    assert hops(1024) == 10


def test_mixing_is_told_apart():
    """Rare draws and small buckets mix worse; a bucket of all is the same as pairs among all."""
    options = {"peers": 64, "rounds": 100, "seeds": 2}
    assert mixing(64, **options)["variance"] == pytest.approx(1.0, abs=1e-6)
    often, rarely, small_ones = (
        mixing(*args, **options, every=every)["variance"]
        for *args, every in ((16, 1), (16, 8), (4, 8))
    )
    assert 0.95 < often < rarely < small_ones
    assert mixing(16, **options) == mixing(16, **options)


def test_nets_churn_and_sizes_are_read():
    links = parse_net("wan")
    assert (links.latency, links.jitter, links.bandwidth, links.shared) == (
        0.04,
        0.01,
        12.5e6,
        True,
    )
    assert parse_net("8:2.5").latency == 0.008
    assert parse_net("8:2.5").bandwidth == 312_500
    assert all(parse_net(name).bandwidth > 0 for name in NETS)
    assert (parse_rate("2/min"), parse_rate("0.5")) == (2.0, 0.5)
    assert parse_sizes("16") == [16]
    assert parse_sizes("64,16,64") == [16, 64]


@pytest.mark.parametrize(
    "options",
    [
        {"net": "moon"},
        {"net": "1.2.3:4"},
        {"net": "5:0"},
        {"churn": "many"},
        {"churn": "-1/min"},
        {"churn": "9999/min"},
        {"peers": "1,2"},
        {"peers": "some"},
        {"peers": "16,"},
        {"peers": "70000"},
        {"peers": ",".join(["2"] * 17)},
        {"overrides": {"swarm.bucket": 3}},
        {"overrides": {"swarm.bucket": 65}},
        {"overrides": {"outer.method": "nope"}},
        {"warm_up": 0.3},
        {"overrides": {"outer.lag": 50}},
        {"overrides": {"outer.method": "streaming", "outer.every": 2, "outer.fragments": 3}},
    ],
)
def test_what_cannot_be_used_is_told_in_one_sentence(options):
    with pytest.raises(ShoalError, match=r"^[^\n]+: [^\n]+\.$"):
        small(**options)


def test_a_settings_file_that_is_not_there():
    from pathlib import Path

    with pytest.raises(ConfigError, match="There is no settings file"):
        small(Path("not/there.toml"))


def test_the_command_prints_a_table_or_json(monkeypatch):
    monkeypatch.setattr(
        report, "mixing", lambda bucket: mixing(bucket, peers=32, rounds=50, seeds=1)
    )
    arguments = ["--peers", "2,3", "--minutes", "0.1", "--every", "10", "--parameters", "16"]
    shown = CliRunner().invoke(sim, arguments)
    assert shown.exit_code == 0, shown.output
    assert "share of the time spent waiting" in shown.output
    assert "Not simulated" in shown.output
    assert "log2(peers)" in shown.output
    shown = CliRunner().invoke(sim, [*arguments, "--json"])
    assert json.loads(shown.output)["sizes"][0]["peers"] == 2


def test_steps_at_once_are_as_many_single_ones():
    toy = make_toy(1000, 0)
    (one, noise), (three, noise_of_three) = toy.after(1), toy.after(3)
    torch.testing.assert_close(three, one**3)
    torch.testing.assert_close(noise_of_three**2, noise**2 * (1 + one**2 + one**4))
    model = ToyModel(1000)
    lesson = Lesson(toy, model, 1)
    before = toy.loss(model.flat)
    lesson.learn(100)
    assert toy.loss(torch.cat(list(model.parameters())).detach()) < before / 2


def test_messages_are_told_from_values():
    answer = Answer(verdict="busy", round=3)
    assert is_message(pack(answer))
    assert is_message(seal(answer, Identity.ephemeral()))
    assert not is_message(torch.randn(1000).numpy().tobytes())
    assert not is_message(b"")

"""Which method `shoal plan` advises, by peers, link, speeds and trust, and what that rests on."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.config.settings import load
from shoal.node.plan.advice import (
    AVERAGES_BACK,
    ENOUGH,
    FEW,
    LONGER_ROUNDS,
    MANY,
    PAIRS,
    SEVERAL,
    STRANGERS,
    STREAMING,
    THIN,
    TWO,
    UNEVEN,
    WAITING,
    Situation,
    advise,
    recommended,
)
from shoal.node.plan.rows import ModelTensors
from shoal.swarm.exchange.cost import UNEVEN_SHARE, Line
from shoal.swarm.figures import amount

RECORD = Path(__file__).resolve().parents[3] / "bench" / "results" / "table.jsonl"
BACK_RECORD = RECORD.with_name("averages_back.jsonl")
DEFAULT_RECORD = RECORD.with_name("default.jsonl")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "methods.md"
TEXT = "fad092407cf29b26"
MODEL = ModelTensors.of_count(10_000_000)
HOME = Line(2.5e6, 0.05)
"""20 Mbit/s."""
OFFICE = Line(125e6, 0.001)
"""1 Gbit/s."""
FAR = Line(12.5e6, 0.4)
"""100 Mbit/s, 200 ms each way."""
WEAK = Line(1e5, 0.05)
""".8 Mbit/s."""
STEP_S = 1.0


def chosen(situation, line, **changed):
    row, said = advise(situation, line, MODEL, **{"step_s": STEP_S, **changed})
    return row.outer, said


@pytest.mark.parametrize(
    ("peers", "line", "uneven", "public", "method", "back"),
    [
        (2, HOME, False, False, "diloco", None),  # which waits for 5 % of the time
        (3, HOME, False, False, "streaming", None),
        (4, HOME, False, False, "streaming", None),
        (4, OFFICE, False, False, "diloco", None),
        (4, FAR, False, False, "streaming", None),
        (4, HOME, True, False, "noloco", None),
        (4, HOME, False, True, "noloco", None),
        (4, OFFICE, True, True, "noloco", None),
        (5, HOME, False, False, "streaming", "e3m0+ef"),
        (8, OFFICE, False, False, "diloco", "e3m0+ef"),
        (16, HOME, False, False, "streaming", "e3m0+ef"),
        (17, HOME, False, False, "noloco", None),
        (17, OFFICE, False, False, "noloco", None),
    ],
)
def test_method_follows_peers_link_speed_and_trust(peers, line, uneven, public, method, back):
    outer, said = chosen(Situation(peers, uneven, public), line)
    assert (outer.method, outer.codec_back) == (method, back)
    assert outer.every == (25 if method == "noloco" else 16)
    trust = f"{'of unlike speed' if uneven else 'alike'} and {'public' if public else 'private'}"
    assert said.startswith(f"For {peers} peers, {trust}, choose {method}, ")


@pytest.mark.parametrize(
    ("situation", "why"),
    [
        (Situation(2), TWO),
        (Situation(3), FEW),
        (Situation(4), FEW),
        (Situation(5), SEVERAL),
        (Situation(17), MANY),
        (Situation(4, uneven=True), UNEVEN),
        (Situation(17, uneven=True, public=True), STRANGERS),
    ],
)
def test_one_reason_is_told(situation, why):
    assert recommended(situation)[1] == why
    assert why in chosen(situation, HOME)[1]


def test_whole_sentence_of_four_at_home():
    assert chosen(Situation(4), HOME)[1] == (
        "For 4 peers, alike and private, choose streaming, sign+ef, every 16: of 4 peers groups in "
        "one bit ended 2.8 to 3.5 % above all-reduce with the same optimizer, pairs 4.6 % (267,392 "
        "parameters, 3 seeds). On this link a node computes 100 % of the time, sends 21.1 GB a day "
        "and fills 10 % of the link."
    )


@pytest.mark.parametrize("uneven", [True, False])
def test_thin_link_gets_longer_rounds(uneven):
    row, said = advise(Situation(4, uneven), WEAK, MODEL, step_s=STEP_S)
    usual = PAIRS if uneven else THIN
    assert (row.outer.method, row.outer.codec_name) == (usual.method, usual.codec_name)
    assert row.work.every > usual.every
    assert row.forecast.enough(ENOUGH)
    note = "" if uneven else f"; {AVERAGES_BACK['sign+ef']}"
    assert said.endswith(f"of it with every {usual.every}{note}; {LONGER_ROUNDS[usual.method]}.")


@pytest.mark.parametrize(
    ("peers", "rate", "back", "every"),
    [(2, 1e5, None, 17), (3, 1.5e5, "sign+ef", 16), (4, 2.5e5, "sign+ef", 16)],
)
def test_averages_in_one_bit_come_before_longer_rounds(peers, rate, back, every):
    """Where gathering would fill the link; two peers have nothing to send back."""
    outer, said = chosen(Situation(peers), Line(rate, 0.05))
    assert (outer.method, outer.codec_back, outer.every) == ("streaming", back, every)
    assert (AVERAGES_BACK["sign+ef"] in said) == (back is not None)


def test_uneven_machines_have_rounds_of_seconds():
    """As long as the steps that were weighed, with the two tensors that unlike weights send."""
    outer, said = chosen(Situation(4, uneven=True), HOME, step_s=0.5)
    assert (outer.round, outer.weights) == ("seconds:12.5", "tokens")
    assert "choose noloco, mod4, rounds of 12.5 s: " in said
    even, _ = advise(Situation(4, public=True), HOME, MODEL, step_s=0.5)
    double, _ = advise(Situation(4, uneven=True), HOME, MODEL, step_s=0.5)
    guarded, _ = advise(Situation(4, uneven=True, public=True), HOME, MODEL, step_s=0.5)
    assert double.work.nbytes == pytest.approx(2 * even.work.nbytes, rel=1e-6)
    assert guarded.work.nbytes == even.work.nbytes


def test_waiting_is_chosen_where_it_costs_less_than_it_brings():
    """DiLoCo, which ended 0.6 % lower, for up to a twentieth of the time."""
    link = Line(2.5e6, 0.0)
    found = {step_s: chosen(Situation(4), link, step_s=step_s)[0].method for step_s in (1.5, 3.0)}
    assert found == {1.5: "streaming", 3.0: "diloco"}
    seeds = losses("diloco", "sign+ef", every=16)[0], losses("streaming", "sign+ef", every=16)[0]
    assert f"{-above(*seeds):.1f}" == "0.6"


def test_outer_step_takes_no_bits_away():
    """Of 135 M parameters it takes 6 % of the time of steps of half a second on any link; of 1 G
    more than is advised, so rounds are longer, though the link is free.
    """
    row, said = advise(Situation(4), OFFICE, ModelTensors.of_count(135_000_000), step_s=0.5)
    assert row.work.every == 16
    assert 0.9 < row.forecast.utilisation < 0.95
    assert "longer rounds" not in said
    row, said = advise(Situation(4), OFFICE, ModelTensors.of_count(10**9), step_s=2.0)
    assert (row.outer.codec_back, row.work.every) == (None, 19)
    assert row.forecast.filled < 0.1


def test_rounds_that_are_asked_for_are_kept():
    outer, said = chosen(Situation(4), HOME, every=100)
    assert (outer.method, outer.every) == ("diloco", 100)
    outer, said = chosen(Situation(4), FAR, every=30, step_s=0.2)
    assert (outer.method, outer.every) == ("streaming", 30)
    assert said.endswith(f"; {LONGER_ROUNDS['streaming']}.")


def test_a_link_that_carries_nothing():
    row, said = advise(Situation(4), Line(1.0, 1.0), MODEL, step_s=STEP_S)
    assert row.forecast.utilisation < ENOUGH
    assert said.startswith(
        "This link carries none of the settings: with streaming, sign+ef, back sign+"
    )


@pytest.mark.parametrize(
    "options", [[], ["--uneven"], ["--public"], ["--peers", "3"], ["--peers", "8", "--mbit", "1"]]
)
def test_advised_settings_are_those_of_a_file(options, tmp_path):
    """What the command prints to copy is what a node loads, and the row beside it."""
    asked = ["plan", "--params", "1e8", "--step", "1", "--mbit", "50", "--rtt", "0.05", "--json"]
    report = json.loads(CliRunner().invoke(cli, [*asked, *options]).stdout.splitlines()[-1])
    file = tmp_path / "swarm.toml"
    file.write_text(report["advised"]["settings"])
    outer = load(file).outer
    assert outer.codec_name == report["advised"]["codec"]
    assert (outer.every, outer.method) == tuple(report["advised"][k] for k in ("every", "method"))
    assert outer.rounds_in_seconds == report["uneven"] == ("--uneven" in options)
    assert report["public"] == ("--public" in options)
    assert report["public"] != any("back=" in row["codec"] for row in report["rows"])


def losses(method, codec, *, peers=4, every):
    """Return the held-out loss of each seed with the settings that the table chose, and these."""
    runs = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    found = {}
    for run in runs:
        place = (run["method"], run["codec"], run["peers"], run["every"])
        same = (run["text"], run["model"], run["steps"], run["inner"])
        if place == (method, codec, peers, every) and same == (TEXT, "mini", 3200, "muon"):
            setting = (run["lr"], tuple(sorted(run["outer"].items())))
            found.setdefault(setting, {})[run["seed"]] = run
    best = min(found, key=lambda setting: found[setting][0]["validation"])
    return {seed: run["loss"] for seed, run in found[best].items()}, dict(best[1])


def above(found, base):
    both = found.keys() & base.keys()
    return 100 * sum(found[seed] / base[seed] - 1 for seed in both) / len(both)


def test_the_reasons_are_what_was_measured():
    """The figures in the sentences follow from the runs, and so do rates and lengths of rounds."""
    base, _ = losses("ddp", "float32", every=1)
    figures = []
    for outer, name, peers in [
        (WAITING, "diloco", 4),
        (STREAMING, "streaming", 4),
        (PAIRS, "noloco-overlap", 4),
        (WAITING, "diloco", 8),
        (PAIRS, "noloco-overlap", 8),
    ]:
        found, setting = losses(name, outer.codec, peers=peers, every=outer.every)
        assert len(found) == 3
        assert setting == {"lr": outer.lr, "momentum": outer.momentum}
        figures.append(f"{above(found, base):.1f}")
    waiting, streaming, pairs, waiting_8, pairs_8 = figures
    assert f"{waiting} to {streaming} % above" in FEW
    assert f"pairs {pairs} %" in FEW
    assert f"{waiting_8} % above" in SEVERAL
    assert f"pairs {pairs_8} %" in SEVERAL
    (_, several, _), _ = recommended(Situation(8))
    streaming_8 = {}
    for line in DEFAULT_RECORD.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        place = (run["text"], run["model"], run["method"], run["peers"], run["steps"])
        if place == (TEXT, "mini", "streaming", 8, 3200) and run["outer"] == {
            "lr": several.lr,
            "momentum": several.momentum,
        }:
            streaming_8[run["seed"]] = run["loss"]
    assert len(streaming_8) == 3
    assert f"streaming {above(streaming_8, base):.1f} %" in SEVERAL


def test_help_states_when_machines_are_uneven():
    """A number of its own, for importing the other one makes every help slower."""
    said = " ".join(CliRunner().invoke(cli, ["plan", "--help"]).output.split())
    assert f"less than {UNEVEN_SHARE:g} of the mean speed" in said


def test_averages_back_cost_what_was_measured():
    """Against gathering: in one bit from the least to the most, in 4 bits at most."""
    loss = {}
    for line in BACK_RECORD.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        loss[run["model"], run["method"], run["peers"], run["codec"]] = run["loss"]
    cost = {"sign+ef": [], "e3m0+ef": []}
    for (*place, codec), found in loss.items():
        back = codec.partition("back=")[2]
        if back in cost:
            cost[back].append(100 * (found / loss[*place, "sign+ef"] - 1))
    one, four = cost["sign+ef"], cost["e3m0+ef"]
    assert f"cost {max(four):.1f} % of loss at most" in AVERAGES_BACK["e3m0+ef"]
    assert f"cost {min(one):.1f} to {max(one):.1f} % of loss" in AVERAGES_BACK["sign+ef"]


def test_costs_of_longer_rounds_are_what_was_measured():
    for method, name, codec, short, long in [
        ("streaming", "streaming", "sign+ef", 16, 40),
        ("noloco", "noloco-overlap", "int8", 20, 200),
    ]:
        usual, _ = losses(name, codec, every=short)
        longer, _ = losses(name, codec, every=long)
        assert f"every {long} costs {above(longer, usual):.1f} % of loss" in LONGER_ROUNDS[method]


def test_page_and_plan_advise_the_same():
    """Rows of the page for groups and pairs, and the three cities that it takes as an example."""
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    rate = "--set outer.lr=1.0 --set outer.momentum=0.3"
    (group, *_), _ = recommended(Situation(4))
    (_, streaming, _), _ = recommended(Situation(8))
    shared = f"--codec {group.codec} --every {group.every} {rate}"
    assert f"2 to 4 peers | streaming in one bit | `--method streaming {shared}`" in page
    assert (
        f"`--method streaming --codec sign+ef --every 16 --set outer.lr={streaming.lr} --set "
        f"outer.momentum={streaming.momentum} --set outer.codec_back={streaming.codec_back}`"
    ) in page
    assert f"| `--method noloco --codec {PAIRS.codec} --every {PAIRS.every}` |" in page
    row, _ = advise(Situation(3), Line(6.25e6, 0.05), ModelTensors.of_count(10**8), step_s=1.0)
    found = row.forecast
    assert (row.outer.method, row.work.every) == ("streaming", 16)
    assert (
        f"A node computes {100 * found.utilisation:.0f} % of the time, sends "
        f"{amount(found.sent_a_day)} a day, and fills {100 * found.filled:.0f} % of the link."
        in page
    )
    for peers in (2, 3, 4, 5, 8):
        row, _ = advise(Situation(peers), HOME, MODEL, step_s=STEP_S)
        made = row.json()
        said = f"{peers}: {made['bytes_per_param_step']:.4f} ({made['times_fewer']:.0f})"
        assert said in page

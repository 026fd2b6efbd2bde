"""What events mean as numbers, and that docs/metrics.md says the same as the code."""

import ast
import math
import re
from dataclasses import fields as fields_of
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.metrics.log import RoundRecord
from shoal.node.metrics.prometheus import MEASURES, readings
from shoal.node.metrics.sinks import PROGRESS_S, Curves

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_measures():
    rows = re.findall(r"^\| `(shoal_\w+)` \| (\w+) \| ?(.*?) ?\| (.+) \|$", PAGE, re.M)
    found = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows]
    assert found == [(m.name, m.kind, m.labels, m.text) for m in MEASURES]


def test_the_page_names_measures_that_there_are():
    known = {m.name for m in MEASURES} | {f"{m.name}{end}" for m in MEASURES if m.kind == "histogram" for end in ("_sum", "_count")}
    assert set(re.findall(r"\bshoal_\w+", PAGE)) <= known


def written():
    """The names of events that the code writes, and the fields that it names there."""
    for file in (ROOT / "node").rglob("*.py"):
        for item in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(item, ast.Call) and item.args and isinstance(item.args[0], ast.Constant):
                called = getattr(item.func, "attr", getattr(item.func, "id", ""))
                if called in ("write", "_write", "_note", "note") and isinstance(item.args[0].value, str) and item.keywords:
                    yield item.args[0].value, [keyword.arg for keyword in item.keywords if keyword.arg]


def test_the_page_has_every_event_with_its_fields():
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE, re.M))
    found = list(written())
    assert {name for name, _ in found} | {"round"} == set(rows)
    for name, fields in [*found, ("round", [field.name for field in fields_of(RoundRecord)])]:
        assert [field for field in fields if f"`{field}`" not in rows[name]] == []


def test_names_are_as_prometheus_wants_them():
    names = [measure.name for measure in MEASURES]
    assert len(set(names)) == len(names)
    for measure in MEASURES:
        assert re.fullmatch(r"shoal(_[a-z]+)+", measure.name)
        assert (measure.kind == "counter") == measure.name.endswith("_total"), measure.name
        assert measure.text.endswith(".")


@given(
    st.sampled_from(["start", "round", "evaluation", "rl", "end", "progress", "checks"]),
    st.dictionaries(
        st.sampled_from(["round", "step", "loss", "partner", "own", "foreign", "banned", "x"]),
        st.sampled_from([None, True, "bob", [], [1, 2], (3,), {"a": 1}]) | st.floats(),
    ),
)
def test_no_value_that_is_no_number(event, fields):
    fields = {**fields, **({"own": 1, "foreign": 2} if event == "rl" else {})}
    assert all(math.isfinite(value) for _, value, _ in readings(event, fields))
    step, points = Curves().points(event, 1.0, fields)
    assert isinstance(step, int)
    assert all(math.isfinite(value) and name.count("/") == 1 for name, value in points.items())


def test_curves_lie_at_inner_steps():
    curves = Curves()
    assert curves.points("start", 0.0, {"steps": 40, "loss_first": 5.0}) == (40, {"evaluation/loss": 5.0})
    assert curves.points("round", 1.0, {"round": 3, "step": 60, "loss": 4.0, "partner": "bob", "wait_s": None}) == (
        60, {"round/loss": 4.0},
    )  # fmt: skip
    assert curves.points("verify", 2.0, {"round": 29_000_000, "banned": ["a", "b"], "check_s": 0.5}) == (
        60, {"verify/banned": 2.0, "verify/check_s": 0.5},
    )  # fmt: skip
    assert curves.points("rl", 3.0, {"round": 61, "reward": 0.5}) == (61, {"rl/reward": 0.5})
    assert curves.points("end", 4.0, {"steps": 70, "loss_last": None, "rounds": 9}) == (70, {})


def test_progress_is_thinned():
    curves = Curves()
    kept = [bool(curves.points("progress", now / 2, {"step": now, "loss": 1.0})[1]) for now in range(60)]
    assert sum(kept) == 30 / PROGRESS_S
    assert curves.points("refused", 30.0, {"rate": 2}) == (59, {"refused/rate": 2.0})


@pytest.mark.parametrize(("partner", "alone"), [("bob", 0.0), (None, 1.0)])
@pytest.mark.parametrize("late", [False, True])
def test_rounds_and_those_alone_or_late(partner, alone, late):
    fields = {"partner": partner, "round": 7, "wait_s": 0.5, "late": late}
    found = {measure.name: value for measure, value, _ in readings("round", fields)}
    assert found == {
        "shoal_round": 7.0, "shoal_round_wait_seconds": 0.5, "shoal_rounds_total": 1.0, "shoal_rounds_alone_total": alone,
        "shoal_rounds_late_total": float(late),
    }  # fmt: skip

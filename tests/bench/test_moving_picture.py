"""The moving picture of the README: what it shows of a recording; the one in docs/ is small and follows the reader's colours."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench._moving_picture import draw, read
from shoal.node.watch.source import Recorder
from tests.node.watch.conftest import NOW, Author

DRAWN = Path(__file__).resolve().parents[2] / "docs" / "training.svg"
LIMIT = 150_000  # bytes


@pytest.fixture
def run(tmp_path):
    """Of two nodes; the second is gone from second 10 to 30."""
    anna, bert = Author("anna"), Author("<bert>")
    recorder = Recorder(tmp_path / "run.jsonl")
    for number in range(40):
        alone = 10 < number < 30
        recorder.take(anna.heard(anna.round(number, [] if alone else [bert]), at=NOW + number))
        if not alone:
            recorder.take(bert.heard(bert.round(number, [anna]), at=NOW + number))
    recorder.close()
    return read(tmp_path / "run.jsonl")


def test_the_run_has_the_meetings_the_curves_and_who_was_gone(run):
    assert (run.names, run.seconds) == (["<bert>", "anna"], 39.0)
    assert run.gone == [[(10.0, 30.0)], []]
    assert run.meetings == {(0, 1): [*map(float, range(11)), *map(float, range(30, 40))]}
    assert [len(curve) for curve in run.curves] == [21, 40]


def test_it_is_well_formed_and_says_in_words_what_happens(run):
    drawn = draw(run)
    texts = [element.text for element in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "<bert> is killed: anna train on" not in texts
    assert "<bert> is killed: anna trains on" in texts
    assert "<bert> is back, and catches up" in texts
    label = ET.fromstring(drawn).get("aria-label")
    assert label.startswith("Training loss of <bert>, anna over 39 s")


@pytest.mark.parametrize("drawn", [DRAWN])
def test_the_one_in_the_docs_is_small_and_asks_for_nothing(drawn):
    text = drawn.read_text(encoding="utf-8")
    assert len(text.encode()) < LIMIT
    assert "prefers-color-scheme: dark" in text
    assert "prefers-reduced-motion: no-preference" in text
    assert "is killed" in text
    assert "<script" not in text
    assert "url(" not in text

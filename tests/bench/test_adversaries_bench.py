"""The benchmark of hostile peers: its runs, what it takes up again, and its table."""

import json

import pytest

from bench import adversaries

TINY = ["--peers", "4", "--hostile", "1", "--steps", "6", "--every", "2", "--batch", "1", "--seeds", "0", "--attacks", "x1000"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adversaries")
    page = folder / "page.md"
    page.write_text(f"before\n{adversaries.BEGIN}old\n{adversaries.END}\nafter\n")
    assert adversaries.main([*TINY, "--resume", str(folder / "runs"), "--into", str(page)]) == 0
    return page


def test_the_undefended_run_is_ruined_and_the_defended_one_is_not(page, capsys):
    lines = (page.parent / "runs").read_text().splitlines()
    assert adversaries.main([*TINY, "--resume", str(page.parent / "runs"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [json.loads(line) for line in lines] == found["runs"]  # nothing was run again
    loss = {(row["method"], row["attack"], row["defence"]): row["loss"] for row in found["runs"]}
    assert len(loss) == 8
    for method in adversaries.METHODS:
        clean = loss[method, "none", "undefended"]
        ruined = loss[method, "x1000", "undefended"]
        assert ruined is None or ruined > 1.2 * clean
        assert loss[method, "x1000", "public"] < 1.1 * clean
        assert loss[method, "none", "public"] == pytest.approx(clean, rel=0.05)
    harm = {(row["method"], row["attack"], row["defence"]): row["harm"] for row in found["rows"]}
    for cell, value in harm.items():
        assert value is None if loss[cell] is None else value == pytest.approx(loss[cell] / loss[cell[0], "none", "undefended"] - 1)


def test_the_table_stands_between_its_marks(page):
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    rows = [line.removeprefix("| ").split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")]
    assert rows == [["method", "attack"], *([method, attack] for method in adversaries.METHODS for attack in ("none", "x1000"))]


def test_a_page_without_a_place_is_named(tmp_path):
    (tmp_path / "page").write_text("nothing")
    with pytest.raises(SystemExit, match="no place for the table"):
        adversaries.main([*TINY, "--report", "--into", str(tmp_path / "page")])

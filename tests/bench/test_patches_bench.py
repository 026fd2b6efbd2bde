"""The bench of patches of a policy counts the bytes of real updates."""

import json

import pytest

from bench import patches
from bench._language import Learner


def test_lower_rates_have_smaller_patches(called, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("bench._language.ASKED", (20, 5))
    monkeypatch.setattr("bench._language.WIDTH", 16)
    monkeypatch.setattr("bench._language.LAYERS", 1)
    monkeypatch.setattr(patches, "ASKED", 40)
    # It cannot answer yet.
    monkeypatch.setattr(Learner, "judge", lambda self, question, group: (0.0, 1.0) * 4)
    made = ["--env", "strings", "--solved", 1, "--base", tmp_path / "small", "--updates", 2]
    done = called(patches.main, *made, "--rates", "1e-3", "1e-6", "--json")
    high, low = json.loads(done.stdout)["rows"]
    assert [len(row["patches"]) for row in (high, low)] == [2, 2]
    assert max(low["patches"]) < min(high["patches"]) < high["whole"]
    assert max(low["changed"]) < 0.1 < min(high["changed"])
    assert "times fewer" in done.stderr

"""The README is easy to read: Flesch reading ease by textstat, where that is installed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
LEAST = 50


def prose(text):
    """Return the sentences: without code, pictures, tables, headings and the targets of links."""
    text = re.sub(r"<!--.*?-->|```.*?```|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    return re.sub(r"[`*]", "", "\n".join(lines))


def test_the_readme_is_easy_to_read():
    textstat = pytest.importorskip("textstat", reason="textstat is not installed")
    try:
        ease = textstat.flesch_reading_ease(prose(README.read_text(encoding="utf-8")))
    except LookupError:
        pytest.skip("textstat's pronouncing dictionary is not there")
    assert ease >= LEAST

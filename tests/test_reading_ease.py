"""The README is easy to read, by Flesch's formula ("A new readability yardstick", 1948)."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
LEAST = 70  # "fairly easy" begins there


def prose(text):
    """Return the sentences: without code, pictures, tables, headings and the targets of links."""
    text = re.sub(r"<!--.*?-->|```.*?```|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    return re.sub(r"[`*]", "", "\n".join(lines))


def syllables(word):
    """Count groups of vowels, but for a silent e at the end: by a dictionary it is a few per cent
    more or less.
    """
    word = re.sub(
        r"((?<=[^aeiouyl])|(?<=[aeiouy]l))e$|(?<=[^aeiouytd])ed$|(?<=[^aeiouysxzcg])es$",
        "",
        word.lower(),
    )
    return max(1, len(re.findall("[aeiouy]+", word)))


def ease(text):
    sentences = [
        words
        for part in re.split(r"[.!?]\s|\n\n", text)
        if (words := re.findall(r"[A-Za-z][A-Za-z'-]*", part))
    ]
    words = [word for sentence in sentences for word in sentence]
    return (
        206.835
        - 1.015 * len(words) / len(sentences)
        - 84.6 * sum(map(syllables, words)) / len(words)
    )


def test_syllables_and_the_formula():
    words = {
        "table": 2,
        "averages": 4,
        "weights": 1,
        "train": 1,
        "killed": 1,
        "waited": 2,
        "the": 1,
        "else": 1,
        "whole": 1,
    }
    assert {word: syllables(word) for word in words} == words
    assert (
        abs(ease("The cat sat on the mat.") - 116.145) < 0.001
    )  # 6 words of 6 syllables in one sentence


def test_the_readme_is_easy_to_read():
    assert ease(prose(README.read_text(encoding="utf-8"))) >= LEAST

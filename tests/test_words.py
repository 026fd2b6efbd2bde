"""One word for one thing, the one of the field: retired words stay out of the pages and of what the commands say of themselves.

Names in backticks and blocks of code are left alone: kinds of messages, keys and flags keep their names.
"""

import re
from pathlib import Path

import click
import pytest

from shoal.node.cli.main import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RETIRED = {
    r"rendezvous": "matchmaking",
    r"mates?": "partner",
    r"knock(?:s|ed|ing)?": "probe, dial",
    r"guests?": "peer, visitor",
    r"vouch(?:es|ed|ing)?": "confirm",
    r"astray": "diverged",
    r"givers?": "source",
    r"wish(?:es)?": "query",
    r"seats?": "verifier, member",
    r"entrance": "resource manager",
    r"door(?:s|bell)?": "access policy",
    r"shelf": "body store",
    r"mailbox": "bounded queue",
    r"parcels?": "envelope",
    r"tally": "counters",
    r"reunion": "reconnector",
    r"mischief": "fault",
    r"reckon(?:s|ed)?": "compute",
    r"pace": "speed, rate limit",
    r"(?:what is |is )owed": "residual, deficit",
    r"spread of the (?:slow )?weights": "consensus distance",
    r"made anew": "recomputed",
    r"by lot": "at random",
    r"hands? out": "serve, share",
    r"(?:is|are|was|were) told": "informed, reported",
    r"tells? the others": "inform the other peers",
    r"travels?": "be sent",
    r"(?:the|a|two) seeds? (?:may|serves?|forwards?|answers?)": "bootstrap node",
    r"a seed's": "the bootstrap node's",
}
INVERTED = re.compile(r"(?:^|[.:;] |\| )Who(?:ever)? [a-z][^.?]*[.]", re.M)
"""A sentence that begins with "Who comes late is ...": write "A late peer is ..."."""


def prose(text):
    """Take fenced and indented blocks, comments, names in backticks and targets of links out of a page."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^ {4,}(?![*|]).*$", "", text, flags=re.M)
    return re.sub(r"`[^`\n]+(?:\n[^`\n]+)?`|\]\([^)]*\)", "``", text)


def retired(text):
    found = [(word, better) for word, better in RETIRED.items() if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
    return found + [(sentence[:60], "a noun first") for sentence in INVERTED.findall(text)]


def commands(group=cli, path=("shoal",)):
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page):
    text = page.read_text(encoding="utf-8")
    if page.name == "concepts.md":
        text, glossary = text.split("## Glossary")
        assert glossary.count("\n| ") > 20
    assert retired(prose(text)) == []


def test_help_texts_use_the_words_of_the_field():
    said = {("shoal",): cli.help}
    for path, command in commands():
        options = (option.help or "" for option in command.params if isinstance(option, click.Option))
        said[path] = " ".join([command.help or "", command.epilog or "", *options])
    assert {" ".join(path): found for path, text in said.items() if (found := retired(prose(text or "")))} == {}


def test_a_retired_word_would_be_found():
    assert retired(prose("Peers vouch for it at a rendezvous.")) == [
        ("rendezvous", "matchmaking"),
        ("vouch(?:es|ed|ing)?", "confirm"),
    ]
    assert retired(prose("Late peers wait. Who comes late is lost.")) == [(". Who comes late is lost.", "a noun first")]
    assert retired(prose("The message `parcel`, and\n```text\na door\n```\nand [a page](door.md).")) == []

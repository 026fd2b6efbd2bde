"""One word for one thing, the one of the field: retired words stay out of the pages and of what the
commands say of themselves.

Names in backticks and blocks of code are left alone: kinds of messages, keys and flags keep their
names.
"""

import ast
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
    r"reunion": "reconnector",
    r"mischief": "fault",
    r"reckon(?:s|ed)?": "compute",
    r"pace": "speed, rate limit",
    r"(?:what is |is )owed": "residual, deficit",
    r"spread of the (?:slow )?weights": "consensus distance",
    r"made anew": "recomputed",
    r"by lot": "at random",
    r"hand(?:s|ed|ing)? out": "serve, share",
    r"say(?= (?:``|--|either))": "pass, run, set",
    r"spreads?": "consensus distance, variance",
    r"(?:going|goes|go|goes on|went|was ever) (?:on )?alone(?= "
    r"(?:from|for|in|until|after|and)|[.,])": "without a partner",
    r"cannot be had": "is missing, cannot be loaded",
    r"(?:is|are|was|were) "
    r"told": "informed, reported",
    r"tells? the others": "inform the other peers",
    r"travels?": "be sent",
    r"(?:the|a|two|another|no) seeds? "
    r"(?:with|at|may|serves?|forwards?|answers?|lists?)": "bootstrap node",
    r"a seed's": "the bootstrap node's",
    r"of late": "recently",
    r"dealt": "divided, assigned, reassigned, distributed",
    r"c[ao]me about": "could connect, occurred",
    r"takes? itself for": "assumes that it is",
    r"the odd one(?! out)": "the outlier",
    r"not drawn for": "not selected as verifier for",
    r"spends? (?:this|that|the) node's": "wastes",
    r"wants? ``": "needs",
    r"shown at": "largest run",
    r"not looked up": "(leave it out)",
    r"check what other peers claim": "verify each other's work",
    r"nearly equal": "similar, not identical",
    r"lays? out the code": "formats the code",
    r"(?:link|output) is cut off": "shortened",
    r"be(?:ing)? reached through": "accept connections through",
    r"agree to much less": "synchronised well below",
    r"costs each what": "caps each node's cost at",
    r"(?:the|of|and|let|to|only|that) seeds(?= "
    r"(?:that|list|know|or|and|do|answer|failed)|[.,;:])": "bootstrap nodes",
}
INVERTED = re.compile(r"(?:^|[.:;] |\| )Who(?:ever)? [a-z][^.?]*[.]", re.M)
"""A sentence that begins with "Who comes late is ...": write "A late peer is ..."."""


def prose(text):
    """Take fenced and indented blocks, comments, names in backticks and targets of links out of a
    page.
    """
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^ {4,}(?![*|]).*$", "", text, flags=re.M)
    return re.sub(r"`[^`\n]+(?:\n[^`\n]+)?`|\]\([^)]*\)", "``", text)


def retired(text):
    found = [
        (word, better)
        for word, better in RETIRED.items()
        if re.search(rf"\b{word}\b", text, re.IGNORECASE)
    ]
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
        options = (
            option.help or "" for option in command.params if isinstance(option, click.Option)
        )
        said[path] = " ".join([command.help or "", command.epilog or "", *options])
    assert {
        " ".join(path): found
        for path, text in said.items()
        if (found := retired(prose(text or "")))
    } == {}


def sentences(file):
    """The line and text of every string in a module that is a sentence, f-strings with braces for
    values; no docstrings.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            yield (
                node.lineno,
                "".join(
                    part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
                ),
            )
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.count(" ") > 3
            and id(node) not in parts
        ):
            yield node.lineno, node.value


def test_errors_and_messages_use_the_words_of_the_field():
    """So do descriptions of settings, which help texts and docs show."""
    files = [
        file
        for top in ("node", "optim", "swarm", "verification")
        for file in sorted((ROOT / top).rglob("*.py"))
    ]
    found = {
        f"{file.relative_to(ROOT)}:{line}": words
        for file in files
        if "templates" not in file.parts
        for line, text in sentences(file)
        if (words := retired(prose(text)))
    }
    assert found == {}


def test_a_retired_word_would_be_found(tmp_path):
    assert retired(prose("Peers vouch for it at a rendezvous.")) == [
        ("rendezvous", "matchmaking"),
        ("vouch(?:es|ed|ing)?", "confirm"),
    ]
    assert retired(prose("Late peers wait. Who comes late is lost.")) == [
        (". Who comes late is lost.", "a noun first")
    ]
    assert [better for _, better in retired(prose("At the end say `shoal up`."))] == [
        "pass, run, set"
    ]
    (tmp_path / "module.py").write_text(
        '"""Docstring of a door that is left."""\nraise X(f"{a} is the door to it: say --b")\n'
    )
    assert list(sentences(tmp_path / "module.py")) == [(2, "{} is the door to it: say --b")]
    assert (
        retired(prose("The message `parcel`, and\n```text\na door\n```\nand [a page](door.md)."))
        == []
    )

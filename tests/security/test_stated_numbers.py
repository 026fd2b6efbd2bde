"""docs/security.md has a row for every number and size that a message states: what it moves, and
what limits that.
"""

import re
from pathlib import Path

from shoal.swarm.manifest import Manifest
from tests.support.message_kinds import kinds, leaves
from tests.support.records import GROUPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
MEETING = {"answer", "group-receipt", "offer", "group-ready", "group-probe", "member"}
VOTES = {
    "claim",
    "commitment",
    "dispute",
    "entry",
    "opening",
    "reveal",
    "verdict",
    "view",
    "claim-material",
    "training-material",
    "stored-claim",
    "attestation",
    "log-request",
}
ROWS = {
    "round of an exchange": lambda kind, name: name in ("round", "fragment") and kind in MEETING,
    "round and weights to begin from": lambda kind, name: (
        (kind, name)
        in {
            ("state-header", "round"),
            ("state-header", "applied"),
            ("state-header", "extra"),
            ("state-header", "names"),
            ("state-request", "round"),
            ("state-request", "since"),
        }
    ),
    "weight in the mean": lambda kind, name: name == "weight",
    "blocks that count on neither side": lambda kind, name: (
        name == "refused" and kind in ("ready", "commit", "outcome-reply")
    ),
    "sketch of the weights": lambda kind, name: name == "sketch",
    "who counts in a group, and how long it waits": lambda kind, name: (
        kind.startswith("group-") and name in ("mean", "lost", "held", "patience", "members")
    ),
    "sizes of what follows": lambda kind, name: name in ("nbytes", "size", "shapes", "chunk"),
    "speeds": lambda kind, name: name in ("steps_per_s", "tokens_per_s"),
    "moments": lambda kind, name: (
        name in ("issued", "expires", "now") or (kind, name) == ("admission", "since")
    ),
    "part of the data": lambda kind, name: name in ("shard", "shards"),
    "peers and addresses": lambda kind, name: (
        name in ("addresses", "contacts", "offered", "want", "topics", "swarms", "uses")
        or (kind, name) == ("seed-reply", "members")
    ),
    "completions": lambda kind, name: kind == "rollout" and name != "issued",
    "claims and votes": lambda kind, name: kind in VOTES and name not in ("signature", "record"),
    "port to dial back": lambda kind, name: name == "port",
    "signed parts": lambda kind, name: (
        name
        in (
            "record",
            "signature",
            "admission",
            "invitation",
            "announcement",
            "manifest",
            "body",
            "decision",
            "averages",
        )
        or (name == "change" and kind != "member")
    ),
    "policy of another node": lambda kind, name: (
        kind == "policy-version" and name in ("version", "links")
    ),
    "work of others": lambda kind, name: (kind, name) == ("receipts", "work"),
    "changes of the settings": lambda kind, name: (
        (kind == "change" and name in ("number", "parts")) or (kind, name) == ("member", "change")
    ),
    "what is only shown": lambda kind, name: (
        (kind == "status" and not rows_of(kind, name, others=True))
        or (kind == "announcement" and name in ("params", "round_bytes", "memory"))
        or (kind, name) == ("listed-swarm", "peers")
        or (
            kind == "member"
            and name
            in (
                "blamed",
                "end",
                "exchange_s",
                "recent",
                "failures",
                "internal_errors",
                "lag_steps",
                "late",
                "loss",
                "mfu",
                "missing",
                "missing_names",
                "missing_of",
                "missing_within_s",
                "partnerless",
                "unused",
                "step",
                "bytes_per_s",
                "bytes_received",
                "bytes_sent",
                "contributions_refused",
                "daemon_restarts",
                "round_wait_s",
            )
        )
    ),
}
"""Whether a field of a kind of message belongs to a row of the page."""


def rows_of(kind, name, others=False):
    """Return the rows of a field; with ``others`` without the last one, which has the rest of a
    status.
    """
    return [row for row, has in list(ROWS.items())[: -1 if others else None] if has(kind, name)]


def test_every_number_that_a_message_states_has_one_row():
    stated = {
        (kind.KIND, leaf.path[leaf.path[0] in GROUPS and len(leaf.path) > 1])
        for kind in kinds()
        if kind is not Manifest
        for leaf in leaves(kind)
        if leaf.states
    }
    assert len(stated) > 150
    assert {field: rows_of(*field) for field in stated if len(rows_of(*field)) != 1} == {}
    assert {row for row in ROWS if not any(rows_of(*field) == [row] for field in stated)} == set()


def test_the_page_has_these_rows():
    section = (
        PAGE.read_text(encoding="utf-8")
        .partition("## What a stranger's numbers may change")[2]
        .partition("\n## ")[0]
    )
    assert re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[1:] == list(ROWS)

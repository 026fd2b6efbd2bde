"""The fate of every signed record that is forged, damaged or replayed: the table in docs/wire.md,
tried cell by cell.
"""

import pytest

from shoal.swarm.wire.envelope import seal
from tests.support.wire_page import PAGE, SEALED
from tests.swarm.security.forgeries import HONEST, LIAR, flipped, moved, rekeyed
from tests.swarm.security.record_checks import ANNOUNCEMENTS, SHUFFLES, Rosters
from tests.swarm.security.record_checks import COURTS as RECORDS

COURTS = {**RECORDS, **SHUFFLES, **ANNOUNCEMENTS}
CASES = ("key", "bit", "stale", "swarm", "place", "kind")
"""Signed with another's key; a flipped bit; an old one; one of another swarm; from another than its
author; another kind.
"""


def table():
    """(record, case) -> the words of the cell, from the page."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith("|")
    ]
    rows = {row[0]: row[1:] for row in cells if row[0] in COURTS and len(row) == len(CASES) + 1}
    return {
        (name, case): said
        for name, row in rows.items()
        for case, said in zip(CASES, row, strict=True)
    }


def attack(court, case):
    """Return (sealed bytes, sender) of each attempt."""
    make = court.make
    if case == "key":
        # Of a group's members one is as good as another: in its own name the liar's is no forgery.
        return [(bad, HONEST) for bad in rekeyed(make())][: 1 if isinstance(court, Rosters) else 2]
    if case == "bit":
        return [(bad, HONEST) for bad in flipped(make())]
    if case == "kind":
        return [(bad, HONEST) for bad in moved(make())]
    if case == "place":
        return [(seal(make(), HONEST), LIAR)] if court.author else []
    changes = court.old if case == "stale" else court.swarm
    return [] if changes is None else [(seal(make(**changes), HONEST), HONEST)]


def test_every_signed_record_has_a_row():
    assert {name.split("`")[1] for name in COURTS} == SEALED
    assert {name for name, _ in table()} == set(COURTS)


@pytest.mark.parametrize("name", COURTS)
def test_what_is_honest_is_taken(network, name):
    court = COURTS[name](network)
    assert court.judge(seal(court.make(), HONEST), HONEST) == ""


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in COURTS for case in CASES])
def test_every_cell_of_the_table(network, name, case):
    court = COURTS[name](network)
    tried = attack(court, case)
    if case == "place" and court.again:
        assert court.judge(seal(court.make(), HONEST), HONEST) == ""
    said = [court.judge(*attempt) for attempt in tried]
    assert "" not in said
    assert table()[name, case] == (", ".join(dict.fromkeys(said)) if said else "—")

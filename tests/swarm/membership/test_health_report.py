"""The health report of `shoal status`: the slow by the median, the failing by the word of others,
and nothing where all is well; and of the whole swarm: exact where all members are in view, else
estimated from those in view."""

import pytest

from shoal.node.commands.status import MOST, table
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.health_report import (
    MIN_FAILURES,
    PARTNERLESS,
    REMEDY,
    SILENT_S,
    SLOW_EXCHANGE_S,
    SLOW_STEP_FACTOR,
    health_report,
)
from shoal.swarm.membership.overview import overview, totals, totals_said
from shoal.swarm.training.member import member_fields
from shoal.swarm.wire.envelope import FAILURES
from shoal.swarm.wire.messages import Member, MemberEnd
from shoal.swarm.wire.record import Exchanges, Faults, LinkUse, NodeRecord, Progress, Rollouts
from tests.support.records import GROUPS, member_of

NOW = 1e9
IDS = {name: Identity.ephemeral().peer_id for name in ("anna", "bert", "carl", "dora", "emil")}


def swarm(*names, **changes):
    """Members by peer id; changes: name -> fields that are not as usual.

    Blamed peers are named by name.
    """
    made = {}
    for name in names:
        fields = {"steps_per_s": 10.0, "exchange_s": 0.5, "recent": 20} | changes.get(name, {})
        fields["blamed"] = tuple(
            (IDS.get(other, other), kind, count) for other, kind, count in fields.get("blamed", ())
        )
        made[IDS[name]] = member_of(
            IDS[name], **{"name": name, "round": 3, "step": 9, "issued": NOW, **fields}
        )
    return made


ALL = ("anna", "bert", "carl", "dora")


def test_every_kind_of_failure_has_a_remedy():
    assert set(REMEDY) == set(FAILURES)


@pytest.mark.parametrize("names", [(), ("anna",), ("anna", "bert"), ALL])
def test_where_all_is_well_nothing_is_said(names):
    assert health_report(swarm(*names), NOW) == []


def test_partnerless_members_are_named_with_a_remedy():
    """Mutants: a sentence for each of them; two reasons in one; the most rounds of them in place of
    the fewest.
    """
    rows = {"anna": ("taken", 12), "bert": ("taken", 5), "carl": ("model", 3)}
    others, both = health_report(
        swarm(*ALL, **{name: {"partnerless": row} for name, row in rows.items()}), NOW
    )
    assert (
        others == "carl had no partner in 3 rounds or more (all others train another model); "
        f"{PARTNERLESS['model'][1]}."
    )
    assert both.startswith(
        "anna and bert had no partner in 5 rounds or more (all others were taken, or in other "
        "rounds); `shoal status`"
    )


def test_errors_of_a_members_own_code_are_told_as_such():
    (said,) = health_report(swarm(*ALL, anna={"internal_errors": 1200}), NOW)
    assert said == (
        "anna met 1,200 errors of its own, in the code of shoal or of its task and not in the "
        "network: node.log in its folder has the traceback; please report it."
    )


def test_the_slow_is_named_with_its_time_and_the_median():
    (said,) = health_report(swarm(*ALL, carl={"steps_per_s": 2.0}), NOW)
    assert said.startswith(
        "carl is slow: an inner step takes it 500 ms, 5.0 times the median of all (100 ms); "
    )
    assert health_report(swarm(*ALL, carl={"steps_per_s": 10.0 / SLOW_STEP_FACTOR}), NOW) == []


def test_sensible_wait_gets_no_advice():
    """Where nobody waits for the slow it is not advised to begin such a swarm."""
    members = swarm(*ALL, carl={"steps_per_s": 2.0})
    assert "--round seconds:auto" in health_report(members, NOW)[0]
    (said,) = health_report(members, NOW, in_seconds=True)
    assert said.endswith("(100 ms); it makes fewer steps in a round, and nobody waits for it.")


def test_mutual_failures_blame_nobody():
    """Where most fail with each other none of them is blamed."""
    names = ("anna", "bert", "carl")
    fields = {
        name: {
            "failures": (("unreachable", 8),),
            "blamed": tuple((other, "unreachable", 4) for other in names if other != name),
        }
        for name in names
    }
    (said,) = health_report(swarm(*names, **fields), NOW)
    assert said.startswith(
        "3 of 3 members fail with each other (24 x unreachable), so none is to blame: look after "
        "what they share"
    )
    (said,) = health_report(swarm(*ALL, "emil", **fields), NOW)
    assert said.startswith("3 of 5 members fail with each other")


def test_slower_of_two_can_be_the_slow_one():
    """Of two the slower can be the slow one and who has no speed yet is not."""
    (said,) = health_report(swarm("anna", "bert", bert={"steps_per_s": 1.0}), NOW)
    assert said.startswith("bert is slow")
    assert health_report(swarm("anna", "bert", bert={"steps_per_s": 0.0}), NOW) == []


def test_a_slow_link_is_not_one_of_a_few_milliseconds():
    (said,) = health_report(swarm(*ALL, dora={"exchange_s": 5.0}), NOW)
    assert said.startswith(
        "dora has a slow link: an exchange takes it 5 s, 10.0 times the median of all (500 ms); "
    )
    quick = {name: {"exchange_s": 0.01} for name in ALL} | {"dora": {"exchange_s": SLOW_EXCHANGE_S}}
    assert health_report(swarm(*ALL, **quick), NOW) == []


def test_two_words_name_a_failing_peer():
    """Who is named by two others fails and they do not."""
    accusing = {"failures": (("timeout", 4),), "blamed": (("bert", "timeout", 4),), "recent": 10}
    (said,) = health_report(
        swarm(*ALL, anna=accusing, carl=accusing, bert={"failures": (("broken", 8),), "recent": 8}),
        NOW,
    )
    assert said == f"bert fails: 2 of 3 others met 8 x timeout with it; {REMEDY['timeout']}."


def test_one_word_blames_the_way_between():
    """One peers word is not anothers fault but the way between them."""
    one = {"failures": (("unreachable", 9),), "blamed": (("bert", "unreachable", 9),)}
    other = {"failures": (("broken", 9),), "blamed": (("anna", "broken", 9),)}
    assert len(health_report(swarm(*ALL, anna=one, bert=other), NOW)) == 1
    (said,) = health_report(swarm(*ALL, anna=one), NOW)
    assert said == (
        "anna and bert fail with each other: anna met 9 x unreachable in its last 20 exchanges; "
        f"{REMEDY['unreachable']}."
    )


def test_who_fails_with_everybody_fails_itself():
    blamed = (("bert", "broken", 3), ("carl", "broken", 2), ("dora", "damaged", 2))
    (said,) = health_report(
        swarm(*ALL, anna={"failures": (("broken", 5), ("damaged", 2)), "blamed": blamed}), NOW
    )
    assert (
        said == "anna fails: of its last 20 exchanges it met 5 x broken, 2 x damaged; "
        f"{REMEDY['broken']}."
    )


def test_a_crash_of_somebody_else_is_nobodys_fault():
    gone = Identity.ephemeral().peer_id
    after = {"failures": (("broken", 6),), "blamed": ((gone, "broken", 6),), "recent": 10}
    assert health_report(swarm(*ALL, anna=after, bert=after), NOW) == []
    few = {"failures": (("broken", MIN_FAILURES - 1),), "recent": 4}
    assert health_report(swarm(*ALL, anna=few), NOW) == []
    seldom = {"failures": (("broken", 6),), "recent": 64}
    assert health_report(swarm(*ALL, anna=seldom), NOW) == []


def test_who_was_not_heard_of_is_named():
    (said,) = health_report(swarm(*ALL, dora={"issued": NOW - 22}), NOW)
    assert said == (
        "dora has not been heard of for 22 s: it may be asleep, stopped or cut off, and the sums "
        "still count it."
    )
    assert health_report(swarm(*ALL, dora={"issued": NOW - SILENT_S}), NOW) == []


def test_partition_is_told_by_those_who_suspect_it():
    """A partition is told as those see it who suspect it."""
    lost = {
        "missing": 5,
        "missing_of": 8,
        "missing_within_s": 3.2,
        "missing_names": ("emil", "fred", "gina", "hans"),
    }
    (said,) = health_report(swarm(*ALL, anna=lost, carl=lost), NOW)
    assert said == (
        "A partition is suspected: 5 of 8 members vanished within 3 s (emil, fred, gina, hans, …), "
        "says anna and carl; training goes on, and they come together again by themselves."
    )


def test_a_single_lost_partner_is_no_partition():
    def lost(name):
        return {"missing": 1, "missing_of": 2, "missing_names": (name,)}

    found = health_report(swarm(*ALL, anna=lost("bert"), bert=lost("anna")), NOW)
    assert found == [
        "anna has nobody left: bert stopped without leaving, or is cut off.",
        "bert has nobody left: anna stopped without leaving, or is cut off.",
    ]


def test_the_table_has_the_times_and_the_sentences_below():
    record = NodeRecord(
        progress=Progress(
            state="training",
            round=7,
            step=9,
            steps_per_s=1 / 0.1234,
            tokens_per_s=12345.6,
            mfu=0.41,
        ),
        exchanges=Exchanges(exchange_s=2.5, lag_steps=7, lag_auto=True, late=2),
        link=LinkUse(reach="punched", bytes_per_s=1.56e6),
        faults=Faults(recent=20, failures=(("timeout", 1), ("broken", 3))),
    )
    member = {
        "name": "anna",
        "peer": IDS["anna"],
        **record.model_dump(mode="json"),
        "shard": "0/1",
        "seen_s_ago": 1.0,
        "end": None,
    }
    said = ["anna\x1b[31m is slow."]
    report = {
        "name": "n",
        "task": "text",
        "method": "noloco",
        "fragments": 2,
        "peers": 1,
        "members": [member],
        "findings": said,
    }
    report |= {
        "optimizer": "task",
        "changes": [{"round": 4, "lr": 0.0001, "members": 5, "of": 6}],
        "totals": totals({}, 1),
        "link": "shoal://x",
        "invite_only": False,
    }
    assert "Inner optimizer" not in table(report)
    assert (
        "\nChanged by the creator, from round 4 on: train.lr=0.0001 (5 of 6 members in view have "
        "the change).\n" in table(report)
    )
    report["optimizer"] = "muon"
    shown = table(report)
    assert (
        "\nInner optimizer: Muon and AdamW (`shoal doctor LINK --parameters` names what each "
        "trains).\n" in shown
    )
    assert all(
        text in shown
        for text in (
            "123 ms",
            "2.5 s",
            "4/20 broken",
            "12,346",
            "41 % MFU",
            "7 auto, 2 late",
            "punched, 1.56 MB/s",
        )
    )
    assert shown.splitlines()[-2:] == ["anna?[31m is slow.", "Link: shoal://x"]


# -- the whole swarm -------------------------------------------------------------------------------


def members(count, **fields):
    made = {}
    for number in range(count):
        peer = Identity.ephemeral().peer_id
        usual = {
            "name": f"n{number}",
            "round": 3,
            "step": 9,
            "loss": float(number),
            "steps_per_s": 10.0,
            "tokens_per_s": 100.0,
        }
        made[peer] = member_of(peer, **{**usual, "issued": 1e9, **fields})
    return made


def test_with_all_in_view_everything_is_exact():
    here = members(3)
    here |= members(1, state="waiting", loss=None, tokens_per_s=0.0)
    found = totals(here, 4)
    assert found == {
        "peers": 4,
        "listed": 4,
        "sampled": False,
        "error": 0.0,
        "training": 3,
        "tokens_per_s": 300.0,
        "steps_per_s": 10.0,
        "loss": 1.0,
    }
    assert totals_said(found) == "4 peers: 300 tokens a second in all, median loss 1.0000."
    assert totals_said(totals({}, 0)) == "0 peers."


def test_sample_sums_are_scaled_with_certainty():
    """Of a sample sums are scaled and it is said how sure they are."""
    found = totals(members(25), 400)
    assert (found["peers"], found["listed"], found["sampled"], found["training"]) == (
        400,
        25,
        True,
        400,
    )
    assert found["tokens_per_s"] == pytest.approx(25 * 100 * 16)
    assert found["error"] == 0.2, "a bucket of 25 is 25 give or take 5"
    said = totals_said(found)
    assert said.startswith("About 400 peers (± 20 %), estimated from the 25 in view: ")
    assert said.endswith(": about 40,000 tokens a second in all, median loss 12.0000.")


@pytest.mark.parametrize(
    ("listed", "size", "says"), [(1, 64, "1 to 192"), (4, 32, "4 to 64"), (9, 72, "24 to 120")]
)
def test_a_few_in_view_tell_bounds_and_no_number(listed, size, says):
    """Two standard errors each way, 2 / sqrt(listed), and at least those in view."""
    said = totals_said(totals(members(listed), size))
    assert said.startswith(f"{says} peers; the {listed} in view say no more: ")
    assert "bout" not in said


def test_the_table_says_so_and_stays_short():
    creator = Identity.ephemeral().peer_id
    manifest = Manifest(name="m", created=0.0, creator=creator, task="text", model="0" * 64)
    link = {"link": "shoal://x", "invite_only": False}
    shown = table({**overview("a" * 52, manifest, members(MOST + 2), 1e9, 16 * (MOST + 2)), **link})
    assert "about 1,056 peers" in shown
    assert "About 1,056 peers (± 12 %), estimated from the 66 in view" in shown
    assert shown.count("training") == MOST
    assert "2 more members are in view; --json lists all of them." in shown
    few = table({**overview("a" * 52, manifest, members(2), 1e9), **link})
    assert "noloco, 2 peers" in few
    assert "more members" not in few
    assert "bout" not in few


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"finished": True}, "waits for others"),
        ({"end": MemberEnd(members=0)}, "own model"),
        ({"end": MemberEnd(members=2, names=("bert",))}, "with bert"),
        (
            {"end": MemberEnd(members=4, names=("bert", "carl"), loss_before=2.5, loss_after=2.25)},
            "with bert, carl and 1 more: loss -0.2500",
        ),
        ({"end": MemberEnd(members=2, refused=True)}, "own model: the mean was worse"),
    ],
)
def test_status_shows_with_whom_a_member_ended(fields, shown):
    """Who left after its end is shown below the members; who just left is not."""
    creator = Identity.ephemeral().peer_id
    manifest = Manifest(name="m", created=0.0, creator=creator, task="text", model="0" * 64)
    left = swarm("anna", "carl", anna=fields | {"state": "leaving"}, carl={"state": "leaving"})
    there = swarm("anna", "dora", anna=fields)
    ended = "end" in fields
    report = overview(
        "a" * 52, manifest, swarm("dora") if ended else there, NOW, departed=left if ended else {}
    )
    assert [one["name"] for one in report["members"]] == ["dora", "anna"][:: 1 if ended else -1]
    lines = table({**report, "link": "shoal://x", "invite_only": False}).splitlines()
    row = next(line for line in lines if "anna" in line)
    assert row.rstrip(" │").endswith(f" {shown}")


def test_status_shows_which_groups_were_of_no_use():
    """A column only where a member shares rollouts, with the share and the usual reason."""
    rollouts = Rollouts(groups_seen=40, unused=(("no_spread", 10), ("not_drawn", 2)))
    stated = member_fields(NodeRecord(rollouts=rollouts))
    assert stated["unused"] == (0.3, "no_spread")
    peers = [Identity.ephemeral().peer_id for _ in range(2)]
    manifest = Manifest(name="m", created=0.0, creator=peers[0], task="rl", model="0" * 64)
    usual = {"round": 3, "step": 9, "steps_per_s": 1.0}
    members = {peer: member_of(peer, **usual) for peer in peers}
    view = {"link": "shoal://x", "invite_only": False}
    plain = overview("a" * 52, manifest, members, 0.0)
    assert "unused groups" not in table({**plain, **view})
    members[peers[1]] = member_of(peers[1], **usual, unused=stated["unused"])
    found = overview("a" * 52, manifest, members, 0.0)
    (told,) = [one for one in found["members"] if "rollouts" in one]
    assert told["rollouts"] == {"unused_share": 0.3, "unused_most": "no_spread"}
    shown = table({**found, **view})
    assert "unused groups" in shown
    assert "30 %, most no_spread" in shown


def test_every_group_that_a_member_states_is_shown():
    """Mutant: a group of the record is in `Member`, and not in the overview."""
    peer = Identity.ephemeral().peer_id
    manifest = Manifest(name="m", created=0.0, creator=peer, task="text", model="0" * 64)
    (row,) = overview("a" * 52, manifest, {peer: member_of(peer)}, 0.0)["members"]
    stated = {
        name for name, group in GROUPS.items() if set(Member.model_fields) & set(group.model_fields)
    }
    # Only of a member that shares rollouts.
    assert stated - {"rollouts"} <= set(row)

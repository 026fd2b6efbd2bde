"""The tally: what partners signed counts, once, and no more of it than this node was there for."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.exchange.weighted_mean import MAX_MEDIANS
from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.topics import tally
from shoal.swarm.topics.receipts import MAX_PEERS_NAMED, MAX_TOKEN_RATIO, Receipts, Work, confirmed
from shoal.swarm.topics.tally import MAX_PEERS, NAME, Tally, TallyError, saved_tally
from shoal.swarm.wire.envelope import pack, seal, unpack
from tests.support.fake_network import SWARM
from tests.support.reasons import raises_for

KEYS = [Identity.ephemeral() for _ in range(5)]
ME, ANNA, BERT, LIAR, CARL = (key.peer_id for key in KEYS)
OF = {key.peer_id: key for key in KEYS}
PAIR = Work(1, 1.0, 100.0)


def receipt(signer, work, issued=2.0, swarm=SWARM):
    made = Receipts(swarm=swarm, peer=signer, issued=issued, work=((ME, *work),))
    return made, seal(made, OF[signer]), "10.0.0.0/16"


def sums(mine):
    return Work(*(mine.report()[name] for name in Work._fields))


@pytest.fixture
def mine():
    made = Tally(ME, SWARM)
    for _ in range(3):
        made.took([ANNA], PAIR)
    return made


def test_what_a_partner_signed_counts_with_its_name_and_range(mine):
    mine.take(*receipt(ANNA, Work(3, 3.0, 270.0)))
    report = mine.report()
    assert sums(mine) == Work(3, 3.0, 270.0)
    assert (report["partners"], report["ranges"]) == (1, 1)
    assert [(one["peer"], one["range"], one["exchanges"]) for one in report["of"]] == [
        (ANNA, "10.0.0.0/16", 3)
    ]


def test_newest_receipt_replaces_earlier_ones(mine):
    """The newest receipt takes the place of the earlier ones and none comes twice."""
    for issued, exchanges in ((2.0, 1), (3.0, 2)):
        mine.take(*receipt(ANNA, Work(exchanges, float(exchanges), 100.0), issued))
    for issued in (2.0, 3.0):
        with raises_for("replayed", MessageError):
            mine.take(*receipt(ANNA, Work(1, 1.0, 100.0), issued))
    assert sums(mine) == Work(2, 2.0, 100.0)


def test_self_signed_and_double_receipts_do_not_count():
    """Who signs for itself is refused and who names a peer twice confirms once."""
    fields = {"swarm": SWARM, "peer": ANNA, "issued": 2.0}
    with raises_for("malformed", MessageError):
        unpack(pack(Receipts.model_construct(**fields, work=((ANNA, *PAIR),))), Receipts)
    assert Receipts(**fields, work=((ME, *PAIR), (ME, *PAIR.plus(PAIR)))).of(ME) == PAIR
    mine = Tally(ME, SWARM)
    mine.took([ME], PAIR)
    assert mine.receipts() is None


def test_a_receipt_of_another_swarm_is_refused(mine):
    with pytest.raises(MessageError, match="another swarm"):
        mine.take(*receipt(ANNA, PAIR, swarm="b" * 52))


def test_a_key_that_was_never_met_confirms_nothing(mine):
    mine.take(*receipt(LIAR, Work(2**50, 2.0**50, 2.0**50, 2**50, 2.0**50, 2**50)))
    assert sums(mine) == Work()
    assert mine.report()["of"] == []


def test_rollouts_and_votes_count_up_to_what_this_node_made():
    mine = Tally(ME, SWARM)
    mine.made(rollouts=4)
    mine.made(votes=2)
    mine.take(*receipt(LIAR, Work(rollouts=40, reward=20.0, votes=9)))
    assert sums(mine) == Work(rollouts=4, reward=2.0, votes=2)


def test_restarted_partner_confirms_anew(mine):
    """A partner that begins anew confirms what it has counted since."""
    mine.take(*receipt(ANNA, Work(3, 3.0, 270.0)))
    mine.take(*receipt(ANNA, Work(1, 1.0, 90.0), 3.0))
    assert sums(mine) == Work(1, 1.0, 90.0)


numbers = st.integers(0, 2**53)
works = st.builds(
    Work,
    numbers,
    st.floats(0, 2**53),
    st.floats(0, 2**53),
    numbers,
    st.floats(-(2**53), 2**53),
    numbers,
)


@given(works, st.integers(0, 50), st.integers(0, 9), st.integers(0, 9))
def test_no_signature_is_worth_more_than_what_was_there(signed, met, rollouts, votes):
    own = Work(met, met / 2, met * 7.0)
    found = confirmed(signed, own, rollouts, votes)
    assert 0 <= found.exchanges <= met
    assert 0 <= found.rounds <= met / 2
    assert 0 <= found.tokens <= 4 * met * 7.0
    assert (found.rollouts <= rollouts, found.votes <= votes) == (True, True)
    assert abs(found.reward) <= abs(signed.reward)


@given(
    st.lists(st.tuples(st.sampled_from([ANNA, BERT, LIAR]), works, st.integers(0, 4)), max_size=12)
)
def test_tally_never_exceeds_the_nodes_work(signed):
    """Whatever keys sign in whatever order the tally is within what this node did."""
    mine = Tally(ME, SWARM)
    mine.took([ANNA, BERT], Work(2, 1.0, 10.0))
    mine.made(rollouts=1, votes=1)
    for signer, work, issued in signed:
        with contextlib.suppress(MessageError):
            mine.take(*receipt(signer, work, float(issued)))
    found = sums(mine)
    assert (found.exchanges <= 4, found.rounds <= 2.0, found.tokens <= 80.0) == (True, True, True)
    assert (found.rollouts <= 3, found.votes <= 3) == (True, True)  # of each signer at most one


def test_token_bound_is_that_of_weights():
    """The bound on tokens is that of weights in a mean."""
    assert MAX_MEDIANS == MAX_TOKEN_RATIO


def test_changed_partners_are_named_first():
    """Records name who changed and else who was not named for longest."""
    clock = iter(range(1, 100))
    mine = Tally(ME, SWARM, clock=lambda: float(next(clock)))
    peers = [f"{number:08d}" for number in range(2 * MAX_PEERS_NAMED)]
    mine._took = dict.fromkeys(peers, PAIR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tally, "Receipts", lambda **fields: [peer for peer, *_ in fields["work"]])
        assert mine.receipts() == peers[:MAX_PEERS_NAMED]
        mine.took([peers[3]], PAIR)
        assert mine.receipts() == peers[MAX_PEERS_NAMED:]
        assert mine.receipts() == [peers[3], *peers[:3], *peers[4:MAX_PEERS_NAMED]]


def test_group_receipt_fits_a_record():
    """A group shares a round and all of it fits a record."""
    mine = Tally(ME, SWARM)
    most = Work(2**53, 2.0**53, 2.0**53, 2**53, 2.0**53, 2**53)
    others = [Identity.ephemeral().peer_id for _ in range(MAX_PEERS_NAMED)]
    mine.took(others, most)
    record = mine.receipts()
    assert unpack(pack(record), Receipts) == record
    assert record.of(others[0]) == most
    mine.took(others, most)
    assert mine.receipts().of(others[0]) == most  # no number beyond what a message holds


def test_tampered_tally_file_counts_nothing(tmp_path, mine):
    """It is kept with its signatures and a changed file counts nothing."""
    mine._path = tmp_path / NAME
    mine.made(rollouts=2)
    mine.take(*receipt(ANNA, Work(3, 3.0, 270.0, 1, 0.5)))
    mine.save()
    again = saved_tally(tmp_path)
    assert again.report() == mine.report()
    assert again.receipts().of(ANNA) == Work(3, 3.0, 300.0)
    saved = json.loads((tmp_path / NAME).read_text())
    ((text, place),) = saved["kept"]
    forged = seal(receipt(ANNA, Work(9, 9.0, 9.0))[0], OF[LIAR])
    for kept in (
        [[text[:-8] + "AAAAAAA=", place]],
        [[tally.base64.b64encode(forged).decode().replace("A", "B"), place]],
    ):
        (tmp_path / NAME).write_text(json.dumps({**saved, "kept": kept}))
        assert sums(Tally(ME, SWARM, tmp_path / NAME)) == Work()


@pytest.mark.parametrize(
    "damage", ["", "[", "[]", "7", '{"peer": 1}', '{"peer": "x", "swarm": "y", "took": [1]}']
)
def test_damaged_tally_file_begins_anew(tmp_path, damage):
    """A damaged file begins anew and is told in a sentence."""
    (tmp_path / NAME).write_text(damage)
    assert sums(Tally(ME, SWARM, tmp_path / NAME)) == Work()
    if "took" in damage:
        assert saved_tally(tmp_path).report()["partners"] == 0
    else:
        with pytest.raises(TallyError, match="its node writes it anew"):
            saved_tally(tmp_path)


def test_a_folder_without_one_says_so(tmp_path):
    with pytest.raises(TallyError, match="There is no tally"):
        saved_tally(tmp_path)


def test_signers_are_bounded_and_partners_kept(mine):
    """Signers are bounded and a partner is kept before a stranger."""
    made, sealed, place = receipt(ANNA, Work(3, 3.0, 270.0))
    mine.take(made, sealed, place)
    for number in range(MAX_PEERS + 5):
        mine.take(made.model_copy(update={"peer": f"stranger {number}"}), sealed, place)
    assert len(mine._kept) == MAX_PEERS
    assert sums(mine) == Work(3, 3.0, 270.0)

"""Rounds in which groups are claimed: who claims writes them, the rest is written as ever, and planted ones teach nobody."""

import pytest

from shoal.node.config.settings import RLSettings
from shoal.node.rl.task import Claimed, RLTask
from shoal.node.rl.tiny import Tiny, Warm
from tests.node.rl.test_task import ENV, PEERS, SHARD, Bus


@pytest.fixture(scope="module")
def policy():
    return Tiny(ENV.made, seed=1, layers=1, width=16, warm=Warm(steps=30, batch=32, right=0.5))


class Claims:
    """`shoal.node.rl.task.Claiming`: claims one group for each of ``due``, which says whether it is planted."""

    def __init__(self, *due):
        self.due, self.asked, self.written = list(due), [], []

    def write(self, policy, seed, index):
        self.asked.append((seed, index))
        if not self.due:
            return None
        planted = self.due.pop(0)
        prompt = "last: zzz" if planted else ENV.made.question(seed, index).prompt
        (completions,) = policy.generate([prompt], 8, temperature=1.0, max_tokens=12, seed=1234 + index)
        self.written.append(completions)
        return Claimed(completions, planted)


def task_of(policy, claims=None, **settings):
    everyone = []
    task = RLTask(ENV, lambda: policy, RLSettings(held_out=5, external=0, **{"local": 3, **settings}), seed=1)
    bus, other = Bus(everyone, PEERS[0]), Bus(everyone, PEERS[1])
    rounds = []
    task.connect(bus, PEERS[0], rounds.append)
    if claims is not None:
        task.claim(claims.write)
    return task, other, rounds


def texts(record):
    return list(record.completions)


def plain(policy, **settings):
    """Return what is written without claims: of each group its record and what is learnt from it."""
    task, other, _ = task_of(policy, **settings)
    groups, reward = task._write(0)
    return groups, reward, other.inbox


@pytest.mark.parametrize("claims", [None, Claims()])
def test_without_a_claim_that_is_due_all_is_as_before(policy, claims):
    groups, reward, sent = plain(policy)
    task, other, _ = task_of(policy, claims)
    assert task._write(0) == (groups, reward)
    assert [texts(record) for record in other.inbox] == [texts(record) for record in sent]
    assert [record.logps for record in other.inbox] == [record.logps for record in sent]
    if claims is not None:
        assert len(claims.asked) == 1  # after the first that is not due nobody is asked again


def test_what_is_claimed_is_shared_and_learnt_from_in_its_place(policy):
    claims = Claims(False)
    task, other, _ = task_of(policy, claims)
    groups, _ = task._write(0)
    before, _, _ = plain(policy)
    assert [group.prompt for group in groups] == [group.prompt for group in before]  # the same questions
    assert groups[0].tokens == tuple(one.tokens for one in claims.written[0])
    assert texts(other.inbox[0]) == [one.text for one in claims.written[0]]
    assert [record.index for record in other.inbox] == [index for index, _ in task._questions(0)]
    assert claims.asked == [(other.inbox[0].seed, index) for index, _ in task._questions(0)[:2]]
    # The rest is what the policy writes of the rest.
    rest = policy.generate(
        [group.prompt for group in groups[1:]], 8, temperature=task.settings.temperature, max_tokens=12,
        seed=task._number("completions", 0),
    )  # fmt: skip
    assert [group.tokens for group in groups[1:]] == [tuple(one.tokens for one in part) for part in rest]


def test_a_planted_group_is_shared_like_any_other_but_not_learnt_from_nor_rewarded(policy):
    claims = Claims(True, False)
    task, other, _ = task_of(policy, claims)
    groups, reward = task._write(0)
    asked = [question.prompt for _, question in task._questions(0)]
    assert [group.prompt for group in groups] == asked[1:]
    assert [texts(record) for record in other.inbox[:2]] == [[one.text for one in part] for part in claims.written]
    assert len(other.inbox) == 3
    assert {record.env for record in other.inbox} == {"strings"}
    given = [one for group in groups for one in group.rewards]
    assert reward == sum(given) / len(given)


def test_a_round_of_planted_groups_alone_learns_nothing_and_goes_on(policy):
    task, other, rounds = task_of(policy, Claims(True), local=1)
    batches = task.batches(SHARD)
    assert next(batches) is None
    assert task.loss(policy.module, None).item() == 0
    assert (rounds[0].own, rounds[0].reward) == (0, None)
    assert task.cumulative == 0
    next(batches)
    task.loss(policy.module, None)
    assert rounds[1].own == 1
    assert len(other.inbox) == 2


def test_all_groups_of_a_round_may_be_claimed(policy):
    claims = Claims(False, False, False, False)
    task, other, _ = task_of(policy, claims)
    groups, _ = task._write(0)
    assert [group.tokens for group in groups] == [tuple(one.tokens for one in part) for part in claims.written]
    assert len(other.inbox) == 3
    assert len(claims.due) == 1

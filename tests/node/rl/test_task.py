"""Rounds of reinforcement learning without a network: rewards rise, foreign groups are judged anew,
nothing is waited for.
"""

import secrets
import time

import pytest
import torch

from shoal.node.config.rl_settings import RLSettings
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.rl.asked_rounds import NAME, AskedRounds
from shoal.node.rl.environment import HELD_OUT, EnvError, Question
from shoal.node.rl.loading import load_env, make_task
from shoal.node.rl.policy import Completion
from shoal.node.rl.remote_rollouts import RemoteRollouts, fair
from shoal.node.rl.task import Claimed, RLTask
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.rl.update import RolloutGroup, completions_of, loss_of, make_update
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.optim.rl.losses import LOSSES
from shoal.optim.rl.objective import Objective
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.topics.rollout import Rollout, pack_logps, pack_tokens

SHARD = Shard(0, 1, 0)


class Bus:
    """A pool that hands each record to all others at once."""

    def __init__(self, everyone, peer):
        self.everyone, self.peer, self.inbox, self.sent, self.round = everyone, peer, [], [], 0
        everyone.append(self)

    def advance(self, round):
        self.round = round

    def make(self, **fields):
        return Rollout(
            swarm="a" * 52,
            peer=self.peer,
            round=self.round,
            nonce=secrets.token_bytes(16),
            issued=time.time(),
            **fields,
        )

    def publish(self, rollout):
        self.sent.append(rollout)
        for other in self.everyone:
            if other is not self:
                other.inbox.append(rollout)

    def drain(self):
        came, self.inbox = self.inbox, []
        return came


PEERS = [
    "12D3KooWQWVKfnLd7nqtfo4JXhb9b3EnyJyHKUBavphSVG1hiGDV",
    "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",
]
ENV = load_env("strings", {"families": "last", "letters": 3})


def tasks(count=2, policy=None, **settings):
    everyone, made = [], []
    for number in range(count):
        own = (
            Tiny(ENV.made, "copy", seed=number, width=32, warm=Warm(steps=250, batch=32, right=0.4))
            if policy is None
            else policy
        )
        task = RLTask(ENV, lambda own=own: own, RLSettings(held_out=20, **settings), seed=1)
        task.connect(Bus(everyone, PEERS[number]), PEERS[number])
        made.append(task)
    return made, everyone


@pytest.mark.ci
def test_two_nodes_learn_by_themselves_and_from_each_other():
    (first, second), everyone = tasks(local=2, external=2)
    before = [task.evaluate(task.policy.module) for task in (first, second)]
    rounds = []
    first.connect(everyone[0], PEERS[0], rounds.append)
    loops = []
    for task in (first, second):
        loops.append((task, task.inner_optimizer(task.model().parameters()), task.batches(SHARD)))
    for _ in range(40):
        for task, optimizer, batches in loops:
            loss = task.loss(task.model(), next(batches))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    after = [task.evaluate(task.policy.module) for task in (first, second)]
    assert max(after) < min(before) - 0.3
    assert [round.round for round in rounds] == list(range(40))
    assert max(len(round.used) for round in rounds) == 2
    assert {peer for round in rounds for peer, _ in round.used} == {PEERS[1]}
    assert {round.own for round in rounds} == {2}
    assert first.foreign.used > 20
    assert 0 < first.totals.mean_worth() <= 1
    assert 0 < first.totals.reward < 40


def test_resumed_rl_run_goes_on_alike(tiny):
    """It is a task of the trainer and a resumed run goes on alike."""

    def trainer():
        policy = Tiny(ENV.made, seed=1, width=16, warm=Warm(steps=2, batch=4))
        task = RLTask(ENV, lambda: policy, RLSettings(held_out=20, local=2, external=0), seed=1)
        made = Trainer(task, OuterSettings(method="none", every=2), TrainSettings(steps=6))
        made.connect(made.opt.exchange, "run", SHARD)
        return made

    whole, half = trainer(), trainer()
    whole.run()
    for _ in range(3):
        half.step()
    resumed = trainer()
    resumed.resume(half.state())
    resumed.run()
    for left, right in zip(whole.params, resumed.params, strict=True):
        assert torch.equal(left, right)
    assert 0 <= whole.evaluate() <= 1


def asked_by(peer, trainer_state=None, *, swarm="one", steps=3, folder=None):
    """Return the questions of a node that trains, or resumes, and its trainer."""
    policy = Tiny(ENV.made, seed=1, width=16, warm=Warm(steps=2, batch=4))
    task = RLTask(ENV, lambda: policy, RLSettings(held_out=20, local=2, external=0), seed=1)
    bus = Bus([], peer)
    task.connect(bus, f"{swarm}:{peer}", folder=folder)
    made = Trainer(task, OuterSettings(method="none"), TrainSettings(steps=6))
    made.connect(made.opt.exchange, "run", SHARD)
    if trainer_state is not None:
        made.resume(trainer_state)
    for _ in range(steps):
        made.step()
    return [(record.seed, record.index) for record in bus.sent], made


def test_a_resumed_run_asks_no_question_again():
    """prime-rl #3164: after a resume its questions began anew."""
    whole, _ = asked_by(PEERS[0], steps=6)
    before, trainer = asked_by(PEERS[0])
    after, again = asked_by(PEERS[0], trainer.state())
    assert before + after == whole
    assert len(set(whole)) == 12
    third, _ = asked_by(PEERS[0], again.state())
    assert not set(third) & set(whole)
    # Without a folder what was lost is asked again.
    assert asked_by(PEERS[0], trainer.state())[0] == after


def test_what_a_crash_lost_is_not_asked_again(tmp_path):
    """Rounds after the last checkpoint were shared already; an orderly end loses none."""
    whole, _ = asked_by(PEERS[0], steps=6)
    before, trainer = asked_by(PEERS[0], folder=tmp_path)
    saved = trainer.state()
    lost, _ = asked_by(PEERS[0], saved, folder=tmp_path)
    assert before + lost == whole
    after, again = asked_by(PEERS[0], saved, folder=tmp_path)
    assert not set(after) & set(whole)
    longer, _ = asked_by(PEERS[0], saved, folder=tmp_path)
    assert not set(longer) & {*whole, *after}
    asked = len({*whole, *after, *longer})
    orderly, _ = asked_by(PEERS[0], again.state(), folder=tmp_path, steps=1)
    assert len({*whole, *after, *longer, *orderly}) == asked + 2
    other, _ = asked_by(PEERS[0], swarm="two", folder=tmp_path, steps=1)
    assert other == asked_by(PEERS[0], swarm="two", steps=1)[0]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"seed": 1}', b'{"seed": 1, "rounds": -1}', b"\xff" * 9999]
)
def test_a_damaged_note_of_questions_counts_as_none(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    asked = AskedRounds(tmp_path, 1)
    asked.begin(0)
    assert asked.ask(0) == 0
    again = AskedRounds(tmp_path, 1)
    again.begin(0)
    assert again.ask(0) == 1


def test_another_swarm_or_peer_has_other_questions():
    """The weights may have come from a run of the same node: --resume-from."""
    here, _ = asked_by(PEERS[0], swarm="one")
    assert not set(here) & set(asked_by(PEERS[0], swarm="two")[0])
    assert not set(here) & set(asked_by(PEERS[1], swarm="one")[0])


def test_sharing_and_learning_can_be_separate(tiny):
    """Who only shares does not learn and who only learns does not share."""
    (sharer, learner), everyone = tasks(policy=tiny, local=1, only="share")
    learner.settings = RLSettings(held_out=20, local=0, external=4, only="learn")
    theirs, mine = sharer.batches(SHARD), learner.batches(SHARD)
    assert [next(theirs) for _ in range(6)] == [None] * 6
    assert sharer.loss(tiny.module, None).item() == 0
    assert len(everyone[0].sent) == 6
    next(mine)
    learner.loss(tiny.module, None)
    assert everyone[1].sent == []
    assert (
        sum(learner.foreign.rejected.values()) + learner.foreign.used + len(learner.foreign._kept)
        == 6
    )


def test_oversized_group_is_learnt_and_not_shared(tiny, monkeypatch, caplog):
    """The fault: a completion of more than 32 KiB of text ended the node."""
    (task, _), everyone = tasks(policy=tiny, local=1)
    long = Completion("x" * (32 * 1024 + 1), (1,), (-0.5,), "stop")
    monkeypatch.setattr(
        tiny, "generate", lambda prompts, count, **options: [[long] * count for _ in prompts]
    )
    groups, _ = task._write(0)
    assert len(groups) == 1
    assert everyone[0].sent == []
    assert "a group of completions was not shared" in caplog.text


def test_no_question_of_a_round_is_held_out(tiny):
    env = load_env(
        "strings", {"families": "last", "letters": 2, "longest": 3}
    )  # 8 questions in all
    task = RLTask(env, lambda: tiny, RLSettings(held_out=5, local=4), seed=1)
    asked = task.questions.of_round(0, 4, task.held_out_prompts)
    assert len(asked) == 4
    assert not {question.prompt for _, question in asked} & task.held_out_prompts
    greedy = RLTask(env, lambda: tiny, RLSettings(held_out=500), seed=1)
    with pytest.raises(EnvError, match="hardly one is not held out"):
        greedy.questions.of_round(0, 4, greedy.held_out_prompts)


def foreign(policy, **changes):
    settings = {"seed": 1, "group": 8, "max_tokens": 12, "behind": 8} | changes
    return RemoteRollouts(
        ENV, policy, frozenset(ENV.made.question(HELD_OUT, i).prompt for i in range(3)), **settings
    )


def record(texts, *, seed=3, index=0, **fields):
    bus = Bus([], PEERS[0])
    return bus.make(
        env="strings",
        env_version="1",
        env_config=ENV.config,
        seed=seed,
        index=index,
        completions=tuple(texts),
        finish=("stop",) * len(texts),
        **{"policy_version": 0, "temperature": 1.0, **fields},
    )


def right(index=0, seed=3):
    return ENV.made.question(seed, index).answer


def test_rewards_are_the_receivers_and_the_end_is_learnt(tiny):
    (group,) = foreign(tiny).take([record([right(), "zz"])], 4, 0)
    assert group.rewards == (1.0, 0.0)
    assert group.prompt == ENV.made.question(3, 0).prompt
    assert group.tokens == (tuple(tiny.encode(right(), True)), tuple(tiny.encode("zz", True)))
    assert group.behaviour == (None, None)


def test_the_writers_view_counts_only_for_the_very_tokens(tiny):
    texts = [right(), "zz"]
    tokens = (pack_tokens(tiny.encode(texts[0], True)), pack_tokens([5, 5, 5]))
    logps = (pack_logps([-1.0, -2.0]), pack_logps([-1.0] * 3))
    told = record(texts, tokens=tokens, logps=logps, tokenizer=tiny.tokenizer)
    (group,) = foreign(tiny).take([told], 4, 0)
    assert group.behaviour == ((-1.0, -2.0), None)
    assert group.tokens[1] == tuple(tiny.encode("zz", True))
    other = record(texts, tokens=tokens, logps=logps, tokenizer="0" * 64)
    assert foreign(tiny).take([other], 4, 0)[0].behaviour == (None, None)


def test_tokens_beyond_the_text_are_not_believed(tiny):
    """Their log-probabilities would count for tokens that nobody can see."""
    texts = [right(), "zz"]
    rows = [[*tiny.encode(text, True), 5] for text in texts]
    told = record(
        texts,
        tokens=tuple(map(pack_tokens, rows)),
        logps=tuple(pack_logps([-1.0] * len(row)) for row in rows),
        tokenizer=tiny.tokenizer,
    )
    (group,) = foreign(tiny).take([told], 4, 0)
    assert group.behaviour == (None, None)
    assert group.tokens == tuple(tuple(row[:-1]) for row in rows)


def test_what_is_not_learnt_from_is_counted_under_its_reason(tiny):
    pool = foreign(tiny)
    useful = [record([right(index), "zz"], index=index) for index in range(3)]
    same = record(["zz", "zz"])
    held = record([ENV.made.question(HELD_OUT, 0).answer, "zz"], seed=HELD_OUT)
    long = record(["z" * 10_000, right()])
    assert len(pool.take([*useful, same, held, long], 1, 0)) == 1
    assert (
        pool.used,
        pool.rejected["no_spread"],
        pool.rejected["held_out"],
        pool.rejected["unjudged"],
    ) == (1, 1, 1, 1)
    assert len(pool.take([], 1, 1)) == 1  # what was left over
    assert pool.take([], 1, 5) == []  # too old by now
    assert pool.used + sum(pool.rejected.values()) == 6


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_one_or_of_equals_teaches_nothing(tiny, scale):
    """Others' are counted, and of own ones no update is made, however rewards are scaled."""
    pool = foreign(tiny)
    assert pool.take([record([right()]), record(["zz", "zz"], index=1)], 4, 0) == []
    assert pool.rejected["no_spread"] == 2
    rows = tuple(tuple(tiny.encode(text, True)) for text in ("a", "bc"))
    one = RolloutGroup("q", rows[:1], (0.7,), (None,))
    equal = RolloutGroup("q", rows, (0.1, 0.1), (None, None))
    assert make_update([one, equal], scale=scale, deviation="sample") is None


def fresh(step, most):
    """Oldest version that may train in batch ``step``, which trains on version ``step`` - 1:
    prime-rl's ``min_fresh_version``.
    """
    return (step - 1) - most


@pytest.mark.parametrize("most", [0, 3, 8])
def test_group_of_a_much_newer_policy_is_left_out(tiny, most):
    """A group is left out when its sender's policy is too many versions newer."""
    versions, newest = range(20), 19
    for version in versions:
        pool = foreign(tiny, behind=most)
        old = record([right(0), "zz"], index=0, policy_version=version)
        seen = record(["zz", "zz"], index=1, policy_version=newest).model_copy(
            update={"issued": old.issued + 1}
        )
        assert len(pool.take([seen, old], 4, 0)) == (version >= fresh(newest + 1, most)), version
        assert pool.rejected["off_policy"] == (version < fresh(newest + 1, most))


def test_waiting_group_ages_by_its_senders_versions(tiny):
    """A group ages while it waits and only by its own sender's versions."""
    pool = foreign(tiny)
    waiting = [record([right(index), "zz"], index=index, policy_version=5) for index in range(2)]
    assert len(pool.take(waiting, 1, 0)) == 1
    far = record(["zz", "zz"], index=7, policy_version=99).model_copy(
        update={"peer": PEERS[1], "issued": waiting[0].issued + 1}
    )
    assert pool.take([far], 0, 1) == []
    assert pool.rejected["off_policy"] == 0
    own = record(["zz", "zz"], index=8, policy_version=14).model_copy(
        update={"issued": waiting[0].issued + 1}
    )
    assert pool.take([own], 1, 1) == []
    assert pool.rejected["off_policy"] == 1


@pytest.mark.parametrize(
    ("loss", "writer", "behind", "used"),
    [
        ("sapo", "known", 8, 1),
        ("sapo", "known", 9, 0),
        ("dapo", "known", 32, 1),
        ("dapo", "known", 33, 0),
        ("dapo", "silent", 9, 0),
        ("dapo", "of other tokens", 9, 0),
    ],
)
def test_stale_groups_go_on_where_the_loss_corrects(tiny, loss, writer, behind, used):
    """Their writer's log-probabilities must be known for it."""
    told = {}
    if writer != "silent":
        rows = [tiny.encode(right(), True), tiny.encode("zz", True)]
        if writer == "of other tokens":
            rows[1] = [5, 5, 5]
        told = {
            "tokens": tuple(map(pack_tokens, rows)),
            "logps": tuple(pack_logps([-1.0] * len(row)) for row in rows),
            "tokenizer": tiny.tokenizer,
        }
    old = record([right(), "zz"], **told)
    newest = record(["zz", "zz"], index=1, policy_version=behind).model_copy(
        update={"issued": old.issued + 1}
    )
    task = RLTask(ENV, lambda: tiny, RLSettings(held_out=3, loss=loss), seed=1)
    task.batches(SHARD)
    assert len(task.foreign.take([old, newest], 4, 0)) == used
    assert task.foreign.rejected["off_policy"] == 1 - used


def test_restarted_sender_is_not_left_out(tiny):
    """A sender that began anew is not left out for its low versions."""
    pool = foreign(tiny)
    before = record([right(0), "zz"], index=0, policy_version=300)
    after = record([right(1), "zz"], index=1, policy_version=0).model_copy(
        update={"issued": before.issued + 1}
    )
    (group,) = pool.take([before, after], 4, 0)
    assert group.prompt == ENV.made.question(3, 1).prompt
    assert pool.rejected["off_policy"] == 1


def test_constant_policy_does_not_grow_old(tiny):
    """A quick sharer's groups were thrown away as off-policy though one policy had written all."""
    (sharer,), everyone = tasks(1, policy=tiny, local=1, only="share")
    frozen = RLTask(ENV, lambda: tiny, sharer.settings, seed=1, frozen=True)
    frozen.connect(everyone[0], PEERS[0])
    for task, versions in ((sharer, {*range(20)}), (frozen, {0})):
        everyone[0].sent.clear()
        batches = task.batches(SHARD)
        for _ in range(20):
            next(batches)
        assert {record.policy_version for record in everyone[0].sent} == versions
    pool = foreign(tiny)
    pool.take(everyone[0].sent, 4, 0)
    assert pool.rejected["off_policy"] == 0


@pytest.mark.parametrize(("only", "method", "frozen"), [
    ("share", "none", True), ("share", "noloco", False), (None, "none", False),
])  # fmt: skip
def test_a_policy_is_frozen_where_nothing_learns_or_averages(only, method, frozen):
    settings = Settings.model_validate(
        {"task": {"hooks": "rl"}, "rl": {"only": only} if only else {}, "outer": {"method": method}}
    )
    assert make_task(settings)._frozen is frozen


def settings_of(method="none", **rl):
    return Settings.model_validate({"task": {"hooks": "rl"}, "rl": rl, "outer": {"method": method}})


def test_sampler_that_follows_states_the_leaders_version(tiny):
    """Its own rounds would make its groups look newer, or older, than they are."""
    assert not make_task(settings_of(only="share", follow="creator"))._frozen

    class Followed:
        version = 0

        def begin_round(self, round, weights):
            self.version = 10 + round // 2
            assert [one.shape for one in weights] == [one.shape for one in trained]

    trained = [one for one in tiny.module.parameters() if one.requires_grad]
    (sharer, learner), everyone = tasks(policy=tiny, local=1, only="share")
    learner.settings = RLSettings(held_out=20, local=1, external=0)
    for task in (sharer, learner):
        task.connect(everyone[0], PEERS[0], versions=Followed())
        everyone[0].sent.clear()
        batches = task.batches(SHARD)
        for _ in range(4):
            next(batches)
        stated = [record.policy_version for record in everyone[0].sent]
        assert stated == ([10, 10, 11, 11] if task is sharer else [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("rl", "method", "said"),
    [
        ({"follow": "creator"}, "noloco", r"cannot average weights too: leave rl\.follow out"),
        ({"follow": "creator", "publish": True}, "none", "leave publish out"),
        ({"follow": "anna"}, "none", "'anna' is no peer: write its id, .* or creator"),
    ],
)
def test_following_that_cannot_be_is_refused(rl, method, said):
    with pytest.raises((ConfigError, ValueError), match=said):
        make_task(settings_of(method, **rl))


def test_a_group_that_is_off_policy_takes_no_judgement(tiny, monkeypatch):
    """What is judged is bounded: old groups took the places of those that could be learnt from."""
    pool = foreign(tiny)
    judged = []
    judge = pool._judge
    monkeypatch.setattr(
        pool, "_judge", lambda rollout, round: (judged.append(rollout), judge(rollout, round))[1]
    )
    now = time.time()
    old = [
        record([right(index), "zz"], index=index, policy_version=0).model_copy(
            update={"issued": now - 1}
        )
        for index in range(100)
    ]
    new = [
        record([right(index), "zz"], index=index, policy_version=20).model_copy(
            update={"issued": now}
        )
        for index in range(100, 160)
    ]
    assert len(pool.take(new[:30] + old + new[30:], 4, 0)) == 4
    assert judged == new
    assert (pool.rejected["off_policy"], pool.rejected["crowded"]) == (100, 0)
    assert pool.used + pool.waiting + sum(pool.rejected.values()) == 160


def test_a_flood_costs_a_bounded_number_of_judgements(tiny):
    pool = foreign(tiny)
    flood = [record(["zz", "zz"], index=index) for index in range(100)]
    assert pool.take(flood, 4, 0) == []
    assert pool.rejected["crowded"] == 36
    assert pool.rejected["no_spread"] + pool.rejected["held_out"] == 64


def test_nobody_crowds_others_out_and_copies_are_known(tiny):
    flood = [record(["zz", "yy"], index=index) for index in range(100)]
    bus = Bus([], PEERS[1])
    theirs = bus.make(
        env="strings",
        env_version="1",
        env_config=ENV.config,
        seed=3,
        index=500,
        completions=(right(500), "zz"),
        finish=("stop", "stop"),
        policy_version=0,
        temperature=1.0,
    )
    came = [theirs, *flood]
    assert fair(came, 64)[0] is theirs
    assert fair(came, 64)[1:] == flood[-63:]
    assert fair(came, 1000) == came
    pool = foreign(tiny)
    assert len(pool.take(came, 4, 0)) == 1
    copied = record([right(500), "zz"], index=500)
    assert pool.take([copied], 4, 1) == []
    assert pool.rejected["duplicate"] == 1


def test_groups_that_differ_in_unused_completions_are_copies(tiny):
    """The fault: each was learnt from, though only the first ``group`` completions are used."""
    pool = foreign(tiny, group=2)
    used = [right(), "zz"]
    copies = [[*used, "a"], [*used, "b"], [*reversed(used), "a"]]
    assert len(pool.take([record(texts) for texts in copies], 4, 0)) == 1
    assert pool.rejected["duplicate"] == 2


def test_the_loss_of_an_update_is_that_of_its_completions(tiny):
    rows = tuple(tuple(tiny.encode(text, True)) for text in ("a", "bc"))
    update = make_update([RolloutGroup("last: abc", rows, (1.0, 0.0), (None, (-0.5, -0.5, -0.5)))])
    assert update.advantages.tolist() == pytest.approx(
        [0.5 / (0.5 + 1e-4), -0.5 / (0.5 + 1e-4)], abs=1e-6
    )
    assert update.length == 5
    batch = completions_of(tiny, update, 1.0)
    assert torch.equal(batch.behaviour[0], batch.old[0])
    assert batch.behaviour[1].tolist() == [-0.5] * 3
    for name, loss in LOSSES.items():
        value, worth = loss_of(tiny, update, Objective(loss, max_tokens=8), 1.0)
        assert value.requires_grad, name
        assert 0 < worth <= 1
    assert make_update([RolloutGroup("q", rows, (1.0, 1.0), (None, None))]) is None


def test_settings_that_leave_nothing_to_do_are_refused():
    for settings in ({"local": 0, "external": 0}, {"local": 0, "only": "share"}):
        with pytest.raises(ValueError, match=r"local must be at least 1|choose one"):
            RLSettings(**settings)


def test_a_question_compares_without_its_data():
    assert Question("q", "a", object()) == Question("q", "a", object())


# -- rounds in which groups are claimed: who claims writes them, the rest is written as ever, and
# planted ones teach nobody


@pytest.fixture(scope="module")
def policy():
    return Tiny(ENV.made, seed=1, layers=1, width=16, warm=Warm(steps=30, batch=32, right=0.5))


class Claims:
    """`shoal.node.rl.task.Claiming`: claims one group for each of ``due``, which says whether it is
    planted.
    """

    def __init__(self, *due):
        self.due, self.asked, self.written = list(due), [], []

    def write(self, policy, seed, index):
        self.asked.append((seed, index))
        if not self.due:
            return None
        planted = self.due.pop(0)
        prompt = "last: zzz" if planted else ENV.made.question(seed, index).prompt
        (completions,) = policy.generate(
            [prompt], 8, temperature=1.0, max_tokens=12, seed=1234 + index
        )
        self.written.append(completions)
        return Claimed(completions, planted)


def claiming_task(policy, claims=None, **settings):
    everyone = []
    task = RLTask(
        ENV, lambda: policy, RLSettings(held_out=5, external=0, **{"local": 3, **settings}), seed=1
    )
    bus, other = Bus(everyone, PEERS[0]), Bus(everyone, PEERS[1])
    rounds = []
    task.connect(bus, PEERS[0], rounds.append)
    if claims is not None:
        task.claim(claims.write)
    return task, other, rounds


def unclaimed(policy, **settings):
    """Return what is written without claims: of each group its record and what is learnt from
    it.
    """
    task, other, _ = claiming_task(policy, **settings)
    groups, reward = task._write(0)
    return groups, reward, other.inbox


@pytest.mark.parametrize("claims", [None, Claims()])
def test_without_a_claim_that_is_due_all_is_as_before(policy, claims):
    groups, reward, sent = unclaimed(policy)
    task, other, _ = claiming_task(policy, claims)
    assert task._write(0) == (groups, reward)
    assert [list(record.completions) for record in other.inbox] == [
        list(record.completions) for record in sent
    ]
    assert [record.logps for record in other.inbox] == [record.logps for record in sent]
    if claims is not None:
        assert len(claims.asked) == 1  # after the first that is not due nobody is asked again


def test_claimed_group_is_shared_and_learnt_from(policy):
    """What is claimed is shared and learnt from in its place."""
    claims = Claims(False)
    task, other, _ = claiming_task(policy, claims)
    groups, _ = task._write(0)
    before, _, _ = unclaimed(policy)
    assert [group.prompt for group in groups] == [
        group.prompt for group in before
    ]  # the same questions
    assert groups[0].tokens == tuple(one.tokens for one in claims.written[0])
    assert list(other.inbox[0].completions) == [one.text for one in claims.written[0]]
    asked = task.questions.of_round(0, task.settings.local, task.held_out_prompts)
    assert [record.index for record in other.inbox] == [index for index, _ in asked]
    assert claims.asked == [(other.inbox[0].seed, index) for index, _ in asked[:2]]
    # The rest is what the policy writes of the rest.
    rest = policy.generate(
        [group.prompt for group in groups[1:]],
        8,
        temperature=task.settings.temperature,
        max_tokens=12,
        seed=task.questions.number("completions", 0),
    )
    assert [group.tokens for group in groups[1:]] == [
        tuple(one.tokens for one in part) for part in rest
    ]


def test_planted_group_is_shared_but_not_learnt(policy):
    """A planted group is shared like any other but not learnt from nor rewarded."""
    claims = Claims(True, False)
    task, other, _ = claiming_task(policy, claims)
    groups, reward = task._write(0)
    drawn = task.questions.of_round(0, task.settings.local, task.held_out_prompts)
    asked = [question.prompt for _, question in drawn]
    assert [group.prompt for group in groups] == asked[1:]
    assert [list(record.completions) for record in other.inbox[:2]] == [
        [one.text for one in part] for part in claims.written
    ]
    assert len(other.inbox) == 3
    assert {record.env for record in other.inbox} == {"strings"}
    given = [one for group in groups for one in group.rewards]
    assert reward == sum(given) / len(given)


def test_round_of_planted_groups_learns_nothing(policy):
    """A round of planted groups alone learns nothing and goes on."""
    task, other, rounds = claiming_task(policy, Claims(True), local=1)
    batches = task.batches(SHARD)
    assert next(batches) is None
    assert task.loss(policy.module, None).item() == 0
    assert (rounds[0].own, rounds[0].reward) == (0, None)
    assert task.totals.reward == 0
    next(batches)
    task.loss(policy.module, None)
    assert rounds[1].own == 1
    assert len(other.inbox) == 2


def test_all_groups_of_a_round_may_be_claimed(policy):
    claims = Claims(False, False, False, False)
    task, other, _ = claiming_task(policy, claims)
    groups, _ = task._write(0)
    assert [group.tokens for group in groups] == [
        tuple(one.tokens for one in part) for part in claims.written
    ]
    assert len(other.inbox) == 3
    assert len(claims.due) == 1


def test_an_evaluation_that_fails_leaves_the_model_training(tiny, monkeypatch):
    """Fault: dropout stayed off for the rest of the run."""

    def fail(*_args, **_kwargs):
        raise TimeoutError("the server is gone")

    (task,), _ = tasks(1, tiny)
    task.policy.module.train()
    monkeypatch.setattr(task.policy, "generate", fail)
    with pytest.raises(TimeoutError):
        task.evaluate(task.policy.module)
    assert task.policy.module.training

"""Reinforcement learning as a task of the trainer: one inner step is one round of SAPO
(2509.08721).

In a round the node draws questions, writes a group of completions of each, shares the groups, takes
what others shared meanwhile (judged anew, chosen, each used once at most), and learns from all of
it in one step. It never waits for the network.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from shoal.node.config.settings import RLSettings
from shoal.node.rl.environment import HELD_OUT, Completion, Env, EnvError, Policy, Question
from shoal.node.task import Shard, Task
from shoal.optim.rl import (
    LOSSES,
    Completions,
    TokenLoss,
    effective_sample_size,
    group_advantages,
    log_weights,
    policy_loss,
)
from shoal.optim.rollout_selection import REASONS, Candidate, select
from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.topics.rollout import Rollout, RolloutPool, pack_logps, pack_tokens

# Groups of completions of a question, and updates of the policy made from them.


@dataclass(frozen=True)
class RolloutGroup:
    """Prompt of one question, and G completions of it with this node's rewards."""

    prompt: str
    tokens: tuple[tuple[int, ...], ...]
    """Tokens of each completion, as this node's policy encodes it."""
    rewards: tuple[float, ...]
    behaviour: tuple[tuple[float, ...] | None, ...]
    """Log-probability of each token under the policy that wrote it, where known."""


@dataclass(frozen=True)
class Update:
    """Data of one learning step: B completions of all groups together."""

    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    behaviour: tuple[tuple[float, ...] | None, ...]
    advantages: Tensor
    """(B,) float32, on the CPU."""

    @property
    def length(self) -> int:
        return sum(map(len, self.tokens))


def make_update(groups: Sequence[RolloutGroup]) -> Update | None:
    """Join the completions of ``groups``; return None if no gradient can come from them."""
    rewards = torch.tensor(
        [reward for group in groups for reward in group.rewards], dtype=torch.float64, device="cpu"
    )
    numbers = torch.tensor(
        [number for number, group in enumerate(groups) for _ in group.rewards],
        dtype=torch.int64,
        device="cpu",
    )
    advantages = group_advantages(rewards, numbers).float()
    if not bool(advantages.any()):
        return None
    return Update(
        tuple(group.prompt for group in groups for _ in group.tokens),
        tuple(row for group in groups for row in group.tokens),
        tuple(row for group in groups for row in group.behaviour),
        advantages,
    )


def completions_of(policy: Policy, update: Update, temperature: float) -> Completions:
    """Convert ``update`` for the losses.

    The own policy before the step is "old", also for others' completions (SAPO).
    """
    new, mask = policy.log_probs(update.prompts, update.tokens, temperature)
    old, told = new.detach(), torch.full(mask.shape, torch.nan, device="cpu")  # NaN: not known
    for row, logs in zip(told, update.behaviour, strict=True):
        if logs is not None:
            row[: len(logs)] = torch.tensor(logs[: len(row)], device="cpu")
    told = told.to(mask.device)
    return Completions(
        new,
        old,
        mask,
        update.advantages.to(new.device),
        torch.where(mask & ~told.isnan(), told, old),
    )


def loss_of(
    policy: Policy, update: Update, loss: TokenLoss, temperature: float
) -> tuple[Tensor, float | None]:
    """Return the scalar to minimise, and the effective sample size per foreign completion (None
    without log-probabilities).
    """
    batch = completions_of(policy, update, temperature)
    known = [number for number, row in enumerate(update.behaviour) if row is not None]
    return policy_loss(batch, loss), float(effective_sample_size(log_weights(batch)[known])) / len(
        known
    ) if known else None


log = logging.getLogger(__name__)

JUDGED = (
    64,
    8,
    # most groups judged in a round: the larger of the first, and the second for each group to learn
    # from
)
REMEMBERED = 16_384  # groups that are recognised again, whoever sends them
SENDERS = 1024  # of which the newest policy is known
LONG = 16  # characters for each allowed token, above which a completion is not judged
AGE, BEHIND, PER_SENDER = 2, 8, 8
"""Of other peers' groups: rounds for which one is of use once it came, versions of its sender's
policy that it may be older than the newest seen, and how many of one peer there are to choose from
in a round."""


@dataclass(frozen=True)
class _Kept:
    key: str
    rollout: Rollout
    group: RolloutGroup
    arrived: int  # this node's round


def fair(came: Sequence[Rollout], room: int) -> list[Rollout]:
    """Return at most ``room`` rollouts in order of arrival: the newest of each sender in turn, so
    that nobody crowds others out.
    """
    of_sender: dict[str, list[int]] = {}
    for place in reversed(range(len(came))):
        of_sender.setdefault(came[place].peer, []).append(place)
    turns = sorted(
        (turn, -place) for places in of_sender.values() for turn, place in enumerate(places)
    )
    return [came[place] for place in sorted(-minus for _, minus in turns[:room])]


class RemoteRollouts:
    """Buffer of drained rollouts until they are used or too old.

    ``held_out``: prompts that nobody may train on. ``seed``: of the choice, and this node's own
    secret (`select`). ``behind``: how many versions of its sender's policy a group may be older
    than the sender's newest.
    """

    def __init__(
        self,
        env: Env,
        policy: Policy,
        held_out: Collection[str],
        *,
        seed: int,
        group: int,
        max_tokens: int,
        behind: int,
    ) -> None:
        self._env = env
        self._policy = policy
        self._held_out = held_out
        self._seed = seed
        self._group = group
        self._max_tokens = max_tokens
        self._most_behind = behind
        self._newest = Newest[str, tuple[float, int]](SENDERS)
        """Of each sender the rollout that it issued last: when, and by which version of its policy.
        """
        self._kept: list[_Kept] = []
        self._seen = Newest[str, None](REMEMBERED)
        self.used = 0
        """Number of groups that were learnt from."""
        self.newest: tuple[tuple[str, float], ...] = ()
        """Of the groups that were chosen last the senders and mean rewards."""
        self.rejected: Counter[str] = Counter(
            {"crowded": 0, "held_out": 0, "unjudged": 0, **dict.fromkeys(REASONS, 0)}
        )
        """Numbers of the others, by reason."""

    def take(self, came: list[Rollout], count: int, round: int) -> list[RolloutGroup]:
        """Choose at most ``count`` groups for this node's ``round``, among those that arrived by
        now.
        """
        for rollout in came:
            issued = rollout.issued, rollout.policy_version
            self._newest[rollout.peer] = max(self._newest.get(rollout.peer, issued), issued)
        fresh = [rollout for rollout in came if self._behind(rollout) <= self._most_behind]
        self.rejected["off_policy"] += len(came) - len(fresh)  # before they cost a judgement
        room = max(JUDGED[0], JUDGED[1] * count)
        self.rejected["crowded"] += max(len(fresh) - room, 0)
        self._kept += [
            kept
            for rollout in fair(fresh, room)
            if (kept := self._judge(rollout, round)) is not None
        ]
        candidates = [
            Candidate(
                kept.key,
                kept.rollout.peer,
                kept.arrived,
                kept.group.rewards,
                self._behind(kept.rollout),
            )
            for kept in self._kept
        ]
        picked = select(
            candidates,
            count,
            seed=self._seed,
            round=round,
            max_age=AGE,
            per_sender=PER_SENDER,
            max_behind=self._most_behind,
        )
        chosen = [self._kept[place].group for place in picked.places]
        senders = (self._kept[place].rollout.peer for place in picked.places)
        self.newest = tuple(
            (peer, fmean(group.rewards)) for peer, group in zip(senders, chosen, strict=True)
        )
        self.used += len(chosen)
        self._keep(set(picked.places), round)
        return chosen

    @property
    def waiting(self) -> int:
        """Number of groups that may still be learnt from."""
        return len(self._kept)

    def _behind(self, rollout: Rollout) -> int:
        """Return the versions from that which wrote ``rollout`` to its sender's newest, also where
        that began anew.
        """
        return abs(
            self._newest.get(rollout.peer, (0.0, rollout.policy_version))[1]
            - rollout.policy_version
        )

    def _keep(self, gone: Collection[int], round: int) -> None:
        """Keep the rollouts of use in the next round; count the others once, by reason."""
        kept = []
        for place, item in enumerate(self._kept):
            if place in gone:
                continue
            if min(item.group.rewards) == max(item.group.rewards):
                self.rejected["no_spread"] += 1
            elif self._behind(item.rollout) > self._most_behind:
                self.rejected["off_policy"] += 1
            elif round + 1 - item.arrived > AGE:
                self.rejected["not_drawn"] += 1
            else:
                kept.append(item)
        most = 8 * JUDGED[0]
        self.rejected["crowded"] += max(len(kept) - most, 0)
        self._kept = kept[-most:]

    def _judge(self, rollout: Rollout, round: int) -> _Kept | None:
        """Make the question anew, and compute this node's rewards. The sender decides neither."""
        # Of its content alone, and equal for copies, whoever signed them: a copied group must not
        # be learnt from twice.
        key = hashlib.sha256(
            json.dumps((rollout.seed, rollout.index, *rollout.completions)).encode()
        ).hexdigest()
        if key in self._seen:
            self.rejected["duplicate"] += 1
            return None
        self._seen[key] = None
        try:
            question = self._env.made.question(rollout.seed, rollout.index)
            if question.prompt in self._held_out:
                self.rejected["held_out"] += 1
                return None
            texts = rollout.completions[: self._group]
            if max(map(len, texts)) > LONG * self._max_tokens + 256:
                raise ValueError("a completion is too long to be judged")
            rewards = self._env.rewards(question, texts)
            tokens = tuple(
                tuple(self._policy.encode(text, finish == "stop")[: self._max_tokens])
                for text, finish in zip(texts, rollout.finish, strict=False)
            )
        except (
            Exception
        ) as error:  # whatever an environment makes of a stranger's text costs this one record
            log.debug("a rollout could not be judged: %s", error)
            self.rejected["unjudged"] += 1
            return None
        return _Kept(
            key,
            rollout,
            RolloutGroup(question.prompt, tokens, rewards, self._behaviour(rollout, tokens)),
            round,
        )

    def _behaviour(
        self, rollout: Rollout, tokens: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[float, ...] | None, ...]:
        """Return the sender's log-probabilities, where its tokens are those of the text on this
        node.
        """
        told = rollout.behaviours() if rollout.tokenizer == self._policy.tokenizer else ()
        if not told:
            return (None,) * len(tokens)
        return tuple(
            tuple(one.logps.tolist()) if tuple(one.tokens.tolist()) == row else None
            for one, row in zip(told, tokens, strict=False)
        )


DRAWS = 1000  # attempts at a question that is not held out
TOGETHER = 256  # prompts answered at once in an evaluation


@dataclass(frozen=True)
class Claimed:
    """Group of completions that this node has claimed; a ``planted`` one is wrong on purpose, and
    not to be learnt from.
    """

    completions: list[Completion]
    planted: bool


Claiming = Callable[[Policy, int, int], Claimed | None]
"""Answers question ``index`` of ``seed`` and claims the group; None if no claim is due.

Only this costs training any time.
"""


@dataclass(frozen=True, kw_only=True)
class RLRound:
    """Summary of one round of this node."""

    round: int
    reward: float | None
    """Mean of the own completions' rewards; None without own groups."""
    own: int
    used: tuple[tuple[str, float], ...]
    """Senders and mean rewards of the foreign groups learnt from."""
    loss: float = 0.0
    """Loss of the policy."""
    worth: float | None = None
    """Effective sample size per completion with known log-probabilities of its writer (1: as good
    as own).
    """


class RLTask(Task):
    """Task for the trainer.

    ``connect`` sets where rollouts are shared; without it the node learns from its own only.
    ``frozen``: the policy never changes, so that no group of it grows old.
    """

    def __init__(
        self,
        env: Env,
        make_policy: Callable[[], Policy],
        settings: RLSettings,
        *,
        seed: int,
        frozen: bool = False,
    ) -> None:
        self.env = env
        self.settings = settings
        self._make_policy = make_policy
        self._seed = seed
        self._frozen = frozen
        self._sharing: RolloutPool | None = None
        self._claiming: Claiming = lambda policy, seed, index: None
        self._me = ""
        self._on_round: Callable[[RLRound], None] = lambda round: None
        self.rounds = 0
        self.cumulative = 0.0
        self._worths = 0.0
        self._measured = 0
        self.foreign: RemoteRollouts
        self._pending: RLRound | None = None

    def connect(
        self,
        sharing: RolloutPool | None,
        me: str,
        on_round: Callable[[RLRound], None] = lambda round: None,
    ) -> None:
        """Share rollouts through ``sharing``.

        ``me``: this node in this swarm, from which its questions follow. In another swarm they are
        others, because the weights may have come along (--resume-from).
        """
        self._sharing = sharing
        self._me = me
        self._on_round = on_round

    def claim(self, claiming: Claiming) -> None:
        """Let ``claiming`` write the first groups of a round while claims are due."""
        self._claiming = claiming

    # -- as a Task ---------------------------------------------------------------------------------

    @cached_property
    def policy(self) -> Policy:
        """Policy, made once, with its warm start if it has one."""
        return self._make_policy()

    def model(self) -> torch.nn.Module:
        return self.policy.module

    draws_with_model = True

    def batches(self, shard: Shard) -> Iterator[Update | None]:
        return self.batches_from(shard, 0)

    def batches_from(self, shard: Shard, step: int) -> Iterator[Update | None]:
        """Yield the rounds from number ``step`` on; None for a round without anything to learn
        from.
        """
        del shard  # questions are made, not assigned: all nodes may ask whatever they like
        self.foreign = RemoteRollouts(
            self.env,
            self.policy,
            self.held_out_prompts,
            seed=self._number("choice", 0),
            group=self.settings.group,
            max_tokens=self.max_tokens,
            behind=BEHIND,
        )
        return map(self._round, itertools.count(step))

    def loss(self, model: torch.nn.Module, batch: Update | None) -> torch.Tensor:
        """Return the policy's loss; 0 without an update."""
        if batch is None:
            loss = next(p for p in model.parameters() if p.requires_grad).sum() * 0.0
            worth = None
        else:
            loss, worth = loss_of(
                self.policy,
                batch,
                LOSSES[self.settings.loss or self.policy.loss],
                self.settings.temperature,
            )
        assert self._pending is not None
        if worth is not None:
            self._worths, self._measured = self._worths + worth, self._measured + 1
        self._on_round(replace(self._pending, worth=worth, loss=float(loss.detach())))
        return loss

    def evaluate(self, model: torch.nn.Module) -> float:
        """Return 1 minus the mean reward of greedy answers to the held-out questions."""
        was_training = model.training
        model.eval()
        try:
            return 1.0 - self._mean_reward()
        finally:
            model.train(was_training)

    def _mean_reward(self) -> float:
        total = 0.0
        for start in range(0, len(self.held_out), TOGETHER):
            asked = self.held_out[start : start + TOGETHER]
            prompts = [question.prompt for question in asked]
            answers = self.policy.generate(
                prompts, 1, temperature=0.0, max_tokens=self.max_tokens, seed=0
            )
            total += sum(
                self.env.rewards(question, [one.text])[0]
                for question, (one,) in zip(asked, answers, strict=True)
            )
        return total / len(self.held_out)

    def tokens(self, batch: Update | None) -> int:
        return 1 if batch is None else max(batch.length, 1)

    def inner_optimizer(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        lr = self.policy.lr if self.settings.lr is None else self.settings.lr
        return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)

    # -- questions ---------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        return self.settings.max_tokens or self.policy.max_tokens

    @cached_property
    def held_out(self) -> list[Question]:
        return [self.env.made.question(HELD_OUT, index) for index in range(self.settings.held_out)]

    @cached_property
    def held_out_prompts(self) -> frozenset[str]:
        return frozenset(question.prompt for question in self.held_out)

    def _number(self, what: str, number: int) -> int:
        """Return a number below 2^62, so that no own question has the held-out seed."""
        text = f"shoal/rl/1:{self._seed}:{self._me}:{what}:{number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2

    def _questions(self, round: int) -> list[tuple[int, Question]]:
        """Return indices and questions of this round, none held out.

        EnvError if there seem to be no others.
        """
        found: list[tuple[int, Question]] = []
        seed = self._number("questions", 0)
        index = round * DRAWS
        while len(found) < self.settings.local:
            question = self.env.made.question(seed, index)
            if question.prompt not in self.held_out_prompts:
                found.append((index, question))
            index += 1
            if index >= (round + 1) * DRAWS:
                raise EnvError(
                    f"Of {DRAWS} questions of {self.env.label!r} hardly one is not held out: make "
                    "it ask more different questions, or set rl.held_out lower."
                )
        return found

    # -- a round -----------------------------------------------------------------------------------

    def _round(self, number: int) -> Update | None:
        if self._sharing is not None:
            self._sharing.advance(number)
        own, reward = self._write(number)
        came = self._sharing.drain() if self._sharing is not None else []
        others: list[RolloutGroup] = []
        if self.settings.only == "share":
            own = []
        else:
            others = self.foreign.take(came, self.settings.external, number)
        self.rounds += 1
        self.cumulative += reward or 0.0
        self._pending = RLRound(
            round=number, reward=reward, own=len(own), used=self.foreign.newest if others else ()
        )
        return make_update(own + others) if own or others else None

    def _write(self, number: int) -> tuple[list[RolloutGroup], float | None]:
        """Write and share the own groups of a round; return them and the mean of their rewards."""
        asked = self._questions(number)
        if not asked:
            return [], None
        settings = self.settings
        claimed = self._claim(asked)
        written = [group.completions for group in claimed]
        if rest := asked[len(claimed) :]:
            written += self.policy.generate(
                [question.prompt for _, question in rest],
                settings.group,
                temperature=settings.temperature,
                max_tokens=self.max_tokens,
                seed=self._number("completions", number),
            )
        groups = []
        for place, ((index, question), completions) in enumerate(zip(asked, written, strict=True)):
            if place >= len(claimed) or not claimed[place].planted:
                rewards = self.env.rewards(question, [one.text for one in completions])
                tokens = tuple(one.tokens for one in completions)
                logs = tuple(None for _ in completions)
                groups.append(RolloutGroup(question.prompt, tokens, rewards, logs))
            if self._sharing is not None and settings.only != "learn":
                self._share(number, index, completions)
        given = [reward for group in groups for reward in group.rewards]
        return groups, sum(given) / len(given) if given else None

    def _claim(self, asked: list[tuple[int, Question]]) -> list[Claimed]:
        """Write the first groups of a round, as many as claims are due."""
        claimed: list[Claimed] = []
        seed = self._number("questions", 0)
        for index, _ in asked:
            found = self._claiming(self.policy, seed, index)
            if found is None:
                break
            claimed.append(found)
        return claimed

    def _share(self, number: int, index: int, completions: list[Completion]) -> None:
        assert self._sharing is not None
        try:
            rollout = self._sharing.make(
                env=self.env.label,
                env_version=self.env.made.version,
                env_config=self.env.config,
                seed=self._number("questions", 0),
                index=index,
                completions=tuple(one.text for one in completions),
                finish=tuple(one.finish for one in completions),
                policy_version=0 if self._frozen else number,
                temperature=self.settings.temperature,
                tokens=tuple(pack_tokens(one.tokens) for one in completions),
                logps=tuple(
                    pack_logps([min(log, 0.0) for log in one.log_probs]) for one in completions
                ),
                tokenizer=self.policy.tokenizer,
            )
            self._sharing.publish(rollout)
        except (ValueError, MessageError):
            log.warning(
                "a group of completions was not shared, for no message holds it: lower "
                "rl.max_tokens or rl.group"
            )

    # -- results -----------------------------------------------------------------------------------

    @property
    def worth(self) -> float | None:
        return self._worths / self._measured if self._measured else None

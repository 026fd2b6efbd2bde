"""Reinforcement learning as a task of the trainer: one inner step is one round of SAPO
(2509.08721).

In a round the node draws questions, writes a group of completions of each, shares the groups, takes
what others shared meanwhile (judged anew, chosen, each used once at most), and learns from all of
it in one step. It never waits for the network.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.node.config.rl_settings import RLSettings
from shoal.node.rl.environment import HELD_OUT, Env, Question
from shoal.node.rl.objective import load_loss, make_objective
from shoal.node.rl.own_questions import OwnQuestions
from shoal.node.rl.policy import Completion, Policy, frozen_copy
from shoal.node.rl.remote_rollouts import RemoteRollouts
from shoal.node.rl.update import RolloutGroup, Update, loss_of, make_update
from shoal.node.task import Shard, Task
from shoal.optim.rl.losses import LOSSES, UNCORRECTED
from shoal.optim.rl.objective import Objective
from shoal.optim.rollout_selection import has_spread
from shoal.swarm.errors import MessageError
from shoal.swarm.topics.rollout import pack_logps, pack_tokens
from shoal.swarm.topics.rollout_pool import RolloutPool

log = logging.getLogger(__name__)

EVALUATED_AT_ONCE = 256
"""Prompts answered together in an evaluation."""


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


@dataclass
class RoundTotals:
    """Sums over this node's rounds so far, for the result."""

    rounds: int = 0
    reward: float = 0.0
    """Of each round's mean."""
    written: int = 0
    """Groups that this node drew, but for planted ones."""
    without_spread: int = 0
    """Those of them with equal rewards."""
    worth: float = 0.0
    """Of the updates whose worth (`RLRound.worth`) is known."""
    updates_with_worth: int = 0

    def mean_worth(self) -> float | None:
        """Return the mean worth of an update; None while none is known."""
        if self.updates_with_worth == 0:
            return None
        return self.worth / self.updates_with_worth


class PolicyVersions(Protocol):
    """Versions of the policy that this node publishes, or takes over from another."""

    version: int
    """Of the policy that the weights are."""

    def begin_round(self, round: int, weights: Sequence[Tensor]) -> None:
        """Publish ``weights``, or give them another's newer values."""
        ...


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
        self._frozen = frozen
        self._sharing: RolloutPool | None = None
        self._claiming: Claiming = lambda policy, seed, index: None
        self.questions = OwnQuestions(env, seed)
        self._choice_seed = 0
        self._on_round: Callable[[RLRound], None] = lambda round: None
        self._versions: PolicyVersions | None = None
        self.totals = RoundTotals()
        self.foreign: RemoteRollouts
        self._pending: RLRound | None = None
        self._reference: Policy | None = None
        # Now, so that a fault of the user's own shows before anything is trained.
        self._loss = load_loss(settings.loss) if settings.loss else None

    def connect(
        self,
        sharing: RolloutPool | None,
        me: str,
        on_round: Callable[[RLRound], None] = lambda round: None,
        folder: Path | None = None,
        versions: PolicyVersions | None = None,
        choice_seed: int = 0,
    ) -> None:
        """Share rollouts through ``sharing``.

        ``me``: this node in this swarm, from which its questions follow. In another swarm they are
        others, because the weights may have come along (--resume-from). ``folder``: where it notes
        which it has asked. ``versions``: where the policy goes, or comes from, in each round.
        ``choice_seed``: of the choice among others' groups; to be kept secret (`select`).
        """
        self._versions = versions
        self._choice_seed = choice_seed
        self._sharing = sharing
        self.questions = self.questions.of_node(me, folder)
        self._on_round = on_round

    def claim(self, claiming: Claiming) -> None:
        """Let ``claiming`` write the first groups of a round while claims are due."""
        self._claiming = claiming

    # -- as a Task ---------------------------------------------------------------------------------

    @cached_property
    def policy(self) -> Policy:
        """Policy, made once, with its warm start if it has one."""
        policy = self._make_policy()
        if self.settings.kl_coef:
            self._reference = frozen_copy(policy)
        return policy

    @cached_property
    def objective(self) -> Objective:
        """What the policy minimises."""
        name = self.settings.loss or self.policy.loss
        return make_objective(self.settings, name, self._loss or LOSSES[name], self.max_tokens)

    def model(self) -> torch.nn.Module:
        return self.policy.module

    draws_with_model = True

    def batches(self, shard: Shard) -> Iterator[Update | None]:
        return self.batches_from(shard, 0)

    def batches_from(self, shard: Shard, step: int) -> Iterator[Update | None]:
        """Yield the rounds from number ``step`` on; None for a round without anything to learn
        from.
        """
        # Questions are made, not assigned: all nodes may ask whatever they like.
        del shard
        self.questions.begin(step)
        self.foreign = RemoteRollouts(
            self.env,
            self.policy,
            self.held_out_prompts,
            seed=self._choice_seed,
            group=self.settings.group,
            max_tokens=self.max_tokens,
            corrected=self._corrects,
        )
        return map(self._round, itertools.count(step))

    @property
    def _corrects(self) -> bool:
        """Whether the loss has a ratio to the policy that wrote a group; of one's own unknown."""
        name = self.settings.loss or self.policy.loss
        return name in LOSSES and name not in UNCORRECTED

    def loss(self, model: torch.nn.Module, batch: Update | None) -> torch.Tensor:
        """Return the policy's loss; 0 without an update."""
        worth = None
        if batch is None:
            loss = next(p for p in model.parameters() if p.requires_grad).sum() * 0.0
        else:
            loss, worth = loss_of(
                self.policy, batch, self.objective, self.settings.temperature, self._reference
            )
        assert self._pending is not None
        if worth is not None:
            self.totals.worth += worth
            self.totals.updates_with_worth += 1
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
        for start in range(0, len(self.held_out), EVALUATED_AT_ONCE):
            asked = self.held_out[start : start + EVALUATED_AT_ONCE]
            prompts = [question.prompt for question in asked]
            answers = self.policy.generate(
                prompts, 1, temperature=0.0, max_tokens=self.max_tokens, seed=0
            )
            for question, (answer,) in zip(asked, answers, strict=True):
                (reward,) = self.env.rewards(question, [answer.text])
                total += reward
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

    # -- a round -----------------------------------------------------------------------------------

    def _round(self, number: int) -> Update | None:
        if self._versions is not None:
            trained = [each for each in self.policy.module.parameters() if each.requires_grad]
            self._versions.begin_round(number, trained)
        if self._sharing is not None:
            self._sharing.advance(number)
        own, reward = self._write(number)
        came = self._sharing.drain() if self._sharing is not None else []
        others: list[RolloutGroup] = []
        if self.settings.only == "share":
            own = []
        elif self.settings.external == 0:
            self.foreign.rejected["not_drawn"] += len(came)
        else:
            others = self.foreign.take(came, self.settings.external, number)
        self.totals.rounds += 1
        self.totals.reward += reward or 0.0
        used = self.foreign.newest if others else ()
        self._pending = RLRound(round=number, reward=reward, own=len(own), used=used)
        if not own and not others:
            return None
        return make_update(
            own + others, scale=self.settings.scale_rewards, deviation=self.settings.deviation
        )

    def _write(self, number: int) -> tuple[list[RolloutGroup], float | None]:
        """Write and share the own groups of a round; return them and the mean of their rewards."""
        asked = self.questions.of_round(number, self.settings.local, self.held_out_prompts)
        if not asked:
            return [], None
        claimed = self._claim(asked)
        written = [group.completions for group in claimed]
        written += self._completions(asked[len(claimed) :], number)
        planted = [group.planted for group in claimed] + [False] * (len(asked) - len(claimed))
        groups: list[RolloutGroup] = []
        rewards: list[float] = []
        for (index, question), completions, is_planted in zip(asked, written, planted, strict=True):
            if not is_planted:
                group = self._judged(question, completions)
                groups.append(group)
                self.totals.without_spread += not has_spread(group.rewards)
                rewards += group.rewards
            if self._sharing is not None and self.settings.only != "learn":
                self._share(number, index, completions)
        self.totals.written += len(groups)
        return groups, sum(rewards) / len(rewards) if rewards else None

    def _completions(
        self, asked: list[tuple[int, Question]], number: int
    ) -> list[list[Completion]]:
        """Write a group of completions of each question of round ``number``."""
        if not asked:
            return []
        return self.policy.generate(
            [question.prompt for _, question in asked],
            self.settings.group,
            temperature=self.settings.temperature,
            max_tokens=self.max_tokens,
            seed=self.questions.number("completions", number),
        )

    def _judged(self, question: Question, completions: list[Completion]) -> RolloutGroup:
        """Return the group of ``completions`` with their rewards."""
        rewards = self.env.rewards(question, [one.text for one in completions])
        tokens = tuple(one.tokens for one in completions)
        return RolloutGroup(question.prompt, tokens, rewards, (None,) * len(completions))

    def _claim(self, asked: list[tuple[int, Question]]) -> list[Claimed]:
        """Write the first groups of a round, as many as claims are due."""
        claimed: list[Claimed] = []
        for index, _ in asked:
            found = self._claiming(self.policy, self.questions.seed, index)
            if found is None:
                break
            claimed.append(found)
        return claimed

    def _version(self, number: int) -> int:
        """Return the version of the policy in round ``number``."""
        if self._frozen:
            return 0
        if self._versions is not None and self.settings.only == "share":
            return self._versions.version
        return number

    def _share(self, number: int, index: int, completions: list[Completion]) -> None:
        assert self._sharing is not None
        logps: list[bytes] = []
        for one in completions:
            logps.append(pack_logps([min(log_prob, 0.0) for log_prob in one.log_probs]))
        try:
            rollout = self._sharing.make(
                env=self.env.label,
                env_version=self.env.made.version,
                env_config=self.env.config,
                seed=self.questions.seed,
                index=index,
                completions=tuple(one.text for one in completions),
                finish=tuple(one.finish for one in completions),
                policy_version=self._version(number),
                temperature=self.settings.temperature,
                tokens=tuple(pack_tokens(one.tokens) for one in completions),
                logps=tuple(logps),
                tokenizer=self.policy.tokenizer,
            )
            self._sharing.publish(rollout)
        except (ValueError, MessageError):
            log.warning(
                "a group of completions was not shared, for no message holds it: lower "
                "rl.max_tokens or rl.group"
            )

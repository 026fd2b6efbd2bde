"""Reinforcement learning as a task of the trainer: one inner step is one round of SAPO (2509.08721).

In a round the node draws questions, writes a group of completions of each, shares the groups, takes what others shared meanwhile,
and learns from all of it in one step. It never waits for the network.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from shoal.node.config.rl import RLSettings
from shoal.node.rl.environment import HELD_OUT, Env, EnvError, Question
from shoal.node.rl.policy import Completion, Policy
from shoal.node.rl.remote_rollouts import RemoteRollouts, RolloutGroup, Update, loss_of, make_update
from shoal.node.task import Shard, Task
from shoal.optim.rl import LOSSES
from shoal.swarm.errors import MessageError
from shoal.swarm.topics.rollout import Rollout, pack_logps, pack_tokens

log = logging.getLogger(__name__)

AGE, BEHIND, PER_SENDER = 2, 8, 8
"""Of other peers' groups: rounds for which one is of use once it came, versions of its sender's policy that it may be older than
the newest seen, and how many of one peer there are to choose from in a round."""
DRAWS = 1000  # attempts at a question that is not held out
TOGETHER = 256  # prompts answered at once in an evaluation


class Sharing(Protocol):
    """Part of `shoal.swarm.topics.rollout.RolloutPool` that a round needs."""

    def advance(self, round: int) -> None: ...

    @property
    def make(self) -> Callable[..., Rollout]:
        """Function that makes a record from its fields."""
        ...

    def publish(self, rollout: Rollout) -> None:
        """Share ``rollout`` soon."""
        ...

    def drain(self) -> list[Rollout]: ...


@dataclass(frozen=True)
class Claimed:
    """Group of completions that this node has claimed; a ``planted`` one is wrong on purpose, and not to be learnt from."""

    completions: list[Completion]
    planted: bool


class Claiming(Protocol):
    """Part of `shoal.node.verify.completions.kind.Claimer` that a round needs."""

    def write(self, policy: Policy, seed: int, index: int, question: Question) -> Claimed | None:
        """Answer the question and claim the group; return None if no claim is due. Only this costs the training thread time."""
        ...


@dataclass(frozen=True, kw_only=True)
class RLRound:
    """Summary of one round of this node."""

    round: int
    reward: float | None
    """Mean of the own completions' rewards; None without own groups."""
    own: int
    used: tuple[tuple[str, float], ...]
    """Senders and mean rewards of the foreign groups learnt from."""
    loss: float
    """Loss of the policy."""
    worth: float | None
    """Effective sample size per completion with known log-probabilities of its writer (1: as good as own)."""


class RLTask(Task):
    """Task for the trainer. ``connect`` sets where rollouts are shared; without it the node learns from its own only."""

    def __init__(self, env: Env, make_policy: Callable[[], Policy], settings: RLSettings, *, seed: int) -> None:
        self.env, self.settings, self._make_policy, self._seed = env, settings, make_policy, seed
        self._sharing: Sharing | None = None
        self._claiming: Claiming | None = None
        self._me = ""
        self._on_round: Callable[[RLRound], None] = lambda round: None
        self.rounds, self.cumulative, self._worths = 0, 0.0, 0.0
        self._measured = 0
        self.foreign: RemoteRollouts
        self._pending: tuple[int, float | None, int, tuple[tuple[str, float], ...]] | None = None

    def connect(self, sharing: Sharing | None, me: str, on_round: Callable[[RLRound], None] = lambda round: None) -> None:
        """Share rollouts through ``sharing``. ``me``: this node's peer id, from which its questions follow."""
        self._sharing, self._me, self._on_round = sharing, me, on_round

    def claim(self, claiming: Claiming | None) -> None:
        """Let ``claiming`` write the first groups of a round while claims are due."""
        self._claiming = claiming

    # -- as a Task -------------------------------------------------------------------------------------------------------

    @cached_property
    def policy(self) -> Policy:
        """Policy, made once, with its warm start if it has one."""
        return self._make_policy()

    def model(self) -> torch.nn.Module:
        return self.policy.module

    draws_with_model = True

    def batches(self, shard: Shard) -> Iterator[Update | None]:
        """Yield one round after another."""
        return self.batches_from(shard, 0)

    def batches_from(self, shard: Shard, step: int) -> Iterator[Update | None]:
        """Yield the rounds from number ``step`` on; None for a round without anything to learn from."""
        del shard  # questions are made, not assigned: all nodes may ask whatever they like
        self.foreign = RemoteRollouts(
            self.env, self.policy, self.held_out_prompts, seed=self._number("choice", 0), age=AGE,
            per_sender=PER_SENDER, group=self.settings.group, max_tokens=self.max_tokens,
            behind=BEHIND,
        )  # fmt: skip
        return map(self._round, itertools.count(step))

    def loss(self, model: torch.nn.Module, batch: Update | None) -> torch.Tensor:
        """Return the policy's loss; 0 without an update."""
        if batch is None:
            loss, worth = next(p for p in model.parameters() if p.requires_grad).sum() * 0.0, None
        else:
            loss, worth = loss_of(self.policy, batch, LOSSES[self.settings.loss or self.policy.loss], self.settings.temperature)
        assert self._pending is not None
        number, reward, own, used = self._pending
        if worth is not None:
            self._worths, self._measured = self._worths + worth, self._measured + 1
        self._on_round(RLRound(round=number, reward=reward, own=own, used=used, worth=worth, loss=float(loss.detach())))
        return loss

    def evaluate(self, model: torch.nn.Module) -> float:
        """Return 1 minus the mean reward of greedy answers to the held-out questions."""
        del model
        return 1.0 - self.greedy_reward()

    def tokens(self, batch: Update | None) -> int:
        """Count the tokens of all completions learnt from."""
        return 1 if batch is None else max(batch.length, 1)

    def inner_optimizer(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        lr = self.policy.lr if self.settings.lr is None else self.settings.lr
        return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)

    # -- questions -------------------------------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        return self.settings.max_tokens or self.policy.max_tokens

    @cached_property
    def held_out(self) -> list[Question]:
        return [self.env.made.question(HELD_OUT, index) for index in range(self.settings.held_out)]

    @cached_property
    def held_out_prompts(self) -> frozenset[str]:
        return frozenset(question.prompt for question in self.held_out)

    def greedy_reward(self) -> float:
        """Return the mean reward of greedy answers to the held-out questions."""
        module, total = self.policy.module, 0.0
        was_training = module.training
        module.eval()
        for start in range(0, len(self.held_out), TOGETHER):
            asked = self.held_out[start : start + TOGETHER]
            prompts = [question.prompt for question in asked]
            answers = self.policy.generate(prompts, 1, temperature=0.0, max_tokens=self.max_tokens, seed=0)
            total += sum(self.env.rewards(question, [one.text])[0] for question, (one,) in zip(asked, answers, strict=True))
        module.train(was_training)
        return total / len(self.held_out)

    def _number(self, what: str, number: int) -> int:
        """Return a number below 2^62, so that no own question has the held-out seed."""
        text = f"shoal/rl/1:{self._seed}:{self._me}:{what}:{number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2

    def _questions(self, round: int) -> list[tuple[int, Question]]:
        """Return indices and questions of this round, none held out. EnvError if there seem to be no others."""
        found: list[tuple[int, Question]] = []
        seed, index = self._number("questions", 0), round * DRAWS
        while len(found) < self.settings.local:
            question = self.env.made.question(seed, index)
            if question.prompt not in self.held_out_prompts:
                found.append((index, question))
            index += 1
            if index >= (round + 1) * DRAWS:
                raise EnvError(
                    f"Of {DRAWS} questions of {self.env.label!r} hardly one is not held out: make it ask more different "
                    "questions, or set rl.held_out lower."
                )
        return found

    # -- a round ---------------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> Update | None:
        if self._sharing is not None:
            self._sharing.advance(number)
        own, reward = self._write(number)
        came = self._sharing.drain() if self._sharing is not None else []
        others = [] if self.settings.share_only else self.foreign.take(came, self.settings.external, number)
        groups = [] if self.settings.share_only else own + others
        self.rounds += 1
        self.cumulative += reward or 0.0
        used = self.foreign.newest if others else ()
        self._pending = (number, reward, 0 if self.settings.share_only else len(own), used)
        return make_update(groups) if groups else None

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
                [question.prompt for _, question in rest], settings.group, temperature=settings.temperature,
                max_tokens=self.max_tokens, seed=self._number("completions", number),
            )  # fmt: skip
        groups = []
        for place, ((index, question), completions) in enumerate(zip(asked, written, strict=True)):
            if place >= len(claimed) or not claimed[place].planted:
                rewards = self.env.rewards(question, [one.text for one in completions])
                tokens, logs = tuple(one.tokens for one in completions), tuple(None for _ in completions)
                groups.append(RolloutGroup(question.prompt, tokens, rewards, logs))
            if self._sharing is not None and not settings.learn_only:
                self._share(number, index, completions)
        given = [reward for group in groups for reward in group.rewards]
        return groups, sum(given) / len(given) if given else None

    def _claim(self, asked: list[tuple[int, Question]]) -> list[Claimed]:
        """Write the first groups of a round, as many as claims are due."""
        claimed: list[Claimed] = []
        if self._claiming is None:
            return claimed
        seed = self._number("questions", 0)
        for index, question in asked:
            found = self._claiming.write(self.policy, seed, index, question)
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
                completions=[one.text for one in completions],
                finish=[one.finish for one in completions],
                policy_version=number,
                temperature=self.settings.temperature,
                tokens=[pack_tokens(one.tokens) for one in completions],
                logps=[pack_logps([min(log, 0.0) for log in one.log_probs]) for one in completions],
                tokenizer=self.policy.tokenizer,
            )
            self._sharing.publish(rollout)
        except (ValueError, MessageError):
            log.warning("a group of completions was not shared, for no message holds it: lower rl.max_tokens or rl.group")

    # -- results ---------------------------------------------------------------------------------------------------------

    @property
    def worth(self) -> float | None:
        """Mean of the rounds' ``worth``."""
        return self._worths / self._measured if self._measured else None

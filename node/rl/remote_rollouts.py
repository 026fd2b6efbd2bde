"""Selection of other peers' rollouts for updates: judged anew, chosen, each used once at most."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Policy
from shoal.optim.rl import (
    REASONS,
    Candidate,
    Completions,
    TokenLoss,
    effective_sample_size,
    group_advantages,
    log_weights,
    policy_loss,
    select,
)
from shoal.swarm.gossip.envelope import LRUSet
from shoal.swarm.topics.rollout import Rollout

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
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64, device="cpu")
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group.rewards], dtype=torch.int64, device="cpu")
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
    """Convert ``update`` for the losses. The own policy before the step is "old", also for others' completions (SAPO)."""
    new, mask = policy.log_probs(update.prompts, update.tokens, temperature)
    old = new.detach()
    logs, known = pad_floats(update.behaviour, mask)
    return Completions(new, old, mask, update.advantages.to(new.device), torch.where(known, logs, old))


def pad_floats(rows: Sequence[Sequence[float] | None], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pad float32 rows to the shape of ``mask`` (B, T); also return bool (B, T), where they are. None: not known."""
    values = torch.zeros(mask.shape, device="cpu")
    known = torch.zeros(mask.shape, dtype=torch.bool, device="cpu")
    for number, row in enumerate(rows):
        if row is not None:
            length = min(len(row), mask.shape[1])
            values[number, :length] = torch.tensor(list(row[:length]), device="cpu")
            known[number, :length] = True
    return values.to(mask.device), known.to(mask.device) & mask


def loss_of(policy: Policy, update: Update, loss: TokenLoss, temperature: float) -> tuple[Tensor, float | None]:
    """Return the scalar to minimise, and the effective sample size per foreign completion (None without log-probabilities)."""
    batch = completions_of(policy, update, temperature)
    return policy_loss(batch, loss), _worth(batch, update)


def _worth(batch: Completions, update: Update) -> float | None:
    known = [number for number, row in enumerate(update.behaviour) if row is not None]
    if not known:
        return None
    return float(effective_sample_size(log_weights(batch)[known])) / len(known)


log = logging.getLogger(__name__)

JUDGED = (64, 8)  # most groups judged in a round: the larger of the first, and the second for each group to learn from
REMEMBERED = 16_384  # groups that are recognised again, whoever sends them
SENDERS = 1024  # of which the newest policy is known
LONG = 16  # characters for each allowed token, above which a completion is not judged


@dataclass(frozen=True)
class _Kept:
    key: str
    rollout: Rollout
    group: RolloutGroup
    arrived: int  # this node's round


def content(rollout: Rollout) -> str:
    """Return a digest that is equal for copies, whoever signed them: a copied group must not be learnt from twice."""
    said = (rollout.seed, rollout.index, *rollout.completions)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def fair(came: Sequence[Rollout], room: int) -> list[Rollout]:
    """Return at most ``room`` rollouts in order of arrival: the newest of each sender in turn, so that nobody crowds others out."""
    of_sender: dict[str, list[int]] = {}
    for place in reversed(range(len(came))):
        of_sender.setdefault(came[place].peer, []).append(place)
    turns = sorted((turn, -place) for places in of_sender.values() for turn, place in enumerate(places))
    return [came[place] for place in sorted(-minus for _, minus in turns[:room])]


class RemoteRollouts:
    """Buffer of drained rollouts until they are used or too old.

    ``held_out``: prompts that nobody may train on. ``seed``: of the choice, and this node's own secret (`select`). ``behind``: how
    many versions of its sender's policy a group may be older than the sender's newest.
    """

    def __init__(
        self, env: Env, policy: Policy, held_out: Collection[str], *,
        seed: int, age: int, per_sender: int, group: int, max_tokens: int, behind: int,
    ) -> None:  # fmt: skip
        self._env, self._policy, self._held_out = env, policy, held_out
        self._seed, self._age, self._per_sender = seed, age, per_sender or None
        self._group, self._max_tokens, self._most_behind = group, max_tokens, behind
        self._newest: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Of each sender the rollout that it issued last: when, and by which version of its policy."""
        self._kept: list[_Kept] = []
        self._seen = LRUSet(REMEMBERED)
        self.used = 0
        """Number of groups that were learnt from."""
        self.newest: tuple[tuple[str, float], ...] = ()
        """Of the groups that were chosen last the senders and mean rewards."""
        self.rejected: Counter[str] = Counter({"crowded": 0, "held_out": 0, "unjudged": 0, **dict.fromkeys(REASONS, 0)})
        """Numbers of the others, by reason."""

    def take(self, came: list[Rollout], count: int, round: int) -> list[RolloutGroup]:
        """Choose at most ``count`` groups for this node's ``round``, among those that arrived by now."""
        for rollout in came:
            self._note(rollout)
        room = max(JUDGED[0], JUDGED[1] * count)
        self.rejected["crowded"] += max(len(came) - room, 0)
        self._kept += [kept for rollout in fair(came, room) if (kept := self._judge(rollout, round)) is not None]
        candidates = [
            Candidate(kept.key, kept.rollout.peer, kept.arrived, kept.group.rewards, self._behind(kept.rollout))
            for kept in self._kept
        ]
        picked = select(
            candidates, count, seed=self._seed, round=round, max_age=self._age, per_sender=self._per_sender,
            max_behind=self._most_behind,
        )  # fmt: skip
        chosen = [self._kept[place].group for place in picked.places]
        senders = (self._kept[place].rollout.peer for place in picked.places)
        self.newest = tuple((peer, fmean(group.rewards)) for peer, group in zip(senders, chosen, strict=True))
        self.used += len(chosen)
        self._keep(set(picked.places), round)
        return chosen

    def _note(self, rollout: Rollout) -> None:
        issued = rollout.issued, rollout.policy_version
        self._newest[rollout.peer] = max(self._newest.get(rollout.peer, issued), issued)
        self._newest.move_to_end(rollout.peer)
        if len(self._newest) > SENDERS:
            self._newest.popitem(last=False)

    def _behind(self, rollout: Rollout) -> int:
        """Return the versions from that which wrote ``rollout`` to its sender's newest, also where that began anew."""
        return abs(self._newest.get(rollout.peer, (0.0, rollout.policy_version))[1] - rollout.policy_version)

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
            elif round + 1 - item.arrived > self._age:
                self.rejected["not_drawn"] += 1
            else:
                kept.append(item)
        most = 8 * JUDGED[0]
        self.rejected["crowded"] += max(len(kept) - most, 0)
        self._kept = kept[-most:]

    def _judge(self, rollout: Rollout, round: int) -> _Kept | None:
        """Make the question anew, and compute this node's rewards. The sender decides neither."""
        key = content(rollout)
        if key in self._seen:
            self.rejected["duplicate"] += 1
            return None
        self._seen.add(key)
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
        except Exception as error:  # whatever an environment makes of a stranger's text costs this one record
            log.debug("a rollout could not be judged: %s", error)
            self.rejected["unjudged"] += 1
            return None
        return _Kept(key, rollout, RolloutGroup(question.prompt, tokens, rewards, self._behaviour(rollout, tokens)), round)

    def _behaviour(self, rollout: Rollout, tokens: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...] | None, ...]:
        """Return the sender's log-probabilities, where its tokens are those of the text on this node."""
        told = rollout.behaviours() if rollout.tokenizer == self._policy.tokenizer else ()
        if not told:
            return (None,) * len(tokens)
        return tuple(
            tuple(one.logps.tolist()) if tuple(one.tokens.tolist()) == row else None for one, row in zip(told, tokens, strict=False)
        )

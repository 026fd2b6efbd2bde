"""Rollouts of other peers, from their arrival until they are learnt from or too old.

The sender decides neither question nor reward: both are made anew here. Nobody's groups crowd
others out, and none is learnt from twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Policy
from shoal.node.rl.update import RolloutGroup
from shoal.optim.rollout_selection import REASONS, Candidate, select
from shoal.swarm.p2p.addresses import by_turns
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.topics.rollout import Rollout

log = logging.getLogger(__name__)

JUDGED_GROUPS = 64
JUDGED_PER_LEARNT = 8
"""Groups judged in a round at most: the first, or if that is more the second for each group to
learn from.
"""
KEPT_GROUPS = 8 * JUDGED_GROUPS
"""That wait for a later round, at most."""
REMEMBERED_GROUPS = 16_384
"""That are recognised again, whoever sends them."""
SENDERS = 1024
"""Of which the newest policy is known."""
CHARS_PER_TOKEN = 16
SPARE_CHARS = 256
"""A completion is judged if it has at most so many characters for each allowed token, and the
second besides.
"""
MAX_AGE_ROUNDS = 2
"""For which a group is of use once it came."""
MAX_VERSIONS_BEHIND = 8
"""Versions of its sender's policy that a group may usually be older than the newest seen."""
MORE_IF_CORRECTED = 24
"""More of them, where the loss has a ratio to the policy that wrote the group, as its writer states
it: what is far off then counts little.
"""
MAX_PER_SENDER = 8
"""Groups of one peer among which to choose in a round."""


@dataclass(frozen=True)
class _Kept:
    """A judged group that waits; ``arrived``: this node's round in which it came."""

    key: str
    rollout: Rollout
    group: RolloutGroup
    arrived: int

    @property
    def is_known(self) -> bool:
        """Whether the writer's log-probability of each token is known."""
        return None not in self.group.behaviour


def fair(came: Sequence[Rollout], room: int) -> list[Rollout]:
    """Return at most ``room`` rollouts in order of arrival: the newest of each sender in turn, so
    that nobody crowds others out.
    """
    newest_first = [(place, came[place].peer) for place in reversed(range(len(came)))]
    places = by_turns(newest_first, place=str)[:room]
    return [came[place] for place in sorted(places)]


class RemoteRollouts:
    """Buffer of drained rollouts until they are used or too old.

    ``held_out``: prompts that nobody may train on. ``seed``: of the choice, and this node's own
    secret (`select`). ``behind``: how many versions of its sender's policy a group may be older
    than the sender's newest. ``corrected``: the loss has a ratio to the policy that wrote a group.
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
        behind: int = MAX_VERSIONS_BEHIND,
        corrected: bool = False,
    ) -> None:
        self._env = env
        self._policy = policy
        self._held_out = held_out
        self._seed = seed
        self._group = group
        self._max_tokens = max_tokens
        self._max_behind = behind
        self._corrected = corrected
        self._newest = Newest[str, tuple[float, int]](SENDERS)
        """Of each sender the rollout that it issued last: when, and by which version of its policy.
        """
        self._kept: list[_Kept] = []
        self._seen = Newest[str, None](REMEMBERED_GROUPS)
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
        self._admit(came, count, round)
        candidates: list[Candidate] = []
        for kept in self._kept:
            rollout = kept.rollout
            rewards = kept.group.rewards
            behind = self._behind(rollout, kept.is_known)
            candidates.append(Candidate(kept.key, rollout.peer, kept.arrived, rewards, behind))
        picked = select(
            candidates,
            count,
            seed=self._seed,
            round=round,
            max_age=MAX_AGE_ROUNDS,
            per_sender=MAX_PER_SENDER,
            max_behind=self._max_behind,
        )
        chosen = [self._kept[place] for place in picked.indices]
        self.newest = tuple((kept.rollout.peer, fmean(kept.group.rewards)) for kept in chosen)
        self.used += len(chosen)
        self._keep(set(picked.indices), round)
        return [kept.group for kept in chosen]

    def _admit(self, came: list[Rollout], count: int, round: int) -> None:
        """Judge what came, and keep what is of use; count the rest by reason."""
        for rollout in came:
            issued = rollout.issued, rollout.policy_version
            self._newest[rollout.peer] = max(self._newest.get(rollout.peer, issued), issued)
        # Before they cost a judgement.
        fresh: list[Rollout] = []
        for rollout in came:
            may_be_known = rollout.tokenizer == self._policy.tokenizer and bool(rollout.logps)
            if self._behind(rollout, may_be_known) <= self._max_behind:
                fresh.append(rollout)
        self.rejected["off_policy"] += len(came) - len(fresh)
        room = max(JUDGED_GROUPS, JUDGED_PER_LEARNT * count)
        self.rejected["crowded"] += max(len(fresh) - room, 0)
        for rollout in fair(fresh, room):
            kept = self._judge(rollout, round)
            if kept is not None:
                self._kept.append(kept)

    @property
    def waiting(self) -> int:
        """Number of groups that may still be learnt from."""
        return len(self._kept)

    def _behind(self, rollout: Rollout, is_known: bool) -> int:
        """Return the versions from that which wrote ``rollout`` to its sender's newest, also where
        that began anew; less `MORE_IF_CORRECTED` where the loss corrects for them, for which its
        log-probabilities must be known.
        """
        unknown = (0.0, rollout.policy_version)
        _, newest = self._newest.get(rollout.peer, unknown)
        behind = abs(newest - rollout.policy_version)
        if self._corrected and is_known:
            return max(behind - MORE_IF_CORRECTED, 0)
        return behind

    def _keep(self, gone: Collection[int], round: int) -> None:
        """Keep the rollouts of use in the next round; count the others once, by reason."""
        kept = []
        for place, item in enumerate(self._kept):
            if place in gone:
                continue
            if min(item.group.rewards) == max(item.group.rewards):
                self.rejected["no_spread"] += 1
            elif self._behind(item.rollout, item.is_known) > self._max_behind:
                self.rejected["off_policy"] += 1
            elif round + 1 - item.arrived > MAX_AGE_ROUNDS:
                self.rejected["not_drawn"] += 1
            else:
                kept.append(item)
        self.rejected["crowded"] += max(len(kept) - KEPT_GROUPS, 0)
        self._kept = kept[-KEPT_GROUPS:]

    def _judge(self, rollout: Rollout, round: int) -> _Kept | None:
        """Make the question anew, and compute this node's rewards. The sender decides neither."""
        texts = rollout.completions[: self._group]
        # Of what would be learnt from it alone, and equal for copies, whoever signed them and in
        # whatever order: a copied group must not be learnt from twice.
        content = json.dumps((rollout.seed, rollout.index, *sorted(texts)))
        key = hashlib.sha256(content.encode()).hexdigest()
        if key in self._seen:
            self.rejected["duplicate"] += 1
            return None
        self._seen[key] = None
        try:
            question = self._env.made.question(rollout.seed, rollout.index)
            if question.prompt in self._held_out:
                self.rejected["held_out"] += 1
                return None
            if max(map(len, texts)) > CHARS_PER_TOKEN * self._max_tokens + SPARE_CHARS:
                raise ValueError("a completion is too long to be judged")
            rewards = self._env.rewards(question, texts)
            tokens = tuple(
                tuple(self._policy.encode(text, finish == "stop")[: self._max_tokens])
                for text, finish in zip(texts, rollout.finish, strict=False)
            )
        # Whatever an environment makes of a stranger's text costs this one record.
        except Exception as error:
            log.debug("a rollout could not be judged: %s", error)
            self.rejected["unjudged"] += 1
            return None
        behaviour = self._behaviour(rollout, tokens)
        group = RolloutGroup(question.prompt, tokens, rewards, behaviour)
        return _Kept(key, rollout, group, round)

    def _behaviour(
        self, rollout: Rollout, tokens: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[float, ...] | None, ...]:
        """Return the sender's log-probabilities, where its tokens are those of the text on this
        node.
        """
        if rollout.tokenizer != self._policy.tokenizer:
            return (None,) * len(tokens)
        told = rollout.behaviours()
        if not told:
            return (None,) * len(tokens)
        found: list[tuple[float, ...] | None] = []
        for one, row in zip(told, tokens, strict=False):
            is_same = tuple(one.tokens.tolist()) == row
            found.append(tuple(one.logps.tolist()) if is_same else None)
        return tuple(found)

"""Why something of another peer was refused or not used, in words for people.

The reasons themselves are the names in the metrics, which stay as they are. Example:
``listed({"early": 1})`` is ``1 of peers that had not joined yet (early)``.
"""

from __future__ import annotations

from collections.abc import Mapping

WORDS = {
    # streams, calls and records
    "banned": "of banned peers",
    "bomb": "that unpack to too much",
    "crowded": "beyond what is served at once",
    "damaged": "damaged on the way",
    "denied": "of peers on the deny list",
    "digest": "of other content than announced",
    "early": "of peers that had not joined yet",
    "forged": "with a false signature or sender",
    "future": "dated in the future",
    "kind": "of an unknown kind",
    "malformed": "that could not be read",
    "nested": "nested too deeply",
    "old": "older than what was known",
    "overflow": "beyond the space for them",
    "oversized": "too large",
    "punch": "of unusable hole punching",
    "quota": "beyond their sender's quota",
    "rate": "over the rate limit",
    "replayed": "that had come before",
    "spent": "beyond the weights that one peer is served in an hour",
    "stale": "out of date",
    "stranger": "of peers that are no members",
    "time": "beyond the processor time for strangers",
    "truncated": "cut off",
    "uninvited": "without an invitation",
    "version": "of another version of the protocol",
    # groups of rollouts
    "displaced": "displaced by newer ones",
    "duplicate": "the same as another",
    "expired": "that waited too long",
    "held_out": "about held-out questions",
    "no_spread": "with equal rewards, which teach nothing",
    "not_drawn": "more than a round learns from",
    "off_policy": "of a policy that is too old",
    "over_quota": "beyond their sender's share",
    "unjudged": "that could not be judged",
}


def listed(counts: Mapping[str, int]) -> str:
    """Return counts by reason for people, the most frequent first; each with its name in the
    metrics.
    """
    found = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    said = []
    for reason, count in found:
        words = f"{WORDS[reason]} ({reason})" if reason in WORDS else reason
        said.append(f"{count:,} {words}")
    return ", ".join(said)

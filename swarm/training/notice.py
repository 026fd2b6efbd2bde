"""Sentences for a node's user."""

from __future__ import annotations

from typing import NamedTuple


class Notice(NamedTuple):
    """A sentence for this node's user; ``about``: partition, partner, weights, update, refused,
    lag, membership, or internal.
    """

    about: str
    said: str

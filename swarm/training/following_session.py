"""The session of a rank besides rank 0, in a peer of several ranks.

Rank 0 alone is in the network. Between two steps the other ranks do what it orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shoal.optim import Alone, OuterOptimizer, Ranks
from shoal.optim.parameters import AveragedParameters
from shoal.optim.ranks.orders import Channel, obey
from shoal.swarm.membership.membership import Membership
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.training.session import Session
from shoal.swarm.training.session_setup import (
    SessionError,
)
from shoal.swarm.training.shard import Shard


class FollowingSession(Session):
    """The session of a rank besides rank 0: without a network, it does between two steps what rank
    0 orders.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        params: AveragedParameters,
        model: nn.Module | None,
        ranks: Ranks,
        channel: Channel,
    ) -> None:
        self._orders = channel
        settings = OuterSettings.model_validate_json(facts["settings"])
        self._prepare(
            settings,
            TrainSettings.model_construct(**facts["train"]),
            facts["fragment_of"],
            Shard(*facts["shard"]),
            facts["swarm"],
            params,
            model,
            ranks,
            None,
        )

    def _no_network(self) -> SessionError:
        assert self._ranks is not None
        return SessionError(
            f"Rank {self._ranks.rank} of this peer has no network: rank 0 has the link, the "
            "membership, the status and the progress (session.follow gives it to every rank)."
        )

    @property
    def link(self) -> str:
        raise self._no_network()

    @property
    def membership(self) -> Membership:
        raise self._no_network()

    @property
    def progress(self) -> int:
        raise self._no_network()

    def _progress_here(self) -> int:
        return 0  # rank 0's is used

    def status(self) -> dict[str, Any]:
        raise self._no_network()

    def close(self) -> None:
        self._closed = True

    def _real_exchange(self, opt: OuterOptimizer) -> Any:
        return Alone()  # rank 0's is used

    def _speeds(self) -> list[float]:
        return []  # rank 0's are used

    def _together(self, duties: Callable[[], None]) -> None:
        assert self._opt is not None
        self._orders.follow(self._obey)

    def _obey(self, name: str, fields: dict[str, Any]) -> None:
        assert self._opt is not None
        if name == "change":
            self._take_change(TrainSettings.model_construct(**fields["train"]))
        else:
            obey(self._opt, name, fields)

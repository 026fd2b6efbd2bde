"""The exchange with one partner over libp2p: what ``optim.Exchange`` promises, with strangers over the internet.

Who meets whom is in swarm/rendezvous.py; how the bytes move and when they count, in swarm/transfer.py; how the training thread
starts a round, goes on computing and fetches the mean, in swarm/handle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec
from shoal.optim.exchange.base import Mean, RoundKey
from shoal.optim.exchange.robust import TRUSTING, UpdateScreen
from shoal.swarm.exchange.attempt import ExchangeAttempt
from shoal.swarm.exchange.context import ExchangeTimeouts, PeerContext
from shoal.swarm.exchange.contribution import Contribution, encode_contribution
from shoal.swarm.exchange.handle import ExchangeBase, ExchangeHandle
from shoal.swarm.exchange.pair.matchmaking import PairMatchmaker
from shoal.swarm.exchange.pair.transfer import PairTransfer, PartnerContribution
from shoal.swarm.wire.member import Member


class PairExchange(ExchangeBase):
    """``optim.Exchange`` between the members of a swarm.

    Args:
        context: the node and its swarm; its host serves the exchange protocol from now on.
        timeouts: how long a round, and the parts of it, may take.
        departed: returns the members that left lately, by peer id (``Directory.departed``).
        screen: decides which contributions are refused and what the mean is.
    """

    def __init__(
        self,
        context: PeerContext,
        timeouts: ExchangeTimeouts = ExchangeTimeouts(),  # noqa: B008 (frozen)
        *,
        departed: Callable[[], Mapping[str, Member]] = dict,
        screen: UpdateScreen = TRUSTING,
    ) -> None:
        self._context, self._screen = context, screen
        self._matchmaker = PairMatchmaker(context, timeouts, PairTransfer(context.host, timeouts), departed)
        super().__init__(context.host, self._matchmaker, timeouts.limit)

    def start(
        self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32
    ) -> ExchangeHandle[PartnerContribution]:
        """Begin to look for a partner. ValueError if ``key`` is of another run than this swarm."""
        mine = encode_contribution(self._context.swarm, key, tensors, weight, codec)
        attempt = ExchangeAttempt[PartnerContribution](mine, screen=self._screen, stats=self.stats)
        return ExchangeHandle(self, attempt, self._meet(attempt), lambda received: self._mean(mine, received))

    async def _meet(self, attempt: ExchangeAttempt[PartnerContribution]) -> PartnerContribution | None:
        received, _ = await self._matchmaker.meet(attempt)
        return received

    def _mean(self, mine: Contribution, theirs: PartnerContribution) -> Mean:
        """Both sides compute it from the same bytes in the same order."""
        contributions = [(self._context.me, mine.weight, mine.tensors()), (theirs.peer, theirs.weight, theirs.tensors)]
        return self._screen.mean(self._context.me, mine.key.fragment, contributions)

"""The exchange with one partner over libp2p: `shoal.optim.Exchange` with strangers over the internet.

See `shoal.swarm.exchange.pair.matchmaking` for the choice of the partner, `transfer` for the bytes and the commit, and
`shoal.swarm.exchange.handle` for the training thread's side. Several meetings may be under way at once, one for each fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec
from shoal.optim.codecs.mod4 import Reading, for_pairs
from shoal.optim.exchange.averaging import mean_of, pair_mean
from shoal.optim.exchange.base import Mean, RoundKey
from shoal.optim.exchange.on_demand import OnDemand
from shoal.optim.exchange.robust import TRUSTING, UpdateScreen
from shoal.swarm.exchange.attempt import ExchangeAttempt
from shoal.swarm.exchange.context import ExchangeTimeouts, Patience, PeerContext
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
        fragments: fragments that are sent in turn, each with the next round's number; each may be in a meeting of its own.
        overlap: training goes on without the mean. Then a meeting waits for its partner until training needs the outcome.
        departed: returns the members that left lately, by peer id (``Directory.departed``).
        screen: decides which contributions are refused and what the mean is.

    Raises:
        ValueError: ``fragments`` is not positive.
    """

    def __init__(
        self,
        context: PeerContext,
        timeouts: ExchangeTimeouts = ExchangeTimeouts(),  # noqa: B008 (frozen)
        *,
        fragments: int = 1,
        overlap: bool = False,
        departed: Callable[[], Mapping[str, Member]] = dict,
        screen: UpdateScreen = TRUSTING,
    ) -> None:
        if fragments < 1:
            raise ValueError(f"fragments must be positive, got {fragments}")
        self._context, self._screen = context, screen
        patience, transfers = Patience(), PairTransfer(context.host, timeouts)
        self._matchmaker = PairMatchmaker(context, timeouts, transfers, departed, patience, fragments, overlap)
        super().__init__(context.host, self._matchmaker.rounds, self._matchmaker.evidence, timeouts, patience)

    def start(
        self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32, even: int = 0
    ) -> ExchangeHandle[PartnerContribution]:
        """Start looking for a partner. Raises ValueError if ``key`` is of another run than this swarm."""
        return self._begin(key, tensors, weight, codec, even)

    def borrow(
        self, key: RoundKey, tensors: OnDemand, weight: float = 1.0, codec: Codec = FLOAT32, even: int = 0
    ) -> ExchangeHandle[PartnerContribution]:
        return self._begin(key, tensors, weight, codec, even)

    def _begin(
        self, key: RoundKey, tensors: Sequence[Tensor], weight: float, codec: Codec, even: int
    ) -> ExchangeHandle[PartnerContribution]:
        mine = encode_contribution(self._context.swarm, key, tensors, weight, codec, even)
        self.moved = mine.payload.nbytes
        attempt = ExchangeAttempt[PartnerContribution](mine, screen=self._screen, stats=self.stats)
        number = self._matchmaker.rounds.hand_in(key.round)
        return ExchangeHandle(self, attempt, self._meet(attempt, number), lambda received: self._mean(mine, received))

    async def _meet(self, attempt: ExchangeAttempt[PartnerContribution], number: int) -> PartnerContribution | None:
        received, _ = await self._matchmaker.meet(attempt, number)
        return received

    def _mean(self, mine: Contribution, theirs: PartnerContribution) -> Mean:
        """Compute the mean, from the same bytes on both sides; with a codec for pairs each side's is its own."""
        me, fragment, pairs = self._context.me, mine.key.fragment, for_pairs(mine.codec)
        if isinstance(theirs.values, Reading):
            assert pairs is not None and mine.message is not None  # noqa: PT018
            pairs[0].learn(mine.message, theirs.values)
            own, other = (me, mine.weight, mine.message), (theirs.peer, theirs.weight, theirs.values)
            return pair_mean(self._screen, fragment, own, other, theirs.refused, mine.even)
        contributions = [(me, mine.weight, mine.tensors()), (theirs.peer, theirs.weight, theirs.values)]
        return mean_of(self._screen, mine.codec, me, fragment, contributions, mine.even)

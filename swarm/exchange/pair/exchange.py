"""The exchange with one partner over libp2p: what ``optim.Exchange`` promises, with strangers over the internet.

Who meets whom is in swarm/rendezvous.py; how the bytes move and when they count, in swarm/transfer.py; how the training thread
starts a round, goes on computing and fetches the mean, in swarm/handle.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec
from shoal.optim.exchange.base import Mean, RoundKey
from shoal.optim.exchange.robust import TRUSTING, UpdateScreen
from shoal.swarm.exchange.contribution import Contribution, contribution
from shoal.swarm.exchange.handle import CommitState, ExchangeBase, ExchangeHandle
from shoal.swarm.exchange.pair.matchmaking import PairMatchmaker
from shoal.swarm.exchange.pair.transfer import PairTransfer, PartnerContribution
from shoal.swarm.identity import Identity
from shoal.swarm.wire.member import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host


def model_digest(tensors: Sequence[Tensor]) -> str:
    """Hex SHA-256 of the shapes and types: peers average only if theirs are equal."""
    text = ";".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()


class PairExchange(ExchangeBase):
    """``optim.Exchange`` between the members of a swarm.

    Args:
        host: the node's host; it serves the exchange protocol from now on.
        identity: signs the offers.
        swarm: the swarm id, which is also the run in every ``RoundKey``.
        model: ``model_digest`` of the parameters; members with another one are never paired with.
        seed: of the pairing, the same for all.
        members: who is there now (``Directory.members``).
        departed: who has left lately, and in which round (``Directory.departed``).
        look: called when somebody unknown calls (``Directory.look``).
        barred: peers whose calls are refused (``Directory.is_barred``).
        wait: seconds that a round waits for a partner.
        chunk_timeout: seconds without a byte after which a transfer is given up.
        exchange_timeout: seconds that one transfer may take.
        defence: what to refuse, and what to take for the mean.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        *,
        swarm: str,
        model: str,
        seed: int,
        members: Callable[[], Mapping[str, Member]],
        departed: Callable[[], Mapping[str, Member]] = dict,
        look: Callable[[], None] = lambda: None,
        barred: Callable[[str], bool] = lambda peer: False,
        wait: float = 10.0,
        chunk_timeout: float = 5.0,
        exchange_timeout: float = 120.0,
        defence: UpdateScreen = TRUSTING,
    ) -> None:
        self._peer_id, self._swarm, self._defence = identity.peer_id, swarm, defence
        transfers = PairTransfer(host, chunk_timeout=chunk_timeout, exchange_timeout=exchange_timeout)
        self._rendezvous = PairMatchmaker(
            host, identity, transfers, swarm=swarm, model=model, seed=seed, wait=wait, members=members, departed=departed,
            look=look, barred=barred,
        )  # fmt: skip
        # What one round can take at most: finding a partner, one transfer, its confirm.
        super().__init__(host, self._rendezvous, wait + exchange_timeout + 8 * chunk_timeout)

    def start(
        self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32
    ) -> ExchangeHandle[PartnerContribution]:
        """Begin to look for a partner. ValueError if ``key`` is of another run than this swarm."""
        mine = contribution(self._swarm, key, tensors, weight, codec, self._defence, self.stats)
        decision: CommitState[PartnerContribution] = mine.decision
        return ExchangeHandle(self, decision, self._meet(mine), lambda received: self._mean(mine, received))

    async def _meet(self, mine: Contribution) -> PartnerContribution | None:
        received, _ = await self._rendezvous.meet(mine)
        return received

    def _mean(self, mine: Contribution, theirs: PartnerContribution) -> Mean:
        """Both sides compute it from the same bytes in the same order."""
        contributions = [(self._peer_id, mine.weight, mine.tensors()), (theirs.peer, theirs.weight, theirs.tensors)]
        return self._defence.mean(self._peer_id, mine.key.fragment, contributions)

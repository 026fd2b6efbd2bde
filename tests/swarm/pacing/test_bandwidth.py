"""The upload budget: bytes over time, with an injected clock, and a transfer under it."""

import asyncio

import pytest

from shoal.swarm.pacing import bandwidth
from shoal.swarm.pacing.bandwidth import BURST_S, CHUNK_S, BandwidthLimiter


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(bandwidth.asyncio, "sleep", self.sleep)

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("senders", [1, 4])
def test_no_more_than_the_budget_goes_out(monkeypatch, senders):
    clock = Clock(monkeypatch)
    rate, total = 1000.0, 20_000
    limiter = BandwidthLimiter(rate, clock)
    sent = []

    async def send(nbytes):
        for _ in range(nbytes // limiter.chunk):
            await limiter.wait()
            limiter.spend(limiter.chunk)
            sent.append((clock.now, limiter.chunk))

    async def run():
        await asyncio.gather(*(send(total // senders) for _ in range(senders)))

    asyncio.run(run())
    assert sum(size for _, size in sent) == total
    allowed = rate * BURST_S + senders * rate * CHUNK_S
    gone = 0
    for when, size in sent:
        gone += size
        assert gone <= rate * when + allowed + 1e-6
    assert clock.now == pytest.approx((total - allowed) / rate, rel=0.1)


def test_what_does_not_wait_is_owed(monkeypatch):
    clock = Clock(monkeypatch)
    limiter = BandwidthLimiter(100.0, clock)
    limiter.spend(1025)
    assert limiter.deficit() == pytest.approx(1000.0)
    asyncio.run(limiter.wait())
    assert clock.now == pytest.approx(10.0)


@pytest.mark.parametrize("rate", [0, -1.0])
def test_a_budget_is_above_nothing(rate):
    with pytest.raises(ValueError):
        BandwidthLimiter(rate)

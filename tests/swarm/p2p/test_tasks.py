"""Tasks that are cancelled have ended."""

import asyncio

from shoal.swarm.p2p import tasks


async def losing(cancellations):
    """Lose so many cancellations, and go on."""
    for _ in range(cancellations):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(3600)


def test_a_task_that_lost_its_cancellation_is_stopped(monkeypatch):
    monkeypatch.setattr(tasks, "AGAIN_S", 0.01)

    async def stopped():
        work = asyncio.ensure_future(losing(2))
        await asyncio.sleep(0)
        await asyncio.wait_for(tasks.stop(work), 10)
        return work.cancelled()

    assert asyncio.run(stopped())


def test_stopping_ends_though_a_task_had_failed():
    async def failing():
        raise ValueError

    async def stopped():
        work = asyncio.ensure_future(failing())
        await asyncio.sleep(0)
        await tasks.stop(work)
        await tasks.stop()
        return work.done()

    assert asyncio.run(stopped())

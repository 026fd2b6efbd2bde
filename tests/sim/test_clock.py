"""The virtual clock: time jumps, processes die and sleep, and what can never happen is said at
once.
"""

import asyncio

import pytest

from tests.sim.clock import Process, Stuck, VirtualLoop


@pytest.fixture
def loop():
    made = VirtualLoop(busy=1000)
    yield made
    made.close()


def begin(loop, process, coroutine):
    return process.context.copy().run(loop.create_task, coroutine)


def test_timers_come_in_their_order_and_worker_threads_at_once(loop):
    seen = []

    async def after(seconds):
        await asyncio.sleep(seconds)
        seen.append((seconds, await asyncio.to_thread(loop.time)))

    async def work():
        await asyncio.gather(*(after(seconds) for seconds in (3.0, 1.0, 2.0)))

    loop.run_until_complete(work())
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_what_raises_in_a_worker_thread_raises_here(loop):
    async def work():
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    loop.run_until_complete(work())


def test_a_wait_without_end_is_said(loop):
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())


def test_time_that_stands_still_is_said(loop):
    async def spin():
        while True:
            await asyncio.sleep(0)

    task = loop.create_task(spin())
    with pytest.raises(Stuck):
        loop.run_until_complete(task)
    task.cancel()
    loop._at_once = 0
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)


def ticking(loop, seen):
    async def tick():
        while True:
            await asyncio.sleep(1.0)
            seen.append(loop.time())

    return tick()


def test_the_dead_do_nothing_any_more(loop):
    one, two, of_one, of_two = Process("one"), Process("two"), [], []
    begin(loop, one, ticking(loop, of_one))
    begin(loop, two, ticking(loop, of_two))
    loop.run_until_complete(asyncio.sleep(2.5))
    one.state = "dead"
    loop.run_until_complete(asyncio.sleep(2.0))
    assert of_one == [1.0, 2.0]
    assert of_two == [1.0, 2.0, 3.0, 4.0]
    one.state = "awake"
    for process in (one, two):
        for task in list(process.tasks.values()):
            task.cancel()
        loop.wake(process)
    loop.run_until_complete(asyncio.sleep(0.1))
    assert not one.tasks
    assert not two.tasks


def test_a_timer_that_was_cancelled_on_waking_is_not_called(loop):
    """As in a real process: what came first is done first, and may call off what came later."""
    process, seen = Process("one"), []

    async def work():
        news = loop.create_future()
        process.context.copy().run(loop.call_later, 2.0, news.set_result, "news")
        try:
            seen.append(await asyncio.wait_for(news, 3.0))
        except TimeoutError:
            seen.append("too late")

    begin(loop, process, work())
    loop.run_until_complete(asyncio.sleep(1.0))
    process.state = "asleep"
    loop.run_until_complete(asyncio.sleep(10.0))
    loop.wake(process)
    loop.run_until_complete(asyncio.sleep(1.0))
    assert seen == ["news"]

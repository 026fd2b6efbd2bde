"""Time in tests: a clock that a test moves, waiting for what happens by itself, and a loop that
runs beside the test.
"""

import asyncio
import threading
import time

LIMIT_S = 240.0
"""A net for what hangs, below the 300 s of a whole test: how long a start or a run takes says how
busy the machine is.
"""


class Clock:
    """A clock that stands still where a test has put it."""

    now = 0.0

    def __call__(self):
        return self.now


def until(condition, seconds=LIMIT_S, what="it"):
    """Poll ``condition`` until it is true; return what it returned."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        threading.Event().wait(0.01)
    return value


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._submitted = []  # a loop refers weakly to its tasks
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def submit(self, coroutine):
        self._submitted.append(asyncio.run_coroutine_threadsafe(coroutine, self.loop))
        return self._submitted[-1]

    def call(self, coroutine, timeout):
        return self.submit(coroutine).result(timeout)

    def close(self):
        async def end():
            # Again and again: ``wait_for`` loses a cancellation that comes together with a result
            # (Python below 3.12).
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=1.0)

        self.call(end(), 60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()

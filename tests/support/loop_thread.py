"""An event loop that runs beside the test."""

import asyncio
import threading


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._running = set()  # a loop refers weakly to its tasks
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def submit(self, coroutine):
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

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

"""Tests that are coroutines, each on an event loop of its own; a host, and what another says."""

import asyncio
import contextlib
import inspect

import pytest

from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


ECHO = "/test/echo/1"


def start(**options):
    return Host.start(Identity.ephemeral(), **{"timeout": 60, **options})


async def ask(host, peer_id, data=b"hello", addresses=()):
    """Send ``data`` to a peer that serves `ECHO`; return its answer."""
    with contextlib.closing(
        await host.open(peer_id, ECHO, addresses=addresses, timeout=30)
    ) as stream:
        await stream.send(data, 30)
        return await stream.receive(1 << 20, 30)

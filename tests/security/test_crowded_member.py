"""A member whose streams are all held by free keys of one address range still serves whoever comes
from another.
"""

import asyncio

from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.resource_manager import MAX_STRANGERS
from tests.security.bare_client import Connection, Key

ECHO = "/test/echo/1"


async def echo(stream):
    await stream.send(await stream.receive(100, 600), 5)


def test_silent_streams_keep_no_stranger_out():
    """The fault: the first 64 strangers kept all others out, newcomers that ask for the manifest or
    for weights among them.
    """
    with Host.start(Identity.ephemeral(), timeout=60) as member:
        member.serve(ECHO, echo)
        member.resource_manager.known = lambda peer: False
        _, _, host, _, port, *_ = member.addresses()[0].split("/")

        async def attack():
            crowd = [
                await Connection.to(host, int(port), Key(b"%d" % number), "127.1.0.1")
                for number in range(MAX_STRANGERS)
            ]
            try:
                for each in crowd:
                    each.stream(ECHO, b"\x00")
                while member.resource_manager._busy.total() < MAX_STRANGERS:
                    await asyncio.sleep(0.01)
                for source, answer in (("127.1.0.2", None), ("127.2.0.1", b"here")):
                    one = await Connection.to(host, int(port), Key(source.encode()), source)
                    try:
                        assert await asyncio.wait_for(one.ask(ECHO, b"here"), 30) == answer
                    except EOFError:
                        assert answer is None
                    finally:
                        one.close()
            finally:
                for each in crowd:
                    each.close()

        asyncio.run(asyncio.wait_for(attack(), 100))

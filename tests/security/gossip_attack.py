"""A stranger that attacks one node, as a program of its own:

    python -m tests.security.gossip_attack noise ADDRESS SWARM SECONDS
    python -m tests.security.gossip_attack streams ADDRESS SWARM SECONDS

"noise": 588 messages of 60 kB on streams of gossip; "streams": questions for the manifest on new
streams, without waiting for answers, by some keys that dial again. It ends by itself.
"""

import asyncio
import contextlib
import os
import struct
import sys
import time

from shoal.swarm.manifest import MANIFEST_PROTOCOL
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.messages import ManifestRequest
from tests.security.bare_client import DATA, FIN, Connection, Key

MESSAGES = 588
NOISE_BYTES = 60_000
STREAMS = 12
KEYS = 8
AT_ONCE = 8
"""Streams that a key opens before it looks whether its connection still stands."""
PAUSE_S = 0.001


def framed(message):
    return struct.pack(">I", len(message)) + message


async def noise(host, port, swarm, seconds):
    """Send the noise, evenly over so many seconds; return the last connection, which stays open.

    It keeps to no window, so the node ends its connections, and it dials again.
    """
    from shoal.swarm.gossip.frames import GossipTopics, frame_of, topic_of
    from shoal.swarm.topics.rollout import Rollout
    from shoal.swarm.wire.messages import GOSSIP_PROTOCOL
    from tests.security.bare_client import _line

    told = framed(pack(GossipTopics(swarm=swarm, topics=(topic_of(Rollout),))))
    line = None
    for number in range(MESSAGES):
        if line is None or not line.open:
            line = await Connection.to(host, port, Key(b"noise"))
            streams = [line.stream(GOSSIP_PROTOCOL, told) for _ in range(STREAMS)]
            await streams[0][1].readuntil(_line(GOSSIP_PROTOCOL))
        sent = framed(frame_of(0, os.urandom(NOISE_BYTES)))
        line._send(DATA, 0, streams[number % STREAMS][0], sent)
        await asyncio.sleep(seconds / MESSAGES)
    return line


async def ask_without_end(host, port, swarm, seconds):
    """Open streams for so many seconds; return how many, and how often it had to dial."""
    asked = framed(pack(ManifestRequest(swarm=swarm)))
    end = time.monotonic() + seconds
    opened = 0
    dialled = 0

    async def attack(number):
        nonlocal opened, dialled
        line = None
        while time.monotonic() < end:
            with contextlib.suppress(OSError, EOFError):
                if line is None or not line.open or line.writer.transport.is_closing():
                    dialled += 1
                    line = await Connection.to(host, port, Key(b"%d" % number))
                for _ in range(AT_ONCE):
                    stream, _ = line.stream(MANIFEST_PROTOCOL, asked)
                    line._send(DATA, FIN, stream)
                    line.streams.pop(stream, None)
                    opened += 1
                await line.writer.drain()
            await asyncio.sleep(PAUSE_S)
        if line is not None:
            line.close()

    await asyncio.gather(*map(attack, range(KEYS)))
    return opened, dialled


async def main(kind, address, swarm, seconds):
    _, _, host, _, port, *_ = address.split("/")
    if kind == "noise":
        (await noise(host, int(port), swarm, seconds)).close()
    else:
        opened, dialled = await ask_without_end(host, int(port), swarm, seconds)
        print(f"{opened} streams, {dialled} dials", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], float(sys.argv[4])))

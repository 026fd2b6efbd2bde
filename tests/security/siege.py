"""Attackers of a bootstrap node: a thousand keys from three address ranges that take what it has to
give, and renew it.

    python -m tests.security.siege ADDRESS SWARM KEYS PERIOD

Each key reports to as many swarms as it may and announces one of them as public; each eighth
reports to SWARM, which is honest, and holds silent streams open. It asks for a slot of the relay.
Prints a line of JSON once all keys had their turn, and then one each period, until it is killed.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter

from shoal.swarm.errors import MessageError
from shoal.swarm.manifest import Manifest, swarm_id
from shoal.swarm.wire.envelope import pack, seal, unpack
from shoal.swarm.wire.messages import (
    SEED_PROTOCOL,
    SWARMS_PROTOCOL,
    Announcement,
    SeedReply,
    SeedRequest,
    SwarmsReply,
    SwarmsRequest,
)
from tests.security.bare_client import Connection, Key
from tests.support.records import member_of

PLACES = 4  # swarms in which one peer is noted
STEP_S = 10.0
LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def member(key, swarm):
    return seal(member_of(key.peer_id, swarm=swarm, issued=time.time()), key)


class Attacker:
    def __init__(self, number, honest, counts):
        self.key, self.counts, self.open = Key(b"siege %d" % number), counts, None
        self.source = f"127.{1 + number % 3}.{1 + number // 600}.{1 + number // 3 % 200}"
        manifest = Manifest(
            name=f"m{number}",
            created=0.0,
            creator=self.key.peer_id,
            task="text",
            model="0" * 64,
            public=True,
        )
        sealed, draw = seal(manifest, self.key), random.Random(number)
        self.swarms = [
            swarm_id(sealed),
            *("".join(draw.choices(LETTERS, k=51)) + "a" for _ in range(PLACES - 1)),
        ]
        self.silent = number % 8 == 0
        if self.silent:
            self.swarms[-1] = honest
        said = Announcement(
            swarm=self.swarms[0],
            peer=self.key.peer_id,
            manifest=sealed,
            params=1,
            round_bytes=1,
            memory=0,
            device="cpu",
            issued=0.0,
        )
        self.announcement = seal(said, self.key)

    async def turn(self, host, port):
        """Renew everything; count what came of it."""
        try:
            if self.open is None or not self.open.open:
                self.counts["dials"] += 1
                self.open = await asyncio.wait_for(
                    Connection.to(host, port, self.key, self.source), STEP_S
                )
                self.counts["connected"] += 1
                self.counts["slots"] += await asyncio.wait_for(self.open.reserve(), STEP_S)
            for swarm in self.swarms:
                asked = self.open.ask(
                    SEED_PROTOCOL, pack(SeedRequest(swarm=swarm, record=member(self.key, swarm)))
                )
                reason = unpack(await asyncio.wait_for(asked, STEP_S), SeedReply).reason
                self.counts[f"record {reason or 'noted'}"] += 1
            asked = self.open.ask(
                SWARMS_PROTOCOL, pack(SwarmsRequest(announcement=self.announcement))
            )
            reason = unpack(await asyncio.wait_for(asked, STEP_S), SwarmsReply).reason
            self.counts[f"announcement {reason or 'listed'}"] += 1
            if self.silent:
                for _ in range(PLACES):
                    self.open.stream(SEED_PROTOCOL, b"\x00")
        except (TimeoutError, OSError, EOFError, MessageError) as error:
            self.counts[type(error).__name__] += 1


async def main(address, honest, keys, period):
    host, port = address.split("/")[2], int(address.split("/")[4])
    counts = Counter()
    attackers = [Attacker(number, honest, counts) for number in range(keys)]
    loop = asyncio.get_running_loop()

    async def attack(number, attacker):
        await asyncio.sleep(number * period / keys)
        while True:
            due = loop.time() + period
            await attacker.turn(host, port)
            await asyncio.sleep(max(due - loop.time(), 0.0))

    attacks = [
        asyncio.ensure_future(attack(number, attacker)) for number, attacker in enumerate(attackers)
    ]
    while attacks:
        await asyncio.sleep(period)
        print(
            json.dumps({**counts, "open": sum(bool(a.open and a.open.open) for a in attackers)}),
            flush=True,
        )
        counts.clear()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))

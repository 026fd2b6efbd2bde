"""A member that turns hostile: ``python dragging_member.py SECONDS FREE join ...``, the rest as for
``python -m shoal``.

And an honest one that writes down how far such words move it: ``python dragging_member.py FILE up
...``.

For ``SECONDS`` the first is honest. Then it answers every call with a round far ahead, its record
says the same, and so do those of ``FREE`` keys that it makes up, each in the directory as a
member's should be. When it calls it exchanges as before, so that it stays one of those that the
others have met.
"""

import asyncio
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from shoal.node.cli import main as cli  # noqa: E402
from shoal.swarm.exchange.pair.calls import CallAnswerer, Caller  # noqa: E402
from shoal.swarm.identity import Identity  # noqa: E402
from shoal.swarm.membership.directory import Directory  # noqa: E402
from shoal.swarm.membership.own_record import OwnRecord  # noqa: E402
from shoal.swarm.membership.records import bits_of, key_of, make_record  # noqa: E402
from shoal.swarm.wire.messages import Answer  # noqa: E402

FAR = 9 * 10**15
A_KEY = 20  # records under one key of the directory, which takes 32
TTL = 30.0


class Lie:
    """What this process says of its round. ``hostile_at``: time from which it lies."""

    def __init__(self, seconds, free):
        self.hostile_at = time.monotonic() + seconds
        self.free = [Identity.ephemeral() for _ in range(free)]

    @property
    def lies(self):
        return time.monotonic() > self.hostile_at

    async def spread(self, directory):
        """Keep the made-up members in the directory, and say how many of them another reader would
        find.
        """
        told = False
        while True:
            mine = directory.members().get(directory._peer)
            if self.lies and mine is not None:
                stored = 0
                for number, identity in enumerate(self.free):
                    prefix = bits_of(identity.peer_id)[: number // A_KEY]
                    update = {
                        "peer": identity.peer_id,
                        "round": FAR,
                        "issued": time.time(),
                        "addresses": (),
                    }
                    record = make_record(prefix, mine.model_copy(update=update), identity)
                    stored += await directory._host.store(
                        key_of(mine.swarm, prefix), identity.peer_id, record, TTL
                    )
                if not told:
                    print(f"stored {stored}", flush=True)
                    told = True
            await asyncio.sleep(TTL / 6)


def hostile(seconds, free):
    """Patch the node that is about to be started."""
    lie, judge, member, init = (
        Lie(seconds, free),
        CallAnswerer._judge,
        OwnRecord.member,
        Directory.__init__,
    )

    async def answer(self, stream, offer):
        if not lie.lies:
            return await judge(self, stream, offer)
        return None, Answer(verdict="passed", round=FAR), None

    def record(self, fields):
        return member(self, {**fields, "round": FAR} if lie.lies else fields)

    def begin(self, host, *arguments, **named):
        init(self, host, *arguments, **named)
        host.submit(lie.spread(self))

    CallAnswerer._judge, OwnRecord.member, Directory.__init__ = answer, record, begin


def watched(path):
    """Patch the node that is about to be started: each word of a liar becomes a line of a file.

    The line is the number of rounds by which it moved the node beyond where that was, and beyond
    all that others had told it.
    """
    note = Caller._note

    def noted(self, pairing, mine, answer):
        told = [round for round in self._state.evidence._met.values() if round < FAR]
        before = max(pairing.swarm_round, pairing.key.round, *told)
        note(self, pairing, mine, answer)
        if answer.round == FAR:
            with open(path, "a") as file:
                file.write(f"{max(pairing.swarm_round, before) - before}\n")

    Caller._note = noted


if __name__ == "__main__":
    first = sys.argv.pop(1)
    if first.isdigit():
        hostile(float(first), int(sys.argv.pop(1)))
    else:
        watched(first)
    cli.main()

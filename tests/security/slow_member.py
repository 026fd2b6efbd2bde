"""A member that is slow within all rules: what it sends of a payload comes in pieces 4.5 s apart,
at most 24 of them.

``python slow_member.py join ...``, the rest as for ``python -m shoal``.
"""

import asyncio
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from shoal.node.cli import main as cli  # noqa: E402
from shoal.swarm.p2p.stream import Stream  # noqa: E402

PIECES, APART_S = 24, 4.5  # a receiver takes 5 s of silence for a broken link


async def in_pieces(self, out, most, can_write):
    while left := out.next_size():
        await asyncio.sleep(APART_S)
        await can_write()
        self._writer.transport.write(out.take(min(-(-out.nbytes // PIECES), left)))


if __name__ == "__main__":
    Stream._pump = in_pieces
    cli.main()

"""Opens many connections to one node and keeps them, as several peers: a program of its own, so
that its load is not the nodes'.

    python flood.py ADDRESS CONNECTIONS IDENTITIES

prints ``open N`` when all were tried, and how many of them are open at each line that it reads;
ends with its input.
"""

import sys

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

AT_ONCE = 24
DIAL_S = 20.0


async def connection(address, key, limit, task_status):
    """Open a connection, on a host of its own: py-libp2p keeps one to each peer."""
    peer = PeerInfo(ID.from_base58(address.rpartition("/p2p/")[2]), [Multiaddr(address)])
    host = new_host(key_pair=key)
    async with host.run(listen_addrs=[]):
        async with limit:
            try:
                with trio.move_on_after(DIAL_S):
                    await host.connect(peer)
            except Exception as error:  # the library has no common base for what a dial can raise
                print(repr(error)[:200], file=sys.stderr)
        task_status.started(host)
        await trio.sleep_forever()


async def main(address, connections, identities):
    keys = [create_new_key_pair() for _ in range(identities)]
    limit = trio.CapacityLimiter(AT_ONCE)
    async with trio.open_nursery() as nursery:
        hosts = []

        async def one(number):
            hosts.append(await nursery.start(begin, keys[number % identities]))

        async def begin(key, task_status):
            await connection(address, key, limit, task_status)

        async with trio.open_nursery() as opening:
            for number in range(connections):
                opening.start_soon(one, number)
        print("open", sum(bool(host.get_connected_peers()) for host in hosts), flush=True)
        while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            print("open", sum(bool(host.get_connected_peers()) for host in hosts), flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

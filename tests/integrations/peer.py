"""One peer of a test: runs a script whose `shoal.create` prints its link, or joins by the one
given, on the loopback interface.

python peer.py SCRIPT LINK|- [SETTINGS]
"""

import json
import runpy
import sys

import torch

import shoal

HERE = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",))
script, link = sys.argv[1:3]
changed = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
made, members = shoal.create, []


def create(*, state, **settings):
    if link == "-":
        session = made(
            state=state, network=HERE, start_when=2, wait_s=60.0, **{**settings, **changed}
        )
        print("link", session.link, flush=True)
    else:
        session = shoal.join(link, state=state, network=HERE)
    session.on_report = lambda info, report, done: members.append(len(info.members))
    return session


torch.set_num_threads(1)
shoal.create = create
runpy.run_path(script, run_name="__main__")
print("met", sum(count > 1 for count in members), "of", len(members))

"""A training loop that is killed and started again:
`python returning_loop.py LINK|- CHECKPOINT STEPS`, on the loopback interface.

It creates a swarm with noloco's defaults, or joins, goes on from its checkpoint as
docs/python-api.md shows, saves one in every 10 steps, and prints each exchange that ended:
`round NUMBER of FRAGMENTS met PEERS`.
"""

import os
import sys
import time

import torch

import shoal

EVERY, STEP_S = 10, 0.02
HERE = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off")


def show(info):
    print("round", info.key.round, "of", optimizer.fragments, "met", len(info.members), flush=True)


link, path, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)
)
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
if link == "-":
    session = shoal.create(state=model, every=EVERY, start_when=2, network=HERE)
    print("link", session.link, flush=True)
else:
    session = shoal.join(link, state=model, network=HERE)
with session:
    optimizer, start = session.optimizer(inner, on_round=show), 0
    if os.path.exists(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["step"]
        print("resumed", start, flush=True)
    for step in range(start, steps):
        began = time.monotonic()
        x = torch.randn(32, 16)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(state, f"{path}.new")
            os.replace(f"{path}.new", path)
        time.sleep(max(began + STEP_S - time.monotonic(), 0.0))
print("done", flush=True)

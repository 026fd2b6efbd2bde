"""Small loops of one's own in sessions on loopback, which threads of this process run."""

from concurrent.futures import ThreadPoolExecutor

import torch

import shoal

HERE = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off")

EVERY, ROUNDS = 5, 4


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def loop(opt, module, data_seed, steps=EVERY * ROUNDS):
    data = torch.Generator().manual_seed(data_seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=data).to(next(module.parameters()))
        (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def together(*jobs):
    """Run the jobs in threads; their results, or the first exception."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(100) for future in [pool.submit(job) for job in jobs]]


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.05)

"""DiLoCo or NoLoCo between processes started by torchrun: no daemon, no link, no swarm to join.

    torchrun --nproc-per-node 2 examples/torchrun.py
    # with one other process at a time
    torchrun --nproc-per-node 4 examples/torchrun.py --pairs
    # two peers of two processes, each peer's model cut by FSDP2
    torchrun --nproc-per-node 4 examples/torchrun.py --shards 2

Each process has its own part of a text and learns to predict the next letter. For several machines
use torchrun's --nnodes, --rdzv-backend c10d and --rdzv-endpoint. Training on GPUs needs
``init_process_group("nccl")``, ``.cuda()`` for model and batches, and "cuda" for the mesh; the
exchange stays as it is.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shoal import DiLoCo, Distributed, NoLoCo, OuterOptimizer

TEXT = (
    "a shoal of fish stays together while each swims its own way and no one leads them through "
    "the deep dark water. "
)
LETTERS = sorted(set(TEXT))


def pairs_of_letters() -> tuple[torch.Tensor, torch.Tensor]:
    """Return letters (n, letters), one-hot, and the indices (n,) of the next ones."""
    indices = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    return nn.functional.one_hot(indices[:-1], len(LETTERS)).float(), indices[1:]


def make_model(shards: int) -> tuple[nn.Module, Distributed | None]:
    """Return the model, sharded over the peer's processes if there are several, and then also the
    exchange for its shards.
    """
    torch.manual_seed(0)  # all peers start from the same weights
    model = nn.Sequential(nn.Linear(len(LETTERS), 32), nn.Tanh(), nn.Linear(32, len(LETTERS)))
    if shards == 1:
        return model, None
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("peer", "shard")
    )
    fully_shard(model, mesh=mesh["shard"])
    return model, Distributed.for_shards(mesh)


def main() -> None:
    """Train, and print the loss over the whole text before and after."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="NoLoCo with one other peer in place of DiLoCo with all",
    )
    parser.add_argument("--shards", type=int, default=1, help="processes of one peer")
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args()

    dist.init_process_group("gloo")
    model, exchange = make_model(chosen.shards)
    exchange = exchange or Distributed(size=2 if chosen.pairs else 0)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    opt: OuterOptimizer
    if chosen.pairs:
        opt = NoLoCo(inner, exchange, every=25, model=model)
    else:
        opt = DiLoCo(inner, exchange, every=25, momentum=0.5, model=model)
    letters, following = pairs_of_letters()
    ours = torch.arange(len(letters)).chunk(dist.get_world_size())[dist.get_rank()]

    def loss_over_all() -> float:
        with opt.averaged(), torch.no_grad():
            return float(nn.functional.cross_entropy(model(letters), following))

    before = loss_over_all()
    for _ in range(chosen.steps):
        loss = nn.functional.cross_entropy(model(letters[ours]), following[ours])
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()  # every 25th step also averages with the other peers
        opt.zero_grad()
    opt.finish(
        average=True
    )  # the mean of the slow weights; if it is over all peers, they end with one model
    after = loss_over_all()
    if dist.get_rank() == 0:
        print(
            f"loss over the whole text: {before:.3f} before, {after:.3f} after {chosen.steps} "
            "steps, each on its own part"
        )
    exchange.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

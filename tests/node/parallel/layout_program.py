"""One of two ranks: takes steps of a small model in every layout, and writes what came of them to
files in a folder.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from shoal.node.config.train_settings import OwnTraining
from shoal.node.parallel.layouts import LAYOUTS
from shoal.node.training.inner_step import InnerStep
from shoal.node.training.layout import Layout


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.scale = 0.5

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.frozen(x)


class Branched(Net):
    """A model of which a layer has a part in the loss of some batches only, on some ranks and in
    some parts of a batch.
    """

    def __init__(self):
        super().__init__()
        self.branch = torch.nn.Linear(6, 6)
        self.never = torch.nn.Linear(6, 6)

    def forward(self, x):
        return super().forward(self.branch(x) if x[0, 0] > 0.3 else x)


class Squares:
    def loss(self, model, batch):
        return (model(batch[0]) * model.scale - batch[1]).square().mean()


def steps(layout, accumulate, net=Net):
    """Weights and losses after six steps, and the weights after those of a checkpoint were
    loaded.
    """
    torch.manual_seed(3)
    model, device = net(), torch.device("cpu")
    wrapped = layout.wrap(model, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = OwnTraining(accumulate=accumulate)
    step = InnerStep(Squares(), wrapped, parameters, device, clip=0.05, own=own, layout=layout)
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(6):
        batch = [torch.randn(8, 6, generator=generator) for _ in range(2)]
        losses.append(layout.mean(step.gradients(batch)))
        step.step(optimizer)
        optimizer.zero_grad()
    whole = {name: tensor.clone() for name, tensor in layout.whole_model(model).items()}
    layout.load_model(model, {name: tensor + 1 for name, tensor in whole.items()})
    loaded = {
        f"loaded.{name}": tensor.clone() for name, tensor in layout.whole_model(model).items()
    }
    return {"losses": torch.stack(losses), **whole, **loaded}


dist.init_process_group("gloo")
group = SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size())
for parts in (1, 2):
    found = {how: steps(layout(group, None), parts) for how, layout in LAYOUTS.items()}
    found["ddp-branched"] = steps(LAYOUTS["ddp"](group, None), parts, Branched)
    if group.rank == 0:
        found["one"] = steps(Layout(), parts * group.size)
        found["one-branched"] = steps(Layout(), parts * group.size, Branched)
        for how, tensors in found.items():
            save_file(tensors, Path(sys.argv[1]) / f"{how}-{parts}")
dist.destroy_process_group()
os._exit(
    0
    # on a loaded machine a thread of torch's may still run, and the interpreter's end would be an
    # abort
)

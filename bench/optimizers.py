"""Which inner optimizers can be wrapped, and whether peers stay together with them.

    python bench/optimizers.py          # writes bench/results/optimizers.md, in a minute or two

Every optimizer of torch, torchao and pytorch_optimizer is made with its defaults and offered to an
outer one. With each that is accepted, two peers train for 20 rounds on noisy data of one task, and
average their weights after each. The distance between them just before a round is what they learnt
apart in it. With an optimizer that goes back to earlier weights it grows from round to round, for
each mean is undone in part.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim import Alone, LocalSGD, Simulation, Stepped
from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.inner import check_inner

ROUNDS = 20
EVERY = 10
"""Inner steps in a round."""
COMPARED = 5
"""Rounds at the end, and at the beginning, whose largest distances are compared."""
GROWS = 2.0
"""Times by which the last distances may exceed the first, beyond what steps have grown of a peer
alone, as in a warm-up.
"""
RESULT = Path(__file__).parent / "results" / "optimizers.md"

Make = Callable[[nn.Module], torch.optim.Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def of_class(kind: Any, net: nn.Module) -> torch.optim.Optimizer:
    try:
        made: torch.optim.Optimizer = kind(net.parameters())
    except TypeError:
        made = kind(net.parameters(), lr=1e-3)
    return made


def of_torch() -> Iterator[tuple[str, Make]]:
    names = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD LBFGS NAdam RAdam RMSprop Rprop SGD"
    for name in names.split():
        yield name, partial(of_class, getattr(torch.optim, name))


def of_torchao() -> Iterator[tuple[str, Make]]:
    import torchao.optim

    for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"):
        yield name, partial(of_class, getattr(torchao.optim, name))


def of_pytorch_optimizer() -> Iterator[tuple[str, Make]]:
    import pytorch_optimizer as library

    for name in sorted(library.get_supported_optimizers()):
        yield name, partial(_from_library, name)
    for name in ("Lookahead", "TRAC", "OrthoGrad", "ScheduleFreeWrapper"):
        yield f"{name}(AdamW)", partial(_around_adamw, getattr(library, name))


def _around_adamw(wrapper: Any, net: nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = wrapper(torch.optim.AdamW(net.parameters(), lr=1e-3))
    return made


def _from_library(name: str, net: nn.Module) -> torch.optim.Optimizer:
    import pytorch_optimizer as library

    kind: Any = library.load_optimizer(name)
    made: torch.optim.Optimizer
    if name in ("lomo", "adalomo", "adammini"):
        made = kind(net)
    elif name == "ranger21":
        made = kind(net.parameters(), num_iterations=ROUNDS * EVERY)
    elif name == "bsam":
        made = kind(net.parameters(), num_data=1000)
    elif name in ("muon", "adamuon", "adago", "normuon", "muonclip", "distributedmuon"):
        matrices = [p for p in net.parameters() if p.dim() == 2]
        rest = [p for p in net.parameters() if p.dim() != 2]
        made = kind([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])
    elif name == "spectralsphere":
        made = kind([p for p in net.parameters() if p.dim() == 2])
    else:
        made = of_class(kind, net)
    return made


def distances(make: Make) -> list[float]:
    """Return the distance of two peers' weights just before each round."""
    simulation: Simulation[list[Tensor]] = Simulation(["anna", "bert"], size=2)
    found = simulation.run(lambda exchange: before_rounds(make, exchange, exchange.peer))
    pairs = zip(found["anna"], found["bert"], strict=True)
    return [float((anna - bert).norm()) for anna, bert in pairs]


def moves_alone(make: Make) -> list[float]:
    """Return how far one peer without a partner moves in each round."""
    found = before_rounds(make, Alone(), "anna")
    moves = [float((b - a).norm()) for a, b in pairwise(found)]
    return [moves[0], *moves]


def before_rounds(make: Make, exchange: Exchange, peer: str) -> list[Tensor]:
    """Train, and return the weights just before each round."""
    chance = torch.Generator().manual_seed(ord(peer[0]))
    target = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    net = model()
    inner = make(net)
    every = list(net.parameters())
    trained = [parameter for group in inner.param_groups for parameter in group["params"]]
    outer = LocalSGD(Stepped(trained), exchange, every=EVERY)
    found = []
    for step in range(ROUNDS * EVERY):
        rows = torch.randn(32, 12, generator=chance)
        noise = torch.randn(32, 4, generator=chance)
        loss = (net(rows) - (rows @ target).tanh() - noise).square().mean()
        take_step(inner, every, loss)
        if step % EVERY == EVERY - 1:
            found.append(torch.cat([parameter.detach().reshape(-1) for parameter in trained]))
        outer.step()
    return found


def take_step(inner: torch.optim.Optimizer, every: Sequence[nn.Parameter], loss: Tensor) -> None:
    """Step by gradients that have a graph, for optimizers that differentiate twice."""
    gradients = torch.autograd.grad(loss, every, create_graph=True)

    def closure() -> Tensor:
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient
        return loss

    closure()
    if takes_closure(inner):
        inner.step(closure)  # type: ignore[arg-type]
    else:
        inner.step()
    for parameter in every:
        parameter.grad = None


def takes_closure(inner: torch.optim.Optimizer) -> bool:
    """Return True for the two that are of no use without: their step's length comes from the loss,
    or they step twice.
    """
    return type(inner).__name__ in ("AliG", "BSAM")


def verdict(make: Make) -> tuple[str, str]:
    """Return "accepted", "refused" or "not tried", and what there is to say of it."""
    try:
        inner = make(model())
    except Exception as error:  # what a package lacks, or a constructor of another kind
        return "not tried", f"cannot be made here: {first_line(error)}"
    try:
        check_inner(inner)
    except ValueError as error:
        found = re.search(r"of a move (\S+) was left", str(error))
        return "refused", f"{found[1]} left" if found else "needs a closure"
    try:
        apart = distances(make)
        alone = moves_alone(make)
    except Exception as error:
        return "not tried", f"does not train here: {first_line(error)}"
    first, last = largest(apart)
    first_alone, last_alone = largest(alone)
    if not math.isfinite(last):
        return "not tried", "its weights are not finite, with its defaults"
    longer_steps = max(1.0, last_alone / first_alone)
    word = "accepted" if last <= GROWS * longer_steps * first else "accepted, but apart"
    note = (
        f" (alone it moves {longer_steps:.1f} times as far by then)" if longer_steps > 1.5 else ""
    )
    return word, f"{first:.3g}, then {last:.3g}{note}"


def largest(rounds: Sequence[float]) -> tuple[float, float]:
    """Return the largest number of rounds 2 to 6, and of the last five."""
    return max(rounds[1 : 1 + COMPARED]), max(rounds[-COMPARED:])


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:80]


PACKAGES = {
    "torch": of_torch,
    "torchao": of_torchao,
    "pytorch_optimizer": of_pytorch_optimizer,
}


def table() -> Iterator[tuple[str, str, str, str]]:
    """Yield package, optimizer, verdict and details, for the packages that are installed."""
    for package, optimizers in PACKAGES.items():
        if find_spec(package) is None:
            continue
        for name, make in optimizers():
            yield package, name, *verdict(make)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    rows = list(table())
    counts = Counter(row[2] for row in rows)
    lines = [
        "# Inner optimizers, tried",
        "",
        f"By `bench/optimizers.py`, torch {torch.__version__}. Accepted: the largest distance of "
        "two peers before rounds 2 to 6,",
        "then before rounds 16 to 20. Refused: how much of a move was left after 56 further steps.",
        "",
        "; ".join(f"{word}: {count}" for word, count in counts.items()) + ".",
        "",
        "| package | optimizer | | |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
    RESULT.write_text("\n".join(lines))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()

"""torchft's own DiLoCo, and Streaming DiLoCo, with its managers in processes of their own over
gloo.

Batches, inner optimizer and evaluation are those of the other rows. The outer optimizer is
``torch.optim.SGD`` with Nesterov's momentum, as torchft's examples have it, and takes over what our
method chose. A fragment is as late as torchft allows: one is in flight at a time, so its lag is
less than its share of a round; there are four of them, or as many as divide a round's steps. What
is evaluated are the global parameters.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench._quality_train import Diverged, backward
from bench._table.links import marks
from bench._table.methods import TORCHFT_STREAMING, fragments, lag
from bench._table.train import ON_THE_WAY, Place, Spec, Trained, held_out, inner_optimizer
from shoal.node.task import Shard

HERE = "127.0.0.1"
PATIENCE = timedelta(seconds=600)  # for one exchange: peers may wait long for a busy processor
LONGEST_S = 4 * 3600.0


def dealt(model: nn.Module, count: int) -> list[nn.Module]:
    """The model's layers dealt to so many modules, or all of it as one."""
    layers = [
        part
        for child in model.children()
        for part in (child if isinstance(child, nn.ModuleList) else [child])
    ]
    return (
        [model] if count == 1 else [nn.ModuleList(layers[number::count]) for number in range(count)]
    )


class _Global:
    """The global parameters in the model within a block, and the local ones again after it."""

    def __init__(self, diloco: Any, model: nn.Module) -> None:
        self.diloco, self.model = diloco, model

    def __enter__(self) -> None:
        self.local = [p.detach().clone() for p in self.model.parameters()]
        self.diloco._restore_parameters()

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for parameter, local in zip(self.model.parameters(), self.local, strict=True):
            parameter.copy_(local)


def _manager(lighthouse: str, store: TCPStore, rank: int, peers: int) -> Any:
    from torchft import Manager, ProcessGroupGloo

    return Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=peers,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=HERE,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"bench{rank}",
        hostname=HERE,
        init_sync=False,
    )


def _node(spec: Spec, place: Place, rank: int, lighthouse: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        answer.send(_trained(spec, place, rank, lighthouse))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # torchft's threads would wait for peers that are gone


def _trained(spec: Spec, place: Place, rank: int, lighthouse: str) -> dict[str, Any]:
    from torchft.local_sgd import DiLoCo

    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    manager = _manager(lighthouse, store, rank, spec.peers)
    sent, allreduce = [0], manager.allreduce

    def counted(tensor: Tensor, *rest: Any, **more: Any) -> Any:
        sent[0] += tensor.numel() * tensor.element_size()
        return allreduce(tensor, *rest, **more)

    manager.allreduce = counted
    task, model = place.task(spec, spec.peers), place.model(spec)
    inner, outer = inner_optimizer(task, model, spec), dict(spec.outer)
    scheduler = task.lr_scheduler(inner, spec.steps)
    streaming = spec.method == TORCHFT_STREAMING
    parts = dealt(model, fragments(spec.method, spec.every))
    outers = [
        torch.optim.SGD(p.parameters(), lr=outer["lr"], momentum=outer["momentum"], nesterov=True)
        for p in parts
    ]
    at, curve = set(marks(spec.steps, spec.every)), []
    with DiLoCo(
        manager,
        parts,
        inner,
        outers,
        sync_every=spec.every,
        pin_memory=False,
        fragment_sync_delay=lag(spec.method, spec.every),
        fragment_update_alpha=0.5 if streaming else 0.0,
    ) as diloco:
        for step, data in enumerate(
            islice(task.batches(Shard(rank, spec.peers, spec.seed)), spec.steps), 1
        ):
            backward(task, model, place.batch(data))
            inner.step()
            scheduler.step()
            inner.zero_grad()
            if rank == 0 and step in at:
                with _Global(diloco, model):
                    curve.append((step, held_out(task, model, "loss", ON_THE_WAY)))
        diloco._restore_parameters()
    rounds, due = manager.current_step(), spec.steps // spec.every * len(parts)
    if rounds != due:
        raise RuntimeError(f"{rounds} of {due} exchanges were committed")
    weights = save({name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()})
    return {"weights": weights, "sent": sent[0], "curve": curve}


def _answers(ends: Sequence[Connection]) -> list[dict[str, Any]]:
    found = []
    for end in ends:
        try:
            answer = end.recv() if end.poll(LONGEST_S) else "it took too long"
        except EOFError:
            answer = "a process ended"
        if isinstance(answer, str):
            raise Diverged(f"torchft failed: {answer}")
        found.append(answer)
    return found


def torchft(spec: Spec, place: Place) -> Trained:
    """The global model that all peers end with."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind=f"{HERE}:0", min_replicas=spec.peers, join_timeout_ms=1000)
    address = f"http://{HERE}:{lighthouse.address().rpartition(':')[2]}"
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    try:
        for rank in range(spec.peers):
            end, theirs = context.Pipe(duplex=False)
            processes.append(
                context.Process(target=_node, args=(spec, place, rank, address, theirs))
            )
            processes[-1].start()
            theirs.close()
            ends.append(end)
        found = _answers(ends)
    finally:
        for process in processes:
            process.kill()
            process.join()
        lighthouse.shutdown()
    model = place.model(spec)
    model.load_state_dict(load(found[0]["weights"]))
    return Trained([model], max(answer["sent"] for answer in found), found[0]["curve"])

"""``shoal pull``: write the swarm's weights to files, without being a member and without training.

The weights are chosen and checked as for a newcomer (`shoal.swarm.state.sync`). They are written
under the model's own names if the task can be built here, otherwise numbered; then the shapes are
those whose hash the swarm's creator signed. An unfinished download stays in ``.pull`` in the output
folder, and the next ``shoal pull`` goes on with it as long as any peer still holds that snapshot.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.node.checkpoint.export import WEIGHTS, export_model, export_numbered
from shoal.node.commands.creator import admitted
from shoal.node.commands.download import PullError, WeightsQuery, clear_download, download
from shoal.node.commands.pull_average import Average
from shoal.node.commands.pull_average import average as mean_of
from shoal.node.commands.pull_average import lines as average_lines
from shoal.node.config.settings import Settings, load
from shoal.node.console import plural
from shoal.node.data.hub_name import PREFIX, is_path
from shoal.node.data.source import DataError
from shoal.node.data.task_options import TEXT
from shoal.node.runtime.task_setup import RL, enter
from shoal.node.task import Task
from shoal.node.tasks.gpt import GPT, VOCABULARY
from shoal.node.tasks.user_class import HookError
from shoal.optim.codecs.base import all_finite
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.outer.averaged import float_buffers
from shoal.optim.outer.rule import assign
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.access.link import Link
from shoal.swarm.errors import write_remedy
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.visit import visited
from shoal.swarm.p2p.host import Host
from shoal.swarm.state.catch_up import sources_in
from shoal.swarm.state.download import Peer
from shoal.swarm.state.query import ATTEMPTS, ModelDiffersError
from shoal.swarm.state.snapshot import snapshot_id
from shoal.swarm.wire.messages import Member, StateHeader, StateRequest

MAX_BYTES = 64 << 30
ASIDE = ".pull"
INNER = ("lr", "weight_decay", "schedule", "warmup", "clip")
"""Settings of training that the model card names."""


@dataclass(frozen=True)
class BuiltModel:
    """Model of the swarm's task, its parameters in the order of the slow weights, and a tokenizer
    if the task has one.
    """

    model: nn.Module
    parameters: AveragedParameters
    task: Task
    tokenizer: Any = None


def pull(
    link: Link,
    out: Path,
    *,
    hooks: str | None = None,
    data: str | None = None,
    evaluate: bool = False,
    average: bool = False,
    max_bytes: int = MAX_BYTES,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the weights of the swarm of ``link``, and a model card, into the folder ``out``; return
    a report.

    Args:
        hooks: this machine's copy of the swarm's task, if it is not built in.
        data: the task's data on this machine. evaluate: compute the held-out loss on it, for the
            model card.
        average: take the mean of all members that can be reached
            (`shoal.node.commands.pull_average`), whose held-out losses are computed if the task is
            here, and told to ``say``.
        max_bytes: most bytes of weights (float32) to fetch; the free space of the disk bounds them
            too.
        force: replace existing weights.

    Raises:
        PullError, HookError, MemoryBudgetError, ModelDiffersError, NetworkError, MessageError,
        StartupError, AdmissionError: each says in one
            sentence what to do.
    """
    cap = _room(out, max_bytes, force=force)
    began = time.monotonic()
    aside = out / ASIDE
    with visited(link, admitted) as (host, manifest, members, _):
        built, why, sources = _found(host, manifest, members, hooks, data, evaluate=evaluate)
        query = _query(link, manifest, built, cap)
        before = host.traffic.received
        mean: Average | None = None
        try:
            if average:
                mean = _average(
                    host,
                    query,
                    sources,
                    members,
                    aside,
                    built,
                    say,
                    manifest.outer.fragments_a_round,
                )
                header = mean.header
                tensors = mean.tensors
            else:
                header, tensors = download(host, query, sources, aside, say)
        except OSError as error:
            raise PullError(
                f"Cannot write to {str(out)!r} ({error.strerror}): {write_remedy(error)}, and "
                "pull again."
            ) from error
        received = host.traffic.received - before
    if not all_finite(tensors):
        clear_download(aside)
        raise PullError("The weights of this swarm hold NaN or infinity: its training has failed.")
    about = _about(link, manifest, header, members, built, why)
    about["values"] = FLOAT32.nbytes(header.shapes) // 4
    about["held_out_loss"] = None
    about["held_out_on"] = None
    if mean is not None:
        about["snapshot"] = None
        about["averaged"] = mean.used
        about["notes"] = [mean.note(), *about["notes"]]
    if built is None:
        files = export_numbered(tensors, about, out, aside / "new")
    else:
        assign(built.parameters, tensors)
        if evaluate or average:
            about["held_out_loss"] = float(built.task.evaluate(built.model))
            about["held_out_on"] = _held_out_on(manifest, data)
        files = export_model(built.model, about, out, aside / "new", built.tokenizer)
    clear_download(aside)
    report = {
        **about,
        "out": str(out),
        "files": files,
        "tensors": len(header.shapes),
        "bytes_received": received,
        "seconds": round(time.monotonic() - began, 2),
    }
    if mean is not None:
        report["average"] = mean.report()
    return report


def _room(out: Path, max_bytes: int, *, force: bool) -> int:
    """Make the folder ``out``, and return the most bytes that may come into it."""
    if (out / WEIGHTS).exists() and not force:
        raise PullError(
            f"There are weights in {str(out)!r} already: choose another folder, or pass --force to "
            "replace them."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        return min(max_bytes, shutil.disk_usage(out).free)
    except OSError as error:
        raise PullError(
            f"Cannot write to {str(out)!r} ({error.strerror}): choose another folder."
        ) from error


def _found(
    host: Host,
    manifest: Manifest,
    members: Mapping[str, Member],
    hooks: str | None,
    data: str | None,
    *,
    evaluate: bool,
) -> tuple[BuiltModel | None, str, Sequence[Peer]]:
    """Return the swarm's model, or None and why it is not known here, and the peers that have
    weights.
    """
    if manifest.outer.alone:
        raise PullError(
            "The peers of this swarm do not average (method none), so it has no weights to pull."
        )
    built, why = build_model(manifest, hooks, data)
    if built is None and evaluate:
        raise PullError(
            f"{why} Without the task there is no held-out loss: pull without --evaluate."
        )
    sources = sources_in(host, members, manifest.model, manifest.creator)
    if not sources:
        raise PullError(
            "No peer of this swarm has finished a round yet, so there is nothing to pull: try "
            "again later."
        )
    return built, why, sources


def _query(link: Link, manifest: Manifest, built: BuiltModel | None, cap: int) -> WeightsQuery:
    """Return the query for at most ``cap`` bytes of the swarm's weights."""
    return WeightsQuery(
        StateRequest(swarm=link.swarm, model=manifest.model),
        [] if built is None else built.parameters.shapes,
        equal=manifest.outer.row.group == "everyone",
        attempts=ATTEMPTS + 1,  # one for an earlier download that cannot be finished
        names=() if built is None else built.parameters.names,
        known=built is not None,
        cap=cap,
    )


def build_model(
    manifest: Manifest, hooks: str | None, data: str | None = None
) -> tuple[BuiltModel | None, str]:
    """Return the swarm's model, of a task that reads ``data`` here; or None, and why its
    parameters' names are not known.

    Raises:
        HookError, DataError, ModelDiffersError: the task that the user named cannot be loaded, or
            is not the swarm's.
        MemoryBudgetError: there is no memory for the model.
    """
    if manifest.task == RL and hooks is None:
        return None, "In a swarm of the task rl each node has a model of its own."
    try:
        given = load(None, {"task.hooks": hooks, "node.data": data})
        settings, task = enter(given, manifest, trains=False)
        built = _model(settings, task)
    except (HookError, DataError) as error:
        if hooks is not None:
            raise
        return None, str(error)
    if model_digest(built.parameters) != manifest.model:
        raise ModelDiffersError(
            "The model of the task here is not the swarm's: use the task and version of the swarm."
        )
    return built, ""


def _model(settings: Settings, task: Task) -> BuiltModel:
    torch.manual_seed(settings.train.seed)
    model = task.model()
    return BuiltModel(model, AveragedParameters.of(model), task, getattr(task, "tokenizer", None))


def _average(
    host: Host,
    query: WeightsQuery,
    sources: Sequence[Peer],
    members: Mapping[str, Member],
    folder: Path,
    built: BuiltModel | None,
    say: Callable[[str], None],
    fragments: int,
) -> Average:
    """Return the mean of the newest snapshots of ``sources``, each kept below ``folder``.

    The bound on bytes is of all together.
    """
    left = query.cap

    def fetch(number: int, source: Peer) -> tuple[StateHeader, list[Tensor]]:
        nonlocal left
        own = replace(query, confirmed=False, cap=left)  # each member's weights are its own
        header, tensors = download(host, own, [source], folder / str(number), say)
        left -= own.wanted(header)
        return header, tensors

    def held_out_loss(tensors: Sequence[Tensor]) -> float:
        assert built is not None
        assign(built.parameters, tensors)
        return float(built.task.evaluate(built.model))

    measure = held_out_loss if built is not None else None
    return mean_of(sources, members, fetch, measure, say, fragments)


def _about(
    link: Link,
    manifest: Manifest,
    header: StateHeader,
    members: Mapping[str, Member],
    built: BuiltModel | None,
    why: str,
) -> dict[str, Any]:
    """Return what the weights are and how they came to be, by the swarm's settings and what its
    members report.
    """
    outer = manifest.outer.resolved()
    train = {name: getattr(manifest.train, name) for name in ("optimizer", *INNER)}
    fragments = manifest.outer.fragments_a_round
    losses = [member.loss for member in members.values() if member.loss is not None]
    steps = [member.step for member in members.values()] or [0]
    notes = []
    if built is None:
        notes.append(
            f"{why} Without it the parameters are numbered, in the order in which the swarm's task "
            "has them."
        )
    elif float_buffers(built.model):
        notes.append(
            "Buffers that are not parameters (running statistics) are those of a fresh model: "
            "peers do not hand them out."
        )
    about = {
        "swarm": link.swarm,
        "name": manifest.name,
        "round": header.round,
        "snapshot": snapshot_id(header).hex(),
        "task": manifest.task,
        "task_options": dict(manifest.task_options),
        "method": manifest.outer.method,
        "named": built is not None,
        "notes": notes,
        "created": manifest.created,
        "outer": {
            **outer.knobs(),
            "codec": outer.codec_name,
            "round": outer.round,
            "robust": outer.robust,
            "finish": outer.finish,
        },
        "train": {name: value for name, value in train.items() if value is not None},
        "rounds": header.round // fragments,
        "peers": len(members),
        "steps": [min(steps), max(steps)],
        "train_loss": sum(losses) / len(losses) if losses else None,
    }
    if built is not None and type(built.model) is GPT:
        about["model"] = _size(built.model)
    return about


def _held_out_on(manifest: Manifest, data: str | None) -> str:
    """Return the name of the data of the held-out loss: never a path of this machine, for the card
    is there to be published.
    """
    name = data or str(manifest.task_options.get("data", ""))
    if name.startswith(PREFIX) and not is_path(name.removeprefix(PREFIX)):
        return name
    if data:
        return "files named with --data"
    if manifest.task == TEXT:
        return "the Python standard library"
    return "the task's own data"


def _size(gpt: GPT) -> dict[str, int]:
    """Return the options that build a `GPT` of this size."""
    size = gpt.size._asdict()
    vocabulary = len(gpt.bytes.weight)
    if vocabulary != VOCABULARY:
        size["vocabulary"] = vocabulary
    return size


def summary(report: Mapping[str, Any]) -> str:
    """Return the report of `pull` for people."""
    names = "under the model's own names" if report["named"] else "numbered"
    lines = [
        f"{report['out']}: {report['values']:,} values in {report['tensors']} tensors, {names}, "
        f"after {plural(report['rounds'], 'round')}"
    ]
    if "average" in report:
        lines += average_lines(report["average"], report["held_out_loss"])
    if report["held_out_loss"] is not None:
        lines.append(f"held-out loss {report['held_out_loss']:.4f}, on {report['held_out_on']}")
    return "\n".join([*lines, *report["notes"]])

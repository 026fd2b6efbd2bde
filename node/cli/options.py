"""Groups of options that several commands share, and the settings that each option overrides."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from shoal.node.help import AVERAGING, COMPUTING, NETWORK, NODE, OUTPUT, RL, TASK, Decorator, joined, one_of, titled

METHODS = (
    "noloco", "local", "gasloc", "diloco", "diloco-hb", "streaming", "decoupled", "eager", "co2", "sparseloco", "sparta", "none",
)  # fmt: skip
"""The methods of `shoal.optim.METHODS`, which takes seconds to import."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
verbose_option = click.option("--verbose", is_flag=True, help="Log what the network does on stderr.")
set_option = click.option(
    "--set", "assigned", multiple=True, metavar="KEY=VALUE", help="Override a setting of examples/swarm.toml, such as outer.lr=0.5."
)
option_option = titled(
    TASK,
    click.option(
        "--option", "task_options", multiple=True, metavar="KEY=VALUE", help="Set an option of the task, such as width=256."
    ),
)

RL_OPTIONS = ("env", "policy", "local", "external", "group", "loss", "share_only", "learn_only")
OUTER_OPTIONS = ("method", "length", "codec", "finish", "robust", "verify", "audit_rate", "assigned")
METRICS_OPTIONS = ("metrics", "tensorboard", "wandb")
COMPUTING_OPTIONS = ("precision", "accumulate", "compile", "recompute", "workers")


def waiting(what: str) -> None:
    """Say on stderr what takes some seconds now, to a person who waits at a terminal."""
    if sys.stderr.isatty():
        click.echo(f"{what} ...", err=True)


def task_option(default: str | None) -> Decorator:
    """Return the option ``--task``."""
    shown = "text|rl|MODULE:CLASS|FILE.py:CLASS"
    return titled(
        TASK,
        click.option("--task", "hooks", metavar=shown, default=default, help="The task to train.  [default: text]"),
    )


data_options = titled(
    TASK,
    click.option("--data", help="Text to train on, for the built-in task: files, folders, FILE.jsonl(.gz), or hf:DATASET."),
    click.option("--tokenizer", metavar="NAME|PATH", help="bytes, a name on the hub, or a local ./FOLDER.  [default: bytes]"),
    click.option("--shard", metavar="I/N", help="Part of the data to train on.  [default: the least used]"),
)

computing_options = titled(
    COMPUTING,
    click.option(
        "--precision",
        metavar="FORMAT",
        shell_complete=one_of("float32", "bfloat16", "float16"),
        help="Compute in float32, bfloat16 or float16.  [default: float32]",
    ),
    click.option("--accumulate", type=int, metavar="N", help="Compute a batch in this many equal parts.  [default: 1]"),
    click.option("--compile", is_flag=True, default=None, help="Compile the model (torch.compile)."),
    click.option("--recompute", is_flag=True, default=None, help="Compute activations twice, to keep fewer in memory."),
    click.option("--workers", type=int, metavar="N", help="Processes that draw batches ahead.  [default: 0, none beside training]"),
)

rank_options = titled(
    COMPUTING,
    click.option("--gpus", metavar="all|N", help="Train on several GPUs, a process for each.  [default: one process]"),
    click.option(
        "--parallel",
        metavar="ddp|fsdp",
        shell_complete=one_of("ddp", "fsdp"),
        help="How several GPUs share the model: each holds all of it, or a part.  [default: ddp]",
    ),
    click.option("--max-restarts", type=int, help="Starts again after a process of several died.  [default: 3]"),
)

limit_options = titled(
    NETWORK,
    click.option("--allow", multiple=True, metavar="ID|FILE", help="Exchange with these peers only."),
    click.option("--deny", multiple=True, metavar="ID|FILE", help="Never exchange with these peers."),
    click.option("--upload", type=float, metavar="MBIT", help="Limit uploads to this many megabits a second.  [default: no limit]"),
    click.option("--ram", type=float, metavar="GB", help="Train only what fits into this much memory.  [default: no limit]"),
    click.option("--offload", metavar="DIR", type=click.Path(path_type=Path), help="Keep the outer optimizer in files in DIR."),
    click.option("--disk", type=float, metavar="GB", help="Limit the size of the folder to this.  [default: no limit]"),
)

metrics_options = titled(
    OUTPUT,
    click.option("--metrics", metavar="[HOST:]PORT", help="Serve metrics to Prometheus (a demo uses PORT, PORT+1 and so on)."),
    click.option("--tensorboard", metavar="DIR", type=click.Path(path_type=Path), help="Also write curves for TensorBoard."),
    click.option("--wandb", metavar="PROJECT", help="Also send curves to Weights & Biases."),
)

rl_options = titled(
    RL,
    click.option("--env", metavar="ENV", help="Environment: strings, sapo9, a family of it, or FILE.py:CLASS.  [default: strings]"),
    click.option("--policy", metavar="POLICY", help="Policy: tiny, tiny:HABIT, or hf:PATH_OR_NAME.  [default: tiny]"),
    click.option("--local", type=int, help="Own groups to learn from in a round.  [default: 4]"),
    click.option("--external", type=int, help="Other peers' groups to learn from in a round.  [default: 4]"),
    click.option("--group", type=int, help="Completions of each question.  [default: 8]"),
    click.option(
        "--loss",
        metavar="LOSS",
        shell_complete=one_of("sapo", "tis", "decoupled", "positive", "prime"),
        help="Loss: sapo, tis, decoupled, positive or prime.  [default: what suits the policy]",
    ),
    click.option("--share-only", is_flag=True, default=None, help="Share rollouts, but do not learn."),
    click.option("--learn-only", is_flag=True, default=None, help="Learn, but share nothing."),
)

outer_options = titled(
    AVERAGING,
    click.option(
        "--method",
        metavar="METHOD",
        shell_complete=one_of(*METHODS),
        help="How to average: noloco, local, gasloc (with one partner), diloco, diloco-hb, streaming, decoupled, eager, co2, "
        "sparseloco, sparta (over everyone), or none.  [default: noloco]",
    ),
    click.option(
        "--round",
        "length",
        metavar="LENGTH",
        help="Round length: steps, tokens:N, seconds:S or seconds:auto.  [default: steps]",
    ),
    click.option("--codec", metavar="CODEC", help="Number format: bfloat16, int8, e3m0+ef ...  [default: the method's]"),
    click.option(
        "--robust",
        metavar="RULE",
        shell_complete=one_of("clipped-gossip", "centered-clip"),
        help="Screen hostile peers: clipped-gossip or centered-clip.  [default: none]",
    ),
    click.option(
        "--finish",
        metavar="average|none",
        shell_complete=one_of("average", "none"),
        help="Average the slow weights once more at the end.  [default: none]",
    ),
    click.option(
        "--verify",
        metavar="none|activations",
        shell_complete=one_of("none", "activations"),
        help="Claim own rl completions, and check those of others (activations).  [default: none]",
    ),
    click.option("--audit-rate", type=float, help="Share of the claims that are checked.  [default: 0.1]"),
    set_option,
)

network_options = titled(
    NETWORK,
    click.option("--listen", multiple=True, metavar="MULTIADDR", help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001."),
    click.option("--announce", multiple=True, metavar="MULTIADDR", help="Address to announce, if a port is forwarded."),
    click.option("--bootstrap", multiple=True, metavar="MULTIADDR", help="A bootstrap node, or a member, to join through."),
    click.option(
        "--relay",
        metavar="auto|only|off",
        shell_complete=one_of("auto", "only", "off"),
        help="Be reached through a bootstrap node or the link's peers.  [default: auto]",
    ),
)

node_options = joined(
    task_option(None),
    data_options,
    computing_options,
    titled(
        NODE,
        click.option("--name", help="Name that other peers see, and name of the folder runs/NAME."),
        click.option(
            "--device",
            shell_complete=one_of("auto", "cpu", "cuda", "mps", "xpu"),
            help="auto, cpu, cuda, cuda:1 and so on, xpu, or mps.  [default: auto]",
        ),
        click.option("--folder", type=click.Path(path_type=Path), help="Folder for checkpoints and metrics.  [default: runs/NAME]"),
        click.option("--identity", type=click.Path(path_type=Path), help="Key file.  [default: ~/.config/shoal/identity.key]"),
        click.option("--threads", type=int, help="CPU threads for computing.  [default: half of the processors]"),
        click.option("--resume", is_flag=True, default=None, help="Continue from the newest checkpoint in the folder."),
        click.option(
            "--resume-from",
            type=click.Path(path_type=Path),
            metavar="CHECKPOINT",
            help="Begin another swarm with the weights of a checkpoint, or of the newest one of a node's folder.",
        ),
        click.option("--slow-on-device", is_flag=True, default=None, help="Keep the slow weights on the device."),
        click.option(
            "--lag",
            metavar="STEPS|auto",
            help="Steps that this node's exchanges may take while it trains on; 0: wait for each.  [default: the swarm's]",
        ),
    ),
    rank_options,
    network_options,
    limit_options,
    metrics_options,
    json_option,
    verbose_option,
    # For `shoal demo`, which starts its nodes by these same commands.
    click.option("--baseline", is_flag=True, hidden=True),
    click.option("--keep-rounds", is_flag=True, hidden=True),
    click.option("--with-parent", type=int, hidden=True),
)


def data_overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted settings of the data options; those not given are None."""
    from shoal.node.config.settings import assignment

    own = {f"task.options.{key}": value for key, value in map(assignment, flags.get("task_options", ()))}
    if flags["tokenizer"] is not None:
        own["task.options.tokenizer"] = flags["tokenizer"]
    return {"node.data": flags["data"], "node.shard": flags["shard"], **own}


def limit_overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted settings of the limit options; those not given are None."""
    return {
        "peers.allow": list(flags["allow"]) or None,
        "peers.deny": list(flags["deny"]) or None,
        "node.upload": flags["upload"],
        "node.ram": flags["ram"],
        "node.offload": flags.get("offload"),
        "node.disk": flags["disk"],
        "swarm.invite_only": flags.get("invite_only"),
        "swarm.public": flags.get("public"),
    }


def metrics_overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted settings of the metrics options; those not given are None."""
    return {f"node.{name}": flags.get(name) for name in METRICS_OPTIONS}


def computing_overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted settings of the computing options; those not given are None."""
    return {f"train.{name}": flags.get(name) for name in COMPUTING_OPTIONS}


def outer_overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted settings of the outer options and of ``--set``, without those not given."""
    from shoal.node.config.settings import assignment

    named = {f"outer.{name}": flags.get(name) for name in ("method", "codec", "robust", "finish")}
    named["outer.round"] = flags.get("length")
    named |= {"verify.kind": flags.get("verify"), "verify.audit_rate": flags.get("audit_rate")}
    return {**dict(map(assignment, flags.get("assigned", ()))), **{key: value for key, value in named.items() if value is not None}}


def node_overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted settings of all options of ``shoal up`` and ``shoal join``; None and empty values change nothing."""
    from shoal.node.config.settings import assignment

    names = (
        "name", "device", "gpus", "parallel", "max_restarts", "relay", "folder", "identity", "threads", "resume", "resume_from",
        "slow_on_device",
    )  # fmt: skip
    return {
        **{f"node.{name}": flags[name] for name in names},
        "node.lag": None if flags["lag"] is None else assignment(f"lag={flags['lag']}")[1],
        "node.listen": list(flags["listen"]) or None,
        "node.announce": list(flags["announce"]) or None,
        "node.bootstrap": list(flags["bootstrap"]) or None,
        "task.hooks": flags["hooks"],
        "train.steps": flags["steps"],
        "outer.every": flags.get("every"),
        **{f"rl.{name}": flags[name] for name in RL_OPTIONS},
        **limit_overrides(flags),
        **data_overrides(flags),
        **metrics_overrides(flags),
        **computing_overrides(flags),
        **outer_overrides(flags),
    }

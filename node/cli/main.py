"""The command line: ``shoal``. Flat verbs; results on stdout, everything else on stderr; exit codes in node/exit_codes.py.

Heavy imports (torch, hivemind) happen inside the commands, so that ``shoal --help`` and ``shoal id`` answer at once.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shoal.node.cli.chaos import chaos
from shoal.node.cli.doctor import doctor
from shoal.node.cli.init import init
from shoal.node.cli.invite import invite
from shoal.node.cli.merge import merge
from shoal.node.cli.options import (
    METRICS_OPTIONS,
    data_options,
    data_overrides,
    limit_options,
    limit_overrides,
    metrics_options,
    metrics_overrides,
    option_option,
    task_option,
)
from shoal.node.cli.pull import pull
from shoal.node.cli.seed import seed
from shoal.node.cli.sim import sim
from shoal.node.cli.status import status
from shoal.node.cli.verify import verify
from shoal.node.cli.watch import watch
from shoal.node.exit_codes import ExitCode, epilogue
from shoal.node.logs import log_to_stderr

SUGGEST_LOG = "run again with --verbose to see what happened"


def _rl_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of ``up``, ``join`` and ``demo`` for the task rl."""
    options = [
        click.option("--env", metavar="ENV", help="rl: strings, sapo9, a family of it, or FILE.py:CLASS.  [default: strings]"),
        click.option("--policy", metavar="POLICY", help="rl: tiny, tiny:HABIT, or hf:PATH_OR_NAME.  [default: tiny]"),
        click.option("--local", type=int, help="rl: own groups to learn from in a round.  [default: 4]"),
        click.option("--external", type=int, help="rl: other peers' groups to learn from in a round.  [default: 4]"),
        click.option("--group", type=int, help="rl: completions of each question.  [default: 8]"),
        click.option("--loss", metavar="LOSS", help="rl: sapo, tis, decoupled or positive.  [default: what suits the policy]"),
        click.option("--share-only", is_flag=True, default=None, help="rl: share rollouts, but do not learn."),
        click.option("--learn-only", is_flag=True, default=None, help="rl: learn, but share nothing."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


RL_OPTIONS = ("env", "policy", "local", "external", "group", "loss", "share_only", "learn_only")


def _node_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that ``up`` and ``join`` share."""
    options = [
        click.option("--name", help="Name that other peers see; also names the folder runs/NAME."),
        click.option("--device", help="auto, cpu, cuda, cuda:1 and so on, or mps.  [default: auto]"),
        click.option("--listen", multiple=True, metavar="MULTIADDR", help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001."),
        click.option("--announce", multiple=True, metavar="MULTIADDR", help="Address to tell others, behind a forwarded port."),
        click.option("--bootstrap", multiple=True, metavar="MULTIADDR", help="A seed (or member) to get in through."),
        click.option("--relay", metavar="auto|only|off", help="Be reached through a seed or the link's peers.  [default: auto]"),
        click.option("--folder", type=click.Path(path_type=Path), help="Where checkpoints and metrics go.  [default: runs/NAME]"),
        click.option("--identity", type=click.Path(path_type=Path), help="Key file.  [default: ~/.config/shoal/identity.key]"),
        click.option("--threads", type=int, help="Threads for computing on the CPU.  [default: half of the processors]"),
        click.option("--resume", is_flag=True, default=None, help="Continue from the newest checkpoint in the folder."),
        click.option(
            "--resume-from",
            type=click.Path(path_type=Path),
            metavar="CHECKPOINT",
            help="Go on from a checkpoint, or a node's newest one, in another swarm.",
        ),
        click.option("--slow-on-device", is_flag=True, default=None, help="Keep the slow weights on the device."),
        task_option(None),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout."),
        click.option("--verbose", is_flag=True, help="Log what the network does, on stderr."),
        # For `shoal demo`, which starts its nodes by these same commands.
        click.option("--baseline", is_flag=True, hidden=True),
        click.option("--keep-rounds", is_flag=True, hidden=True),
        click.option("--with-parent", type=int, hidden=True),
    ]
    for option in reversed(options):
        function = option(function)
    return data_options(function)


_set_option = click.option(
    "--set", "assigned", multiple=True, metavar="KEY=VALUE", help="A setting of examples/swarm.toml, such as outer.lr=0.5."
)


def _outer_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of ``up`` and ``demo`` about how to average."""
    options = [
        click.option(
            "--method",
            metavar="METHOD",
            help="How to average: noloco, local, gasloc (with one partner), diloco, diloco-hb, streaming, decoupled, eager, co2, "
            "sparseloco, sparta (over everyone), or none.  [default: noloco]",
        ),
        click.option(
            "--round", "length", metavar="LENGTH", help="Of a round: steps, tokens:N, seconds:S or seconds:auto.  [default: steps]"
        ),
        click.option("--codec", metavar="CODEC", help="Numbers on the wire: bfloat16, int8, e3m0+ef ...  [default: the method's]"),
        click.option("--robust", metavar="RULE", help="Against hostile peers: clipped-gossip or centered-clip.  [default: none]"),
        click.option("--finish", metavar="average|none", help="At the end, average the slow weights once more.  [default: none]"),
        click.option(
            "--verify",
            metavar="none|activations|training",
            help="Claim, and check others': with rl completions (activations), else inner steps (training).  [default: none]",
        ),
        click.option("--audit-rate", type=float, help="Share of the claims that are checked.  [default: 0.1]"),
        _set_option,
    ]
    for option in reversed(options):
        function = option(function)
    return function


OUTER_OPTIONS = ("method", "length", "codec", "finish", "robust", "verify", "audit_rate", "assigned")


def _outer_overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """What the options of ``_outer_options`` say, as dotted settings."""
    from shoal.node.config.settings import assignment

    named = {f"outer.{name}": flags.get(name) for name in ("method", "codec", "robust", "finish")}
    named["outer.round"] = flags.get("length")
    named |= {"verify.kind": flags.get("verify"), "verify.audit_rate": flags.get("audit_rate")}
    return {**dict(map(assignment, flags.get("assigned", ()))), **{key: value for key, value in named.items() if value is not None}}


@click.group(epilog="\b\n" + epilogue(), context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="shoal")
def cli() -> None:
    """Train one model together, on machines that share nothing but an ordinary internet link."""


for command in (verify, seed, invite, doctor, init, pull, chaos, watch, merge, status, sim):
    cli.add_command(command)


@cli.command()
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[SWARM.TOML]")
@click.option("--steps", type=int, help="Inner steps of every node; 0 trains until it is stopped.")
@click.option("--every", type=int, help="Inner steps between two exchanges.  [default: the method's]")
@click.option("--invite-only", is_flag=True, default=None, help="Let only those in whom you invite (shoal invite).")
@_outer_options
@_rl_options
@limit_options
@option_option
@metrics_options
@_node_options
def up(file: Path | None, **flags: Any) -> int:
    """Create a swarm, start a node in it, and print one link by which others join."""
    return _run_node(file, None, flags)


@cli.command()
@click.argument("link")
@click.option("--steps", type=int, help="Inner steps of this node.  [default: the swarm's]")
@_set_option
@_rl_options
@limit_options
@metrics_options
@_node_options
def join(link: str, **flags: Any) -> int:
    """Join the swarm of LINK and train with it."""
    return _run_node(None, link, flags)


@cli.command()
@click.option("--peers", type=click.IntRange(1, 64), default=4, show_default=True, help="Nodes to start.")
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True, help="Rounds to train.")
@click.option("--every", type=click.IntRange(1), default=25, show_default=True, help="Inner steps in a round.")
@_outer_options
@_rl_options
@metrics_options
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of weights, shards and pairing.")
@task_option("text")
@option_option
@click.option("--device", default="auto", show_default=True, help="Where the nodes train: auto, cpu, cuda, cuda:1 ... or mps.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the nodes' folders here.  [default: a temporary one]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
@click.option("--verbose", is_flag=True, help="Show what the nodes log.")
def demo(as_json: bool, verbose: bool, **options: Any) -> int:
    """Start a swarm of real nodes on this machine, train, and compare with training alone."""
    log_to_stderr(verbose)
    outer = {**_outer_overrides(options), **metrics_overrides(options)}
    rl = {f"rl.{name}": options.pop(name) for name in RL_OPTIONS}
    own = {name: value for name, value in options.items() if name not in (*OUTER_OPTIONS, *METRICS_OPTIONS)}
    if own["hooks"] == "rl":
        from shoal.node.demo import rl as rl_demo

        del own["hooks"], own["every"]
        report = rl_demo.run_demo(verbose=verbose, more={**outer, **rl}, **own)
        click.echo(json.dumps(report) if as_json else rl_demo.summary(report))
        return int(ExitCode.OK)
    from shoal.node.demo.demo import run_demo, summary

    report = run_demo(verbose=verbose, outer=outer, **own)
    click.echo(json.dumps(report) if as_json else summary(report))
    return int(ExitCode.OK)


def _look_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What commands take that look into a swarm without being of it."""
    for option in (
        click.option("--verbose", is_flag=True, help="Log what the network does, on stderr."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout."),
        click.argument("link"),
    ):
        function = option(function)
    return function


@cli.command()
@_look_options
def peers(link: str, as_json: bool, verbose: bool) -> int:
    """Show what the peers of the swarm of LINK are worth: reputation, claims, votes, and who is banned until when."""
    from shoal.swarm.access.link import Link

    parsed = Link.parse(link)
    log_to_stderr(verbose)
    from shoal.node.verify.peers import read_peers, summary

    report = read_peers(parsed)
    click.echo(json.dumps(report) if as_json else summary(report))
    return int(ExitCode.OK)


@cli.group("id")
def identity() -> None:
    """The key of this node, which is its name on the network."""


_path_option = click.option("--identity", "path", type=click.Path(path_type=Path), help="Key file.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@identity.command("show")
@_path_option
@_json_option
def id_show(path: Path | None, as_json: bool) -> int:
    """Print the peer id and where its key is."""
    from shoal.swarm.identity import Identity

    return _print_identity(Identity.load(path or _default_identity()), as_json)


@identity.command("new")
@_path_option
@_json_option
def id_new(path: Path | None, as_json: bool) -> int:
    """Make a new key; never overwrites one."""
    from shoal.swarm.identity import Identity

    return _print_identity(Identity.create(path or _default_identity()), as_json)


def _default_identity() -> Path:
    from shoal.node.config.settings import default_identity_path

    return default_identity_path()


def _print_identity(found: Any, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps({"peer": found.peer_id, "path": str(found.path)}))
    else:
        click.echo(f"{found.peer_id}\n{found.path}")
    return int(ExitCode.OK)


def _run_node(file: Path | None, link: str | None, flags: dict[str, Any]) -> int:
    from shoal.node.config.settings import load
    from shoal.node.runtime.signals import ShutdownSignals, end_with_parent

    shutdown = ShutdownSignals()
    shutdown.install()
    if flags["with_parent"]:
        end_with_parent(flags["with_parent"])
    settings = load(file, _overrides(flags))
    parsed = None
    if link is not None:
        from shoal.swarm.access.link import Link

        parsed = Link.parse(link)
    log_to_stderr(flags["verbose"])
    from shoal.node.runtime.display import make_display
    from shoal.node.runtime.node_run import NodeRun

    as_json = flags["as_json"]
    run = NodeRun(
        settings,
        parsed,
        make_display(),
        shutdown,
        on_link=lambda made: click.echo(str(made), err=as_json) if link is None else None,
        baseline=flags["baseline"],
        keep_rounds=flags["keep_rounds"],
    )
    result = run.run()
    if as_json:
        from dataclasses import asdict

        click.echo(json.dumps(asdict(result)))
    if result.not_saved is not None:
        from shoal.node.checkpoint.store import CheckpointError

        raise CheckpointError(result.not_saved)
    return int(ExitCode.INTERRUPTED if result.interrupted else ExitCode.OK)


def _overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags as dotted settings; those not given are None or empty and change nothing."""
    names = ("name", "device", "relay", "folder", "identity", "threads", "resume", "resume_from", "slow_on_device")
    return {
        **{f"node.{name}": flags[name] for name in names},
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
        **_outer_overrides(flags),
    }


def main() -> None:
    """Entry point of ``shoal``: runs a command and turns how it ended into a documented exit code."""
    from shoal.swarm.errors import ShoalError

    try:
        code = cli.main(standalone_mode=False)
    except ShoalError as error:
        print(f"Error: {error}", file=sys.stderr)
        code = getattr(error, "exit_code", ExitCode.BAD_INPUT)
    except click.ClickException as error:
        error.show()
        code = ExitCode.BAD_INPUT
    except (KeyboardInterrupt, click.Abort):
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        code = ExitCode.OK
    except Exception:
        traceback.print_exc()
        print("Error: this is a bug in shoal: please report it with the lines above.", file=sys.stderr)
        code = ExitCode.INTERNAL
    sys.exit(int(code or 0))


if __name__ == "__main__":
    main()

"""A swarm's view as text: headline, table, curves and exchanges. Names come from strangers, so no markup is parsed."""

from __future__ import annotations

import math

from rich.text import Text

from shoal.node.watch.curves import mean_curve
from shoal.node.watch.plot import colour, plot
from shoal.node.watch.sentences import fault_label
from shoal.node.watch.swarm_view import SwarmView
from shoal.swarm.topics.status import TAIL, lag_label, reach_label

RECENT = 32  # rounds of which the picture of exchanges is
SHADES = " ░▒▓█"
COLUMNS = (
    "peer",
    "state",
    "round",
    "step",
    "loss",
    "with",
    "steps/s",
    "tokens/s",
    "lag",
    "reach",
    "up",
    "down",
    "reward",
    "faults",
    "heard",
)


def number(value: float | None, form: str = ".3f") -> str:
    """Format ``value``, or - if there is none."""
    return format(value, form) if value is not None and math.isfinite(value) else "-"


def nbytes(value: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def tokens(per_s: float, mfu: float | None) -> str:
    """Format tokens a second without waiting, and model FLOPs utilisation where it is known."""
    return "-" if not per_s else f"{per_s:,.0f}" + ("" if mfu is None else f" ({100 * mfu:.0f} % MFU)")


def plural(count: int, word: str) -> str:
    """Format ``count`` things."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def headline(view: SwarmView) -> str:
    """Format the swarm in one line."""
    totals = view.totals()
    title = view.title
    parts = [f"{title.name} · {title.task} · {title.method}" if title else (view.swarm[:12] + "…" if view.swarm else "shoal watch")]
    if not totals["known"]:
        parts.append(plural(totals["connected"], "connection") + ", no status yet")
    else:
        low, high = totals["round_min"], totals["round_max"]
        about = f"about {totals['size']:,} peers (estimated from {totals['peers']})"
        parts.append(about if totals["sampled"] else f"{totals['peers']} of {totals['known']} peers")
        if low is not None:
            parts.append(f"round {low}" if low == high else f"rounds {low} to {high}")
        parts.append(f"loss {number(totals['loss'])}")
        if totals["reward"] is not None:
            parts.append(f"reward {number(totals['reward'])}")
        parts.append(f"{totals['steps_per_s']:.1f} steps/s")
        if totals["tokens_per_s"]:
            parts.append(f"{totals['tokens_per_s']:,.0f} tokens/s")
        by = " by those" if totals["sampled"] else ""
        parts.append(f"{nbytes(totals['sent_per_s'])}/s sent, {nbytes(totals['sent'])} in all{by}")
        if totals["rollouts_own"] is not None:
            parts.append(f"groups learnt: {totals['rollouts_own']} own, {totals['rollouts_foreign']} of others")
        if totals["claims"] is not None:
            parts.append(f"{totals['claims']} claims, {totals['checked']} checks, {totals['invalid']} invalid")
        parts.append(plural(totals["connected"], "connection"))
    if totals["refused"]:
        parts.append(plural(totals["refused"], "message") + " refused")
    return "   ".join(parts)


def rows(view: SwarmView) -> list[tuple[str, list[Text]]]:
    """Return for each peer its id and a cell for each of `COLUMNS`."""
    found = []
    for index, (key, peer) in enumerate(view.rows()):
        status, style = peer.status, "" if peer.here else "dim"
        faults = ", ".join(fault_label(kind, count) for kind, count in status.faults)
        cells = [
            Text(status.name, style=colour(index) if peer.here else "dim"),
            *(
                Text(text, style=style)
                for text in (
                    peer.doing,
                    str(status.round),
                    str(status.step),
                    number(status.loss),
                    ", ".join(view.name(tail) for tail in peer.partners[:3]) + (" …" if len(peer.partners) > 3 else "") or "-",
                    number(status.steps_per_s, ".1f"),
                    tokens(status.tokens_per_s, status.mfu),
                    lag_label(status.lag, status.lag_auto, status.late),
                    reach_label(status.reach, status.throughput),
                    nbytes(peer.sent_rate) + "/s",
                    nbytes(peer.received_rate) + "/s",
                    number(status.reward),
                    faults or "-",
                    f"{max(view.now - peer.heard, 0):.0f} s ago",
                )
            ),
        ]
        found.append((key, cells))
    return found


def losses(view: SwarmView, width: int, height: int) -> Text:
    """Plot the smoothed loss of each peer over the rounds, and on top the mean."""
    curves = [peer.loss.smooth() for _, peer in view.rows()]
    return plot(curves, width, height, mean_curve(curves) if len(curves) > 1 else (), axis="round")


def exchanges(view: SwarmView, width: int, height: int) -> Text:
    """Draw the exchanges of the newest rounds: a shade for each pair, the darker the more."""
    shown = view.rows()[: max(min(height - 1, (width - 10) // 2), 0)]
    if not shown:
        return Text("nobody yet", style="dim")
    counts = view.pairs(RECENT)
    most = max(counts.values(), default=0)
    tails = [key[-TAIL:] for key, _ in shown]
    text = Text(no_wrap=True, overflow="crop")
    text.append(" " * 10)
    for index in range(len(shown)):
        text.append(f"{index % 100:<2}", style=colour(index))
    for index, (_, peer) in enumerate(shown):
        text.append("\n")
        text.append(f"{peer.status.name[:6]:<6} {index % 100:>2} ", style=colour(index))
        for other in tails:
            low, high = sorted((tails[index], other))
            count = counts.get((low, high), 0)
            shade = SHADES[math.ceil(count * (len(SHADES) - 1) / most)] if count else ("·" if other != tails[index] else "╲")
            text.append(shade * 2 if count else f"{shade} ", style="" if count else "dim")
    return text

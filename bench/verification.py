"""What fingerprints tell apart: honest claims and ten ways of cheating, for provers and verifiers
of three dtypes.

    python bench/verification.py --claims 50 --json
    python bench/verification.py --claims 256 --honest 10000 --calibrate 10000 --votes 1000000 \
        --jobs 2 \
        --keep FOLDER --figure docs/verification.svg --into bench/results/tables.md
    python bench/verification.py --sequential --json
        (all claims of a peer; see _verification_sequential.py)

A real model is another benchmark's, verification_135m.py.

A claim is a text, drawn with a KV cache beside others, and its two proofs: of activations and of
sampling. Each pair of dtypes is calibrated with honest claims; then fresh ones are tested, and
cheats. A claim is refused if either proof is. The vote is the majority of three verifiers, one of
each dtype. Everything is done at temperature 1 and then greedily (with a tenth of the honest
claims). A rate's 95 % interval is Clopper's and Pearson's.

"honest_false_positive_rate" pools pairs of the same dtype and bf16 with fp32, at temperature 1;
"detection" is that of the vote, "detection_same_dtype" that of one verifier of the prover's dtype,
both pooled over dtypes and temperatures.

The costs are relative to generating one claim alone, the least of several runs: making a proof of
activations, and verifying both proofs. The tiny model is so small that generating is mostly Python,
and so is verifying.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

if (
    not __package__
):  # run as a file: its folder comes first on the path, where this very file hides the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import _verification_sequential as sequential
from bench import votes
from bench._interval import rate_interval
from bench._verification_claims import ACTIVATIONS, SAMPLING, Plan, Scores, measure
from bench._verification_table import BEGIN, END, into, markdown
from bench._verification_tiny import Tiny
from bench._verification_world import CHEATS, DTYPES, World, honest, seed_of
from shoal.verification.fingerprints.sampling import Drawn, margins

NAMED = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp32", "bf16")]
Found = dict[tuple[str, float], Scores]
"""By the prover's dtype and temperature."""


def one(
    policy: str,
    prover: str,
    verifiers: list[str],
    temperature: float,
    plan: Plan,
    keep: Path | None,
) -> Scores:
    """``measure``, or what an earlier run with the same settings kept of it."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    numbers = "-".join(f"{value:g}" for value in (*astuple(plan), temperature))
    kept = (
        keep / f"{Path(policy).stem}-{prover}-{'.'.join(verifiers)}-{numbers}.json"
        if keep
        else None
    )
    if kept and kept.exists():
        return Scores(**json.loads(kept.read_text(encoding="utf-8")))
    found = measure(Tiny(), prover, verifiers, temperature, plan)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(found)), encoding="utf-8")
    print(
        f"{policy}, {prover}, temperature {temperature:g}: {time.perf_counter() - begin:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return found


def rate(scores: Iterable[float]) -> dict[str, Any]:
    """Of refusals."""
    refused = [score > 0 for score in scores]
    return {
        "rate": sum(refused) / len(refused),
        "of": len(refused),
        "interval": rate_interval(sum(refused), len(refused)),
    }


def voted(by_verifier: dict[str, list[float]]) -> list[float]:
    """The score that most verifiers reach: refused by the majority if above 0."""
    return [sorted(scores)[len(scores) // 2] for scores in zip(*by_verifier.values(), strict=True)]


def table(found: Found) -> dict[str, Any]:
    """All rates: by pair, by vote, and pooled."""
    rows: dict[str, Any] = {}
    for (prover, temperature), scores in found.items():
        sides = {f"{prover} -> {verifier}": verifier for verifier in scores.honest} | {
            f"{prover} -> vote": ""
        }
        for title, verifier in sides.items():
            rows[f"{title}, temperature {temperature:g}"] = {
                "honest": rate(scores.honest[verifier] if verifier else voted(scores.honest)),
                "detection": {
                    name: rate(of[verifier] if verifier else voted(of))["rate"]
                    for name, of in scores.cheats.items()
                },
                "warning": scores.warning,
            }
    named = [
        score
        for p, v in NAMED
        for score in (found[p, 1.0].honest.get(v, []) if (p, 1.0) in found else [])
    ]
    pooled = rate(named)
    by_vote = {
        name: rate(score for of in found.values() for score in voted(of.cheats[name]))
        for name in CHEATS
    }
    same = {
        name: rate(score for (prover, _), of in found.items() for score in of.cheats[name][prover])
        for name in CHEATS
    }
    return {
        "honest_false_positive_rate": pooled["rate"],
        "honest_claims": pooled["of"],
        "honest_interval": pooled["interval"],
        "honest_vote": rate(
            score for (_, heat), of in found.items() if heat for score in voted(of.honest)
        ),
        "detection": {name: row["rate"] for name, row in by_vote.items()},
        "detection_interval": {name: row["interval"] for name, row in by_vote.items()},
        "detection_same_dtype": {name: row["rate"] for name, row in same.items()},
        "detection_same_dtype_interval": {name: row["interval"] for name, row in same.items()},
        "detection_claims": next(iter(by_vote.values()))["of"],
        "pairs": rows,
    }


def least_s(job: Callable[[], Any], times: int = 5) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        job()
        found.append(time.perf_counter() - begin)
    return min(found)


def costs(world: World, length: int) -> dict[str, float]:
    """Of one claim alone, in float32."""
    model = world.model(torch.float32)
    asked = world.prompts([0])
    write = honest(world, model, length)
    tokens, states = write([0], 1.0)
    proof = ACTIVATIONS.make(states[0])

    def examine() -> None:
        own, logits = world.read(model, asked, tokens)
        ACTIVATIONS.compare(proof, own[0])
        SAMPLING.measured(margins(Drawn(tokens[0], logits[0], seed_of(0))))

    generating = least_s(lambda: write([0], 1.0))
    return {
        "proof_bytes_per_token": len(proof) / length,
        "proof_cost": least_s(lambda: ACTIVATIONS.make(states[0]), 20) / generating,
        "verify_cost": least_s(examine) / generating,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="tiny", choices=["tiny"], help="the policy")
    parser.add_argument(
        "--claims", type=int, default=50, help="of each cheat, dtype and temperature"
    )
    parser.add_argument(
        "--honest",
        type=int,
        help="fresh honest claims of each dtype; as many as --claims if not given",
    )
    parser.add_argument(
        "--calibrate", type=int, default=200, help="honest claims to calibrate with, at least 20"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of a claim, at most 240")
    parser.add_argument("--dtypes", default="fp32,bf16,fp16", help="of provers and verifiers")
    parser.add_argument(
        "--rate",
        type=float,
        default=1e-4,
        help="of false alarms, as stated to each of the two tests",
    )
    parser.add_argument("--votes", type=int, default=100_000, help="simulated votes in each row")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--keep",
        type=Path,
        help="keep the scores of each dtype in this folder, and go on from there",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        help="draw detection against false alarms into this file (needs matplotlib)",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PAGE",
        help=f"write the tables between {BEGIN} and {END} of a page",
    )
    parser.add_argument(
        "--sequential",
        action="store_true",
        help="claims until the odds against a peer are an alarm",
    )
    parser.add_argument(
        "--peers", type=int, default=300, help="sequential: honest peers of each pair of dtypes"
    )
    parser.add_argument(
        "--cheats", type=int, default=30, help="sequential: peers of each cheat and pair"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    options.honest = options.claims if options.honest is None else options.honest
    bounds = (
        ("claims", 1, 50_000),
        ("honest", 1, 50_000),
        ("calibrate", 20, 50_000),
        ("tokens", 1, 240),
        ("rate", 1e-9, 0.5),
    )
    simulated = (("peers", 1, 10**6), ("cheats", 1, 10**6))
    for name, low, high in (*bounds, *simulated, ("votes", 1, 10**8), ("jobs", 1, 64)):
        if not low <= getattr(options, name) <= high:
            parser.error(f"--{name} must be from {low} to {high}, not {getattr(options, name)}")
    options.dtypes = options.dtypes.split(",")
    if not options.dtypes or not set(options.dtypes) <= set(DTYPES):
        parser.error(f"--dtypes must be some of {','.join(DTYPES)}, separated by commas")
    return options


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    if options.sequential:
        shown = sequential.result(sequential.measured(), options.peers, options.cheats)
        print(json.dumps(shown) if options.json else sequential.markdown(shown))
        return
    plan = Plan(options.claims, options.honest, options.calibrate, options.tokens, options.rate)
    greedy = Plan(
        options.claims,
        max(1, options.honest // 10),
        max(20, options.calibrate // 10),
        options.tokens,
        options.rate,
    )
    spent = costs(Tiny(), options.tokens)
    kinds = [(prover, heat) for heat in (1.0, 0.0) for prover in options.dtypes]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(
                one,
                options.policy,
                prover,
                options.dtypes,
                heat,
                plan if heat else greedy,
                options.keep,
            )
            for prover, heat in kinds
        ]
        found: Found = dict(zip(kinds, (job.result() for job in waiting), strict=True))
    how = {
        name: getattr(options, name) for name in ("policy", "claims", "calibrate", "tokens", "rate")
    }
    machine = {"python": platform.python_version(), "torch": torch.__version__}
    result = {**how, **machine, **spent, **table(found), "vote": votes.rows(options.votes)}
    tables = markdown(result)
    print(tables, file=sys.stderr)
    if options.into:
        try:
            page = into(options.into.read_text(encoding="utf-8"), tables)
        except (OSError, ValueError) as error:
            raise SystemExit(f"bench: {options.into}: {error}.") from None
        options.into.write_text(page, encoding="utf-8")
    if options.figure:
        from bench._verification_figure import draw

        draw(found, options.figure)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

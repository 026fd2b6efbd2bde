"""How large patches of a policy are in a run of reinforcement learning: bytes by the learning rate.

    python bench/patches.py --rates 1e-4 1e-5 1e-6 --solved 150 --json

One node of bench/sapo.py learns by itself, all weights of the policy `small` (or hf:DIR). After
each of --updates updates its patch is made, and applied to the last bit. "changed" is the share of
values whose bits in bfloat16 changed, "seconds_100_mbit" the time that a mean patch, and the whole,
take at 100 Mbit/s: bytes by rate.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file: the folder above is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._language import Learner, prepare, questions
from bench._world import Group, Settings
from shoal.optim.rl.losses import LOSSES
from shoal.optim.weight_patch import VALUE_BYTES, apply, bits_of, encode

ASKED, LOCAL, GROUP = 400, 8, 8  # questions in all, and of a round; completions of each
MAX_ROUNDS = 20  # for an update
MBIT_BYTES = 125_000
LINK_MBIT = 100


def measure(settings: Settings, updates: int) -> dict[str, Any]:
    """Return the sizes of the patches of so many updates."""
    policy, env = prepare(settings)
    asked = questions(env, 0, ASKED)
    learner = Learner(copy.deepcopy(policy), env, asked, settings, seed=0)
    weights = [each for each in learner.policy.module.parameters() if each.requires_grad]
    draws = torch.Generator().manual_seed(0)
    bits = bits_of(weights)
    sizes: list[int] = []
    changed: list[float] = []
    for _ in range(MAX_ROUNDS * updates):
        drawn = torch.randperm(len(asked), generator=draws)[:LOCAL].tolist()
        written = zip(drawn, learner.complete(drawn, GROUP), strict=True)
        groups = [Group(question, "", completions) for question, completions in written]
        learner.learn(groups, [learner.judge(one.question, one.completions) for one in groups])
        newer = bits_of(weights)
        if torch.equal(newer, bits):
            continue
        patch = encode(bits, newer)
        assert torch.equal(apply(patch, bits), newer)
        sizes.append(len(patch))
        changed.append(round(float((newer != bits).float().mean()), 4))
        bits = newer
        if len(sizes) == updates:
            break
    else:
        raise SystemExit("patches: hardly a group's rewards differ: show it more (--solved)")
    whole = VALUE_BYTES * bits.numel()
    mean = statistics.fmean(sizes)
    rate = LINK_MBIT * MBIT_BYTES
    return {
        "rate": settings.rate,
        "whole": whole,
        "patches": sizes,
        "changed": changed,
        "times_smaller": round(whole / mean, 1),
        "seconds_100_mbit": [round(mean / rate, 4), round(whole / rate, 4)],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="small", help="small or hf:DIR")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 1e-5, 1e-6])
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--env", default="families", help="as of bench/sapo.py")
    parser.add_argument("--base", type=Path, default=Path("runs/sapo-small"), help="as there")
    parser.add_argument("--solved", type=int, default=900, help="as there")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings = Settings(
        policy=options.policy,
        nodes=1,
        loss=LOSSES["sapo"],
        rate=None,
        env=options.env,
        base=options.base,
        solved=options.solved,
    )
    rows = [measure(replace(settings, rate=rate), options.updates) for rate in options.rates]
    for row in rows:
        patches, whole = row["seconds_100_mbit"]
        print(
            f"rate {row['rate']:g}: {100 * statistics.fmean(row['changed']):.1f} % changed, "
            f"{statistics.fmean(row['patches']):,.0f} bytes in place of {row['whole']:,} "
            f"({row['times_smaller']:g} times fewer), {patches:g} s in place of {whole:g}",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps({"bench": "patches", "policy": options.policy, "rows": rows}))


if __name__ == "__main__":
    main()

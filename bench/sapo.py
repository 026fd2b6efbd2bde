"""What learning from the swarm's rollouts is worth: I own and J foreign groups a round, with a
policy small enough to know exactly.

    python bench/sapo.py --nodes 4 --seeds 5 --json

Every node answers I random questions G times each and publishes the groups; then it learns from
these I and from at most J of the others' groups, picked by `optim.rollouts.select`, with rewards
that it works out itself. "cumulative" is the exact probability of a right answer, mean over all
questions and nodes, summed over the rounds; "final" is that after the last one. Both are means over
the seeds; "sd" is the standard deviation of "cumulative" over the seeds (0 for one seed).

With --late N the groups of each other node come 0 to N rounds late, drawn anew each round; with
--behind M those are left out that their author's policy wrote more than M versions before its
newest (8 in a node).

"poison" is 4/4 in which one node lies: it has a wrong answer to every question, puts that in place
of one completion of each of its groups, so that its lie never lacks a reward, learns by it, and
publishes it; counted are the others. "trusting" is the same when they take the sender's word for
the answer, as the public code does (genrl 0.3.0).

The linear policy is a softmax over 32 answers to 60 questions. Twelve of its features are random
and shared by all questions, so that what is learnt about one disturbs or helps the others. No
network, no clock: the same numbers every time.

Transformers (bench/_language.py): tiny is that of `shoal demo --task rl`, warm start included; its
"cumulative" and "final" are of greedy answers to held-out questions, and its loss is "positive".
`small` and `hf:DIR` are language models:

    python bench/sapo.py --policy small --seeds 6 --resume FILE --json
    python bench/sapo.py --policy hf:DIR --solved 40 --base FOLDER --device cuda --at-once 6 \
        --rounds 100 --seeds 2 --json

Their "cumulative" is the mean reward of what a node wrote in a round, summed over the rounds, as in
the paper, and "final" is of greedy answers to held-out questions; --rows has others, as 4/0, which
is 4/4 without the others. "interval" is that of Student's t for the mean, at 95 %; "sums" are those
of the seeds; "ratio" has the geometric mean of the seeds' ratios to the first row, and its
interval. "tokens" are those that all nodes wrote in a run. "seconds" are those of the processor for
a round of all nodes, "parts" where they go, "tokens_s" the tokens written in a second of writing,
"wall" what a round takes by the first row's, also if writing took another share of that.
With --unlike every other node has a smaller policy, is slower or asks questions of other families
(bench/_world.py), "kinds" has both kinds, and a row as 4/4+baseline one of the changes that HACPO
makes for others' groups (bench/_hacpo.py):

    python bench/sapo.py --policy tiny --unlike size --rows 8/0,4/4,4/4+baseline,4/4+clip --json

With --resume each run is a line of FILE, and not made again.
`hf:DIR` first learns from --solved batches of solved questions, all its weights, and is kept in
--base; then only an adapter learns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:  # run as a file: the folder above is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._hacpo import CHANGES, UNCHANGED, Capability, Correction
from bench._language import Learner, is_smaller, language_world, prepare, tiny_world
from bench._world import UNLIKE, Completion, Group, Settings, World, questions_of, share_of
from shoal.optim.rl.advantages import group_advantages
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.losses import LOSSES, MEANS
from shoal.optim.rl.objective import policy_loss
from shoal.optim.rollout_selection import Candidate, select

SHARES = ((8, 0), (6, 2), (4, 4), (2, 6))
LANGUAGE_SHARES = ((8, 0), (4, 4), (2, 6))
WRITING_SHARES = (0.5, 0.8, 0.95)
"""Of the seconds of a round, in the first row, for which "wall" says what another row takes."""
SMALL_SOLVED = 900  # batches of solved questions that the small policy begins with
POISONED = (4, 4)
GROUP = 8  # completions of a question
RATE = 8.0
QUESTIONS, ANSWERS, FEATURES = 60, 32, 12


class Linear:
    """A softmax of features times weights, trained by plain gradient ascent.

    A completion is one token, the number of an answer.
    """

    def __init__(self, features: Tensor, right: Tensor, settings: Settings, seed: int) -> None:
        self.features, self.right = features, right
        self.loss, self.per = settings.loss, settings.per
        self.weights = torch.zeros(
            features.shape[1], ANSWERS, dtype=torch.float64, requires_grad=True
        )
        self.optimizer = torch.optim.SGD([self.weights], lr=settings.rate or RATE)
        self.generator = torch.Generator().manual_seed(seed)

    def _log_probs(self) -> Tensor:
        return (self.features @ self.weights).log_softmax(1)

    def complete(self, questions: Sequence[int], count: int) -> list[tuple[Completion, ...]]:
        with torch.no_grad():
            every = self._log_probs()
        return [self._sample(every[question], count) for question in questions]

    def _sample(self, known: Tensor, count: int) -> tuple[Completion, ...]:
        drawn = torch.multinomial(known.exp(), count, replacement=True, generator=self.generator)
        return tuple(Completion(str(int(number)), (float(known[number]),)) for number in drawn)

    def learn(
        self,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[float]],
        correction: Correction = UNCHANGED,
    ) -> None:
        written = [
            (network, group.question, one)
            for network, group in enumerate(groups)
            for one in group.completions
        ]
        places, questions = (torch.tensor([entry[part] for entry in written]) for part in (0, 1))
        tokens = torch.tensor([int(one.text) for _, _, one in written])
        behaviour = torch.tensor([one.log_probs for _, _, one in written], dtype=torch.float64)
        flat = torch.tensor([value for values in rewards for value in values], dtype=torch.float64)
        new = self._log_probs()[questions, tokens][:, None]
        mask = torch.ones_like(new, dtype=torch.bool)
        advantages = correction.advantages(group_advantages(flat, places), rewards)
        loss = correction.loss(self.loss, rewards)
        batch = Completions(new, new.detach(), mask, advantages, behaviour)
        self.optimizer.zero_grad()
        torch.autograd.backward(policy_loss(batch, loss, per=self.per, max_tokens=1))
        self.optimizer.step()

    def accuracy(self, last: bool = False) -> float:
        del last
        with torch.no_grad():
            return float(self._log_probs().gather(1, self.right[:, None]).exp().mean())


def linear_world(settings: Settings, seed: int) -> World:
    generator = torch.Generator().manual_seed(seed)
    shared = (
        torch.randn(QUESTIONS, FEATURES, generator=generator, dtype=torch.float64) / FEATURES**0.5
    )
    own = torch.eye(QUESTIONS, dtype=torch.float64)
    halved = torch.eye(QUESTIONS // 2, dtype=torch.float64).repeat(2, 1)
    right = torch.randint(ANSWERS, (QUESTIONS,), generator=generator)
    wrong = (right + torch.randint(1, ANSWERS, (QUESTIONS,), generator=generator)) % ANSWERS
    seeds = torch.randint(2**62, (settings.nodes,), generator=generator).tolist()
    policies = []
    for node, number in enumerate(seeds):
        # Of a smaller policy two questions share each own feature.
        last = halved if is_smaller(settings, node) else own
        features = torch.cat([settings.overlap * shared, last], 1)
        policies.append(Linear(features, right, settings, number))
    return World(
        tuple(map(str, right.tolist())),
        tuple(map(str, wrong.tolist())),
        tuple(policies),
        families=tuple(range(QUESTIONS)),
    )


WORLDS: dict[str, Callable[[Settings, int], World]] = {"linear": linear_world, "tiny": tiny_world}
"""By the name of the policy, if it is no language model: makes a world from the settings and a
seed.
"""


def rewards_of(world: World, group: Group, answer: str) -> tuple[float, ...]:
    if world.judge is not None:
        return world.judge(group.question, group.completions)
    return tuple(float(one.text == answer) for one in group.completions)


def train(
    world: World,
    share: tuple[int, int],
    rounds: int,
    seed: int,
    liar: int | None = None,
    trusting: bool = False,
    late: int = 0,
    behind: int | None = None,
    unlike: str | None = None,
    changes: frozenset[str] = frozenset(),
) -> tuple[list[list[float]], list[float]]:
    """Each honest node's accuracy by rounds, before it learns, and in the end."""
    nodes = range(len(world.policies))
    honest = [node for node in nodes if node != liar]
    beliefs = [world.wrong if node == liar else world.right for node in nodes]
    shares = [share_of(node, share, unlike) for node in nodes]
    asked = [questions_of(node, world, unlike) for node in nodes]
    known = [Capability() for _ in nodes]
    draws, delays = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    before: list[list[list[Group]]] = []

    history: list[list[float]] = [[] for _ in honest]
    for round in range(rounds):
        written: list[list[Group]] = [[] for _ in nodes]
        for node in nodes:
            drawn = torch.randperm(len(asked[node]), generator=draws)[: shares[node][0]].tolist()
            questions = [asked[node][number] for number in drawn]
            for question, completions in zip(
                questions, world.policies[node].complete(questions, GROUP), strict=True
            ):
                if node == liar:
                    completions = (
                        replace(completions[0], text=world.wrong[question]),
                        *completions[1:],
                    )
                written[node].append(Group(question, beliefs[node][question], completions))
        before.append(written)
        for place, node in enumerate(honest):
            history[place].append(world.policies[node].accuracy())
        for node in nodes:
            others = [author for author in nodes if author != node]
            made = dict(
                zip(
                    others,
                    (round - torch.randint(late + 1, (len(others),), generator=delays))
                    .clamp(0)
                    .tolist(),
                    strict=True,
                )
            )
            pool = [(author, group) for author in others for group in before[made[author]][author]]
            answers = [
                group.answer if trusting and node != liar else beliefs[node][group.question]
                for _, group in pool
            ]
            judged = [
                rewards_of(world, group, answer)
                for (_, group), answer in zip(pool, answers, strict=True)
            ]
            candidates = [
                Candidate(
                    f"{author}:{group.question}", str(author), round, rewards, round - made[author]
                )
                for (author, group), rewards in zip(pool, judged, strict=True)
            ]
            picked = select(
                candidates,
                shares[node][1],
                seed=seed * len(nodes) + node,
                round=round,
                max_age=0,
                max_behind=behind,
            ).indices
            groups = [*written[node], *(pool[network][1] for network in picked)]
            own = [rewards_of(world, group, group.answer) for group in written[node]]
            rewards = own + [judged[network] for network in picked]
            correction = UNCHANGED
            if changes:
                seen = [(node, one) for one in own]
                seen += [(author, one) for (author, _), one in zip(pool, judged, strict=True)]
                authors = [pool[network][0] for network in picked]
                correction = correction_of(known[node], node, seen, authors, changes)
            world.policies[node].learn(groups, rewards, correction)
    return history, [world.policies[node].accuracy(last=True) for node in honest]


def correction_of(
    known: Capability,
    node: int,
    seen: Sequence[tuple[int, Sequence[float]]],
    authors: Sequence[int],
    changes: frozenset[str],
) -> Correction:
    """Return the changes to an update from a node's own groups and then others', by ``authors``.

    ``seen``: author and rewards of each group of the round, from which capabilities follow.
    """
    for author in sorted({author for author, _ in seen}):
        known.add(author, [rewards for other, rewards in seen if other == author])
    own = sum(author == node for author, _ in seen)
    ratios: list[float | None] = [None] * own
    ratios += [known.ratio(author, node) for author in authors]
    return Correction(changes, tuple(ratios))


def run(
    make: Callable[[int], World], seed: int, rounds: int, share: tuple[int, int], **faults: Any
) -> dict[str, Any]:
    """One run: the accuracy by rounds, "final", and what a language model's nodes spent
    together.
    """
    world = make(seed)
    histories, finals = train(world, share, rounds, seed, **faults)
    learners = [policy for policy in world.policies if isinstance(policy, Learner)]
    parts = (
        {part: sum(one.seconds[part] for one in learners) for part in ("write", "judge", "learn")}
        if learners
        else {}
    )
    found = {
        "history": [statistics.fmean(each) for each in zip(*histories, strict=True)],
        "final": statistics.fmean(finals),
        "parts": parts,
        "tokens": sum(one.tokens for one in learners),
    }
    if faults.get("unlike"):
        kinds = [
            {
                "history": [
                    statistics.fmean(each) for each in zip(*histories[kind::2], strict=True)
                ],
                "final": statistics.fmean(finals[kind::2]),
                "tokens": sum(one.tokens for one in learners[kind::2]),
            }
            for kind in (0, 1)
        ]
        found["kinds"] = kinds
    return found


def run_one(settings: Settings, seed: int, rounds: int, case: Mapping[str, Any]) -> dict[str, Any]:
    """One run, in a process of its own or not."""
    torch.set_num_threads(1)
    make = partial(WORLDS.get(settings.policy, language_world), settings)
    return run(make, seed, rounds, **case)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean, by Student's t; None for one value."""
    if len(values) < 2:
        return None
    from scipy.stats import t  # here, because it takes most of a second

    error = statistics.stdev(values) / len(values) ** 0.5
    off = float(t.isf(0.025, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return mean - off, mean + off


def ratio_of(sums: Sequence[float], base: Sequence[float]) -> dict[str, Any] | None:
    """Return the geometric mean of the ratios to ``base``, seed by seed, and its 95 % interval.

    None where a seed had no reward at all.
    """
    if not all([*sums, *base]):
        return None
    logs = [math.log(one / other) for one, other in zip(sums, base, strict=True)]
    bounds = interval(logs)
    return {
        "mean": round(math.exp(statistics.fmean(logs)), 4),
        "interval": [round(math.exp(bound), 4) for bound in bounds] if bounds else None,
    }


def row_of(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table, from the runs with each seed; ``base``: those of the first row."""
    sums = [sum(run["history"]) for run in runs]
    mean, sd = statistics.fmean(sums), statistics.stdev(sums) if len(runs) > 1 else 0.0
    row: dict[str, Any] = {
        "cumulative": round(mean, 3),
        "sd": round(sd, 3),
        "interval": None,
        "final": round(statistics.fmean(run["final"] for run in runs), 4),
    }
    bounds = interval(sums)
    if bounds is not None:
        row["interval"] = [round(bound, 3) for bound in bounds]
    if runs[0]["parts"]:
        rounds = sum(len(run["history"]) for run in runs)
        spent = {part: sum(run["parts"][part] for run in runs) for part in runs[0]["parts"]}
        row["sums"] = [round(each, 3) for each in sums]
        row["ratio"] = ratio_of(sums, [sum(run["history"]) for run in base])
        row["tokens"] = round(statistics.fmean(run["tokens"] for run in runs))
        row["tokens_s"] = round(sum(run["tokens"] for run in runs) / spent["write"], 1)
        row["seconds"] = round(sum(spent.values()) / rounds, 3)
        row["parts"] = {part: round(seconds / rounds, 3) for part, seconds in spent.items()}
        row["wall"] = wall_of(runs, base)
    return row


def seconds_of(runs: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the seconds of a round that go into writing, and into all else."""
    rounds = sum(len(run["history"]) for run in runs)
    write = sum(run["parts"]["write"] for run in runs)
    whole = sum(sum(run["parts"].values()) for run in runs)
    return write / rounds, (whole - write) / rounds


def wall_of(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return a round's seconds by those of the first row: of writing, of the rest, as measured, and
    where writing were so large a share of the first row's round.
    """
    write, rest = (
        one / other for one, other in zip(seconds_of(runs), seconds_of(base), strict=True)
    )
    found = {
        "write": write,
        "rest": rest,
        "measured": sum(seconds_of(runs)) / sum(seconds_of(base)),
    }
    for share in WRITING_SHARES:
        found[f"write {share}"] = share * write + (1 - share) * rest
    return {name: round(ratio, 3) for name, ratio in found.items()}


def kinds_of(
    runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], unlike: str
) -> dict[str, Any]:
    """Return what each kind of nodes reached, by its name."""
    found = {}
    for kind, name in enumerate(UNLIKE[unlike]):
        each = [run["kinds"][kind] for run in runs]
        sums = [sum(one["history"]) for one in each]
        first = [sum(run["kinds"][kind]["history"]) for run in base]
        finals = [one["final"] for one in each]
        found[name] = {
            "cumulative": round(statistics.fmean(sums), 3),
            "ratio": ratio_of(sums, first),
            "final": round(statistics.fmean(finals), 4),
            "final_ratio": ratio_of(finals, [run["kinds"][kind]["final"] for run in base]),
            "tokens": round(statistics.fmean(one["tokens"] for one in each)),
        }
    return found


def draw(curves: Mapping[str, Sequence[float]], about: str, path: Path, label: str) -> None:
    """Curves by rounds, one line for each row.

    ImportError without matplotlib, OSError or ValueError if it cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "shoal"  # the same file from the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for name, curve in curves.items():
        axes.plot(curve, label=name, linestyle="-" if "/" in name else "--")
    axes.set(xlabel="rounds", ylabel=label, title=about)
    axes.grid(alpha=0.3)
    axes.legend(title="own / foreign", frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def rows_of(text: str) -> dict[str, dict[str, Any]]:
    """Return the rows by name: each has a share, and what of HACPO it changes."""
    found: dict[str, dict[str, Any]] = {}
    for name in text.split(","):
        share, *changes = name.split("+")
        own, slash, foreign = share.partition("/")
        if not (slash and own.isdecimal() and foreign.isdecimal() and int(own) > 0):
            raise argparse.ArgumentTypeError("must be like 8/0,4/4")
        if not set(changes) <= set(CHANGES):
            raise argparse.ArgumentTypeError(f"after + there must be one of {', '.join(CHANGES)}")
        found[name] = {"share": (int(own), int(foreign))}
        if changes:
            found[name]["changes"] = frozenset(changes)
    return found


def policy(text: str) -> str:
    if text not in (*WORLDS, "small") and not text.startswith("hf:"):
        raise argparse.ArgumentTypeError("must be linear, tiny, small or hf:DIR")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policy",
        type=policy,
        default="linear",
        help="what is trained: linear, tiny, small or hf:DIR",
    )
    parser.add_argument("--nodes", type=count, default=4, help="in the swarm, at least 2")
    parser.add_argument("--seeds", type=count, default=5, help="runs of each row")
    parser.add_argument("--rounds", type=count, default=150)
    parser.add_argument(
        "--rows",
        type=rows_of,
        help="own and foreign groups of each row, and what of HACPO it changes: 4/4+baseline+clip "
        "[default: 8/0,4/4,2/6, without a language model also 6/2]",
    )
    parser.add_argument("--unlike", choices=sorted(UNLIKE), help="in what nodes 1, 3, ... differ")
    parser.add_argument(
        "--loss", choices=sorted(LOSSES), help="[default: positive for tiny, else sapo]"
    )
    parser.add_argument(
        "--rate",
        type=float,
        help="learning rate; of linear that of plain gradient ascent, 8  [default: the policy's]",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="at which transformers write"
    )
    parser.add_argument(
        "--env",
        default="families",
        help="of language models, as of `shoal up`, or six families of reasoning-gym",
    )
    parser.add_argument(
        "--base",
        type=Path,
        default=Path("runs/sapo-small"),
        help="where what learnt from solved questions is kept",
    )
    parser.add_argument(
        "--solved",
        type=count,
        help="batches of solved questions to begin with  [default: small 900, hf: none]",
    )
    parser.add_argument("--device", default="cpu", help="of language models")
    parser.add_argument("--at-once", type=count, default=1, help="runs of language models at once")
    parser.add_argument(
        "--overlap",
        type=float,
        default=1.0,
        help="linear: length of a question's shared features, its own one being 1",
    )
    parser.add_argument(
        "--late", type=int, default=0, help="rounds that others' groups come late at most"
    )
    parser.add_argument(
        "--behind",
        type=int,
        help="versions of its author's policy that a group may be older  [default: any]",
    )
    parser.add_argument(
        "--figure", type=Path, help="draw the accuracy by rounds into this file (needs matplotlib)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="a line for each run; those that are there are not run again",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    if options.nodes < 2:
        parser.error("--nodes must be at least 2: a node alone has nobody to learn from")
    options.loss = options.loss or ("positive" if options.policy == "tiny" else "sapo")
    language = options.policy not in WORLDS
    if options.unlike == "size" and options.policy.startswith("hf:"):
        parser.error("--unlike size needs a policy of which there is a smaller one: not hf:DIR")
    options.solved = options.solved or (SMALL_SOLVED if options.policy == "small" else 0)
    settings = Settings(
        policy=options.policy,
        nodes=options.nodes,
        loss=LOSSES[options.loss],
        per=MEANS.get(options.loss, "token"),
        rate=options.rate,
        overlap=options.overlap,
        temperature=options.temperature,
        env=options.env,
        base=options.base,
        solved=options.solved,
        device=options.device,
        unlike=options.unlike,
    )
    default = LANGUAGE_SHARES if language else SHARES
    cases = options.rows or rows_of(",".join(f"{own}/{foreign}" for own, foreign in default))
    if not language and options.unlike is None:
        cases["poison"] = {"share": POISONED, "liar": options.nodes - 1}
        cases["trusting"] = {**cases["poison"], "trusting": True}
    about = {
        "policy": options.policy,
        "nodes": options.nodes,
        "rounds": options.rounds,
        "loss": options.loss,
        "rate": options.rate,
    }
    about |= {"overlap": options.overlap, "late": options.late, "behind": options.behind}
    if language:
        about |= {"env": options.env, "temperature": options.temperature, "solved": options.solved}
    if options.unlike:
        about["unlike"] = options.unlike
    made = (
        options.resume.read_text(encoding="utf-8").splitlines()
        if options.resume and options.resume.exists()
        else []
    )
    found = {
        (run["row"], run["seed"]): run for run in map(json.loads, made) if run["about"] == about
    }
    faults = {"late": options.late, "behind": options.behind, "unlike": options.unlike}
    left = [
        (name, seed) for seed in range(options.seeds) for name in cases if (name, seed) not in found
    ]

    def keep(name: str, seed: int, one: dict[str, Any]) -> None:
        found[name, seed] = {"about": about, "row": name, "seed": seed, **one}
        if options.resume is not None:
            with options.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[name, seed]) + "\n")

    if options.at_once == 1 or not language:
        for name, seed in left:
            keep(name, seed, run_one(settings, seed, options.rounds, {**cases[name], **faults}))
    else:
        torch.set_num_threads(1)  # two on busy cores took 17 times the seconds of one
        for node in range(options.nodes):
            prepare(settings, is_smaller(settings, node))  # so that they do not all do it
        with ProcessPoolExecutor(options.at_once, multiprocessing.get_context("spawn")) as pool:
            work = {
                pool.submit(run_one, settings, seed, options.rounds, {**cases[name], **faults}): (
                    name,
                    seed,
                )
                for name, seed in left
            }
            for done in as_completed(work):
                keep(*work[done], done.result())
    rows, curves = {}, {}
    print("            cumulative     sd   final", file=sys.stderr)
    for name in cases:
        runs = [found[name, seed] for seed in range(options.seeds)]
        base = [found[next(iter(cases)), seed] for seed in range(options.seeds)]
        row = rows[name] = row_of(runs, base)
        if options.unlike:
            row["kinds"] = kinds_of(runs, base, options.unlike)
        curves[name] = [
            statistics.fmean(each)
            for each in zip(*([*one["history"], one["final"]] for one in runs), strict=True)
        ]
        print(
            f"{name:>10} {row['cumulative']:11.1f} {row['sd']:6.1f} {row['final']:7.3f}",
            file=sys.stderr,
            flush=True,
        )
    if options.figure is not None:
        title = f"{options.nodes} nodes, the {options.policy} policy, {options.seeds} seeds"
        try:
            sums = {
                name: list(itertools.accumulate(curve[:-1], initial=0.0))
                for name, curve in curves.items()
            }
            draw(
                sums if language else curves,
                title,
                options.figure,
                "cumulative reward" if language else "right answers",
            )
        except ImportError:
            print(
                "bench: matplotlib is not installed: pip install -e '.[bench]', or leave --figure "
                "out.",
                file=sys.stderr,
            )
        except (OSError, ValueError) as error:
            print(
                f"bench: the figure could not be drawn ({error}): choose another --figure.",
                file=sys.stderr,
            )
    if options.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__}
        print(json.dumps({**about, "seeds": options.seeds, **machine, "rows": rows}))


if __name__ == "__main__":
    main()

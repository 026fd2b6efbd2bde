"""The benchmark of quality: its rows, its DDP against torch's, how it chooses, and that it goes on
where it was.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import _quality_table as table
from bench import _quality_train as train
from bench import quality
from bench._quality_plan import Cell
from shoal.optim.methods import METHODS as REGISTRY

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS, CONTEXT = 135_808, 64


@pytest.mark.slow(reason="trains methods from start to end")
def test_rows_bytes_and_resuming(tmp_path, program):
    file = tmp_path / "found" / "runs.jsonl"
    command = [
        "--peers",
        2,
        "--every",
        5,
        "--steps",
        10,
        "--batch",
        4,
        "--seeds",
        1,
        "--lr",
        0.01,
        "--json",
        "--resume",
        file,
    ]
    command += ["--methods", "ddp,diloco,noloco,streaming,sparseloco,noloco-overlap-muon"]
    done = program("quality.py", *command, OMP_NUM_THREADS="1")
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["complete"]
    rows = {row["method"]: row for row in result["rows"]}
    assert set(rows) == {
        "ddp",
        "diloco",
        "noloco",
        "streaming",
        "sparseloco",
        "noloco-overlap-muon",
    }
    keys = {
        "method",
        "codec",
        "peers",
        "every",
        "steps",
        "lr",
        "loss",
        "loss_sd",
        "seeds",
        "bytes_per_param_step",
    }
    for row in rows.values():
        assert keys <= set(row)
        assert (row["peers"], row["steps"], row["seeds"], row["loss_sd"]) == (2, 10, 1, None)
        assert 2 < row["loss"] < 6
        assert row["above_ddp"] == pytest.approx(row["loss"] / rows["ddp"]["loss"] - 1)
    assert rows["ddp"]["bytes_per_param_step"] == pytest.approx(4)
    for method in ("diloco", "noloco", "streaming", "noloco-overlap-muon"):
        assert rows[method]["bytes_per_param_step"] == pytest.approx(4 / 5)
    sparse, whole = (rows[name]["bytes_per_param_step"] for name in ("sparseloco", "diloco"))
    assert 0 < sparse < whole / 50
    assert "against ddp" in done.stderr

    before = file.read_bytes()
    assert before.count(b"\n") == 6
    file.write_bytes(before[:-20])  # as if stopped while writing the last line
    again = program("quality.py", *command, OMP_NUM_THREADS="1")
    assert json.loads(again.stdout)["rows"] == result["rows"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["method"] for line in lines] == [
        json.loads(line)["method"] for line in before.splitlines()
    ]
    assert lines[:5] == [json.loads(line) for line in before.splitlines()[:5]]


def test_every_method_of_the_library_is_compared():
    assert {recipe.name for recipe in quality.METHODS.values()} == {*REGISTRY, None}
    assert {len(recipe.settings) for recipe in quality.METHODS.values()} == {3}


def test_muon_has_the_matrices_of_the_blocks():
    spec = train.Spec("ddp-muon", "float32", 4, 1, 10, 32, 0.02, (), 0)
    task = train.QualityText()
    model = task.model()
    combined = train._inner(task, model, spec)
    names = {id(p): name for name, p in model.named_parameters()}
    of = [{names[id(p)] for p in group["params"]} for group in combined.param_groups]
    layers = ("attention.qkv", "attention.out", "up", "down")
    assert of == [
        {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in layers},
        {*names.values()} - of[0],
    ]
    muon, adamw = combined.param_groups
    assert (muon["lr"], adamw["lr"], adamw["betas"], muon["weight_decay"]) == (
        0.02,
        pytest.approx(0.006),
        (0.9, 0.95),
        0,
    )


def test_report_is_written_between_its_marks(tmp_path, called, program):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    run = {
        "codec": "float32",
        "peers": 4,
        "every": 50,
        "steps": 500,
        "batch": 32,
        "outer": {"lr": 0.7},
        "bytes_per_token": 21.22,
        "tokens": 256_000,
    }
    rates = [
        ("ddp", 0.01, 0, 2.0),
        ("diloco", 0.01, 0, 2.3),
        ("diloco", 0.02, 0, 2.2),
        ("diloco", 0.02, 1, 2.4),
    ]
    lines = [
        {
            **run,
            "method": method,
            "lr": lr,
            "seed": seed,
            "loss": loss,
            "validation": loss,
            "loss_averaged": loss,
        }
        for method, lr, seed, loss in rates
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.write_text(f"above\n{quality.BEGIN}\nold\n{quality.END}\nbelow\n")
    program("quality.py", "--report", file, "--into", page)
    text = page.read_text()
    assert text.startswith(f"above\n{quality.BEGIN}\n")
    assert text.endswith(f"{quality.END}\nbelow\n")
    assert "old" not in text
    assert (
        "| diloco | float32 | 50 | 0.02 | lr 0.7 | 2.300 ± 0.141 |  | +10.0 % | 0.12 | 2 |" in text
    )  # of seed 0
    page.write_text("no marks")
    done = called(quality.main, "--report", file, "--into", page)
    assert done.returncode == 2
    assert "no place" in done.stderr


@pytest.mark.ci
def test_data_parallel_equals_torch_over_gloo(tmp_path):
    spec = train.Spec("ddp", "float32", 2, 1, 10, 8, 1e-2, (("beta2", 0.99),), 3)
    store, out = tmp_path / "store", tmp_path / "weights"
    script = ROOT / "tests" / "bench" / "_gloo_ddp.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", "10", str(store), str(out)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    (model,), sent, tokens = train.data_parallel(spec)
    theirs = torch.load(out, weights_only=True)
    for ours, other in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(ours.detach(), other, rtol=0, atol=1e-5)
    assert (sent, tokens) == (10 * 4 * PARAMETERS, 10 * 4 * CONTEXT)


@pytest.mark.parametrize(
    ("best", "rates"),
    [(1e-3, (6e-3, 1.2e-2, 3e-3)), (1.1e-2, (6e-3, 1.2e-2, 2.4e-2)), (1, (6e-3, 1.2e-2, 2.4e-2))],
)
@pytest.mark.parametrize("method", ["ddp", "diloco", "noloco", "sparseloco"])
def test_every_method_is_tuned_by_five_runs(best, rates, method):
    recipe = quality.METHODS[method]
    default = tuple(recipe.settings[2].items())  # the last is the best here

    class Runner:
        def __init__(self):
            self.results = {}

        def __call__(self, specs):
            for spec in specs:
                value = abs(spec.lr - best) + (100 if spec.outer != default else 0)
                self.results[spec] = {
                    **dataclasses.asdict(spec),
                    "outer": dict(spec.outer),
                    "validation": value,
                }
                yield self.results[spec]

    runner = Runner()
    lr, setting = quality.Quality(runner, 500, 32, None).tuned(method, 50)
    tried = list(runner.results)
    assert tuple(spec.lr for spec in tried[2:]) == rates
    assert lr == min(rates, key=lambda rate: abs(rate - best))
    assert setting == recipe.settings[2]
    assert len(tried) == 5
    assert {(spec.peers, spec.steps, spec.seed) for spec in tried} == {(4, 500, 0)}


def test_overlapped_gossip_takes_the_blocking_rate():
    """Overlapped gossip takes the setting and the long rate of blocking."""

    class Runner:
        def __init__(self):
            self.results = {}

        def __call__(self, specs):
            return [self.one(spec) for spec in specs]

        def one(self, spec):
            # The best: the last setting at 2e-2, and in long runs at half of it.
            value = abs(spec.lr - (1e-2 if spec.steps == 3000 else 2e-2)) + 100 * abs(
                dict(spec.outer)["lr"] - 1.0
            )
            return self.results.setdefault(
                spec, {**dataclasses.asdict(spec), "outer": dict(spec.outer), "validation": value}
            )

    runner = Runner()
    blocking = Cell("noloco-muon", "float32", 4, 50, 3000)
    quality.Quality(runner, 500, 32, None).run(
        Cell("noloco-overlap-muon", "int8", 8, 10, 3000, 50), (0, 1), blocking
    )
    chosen = tuple(quality.METHODS["noloco-muon"].settings[2].items())
    overlapped = [spec for spec in runner.results if spec.method == "noloco-overlap-muon"]
    assert overlapped == [
        train.Spec("noloco-overlap-muon", "int8", 8, 10, 3000, 32, 1e-2, chosen, seed)
        for seed in (0, 1)
    ]
    tuned = [spec for spec in runner.results if spec not in overlapped]
    assert {(spec.method, spec.codec, spec.peers, spec.every) for spec in tuned} == {
        ("noloco-muon", "float32", 4, 50)
    }
    assert [(spec.lr, spec.steps) for spec in tuned[3:]] == [
        (4e-2, 500),
        (1e-2, 500),
        (2e-2, 3000),
        (1e-2, 3000),
    ]


def test_overlapped_is_compared_seed_by_seed():
    """Overlapped is compared seed by seed with blocking and with its own data parallel."""
    run = {
        "codec": "float32",
        "peers": 4,
        "every": 50,
        "steps": 500,
        "batch": 32,
        "lr": 0.02,
        "outer": {},
        "bytes_per_token": 21.22,
        "tokens": 256_000,
    }
    found = {
        ("noloco-muon", 0): 2.0,
        ("noloco-muon", 1): 2.5,
        ("noloco-overlap-muon", 0): 2.2,
        ("ddp", 0): 1.0,
        ("ddp-muon", 0): 1.6,
    }
    lines = [
        {
            **run,
            "method": method,
            "seed": seed,
            "loss": loss,
            "validation": loss,
            "loss_averaged": loss,
        }
        | ({"every": 1} if method.startswith("ddp") else {})
        for (method, seed), loss in found.items()
    ]
    assert (
        "| Muon | 4 | 50 | 500 | 2.250 ± 0.354 | 2.200 | +10.0 % | +37.5 % | 1 |"
        in table.markdown(table.rows(lines))
    )

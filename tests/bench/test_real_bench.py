"""The benchmark with a real model, here with a tiny one: its report, and that a second call goes on where the first was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'shoal[hf]'")
    from tests.node.data.tokenizers_made_here import train

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, **small)).save_pretrained(tmp_path / "model")
    file = train(tmp_path / "tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(file)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow(reason="two real nodes together, and both alone")
def test_a_report_with_every_figure_that_a_second_call_repeats(tiny, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "bench" / "real.py"),
        "--model",
        str(tiny),
        "--nodes",
        "2",
        "--steps",
        "4",
        "--every",
        "2",
    ]
    command += ["--folder", str(tmp_path / "kept"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True, env=environment)
    report = json.loads(done.stdout)
    assert (report["nodes"], report["steps"], report["exchanges"], report["pairs_none"]) == (2, 4, 8, 0)  # two fragments a round
    assert report["bytes_sent"] > 2 * 2 * report["params"] * 4
    assert report["peak_mb"] > 100
    assert 0 <= report["wait_s"] < report["wall_s"] < report["seconds"]
    assert report["loss_last"] < report["loss_first"]
    assert report["loss_alone"] == pytest.approx(sum(report["alone"]) / 2)
    (tmp_path / "kept" / "alone-0" / "result.json").unlink()  # not read again
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environment)
    assert json.loads(again.stdout) == report
    other = subprocess.run([*command, "--steps", "5"], capture_output=True, text=True, timeout=100, env=environment)
    assert other.returncode == 1
    assert "other settings" in other.stderr

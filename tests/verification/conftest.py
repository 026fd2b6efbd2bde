"""Puts the tiny model, which the benchmark uses too, within reach of these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

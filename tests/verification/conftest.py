"""Puts the benchmarks within reach: these tests and bench/verification.py share a tiny model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

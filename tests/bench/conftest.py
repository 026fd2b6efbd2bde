"""The benchmarks are no installed package: their tests take them from the repository, however pytest was called."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

"""The moving picture of the README: a real run of four nodes, one of which is killed and comes
back, as an animated SVG.

python bench/moving_picture.py --record run.jsonl --out docs/training.svg     # runs the nodes, and
draws python bench/moving_picture.py --replay run.jsonl --out docs/training.svg     # draws again
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._moving_picture import draw, read
from bench._recorded_run import record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--record", type=Path, help="run the nodes, and keep the recording in this new file"
    )
    source.add_argument("--replay", type=Path, help="an earlier recording")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training")
    parser.add_argument("--every", type=int, default=25, help="inner steps in a round")
    parser.add_argument("--out", type=Path, help="the picture; default: none")
    given = parser.parse_args()
    if given.record:
        with tempfile.TemporaryDirectory() as folder:
            record(given.record, Path(folder), seconds=given.seconds, every=given.every)
    if given.out:
        given.out.write_text(draw(read(given.record or given.replay)), encoding="utf-8")


if __name__ == "__main__":
    main()

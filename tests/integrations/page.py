"""Writes docs/your-script.md: the diffs between the scripts beside this file, and what stands in `TEXTS`.

python tests/integrations/page.py
"""

import difflib
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parents[2] / "docs" / "your-script.md"
HEAD = """# Your script in Shoal

What changes in a script that trains already. Each program below stands in `tests/integrations/scripts`, once plain and
once in a swarm; the tests run both, with two peers. The diffs are made from these files and leave out indentation. The
first peer creates the swarm and shows `session.link`; all others replace `shoal.create(state=model, ...)` by
`shoal.join(LINK, state=model)`.

In all of them the optimizer, its groups, the rate and the loop stay as they are. Peers should train on different data:
use `session.shard`, or another seed. The weights of whoever joins are replaced by the swarm's.
"""
TEXTS = {
    "nanogpt": (
        "A loop like nanoGPT's",
        """Two lines and a `with`, into which the loop moves. Groups with and without weight decay are no matter: peers average in
the model's order. `optimizer.state_dict()` in the checkpoint holds the outer state too, so that a run goes on exactly;
load it into the session's optimizer, as here, and not into the bare one. With the defaults the step never waits: a
quarter of the model is averaged at a time while training goes on.""",
    ),
    "trainer": (
        "The Trainer of transformers",
        """A callback, and nothing in the arguments. The session is finished before the last checkpoint is saved and before the
best model is loaded, so `load_best_model_at_end` ends with exactly that checkpoint. Checkpoints hold the outer state,
and `trainer.train(resume_from_checkpoint=True)` goes on from it. `SwarmCallback(session, evaluate="slow")` evaluates
the averaged weights.""",
    ),
    "grpo": (
        "GRPOTrainer of trl",
        """The same callback: trl's trainers are Trainers. Each peer writes and judges its own completions and averages the policy.
To share rollouts as well, see [Reinforcement learning](rl.md).""",
    ),
    "lightning_fit": (
        "Lightning",
        """A callback. Only steps of the optimizer count, not accumulated batches. Lightning's own checkpoints hold the outer
state. Where `EarlyStopping` looks at a training epoch, its checkpoint is saved before the last mean.""",
    ),
    "accelerate_loop": (
        "accelerate",
        """The session's optimizer is prepared in place of the inner one. Micro-batches of `accumulate` are no steps, whichever of
the two is wrapped first. `accelerator.save_state` and `load_state` keep and restore the outer state too. Call
`session.finish()` before you load the best weights: else the last mean comes into them.""",
    ),
    "torchft_diloco": (
        "A DiLoCo loop of torchft",
        """Fragments are the same modules, named at `create`; whoever joins takes them from the swarm. No launcher, no store and no
lighthouse: the link is enough. The outer optimizer is Nesterov SGD by the settings `lr` and `momentum`. The plain
script is not run here, since it needs a lighthouse of torchft's.""",
    ),
}


def diff(plain: str, swarm: str) -> str:
    """Return the changed lines between two files, whatever their indentation, with a line of context."""
    old, new = plain.splitlines(), swarm.splitlines()
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in old], [line.strip() for line in new], autojunk=False)
    lines: list[str] = []
    for group in matcher.get_grouped_opcodes(1):
        for tag, a, b, c, d in group:
            if tag == "equal":
                lines += [f"  {line}".rstrip() for line in new[c:d]]
            else:
                lines += [f"- {line}".rstrip() for line in old[a:b]] + [f"+ {line}".rstrip() for line in new[c:d]]
        lines.append("  ...")
    return "\n".join(lines[:-1])


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for name, (title, text) in TEXTS.items():
        changes = diff(*((SCRIPTS / f"{name}{kind}.py").read_text(encoding="utf-8") for kind in ("", "_shoal")))
        parts.append(f"\n## {title}\n\n```diff\n{changes}\n```\n\n{text}\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

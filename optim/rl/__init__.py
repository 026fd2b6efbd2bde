"""Losses of reinforcement learning: from rewards to the number that an update minimises.

    rewards = torch.tensor([...])                   # recomputed here, for foreign groups too
    batch = Completions(new, old, mask, group_advantages(rewards, group))
    Objective(LOSSES["cispo"])(batch).backward()

A group is one question with its completions. All losses, as formulas: docs/rl.md, "Losses".
"""
